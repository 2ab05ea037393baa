//! Conntrack and NAT entries of both IP versions, in readable form.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use aya::Pod;
use health_common::ct::{CtEntry, TUPLE_IN, Tuple4, Tuple6};
use health_common::nat::NAT_HOST_LOCAL;
use health_common::tuple::Tuple;

use super::map::decode;
use crate::layout::{self, MapLayout};

/// A conntrack or NAT tuple in readable form. Ports and ICMP identifiers are in host byte order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// IP protocol number.
    pub protocol: u8,
    /// Opened towards a local endpoint (`true`) or by this host.
    pub inbound: bool,
    /// Source address.
    pub source: IpAddr,
    /// Source port or ICMP identifier.
    pub source_port: u16,
    /// Destination address.
    pub destination: IpAddr,
    /// Destination port or 0.
    pub destination_port: u16,
}

/// A translation in readable form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Address after translation.
    pub addr: IpAddr,
    /// Port or identifier after translation, host byte order.
    pub port: u16,
    /// `CLOCK_MONOTONIC`, in nanoseconds.
    pub created_ns: u64,
    /// The host's own flow: nothing is rewritten.
    pub host_local: bool,
}

/// The tuples of one IP version, and the maps that use them as keys.
pub(super) trait Version: Tuple<Translation: Pod> + Pod {
    /// For TCP, and for other protocols.
    const CT: [MapLayout; 2];
    const NAT: [MapLayout; 2];

    fn ip(address: Self::Address) -> IpAddr;
}

impl Version for Tuple4 {
    const CT: [MapLayout; 2] = [layout::CT4, layout::CT_ANY4];
    const NAT: [MapLayout; 2] = [layout::NAT4, layout::NAT_ANY4];

    fn ip(addr_be: u32) -> IpAddr {
        Ipv4Addr::from_bits(u32::from_be(addr_be)).into()
    }
}

impl Version for Tuple6 {
    const CT: [MapLayout; 2] = [layout::CT6, layout::CT_ANY6];
    const NAT: [MapLayout; 2] = [layout::NAT6, layout::NAT_ANY6];

    /// Does not use [`health_common::addr::Addr`]: an IPv4 address in an IPv6 tuple stays unchanged.
    fn ip(words_be: [u32; 4]) -> IpAddr {
        let words = words_be.map(|word| u128::from(u32::from_be(word)));
        let bits = words.into_iter().fold(0, |bits, word| bits << 32 | word);
        Ipv6Addr::from_bits(bits).into()
    }
}

impl Flow {
    pub(super) fn of<T: Version>(tuple: &T) -> Self {
        let (source, sport_be) = tuple.source();
        let (destination, dport_be) = tuple.destination();
        Self {
            protocol: tuple.protocol(),
            inbound: tuple.direction() == TUPLE_IN,
            source: T::ip(source),
            source_port: u16::from_be(sport_be),
            destination: T::ip(destination),
            destination_port: u16::from_be(dport_be),
        }
    }
}

impl Translation {
    pub(super) fn of<T: Version>(entry: &T::Translation) -> Self {
        let (address, port_be) = T::translated(entry);
        Self {
            addr: T::ip(address),
            port: u16::from_be(port_be),
            created_ns: T::created_ns(entry),
            host_local: T::flags(entry) & NAT_HOST_LOCAL != 0,
        }
    }
}

/// Returns the key of a translation's other entry, given one of its two entries.
pub(super) fn other_key<T: Version>(tuple: T, entry: &T::Translation) -> T {
    if tuple.direction() == TUPLE_IN {
        tuple.flow(entry)
    } else {
        tuple.reply_key(entry)
    }
}

/// Decodes a conntrack entry.
pub(super) fn conntrack<T: Version>(key: &[u8], value: &[u8]) -> Option<(Flow, CtEntry)> {
    let (tuple, entry) = decode::<T, _>(key, value)?;
    Some((Flow::of(&tuple), entry))
}

/// Decodes a NAT entry.
pub(super) fn translation<T: Version>(key: &[u8], value: &[u8]) -> Option<(Flow, Translation)> {
    let (tuple, entry) = decode::<T, T::Translation>(key, value)?;
    Some((Flow::of(&tuple), Translation::of::<T>(&entry)))
}
