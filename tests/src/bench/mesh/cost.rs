//! CPU time of probes, for any prober: the sum of the prober and the far side.
//!
//! The kernel charges packets to the task that is running when it handles them: on a veth pair mostly the sender, under
//! load `ksoftirqd`. Therefore, the times of the prober's process, the responder's thread and all `ksoftirqd` threads
//! are added up, for every prober alike. Probes are counted in the namespace that they leave.

use std::ops::Sub;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context as _, ensure};
use nix::unistd::Pid;

use crate::bench::cluster::Cluster;
use crate::bench::sent::SentProbes;
use crate::bench::usage::cpu_time;

/// What a prober sent and used in a period.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// Number of probes sent.
    pub(super) sent: SentProbes,
    /// CPU time of the prober's process.
    own: Duration,
    /// CPU time of the responder and of `ksoftirqd`.
    far: Duration,
}

impl Cost {
    /// Measures a running process for `window`.
    pub(super) fn measure(cluster: &Cluster, pid: Pid, window: Duration) -> anyhow::Result<Self> {
        let softirqs = softirq_threads()?;
        let read = || {
            anyhow::Ok(Self {
                sent: SentProbes::by(cluster.node())?,
                own: cpu_time(pid)?,
                far: softirqs
                    .iter()
                    .map(|&thread| cpu_time(thread))
                    .sum::<anyhow::Result<Duration>>()?
                    + cluster.responder().cpu_time(),
            })
        };
        let before = read()?;
        // The measurement covers this window; there is nothing else to wait for.
        thread::sleep(window);
        let cost = read()? - before;
        ensure!(cost.sent.total() > 0, "process {pid} sent no probes");
        Ok(cost)
    }

    /// Microseconds of CPU time per probe, on both sides together.
    pub(super) fn micros_a_probe(&self) -> f64 {
        (self.own + self.far).as_secs_f64() * 1e6 / self.sent.total() as f64
    }

    /// Microseconds of CPU time per probe in the prober's own process.
    pub(super) fn own_micros_a_probe(&self) -> f64 {
        self.own.as_secs_f64() * 1e6 / self.sent.total() as f64
    }
}

impl Sub for Cost {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            sent: self.sent - before.sent,
            own: self.own.saturating_sub(before.own),
            far: self.far.saturating_sub(before.far),
        }
    }
}

/// Process IDs of the kernel threads `ksoftirqd/0` and so on.
fn softirq_threads() -> anyhow::Result<Vec<Pid>> {
    let processes = fs::read_dir("/proc").context("cannot list /proc")?;
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_softirqd = |pid: &i32| {
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.starts_with("ksoftirqd/"))
    };
    Ok(pids.filter(is_softirqd).map(Pid::from_raw).collect())
}
