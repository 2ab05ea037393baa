//! The masquerading settings.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use clap::Args;
use health_common::masquerade::{
    Address, GATEWAY_MAX, Masquerade, MasqueradeConfig, NATIVE_MAX, Prefix,
};
use health_common::nat::Ports;
use health_model::address::parse_network;
use health_model::settings::InvalidSetting;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::check::Invalid;
use super::form::Common;
use super::range::{Ranged, within};

/// The ports for translated flows, both ends inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MasqueradePorts(Ports);

impl fmt::Display for MasqueradePorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0.min, self.0.max)
    }
}

/// The text is not a [`MasqueradePorts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write it like 32768-65535: the lowest and the highest port")]
pub struct MasqueradePortsError;

impl FromStr for MasqueradePorts {
    type Err = MasqueradePortsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (min, max) = text.split_once('-').ok_or(MasqueradePortsError)?;
        let port = |text: &str| text.parse().map_err(|_| MasqueradePortsError);
        let ports = Ports {
            min: port(min)?,
            max: port(max)?,
        };
        match ports.min <= ports.max {
            true => Ok(Self(ports)),
            false => Err(MasqueradePortsError),
        }
    }
}

impl Ranged for MasqueradePorts {
    type Bound = u16;

    fn amounts(&self) -> impl Iterator<Item = u16> {
        [self.0.min, self.0.max].into_iter()
    }
}

/// Which packets are masqueraded with this node's address.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Masquerading")]
pub struct MasqueradeSettings {
    /// Destinations that endpoints reach without masquerading; enables masquerading to all other destinations of the
    /// same IP version (repeatable or comma-separated)
    #[arg(
        long = "native-routing-cidr", value_name = "CIDR", value_parser = parse_network, value_delimiter = ',',
        add = Common
    )]
    pub native_routing_cidrs: Vec<IpNet>,
    /// Destinations to reach without masquerading, in addition to --native-routing-cidr (repeatable or comma-separated)
    #[arg(long = "masquerade-exclude", value_name = "CIDR", value_parser = parse_network, value_delimiter = ',')]
    pub masquerade_excludes: Vec<IpNet>,
    /// Source ports for masqueraded flows
    // Lower ports belong to well-known services (RFC 6335 section 6).
    #[arg(
        long, value_name = "MIN-MAX", default_value = "32768-65535",
        add = within::<MasqueradePorts>(1024, 65535)
    )]
    pub masquerade_ports: MasqueradePorts,
    /// Networks behind this host whose traffic to masquerade as well (repeatable or comma-separated)
    #[arg(long = "gateway-cidr", value_name = "CIDR", value_parser = parse_network, value_delimiter = ',')]
    pub gateway_cidrs: Vec<IpNet>,
}

/// Why a node cannot masquerade as the flags request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MasqueradeError {
    /// Masquerading was requested for an IP version in which the node has no address.
    #[error(
        "--native-routing-cidr {cidr}: this node has no address of that IP version to masquerade with; leave the flag out or \
         give the node one"
    )]
    NoNodeAddress {
        /// The flag's value.
        cidr: IpNet,
    },
    /// Endpoints would be treated as hosts behind this one, whose flows are not subject to policy.
    #[error(
        "--gateway-cidr {cidr} overlaps this node's pod CIDR {pod_cidr}; name only networks without endpoints; endpoints \
         are masqueraded anyway"
    )]
    GatewayOverlapsPods {
        /// The flag's value.
        cidr: IpNet,
        /// The prefix of this node's endpoints.
        pod_cidr: IpNet,
    },
}

impl MasqueradeSettings {
    /// Checks the form of all settings, and that each one has an effect.
    pub(super) fn validate(&self) -> Result<(), Invalid> {
        let lists = [
            ("--native-routing-cidr", &self.native_routing_cidrs),
            ("--masquerade-exclude", &self.masquerade_excludes),
            ("--gateway-cidr", &self.gateway_cidrs),
        ];
        for (flag, cidrs) in lists {
            for cidr in cidrs {
                if cidr.trunc() != *cidr {
                    let reason = format!("has host bits set; write {}", cidr.trunc());
                    return Err(InvalidSetting::new(flag, cidr, reason).into());
                }
                if !self.is_on(is_ipv4(cidr)) {
                    let version = if is_ipv4(cidr) { "IPv4" } else { "IPv6" };
                    let reason = format!(
                        "has no effect: {version} is not masqueraded without --native-routing-cidr"
                    );
                    let invalid = InvalidSetting::new(flag, cidr, reason);
                    return Err(Invalid::with(invalid, ["--native-routing-cidr"]));
                }
            }
        }
        let native = [lists[0], lists[1]];
        for (lists, max) in [(&native[..], NATIVE_MAX), (&lists[2..], GATEWAY_MAX)] {
            for is_v4 in [true, false] {
                let mut of_version = lists
                    .iter()
                    .flat_map(|(flag, cidrs)| cidrs.iter().map(move |cidr| (*flag, cidr)))
                    .filter(|(_, cidr)| is_ipv4(cidr) == is_v4);
                if let Some((flag, cidr)) = of_version.nth(max) {
                    let reason = format!("exceeds the limit of {max} networks per IP version");
                    return Err(InvalidSetting::new(flag, cidr, reason).into());
                }
            }
        }
        Ok(())
    }

    fn is_on(&self, is_v4: bool) -> bool {
        self.native_routing_cidrs
            .iter()
            .any(|cidr| is_ipv4(cidr) == is_v4)
    }

    /// The programs' configuration on a node with these addresses, whose endpoints have addresses in `pod_cidrs`.
    /// Sources are translated to the node's first address of their IP version.
    pub fn of_node(
        &self,
        addresses: &[IpAddr],
        pod_cidrs: &[IpNet],
    ) -> Result<MasqueradeConfig, MasqueradeError> {
        for &cidr in &self.gateway_cidrs {
            let overlaps = |pods: &&IpNet| pods.contains(&cidr) || cidr.contains(*pods);
            if let Some(&pod_cidr) = pod_cidrs.iter().find(overlaps) {
                return Err(MasqueradeError::GatewayOverlapsPods { cidr, pod_cidr });
            }
        }
        let (v4, v6) = first_addresses(addresses);
        Ok(MasqueradeConfig {
            v4: self.of_version(v4, |cidr| match cidr {
                IpNet::V4(v4) => Some(prefix4(v4)),
                IpNet::V6(_) => None,
            })?,
            v6: self.of_version(v6, |cidr| match cidr {
                IpNet::V4(_) => None,
                IpNet::V6(v6) => Some(prefix6(v6)),
            })?,
        })
    }

    /// Like [`of_node`](Self::of_node), for a node that serves outside clients. If masquerading is off for an IP
    /// version, all destinations are still reached without translation, but packets to backends on other nodes must
    /// leave with the node's address.
    pub fn of_serving_node(
        &self,
        addresses: &[IpAddr],
        pod_cidrs: &[IpNet],
    ) -> Result<MasqueradeConfig, MasqueradeError> {
        let mut config = self.of_node(addresses, pod_cidrs)?;
        let (v4, v6) = first_addresses(addresses);
        self.serve(&mut config.v4, v4);
        self.serve(&mut config.v6, v6);
        Ok(config)
    }

    fn serve<A: Address + Default>(&self, masquerade: &mut Masquerade<A>, node_be: Option<A>) {
        let Some(node_be) = node_be.filter(|_| !masquerade.is_on()) else {
            return;
        };
        masquerade.node_be = node_be;
        masquerade.ports = self.masquerade_ports.0;
        // The first prefix has length 0, so it covers all addresses.
        masquerade.native_count = 1;
    }

    fn of_version<A: Address + Default>(
        &self,
        node_be: Option<A>,
        prefix: impl Fn(&IpNet) -> Option<Prefix<A>>,
    ) -> Result<Masquerade<A>, MasqueradeError> {
        let mut masquerade = Masquerade::default();
        let Some(first) = self
            .native_routing_cidrs
            .iter()
            .find(|cidr| prefix(cidr).is_some())
        else {
            return Ok(masquerade);
        };
        masquerade.node_be = node_be.ok_or(MasqueradeError::NoNodeAddress { cidr: *first })?;
        masquerade.ports = self.masquerade_ports.0;
        let native = self
            .native_routing_cidrs
            .iter()
            .chain(&self.masquerade_excludes);
        masquerade.native_count = fill(&mut masquerade.native, native.filter_map(&prefix));
        let gateway = self.gateway_cidrs.iter().filter_map(&prefix);
        masquerade.gateway_count = fill(&mut masquerade.gateway, gateway);
        Ok(masquerade)
    }
}

/// The first address of each IP version, in network byte order.
fn first_addresses(addresses: &[IpAddr]) -> (Option<u32>, Option<[u32; 4]>) {
    let v4 = addresses.iter().find_map(|address| match address {
        IpAddr::V4(v4) => Some(word(v4.octets())),
        IpAddr::V6(_) => None,
    });
    let v6 = addresses.iter().find_map(|address| match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(v6) => Some(words(v6.octets())),
    });
    (v4, v6)
}

/// Writes values to the first slots. Returns the number of values written.
fn fill<T>(slots: &mut [T], values: impl Iterator<Item = T>) -> u32 {
    let mut count = 0;
    for (slot, value) in slots.iter_mut().zip(values) {
        *slot = value;
        count += 1;
    }
    count
}

fn is_ipv4(cidr: &IpNet) -> bool {
    matches!(cidr, IpNet::V4(_))
}

fn prefix4(cidr: &Ipv4Net) -> Prefix<u32> {
    Prefix {
        addr_be: word(cidr.network().octets()),
        mask_be: word(cidr.netmask().octets()),
    }
}

fn prefix6(cidr: &Ipv6Net) -> Prefix<[u32; 4]> {
    Prefix {
        addr_be: words(cidr.network().octets()),
        mask_be: words(cidr.netmask().octets()),
    }
}

fn word(octets: [u8; 4]) -> u32 {
    u32::from_ne_bytes(octets)
}

fn words(octets: [u8; 16]) -> [u32; 4] {
    health_common::addr::Addr::from(std::net::Ipv6Addr::from(octets)).words_be
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(native: &[&str], excludes: &[&str], gateway: &[&str]) -> MasqueradeSettings {
        let cidrs = |texts: &[&str]| {
            let cidrs = texts.iter().map(|text| text.parse().expect(text));
            cidrs.collect()
        };
        MasqueradeSettings {
            native_routing_cidrs: cidrs(native),
            masquerade_excludes: cidrs(excludes),
            masquerade_ports: "40000-40999".parse().expect("ports"),
            gateway_cidrs: cidrs(gateway),
        }
    }

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        let addresses = texts.iter().map(|text| text.parse().expect(text));
        addresses.collect()
    }

    #[test]
    fn ports_are_the_lowest_and_the_highest() {
        for text in ["32768-65535", "1024-1024"] {
            let ports: MasqueradePorts = text.parse().expect(text);
            assert_eq!(ports.to_string(), text);
        }
        for bad in ["", "1024", "2000-1999", "1024-65536", "a-b", "-", "1-2-3"] {
            assert_eq!(
                bad.parse::<MasqueradePorts>(),
                Err(MasqueradePortsError),
                "{bad}"
            );
        }
    }

    #[test]
    fn an_ip_version_is_masqueraded_that_has_a_native_prefix() {
        let settings = settings(&["10.0.0.0/8"], &["192.0.2.0/24"], &["192.168.0.0/16"]);
        let nodes = addresses(&["fd00:30::1", "172.30.0.1", "172.30.9.1"]);
        let config = settings.of_node(&nodes, &[]).expect("both versions");
        assert_eq!(config.v6, Masquerade::default());
        assert!(config.v4.is_on());
        assert_eq!(config.v4.node_be, word([172, 30, 0, 1]), "the first one");
        let native = |octets| config.v4.is_native(&word(octets));
        assert!(native([10, 200, 0, 1]) && native([192, 0, 2, 7]));
        assert!(!native([11, 0, 0, 1]) && !native([192, 0, 3, 7]));
        assert!(config.v4.is_behind(&word([192, 168, 7, 7])));
        assert!(!config.v4.is_behind(&word([10, 1, 1, 1])));
    }

    #[test]
    fn a_node_that_serves_has_an_address_where_nothing_is_masqueraded() {
        let settings = settings(&["10.0.0.0/8"], &[], &[]);
        let nodes = addresses(&["172.30.0.1", "fd00:30::1"]);
        let config = settings
            .of_serving_node(&nodes, &[])
            .expect("both versions");
        let plain = settings.of_node(&nodes, &[]).expect("both versions");
        assert_eq!(config.v4, plain.v4);
        assert!(config.v6.is_on() && !plain.v6.is_on());
        let far = words(
            "2001:db8::9"
                .parse::<std::net::Ipv6Addr>()
                .expect("an address")
                .octets(),
        );
        assert!(config.v6.is_native(&far) && !config.v6.is_behind(&far));
        let only4 = settings.of_serving_node(&nodes[..1], &[]).expect("IPv4");
        assert!(!only4.v6.is_on());
    }

    #[test]
    fn a_gateways_network_is_not_one_of_the_nodes_endpoints() {
        let nodes = addresses(&["172.30.0.1", "fd00:30::1"]);
        let pods: Vec<IpNet> = ["10.244.1.0/24", "fd00:10:244:1::/64"]
            .map(|text| text.parse().expect(text))
            .into();
        let native = ["10.0.0.0/8", "fd00::/8"];
        for (gateway, pod_cidr) in [
            ("10.244.0.0/16", pods[0]),
            ("10.244.1.0/24", pods[0]),
            ("10.244.1.128/25", pods[0]),
            ("fd00:10:244:1::7/128", pods[1]),
        ] {
            let cidr = gateway.parse().expect(gateway);
            assert_eq!(
                settings(&native, &[], &[gateway]).of_node(&nodes, &pods),
                Err(MasqueradeError::GatewayOverlapsPods { cidr, pod_cidr })
            );
        }
        let beside = settings(&native, &[], &["10.244.2.0/24", "fd00:10:244:2::/64"]);
        assert!(beside.of_node(&nodes, &pods).is_ok());
    }

    #[test]
    fn a_node_needs_an_address_to_masquerade_with() {
        let settings = settings(&["10.0.0.0/8", "fd00::/8"], &[], &[]);
        let error = settings
            .of_node(&addresses(&["172.30.0.1"]), &[])
            .expect_err("no IPv6");
        let text = error.to_string();
        assert!(
            text.starts_with("--native-routing-cidr fd00::/8: "),
            "{text}"
        );
    }
}
