//! `cargo xtask docs`: the samples and figures of README.md, from runs on this machine.

use crate::privilege::as_root;
use crate::process::run;
use crate::workspace::Workspace;
use crate::{packages, setup};

pub(crate) fn write(workspace: &Workspace) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    packages::require(packages::BED)?;
    run(workspace.cargo()?.args([
        "build",
        "--release",
        "--package=health-agent",
        "--package=tests",
        "--bin=health-agent",
        "--bin=readme",
    ]))?;
    let mut readme = as_root(
        workspace.release_binary("readme"),
        "making network namespaces",
    )?;
    readme.arg(workspace.root().join("README.md"));
    readme.arg(workspace.release_binary("health-agent"));
    run(&mut readme)
}
