//! `cargo xtask helm`: the Helm chart of `deploy/helm`, from the objects of `deploy/kubernetes`.

use crate::process::run;
use crate::setup;
use crate::workspace::Workspace;

/// Makes the test write the chart instead of comparing it.
const WRITE: &str = "HEALTH_AGENT_WRITE_CHART";

pub(crate) fn write(workspace: &Workspace) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    let mut cargo = workspace.cargo()?;
    cargo.args(["test", "--package=tests", "--lib"]);
    run(cargo
        .args(["--", "deploy::tests::the_chart_in_the_repository"])
        .env(WRITE, "1"))
}
