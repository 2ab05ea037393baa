//! Runs other programs. Errors name the program that failed.

use std::env;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, anyhow, bail};

/// Runs a command to completion, with output to the terminal.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .map_err(|error| cannot_run(command, error))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs a command to completion. Returns its standard output, or `None` if it failed.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<Option<String>> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| cannot_run(command, error))?;
    if !output.status.success() {
        return Ok(None);
    }
    String::from_utf8(output.stdout)
        .map(Some)
        .with_context(|| format!("{} printed something that is not UTF-8", shown(command)))
}

/// The error for a program that could not be started.
pub(crate) fn cannot_run(command: &Command, error: std::io::Error) -> anyhow::Error {
    let program = command.get_program().to_string_lossy();
    match error.kind() {
        ErrorKind::NotFound => anyhow!("{program} is not installed"),
        _ => anyhow!(error).context(format!("cannot run {program}")),
    }
}

/// The command line, for messages.
pub(crate) fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Whether a program is installed.
pub(crate) fn installed(program: &str) -> bool {
    find(program).is_some()
}

/// The path of a program. Searches system folders even if they are missing from `PATH`, as is common for non-root
/// users.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
}
