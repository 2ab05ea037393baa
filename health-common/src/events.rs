//! Events that the programs report to monitors: the records of `HEALTH_EVENTS`, and the filter in `HEALTH_MONITOR`
//! that selects them.

use crate::addr::Addr;
use crate::metrics::Reason;

/// Size of `HEALTH_EVENTS`, in bytes: space for about 14 000 records, each with a header of eight bytes.
pub const EVENTS_BYTES: u32 = 1 << 20;

/// Kind: a packet was dropped.
pub const EVENT_DROP: u8 = 1;
/// Kind: a conntrack entry was created.
pub const EVENT_CT_CREATED: u8 = 2;
/// Kind: the conntrack entry of a closed connection was reused for a new one between the same ports.
pub const EVENT_CT_REOPENED: u8 = 3;
/// Kind: both sides closed a connection, or one side reset it.
pub const EVENT_CT_CLOSED: u8 = 4;

/// Kind: a packet passed to or from an endpoint whose packets are traced.
pub const EVENT_TRACE: u8 = 5;

/// Bit of [`MonitorFilter::wanted`]: drops, except those covered by [`WANT_NAT`].
pub const WANT_DROP: u32 = 1;
/// Bit of [`MonitorFilter::wanted`]: changes to conntrack entries.
pub const WANT_CT: u32 = 2;
/// Bit of [`MonitorFilter::wanted`]: drops of packets that could not be translated.
pub const WANT_NAT: u32 = 4;
/// Bit of [`MonitorFilter::wanted`]: packets that pass, of endpoints whose packets are traced.
pub const WANT_TRACE: u32 = 8;

/// Drop reasons for packets that could not be translated.
const NAT_REASONS: [Reason; 4] = [
    Reason::NatNoMapping,
    Reason::NatUnsupported,
    Reason::FragmentUnknown,
    Reason::WriteFailed,
];

/// One record of `HEALTH_EVENTS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// When the record was written: `CLOCK_MONOTONIC`, in nanoseconds.
    pub time_ns: u64,
    /// Source of the packet, or of the flow's first packet. Unset if there is no IP header.
    pub source: Addr,
    /// Destination of the same packet.
    pub destination: Addr,
    /// Ifindex of the device on which a packet was dropped or the flow was opened, or of the traced endpoint's device.
    pub ifindex: u32,
    /// Identity of the side that opened the flow; 0 for packets.
    pub source_identity: u32,
    /// Length of a packet in bytes, from the Ethernet header on if it has one; 0 for flows.
    pub length: u32,
    /// Source port, or the ICMP identifier; 0 if unknown.
    pub sport_be: u16,
    /// Destination port; 0 if unknown.
    pub dport_be: u16,
    /// Id of the endpoint involved; 0 for none.
    pub endpoint: u16,
    /// [`EVENT_DROP`] or another kind.
    pub kind: u8,
    /// IP protocol number; 0 if there is no IP header.
    pub protocol: u8,
    /// For drops, a [`crate::metrics::Reason`] as a byte; else 0.
    pub reason: u8,
    /// For packets, a [`crate::metrics::Direction`] as a byte; for flows, the tuple's direction.
    pub direction: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 2],
}

impl Event {
    /// The bit of [`MonitorFilter::wanted`] for an event of this kind and reason.
    #[inline(always)]
    pub const fn want(kind: u8, reason: u8) -> u32 {
        if kind == EVENT_TRACE {
            return WANT_TRACE;
        }
        if kind != EVENT_DROP {
            return WANT_CT;
        }
        let [a, b, c, d] = NAT_REASONS;
        if reason == a as u8 || reason == b as u8 || reason == c as u8 || reason == d as u8 {
            WANT_NAT
        } else {
            WANT_DROP
        }
    }
}

/// The addresses that equal `address` in the bits of `mask`. All zero: any address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// The address; zero wherever the mask is zero.
    pub address: Addr,
    /// One bits where addresses must match.
    pub mask: Addr,
}

impl Network {
    /// The network of the first `len` (0 to 128) bits of `address`; for IPv4, `len` is the usual prefix length plus 96.
    pub fn new(address: Addr, len: u8) -> Self {
        let mask = u128::MAX.checked_shl(128_u32.saturating_sub(len.into()));
        let bytes = mask.unwrap_or(0).to_be_bytes();
        let mut network = Self::default();
        for (i, word) in bytes.chunks_exact(4).enumerate() {
            let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
            network.mask.words_be[i] = word;
            network.address.words_be[i] = address.words_be[i] & word;
        }
        network
    }

    /// Whether this network contains the address.
    #[inline(always)]
    pub const fn has(&self, other: &Addr) -> bool {
        let (a, m, b) = (&self.address.words_be, &self.mask.words_be, &other.words_be);
        (b[0] & m[0]) ^ a[0] | (b[1] & m[1]) ^ a[1] | (b[2] & m[2]) ^ a[2] | (b[3] & m[3]) ^ a[3]
            == 0
    }
}

/// The single value of `HEALTH_MONITOR`, at index 0: which events are written.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MonitorFilter {
    /// [`WANT_DROP`] and the other bits; 0 while no monitor is running.
    pub wanted: u32,
    /// Endpoint id; 0 for any.
    pub endpoint: u16,
    /// Port or ICMP identifier on either side; 0 for any.
    pub port_be: u16,
    /// Source addresses of the packets.
    pub source: Network,
    /// Destination addresses of the packets.
    pub destination: Network,
    /// IP protocol number; 0 for any.
    pub protocol: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 3],
}

impl MonitorFilter {
    /// Whether an event passes the filter.
    #[inline(always)]
    pub const fn passes(&self, event: &Event) -> bool {
        self.wanted & Event::want(event.kind, event.reason) != 0
            && (self.endpoint == 0 || self.endpoint == event.endpoint)
            && (self.protocol == 0 || self.protocol == event.protocol)
            && (self.port_be == 0
                || self.port_be == event.sport_be
                || self.port_be == event.dport_be)
            && self.source.has(&event.source)
            && self.destination.has(&event.destination)
    }
}

crate::map_types!(Event = 64, Network = 32, MonitorFilter = 76);

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::metrics::Reason;
    use core::net::IpAddr;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn addr(text: &str) -> Addr {
        text.parse::<IpAddr>().unwrap().into()
    }

    fn event() -> Event {
        Event {
            source: addr("10.244.1.7"),
            destination: addr("192.0.2.9"),
            sport_be: 4000_u16.to_be(),
            dport_be: 80_u16.to_be(),
            endpoint: 77,
            kind: EVENT_DROP,
            protocol: 6,
            reason: Reason::InvalidSource as u8,
            ..Event::default()
        }
    }

    #[test]
    fn each_field_of_a_filter_keeps_out_what_it_does_not_name() {
        let any = MonitorFilter {
            wanted: WANT_DROP | WANT_CT | WANT_NAT,
            ..MonitorFilter::default()
        };
        let network = |text, len| Network::new(addr(text), len);
        for (passes, filter) in [
            (true, any),
            (false, MonitorFilter { wanted: 0, ..any }),
            (
                false,
                MonitorFilter {
                    wanted: WANT_CT | WANT_NAT,
                    ..any
                },
            ),
            (
                true,
                MonitorFilter {
                    endpoint: 77,
                    ..any
                },
            ),
            (
                false,
                MonitorFilter {
                    endpoint: 78,
                    ..any
                },
            ),
            (true, MonitorFilter { protocol: 6, ..any }),
            (
                false,
                MonitorFilter {
                    protocol: 17,
                    ..any
                },
            ),
            (
                true,
                MonitorFilter {
                    port_be: 80_u16.to_be(),
                    ..any
                },
            ),
            (
                true,
                MonitorFilter {
                    port_be: 4000_u16.to_be(),
                    ..any
                },
            ),
            (
                false,
                MonitorFilter {
                    port_be: 81_u16.to_be(),
                    ..any
                },
            ),
            (
                true,
                MonitorFilter {
                    source: network("10.244.0.0", 96 + 16),
                    ..any
                },
            ),
            (
                false,
                MonitorFilter {
                    source: network("192.0.2.9", 128),
                    ..any
                },
            ),
            (
                true,
                MonitorFilter {
                    destination: network("192.0.2.9", 128),
                    ..any
                },
            ),
            (
                false,
                MonitorFilter {
                    destination: network("::", 96),
                    ..any
                },
            ),
        ] {
            assert_eq!(filter.passes(&event()), passes, "{filter:?}");
        }
    }

    #[test]
    fn a_drop_for_want_of_a_translation_is_a_kind_of_its_own() {
        let mut event = event();
        let wants = |event: &Event| Event::want(event.kind, event.reason);
        assert_eq!(wants(&event), WANT_DROP);
        for reason in NAT_REASONS {
            event.reason = reason as u8;
            assert_eq!(wants(&event), WANT_NAT);
        }
        for kind in [EVENT_CT_CREATED, EVENT_CT_REOPENED, EVENT_CT_CLOSED] {
            assert_eq!(Event::want(kind, 0), WANT_CT);
        }
        assert_eq!(Event::want(EVENT_TRACE, 0), WANT_TRACE);
    }

    proptest! {
        #[test]
        fn a_network_has_the_addresses_that_share_its_prefix(
            a: [u32; 4], b: [u32; 4], shared in 0_usize..=128, len in 0_u8..=128,
        ) {
            let bits = |words: [u32; 4]| -> Vec<bool> {
                let bytes = words.into_iter().flat_map(u32::to_ne_bytes);
                bytes.flat_map(|byte| (0..8).map(move |i| byte & (0x80 >> i) != 0)).collect()
            };
            // Random addresses share no long prefix.
            let mixed: Vec<bool> = bits(a).into_iter().take(shared)
                .chain(bits(b).into_iter().skip(shared)).collect();
            let mut words = [0_u32; 4];
            for (word, bits) in words.iter_mut().zip(mixed.chunks_exact(32)) {
                let value = bits.iter().fold(0_u32, |value, &bit| value << 1 | u32::from(bit));
                *word = value.to_be();
            }
            let same = bits(a).iter().zip(&bits(words)).take_while(|(a, b)| a == b).count();
            let network = Network::new(Addr::v6(a), len);
            prop_assert_eq!(network.has(&Addr::v6(words)), same >= usize::from(len));
        }
    }
}
