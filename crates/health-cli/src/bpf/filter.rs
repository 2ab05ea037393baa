//! Selects conntrack and NAT entries.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::str::FromStr;

use anyhow::bail;
use clap::Args;
use health_datapath::dump::{Flow, Pinned};
use health_model::address::parse_ip;
use health_model::flow::{IpProtocol, Network};

use super::flow::Direction;

/// Flags that select by protocol, address and port.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct TupleFilter {
    /// Only this protocol: tcp, udp, icmp, icmpv6, sctp or its number (repeatable)
    #[arg(long = "proto", value_name = "PROTOCOL")]
    pub(crate) protocols: Vec<IpProtocol>,
    /// Only flows from this address or prefix (repeatable)
    #[arg(long = "src", value_name = "ADDRESS|PREFIX")]
    pub(crate) sources: Vec<Network>,
    /// Only flows to this address or prefix (repeatable)
    #[arg(long = "dst", value_name = "ADDRESS|PREFIX")]
    pub(crate) destinations: Vec<Network>,
    /// Only flows with this port or ICMP identifier on either side (repeatable)
    #[arg(long = "port", value_name = "PORT")]
    pub(crate) ports: Vec<u16>,
}

/// Flags that select flows. An entry must match every kind of flag given, and for a repeated flag any of its values.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct FlowFilter {
    #[command(flatten)]
    tuple: TupleFilter,
    /// Only flows that were opened in this direction
    #[arg(long = "dir", value_enum, value_name = "DIRECTION")]
    direction: Option<Direction>,
}

impl FlowFilter {
    /// Clap ids of these flags, for argument groups.
    pub(super) const FLAGS: [&str; 5] =
        ["protocols", "sources", "destinations", "ports", "direction"];

    /// Whether an entry is selected.
    pub(super) fn has(&self, flow: &Flow) -> bool {
        fn any<T>(wanted: &[T], is: impl Fn(&T) -> bool) -> bool {
            wanted.is_empty() || wanted.iter().any(is)
        }
        let TupleFilter {
            protocols,
            sources,
            destinations,
            ports,
        } = &self.tuple;
        any(protocols, |protocol| protocol.0 == flow.protocol)
            && any(ports, |port| {
                [flow.source_port, flow.destination_port].contains(port)
            })
            && self
                .direction
                .is_none_or(|direction| direction == flow.into())
            && any(sources, |network| network.0.contains(&flow.source))
            && any(destinations, |network| {
                network.0.contains(&flow.destination)
            })
    }
}

/// Whose flows are selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// All flows.
    Global,
    /// The endpoint with this id.
    Endpoint(u16),
    /// The endpoint with this address.
    Address(IpAddr),
}

impl FromStr for Scope {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse() {
            Ok(id @ 1..=4095) => Ok(Self::Endpoint(id)),
            _ if text == "global" => Ok(Self::Global),
            _ => parse_ip(text).map(Self::Address).map_err(
                |_| "expected `global`, an endpoint id from 1 to 4095 or an endpoint's address",
            ),
        }
    }
}

impl Scope {
    /// The addresses whose flows are selected; `None` for all.
    pub(super) fn addresses(self, pinned: &Pinned) -> anyhow::Result<Option<LocalSide>> {
        let endpoints = match self {
            Self::Global => return Ok(None),
            Self::Endpoint(_) | Self::Address(_) => pinned.endpoints()?,
        };
        let known = "`health-agent bpf endpoint list` lists the existing ones";
        let id = match self {
            Self::Address(wanted) => endpoints
                .iter()
                .find(|(address, _)| *address == wanted)
                .map(|(_, endpoint)| endpoint.id),
            Self::Endpoint(id) => Some(id),
            Self::Global => None,
        };
        let addresses: BTreeSet<IpAddr> = endpoints
            .iter()
            .filter(|(_, endpoint)| Some(endpoint.id) == id)
            .map(|(address, _)| *address)
            .collect();
        match self {
            Self::Endpoint(id) if addresses.is_empty() => {
                bail!("the datapath has no endpoint {id}; {known}")
            }
            Self::Address(address) if addresses.is_empty() => {
                bail!("the datapath has no endpoint with the address {address}; {known}")
            }
            _ => Ok(Some(LocalSide(addresses))),
        }
    }
}

/// An endpoint's addresses.
#[derive(Debug)]
pub(super) struct LocalSide(BTreeSet<IpAddr>);

impl LocalSide {
    /// Whether the flow's local side is this endpoint. The local side is the source of an outbound flow and the
    /// destination of an inbound flow.
    pub(super) fn has(&self, flow: &Flow) -> bool {
        let local = if flow.inbound {
            &flow.destination
        } else {
            &flow.source
        };
        self.0.contains(local)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        filter: FlowFilter,
    }

    fn flow(protocol: u8, inbound: bool, source: (&str, u16), destination: (&str, u16)) -> Flow {
        Flow {
            protocol,
            inbound,
            source: source.0.parse().unwrap(),
            source_port: source.1,
            destination: destination.0.parse().unwrap(),
            destination_port: destination.1,
        }
    }

    fn flows() -> [Flow; 3] {
        [
            flow(6, false, ("10.244.1.9", 4000), ("1.1.1.1", 443)),
            flow(17, true, ("172.30.0.2", 53), ("10.244.1.7", 999)),
            flow(58, true, ("fd00:30::2", 1234), ("fd00:10:244:1::7", 0)),
        ]
    }

    #[test]
    fn each_flag_leaves_out_what_it_does_not_name() {
        for (flags, found) in [
            ("", [true, true, true]),
            ("--proto tcp", [true, false, false]),
            ("--proto UDP --proto 58", [false, true, true]),
            ("--src 10.244.1.9", [true, false, false]),
            ("--src 172.16.0.0/12 --src fd00::/8", [false, true, true]),
            ("--dst 10.244.1.0/24", [false, true, false]),
            ("--port 443 --port 53", [true, true, false]),
            ("--dir in", [false, true, true]),
            ("--dir out --port 53", [false, false, false]),
            ("--src 0.0.0.0/0", [true, true, false]),
        ] {
            let words = ["list"].into_iter().chain(flags.split_ascii_whitespace());
            let filter = Command::try_parse_from(words).unwrap().filter;
            assert_eq!(flows().map(|flow| filter.has(&flow)), found, "{flags}");
        }
    }

    #[test]
    fn what_is_no_protocol_address_or_port_is_named() {
        for (flag, value) in [
            ("--proto", "tpc"),
            ("--proto", "256"),
            ("--src", "10.0.0"),
            ("--dst", "10.0.0.0/33"),
            ("--dst", "host2"),
            ("--port", "65536"),
            ("--port", "http"),
            ("--dir", "up"),
        ] {
            let error = Command::try_parse_from(["list", flag, value]).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(flag) && text.contains(value), "{text}");
        }
    }

    #[test]
    fn an_endpoints_flows_are_those_whose_local_side_it_is() {
        let of = |ip: &str| {
            let side = LocalSide([ip.parse().unwrap()].into());
            flows().map(|flow| side.has(&flow))
        };
        assert_eq!(of("10.244.1.7"), [false, true, false]);
        assert_eq!(of("10.244.1.9"), [true, false, false]);
        assert_eq!(of("172.30.0.2"), [false, false, false], "the peer");
    }

    #[test]
    fn a_scope_is_global_or_an_endpoint() {
        assert_eq!("global".parse(), Ok(Scope::Global));
        assert_eq!("4095".parse(), Ok(Scope::Endpoint(4095)));
        let address = "fd00::7".parse().unwrap();
        assert_eq!("fd00::7".parse(), Ok(Scope::Address(address)));
        for bad in ["0", "4096", "-1", "all", "", "10.0.0.0/8"] {
            assert!(bad.parse::<Scope>().is_err(), "{bad}");
        }
    }
}
