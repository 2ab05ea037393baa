//! Checks the sources of packets from outside: no outside host has an address of this node or of its endpoints.

use aya_ebpf::bindings::{
    BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS,
};
use health_common::addr::{Addr, v6_is_group, v6_is_link_local};
use health_common::ct::{Tuple4, Tuple6};
use health_common::echo::{IPV6_LEN, Ipv4Header, Ipv6Header, PROTOCOL_ICMPV6};
use health_common::link::is_of_neighbour;
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, is_neighbour_discovery};
use health_common::own::{OWN_DEVICE_BITS, OwnPrefix, v4_may_come, v6_may_come};

use crate::bounds::header_at;
use crate::fib::FibLookup;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::ipcache::{TrieKey, is_endpoint};
use crate::maps::HEALTH_OWN;
use crate::packet::load;
use crate::subprogram::subprogram;

/// Length of a key of `HEALTH_OWN`, bits.
const KEY_BITS: u32 = 8 * size_of::<OwnPrefix>() as u32;
const _: () = assert!(OWN_DEVICE_BITS == 8 * size_of::<u32>() as u32);

/// Source checks that differ between the IP versions.
pub trait Source: Version {
    /// Whether a network may deliver such a packet, judging by its addresses alone.
    fn may_come(ip: &Self::Header) -> bool;
    /// Reason to refuse a packet, whoever sent it: one end is an IPv4-mapped address, which maps would mistake for the
    /// IPv4 address.
    fn refused_end(ip: &Self::Header) -> Option<Reason>;
    /// Whether a packet from an address of this host shows that another host has the address too (RFC 4862 section
    /// 5.4.4).
    fn marks_duplicate(frame: &Frame, ip: &Self::Header, ip_at: usize) -> bool;
    /// Whether an address is only valid on its link.
    fn is_of_link(address: &Self::Address) -> bool;
}

impl Source for Tuple4 {
    #[inline(always)]
    fn may_come(ip: &Ipv4Header) -> bool {
        v4_may_come(ip.saddr_be, ip.daddr_be)
    }

    #[inline(always)]
    fn refused_end(_ip: &Ipv4Header) -> Option<Reason> {
        None
    }

    #[inline(always)]
    fn marks_duplicate(_frame: &Frame, _ip: &Ipv4Header, _ip_at: usize) -> bool {
        false
    }

    #[inline(always)]
    fn is_of_link(_address: &u32) -> bool {
        false
    }
}

impl Source for Tuple6 {
    #[inline(always)]
    fn may_come(ip: &Ipv6Header) -> bool {
        v6_may_come(&ip.saddr_be, &ip.daddr_be)
    }

    #[inline(always)]
    fn refused_end(ip: &Ipv6Header) -> Option<Reason> {
        if Addr::v6(ip.saddr_be).is_v4() {
            Some(Reason::InvalidSource)
        } else if Addr::v6(ip.daddr_be).is_v4() {
            Some(Reason::InvalidPacket)
        } else {
            None
        }
    }

    #[inline(always)]
    fn marks_duplicate(frame: &Frame, ip: &Ipv6Header, ip_at: usize) -> bool {
        let mut start = [0_u8; 2];
        ip.next_header == PROTOCOL_ICMPV6
            && v6_is_group(&ip.daddr_be)
            && load(frame, (ip_at + IPV6_LEN) as u32, &mut start, 2).is_some()
            && is_neighbour_discovery(start[0])
            && is_of_neighbour(ip, start[1])
    }

    #[inline(always)]
    fn is_of_link(address: &[u32; 4]) -> bool {
        v6_is_link_local(address)
    }
}

/// Whether a packet that came in on an uplink has a source address that no outside host has.
#[inline(always)]
pub fn is_spoofed(frame: &Frame, ethertype: u16, ip_at: usize) -> bool {
    match ethertype {
        ETHERTYPE_IPV4 => is_spoofed_of::<Tuple4>(frame, ip_at as u32),
        ETHERTYPE_IPV6 => is_spoofed_of::<Tuple6>(frame, ip_at as u32),
        _ => false,
    }
}

#[subprogram(is_spoofed4, is_spoofed6)]
fn is_spoofed_of<T: Source>(frame: &Frame, ip_at: u32) -> bool {
    let Some(ip_at) = header_at(ip_at) else {
        return false;
    };
    // A packet without a complete header has no source.
    if !frame.pull(ip_at + T::HEADER_LEN) {
        return false;
    }
    let Some(ip) = frame.at::<T::Header>(ip_at) else {
        return false;
    };
    if !T::may_come(ip) {
        return true;
    }
    let (source, destination) = T::ends(ip);
    if !is_own::<T>(source, frame.ifindex()) || T::marks_duplicate(frame, ip, ip_at) {
        return false;
    }
    is_endpoint(source.to_addr())
        || T::is_of_link(&source)
        || leads_here::<T>(frame, source, destination)
}

/// Whether an address belongs to an endpoint of this node or to the host itself, as far as the agent knows. `ifindex`
/// is the device on which a packet from the address came in.
#[inline(always)]
pub fn is_own<T: Source>(address: T::Address, ifindex: u32) -> bool {
    let addr = address.to_addr();
    if is_endpoint(addr) {
        return true;
    }
    let key = TrieKey {
        prefix_len: KEY_BITS,
        data: OwnPrefix::of_source(addr, ifindex),
    };
    HEALTH_OWN.get(key.as_key()).is_some()
}

/// Whether packets to `source` would stay on this host. The address may have moved elsewhere since the agent last
/// checked, or while no agent is running.
#[inline(always)]
fn leads_here<T: Version>(frame: &Frame, source: T::Address, destination: T::Address) -> bool {
    const SUCCESS: i64 = BPF_FIB_LKUP_RET_SUCCESS as i64;
    const NO_NEIGHBOUR: i64 = BPF_FIB_LKUP_RET_NO_NEIGH as i64;
    const TOO_LONG: i64 = BPF_FIB_LKUP_RET_FRAG_NEEDED as i64;
    let mut route = FibLookup::of::<T>(frame.ifindex(), destination, source);
    // SAFETY: a valid context.
    let found = unsafe { route.ask(frame.skb().cast()) };
    !matches!(found, SUCCESS | NO_NEIGHBOUR | TOO_LONG)
}
