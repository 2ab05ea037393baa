//! Entries of `HEALTH_INFLIGHT`, readable: probes whose answer is waited for.

use std::fmt;
use std::net::IpAddr;

use health_common::rtt;
use serde::Serialize;

use super::entry::Entry;
use super::rtt::path_name;

/// Entries as they are shown, sorted by peer.
pub(super) fn entries(
    probes: Vec<(rtt::InflightKey, rtt::Inflight)>,
) -> Vec<Entry<ProbeKey, ProbeValue>> {
    let mut entries: Vec<_> = probes
        .into_iter()
        .map(|(key, probe)| Entry {
            key: ProbeKey {
                peer: key.peer.to_ip(),
                id: u16::from_be(key.id_be),
                sequence: u16::from_be(key.sequence_be),
            },
            value: ProbeValue {
                sent_ns: probe.sent_ns,
                path: path_name(probe.path),
            },
        })
        .collect();
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    entries
}

/// Which probe.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct ProbeKey {
    peer: IpAddr,
    id: u16,
    sequence: u16,
}

impl fmt::Display for ProbeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} id={} sequence={}", self.peer, self.id, self.sequence)
    }
}

/// What is remembered of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ProbeValue {
    /// `CLOCK_MONOTONIC`.
    sent_ns: u64,
    path: &'static str,
}

impl fmt::Display for ProbeValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sent_ns={} path={}", self.sent_ns, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bpf::entry::lines;

    #[test]
    fn probes_are_read_in_host_byte_order_and_sorted() {
        let probe = |ip: &str, sequence: u16| {
            let key = rtt::InflightKey {
                peer: ip.parse::<IpAddr>().unwrap().into(),
                id_be: 0x1234_u16.to_be(),
                sequence_be: sequence.to_be(),
            };
            let value = rtt::Inflight {
                sent_ns: 77,
                path: 2,
                pad: [0; 7],
            };
            (key, value)
        };
        let probes = vec![probe("172.30.0.10", 1), probe("172.30.0.2", 258)];
        assert_eq!(
            lines(&entries(probes)),
            "172.30.0.2 id=4660 sequence=258: sent_ns=77 path=endpoint\n\
             172.30.0.10 id=4660 sequence=1: sent_ns=77 path=endpoint\n"
        );
    }
}
