//! Selects rows.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use anyhow::Context;
use clap::{Args, ValueEnum};
use health_api::client::ClientError;
use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, PROTOCOL_TCP, RttKey};
use health_model::address::{parse_ip, parse_network};
use ipnet::IpNet;

use super::names::Names;

/// A peer as named on the command line.
#[derive(Clone, Debug)]
pub(super) enum Peer {
    Address(IpAddr),
    Prefix(IpNet),
    Node(String),
}

impl FromStr for Peer {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(if let Ok(address) = parse_ip(text) {
            Self::Address(address)
        } else if let Ok(prefix) = parse_network(text) {
            Self::Prefix(prefix)
        } else {
            Self::Node(text.to_owned())
        })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Prefix(prefix) => prefix.fmt(f),
            Self::Node(name) => name.fmt(f),
        }
    }
}

/// Flags that select rows of a peer.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(super) struct Scope {
    /// Only addresses of nodes, or only those of health endpoints
    #[arg(long, value_enum, value_name = "PATH")]
    path: Option<PathName>,
    /// Only round trips measured by this protocol
    #[arg(long, value_enum, value_name = "PROTOCOL")]
    protocol: Option<ProtocolName>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PathName {
    /// Addresses of nodes
    Host,
    /// Addresses of health endpoints
    Endpoint,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProtocolName {
    /// Echo probes
    Icmp,
    /// HTTP probes
    Http,
    /// Existing TCP connections
    Tcp,
}

impl Scope {
    /// Whether a row is in the scope.
    pub(super) fn has(self, key: &RttKey) -> bool {
        let path = self.path.is_none_or(|path| {
            let path = match path {
                PathName::Host => Path::Host,
                PathName::Endpoint => Path::Endpoint,
            };
            key.path == path as u8
        });
        path && self.protocol.is_none_or(|protocol| {
            key.protocol
                == match protocol {
                    ProtocolName::Icmp => PROTOCOL_ICMP,
                    ProtocolName::Http => PROTOCOL_HTTP,
                    ProtocolName::Tcp => PROTOCOL_TCP,
                }
        })
    }
}

/// Peers resolved to addresses.
#[derive(Debug)]
pub(super) enum Addresses {
    Prefix(IpNet),
    All(BTreeSet<IpAddr>),
}

impl Addresses {
    /// The addresses of `peer`; node names are looked up in `names`.
    pub(super) fn of(peer: &Peer, names: &Result<Names, ClientError>) -> anyhow::Result<Self> {
        Ok(match peer {
            Peer::Address(address) => Self::All([*address].into()),
            Peer::Prefix(prefix) => Self::Prefix(*prefix),
            Peer::Node(name) => match names {
                Ok(names) => Self::All(names.addresses(name)?),
                Err(error) => {
                    return Err(anyhow::anyhow!("{error}")).with_context(|| {
                        format!("cannot look up node {name:?}: give addresses or prefixes")
                    });
                }
            },
        })
    }

    /// Whether a row's peer is one of these addresses.
    pub(super) fn has(&self, key: &RttKey) -> bool {
        let address = key.peer.to_ip();
        match self {
            Self::Prefix(prefix) => prefix.contains(&address),
            Self::All(addresses) => addresses.contains(&address),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use health_model::api::{NodeEntry, NodeList};

    use super::*;

    pub(in super::super) fn key(peer: &str, path: Path, protocol: u8) -> RttKey {
        let peer: IpAddr = peer.parse().unwrap();
        RttKey {
            peer: peer.into(),
            path: path as u8,
            protocol,
            pad: 0,
        }
    }

    pub(in super::super) fn names() -> Names {
        let node = |name: &str, address: &str, health: &str| NodeEntry {
            name: name.to_owned(),
            local: false,
            addresses: vec![address.parse().unwrap()],
            pod_cidrs: vec![],
            health_addresses: vec![health.parse().unwrap()],
            not_probed: Vec::new(),
        };
        let nodes = vec![
            node("default/hnode2", "172.30.0.2", "10.244.2.7"),
            node("west/hnode3", "fd00:30::3", "fd00:10:244:3::7"),
        ];
        let registries = vec![];
        NodeList { registries, nodes }.into()
    }

    #[test]
    fn a_peer_is_an_address_a_prefix_or_a_node() {
        let names = Ok(names());
        let host = key("172.30.0.2", Path::Host, PROTOCOL_ICMP);
        let endpoint = key("10.244.2.7", Path::Endpoint, PROTOCOL_ICMP);
        let v6 = key("fd00:30::3", Path::Host, PROTOCOL_HTTP);
        for (peer, found) in [
            ("172.30.0.2", [true, false, false]),
            ("10.0.0.0/8", [false, true, false]),
            ("fd00:30::/64", [false, false, true]),
            ("hnode2", [true, true, false]),
            ("west/hnode3", [false, false, true]),
        ] {
            let addresses = Addresses::of(&peer.parse().unwrap(), &names).unwrap();
            let has = [&host, &endpoint, &v6].map(|key| addresses.has(key));
            assert_eq!(has, found, "{peer}");
        }
        let unknown = Addresses::of(&"hnode9".parse().unwrap(), &names).unwrap_err();
        assert!(unknown.to_string().contains("hnode9"), "{unknown}");
    }

    #[test]
    fn without_an_agent_names_are_refused_and_addresses_are_not() {
        let names = Err(ClientError::NoAgent("/run/health.sock".into()));
        let error = Addresses::of(&"hnode2".parse().unwrap(), &names).unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains("hnode2") && text.contains("/run/health.sock"),
            "{text}"
        );
        Addresses::of(&"172.30.0.0/24".parse().unwrap(), &names).unwrap();
    }

    #[test]
    fn a_scope_leaves_other_paths_and_protocols_out() {
        let scope = Scope {
            path: Some(PathName::Endpoint),
            protocol: Some(ProtocolName::Tcp),
        };
        let keys = [
            key("10.0.0.1", Path::Endpoint, PROTOCOL_TCP),
            key("10.0.0.1", Path::Endpoint, PROTOCOL_ICMP),
            key("10.0.0.1", Path::Host, PROTOCOL_TCP),
        ];
        assert_eq!(keys.map(|key| scope.has(&key)), [true, false, false]);
        assert!(keys.iter().all(|key| Scope::default().has(key)));
    }
}
