//! The human-readable `HEALTH_CONFIG` entry: the programs' settings.

use std::fmt;
use std::net::IpAddr;

use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::Timeouts;
use serde::Serialize;

use super::endpoint::mac;
use super::entry::Entry;

/// Converts entries for display.
pub(super) fn entries(settings: Vec<(u32, DatapathConfig)>) -> Vec<Entry<u32, Settings>> {
    settings
        .into_iter()
        .map(|(key, config)| Entry {
            key,
            value: Settings::from(config),
        })
        .collect()
}

/// The programs' settings. Unset addresses and devices are absent.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Settings {
    layout_version: u32,
    icmp_id: u16,
    /// Shown without the key of the probes' tags, which is the mesh's secret.
    probe_session: u32,
    timeouts: Lifetimes,
    gateway4: Option<IpAddr>,
    gateway6: Option<IpAddr>,
    health_ifindex: Option<u32>,
    health4: Option<IpAddr>,
    health6: Option<IpAddr>,
    health_mac: Option<String>,
    netns_cookie: Option<u64>,
    agent_tgid: Option<u32>,
    node4: Option<IpAddr>,
    node6: Option<IpAddr>,
    flows_held_until_ns: Option<u64>,
}

impl From<DatapathConfig> for Settings {
    fn from(config: DatapathConfig) -> Self {
        let address = |addr: Addr| (!addr.is_unset()).then(|| addr.to_ip());
        let has_endpoint = config.health_ifindex != 0;
        Self {
            layout_version: config.layout_version,
            icmp_id: u16::from_be(config.icmp_id_be),
            probe_session: config.session,
            timeouts: Lifetimes::from(config.timeouts),
            gateway4: address(config.gateway4),
            gateway6: address(config.gateway6),
            health_ifindex: has_endpoint.then_some(config.health_ifindex),
            health4: address(config.health4),
            health6: address(config.health6),
            health_mac: has_endpoint.then(|| mac(config.health_mac)),
            netns_cookie: (config.netns_cookie != 0).then_some(config.netns_cookie),
            agent_tgid: (config.agent_tgid != 0).then_some(config.agent_tgid),
            node4: address(config.node4),
            node6: address(config.node6),
            flows_held_until_ns: (config.flows_held_until_ns != 0)
                .then_some(config.flows_held_until_ns),
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
        write!(f, " {}", self.timeouts)?;
        optional(f, "gateway4", self.gateway4)?;
        optional(f, "gateway6", self.gateway6)?;
        optional(f, "health_ifindex", self.health_ifindex)?;
        optional(f, "health4", self.health4)?;
        optional(f, "health6", self.health6)?;
        optional(f, "health_mac", self.health_mac.as_ref())?;
        optional(f, "netns_cookie", self.netns_cookie)?;
        optional(f, "agent_tgid", self.agent_tgid)?;
        optional(f, "node4", self.node4)?;
        optional(f, "node6", self.node6)?;
        optional(f, "flows_held_until_ns", self.flows_held_until_ns)
    }
}

/// How long conntrack entries outlive their last packet, in seconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Lifetimes {
    tcp_syn_s: u32,
    tcp_established_s: u32,
    tcp_close_s: u32,
    udp_s: u32,
    icmp_s: u32,
    sctp_s: u32,
    any_s: u32,
    fragment_s: u32,
}

impl From<Timeouts> for Lifetimes {
    fn from(timeouts: Timeouts) -> Self {
        Self {
            tcp_syn_s: timeouts.tcp_syn,
            tcp_established_s: timeouts.tcp_established,
            tcp_close_s: timeouts.tcp_close,
            udp_s: timeouts.udp,
            icmp_s: timeouts.icmp,
            sctp_s: timeouts.sctp,
            any_s: timeouts.any,
            fragment_s: timeouts.fragment,
        }
    }
}

impl fmt::Display for Lifetimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "tcp_syn_s={} tcp_established_s={} tcp_close_s={} udp_s={} icmp_s={} sctp_s={} any_s={} \
             fragment_s={}",
            self.tcp_syn_s,
            self.tcp_established_s,
            self.tcp_close_s,
            self.udp_s,
            self.icmp_s,
            self.sctp_s,
            self.any_s,
            self.fragment_s
        )
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
    use crate::bpf::entry::lines;

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
            "0: layout_version=1 icmp_id=258 probe_session=99 tcp_syn_s=60 tcp_established_s=8000 \
             tcp_close_s=10 udp_s=60 icmp_s=60 sctp_s=210 any_s=60 fragment_s=30 \
             gateway4=10.244.1.1\n"
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
