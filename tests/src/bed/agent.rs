//! A node's agent: its command line, process and log.

use std::fs::{self, File, OpenOptions};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::RUNTIME_ROOT;
use super::fabric::netns_path;
use super::mounts::BPFFS;
use crate::{PATIENCE, wait_for};

/// Number of log lines to show in the error when an agent dies or hangs.
const LOG_TAIL: usize = 8;

/// Path of the agent's binary, which cargo puts in the folder of this crate's programs or its parent.
pub fn binary() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own file")?;
    let found = own
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join("health-agent"))
        .find(|path| path.is_file());
    found.with_context(|| {
        format!(
            "no health-agent beside {}; run: cargo build --package health-agent",
            own.display()
        )
    })
}

/// Path of the preloaded library that gives an agent its own clock, as cargo builds it.
pub(super) fn shifted_clock() -> anyhow::Result<PathBuf> {
    let program = binary()?;
    let library = program
        .with_file_name("examples")
        .join("libshifted_clock.so");
    ensure!(
        library.is_file(),
        "{} is missing; run: cargo build --package tests --examples",
        library.display()
    );
    Ok(library)
}

/// How to start a node's agent and where it keeps its files.
#[derive(Clone, Debug)]
pub(super) struct AgentSpec {
    pub(super) binary: PathBuf,
    pub(super) name: String,
    /// Flags that select the node registry.
    pub(super) registry: Vec<String>,
    pub(super) extra: Vec<String>,
    /// The library that gives the agent its own clock, if any.
    pub(super) shifted_clock: Option<PathBuf>,
}

impl AgentSpec {
    pub(super) fn runtime_dir(&self) -> PathBuf {
        Path::new(RUNTIME_ROOT).join(&self.name)
    }

    pub(super) fn state_dir(&self) -> PathBuf {
        self.runtime_dir().join("state")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.runtime_dir().join("agent.log")
    }

    /// File with the offset in seconds of the agent's wall clock from the host's, in the format that the library reads.
    pub(super) fn clock(&self) -> PathBuf {
        self.runtime_dir().join("clock")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.runtime_dir().join("health.sock")
    }

    /// The command line to call this agent's binary, without a subcommand.
    pub(super) fn cli(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .arg("--netns")
            .arg(netns_path(&self.name))
            .arg("--instance")
            .arg(&self.name)
            .arg("--runtime-dir")
            .arg(self.runtime_dir())
            .arg("--state-dir")
            .arg(self.state_dir())
            .args(["--bpf-root", BPFFS]);
        command
    }

    /// The daemon's command line.
    pub(super) fn daemon(&self) -> Command {
        let mut command = self.cli();
        command
            .args(["run", "--node-name", &self.name])
            .args(&self.registry)
            .args(&self.extra);
        if let Some(library) = &self.shifted_clock {
            command
                .env("LD_PRELOAD", library)
                .env("HEALTH_CLOCK_SHIFT", self.clock());
        }
        command
    }
}

/// An agent process that the bed started.
#[derive(Debug)]
pub(super) struct AgentProcess {
    child: Child,
}

impl AgentProcess {
    /// Starts the agent and appends its standard error to its log.
    pub(super) fn spawn(spec: &AgentSpec) -> anyhow::Result<Self> {
        let log = append_to(&spec.log())?;
        let child = spec
            .daemon()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            // Only the bed gets Ctrl-C from a terminal; it then stops the agents in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", spec.binary.display()))?;
        Ok(Self { child })
    }

    pub(super) fn pid(&self) -> Pid {
        // A process ID is a positive i32 that the standard library returns as u32.
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Waits until the agent serves its API.
    pub(super) fn wait_serving(&mut self, spec: &AgentSpec) -> anyhow::Result<()> {
        let mut died = None;
        wait_for("the agent's socket", PATIENCE, || {
            if let Err(error) = self.check_alive(spec) {
                died = Some(error);
                return Ok(Some(()));
            }
            let connected = UnixStream::connect(spec.socket());
            Ok(connected.is_ok().then_some(()))
        })
        .with_context(|| format!("agent of {} (log: {})", spec.name, spec.log().display()))?;
        match died {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Fails with the end of the agent's log if the agent has exited.
    pub(super) fn check_alive(&mut self, spec: &AgentSpec) -> anyhow::Result<()> {
        match self.child.try_wait().context("cannot wait for the agent")? {
            None => Ok(()),
            Some(status) => bail!(
                "agent of {} ended ({status}); its log ends with\n{}",
                spec.name,
                log_tail(&spec.log())
            ),
        }
    }

    pub(super) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        match kill(self.pid(), signal) {
            // ESRCH: the agent has already exited.
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(errno) => Err(errno).with_context(|| format!("cannot signal agent {}", self.pid())),
        }
    }

    /// Waits for the agent to exit, and kills it if that takes too long.
    pub(super) fn reap(mut self) -> anyhow::Result<()> {
        let ended = wait_for("the agent to end", PATIENCE, || {
            self.child.try_wait().context("cannot wait for the agent")
        });
        if ended.is_err() {
            self.child.kill().context("cannot kill the agent")?;
            self.child.wait().context("cannot wait for the agent")?;
        }
        ended.map(drop)
    }
}

fn append_to(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))
}

pub(super) fn log_tail(path: &Path) -> String {
    let log = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_TAIL)..].join("\n")
}
