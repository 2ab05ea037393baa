//! What one agent costs while it does nothing but its work: memory and CPU in a cluster of three.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::unistd::{Pid, SysconfVar, sysconf};

use super::{Figure, Report, Target};
use crate::Bed;

const NODES: u8 = 3;
const WINDOW: Duration = Duration::from_secs(30);
const MEMORY_LIMIT_MIB: f64 = 25.0;
const CPU_LIMIT_PERCENT: f64 = 1.0;

pub(super) fn run() -> anyhow::Result<Report> {
    let bed = Bed::builder().nodes(NODES).start()?;
    bed.wait_all_reachable(Duration::from_secs(30))?;
    let pid = bed.node(1).agent_pid()?;

    let start = Instant::now();
    let before = cpu_time(pid)?;
    // The figure is a share of this window; there is nothing to wait for but its end.
    thread::sleep(WINDOW);
    let used = cpu_time(pid)? - before;
    let share = used.as_secs_f64() / start.elapsed().as_secs_f64();

    let figures = vec![
        Figure {
            name: "resident memory".to_owned(),
            unit: "MiB",
            ours: resident_mib(pid)?,
            other: None,
            target: Some(Target::AtMost(MEMORY_LIMIT_MIB)),
        },
        Figure {
            name: format!("CPU over {} s", WINDOW.as_secs()),
            unit: "% of a core",
            ours: share * 100.0,
            other: None,
            target: Some(Target::AtMost(CPU_LIMIT_PERCENT)),
        },
    ];
    Report::new(figures, 1)
}

/// User and system time that a process has used so far.
fn cpu_time(pid: Pid) -> anyhow::Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let ticks = ticks(&stat).with_context(|| format!("{path} is not as proc(5) says"))?;
    let per_second = sysconf(SysconfVar::CLK_TCK)
        .context("cannot ask for the clock's ticks")?
        .and_then(|ticks| u32::try_from(ticks).ok())
        .context("the clock's ticks are not known")?;
    Ok(Duration::from_secs(ticks) / per_second)
}

/// `utime` and `stime`, the 14th and 15th field. The second, the name, may hold blanks and
/// parentheses itself, so counting starts behind its end.
fn ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

fn resident_mib(pid: Pid) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let kib: u32 = status
        .lines()
        .find_map(|line| {
            line.strip_prefix("VmRSS:")?
                .strip_suffix("kB")?
                .trim()
                .parse()
                .ok()
        })
        .with_context(|| format!("no VmRSS in {path}"))?;
    Ok(f64::from(kib) / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::ticks;

    #[test]
    fn ticks_are_found_behind_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 100 0 0 0 21 9 0 0 20 0 1 0 5 0 0";
        assert_eq!(ticks(stat), Some(30));
    }
}
