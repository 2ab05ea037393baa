//! Human-readable entries of the XDP maps.

use std::fmt;
use std::net::SocketAddr;

use health_common::service::xdp::{XdpDevice, XdpTimes};
use health_datapath::dump::{Flow, KnownWay};
use serde::Serialize;

use super::endpoint::mac;
use super::entry::Entry;
use super::flow::FlowKey;

/// Converts an entry of `HEALTH_XDP_DEVICES` for display.
pub(super) fn device((key, device): (u32, XdpDevice)) -> Entry<u32, Device> {
    Entry {
        key,
        value: Device {
            mac: mac(device.mac),
            flags: device.flags,
        },
    }
}

/// A device on which XDP handles services.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Device {
    mac: String,
    flags: u16,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mac={} flags={:#x}", self.mac, self.flags)
    }
}

/// Converts an entry of `HEALTH_XDP_FLOWS4` or `HEALTH_XDP_FLOWS6` for display.
pub(super) fn flow((flow, way): (Flow, KnownWay)) -> Entry<FlowKey, Way> {
    let [next_mac, own_mac] = way.macs.map(mac);
    Entry {
        key: FlowKey::from(&flow),
        value: Way {
            source: way.source,
            destination: way.destination,
            from_ifindex: way.from,
            to_ifindex: way.to,
            next_mac,
            own_mac,
            mtu: way.mtu,
            made_ns: way.made_ns,
            until_ticks: way.until_ticks,
            pending_packets: way.pending.packets(),
            pending_bytes: way.pending.bytes(),
        },
    }
}

/// How a flow's packets are rewritten and forwarded.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Way {
    source: SocketAddr,
    destination: SocketAddr,
    from_ifindex: u32,
    to_ifindex: u32,
    next_mac: String,
    own_mac: String,
    mtu: u16,
    made_ns: u64,
    until_ticks: u64,
    pending_packets: u64,
    pending_bytes: u64,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            source,
            destination,
            from_ifindex,
            to_ifindex,
            next_mac,
            own_mac,
            mtu,
            made_ns,
            until_ticks,
            pending_packets,
            pending_bytes,
        } = self;
        write!(
            f,
            "{source} -> {destination} ifindex={from_ifindex}->{to_ifindex} mac={own_mac}->{next_mac} mtu={mtu} \
             made={made_ns}ns until={until_ticks} pending={pending_packets}/{pending_bytes}B"
        )
    }
}

/// Converts the entry of `HEALTH_XDP_TIMES` for display.
pub(super) fn times((key, times): (u32, XdpTimes)) -> Entry<u32, Times> {
    Entry {
        key,
        value: Times {
            changed_ns: times.changed_ns,
            way_ticks: times.way_ticks,
        },
    }
}

/// How long known ways remain valid.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Times {
    changed_ns: u64,
    way_ticks: u64,
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            changed_ns,
            way_ticks,
        } = self;
        write!(f, "changed={changed_ns}ns ticks={way_ticks}")
    }
}
