//! The key of conntrack and NAT entries, readable.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Serialize, Serializer};

use crate::datapath::dump::Flow;

/// A conntrack or NAT tuple in the flow's original direction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct FlowKey {
    protocol: Protocol,
    pub(super) direction: Direction,
    pub(super) source: IpAddr,
    source_port: u16,
    pub(super) destination: IpAddr,
    destination_port: u16,
}

impl From<Flow> for FlowKey {
    fn from(flow: Flow) -> Self {
        Self {
            protocol: Protocol(flow.protocol),
            direction: if flow.inbound {
                Direction::In
            } else {
                Direction::Out
            },
            source: flow.source,
            source_port: flow.source_port,
            destination: flow.destination,
            destination_port: flow.destination_port,
        }
    }
}

impl fmt::Display for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {} -> {}",
            self.protocol,
            self.direction,
            SocketAddr::new(self.source, self.source_port),
            SocketAddr::new(self.destination, self.destination_port)
        )
    }
}

/// Which side opened the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Direction {
    Out,
    In,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Out => "OUT",
            Self::In => "IN",
        })
    }
}

/// An IP protocol number, shown by its name (IANA protocol numbers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Protocol(u8);

impl Protocol {
    fn name(self) -> Cow<'static, str> {
        match self.0 {
            1 => "ICMP".into(),
            6 => "TCP".into(),
            17 => "UDP".into(),
            58 => "ICMPv6".into(),
            132 => "SCTP".into(),
            other => other.to_string().into(),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl Serialize for Protocol {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_reads_from_its_opener_to_its_target() {
        let mut flow = Flow {
            protocol: 58,
            inbound: false,
            source: "fd00:30::1".parse().unwrap(),
            source_port: 7,
            destination: "fd00:30::2".parse().unwrap(),
            destination_port: 0,
        };
        assert_eq!(
            FlowKey::from(flow.clone()).to_string(),
            "ICMPv6 OUT [fd00:30::1]:7 -> [fd00:30::2]:0"
        );
        flow.protocol = 99;
        assert_eq!(
            serde_json::to_string(&FlowKey::from(flow)).unwrap(),
            r#"{"protocol":"99","direction":"out","source":"fd00:30::1","source-port":7,"destination":"fd00:30::2","destination-port":0}"#
        );
    }
}
