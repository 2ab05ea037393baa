//! `cargo xtask check-aarch64`: whether everything compiles for the other architecture that hosts have.

use crate::process::run;
use crate::workspace::Workspace;
use crate::{packages, setup};

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Compiles all crates and tests for it, but links and runs none: C parts are built by Debian's compiler for
/// that architecture.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    packages::require(packages::AARCH64)?;
    setup::target(workspace, TARGET)?;
    run(workspace
        .cargo()?
        .args(["check", "--target", TARGET, "--all-targets"])
        .args(["--workspace", "--exclude=health-ebpf"]))
}
