//! The maps and the packets of either IP version.

use aya_ebpf::maps::LruHashMap;
use health_common::ct::{CtEntry, Tuple4, Tuple6};
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
    /// The packet whose IP header is at `ip_at` and which goes in `direction`. `None` when it is cut short or
    /// of another version.
    fn read(frame: &Frame, ip_at: usize, direction: u8) -> Option<Found<Self>>;
    /// The packet in an ICMP error that begins at `error_at` and goes in `direction`.
    fn read_inner(frame: &Frame, error_at: u32, direction: u8) -> Option<Inner<Self>>;
}

macro_rules! version {
    ($tuple:ty, $flows:ident, $translations:ident, $fragments:ident, $read:ident, $read_inner:ident) => {
        impl Version for $tuple {
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
            fn read_inner(frame: &Frame, error_at: u32, direction: u8) -> Option<Inner<Self>> {
                $read_inner(frame, error_at, direction)
            }
        }
    };
}

version!(
    Tuple4,
    HEALTH_CT4,
    HEALTH_NAT4,
    HEALTH_FRAGMENTS4,
    read4,
    read_inner4
);
version!(
    Tuple6,
    HEALTH_CT6,
    HEALTH_NAT6,
    HEALTH_FRAGMENTS6,
    read6,
    read_inner6
);
