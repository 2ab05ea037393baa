//! Human-readable `HEALTH_INFLIGHT` entries: probes not yet counted in any row.

use std::fmt;
use std::net::IpAddr;

use health_api::rtt::path_name;
use health_common::inflight::{Fate, Inflight};
use serde::Serialize;

use super::entry::Entry;

/// Converts an entry for display.
pub(super) fn entry((slot, probe): (u32, Inflight)) -> Entry<ProbeKey, ProbeValue> {
    let id = probe.id(slot);
    Entry {
        key: ProbeKey {
            peer: probe.peer.to_ip(),
            session: id.session,
            round: id.round,
            sequence: id.sequence,
        },
        value: ProbeValue {
            sent_ns: probe.sent_ns,
            path: path_name(probe.path()),
            returned: probe.fate() != Some(Fate::InFlight),
        },
    }
}

/// The key: a probe.
#[derive(Debug, Serialize)]
pub(super) struct ProbeKey {
    peer: IpAddr,
    session: u32,
    round: u16,
    sequence: u16,
}

impl fmt::Display for ProbeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} session={} round={} sequence={}",
            self.peer, self.session, self.round, self.sequence
        )
    }
}

/// The value: the state of a probe.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ProbeValue {
    /// In `CLOCK_MONOTONIC`.
    sent_ns: u64,
    path: &'static str,
    /// Whether the reply has arrived but has not reached the agent yet.
    returned: bool,
}

impl fmt::Display for ProbeValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sent_ns,
            path,
            returned,
        } = self;
        write!(f, "sent_ns={sent_ns} path={path} returned={returned}")
    }
}

#[cfg(test)]
mod tests {
    use health_common::inflight::{slot, ticket};
    use health_common::probe::ProbeId;

    use super::*;
    use crate::bpf::entry::lines;

    #[test]
    fn a_probe_is_read_from_its_slot() {
        let id = ProbeId {
            session: 4660,
            round: 3,
            sequence: 258,
        };
        let probe = Inflight {
            peer: "172.30.0.2".parse::<IpAddr>().unwrap().into(),
            sent_ns: 77,
            ticket: ticket(id, 2, Fate::InFlight),
            ..Inflight::default()
        };
        assert_eq!(
            lines(&[entry((slot(&probe.peer, 258), probe))]),
            "172.30.0.2 session=4660 round=3 sequence=258: sent_ns=77 path=endpoint returned=false\n"
        );
    }
}
