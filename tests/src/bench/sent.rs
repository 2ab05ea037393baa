//! Number of probes that left a namespace, as counted by the kernel.

use std::fs;
use std::ops::Sub;

use anyhow::Context as _;

use crate::Node;

/// Counters of the calling thread's network namespace.
pub(super) const SNMP: &str = "/proc/thread-self/net/snmp";

/// Number of probes that left a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SentProbes {
    /// Echo requests.
    pub(super) echoes: u64,
    /// Connections opened.
    pub(super) connections: u64,
}

impl SentProbes {
    /// Number of all probes that have ever left a node's namespace.
    pub(super) fn by(node: &Node) -> anyhow::Result<Self> {
        let text = node
            .run_in(|| fs::read_to_string(SNMP))?
            .with_context(|| format!("cannot read {SNMP} in {}", node.name()))?;
        let value = |group, name| {
            snmp(&text, group, name).with_context(|| format!("{SNMP} has no {name} of {group}"))
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

impl Sub for SentProbes {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            echoes: self.echoes.saturating_sub(before.echoes),
            connections: self.connections.saturating_sub(before.connections),
        }
    }
}

/// Finds a value in `/proc/net/snmp`, where each group has a line of names followed by a line of values.
pub(super) fn snmp(text: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = text
        .lines()
        .filter_map(|line| line.strip_prefix(group)?.strip_prefix(": "));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut columns = names.split(' ').zip(values.split(' '));
    columns.find(|(column, _)| *column == name)?.1.parse().ok()
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
