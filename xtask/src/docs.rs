//! `cargo xtask docs`: writes the samples and figures of README.md, from runs on this machine; the files that
//! `health-agent config` prints, which are the reference of settings and the example file; and the OpenAPI document.

use std::fs;
use std::process::Command;

use anyhow::Context as _;

use crate::privilege::as_root;
use crate::process::{output, run};
use crate::workspace::Workspace;
use crate::{openapi, packages, setup};

/// Commands under `health-agent config`, and the files with their output.
const PRINTED: [(&str, &str); 2] = [
    ("reference", "docs/settings.md"),
    ("example", "deploy/config.yaml"),
];

pub(crate) fn write(workspace: &Workspace) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    packages::require(packages::BED)?;
    openapi::write(workspace)?;
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
    let agent = workspace.release_binary("health-agent");
    readme.arg(&agent);
    run(&mut readme)?;
    for (command, page) in PRINTED {
        let printed = output(Command::new(&agent).args(["config", command]))?;
        let text = printed.with_context(|| format!("`config {command}` failed"))?;
        let page = workspace.root().join(page);
        fs::write(&page, text).with_context(|| format!("cannot write {}", page.display()))?;
    }
    Ok(())
}
