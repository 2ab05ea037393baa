//! Operations on tuples of both IP versions, shared by conntrack, translation and collection.

use crate::ct::{TUPLE_OUT, Tuple4, Tuple6};
use crate::echo::{
    ICMP_ECHO_REPLY, ICMP_ECHO_REQUEST, ICMPV6_ECHO_REPLY, ICMPV6_ECHO_REQUEST, PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
};
use crate::fragment::{FragmentKey4, FragmentKey6};
use crate::masquerade::{Address, Masquerade, MasqueradeConfig};
use crate::nat::{Change, NatEntry4, NatEntry6};
use crate::service::{
    FLOW_MOVED, FrontendKey4, FrontendKey6, NUMBER_MASK, ServiceFlow4, ServiceFlow6, joined_port,
    with_half_ports,
};

/// A tuple of one IP version, and the types that go with it.
///
/// The translation of a flow has two entries: one under the flow's own tuple in direction out, and one under the
/// tuple of its replies.
pub trait Tuple: Copy + Default + PartialEq {
    /// An address in network byte order.
    type Address: Address;
    /// The value of the NAT map.
    type Translation: Copy + Default;
    /// The fields that all fragments of a packet share.
    type FragmentKey;
    /// The key of a service frontend.
    type FrontendKey;
    /// The value of the service flow maps.
    type ServiceFlow: Copy + Default;
    /// Offset of a service flow's expiry time, in bytes.
    const SERVICE_FLOW_EXPIRES_AT: usize;
    /// IP version: 4 or 6.
    const IP_VERSION: u32;
    /// Protocol number of this version's ICMP.
    const ICMP: u8;
    /// Type of an echo request in that ICMP.
    const ECHO_REQUEST: u8;
    /// Type of an echo reply in that ICMP.
    const ECHO_REPLY: u8;

    /// The tuple of an echo request with this identifier, network byte order, that travels in `direction`.
    fn of_echo(
        source: Self::Address,
        destination: Self::Address,
        id_be: u16,
        direction: u8,
    ) -> Self;

    /// The tuple of a packet in the opposite direction.
    #[must_use]
    fn reply(&self) -> Self;

    /// IP protocol number.
    fn protocol(&self) -> u8;

    /// [`TUPLE_OUT`] or [`crate::ct::TUPLE_IN`].
    fn direction(&self) -> u8;

    /// This tuple or its reply, whichever has direction out.
    #[must_use]
    fn outbound(self) -> Self;

    /// Source address and port, network byte order.
    fn source(&self) -> (Self::Address, u16);

    /// Destination address and port, network byte order.
    fn destination(&self) -> (Self::Address, u16);

    /// Sets the fields that a later fragment lacks: ports in network byte order, and protocol.
    fn set_ports(&mut self, sport_be: u16, dport_be: u16, protocol: u8);

    /// The fields that all fragments of a packet with this tuple share, given its identification.
    fn fragment_key(&self, id_be: u32) -> Self::FragmentKey;

    /// For an outbound flow translated by `out`: the key of the entry for its replies.
    #[must_use]
    fn reply_key(self, out: &Self::Translation) -> Self;

    /// The outbound flow that `entry`, found under this key, belongs to.
    #[must_use]
    fn flow(self, entry: &Self::Translation) -> Self;

    /// Builds an entry created at `created_ns` (`CLOCK_MONOTONIC`). `to` is the address and port after translation,
    /// network byte order; `flags` is a combination of flags such as [`crate::nat::NAT_HOST_LOCAL`].
    fn translation(to: (Self::Address, u16), flags: u32, created_ns: u64) -> Self::Translation;

    /// Address and port after translation, network byte order.
    fn translated(entry: &Self::Translation) -> (Self::Address, u16);

    /// The flags of an entry.
    fn flags(entry: &Self::Translation) -> u32;

    /// When the entry was created: `CLOCK_MONOTONIC`, in nanoseconds.
    fn created_ns(entry: &Self::Translation) -> u64;

    /// The key of the frontend that a packet with this tuple would be addressed to.
    fn frontend_key(&self) -> Self::FrontendKey;

    /// The same tuple with another destination, network byte order.
    #[must_use]
    fn with_destination(self, to: (Self::Address, u16)) -> Self;

    /// The same tuple with another source port, network byte order.
    #[must_use]
    fn with_source_port(self, port_be: u16) -> Self;

    /// The same tuple in another direction: [`TUPLE_OUT`] or [`crate::ct::TUPLE_IN`].
    #[must_use]
    fn with_direction(self, direction: u8) -> Self;

    /// Builds a service flow from its parts.
    fn service_flow(parts: &ServiceFlowParts<Self::Address>) -> Self::ServiceFlow;

    /// The parts of a service flow.
    fn service_flow_parts(flow: &Self::ServiceFlow) -> ServiceFlowParts<Self::Address>;

    /// The tuple of a flow's packets to its backend, direction out, given one of the flow's entries, found under this
    /// key.
    #[inline(always)]
    #[must_use]
    fn sent(self, entry: &Self::ServiceFlow) -> Self {
        if self.direction() == TUPLE_OUT {
            self.sent_by(&Self::service_flow_parts(entry))
        } else {
            self.reply()
        }
    }

    /// The tuple of a flow's packets to its backend, given the parts of its `OUT` entry, whose key is this
    /// tuple.
    #[inline(always)]
    #[must_use]
    fn sent_by(self, parts: &ServiceFlowParts<Self::Address>) -> Self {
        self.with_source_port(parts.port_beyond(self.source().1))
            .with_destination(parts.to)
    }

    /// The tuple of a flow's packets to the frontend, direction out, given the parts of its `IN` entry,
    /// whose key is this tuple.
    #[inline(always)]
    #[must_use]
    fn asked_by(self, parts: &ServiceFlowParts<Self::Address>) -> Self {
        let sent = self.reply();
        sent.with_source_port(parts.port_beyond(sent.source().1))
            .with_destination(parts.to)
    }

    /// The masquerading settings of this IP version.
    fn masquerade(config: &MasqueradeConfig) -> &Masquerade<Self::Address>;

    /// The change to a packet when one of its ends is rewritten from `old` to `new`.
    fn change(old: &(Self::Address, u16), new: &(Self::Address, u16)) -> Change;
}

/// See [`Tuple::service_flow_parts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceFlowParts<A> {
    /// Address and port after translation, network byte order.
    pub to: (A, u16),
    /// Index in `HEALTH_BACKENDS`.
    pub backend: u32,
    /// Number of the service port.
    pub service: u32,
    /// When the flow expires: `CLOCK_MONOTONIC`, in seconds.
    pub expires: u32,
    /// [`crate::service::FLOW_FROM_OUTSIDE`] and the other bits.
    pub flags: u16,
    /// With [`FLOW_MOVED`], network byte order: for direction out, the client's port as seen by the backend; for
    /// direction in, the client's own port. Else 0.
    pub client_port_be: u16,
}

impl<A> ServiceFlowParts<A> {
    /// The client's port on the other side of the translation, given its port on this side, network byte order.
    #[inline(always)]
    pub const fn port_beyond(&self, port_be: u16) -> u16 {
        if self.flags & FLOW_MOVED != 0 {
            self.client_port_be
        } else {
            port_be
        }
    }
}

macro_rules! tuple {
    (
        $tuple:ty, $entry:ident, $key:ty, $frontend:ident, $service_flow:ident, $address:ty, $ip_version:literal, $icmp:ident,
        $echo_request:ident, $echo_reply:ident, $masquerade:ident,
        $fragment_key:expr, $change:expr
    ) => {
        impl Tuple for $tuple {
            type Address = $address;
            type Translation = $entry;
            type FragmentKey = $key;
            type FrontendKey = $frontend;
            type ServiceFlow = $service_flow;
            const SERVICE_FLOW_EXPIRES_AT: usize = core::mem::offset_of!($service_flow, expires);
            const IP_VERSION: u32 = $ip_version;
            const ICMP: u8 = $icmp;
            const ECHO_REQUEST: u8 = $echo_request;
            const ECHO_REPLY: u8 = $echo_reply;

            #[inline(always)]
            fn of_echo(source: $address, destination: $address, id_be: u16, direction: u8) -> Self {
                Self {
                    saddr_be: source.by_words(),
                    daddr_be: destination.by_words(),
                    sport_be: id_be,
                    dport_be: 0,
                    protocol: $icmp,
                    direction,
                    pad: 0,
                }
            }

            #[inline(always)]
            fn reply(&self) -> Self {
                self.reversed()
            }

            #[inline(always)]
            fn protocol(&self) -> u8 {
                self.protocol
            }

            #[inline(always)]
            fn direction(&self) -> u8 {
                self.direction
            }

            #[inline(always)]
            fn outbound(self) -> Self {
                if self.direction == TUPLE_OUT {
                    self
                } else {
                    self.reversed()
                }
            }

            #[inline(always)]
            fn source(&self) -> ($address, u16) {
                (self.saddr_be, self.sport_be)
            }

            #[inline(always)]
            fn destination(&self) -> ($address, u16) {
                (self.daddr_be, self.dport_be)
            }

            #[inline(always)]
            fn set_ports(&mut self, sport_be: u16, dport_be: u16, protocol: u8) {
                self.sport_be = sport_be;
                self.dport_be = dport_be;
                self.protocol = protocol;
            }

            #[inline(always)]
            fn fragment_key(&self, id_be: u32) -> $key {
                $fragment_key(self, id_be)
            }

            #[inline(always)]
            fn reply_key(self, out: &$entry) -> Self {
                out.inbound_key(&self)
            }

            #[inline(always)]
            fn flow(self, entry: &$entry) -> Self {
                if self.direction == TUPLE_OUT {
                    self
                } else {
                    entry.outbound_key(&self)
                }
            }

            #[inline(always)]
            fn translation(to: ($address, u16), flags: u32, created_ns: u64) -> $entry {
                $entry {
                    created_ns,
                    flags,
                    addr_be: to.0,
                    port_be: to.1,
                    ..$entry::default()
                }
            }

            #[inline(always)]
            fn translated(entry: &$entry) -> ($address, u16) {
                (entry.addr_be, entry.port_be)
            }

            #[inline(always)]
            fn flags(entry: &$entry) -> u32 {
                entry.flags
            }

            #[inline(always)]
            fn created_ns(entry: &$entry) -> u64 {
                entry.created_ns
            }

            #[inline(always)]
            fn frontend_key(&self) -> $frontend {
                $frontend {
                    addr_be: self.daddr_be.by_words(),
                    port_be: self.dport_be,
                    protocol: self.protocol,
                    pad: 0,
                }
            }

            #[inline(always)]
            fn with_destination(self, to: ($address, u16)) -> Self {
                Self {
                    saddr_be: self.saddr_be.by_words(),
                    daddr_be: to.0.by_words(),
                    dport_be: to.1,
                    ..self
                }
            }

            #[inline(always)]
            fn with_source_port(self, port_be: u16) -> Self {
                Self {
                    sport_be: port_be,
                    ..self
                }
            }

            #[inline(always)]
            fn with_direction(self, direction: u8) -> Self {
                Self { direction, ..self }
            }

            #[inline(always)]
            fn service_flow(parts: &ServiceFlowParts<$address>) -> $service_flow {
                let [backend, service] =
                    with_half_ports([parts.backend, parts.service], parts.client_port_be);
                $service_flow {
                    addr_be: parts.to.0.by_words(),
                    port_be: parts.to.1,
                    flags: parts.flags,
                    backend,
                    service,
                    expires: parts.expires,
                }
            }

            #[inline(always)]
            fn service_flow_parts(flow: &$service_flow) -> ServiceFlowParts<$address> {
                ServiceFlowParts {
                    to: (flow.addr_be, flow.port_be),
                    backend: flow.backend & NUMBER_MASK,
                    service: flow.service & NUMBER_MASK,
                    expires: flow.expires,
                    flags: flow.flags,
                    client_port_be: joined_port([flow.backend, flow.service]),
                }
            }

            #[inline(always)]
            fn masquerade(config: &MasqueradeConfig) -> &Masquerade<$address> {
                &config.$masquerade
            }

            #[inline(always)]
            fn change(old: &($address, u16), new: &($address, u16)) -> Change {
                $change(old, new)
            }
        }
    };
}

tuple!(
    Tuple4,
    NatEntry4,
    FragmentKey4,
    FrontendKey4,
    ServiceFlow4,
    u32,
    4,
    PROTOCOL_ICMP,
    ICMP_ECHO_REQUEST,
    ICMP_ECHO_REPLY,
    v4,
    |tuple: &Tuple4, id_be| FragmentKey4 {
        saddr_be: tuple.saddr_be,
        daddr_be: tuple.daddr_be,
        id_be: id_be as u16,
        protocol: tuple.protocol,
        pad: 0,
    },
    |old: &(u32, u16), new: &(u32, u16)| Change::v4(*old, *new)
);

tuple!(
    Tuple6,
    NatEntry6,
    FragmentKey6,
    FrontendKey6,
    ServiceFlow6,
    [u32; 4],
    6,
    PROTOCOL_ICMPV6,
    ICMPV6_ECHO_REQUEST,
    ICMPV6_ECHO_REPLY,
    v6,
    |tuple: &Tuple6, id_be| FragmentKey6 {
        saddr_be: tuple.saddr_be,
        daddr_be: tuple.daddr_be,
        id_be,
    },
    |old: &([u32; 4], u16), new: &([u32; 4], u16)| Change::v6((&old.0, old.1), (&new.0, new.1))
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ct::tests::{tuple4, tuple6};
    use proptest::prelude::*;

    fn entries_lead_to_their_flow<T: Tuple + core::fmt::Debug>(
        flow: T,
        to: (T::Address, u16),
    ) -> Result<(), TestCaseError> {
        let flow = flow.outbound();
        let out = T::translation(to, 0, 7);
        let key = flow.reply_key(&out);
        let back = T::translation(flow.source(), 0, 7);
        prop_assert_eq!(flow.flow(&out), flow);
        prop_assert_eq!(key.flow(&back), flow);
        prop_assert!(key.destination() == T::translated(&out));
        prop_assert!(key.source() == flow.destination());
        Ok(())
    }

    proptest! {
        #[test]
        fn both_entries_of_a_translation_lead_to_its_flow(
            four in tuple4(),
            six in tuple6(),
            addr_be: u32,
            addr6_be: [u32; 4],
            port_be: u16,
        ) {
            entries_lead_to_their_flow(four, (addr_be, port_be))?;
            entries_lead_to_their_flow(six, (addr6_be, port_be))?;
        }

        #[test]
        fn a_later_fragment_has_the_key_of_its_first(mut first in tuple4(), ports: (u16, u16), id_be: u16) {
            let key = first.fragment_key(id_be.into());
            first.set_ports(ports.0, ports.1, first.protocol);
            prop_assert_eq!(first.fragment_key(id_be.into()), key);
            prop_assert_eq!((first.source().1, first.destination().1), ports);
        }
    }
}
