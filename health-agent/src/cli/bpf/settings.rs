//! The entry of `HEALTH_CONFIG`, readable: what the programs are set to.

use std::fmt;
use std::net::IpAddr;

use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use serde::Serialize;

use super::endpoint::mac;
use super::entry::Entry;

/// Entries as they are shown.
pub(super) fn entries(settings: Vec<(u32, DatapathConfig)>) -> Vec<Entry<u32, Settings>> {
    settings
        .into_iter()
        .map(|(key, config)| Entry {
            key,
            value: Settings::from(config),
        })
        .collect()
}

/// What the programs are set to. Addresses and devices that are not set are absent.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Settings {
    layout_version: u32,
    icmp_id: u16,
    /// Not the key of the probes' tags, which is the mesh's secret.
    probe_session: u32,
    gateway4: Option<IpAddr>,
    gateway6: Option<IpAddr>,
    health_ifindex: Option<u32>,
    health4: Option<IpAddr>,
    health6: Option<IpAddr>,
    health_mac: Option<String>,
}

impl From<DatapathConfig> for Settings {
    fn from(config: DatapathConfig) -> Self {
        let address = |addr: Addr| (!addr.is_unset()).then(|| addr.to_ip());
        let has_endpoint = config.health_ifindex != 0;
        Self {
            layout_version: config.layout_version,
            icmp_id: u16::from_be(config.icmp_id_be),
            probe_session: config.session,
            gateway4: address(config.gateway4),
            gateway6: address(config.gateway6),
            health_ifindex: has_endpoint.then_some(config.health_ifindex),
            health4: address(config.health4),
            health6: address(config.health6),
            health_mac: has_endpoint.then(|| mac(config.health_mac)),
        }
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "layout_version={} icmp_id={} probe_session={}",
            self.layout_version, self.icmp_id, self.probe_session
        )?;
        optional(f, "gateway4", self.gateway4)?;
        optional(f, "gateway6", self.gateway6)?;
        optional(f, "health_ifindex", self.health_ifindex)?;
        optional(f, "health4", self.health4)?;
        optional(f, "health6", self.health6)?;
        optional(f, "health_mac", self.health_mac.as_ref())
    }
}

fn optional(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    value: Option<impl fmt::Display>,
) -> fmt::Result {
    match value {
        Some(value) => write!(f, " {name}={value}"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bpf::entry::lines;

    #[test]
    fn what_is_not_set_is_left_out() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap().into();
        let mut config = DatapathConfig {
            layout_version: 1,
            icmp_id_be: 258_u16.to_be(),
            probe_key: [0xabcd, 1],
            session: 99,
            gateway4: ip("10.244.1.1"),
            ..DatapathConfig::default()
        };
        assert_eq!(
            lines(&entries(vec![(0, config)])),
            "0: layout_version=1 icmp_id=258 probe_session=99 gateway4=10.244.1.1\n"
        );
        config.health_ifindex = 5;
        config.health6 = ip("fd00:10:244:1::7");
        config.health_mac = [0x0a, 0, 0, 0, 0, 1];
        let text = Settings::from(config).to_string();
        assert!(
            text.ends_with(
                " gateway4=10.244.1.1 health_ifindex=5 health6=fd00:10:244:1::7 \
                 health_mac=0a:00:00:00:00:01"
            ),
            "{text}"
        );
    }
}
