//! The programs of a Kubernetes cluster.

use anyhow::Context as _;

use crate::packages;
use crate::privilege::as_root;
use crate::process::run;
use crate::workspace::Workspace;

/// Installs what a Kubernetes cluster needs, and builds the programs of Kubernetes that are missing.
pub(crate) fn setup(workspace: &Workspace) -> anyhow::Result<()> {
    packages::require(packages::KUBERNETES)?;
    let script = workspace.root().join("tests/kubernetes/build.sh");
    let mut build = as_root("bash", "installing a compiler for Go")?;
    build.arg(script).arg(workspace.kubernetes());
    run(&mut build).context("cannot build the programs of Kubernetes")
}
