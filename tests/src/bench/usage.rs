//! Resource usage of a process: CPU time and memory.

use std::fs;
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// User and system time that all threads of a process have used so far. The kernel counts nanoseconds, including the
/// time of interrupts handled while one of the threads ran.
pub(super) fn cpu_time(pid: Pid) -> anyhow::Result<Duration> {
    let time = ClockId::pid_cpu_clock_id(pid).and_then(clock_gettime);
    time.map(Duration::from)
        .with_context(|| format!("cannot read the CPU time of process {pid}"))
}

/// User and system time of all child processes that have exited.
pub(super) fn cpu_time_of_ended() -> anyhow::Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("cannot read the CPU time")?;
    let micros = (usage.user_time() + usage.system_time()).num_microseconds();
    Ok(Duration::from_micros(micros.try_into()?))
}

/// Resident memory of a process, MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ResidentMemory {
    /// Current.
    pub(super) now: f64,
    /// Peak.
    pub(super) peak: f64,
}

impl ResidentMemory {
    pub(super) fn of(pid: Pid) -> anyhow::Result<Self> {
        let path = format!("/proc/{pid}/status");
        let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let mib = |name: &str| {
            mib(&status, name).with_context(|| format!("{path} has no {name} as proc(5) says"))
        };
        Ok(Self {
            now: mib("VmRSS:")?,
            peak: mib("VmHWM:")?,
        })
    }
}

/// Parses a line such as `VmRSS:     1536 kB`.
fn mib(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u32 = line.strip_suffix("kB")?.trim().parse().ok()?;
    Some(f64::from(kib) / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_by_its_name() {
        let status = "Name:\tagent\nVmHWM:\t    3072 kB\nVmRSS:\t    1536 kB\nThreads:\t4\n";
        assert_eq!(mib(status, "VmRSS:"), Some(1.5));
        assert_eq!(mib(status, "VmHWM:"), Some(3.0));
        assert_eq!(mib(status, "VmSwap:"), None);
    }

    #[test]
    fn cpu_time_counts_what_this_process_does() {
        let before = cpu_time(Pid::this()).unwrap();
        let resident = ResidentMemory::of(Pid::this()).unwrap();
        assert!(resident.now > 0.0 && resident.peak >= resident.now);
        assert!(cpu_time(Pid::this()).unwrap() > before);
    }
}
