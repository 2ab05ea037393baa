//! Network address translation: the maps `HEALTH_NAT4` and `HEALTH_NAT6` for TCP, `HEALTH_NAT_ANY4` and
//! `HEALTH_NAT_ANY6` for all other protocols, keyed by conntrack tuples; port selection; and packet rewriting.
//!
//! Each translation has two entries: one for direction out, which rewrites the source, and one for direction in, which
//! rewrites the destination. The key of either entry can be computed from the other entry and its key.

mod change;
mod ports;

use crate::ct::{FlowTuple, IP_PROTOCOL_UDP, TUPLE_IN, TUPLE_OUT};
use crate::echo::{PROTOCOL_ICMP, PROTOCOL_ICMPV6};
use crate::tcp::IP_PROTOCOL_TCP;

pub use change::{
    Change, ChecksumField, Difference, End, Inside, apply_folded, checksum_field, port_at,
};
pub use ports::{PortSearch, Ports, TRIES};

/// Flag: the flow is the host's own; its port or identifier is reserved and nothing is rewritten.
pub const NAT_HOST_LOCAL: u32 = 1;

/// Flag: the flow does not come from an endpoint, so the uplinks' programs track it in conntrack.
pub const NAT_NEEDS_CT: u32 = 2;

/// Translation of a tuple. `A` is an address, `P` the explicit padding, zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatEntry<A, P> {
    /// Creation time: `CLOCK_MONOTONIC`, in nanoseconds.
    pub created_ns: u64,
    /// [`NAT_HOST_LOCAL`] and [`NAT_NEEDS_CT`].
    pub flags: u32,
    /// The address after translation.
    pub addr_be: A,
    /// The port or identifier after translation.
    pub port_be: u16,
    /// Explicit padding, zero.
    pub pad: P,
}

/// Translation of an IPv4 tuple.
pub type NatEntry4 = NatEntry<u32, [u16; 3]>;

/// Translation of an IPv6 tuple.
pub type NatEntry6 = NatEntry<[u32; 4], [u16; 1]>;

crate::map_types!(NatEntry4 = 24, NatEntry6 = 32);

/// Offset of [`NatEntry4::created_ns`] in an entry, in bytes; the programs update the field by compare-and-swap.
pub const NAT_CREATED_OFFSET: usize = core::mem::offset_of!(NatEntry4, created_ns);

const _: () = {
    assert!(NAT_CREATED_OFFSET.is_multiple_of(8));
    assert!(core::mem::offset_of!(NatEntry6, created_ns) == NAT_CREATED_OFFSET);
};

impl<A: Copy, P: Copy> NatEntry<A, P> {
    /// The key of the matching `IN` entry, given this entry's key `out`.
    #[inline(always)]
    pub const fn inbound_key(&self, out: &FlowTuple<A>) -> FlowTuple<A> {
        FlowTuple {
            saddr_be: out.daddr_be,
            daddr_be: self.addr_be,
            sport_be: out.dport_be,
            dport_be: self.port_be,
            protocol: out.protocol,
            direction: TUPLE_IN,
            pad: 0,
        }
    }

    /// The key of the matching `OUT` entry, given this entry's key `inbound`. It is also the flow's key in conntrack.
    #[inline(always)]
    pub const fn outbound_key(&self, inbound: &FlowTuple<A>) -> FlowTuple<A> {
        FlowTuple {
            saddr_be: self.addr_be,
            daddr_be: inbound.saddr_be,
            sport_be: self.port_be,
            dport_be: inbound.sport_be,
            protocol: inbound.protocol,
            direction: TUPLE_OUT,
            pad: 0,
        }
    }
}

/// Whether flows of this protocol can be given another port. SCTP's checksum is a CRC over the whole packet (RFC 9260
/// section 6.8), which would take too long to compute here; other protocols have no ports. Flows of these protocols are
/// translated as long as no other flow has the same ports.
#[inline(always)]
pub const fn can_change_port(protocol: u8) -> bool {
    matches!(
        protocol,
        IP_PROTOCOL_TCP | IP_PROTOCOL_UDP | PROTOCOL_ICMP | PROTOCOL_ICMPV6
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ct::tests::{tuple4, tuple6};
    use proptest::prelude::*;

    #[test]
    fn protocols_whose_checksum_is_cheap_to_change_may_get_another_port() {
        assert!(!can_change_port(132) && !can_change_port(47));
        for protocol in [6, 17, 1, 58] {
            assert!(can_change_port(protocol));
        }
    }

    proptest! {
        #[test]
        fn each_entry_of_a_translation_leads_to_the_other(
            four in tuple4(),
            six in tuple6(),
            addr_be: u32,
            addr6_be: [u32; 4],
            port_be: u16,
        ) {
            let out = FlowTuple { direction: TUPLE_OUT, ..four };
            let outbound = NatEntry4 { addr_be, port_be, ..NatEntry4::default() };
            let inbound = NatEntry4 {
                addr_be: out.saddr_be,
                port_be: out.sport_be,
                ..NatEntry4::default()
            };
            let key = outbound.inbound_key(&out);
            prop_assert_eq!(inbound.outbound_key(&key), out);
            let sent = FlowTuple { saddr_be: addr_be, sport_be: port_be, ..out };
            prop_assert_eq!(key, sent.reversed(), "the key is what a reply has");

            let out = FlowTuple { direction: TUPLE_OUT, ..six };
            let outbound = NatEntry6 { addr_be: addr6_be, port_be, ..NatEntry6::default() };
            let inbound = NatEntry6 {
                addr_be: out.saddr_be,
                port_be: out.sport_be,
                ..NatEntry6::default()
            };
            let key = outbound.inbound_key(&out);
            prop_assert_eq!(inbound.outbound_key(&key), out);
            let sent = FlowTuple { saddr_be: addr6_be, sport_be: port_be, ..out };
            prop_assert_eq!(key, sent.reversed());
        }
    }
}
