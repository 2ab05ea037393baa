//! The host's routes and neighbours.

use core::ffi::{c_int, c_void};

use aya_ebpf::bindings::{BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS};
use aya_ebpf::helpers::generated::{bpf_fib_lookup, bpf_redirect_neigh};

use crate::frame::{Frame, IP_AT};
use crate::ip_version::Version;
use crate::rewrite::decrement_ttl;

/// `struct bpf_redir_neigh`.
#[repr(C)]
struct NextHop {
    family: u32,
    address: [u32; 4],
}

const _: () = assert!(size_of::<NextHop>() == size_of::<aya_ebpf::bindings::bpf_redir_neigh>());

/// Forwards an untagged packet between these addresses along the host's routes, bypassing the host's stack. The result
/// is the classifier's return value. `None`, with the packet unchanged, if the stack must handle it: there is no route,
/// the packet is too long for the next device, or its hop limit is used up: the stack notifies the sender.
#[inline(always)]
pub fn send<T: Version>(frame: &Frame, source: T::Address, destination: T::Address) -> Option<i64> {
    let mut route = FibLookup::of::<T>(frame.ifindex(), source, destination);
    if !route.is_found(frame) || !frame.fits(route.ifindex) {
        return None;
    }
    decrement_ttl::<T>(frame, IP_AT as u32)?;
    let mut next = NextHop {
        family: route.family.into(),
        address: route.destination,
    };
    // SAFETY: the layout that the helper expects.
    Some(unsafe {
        bpf_redirect_neigh(
            route.ifindex,
            (&raw mut next).cast(),
            size_of::<NextHop>() as c_int,
            0,
        )
    })
}

/// `struct bpf_fib_lookup`, whose generated binding consists of unions.
#[repr(C)]
pub struct FibLookup {
    /// `AF_INET` or `AF_INET6`.
    pub family: u8,
    /// Protocol after the IP header.
    pub protocol: u8,
    ports_be: [u16; 2],
    /// Packet length from the IP header on, in bytes, host byte order: if it is too long for the next device, no route
    /// is found. 0: not checked.
    pub total_len: u16,
    /// Input: the device that the packet came in on. Output: the device that it leaves on.
    pub ifindex: u32,
    /// Type of service in the first byte (IPv4), or flow information in network byte order (IPv6).
    pub flow_info: u32,
    source: [u32; 4],
    /// Input: the packet's destination. Output: the next hop's address.
    pub destination: [u32; 4],
    vlan: u32,
    /// Output: the hardware addresses of the device and of the next hop.
    pub macs: [[u8; 6]; 2],
}

const _: () = assert!(size_of::<FibLookup>() == size_of::<aya_ebpf::bindings::bpf_fib_lookup>());

impl FibLookup {
    /// A look-up for a packet that came in on a device, with these addresses.
    #[inline(always)]
    pub fn of<T: Version>(ifindex: u32, source: T::Address, destination: T::Address) -> Self {
        Self {
            family: T::FAMILY,
            protocol: 0,
            ports_be: [0; 2],
            total_len: 0,
            ifindex,
            flow_info: 0,
            source: T::fib_words(source),
            destination: T::fib_words(destination),
            vlan: 0,
            macs: [[0; 6]; 2],
        }
    }

    /// Looks up the packet's route at a tc hook, and returns whether there is one.
    #[inline(always)]
    pub fn is_found(&mut self, frame: &Frame) -> bool {
        // SAFETY: a valid context.
        let found = unsafe { self.ask(frame.skb().cast()) };
        // If the neighbour is not known yet, it is resolved when the packet is sent.
        found == BPF_FIB_LKUP_RET_SUCCESS.into() || found == BPF_FIB_LKUP_RET_NO_NEIGH.into()
    }

    /// Looks up the packet's route. Returns `BPF_FIB_LKUP_RET_SUCCESS` or another of these codes, or a negative error.
    ///
    /// # Safety
    ///
    /// `ctx` must be the context of the running program, at a tc or XDP hook.
    #[inline(always)]
    pub unsafe fn ask(&mut self, ctx: *mut c_void) -> i64 {
        // SAFETY: the caller's promise, and the layout that the helper expects.
        unsafe {
            bpf_fib_lookup(
                ctx.cast(),
                core::ptr::from_mut(self).cast(),
                size_of::<Self>() as c_int,
                0,
            )
        }
    }
}
