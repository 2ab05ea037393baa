//! Human-readable `HEALTH_FRAGMENTS4` and `HEALTH_FRAGMENTS6` entries: the ports of fragmented packets.

use std::fmt;
use std::net::IpAddr;

use health_common::addr::Addr;
use health_common::fragment::{FragmentKey4, FragmentKey6, FragmentPorts};
use health_model::flow::IpProtocol;
use serde::Serialize;

use super::entry::Entry;

/// Converts an IPv4 entry for display.
pub(super) fn entry4((key, ports): (FragmentKey4, FragmentPorts)) -> Entry<PacketKey, Ports> {
    Entry {
        key: PacketKey {
            source: Addr::v4(key.saddr_be).to_ip(),
            destination: Addr::v4(key.daddr_be).to_ip(),
            id: u16::from_be(key.id_be).into(),
        },
        value: Ports::from(ports),
    }
}

/// Converts an IPv6 entry for display.
pub(super) fn entry6((key, ports): (FragmentKey6, FragmentPorts)) -> Entry<PacketKey, Ports> {
    Entry {
        key: PacketKey {
            source: Addr::v6(key.saddr_be).to_ip(),
            destination: Addr::v6(key.daddr_be).to_ip(),
            id: u32::from_be(key.id_be),
        },
        value: Ports::from(ports),
    }
}

/// The key: a fragmented packet.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct PacketKey {
    source: IpAddr,
    destination: IpAddr,
    id: u32,
}

impl fmt::Display for PacketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {} id={}", self.source, self.destination, self.id)
    }
}

/// The ports in the packet's first fragment.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Ports {
    protocol: IpProtocol,
    source_port: u16,
    destination_port: u16,
    /// `CLOCK_MONOTONIC`, in seconds.
    expires_s: u32,
}

impl From<FragmentPorts> for Ports {
    fn from(ports: FragmentPorts) -> Self {
        Self {
            protocol: IpProtocol(ports.protocol),
            source_port: u16::from_be(ports.sport_be),
            destination_port: u16::from_be(ports.dport_be),
            expires_s: ports.expires,
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} -> {} expires={}",
            self.protocol, self.source_port, self.destination_port, self.expires_s
        )
    }
}
