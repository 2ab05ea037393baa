//! The XDP maps, in readable form.

use std::net::SocketAddr;

use aya::Pod;
use health_common::ct::{Tuple4, Tuple6};
use health_common::service::xdp::{Pending, XdpDevice, XdpFlow, XdpTimes};

use super::flow::Version;
use super::map::decode;
use super::{DumpError, Flow, Pinned, Rows};
use crate::layout;

/// How packets of a flow are forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownWay {
    /// Their new source.
    pub source: SocketAddr,
    /// Their new destination.
    pub destination: SocketAddr,
    /// Their new hardware addresses: receiver, then sender.
    pub macs: [[u8; 6]; 2],
    /// The ifindex of the device that they arrive on.
    pub from: u32,
    /// The ifindex of the device that they leave through.
    pub to: u32,
    /// Maximum packet length in bytes, from the IP header on.
    pub mtu: u16,
    /// When it was looked up: `CLOCK_MONOTONIC`, in nanoseconds.
    pub made_ns: u64,
    /// When it expires: kernel ticks.
    pub until_ticks: u64,
    /// What has not been reported to conntrack yet.
    pub pending: Pending,
}

impl Pinned {
    /// The devices on which XDP serves, by ifindex.
    pub fn xdp_device_rows(&self) -> Result<Rows<(u32, XdpDevice)>, DumpError> {
        self.rows(&layout::XDP_DEVICES, decode)
    }

    /// How XDP forwards packets, by the tuple with which they arrive: IPv4, then IPv6.
    pub fn xdp_flow_rows(&self) -> Result<[Rows<(Flow, KnownWay)>; 2], DumpError> {
        Ok([
            self.rows(&layout::XDP_FLOWS4, way::<Tuple4>)?,
            self.rows(&layout::XDP_FLOWS6, way::<Tuple6>)?,
        ])
    }

    /// How long the XDP forwarding entries stay valid.
    pub fn xdp_time_rows(&self) -> Result<Rows<(u32, XdpTimes)>, DumpError> {
        self.rows(&layout::XDP_TIMES, decode)
    }
}

fn way<T: Version>(key: &[u8], value: &[u8]) -> Option<(Flow, KnownWay)>
where
    XdpFlow<T::Address>: Pod,
{
    let (tuple, flow) = decode::<T, XdpFlow<T::Address>>(key, value)?;
    let way = flow.way;
    let [sport, dport] = way.ports_be.map(u16::from_be);
    let [a, b, c] = way.macs.map(u32::to_ne_bytes);
    let known = KnownWay {
        source: SocketAddr::new(T::ip(way.source_be), sport),
        destination: SocketAddr::new(T::ip(way.destination_be), dport),
        macs: [
            [a[0], a[1], a[2], a[3], b[0], b[1]],
            [b[2], b[3], c[0], c[1], c[2], c[3]],
        ],
        from: way.from,
        to: if way.to == 0 { way.from } else { way.to },
        mtu: way.mtu,
        made_ns: flow.made_ns,
        until_ticks: flow.until_ticks,
        pending: Pending(flow.pending),
    };
    Some((Flow::of(&tuple), known))
}
