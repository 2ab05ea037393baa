//! The host's routes and neighbours.

use core::ffi::c_void;

use aya_ebpf::bindings::{BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as Binding};
use aya_ebpf::helpers::generated::bpf_fib_lookup;
use health_common::masquerade::Address as _;

use crate::ip_version::Version;

/// `AF_INET` and `AF_INET6`.
const FAMILY: [u8; 2] = [2, 10];

/// `struct bpf_fib_lookup`, whose unions are words here.
#[repr(C)]
#[derive(Default)]
struct Lookup {
    family: u8,
    protocol: u8,
    sport_be: u16,
    dport_be: u16,
    /// Host byte order; 0 for packets that may be longer than the device takes.
    total_len: u16,
    /// Before: the device that the packet came by. After: the one that it leaves by.
    ifindex: u32,
    /// Type of service in the first byte, or flow information in network byte order.
    class: u32,
    source_be: [u32; 4],
    destination_be: [u32; 4],
    vlan: u32,
    source_mac: [u8; 6],
    destination_mac: [u8; 6],
}

const _: () = assert!(size_of::<Lookup>() == size_of::<Binding>());

/// A packet whose way is asked for.
pub struct Traveller<T: Version> {
    /// The device that it came by.
    pub ifindex: u32,
    /// Protocol behind the IP header.
    pub protocol: u8,
    /// Length from the IP header on, bytes. One that is too long for the device that it would leave by has no way.
    pub total_len: u16,
    /// Type of service (IPv4), or flow information in network byte order (IPv6).
    pub class: u32,
    /// Source and destination, network byte order.
    pub ends: (T::Address, T::Address),
}

/// Where a packet goes next.
pub struct NextHop {
    /// The device that it leaves by.
    pub ifindex: u32,
    /// Hardware addresses, in the order of an Ethernet header: that of the next hop, and that of the device.
    pub addresses: [[u8; 6]; 2],
}

/// Asks for a packet's way. `None` where there is none, where the host does not forward, or where nobody knows the
/// next hop's hardware address yet.
///
/// # Safety
///
/// `ctx` must be the context of the program that runs, of a hook of tc or XDP.
#[inline(always)]
pub unsafe fn next_hop<T: Version>(ctx: *mut c_void, packet: &Traveller<T>) -> Option<NextHop> {
    let mut lookup = Lookup {
        family: FAMILY[usize::from(T::IP_VERSION == 6)],
        protocol: packet.protocol,
        total_len: packet.total_len,
        ifindex: packet.ifindex,
        class: packet.class,
        source_be: words::<T>(packet.ends.0),
        destination_be: words::<T>(packet.ends.1),
        ..Lookup::default()
    };
    // SAFETY: the caller's promise, and a structure of the size that is named.
    let result = unsafe {
        bpf_fib_lookup(
            ctx.cast(),
            core::ptr::from_mut(&mut lookup).cast(),
            size_of::<Lookup>() as i32,
            0,
        )
    };
    (result == i64::from(BPF_FIB_LKUP_RET_SUCCESS)).then_some(NextHop {
        ifindex: lookup.ifindex,
        addresses: [lookup.destination_mac, lookup.source_mac],
    })
}

#[inline(always)]
fn words<T: Version>(address: T::Address) -> [u32; 4] {
    let words = address.to_addr().words_be;
    if T::IP_VERSION == 4 {
        [words[3], 0, 0, 0]
    } else {
        words
    }
}
