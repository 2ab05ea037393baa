//! `cargo xtask check-aarch64`: compiles the architecture-dependent code for aarch64, the other supported host
//! architecture.

use crate::arch::Arch;
use crate::process::run;
use crate::workspace::Workspace;
use crate::{packages, setup};

/// The crates with eBPF and system calls; those above them are plain Rust.
const CRATES: &[&str] = &[
    "--package=health-common",
    "--package=health-net",
    "--package=health-datapath",
    "--package=vm-init",
];

/// Compiles [`CRATES`] without tests, and neither links nor runs anything. Debian's compiler for that architecture
/// builds the C parts.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    let arch = Arch::Aarch64;
    packages::require(&packages::cross_compiler(arch))?;
    let target = arch.shared_target();
    setup::target(workspace, target)?;
    run(workspace
        .cargo()?
        .args(["check", "--target", target])
        .args(CRATES))
}
