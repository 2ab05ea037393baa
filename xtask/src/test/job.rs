//! A test process on a machine of its own: its tests and their results.

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, SysconfVar, sysconf};

use super::events::{self, Outcome, TestEnd};
use super::programs::TestProgram;
use crate::privilege::as_root;
use crate::process::cannot_run;
use crate::workspace::Workspace;

/// Time limit of a process. The longest one takes two minutes on a quiet machine, and half an hour in a long run.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// The results of a test process.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) ended: Vec<TestEnd>,
    /// CPU time used by the process and its children.
    pub(crate) busy: Duration,
}

/// Tests that run in one process.
#[derive(Clone, Debug)]
pub(crate) struct Job<'a> {
    pub(crate) program: &'a TestProgram,
    pub(crate) tests: Vec<&'a str>,
}

impl Job<'_> {
    /// The job's name while it runs.
    pub(crate) fn name(&self) -> String {
        match &self.tests[..] {
            [test] => self.program.name_of(test),
            _ => self.program.name.clone(),
        }
    }

    /// The arguments that select these tests and enable events.
    pub(crate) fn arguments(&self) -> Vec<&str> {
        let mut arguments = vec!["--include-ignored"];
        arguments.extend(events::FLAGS);
        if self.tests.len() < self.program.tests.len() {
            arguments.push("--exact");
            arguments.extend(&self.tests);
        }
        arguments
    }

    /// Runs the job to completion. The result includes an end for each of the job's tests.
    pub(crate) fn run(
        &self,
        workspace: &Workspace,
        environment: &[String],
    ) -> anyhow::Result<Done> {
        let mut command = self.command(workspace, environment)?;
        let mut child = command
            .current_dir(&self.program.package)
            // The machine stops when this pipe closes.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| cannot_run(&command, error))?;
        let lifeline = child.stdin.take();
        let stdout = child.stdout.take().context("no standard output")?;
        let stderr = child.stderr.take().context("no standard error")?;
        let (sender, lines) = channel();
        let errors = sender.clone();
        thread::spawn(move || each_line(stdout, |line| sender.send((true, line)).is_ok()));
        thread::spawn(move || each_line(stderr, |line| errors.send((false, line)).is_ok()));

        let mut record = Record::default();
        let deadline = Instant::now() + LIMIT;
        let timed_out = loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((is_stdout, line)) => {
                    record.hear(is_stdout, line);
                }
                Err(RecvTimeoutError::Disconnected) => break false,
                Err(RecvTimeoutError::Timeout) => break true,
            }
        };
        drop(lifeline);
        if timed_out && self.program.is_on_host() {
            // The program does not run on a machine that stops when the pipe closes.
            child.kill().context("cannot kill a test program")?;
        }
        // The results are valid even if the CPU time is unknown.
        let busy = processor_time(&child).unwrap_or_default();
        let status = child.wait().context("cannot wait for a test program")?;
        let why = if timed_out {
            format!("it did not end within {} s", LIMIT.as_secs())
        } else {
            format!("its process ended with {status}")
        };
        Ok(Done {
            ended: record.close(&self.tests, &why),
            busy,
        })
    }

    /// The results of a job that could not run at all.
    pub(crate) fn failed(&self, why: &str) -> Done {
        Done {
            ended: Record::default().close(&self.tests, why),
            busy: Duration::ZERO,
        }
    }

    fn command(&self, workspace: &Workspace, environment: &[String]) -> anyhow::Result<Command> {
        // `env` sets the variables because sudo keeps none.
        let mut command = as_root("env", "running tests")?;
        command.args(environment);
        if !self.program.is_on_host() {
            command
                .arg(workspace.dev_binary("machine"))
                .arg("--until-eof");
        }
        command.arg(&self.program.path).args(self.arguments());
        Ok(command)
    }
}

/// The events of a test process so far.
#[derive(Default)]
pub(crate) struct Record {
    ended: Vec<TestEnd>,
    /// Output other than events.
    printed: String,
}

impl Record {
    /// Records a line. Returns the end of a test if the line reports one.
    pub(crate) fn hear(&mut self, is_stdout: bool, line: String) -> Option<&TestEnd> {
        if !is_stdout || !events::is_event(&line) {
            self.printed.push_str(&line);
            self.printed.push('\n');
            return None;
        }
        self.ended.push(events::read(&line)?);
        self.ended.last()
    }

    /// Returns the results of these tests. Tests without an end have failed, because of `why`. The first failure's
    /// output starts with the process's own output, so that the test's output comes last.
    pub(crate) fn close(mut self, tests: &[&str], why: &str) -> Vec<TestEnd> {
        for &test in tests {
            if !self.ended.iter().any(|ended| ended.test == test) {
                self.ended.push(TestEnd {
                    test: test.to_owned(),
                    took: Duration::ZERO,
                    outcome: Outcome::Failed(format!("{why}\n")),
                });
            }
        }
        let printed = self.printed;
        let failed = self
            .ended
            .iter_mut()
            .find_map(|ended| match &mut ended.outcome {
                Outcome::Failed(said) => Some(said),
                _ => None,
            });
        if let Some(said) = failed
            && !printed.is_empty()
        {
            *said = format!("-- its process printed:\n{printed}-- the test itself:\n{said}");
        }
        self.ended
    }
}

/// Waits for a child to exit without reaping it. Returns the CPU time used by the child and its children
/// (proc_pid_stat(5), fields 14 to 17).
fn processor_time(child: &Child) -> anyhow::Result<Duration> {
    const FIRST: usize = 11; // behind the name and its bracket
    let pid = Pid::from_raw(child.id().try_into()?);
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
        .context("cannot wait for a test program")?;
    let file = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    let (_, rest) = stat.rsplit_once(')').context("no name")?;
    let ticks = rest.split_whitespace().skip(FIRST).take(4);
    let ticks: u64 = ticks.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    let each = sysconf(SysconfVar::CLK_TCK)?.context("no clock ticks")?;
    Ok(Duration::from_millis(ticks * 1000 / u64::try_from(each)?))
}

/// Passes each line to `wanted` until it returns false. Replaces invalid UTF-8.
fn each_line(from: impl Read, mut wanted: impl FnMut(String) -> bool) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from
        .read_until(b'\n', &mut line)
        .is_ok_and(|length| length > 0)
    {
        let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(&line));
        if !wanted(text.into_owned()) {
            return;
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_busy_with_a_child_and_its_children() -> anyhow::Result<()> {
        let spin = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let mut child = Command::new("sh")
            .args(["-c", &format!("sh -c '{spin}'; true")])
            .spawn()?;
        assert!(processor_time(&child)? > Duration::ZERO);
        assert!(child.wait()?.success());
        Ok(())
    }

    #[test]
    fn a_test_that_its_process_did_not_end_has_failed_with_all_that_was_printed() {
        let mut record = Record::default();
        let passed = r#"{ "type": "test", "name": "a", "event": "ok", "exec_time": 0.1 }"#;
        record.hear(true, passed.to_owned());
        let slow = r#"{ "type": "test", "event": "timeout", "name": "b" }"#;
        record.hear(true, slow.to_owned());
        record.hear(false, "a crash".to_owned());
        let ended = record.close(&["a", "b"], "it ended");
        assert_eq!(ended[0].outcome, Outcome::Passed);
        let Outcome::Failed(said) = &ended[1].outcome else {
            panic!("{ended:?}");
        };
        assert_eq!(
            said,
            "-- its process printed:\na crash\n-- the test itself:\nit ended\n"
        );
    }
}
