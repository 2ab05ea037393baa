//! `cargo xtask fuzz`: runs random and mutated packets through the datapath's programs.

use std::os::unix::process::CommandExt as _;

use crate::privilege::as_root;
use crate::process::{cannot_run, run};
use crate::setup;
use crate::workspace::Workspace;

pub(crate) fn fuzz(workspace: &Workspace, words: &[String]) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    run(workspace
        .cargo()?
        .args(["build", "--release", "--package=tests", "--bin=fuzz"]))?;

    let mut fuzz = as_root(workspace.release_binary("fuzz"), "loading programs")?;
    fuzz.args(words);
    let error = fuzz.exec();
    Err(cannot_run(&fuzz, error))
}
