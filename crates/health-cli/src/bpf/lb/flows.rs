//! `bpf lb list --flows`: flows sent to backends.

use std::fmt;

use health_common::service::{
    FLOW_DIRECT, FLOW_FROM_OUTSIDE, FLOW_MASQUERADED, FLOW_MOVED, FLOW_OF_HOST, FLOW_PAST_STACK,
    FLOW_PLAIN, FLOW_RELAYED, FLOW_SHARED,
};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_datapath::dump::{Flow, Pinned, ServiceFlow};
use serde::Serialize;

use super::selection::Selection;
use super::translation::Translation;
use crate::bpf::entry::{Entry, Row};
use crate::bpf::flow::FlowKey;
use crate::bpf::stream;
use crate::output::Format;

/// How the packets of a tuple are rewritten and forwarded.
#[derive(Debug, Serialize)]
pub(in crate::bpf) struct FlowValue {
    #[serde(flatten)]
    translation: Translation,
    /// The client port that the backend sees or, for the backend's replies, the client's own port; `null` if the two
    /// are the same.
    client_port: Option<u16>,
    /// `CLOCK_MONOTONIC`, in seconds; `null` for TCP, whose entries expire with their connections.
    expires: Option<u32>,
    /// Whether the client's packets arrive on an uplink, and how they reach the backend.
    flags: Vec<&'static str>,
}

/// Flow flags and their names.
const FLAGS: [(u16, &str); 9] = [
    (FLOW_FROM_OUTSIDE, "FromOutside"),
    (FLOW_MASQUERADED, "Masqueraded"),
    (FLOW_OF_HOST, "OfHost"),
    (FLOW_DIRECT, "Direct"),
    (FLOW_RELAYED, "Relayed"),
    (FLOW_SHARED, "Shared"),
    (FLOW_PAST_STACK, "PastStack"),
    (FLOW_MOVED, "Moved"),
    (FLOW_PLAIN, "Plain"),
];

impl fmt::Display for FlowValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.translation.fmt(f)?;
        if let Some(port) = self.client_port {
            write!(f, " client-port={port}")?;
        }
        if let Some(expires) = self.expires {
            write!(f, " expires={expires}")?;
        }
        if self.flags.is_empty() {
            Ok(())
        } else {
            write!(f, " [ {} ]", self.flags.join(" "))
        }
    }
}

pub(super) fn print(pinned: &Pinned, selection: &Selection, format: Format) -> anyhow::Result<()> {
    let maps = pinned.service_flow_rows()?;
    stream::print(format, &maps, |row| {
        selection.has(row.1.service).then(|| Row::from(entry(row)))
    })
}

/// Converts an entry for display.
pub(in crate::bpf) fn entry((flow, to): (Flow, ServiceFlow)) -> Entry<FlowKey, FlowValue> {
    let key = FlowKey::from(&flow);
    let is_tcp = flow.protocol == IP_PROTOCOL_TCP;
    let value = FlowValue {
        translation: Translation {
            direction: key.direction,
            to: to.to,
            backend: to.backend,
            service: to.service,
        },
        client_port: to.client_port,
        expires: (!is_tcp).then_some(to.expires),
        flags: FLAGS
            .into_iter()
            .filter_map(|(flag, name)| (to.flags & flag != 0).then_some(name))
            .collect(),
    };
    Entry { key, value }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn both_ways_of_a_flow_are_shown() {
        let flow = |inbound, protocol, source: &str, destination: &str| {
            let source: SocketAddr = source.parse().unwrap();
            let destination: SocketAddr = destination.parse().unwrap();
            Flow {
                protocol,
                inbound,
                source: source.ip(),
                source_port: source.port(),
                destination: destination.ip(),
                destination_port: destination.port(),
            }
        };
        let to = |to: &str, flags| ServiceFlow {
            to: to.parse().unwrap(),
            backend: 4,
            service: 3,
            expires: 99,
            flags,
            client_port: (flags & FLOW_MOVED != 0).then_some(4001),
        };
        let out = flow(false, 6, "10.1.0.9:4000", "10.96.0.1:80");
        assert_eq!(
            Row::from(entry((out.clone(), to("10.1.0.1:8080", 0)))).to_string(),
            "TCP OUT 10.1.0.9:4000 -> 10.96.0.1:80 XLATE_DST 10.1.0.1:8080 backend=4 service=3"
        );
        let back = flow(true, 17, "[fd00:1::1]:53", "[fd00:1::9]:4000");
        assert_eq!(
            Row::from(entry((
                back,
                to("[fd00:96::1]:53", FLOW_FROM_OUTSIDE | FLOW_MASQUERADED)
            )))
            .to_string(),
            "UDP IN [fd00:1::1]:53 -> [fd00:1::9]:4000 XLATE_SRC [fd00:96::1]:53 backend=4 service=3 expires=99 \
             [ FromOutside Masqueraded ]"
        );
        assert_eq!(
            Row::from(entry((out, to("10.1.0.1:8080", FLOW_MOVED)))).to_string(),
            "TCP OUT 10.1.0.9:4000 -> 10.96.0.1:80 XLATE_DST 10.1.0.1:8080 backend=4 service=3 client-port=4001 [ Moved ]"
        );
    }
}
