//! The maps and the packets of either IP version.

use core::mem::offset_of;

use aya_ebpf::maps::LruHashMap;
use health_common::ct::{CtEntry, Tuple4, Tuple6};
use health_common::echo::{Ipv4Header, Ipv6Header};
use health_common::fragment::FragmentPorts;
use health_common::tuple::Tuple;

use crate::frame::Frame;
use crate::maps::{
    HEALTH_CT4, HEALTH_CT6, HEALTH_FRAGMENTS4, HEALTH_FRAGMENTS6, HEALTH_NAT4, HEALTH_NAT6,
};
use crate::packet::{Found, Inner, read_inner4, read_inner6, read4, read6};

/// An IP version, by its tuples.
pub trait Version: Tuple + Sized + 'static {
    /// Its flows.
    fn flows() -> &'static LruHashMap<Self, CtEntry>;
    /// Its translations.
    fn translations() -> &'static LruHashMap<Self, Self::Translation>;
    /// Ports of its packets that come in fragments.
    fn fragments() -> &'static LruHashMap<Self::FragmentKey, FragmentPorts>;
    /// Bytes of this version's addresses and two ports, as a tuple begins: a `struct bpf_sock_tuple`.
    const SOCKET_TUPLE_LEN: u32;
    /// Where the IP header holds its source address, and where its destination address.
    const ADDRESSES_AT: [u32; 2];
    /// Where the IP header holds its checksum.
    const IP_CHECK_AT: Option<u32>;
    /// Source and destination of the packet whose IP header is at `ip_at`.
    fn addresses(frame: &Frame, ip_at: usize) -> Option<(Self::Address, Self::Address)>;
    /// The packet whose IP header is at `ip_at` and which goes in `direction`. `None` when it is cut short or
    /// of another version.
    fn read(frame: &Frame, ip_at: usize, direction: u8) -> Option<Found<Self>>;
    /// The packet in an ICMP error that begins at `error_at`, in the packet at `outer_at`, and goes in
    /// `direction`.
    fn read_inner(
        frame: &Frame,
        outer_at: usize,
        error_at: u32,
        direction: u8,
    ) -> Option<Inner<Self>>;
}

macro_rules! version {
    (
        $tuple:ty, $header:ty, $flows:ident, $translations:ident, $fragments:ident, $read:ident,
        $read_inner:ident, $check_at:expr
    ) => {
        impl Version for $tuple {
            const SOCKET_TUPLE_LEN: u32 = offset_of!($tuple, dport_be) as u32 + 2;
            const ADDRESSES_AT: [u32; 2] = [
                offset_of!($header, saddr_be) as u32,
                offset_of!($header, daddr_be) as u32,
            ];
            const IP_CHECK_AT: Option<u32> = $check_at;

            #[inline(always)]
            fn addresses(frame: &Frame, ip_at: usize) -> Option<(Self::Address, Self::Address)> {
                let ip = frame.at::<$header>(ip_at)?;
                Some((ip.saddr_be, ip.daddr_be))
            }
            #[inline(always)]
            fn flows() -> &'static LruHashMap<Self, CtEntry> {
                &$flows
            }
            #[inline(always)]
            fn translations() -> &'static LruHashMap<Self, Self::Translation> {
                &$translations
            }
            #[inline(always)]
            fn fragments() -> &'static LruHashMap<Self::FragmentKey, FragmentPorts> {
                &$fragments
            }
            #[inline(always)]
            fn read(frame: &Frame, ip_at: usize, direction: u8) -> Option<Found<Self>> {
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
    HEALTH_CT4,
    HEALTH_NAT4,
    HEALTH_FRAGMENTS4,
    read4,
    read_inner4,
    Some(offset_of!(Ipv4Header, check) as u32)
);
version!(
    Tuple6,
    Ipv6Header,
    HEALTH_CT6,
    HEALTH_NAT6,
    HEALTH_FRAGMENTS6,
    read6,
    read_inner6,
    None
);
