//! Root privileges for the parts that need them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::process;

/// Whether this process already runs as root.
pub(crate) fn is_root() -> anyhow::Result<bool> {
    let own = fs::metadata("/proc/self").context("cannot read /proc/self")?;
    Ok(own.uid() == 0)
}

/// A command that runs as root: directly if this process is root, otherwise through sudo.
pub(crate) fn as_root(program: impl AsRef<OsStr>, what_for: &str) -> anyhow::Result<Command> {
    if is_root()? {
        return Ok(Command::new(program));
    }
    require_sudo(what_for)?;
    let mut sudo = Command::new("sudo");
    sudo.arg("--").arg(program);
    Ok(sudo)
}

/// Fails unless sudo is available.
pub(crate) fn require_sudo(what_for: &str) -> anyhow::Result<()> {
    ensure!(
        process::installed("sudo"),
        "{what_for} needs root, and sudo is not installed; run this as root"
    );
    Ok(())
}
