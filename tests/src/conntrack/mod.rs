//! The same flows as this project's conntrack and as the kernel's, nf_conntrack, tell of them.

pub mod churn;
pub mod flood;
mod kernel;
pub mod lab;
mod ours;
pub mod packets;
pub mod script;
mod wire;

use std::net::IpAddr;

pub use self::kernel::Kernel;
pub use self::lab::Lab;
pub use self::ours::Ours;
pub use self::wire::{Way, Wire};

/// Packets and bytes that went one way, from the IP header on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCount {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

impl TrafficCount {
    /// What was counted after `before`; all of it where a new entry took the place of the old one.
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

/// Who is at both ends of a flow, as its first packet had it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    /// IP protocol number.
    pub protocol: u8,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Source port, or the identifier of an echo; 0 for protocols without.
    pub source_port: u16,
    /// Destination port; 0 for protocols without.
    pub destination_port: u16,
}

/// An entry, in what both can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Whose flow it is.
    pub tuple: Tuple,
    /// The state by its name; empty for protocols without.
    pub state: String,
    /// Whether a packet of the other side was seen.
    pub replied: bool,
    /// What went the first packet's way.
    pub there: TrafficCount,
    /// What went the other way.
    pub back: TrafficCount,
}

/// Packets that made no entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntrylessPackets {
    /// ICMP errors about a flow.
    pub related: u64,
    /// Packets that belong to no flow and can begin none.
    pub invalid: u64,
}

impl EntrylessPackets {
    /// What was noted after `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            related: self.related - before.related,
            invalid: self.invalid - before.invalid,
        }
    }
}
