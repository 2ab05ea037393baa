//! Compares this project's conntrack with the kernel's nf_conntrack on the same flows.

#[cfg(feature = "all")]
pub mod churn;
#[cfg(feature = "all")]
pub mod flood;
#[cfg(feature = "all")]
mod kernel;
#[cfg(feature = "all")]
pub mod lab;
#[cfg(feature = "all")]
mod ours;
pub mod packets;
#[cfg(feature = "all")]
pub mod script;
#[cfg(feature = "all")]
mod wire;

use std::net::IpAddr;

#[cfg(feature = "all")]
pub use self::kernel::Kernel;
#[cfg(feature = "all")]
pub use self::lab::Lab;
#[cfg(feature = "all")]
pub use self::ours::Ours;
#[cfg(feature = "all")]
pub use self::wire::{Way, Wire};

/// Packets and bytes in one direction, counted from the IP header on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCount {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

impl TrafficCount {
    /// The difference from `before`, or the whole count if a new entry has replaced the old one.
    pub fn since(self, before: Self) -> Self {
        if self.packets < before.packets {
            return self;
        }
        Self {
            packets: self.packets - before.packets,
            bytes: self.bytes - before.bytes,
        }
    }
}

/// The protocol and both ends of a flow, as in its first packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    /// IP protocol number.
    pub protocol: u8,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Source port, or the identifier for ICMP echoes; 0 for protocols without ports.
    pub source_port: u16,
    /// Destination port; 0 for protocols without ports.
    pub destination_port: u16,
}

/// A conntrack entry, reduced to the fields that both implementations have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Protocol, addresses and ports of the flow.
    pub tuple: Tuple,
    /// Name of the state; empty for protocols without states.
    pub state: String,
    /// Whether a packet in the reply direction was seen.
    pub replied: bool,
    /// Traffic in the direction of the first packet.
    pub there: TrafficCount,
    /// Traffic in the reply direction.
    pub back: TrafficCount,
}

/// Numbers of packets that created no entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntrylessPackets {
    /// ICMP errors about a flow.
    pub related: u64,
    /// Packets that belong to no flow and cannot start one.
    pub invalid: u64,
}

impl EntrylessPackets {
    /// The difference from `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            related: self.related - before.related,
            invalid: self.invalid - before.invalid,
        }
    }
}
