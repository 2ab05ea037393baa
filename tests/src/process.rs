//! Runs the tools that the bed and the tests call, to completion.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write as _};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::unistd::Pid;

use crate::wait_for;

/// The result of a program that has exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOutput {
    /// The command line.
    pub command: String,
    /// The exit code; `None` if a signal ended the program.
    pub code: Option<i32>,
    /// The standard output.
    pub stdout: String,
    /// The standard error.
    pub stderr: String,
}

impl RunOutput {
    /// Returns the standard output, or an error if the program failed.
    pub fn success(self) -> anyhow::Result<String> {
        ensure!(
            self.code == Some(0),
            "{} ended with {}: {}",
            self.command,
            self.code
                .map_or("a signal".to_owned(), |code| format!("code {code}")),
            self.stderr.trim_end()
        );
        Ok(self.stdout)
    }

    pub(crate) fn from_output(command: String, output: Output) -> Self {
        Self {
            command,
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Runs a command to completion, with no input.
pub fn run(command: &mut Command) -> anyhow::Result<RunOutput> {
    let shown = shown(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {shown}"))?;
    Ok(RunOutput::from_output(shown, output))
}

/// Runs a command that must exit by itself within `deadline`. Kills it and fails otherwise.
pub fn run_within(deadline: Duration, command: &mut Command) -> anyhow::Result<RunOutput> {
    let shown = shown(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {shown}"))?;
    let ended = wait_for("it to exit", deadline, || {
        child.try_wait().context("cannot wait for it")
    });
    if ended.is_err() {
        child
            .kill()
            .with_context(|| format!("cannot kill {shown}"))?;
    }
    let output = child
        .wait_with_output()
        .with_context(|| format!("cannot wait for {shown}"))?;
    let ran = RunOutput::from_output(shown, output);
    ended.with_context(|| format!("{} (it said: {})", ran.command, ran.stderr.trim_end()))?;
    Ok(ran)
}

/// Runs a command to completion, with `input` on its standard input.
pub fn run_with_input(command: &mut Command, input: &str) -> anyhow::Result<RunOutput> {
    let shown = shown(command);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {shown}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin
            .write_all(input.as_bytes())
            .with_context(|| format!("cannot write to {shown}"))?;
    }
    let output = child
        .wait_with_output()
        .with_context(|| format!("cannot wait for {shown}"))?;
    Ok(RunOutput::from_output(shown, output))
}

/// A running program, which is killed on drop.
#[derive(Debug)]
pub struct Running(Child);

impl Running {
    /// Starts a program with no input and discards its standard output.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        Self::start_with(command, Stdio::null(), Stdio::inherit())
    }

    /// Starts a program with no input and writes its standard error to a file.
    pub fn start_logging(command: &mut Command, log: File) -> anyhow::Result<Self> {
        Self::start_with(command, Stdio::null(), log.into())
    }

    /// Starts a program with no input, which inherits standard output and standard error.
    pub fn start_printing(command: &mut Command) -> anyhow::Result<Self> {
        Self::start_with(command, Stdio::inherit(), Stdio::inherit())
    }

    fn start_with(command: &mut Command, stdout: Stdio, stderr: Stdio) -> anyhow::Result<Self> {
        let shown = shown(command);
        command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .map(Self)
            .with_context(|| format!("cannot run {shown}"))
    }

    /// Waits for the program to exit, and fails unless it succeeded.
    pub fn success(mut self) -> anyhow::Result<()> {
        let status = self.0.wait().context("cannot wait for a process")?;
        ensure!(
            status.success(),
            "process {} ended with {status}",
            self.0.id()
        );
        Ok(())
    }

    /// Process ID of the program.
    pub fn pid(&self) -> Pid {
        // A process ID is a positive i32 that the standard library returns as u32.
        Pid::from_raw(self.0.id().cast_signed())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait().map(drop)) {
            print_line(format_args!("cannot kill process {}: {error}", self.0.id()));
        }
    }
}

/// Prints a line on standard error. Unlike `eprintln!`, it does not panic when the reader is gone, since that would end
/// a bed before it is removed.
pub fn print_line(message: impl Display) {
    let _ = writeln!(io::stderr(), "{message}");
}

/// Formats a command line for messages and for copying to a shell.
pub fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
