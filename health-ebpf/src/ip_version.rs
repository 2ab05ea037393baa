//! The maps and packet formats of each IP version.

use core::mem::offset_of;

use aya_ebpf::maps::{HashMap, LruHashMap};
use health_common::ct::{CtEntry, Tuple4, Tuple6};
use health_common::echo::{Ipv4Header, Ipv6Header};
use health_common::fragment::FragmentPorts;
use health_common::probe::{
    MESSAGE_LEN, ProbeMessage, is_intact4, is_intact6, may_be_probe4, may_be_probe6,
};
use health_common::service::Frontend;
use health_common::tuple::Tuple;

use crate::frame::{Frame, IP_AT};
use crate::maps::{
    HEALTH_CT_ANY4, HEALTH_CT_ANY6, HEALTH_CT4, HEALTH_CT6, HEALTH_FRAGMENTS4, HEALTH_FRAGMENTS6,
    HEALTH_NAT_ANY4, HEALTH_NAT_ANY6, HEALTH_NAT4, HEALTH_NAT6, HEALTH_REVNAT_ANY4,
    HEALTH_REVNAT_ANY6, HEALTH_REVNAT4, HEALTH_REVNAT6, HEALTH_SVC4, HEALTH_SVC6,
};
use crate::packet::{Inner, ParsedPacket, read_inner4, read_inner6, read4, read6};
use crate::ring;
use crate::table::{RingMap, Table};

/// An IP version, identified by its tuple type.
pub trait Version: Tuple<Address: Default> + Sized + 'static {
    /// Conntrack entries of this version.
    fn flows() -> Table<Self, CtEntry>;
    /// Translations of this version.
    fn translations() -> Table<Self, Self::Translation>;
    /// Service frontends of this version.
    fn frontends() -> &'static HashMap<Self::FrontendKey, Frontend>;
    /// Service flows of this version.
    fn service_flows() -> Table<Self, Self::ServiceFlow>;
    /// Ports of this version's fragmented packets.
    fn fragments() -> &'static LruHashMap<Self::FragmentKey, FragmentPorts>;
    /// Length in bytes of the two addresses and two ports that a tuple starts with: a `struct bpf_sock_tuple`.
    const SOCKET_TUPLE_LEN: u32;
    /// The IP header, without options.
    type Header;
    /// Length of the IP header in bytes.
    const HEADER_LEN: usize = size_of::<Self::Header>();
    /// Offset of the data after the IP header in an untagged packet.
    const L4_AT: usize = IP_AT + Self::HEADER_LEN;
    /// Offsets of the source and destination addresses in the IP header.
    const ADDRESSES_AT: [u32; 2];
    /// Offset of the checksum in the IP header.
    const IP_CHECK_AT: Option<u32>;
    /// Offset of the time to live or hop limit in the IP header.
    const TTL_AT: u32;
    /// The address family.
    const FAMILY: u8;
    /// Converts an address to the form that the kernel's route look-up uses.
    fn fib_words(address: Self::Address) -> [u32; 4];
    /// Source and destination addresses in a header.
    fn ends(ip: &Self::Header) -> (Self::Address, Self::Address);
    /// Protocol of the data after a header: with IPv6, possibly an extension header.
    fn protocol_behind(ip: &Self::Header) -> u8;
    /// Whether a packet of this version's ICMP may be a probe of the mesh.
    fn may_be_probe(ip: &Self::Header, message: &ProbeMessage) -> bool;
    /// Whether the checksums of such a packet are correct, given its message in memory order.
    fn is_intact(ip: &Self::Header, message: &[u32; MESSAGE_LEN / 4]) -> bool;
    /// Reads the packet whose IP header is at `ip_at` and which travels in `direction`. `None` if it is truncated or of
    /// another version.
    fn read(frame: &Frame, ip_at: usize, direction: u8) -> Option<ParsedPacket<Self>>;
    /// Reads the packet inside an ICMP error. The error starts at `error_at`, in the packet at `outer_at`, and travels
    /// in `direction`.
    fn read_inner(
        frame: &Frame,
        outer_at: usize,
        error_at: u32,
        direction: u8,
    ) -> Option<Inner<Self>>;

    /// Source and destination of the packet whose IP header is at `ip_at`.
    #[inline(always)]
    fn addresses(frame: &Frame, ip_at: usize) -> Option<(Self::Address, Self::Address)> {
        let ip = frame.at::<Self::Header>(ip_at)?;
        Some(Self::ends(ip))
    }
}

macro_rules! version {
    (
        $tuple:ty, $header:ty, $flows:expr, $translations:expr, $service_flows:expr, $frontends:ident, $fragments:ident, $read:ident,
        $read_inner:ident, $protocol:ident, $may_be_probe:ident, $is_intact:ident, $check_at:expr, $ttl:ident, $family:literal, $fib_words:expr
    ) => {
        impl Version for $tuple {
            type Header = $header;
            const SOCKET_TUPLE_LEN: u32 = offset_of!($tuple, dport_be) as u32 + 2;
            const ADDRESSES_AT: [u32; 2] = [
                offset_of!($header, saddr_be) as u32,
                offset_of!($header, daddr_be) as u32,
            ];
            const IP_CHECK_AT: Option<u32> = $check_at;
            const TTL_AT: u32 = offset_of!($header, $ttl) as u32;
            const FAMILY: u8 = $family;

            #[inline(always)]
            fn fib_words(address: Self::Address) -> [u32; 4] {
                $fib_words(address)
            }

            #[inline(always)]
            fn ends(ip: &$header) -> (Self::Address, Self::Address) {
                (ip.saddr_be, ip.daddr_be)
            }
            #[inline(always)]
            fn protocol_behind(ip: &$header) -> u8 {
                ip.$protocol
            }
            #[inline(always)]
            fn may_be_probe(ip: &$header, message: &ProbeMessage) -> bool {
                $may_be_probe(ip, message)
            }
            #[inline(always)]
            fn is_intact(ip: &$header, message: &[u32; MESSAGE_LEN / 4]) -> bool {
                $is_intact(ip, message)
            }
            #[inline(always)]
            fn flows() -> Table<Self, CtEntry> {
                $flows
            }
            #[inline(always)]
            fn translations() -> Table<Self, Self::Translation> {
                $translations
            }
            #[inline(always)]
            fn frontends() -> &'static HashMap<Self::FrontendKey, Frontend> {
                &$frontends
            }
            #[inline(always)]
            fn service_flows() -> Table<Self, Self::ServiceFlow> {
                $service_flows
            }
            #[inline(always)]
            fn fragments() -> &'static LruHashMap<Self::FragmentKey, FragmentPorts> {
                &$fragments
            }
            #[inline(always)]
            fn read(frame: &Frame, ip_at: usize, direction: u8) -> Option<ParsedPacket<Self>> {
                $read(frame, ip_at, direction)
            }
            #[inline(always)]
            fn read_inner(
                frame: &Frame,
                outer_at: usize,
                error_at: u32,
                direction: u8,
            ) -> Option<Inner<Self>> {
                $read_inner(frame, outer_at, error_at, direction)
            }
        }
    };
}

version!(
    Tuple4,
    Ipv4Header,
    Table {
        tcp: RingMap {
            map: &HEALTH_CT4,
            ring: ring::CT4,
        },
        others: &HEALTH_CT_ANY4,
    },
    Table {
        tcp: RingMap {
            map: &HEALTH_NAT4,
            ring: ring::NAT4,
        },
        others: &HEALTH_NAT_ANY4,
    },
    Table {
        tcp: RingMap {
            map: &HEALTH_REVNAT4,
            ring: ring::REVNAT4,
        },
        others: &HEALTH_REVNAT_ANY4,
    },
    HEALTH_SVC4,
    HEALTH_FRAGMENTS4,
    read4,
    read_inner4,
    protocol,
    may_be_probe4,
    is_intact4,
    Some(offset_of!(Ipv4Header, check) as u32),
    ttl,
    2,
    |address| [address, 0, 0, 0]
);
version!(
    Tuple6,
    Ipv6Header,
    Table {
        tcp: RingMap {
            map: &HEALTH_CT6,
            ring: ring::CT6,
        },
        others: &HEALTH_CT_ANY6,
    },
    Table {
        tcp: RingMap {
            map: &HEALTH_NAT6,
            ring: ring::NAT6,
        },
        others: &HEALTH_NAT_ANY6,
    },
    Table {
        tcp: RingMap {
            map: &HEALTH_REVNAT6,
            ring: ring::REVNAT6,
        },
        others: &HEALTH_REVNAT_ANY6,
    },
    HEALTH_SVC6,
    HEALTH_FRAGMENTS6,
    read6,
    read_inner6,
    next_header,
    may_be_probe6,
    is_intact6,
    None,
    hop_limit,
    10,
    |words| words
);
