//! The human-readable `HEALTH_MONITOR` entry: which events the programs report.

use std::fmt;

use health_common::events::{MonitorFilter, Network, WANT_CT, WANT_DROP, WANT_NAT, WANT_TRACE};
use health_model::flow::IpProtocol;
use serde::Serialize;

use super::entry::Entry;
use crate::output::{NONE, comma_separated};

/// Converts entries for display.
pub(super) fn entries(filters: Vec<(u32, MonitorFilter)>) -> Vec<Entry<u32, EventFilter>> {
    let entry = |(key, filter)| Entry {
        key,
        value: EventFilter::from(filter),
    };
    filters.into_iter().map(entry).collect()
}

/// The reported events. Absent fields match anything.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct EventFilter {
    /// Empty if there is no monitor client.
    types: Vec<&'static str>,
    endpoint: Option<u16>,
    protocol: Option<IpProtocol>,
    port: Option<u16>,
    source: Option<String>,
    destination: Option<String>,
}

impl From<MonitorFilter> for EventFilter {
    fn from(filter: MonitorFilter) -> Self {
        let types = [
            (WANT_DROP, "drop"),
            (WANT_CT, "ct"),
            (WANT_NAT, "nat"),
            (WANT_TRACE, "trace"),
        ];
        let set = |number: u16| (number != 0).then_some(number);
        Self {
            types: types
                .into_iter()
                .filter(|(bit, _)| filter.wanted & bit != 0)
                .map(|(_, name)| name)
                .collect(),
            endpoint: set(filter.endpoint),
            protocol: (filter.protocol != 0).then_some(IpProtocol(filter.protocol)),
            port: set(u16::from_be(filter.port_be)),
            source: network(&filter.source),
            destination: network(&filter.destination),
        }
    }
}

/// Formats a prefix; `None` if it matches any address.
fn network(network: &Network) -> Option<String> {
    let bits: u32 = network
        .mask
        .words_be
        .iter()
        .map(|word| word.count_ones())
        .sum();
    let address = network.address.to_ip();
    let len = if address.is_ipv4() {
        bits.saturating_sub(96)
    } else {
        bits
    };
    (bits != 0).then(|| format!("{address}/{len}"))
}

impl fmt::Display for EventFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn text(value: Option<impl ToString>) -> String {
            value.map_or_else(|| NONE.to_owned(), |value| value.to_string())
        }
        write!(
            f,
            "types={} endpoint={} protocol={} port={} source={} destination={}",
            comma_separated(&self.types),
            text(self.endpoint),
            text(self.protocol),
            text(self.port),
            text(self.source.as_ref()),
            text(self.destination.as_ref())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bpf::entry::lines;

    #[test]
    fn a_filter_shows_what_it_names() {
        assert_eq!(
            lines(&entries(vec![(0, MonitorFilter::default())])),
            "0: types=- endpoint=- protocol=- port=- source=- destination=-\n"
        );
        let address = |text: &str| text.parse::<std::net::IpAddr>().unwrap().into();
        let filter = MonitorFilter {
            wanted: WANT_DROP | WANT_NAT,
            endpoint: 77,
            port_be: 53_u16.to_be(),
            source: Network::new(address("10.244.0.0"), 96 + 16),
            destination: Network::new(address("fd00::"), 8),
            protocol: 17,
            pad: [0; 3],
        };
        assert_eq!(
            lines(&entries(vec![(0, filter)])),
            "0: types=drop,nat endpoint=77 protocol=UDP port=53 source=10.244.0.0/16 \
             destination=fd00::/8\n"
        );
    }
}
