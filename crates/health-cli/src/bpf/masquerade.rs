//! The human-readable `HEALTH_MASQUERADE` entry: which packets are masqueraded.

use std::fmt;
use std::net::IpAddr;

use health_common::addr::Addr;
use health_common::masquerade::{Address, Masquerade, MasqueradeConfig, Prefix};
use ipnet::IpNet;
use serde::Serialize;

use super::entry::Entry;
use crate::output::comma_separated;

/// Converts entries for display.
pub(super) fn entries(settings: Vec<(u32, MasqueradeConfig)>) -> Vec<Entry<u32, MasqueradeView>> {
    settings
        .into_iter()
        .map(|(key, config)| Entry {
            key,
            value: MasqueradeView {
                ipv4: of_version(
                    &config.v4,
                    |addr_be| Addr::v4(*addr_be),
                    |mask_be| mask_be.count_ones(),
                ),
                ipv6: of_version(
                    &config.v6,
                    |addr_be| Addr::v6(*addr_be),
                    |mask_be| mask_be.iter().map(|word| word.count_ones()).sum(),
                ),
            },
        })
        .collect()
}

fn of_version<A: Address>(
    masquerade: &Masquerade<A>,
    addr: impl Fn(&A) -> Addr,
    ones: impl Fn(&A) -> u32,
) -> Option<OfVersion> {
    let cidrs = |prefixes: &[Prefix<A>], count: u32| {
        let set = prefixes.iter().take(count as usize);
        set.filter_map(|prefix| {
            IpNet::new(addr(&prefix.addr_be).to_ip(), ones(&prefix.mask_be) as u8).ok()
        })
        .collect()
    };
    masquerade.is_on().then(|| OfVersion {
        node: addr(&masquerade.node_be).to_ip(),
        ports: [masquerade.ports.min, masquerade.ports.max],
        native: cidrs(&masquerade.native, masquerade.native_count),
        gateway: cidrs(&masquerade.gateway, masquerade.gateway_count),
    })
}

/// Which packets are masqueraded; absent for an IP version without masquerading.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct MasqueradeView {
    ipv4: Option<OfVersion>,
    ipv6: Option<OfVersion>,
}

/// Which packets of one IP version are masqueraded.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct OfVersion {
    /// The source address after masquerading.
    node: IpAddr,
    /// The lowest and the highest port.
    ports: [u16; 2],
    /// Destinations that see the original source.
    native: Vec<IpNet>,
    /// Masqueraded sources besides endpoints.
    gateway: Vec<IpNet>,
}

impl fmt::Display for MasqueradeView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match [&self.ipv4, &self.ipv6] {
            [None, None] => write!(f, "off"),
            [Some(one), None] | [None, Some(one)] => write!(f, "{one}"),
            [Some(v4), Some(v6)] => write!(f, "{v4} {v6}"),
        }
    }
}

impl fmt::Display for OfVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [min, max] = self.ports;
        write!(
            f,
            "node={} ports={min}-{max} native={} gateway={}",
            self.node,
            comma_separated(&self.native),
            comma_separated(&self.gateway)
        )
    }
}

#[cfg(test)]
mod tests {
    use health_settings::MasqueradeSettings;

    use super::*;
    use crate::bpf::entry::lines;

    #[test]
    fn what_is_masqueraded_is_shown_as_it_was_asked_for() {
        let mut settings = MasqueradeSettings {
            native_routing_cidrs: vec!["10.0.0.0/8".parse().unwrap()],
            masquerade_excludes: vec!["192.0.2.0/24".parse().unwrap()],
            masquerade_ports: "40000-40999".parse().unwrap(),
            gateway_cidrs: Vec::new(),
        };
        let nodes = ["172.30.0.1", "fd00:30::1"].map(|text| text.parse().unwrap());
        let line = |settings: &MasqueradeSettings| {
            lines(&entries(vec![(0, settings.of_node(&nodes, &[]).unwrap())]))
        };
        let ipv4 = "0: node=172.30.0.1 ports=40000-40999 native=10.0.0.0/8,192.0.2.0/24 gateway=-";
        assert_eq!(line(&settings), format!("{ipv4}\n"));
        let cidr = "fd00::/9".parse().unwrap();
        settings.native_routing_cidrs.push(cidr);
        let ipv6 = "node=fd00:30::1 ports=40000-40999 native=fd00::/9 gateway=-";
        assert_eq!(line(&settings), format!("{ipv4} {ipv6}\n"));
        let off = entries(vec![(0, MasqueradeConfig::default())]);
        assert_eq!(lines(&off), "0: off\n");
    }
}
