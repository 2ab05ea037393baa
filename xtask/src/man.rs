//! `cargo xtask man`: man pages of the commands and of the settings file.

use std::path::{self, PathBuf};

use anyhow::Context as _;

use crate::process::run;
use crate::setup;
use crate::workspace::Workspace;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder to write them to, created if missing
    folder: PathBuf,
}

pub(crate) fn write(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let folder = path::absolute(&args.folder)
        .with_context(|| format!("cannot find {}", args.folder.display()))?;
    setup::setup(workspace)?;
    let mut cargo = workspace.cargo()?;
    cargo.args(["run", "--package=health-cli", "--example=man"]);
    run(cargo.arg("--").arg(folder))
}
