//! Conntrack and NAT entries of both families, readable.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use aya::Pod;
use health_common::ct::{CtEntry, TUPLE_IN, Tuple4, Tuple6};
use health_common::nat::{NAT_HOST_LOCAL, NatEntry4, NatEntry6};

use super::map::decode;
use crate::layout::{self, MapLayout};

/// A conntrack or NAT tuple, readable. Ports and ICMP identifiers in host byte order.
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

/// A translation, readable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Address after translation.
    pub addr: IpAddr,
    /// Port or identifier after translation, host byte order.
    pub port: u16,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub created_ns: u64,
    /// The host's own flow: nothing is rewritten.
    pub host_local: bool,
}

/// What tuples and translations are in one IP version.
pub(super) trait Family {
    type Tuple: Pod;
    type NatEntry: Pod;
    const CT: MapLayout;
    const NAT: MapLayout;

    fn flow(tuple: &Self::Tuple) -> Flow;
    fn translation(entry: &Self::NatEntry) -> Translation;
    /// The key of the other entry of a translation, whose one entry is this.
    fn other_entry(tuple: &Self::Tuple, entry: &Self::NatEntry) -> Self::Tuple;
}

/// IPv4.
pub(super) struct V4;

/// IPv6.
pub(super) struct V6;

impl Family for V4 {
    type Tuple = Tuple4;
    type NatEntry = NatEntry4;
    const CT: MapLayout = layout::CT4;
    const NAT: MapLayout = layout::NAT4;

    fn flow(tuple: &Tuple4) -> Flow {
        Flow {
            protocol: tuple.protocol,
            inbound: tuple.direction == TUPLE_IN,
            source: v4(tuple.saddr_be),
            source_port: u16::from_be(tuple.sport_be),
            destination: v4(tuple.daddr_be),
            destination_port: u16::from_be(tuple.dport_be),
        }
    }

    fn translation(entry: &NatEntry4) -> Translation {
        Translation {
            addr: v4(entry.addr_be),
            port: u16::from_be(entry.port_be),
            created_ns: entry.created_ns,
            host_local: entry.flags & NAT_HOST_LOCAL != 0,
        }
    }

    fn other_entry(tuple: &Tuple4, entry: &NatEntry4) -> Tuple4 {
        if tuple.direction == TUPLE_IN {
            entry.outbound_key(tuple)
        } else {
            entry.inbound_key(tuple)
        }
    }
}

impl Family for V6 {
    type Tuple = Tuple6;
    type NatEntry = NatEntry6;
    const CT: MapLayout = layout::CT6;
    const NAT: MapLayout = layout::NAT6;

    fn flow(tuple: &Tuple6) -> Flow {
        Flow {
            protocol: tuple.protocol,
            inbound: tuple.direction == TUPLE_IN,
            source: v6(tuple.saddr_be),
            source_port: u16::from_be(tuple.sport_be),
            destination: v6(tuple.daddr_be),
            destination_port: u16::from_be(tuple.dport_be),
        }
    }

    fn translation(entry: &NatEntry6) -> Translation {
        Translation {
            addr: v6(entry.addr_be),
            port: u16::from_be(entry.port_be),
            created_ns: entry.created_ns,
            host_local: entry.flags & NAT_HOST_LOCAL != 0,
        }
    }

    fn other_entry(tuple: &Tuple6, entry: &NatEntry6) -> Tuple6 {
        if tuple.direction == TUPLE_IN {
            entry.outbound_key(tuple)
        } else {
            entry.inbound_key(tuple)
        }
    }
}

fn v4(addr_be: u32) -> IpAddr {
    Ipv4Addr::from_bits(u32::from_be(addr_be)).into()
}

/// Not by way of [`health_common::addr::Addr`]: an IPv4 address in an IPv6 tuple stays what it is.
fn v6(words_be: [u32; 4]) -> IpAddr {
    let words = words_be.map(|word| u128::from(u32::from_be(word)));
    let bits = words.into_iter().fold(0, |bits, word| bits << 32 | word);
    Ipv6Addr::from_bits(bits).into()
}

/// A conntrack entry.
pub(super) fn conntrack<F: Family>(key: &[u8], value: &[u8]) -> Option<(Flow, CtEntry)> {
    let (tuple, entry) = decode::<F::Tuple, _>(key, value)?;
    Some((F::flow(&tuple), entry))
}

/// A NAT entry.
pub(super) fn translation<F: Family>(key: &[u8], value: &[u8]) -> Option<(Flow, Translation)> {
    let (tuple, entry) = decode::<F::Tuple, F::NatEntry>(key, value)?;
    Some((F::flow(&tuple), F::translation(&entry)))
}
