//! `cargo xtask openapi`: the OpenAPI document of the agent's API.

use crate::process::run;
use crate::setup;
use crate::workspace::Workspace;

/// Makes the test write the document instead of comparing it.
const WRITE: &str = "HEALTH_AGENT_WRITE_OPENAPI";

pub(crate) fn write(workspace: &Workspace) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    let mut cargo = workspace.cargo()?;
    cargo.args(["test", "--package=health-server", "--lib"]);
    run(cargo.args(["--", "openapi::tests"]).env(WRITE, "1"))
}
