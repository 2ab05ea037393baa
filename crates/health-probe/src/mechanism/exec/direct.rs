//! Runs commands from this host in the environment of a container's process: `health_net::inside`.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use health_net::inside::{Order, Report, own_program};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

use super::group::{Group, GroupError};
use super::wait::{self, Start, Waited, wait};
use super::{OUTPUT_LIMIT, judge, timed_out};
use crate::Outcome;
use crate::mechanism::{Deadline, failure, own_error};

/// Maximum number of bytes of a report.
const REPORT_LIMIT: u64 = 4096;
/// How long a probe whose command has exited waits for what ends by itself: the output, the helper, the group.
const REST: Duration = Duration::from_millis(200);
/// How long [`Group::end`] tries to kill and remove what a run leaves behind, such as one that took too long. After
/// that, the next run does it.
const CLEAN_UP: Duration = Duration::from_secs(30);
/// How long the helper may take to exit before that; then it is killed. It normally exits with the command's processes.
const HELPER: Duration = Duration::from_secs(1);

/// A command to run in the environment of a process.
#[derive(Clone, Debug)]
pub struct DirectExec {
    /// A process of the container, such as its first one.
    pub pid: u32,
    /// When that process started, in ticks since boot (field 22 of `/proc/PID/stat`), if known. Guards against a later
    /// process with the same PID.
    pub started: Option<u64>,
    /// Identifies the probe on this host. Runs of probes with the same name never overlap.
    pub name: String,
    /// The command and its arguments; must not be empty. No shell is involved.
    pub command: Vec<String>,
    /// The helper program: one that calls `health_net::inside::serve` first. `None` for the running program.
    pub program: Option<PathBuf>,
}

/// Runs the command once.
pub async fn probe(probe: &DirectExec, deadline: Deadline) -> Outcome {
    if probe.command.is_empty() {
        return own_error("no command to run");
    }
    let (pid, name) = (probe.pid, probe.name.clone());
    // Control group files may be slow to access.
    let made = spawn_blocking(move || Group::new(pid, &name)).await;
    let group = match made {
        Ok(Ok((group, earlier))) => {
            let mut run = Run {
                group,
                child: None,
                is_over: false,
            };
            for group in earlier {
                if !group.end(deadline.at()).await {
                    return failure(format!(
                        "timeout: processes of an earlier run did not end within {:?}",
                        deadline.timeout()
                    ));
                }
            }
            if let Err(error) = run.start(probe) {
                return own_error(error);
            }
            run
        }
        Ok(Err(error)) => return own_error(text(&error)),
        Err(error) => return own_error(error.to_string()),
    };
    group.attend(probe, deadline).await
}

fn text(error: &GroupError) -> String {
    format!("cannot run the command: {error}")
}

/// A command that may be running. Dropping it kills the processes, and cleans up the rest in the background.
struct Run {
    group: Group,
    child: Option<Child>,
    /// Whether nothing is left of the run.
    is_over: bool,
}

impl Run {
    fn start(&mut self, probe: &DirectExec) -> Result<(), String> {
        let order = Order {
            pid: probe.pid,
            started: probe.started,
            group: self.group.procs(),
            command: probe.command.iter().map(Into::into).collect(),
        };
        let program = probe.program.as_deref().unwrap_or_else(|| own_program());
        let mut helper = Command::from(order.helper(program));
        helper
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = helper
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", program.display()))?;
        self.child = Some(child);
        Ok(())
    }

    async fn attend(mut self, probe: &DirectExec, deadline: Deadline) -> Outcome {
        let pipes = self
            .child
            .as_mut()
            .and_then(|child| Some((child.stdout.take()?, child.stderr.take()?)));
        let Some((stdout, stderr)) = pipes else {
            return own_error("the helper's output is not piped");
        };
        let mut output = Output::of(stdout);
        let reported = async {
            tokio::select! {
                reported = read_report(stderr) => reported,
                never = output.read() => match never {},
            }
        };
        let report = match wait(deadline, reported, &mut InGroup(&self.group)).await {
            Waited::Ended(report) => report,
            Waited::TooLong => return timed_out(&probe.command, deadline.timeout()),
            // If this host did not even start the command, we know nothing about the container.
            Waited::NotStarted => {
                return own_error(format!(
                    "the command was not started within {:?}",
                    deadline.timeout()
                ));
            }
        };
        // Background processes that the command left die with the group, which also ends the output.
        if self.group.is_populated() {
            let _ = self.group.kill();
        }
        let _ = timeout(REST, output.end()).await;
        self.finish().await;
        match report {
            Some(Report::Ended(code)) => judge(code, &output.kept),
            Some(Report::Error(error)) => own_error(error),
            None => own_error("the helper ended without a report"),
        }
    }

    /// Cleans up after a run whose command has exited.
    async fn finish(mut self) {
        let until = Instant::now() + REST;
        if let Some(child) = &mut self.child
            && timeout(REST, child.wait()).await.is_ok()
        {
            self.is_over = self.group.end(until).await;
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        // Kill immediately, whoever does the rest of the clean-up.
        let _ = self.group.kill();
        let (group, child) = (self.group.clone(), self.child.take());
        // Without a tokio runtime the agent is exiting, and the next agent's run removes what is left.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(clean_up(group, child));
        }
    }
}

/// Starts the command in a control group.
struct InGroup<'a>(&'a Group);

impl wait::Command for InGroup<'_> {
    async fn start(&mut self) -> Start {
        self.0.start()
    }
}

async fn clean_up(group: Group, child: Option<Child>) {
    if let Some(mut child) = child
        && timeout(HELPER, child.wait()).await.is_err()
    {
        let _ = child.kill().await;
    }
    group.end(Instant::now() + CLEAN_UP).await;
}

/// Reads the first line of the helper's output.
async fn read_report(stderr: ChildStderr) -> Option<Report> {
    let mut stderr = stderr.take(REPORT_LIMIT);
    let mut said = Vec::new();
    while !said.contains(&b'\n') {
        match stderr.read_buf(&mut said).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    String::from_utf8_lossy(&said)
        .lines()
        .next()
        .and_then(Report::parse)
}

/// A command's output; only the beginning is kept.
struct Output<R> {
    pipe: R,
    kept: Vec<u8>,
    has_ended: bool,
}

impl Output<ChildStdout> {
    fn of(pipe: ChildStdout) -> Self {
        Self {
            pipe,
            kept: Vec::new(),
            has_ended: false,
        }
    }
}

impl<R: AsyncRead + Unpin> Output<R> {
    /// Reads forever.
    async fn read(&mut self) -> std::convert::Infallible {
        self.end().await;
        std::future::pending().await
    }

    /// Reads until the end.
    async fn end(&mut self) {
        let mut piece = [0; 4096];
        while !self.has_ended {
            match self.pipe.read(&mut piece).await {
                Ok(0) | Err(_) => self.has_ended = true,
                Ok(len) => {
                    let room = OUTPUT_LIMIT - self.kept.len();
                    self.kept.extend_from_slice(&piece[..len.min(room)]);
                }
            }
        }
    }
}
