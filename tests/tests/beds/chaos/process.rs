//! Resource limits of a running process, and a process that is mostly kept from running.

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};
use tests::process::run;

/// How long a slowed process is stopped and how long it runs, alternately.
const STANDS: Duration = Duration::from_millis(250);
const RUNS: Duration = Duration::from_millis(20);

/// A resource limit of a process.
pub(super) struct ProcessLimit {
    pid: Pid,
    resource: &'static str,
    before: String,
}

impl ProcessLimit {
    /// Prevents a process from opening any more files.
    pub(super) fn of_files(pid: Pid) -> anyhow::Result<Self> {
        let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
        Self::set(pid, "nofile", open as u64)
    }

    /// Prevents a process from mapping more memory than it has now.
    pub(super) fn of_memory(pid: Pid) -> anyhow::Result<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/statm"))?;
        let pages = text.split(' ').next().context("no size")?;
        let page = sysconf(SysconfVar::PAGE_SIZE)?.context("no size of pages")?;
        Self::set(pid, "as", pages.parse::<u64>()? * page.cast_unsigned())
    }

    fn set(pid: Pid, resource: &'static str, most: u64) -> anyhow::Result<Self> {
        let words = format!("--pid {pid} --{resource} --output SOFT --noheadings --raw");
        let before = prlimit(&words)?.trim().to_owned();
        prlimit(&format!("--pid {pid} --{resource}={most}:"))?;
        Ok(Self {
            pid,
            resource,
            before,
        })
    }

    /// Restores the previous limit.
    pub(super) fn lift(&self) -> anyhow::Result<()> {
        let Self {
            pid,
            resource,
            before,
        } = self;
        prlimit(&format!("--pid {pid} --{resource}={before}:")).map(drop)
    }
}

fn prlimit(words: &str) -> anyhow::Result<String> {
    run(Command::new("prlimit").args(words.split(' ')))?.success()
}

/// A process that runs only for moments at a time for as long as this value lives.
pub(super) struct SlowedProcess {
    ends: Arc<AtomicBool>,
    slows: Option<JoinHandle<nix::Result<()>>>,
}

impl SlowedProcess {
    pub(super) fn slow(pid: Pid) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let is_over = ends.clone();
        let slows = thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                kill(pid, Signal::SIGSTOP)?;
                thread::sleep(STANDS);
                kill(pid, Signal::SIGCONT)?;
                thread::sleep(RUNS);
            }
            Ok(())
        });
        Self {
            ends,
            slows: Some(slows),
        }
    }

    /// Lets the process run normally again.
    pub(super) fn release(&mut self) -> anyhow::Result<()> {
        self.ends.store(true, Ordering::Relaxed);
        let Some(slows) = self.slows.take() else {
            return Ok(());
        };
        Ok(slows.join().expect("signals do not panic")?)
    }
}

impl Drop for SlowedProcess {
    fn drop(&mut self) {
        let _ = self.release();
    }
}
