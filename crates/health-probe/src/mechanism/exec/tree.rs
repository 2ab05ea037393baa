//! Finds the processes of a command that a container runtime runs, among the container's processes, and kills them.
//!
//! When a command takes too long, a runtime kills the process that it started, but not that process's children. Nothing
//! marks the children, so we recognise them by what they share with the command's process: parents, its session, its
//! pipes. A process that has cut all of these ties before the command timed out counts as one of the container's own
//! from then on.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::wait::Start;

/// Maximum duration of a search: containers may have any number of processes and descriptors.
const LONGEST_SEARCH: Duration = Duration::from_millis(500);
/// How many descriptors of a process are checked for pipes.
const DESCRIPTORS: usize = 256;

/// What identifies a command of a runtime.
#[derive(Debug)]
pub(super) struct Search {
    /// A process of the container.
    container: u32,
    /// The container's PID namespace; `None` if that process is gone, or if the namespace is this host's own: among the
    /// host's processes, we cannot identify the command's.
    namespace: Option<PathBuf>,
    command: Vec<String>,
    /// When the runtime was asked to run the command, in ticks since boot.
    since: u64,
    /// The command's processes found so far.
    ties: Ties,
}

/// Processes that belong together.
#[derive(Debug, Default)]
struct Ties {
    processes: HashSet<i32>,
    sessions: HashSet<i32>,
    pipes: HashSet<PathBuf>,
    /// The PID and start time of the first process that was found.
    first: Option<(i32, u64)>,
}

/// A process of the container.
#[derive(Debug)]
struct Process {
    pid: i32,
    parent: i32,
    session: i32,
    started: u64,
}

impl Search {
    /// Creates a search. Must be called before the runtime is asked to run the command.
    pub(super) fn new(container: u32, command: &[String]) -> Self {
        Self {
            container,
            namespace: pid_namespace(container as i32).filter(|_| !is_in_own_namespace(container)),
            command: command.to_vec(),
            since: now(),
            ties: Ties::default(),
        }
    }

    /// Kills the command's current processes, and returns their number. Blocks: reads much of `/proc`.
    pub(super) fn kill(&mut self) -> usize {
        let found = self.find();
        found.iter().for_each(|process| self.kill_one(process));
        found.len()
    }

    /// Kills a process, unless it has exited and another one has its PID.
    fn kill_one(&self, process: &Process) {
        let Some(pidfd) =
            Pid::from_raw(process.pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        else {
            return;
        };
        // The descriptor refers to whichever process has the PID now: check that one.
        let now = Process::read(process.pid);
        let is_same = now.is_some_and(|now| now.started == process.started)
            && pid_namespace(process.pid) == self.namespace;
        if is_same {
            // The process may have exited since.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }

    /// When the command started. Blocks: reads much of `/proc`.
    pub(super) fn start(&mut self) -> Start {
        if is_in_own_namespace(self.container) {
            return Start::Unknown;
        }
        let is_there = !self.find().is_empty();
        match self.ties.first {
            Some((pid, started)) if is_there && !is_being_started(pid) => Start::Ago(ago(started)),
            _ => Start::NotNow,
        }
    }

    /// Returns the command's live processes that are tied to the command or to processes found before.
    fn find(&mut self) -> Vec<Process> {
        let Some(namespace) = &self.namespace else {
            return Vec::new();
        };
        let until = Instant::now() + LONGEST_SEARCH;
        let mut processes: Vec<_> = all()
            .filter(|pid| pid_namespace(*pid).as_ref() == Some(namespace))
            .filter_map(Process::read)
            .filter(|process| process.started >= self.since)
            .collect();
        let mut ties = std::mem::take(&mut self.ties);
        if ties.processes.is_empty() {
            // A process that was started in the container from outside has a parent outside. If the parent has just
            // exited, nothing is known about the process.
            let entered = processes.iter().filter(|process| {
                process.pid != self.container as i32
                    && pid_namespace(process.parent).is_some_and(|outer| outer != *namespace)
            });
            let (exact, others): (Vec<_>, Vec<_>) =
                entered.partition(|process| self.is_command(process.pid));
            match (&exact[..], &others[..]) {
                // The process has executed another program, and is the only candidate.
                ([], [one]) => ties.add(one, &pipes(one.pid)),
                (exact, _) => exact
                    .iter()
                    .for_each(|process| ties.add(process, &pipes(process.pid))),
            }
        }
        // Each pass finds one more generation. Pipes are read once for all passes.
        let mut pipes_of = HashMap::new();
        let mut known = 0;
        while known < ties.processes.len() {
            known = ties.processes.len();
            for process in &processes {
                if ties.processes.contains(&process.pid) || Instant::now() >= until {
                    continue;
                }
                let pipes = pipes_of
                    .entry(process.pid)
                    .or_insert_with(|| pipes(process.pid));
                if ties.hold(process, pipes) {
                    ties.add(process, pipes);
                }
            }
        }
        processes.retain(|process| ties.processes.contains(&process.pid));
        self.ties = ties;
        processes
    }

    /// Whether a process was started by the command. The command line of a script begins with its interpreter.
    fn is_command(&self, pid: i32) -> bool {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<_> = line
            .strip_suffix(b"\0")
            .unwrap_or(&line)
            .split(|b| *b == 0)
            .collect();
        let Some(start) = words.len().checked_sub(self.command.len()) else {
            return false;
        };
        let name = |path: &[u8]| path.rsplit(|byte| *byte == b'/').next().map(<[u8]>::to_vec);
        let mut pairs = words[start..].iter().zip(&self.command);
        let is_named = pairs
            .next()
            .is_some_and(|(word, own)| name(word) == name(own.as_bytes()));
        is_named && pairs.all(|(word, own)| *word == own.as_bytes())
    }
}

impl Ties {
    fn add(&mut self, process: &Process, pipes: &[PathBuf]) {
        if self.processes.is_empty() {
            self.sessions.insert(process.session);
            self.first = Some((process.pid, process.started));
        }
        // The runtime gives each command its own session.
        if process.session == process.pid {
            self.sessions.insert(process.session);
        }
        self.processes.insert(process.pid);
        self.pipes.extend(pipes.iter().cloned());
    }

    fn hold(&self, process: &Process, pipes: &[PathBuf]) -> bool {
        self.processes.contains(&process.parent)
            || self.sessions.contains(&process.session)
            || pipes.iter().any(|pipe| self.pipes.contains(pipe))
    }
}

impl Process {
    /// Reads a process; `None` if it has exited, even if it has not been reaped.
    fn read(pid: i32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may contain any byte.
        let after = stat.iter().rposition(|byte| *byte == b')')?;
        let fields = String::from_utf8_lossy(&stat[after + 1..]).into_owned();
        let fields: Vec<_> = fields.split_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse().ok();
        (!matches!(*fields.first()?, "Z" | "X")).then_some(Self {
            pid,
            parent: number(1)?,
            session: number(3)?,
            started: fields.get(19)?.parse().ok()?,
        })
    }
}

/// The PIDs of all processes.
fn all() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

fn pid_namespace(pid: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// Whether a process is in this host's PID namespace, and so sees the host's processes.
pub(super) fn is_in_own_namespace(pid: u32) -> bool {
    pid_namespace(pid as i32) == fs::read_link("/proc/self/ns/pid").ok()
}

/// The pipes among the first descriptors of a process.
fn pipes(pid: i32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .take(DESCRIPTORS);
    let files = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let is_pipe = |file: &PathBuf| file.as_os_str().as_bytes().starts_with(b"pipe:");
    files.filter(is_pipe).collect()
}

/// Whether a process still belongs to the runtime and has yet to become the command's.
fn is_being_started(pid: i32) -> bool {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.starts_with(b"runc:")
}

/// When the first of these processes started.
pub(super) fn start_of(pids: impl Iterator<Item = i32>) -> Start {
    let started = pids.filter_map(Process::read).map(|one| one.started).min();
    started.map_or(Start::NotNow, |started| Start::Ago(ago(started)))
}

/// How long ago, at least, a time in ticks since boot was.
fn ago(ticks: u64) -> Duration {
    let (since_boot, rate) = (since_boot(), ticks_per_second());
    // The event happened at some point within that tick.
    let at = u128::from(ticks + 1) * 1_000_000_000 / u128::from(rate);
    since_boot.saturating_sub(Duration::from_nanos(at as u64))
}

/// The current time in ticks since boot, the unit of process start times.
fn now() -> u64 {
    (since_boot().as_millis() * u128::from(ticks_per_second()) / 1000) as u64
}

fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

fn ticks_per_second() -> u64 {
    /// The tick rate on all Linux architectures that this runs on.
    const USUAL: u64 = 100;
    let rate = sysconf(SysconfVar::CLK_TCK).ok().flatten();
    let rate = rate.and_then(|rate| u64::try_from(rate).ok());
    rate.filter(|rate| *rate > 0).unwrap_or(USUAL)
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{BufRead as _, BufReader, Write as _, stdin};
    use std::process::{Command, Stdio, id};

    use super::*;

    /// Set when the test runs as its own child: as the first process of a PID namespace.
    const INSIDE: &str = "HEALTH_PROBE_INSIDE";
    const OWN_NAME: &str =
        "mechanism::exec::tree::tests::nothing_is_killed_among_the_agents_own_processes";

    fn lines(output: impl std::io::Read) -> impl Iterator<Item = String> {
        BufReader::new(output).lines().map(Result::unwrap)
    }

    #[test]
    #[ignore = "needs root"]
    fn nothing_is_killed_among_the_agents_own_processes() {
        if env::var_os(INSIDE).is_some() {
            let mut search = Search::new(id(), &["sleep".to_owned(), "1000".to_owned()]);
            println!("begins");
            lines(stdin()).next().unwrap();
            println!("killed {}", search.kill());
            return;
        }
        let mut inside = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
            .arg(env::current_exe().unwrap())
            .args(["--exact", OWN_NAME, "--include-ignored", "--nocapture"])
            .env(INSIDE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = lines(inside.stdout.take().unwrap());
        said.find(|line| line.ends_with("begins")).unwrap();
        let children = format!("/proc/{0}/task/{0}/children", inside.id());
        let first = fs::read_to_string(children).unwrap();
        // Like a command of a runtime, a process that enters from outside has no parent in the namespace.
        let mut entered = Command::new("nsenter")
            .args([
                "--target",
                first.trim(),
                "--pid",
                "sh",
                "-c",
                "echo in; exec sleep 1000",
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        lines(entered.stdout.take().unwrap()).next().unwrap();
        inside.stdin.take().unwrap().write_all(b"go on\n").unwrap();
        let killed = said.find(|line| line.contains("killed")).unwrap();
        let is_alive = entered.try_wait().unwrap().is_none();
        entered.kill().unwrap();
        entered.wait().unwrap();
        assert!(inside.wait().unwrap().success());
        assert_eq!((killed.as_str(), is_alive), ("killed 0", true));
    }
}
