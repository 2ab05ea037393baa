//! Measures how idle the CPUs are.

use std::fs;
use std::thread;
use std::time::Duration;

/// Time over which the idle share is measured.
const WINDOW: Duration = Duration::from_secs(1);

/// Measures the idle share of all CPUs' time over the next second, from 0 to 1. 0 if the kernel does not report it.
pub(super) fn measure() -> f64 {
    let before = Times::read();
    thread::sleep(WINDOW);
    match (before, Times::read()) {
        (Some(before), Some(after)) => after.idle_share_since(before),
        _ => 0.0,
    }
}

/// Total times of all CPUs since boot, in clock ticks: the first line of `/proc/stat`, proc(5).
#[derive(Clone, Copy)]
struct Times {
    idle: u64,
    total: u64,
}

impl Times {
    fn read() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        // The guest times, from the ninth field on, are already included in the user times.
        let ticks: Vec<u64> = line
            .split_ascii_whitespace()
            .take(8)
            .map(|field| field.parse().ok())
            .collect::<Option<_>>()?;
        let (idle, waiting_for_disk) = (ticks.get(3)?, ticks.get(4)?);
        Some(Self {
            idle: idle + waiting_for_disk,
            total: ticks.iter().sum(),
        })
    }

    fn idle_share_since(self, before: Self) -> f64 {
        let total = self.total.saturating_sub(before.total);
        if total == 0 {
            return 0.0;
        }
        self.idle.saturating_sub(before.idle) as f64 / total as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Times;

    #[test]
    fn the_idle_share_is_that_of_all_cpus() {
        let before = Times::parse("cpu  10 0 10 80 0 0 0 0 0 0\ncpu0 1 2 3 4").expect("before");
        let after = Times::parse("cpu  40 5 10 100 5 0 0 0 30 0\ncpu0 1 2 3 4").expect("after");
        assert!((after.idle_share_since(before) - 25.0 / 60.0).abs() < 1e-9);
        assert!(before.idle_share_since(before).abs() < 1e-9);
    }

    #[test]
    fn other_files_have_no_times() {
        assert!(Times::parse("").is_none());
        assert!(Times::parse("cpu0 1 2 3 4 5").is_none());
        assert!(Times::parse("cpu  1 2 3").is_none());
        assert!(Times::parse("cpu  1 2 3 x 5").is_none());
    }
}
