//! The human-readable key of conntrack and NAT entries.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use clap::ValueEnum;
use health_datapath::dump::Flow;
use health_model::flow::IpProtocol;
use serde::Serialize;

use super::address;

/// A conntrack or NAT tuple in the flow's original direction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct FlowKey {
    protocol: IpProtocol,
    pub(super) direction: Direction,
    #[serde(serialize_with = "address::serialize")]
    source: IpAddr,
    source_port: u16,
    #[serde(serialize_with = "address::serialize")]
    destination: IpAddr,
    destination_port: u16,
}

impl From<&Flow> for FlowKey {
    fn from(flow: &Flow) -> Self {
        Self {
            protocol: IpProtocol(flow.protocol),
            direction: flow.into(),
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Direction {
    /// Opened by this side
    Out,
    /// Opened towards a local endpoint
    In,
}

impl From<&Flow> for Direction {
    fn from(flow: &Flow) -> Self {
        if flow.inbound { Self::In } else { Self::Out }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Out => "OUT",
            Self::In => "IN",
        })
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
            FlowKey::from(&flow).to_string(),
            "ICMPv6 OUT [fd00:30::1]:7 -> [fd00:30::2]:0"
        );
        flow.protocol = 99;
        assert_eq!(
            serde_json::to_string(&FlowKey::from(&flow)).unwrap(),
            r#"{"protocol":"99","direction":"out","source":"fd00:30::1","source-port":7,"destination":"fd00:30::2","destination-port":0}"#
        );
    }
}
