//! Human-readable `HEALTH_ARRIVALS` entries: counts of probes that arrived from other agents.

use std::fmt;

use health_common::arrivals::{Arrivals, Prober, WAYS, WayCounts, way};
use health_common::probe::Path;
use serde::Serialize;

use super::entry::Entry;

/// Converts an entry for display.
pub(super) fn entry((prober, arrivals): (Prober, Arrivals)) -> Entry<ProberKey, ArrivalCounts> {
    let ways = ORDER.map(|(name, is_v4, path)| (name, arrivals.ways[way(is_v4, path as u8)]));
    Entry {
        key: ProberKey {
            session: prober.session,
            icmp_id: u16::from_be(prober.icmp_id_be),
        },
        value: ArrivalCounts {
            since_ns: arrivals.since_ns,
            ways: ways.map(|(way, counts)| Way::new(way, counts)),
        },
    }
}

/// All ways, with their names, IP versions and paths.
const ORDER: [(&str, bool, Path); WAYS] = [
    ("host4", true, Path::Host),
    ("endpoint4", true, Path::Endpoint),
    ("host6", false, Path::Host),
    ("endpoint6", false, Path::Endpoint),
];

/// The key: the agent that sends the probes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ProberKey {
    session: u32,
    icmp_id: u16,
}

impl fmt::Display for ProberKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session={} icmp_id={}", self.session, self.icmp_id)
    }
}

/// Counts per way.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ArrivalCounts {
    /// In `CLOCK_MONOTONIC`.
    since_ns: u64,
    ways: [Way; WAYS],
}

#[derive(Debug, Serialize)]
struct Way {
    way: &'static str,
    arrived: u32,
    replied: u32,
}

impl Way {
    fn new(way: &'static str, counts: WayCounts) -> Self {
        Self {
            way,
            arrived: counts.arrived,
            replied: counts.replied,
        }
    }
}

/// Per way, the number of probes that arrived and the number of replies to them.
impl fmt::Display for ArrivalCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "since_ns={}", self.since_ns)?;
        self.ways
            .iter()
            .try_for_each(|way| write!(f, " {}={}/{}", way.way, way.arrived, way.replied))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bpf::entry::lines;

    #[test]
    fn each_way_has_its_counts() {
        let mut arrivals = Arrivals {
            since_ns: 77,
            ..Arrivals::default()
        };
        arrivals.ways[way(true, Path::Endpoint as u8)] = WayCounts {
            arrived: 5,
            replied: 4,
        };
        arrivals.ways[way(false, Path::Host as u8)].arrived = 3;
        let prober = Prober {
            session: 4660,
            icmp_id_be: 258_u16.to_be(),
            pad: 0,
        };
        let entry = entry((prober, arrivals));
        assert_eq!(
            serde_json::to_value(&entry).unwrap()["value"]["ways"][1],
            serde_json::json!({"way": "endpoint4", "arrived": 5, "replied": 4})
        );
        assert_eq!(
            lines(&[entry]),
            "session=4660 icmp_id=258: since_ns=77 host4=0/0 endpoint4=5/4 host6=3/0 endpoint6=0/0\n"
        );
    }
}
