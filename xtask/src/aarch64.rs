//! `cargo xtask check-aarch64`: whether everything compiles for the other architecture that hosts have.

use crate::arch::Arch;
use crate::process::run;
use crate::workspace::Workspace;
use crate::{packages, setup};

/// Compiles all crates and tests for it, but links and runs none: C parts are built by Debian's compiler for
/// that architecture.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    let arch = Arch::Aarch64;
    packages::require(&packages::cross_compiler(arch))?;
    let target = arch.shared_target();
    setup::target(workspace, target)?;
    run(workspace
        .cargo()?
        .args(["check", "--target", target, "--all-targets"])
        .args(["--workspace", "--exclude=health-ebpf"]))
}
