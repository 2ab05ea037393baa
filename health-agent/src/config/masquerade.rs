//! What is masqueraded, by the flags.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use health_common::masquerade::{
    Address, GATEWAY_MAX, Masquerade, MasqueradeConfig, NATIVE_MAX, Prefix,
};
use health_common::nat::Ports;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::InvalidSetting;

/// Lower ports are those of well-known services (RFC 6335 section 6).
const MIN_PORT: u16 = 1024;

/// The ports that translated flows get, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct MasqueradePorts(Ports);

impl fmt::Display for MasqueradePorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0.min, self.0.max)
    }
}

impl From<MasqueradePorts> for String {
    fn from(ports: MasqueradePorts) -> Self {
        ports.to_string()
    }
}

/// The text is no [`MasqueradePorts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write it like 32768-65535: the lowest port and the highest, {MIN_PORT} or more")]
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
        if MIN_PORT <= ports.min && ports.min <= ports.max {
            Ok(Self(ports))
        } else {
            Err(MasqueradePortsError)
        }
    }
}

impl TryFrom<String> for MasqueradePorts {
    type Error = MasqueradePortsError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// Whose packets get this node's address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MasqueradeSettings {
    /// Destinations that are reached without translation. Those of an IP version turn masquerading on
    /// for it.
    pub native_routing_cidrs: Vec<IpNet>,
    /// More destinations of that kind, which turn nothing on.
    pub masquerade_excludes: Vec<IpNet>,
    /// The ports that translated flows get.
    pub masquerade_ports: MasqueradePorts,
    /// Sources behind this host that are masqueraded besides its endpoints.
    pub gateway_cidrs: Vec<IpNet>,
}

/// Masquerading was asked for in an IP version in which the node has no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--native-routing-cidr {cidr}: this node has no address of that IP version to masquerade with; leave the flag out or \
     give the node one"
)]
pub struct NoNodeAddress {
    cidr: IpNet,
}

impl MasqueradeSettings {
    /// Checks the form of all, and that each has an effect.
    pub(super) fn validate(&self) -> Result<(), InvalidSetting> {
        let lists = [
            ("--native-routing-cidr", &self.native_routing_cidrs),
            ("--masquerade-exclude", &self.masquerade_excludes),
            ("--gateway-cidr", &self.gateway_cidrs),
        ];
        for (flag, cidrs) in lists {
            for cidr in cidrs {
                if cidr.trunc() != *cidr {
                    let reason = format!("has host bits set; write {}", cidr.trunc());
                    return Err(InvalidSetting::new(flag, cidr, reason));
                }
                if !self.is_on(is_ipv4(cidr)) {
                    let version = if is_ipv4(cidr) { "IPv4" } else { "IPv6" };
                    let reason = format!(
                        "has no effect: nothing of {version} is masqueraded without --native-routing-cidr"
                    );
                    return Err(InvalidSetting::new(flag, cidr, reason));
                }
            }
        }
        let native = [lists[0], lists[1]];
        for (lists, max) in [(&native[..], NATIVE_MAX), (&lists[2..], GATEWAY_MAX)] {
            for is_v4 in [true, false] {
                let of_version = lists
                    .iter()
                    .flat_map(|(flag, cidrs)| cidrs.iter().map(move |cidr| (*flag, cidr)))
                    .filter(|(_, cidr)| is_ipv4(cidr) == is_v4);
                if let Some((flag, cidr)) = of_version.skip(max).next() {
                    let reason =
                        format!("is one too many: there is room for {max} of an IP version");
                    return Err(InvalidSetting::new(flag, cidr, reason));
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

    /// What the programs are told, on a node with these addresses. The first of an IP version is what
    /// sources become.
    pub fn of_node(&self, addresses: &[IpAddr]) -> Result<MasqueradeConfig, NoNodeAddress> {
        let v4 = addresses.iter().find_map(|address| match address {
            IpAddr::V4(v4) => Some(word(v4.octets())),
            IpAddr::V6(_) => None,
        });
        let v6 = addresses.iter().find_map(|address| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => Some(words(v6.octets())),
        });
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

    fn of_version<A: Address + Default>(
        &self,
        node_be: Option<A>,
        prefix: impl Fn(&IpNet) -> Option<Prefix<A>>,
    ) -> Result<Masquerade<A>, NoNodeAddress> {
        let mut masquerade = Masquerade::default();
        let Some(first) = self
            .native_routing_cidrs
            .iter()
            .find(|cidr| prefix(cidr).is_some())
        else {
            return Ok(masquerade);
        };
        masquerade.node_be = node_be.ok_or(NoNodeAddress { cidr: *first })?;
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

/// Puts values into the first places; how many.
fn fill<T>(places: &mut [T], values: impl Iterator<Item = T>) -> u32 {
    let mut count = 0;
    for (place, value) in places.iter_mut().zip(values) {
        *place = value;
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
