//! What probes cost in CPU time, whoever sends them: the prober itself and the far side together.
//!
//! The kernel charges packets to whoever runs when it handles them: on a veth pair mostly the sender,
//! under load `ksoftirqd`. So the prober's process, the responder's thread and all of `ksoftirqd` are
//! added up, for every prober alike. Probes are counted by the namespace that they leave.

use std::fs;
use std::ops::Sub;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::unistd::Pid;

use crate::Node;
use crate::bench::cluster::Cluster;
use crate::bench::usage::cpu_time;

/// What one prober did and used in a while.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// Probes sent.
    pub(super) sent: Sent,
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
                sent: Sent::by(cluster.node())?,
                own: cpu_time(pid)?,
                far: softirqs
                    .iter()
                    .map(|&thread| cpu_time(thread))
                    .sum::<anyhow::Result<Duration>>()?
                    + cluster.responder().cpu_time(),
            })
        };
        let before = read()?;
        // A figure over this time; there is nothing to wait for but its end.
        thread::sleep(window);
        let cost = read()? - before;
        ensure!(cost.sent.total() > 0, "process {pid} sent no probes");
        Ok(cost)
    }

    /// Microseconds of CPU time a probe, both sides.
    pub(super) fn micros_a_probe(&self) -> f64 {
        (self.own + self.far).as_secs_f64() * 1e6 / self.sent.total() as f64
    }

    /// The prober's own part of it.
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

/// Probes that left a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    /// Echo requests.
    pub(super) echoes: u64,
    /// Connections begun.
    pub(super) connections: u64,
}

impl Sent {
    /// All that ever left a node's namespace.
    pub(super) fn by(node: &Node) -> anyhow::Result<Self> {
        const PATH: &str = "/proc/thread-self/net/snmp";
        let text = node
            .run_in(|| fs::read_to_string(PATH))?
            .with_context(|| format!("cannot read {PATH} in {}", node.name()))?;
        let value = |group, name| {
            snmp(&text, group, name).with_context(|| format!("{PATH} has no {name} of {group}"))
        };
        Ok(Self {
            echoes: value("Icmp", "OutEchos")?,
            connections: value("Tcp", "ActiveOpens")?,
        })
    }

    pub(super) fn total(self) -> u64 {
        self.echoes + self.connections
    }
}

impl Sub for Sent {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            echoes: self.echoes.saturating_sub(before.echoes),
            connections: self.connections.saturating_sub(before.connections),
        }
    }
}

/// A value of `/proc/net/snmp`: for each group a line of names, then one of values.
fn snmp(text: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = text
        .lines()
        .filter_map(|line| line.strip_prefix(group)?.strip_prefix(": "));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut columns = names.split(' ').zip(values.split(' '));
    columns.find(|(column, _)| *column == name)?.1.parse().ok()
}

/// The kernel's threads `ksoftirqd/0` and so on.
fn softirq_threads() -> anyhow::Result<Vec<Pid>> {
    let processes = fs::read_dir("/proc").context("cannot list /proc")?;
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_softirqd = |pid: &i32| {
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.starts_with("ksoftirqd/"))
    };
    Ok(pids.filter(is_softirqd).map(Pid::from_raw).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_group_and_name() {
        let text = "Icmp: InMsgs OutEchos\nIcmp: 7 8\nIcmpMsg: InType3\nIcmpMsg: 2\n\
                    Tcp: MaxConn ActiveOpens\nTcp: -1 9\n";
        assert_eq!(snmp(text, "Icmp", "OutEchos"), Some(8));
        assert_eq!(snmp(text, "Tcp", "ActiveOpens"), Some(9));
        assert_eq!(snmp(text, "Tcp", "OutEchos"), None);
        assert_eq!(snmp(text, "Udp", "OutEchos"), None);
    }
}
