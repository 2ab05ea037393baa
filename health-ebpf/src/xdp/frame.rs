//! A packet as the driver delivers it, and the packets whose headers XDP reads.

use core::arch::asm;
use core::mem::offset_of;

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::maps::LruHashMap;
use aya_ebpf::programs::XdpContext;
use health_common::ct::{TUPLE_IN, Tuple4, Tuple6};
use health_common::echo::{IPV6_LEN, Ipv4Header, Ipv6Header};
use health_common::nat::{Difference, apply_folded};
use health_common::service::xdp::{XdpFlow, XdpWay};

use crate::frame::IP_AT;
use crate::maps::{HEALTH_XDP_FLOWS4, HEALTH_XDP_FLOWS6};
use crate::source::Source;
use crate::subprogram::Context;

/// Version and length of an IPv4 header without options.
const PLAIN: u8 = 0x45;

/// Mask: traffic class and flow label in the first word of an IPv6 header, without the ECN bits.
const FLOW_INFO_BE: u32 = 0x0fcf_ffff_u32.to_be();

/// The type of service bits that routes may depend on: the ECN bits change on the way (RFC 3168).
const DSCP: u8 = 0xfc;

/// The change in the sum under the checksum of an IPv4 header per hop: one of its words starts with the time to live.
const HOP: Difference = Difference::of16(u16::from_ne_bytes([2, 0]), u16::from_ne_bytes([1, 0]));

/// Headers in a packet.
pub(super) struct Headers<'a, I, L> {
    /// Destination and source hardware addresses.
    pub(super) macs: &'a mut [u32; 3],
    pub(super) ip: &'a mut I,
    pub(super) transport: &'a mut L,
}

impl<I, L> Headers<'_, I, L> {
    /// The destination hardware address, as in [`health_common::service::xdp::XdpWay::mac`].
    #[inline(always)]
    pub(super) fn receiver(&self) -> [u16; 3] {
        let [a, b, c, d] = self.macs[0].to_ne_bytes();
        let [e, f, ..] = self.macs[1].to_ne_bytes();
        [[a, b], [c, d], [e, f]].map(u16::from_ne_bytes)
    }
}

/// A packet before it reaches the host's stack.
pub struct XdpFrame {
    ctx: XdpContext,
}

impl Context for XdpFrame {
    type Raw = xdp_md;

    #[inline(always)]
    fn of(raw: *mut xdp_md) -> Self {
        Self::new(XdpContext::new(raw))
    }

    #[inline(always)]
    fn raw(&self) -> *mut xdp_md {
        self.ctx.ctx
    }
}

impl XdpFrame {
    /// Wraps the hook's context.
    #[inline(always)]
    pub const fn new(ctx: XdpContext) -> Self {
        Self { ctx }
    }

    /// The context.
    #[inline(always)]
    pub const fn ctx(&self) -> &XdpContext {
        &self.ctx
    }

    /// Length from the Ethernet header on, in bytes.
    #[inline(always)]
    pub(super) fn length(&self) -> u32 {
        (self.end() - self.start()) as u32
    }

    #[inline(always)]
    fn start(&self) -> usize {
        self.pointer::<{ offset_of!(xdp_md, data) }>()
    }

    #[inline(always)]
    fn end(&self) -> usize {
        self.pointer::<{ offset_of!(xdp_md, data_end) }>()
    }

    /// A pointer from the context, which holds it in 32 bits: LLVM would spill only those, and the verifier requires
    /// all 64.
    #[inline(always)]
    #[allow(
        clippy::pointers_in_nomem_asm_block,
        reason = "no helper that is called here changes these fields, so they need no second look"
    )]
    fn pointer<const AT: usize>(&self) -> usize {
        let pointer: u64;
        // SAFETY: a field of the context.
        unsafe {
            asm!(
                "{pointer} = *(u32 *)({ctx} + {at})",
                pointer = out(reg) pointer,
                ctx = in(reg) self.ctx.ctx,
                at = const AT,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        pointer as usize
    }

    /// The device that the packet came in on.
    #[inline(always)]
    pub(super) fn ifindex(&self) -> u32 {
        self.ctx.ingress_ifindex() as u32
    }

    /// The bytes at `offset` as `T`; `None` if the packet is too short. For alignment see
    /// [`crate::frame::Frame::at`].
    #[inline(always)]
    #[allow(
        clippy::mut_from_ref,
        reason = "the bytes belong to the packet, not to the context"
    )]
    pub fn at<T>(&self, offset: usize) -> Option<&mut T> {
        let start = self.start() + offset;
        if start + size_of::<T>() > self.end() {
            return None;
        }
        // SAFETY: in bounds as just compared, and all `T` used are plain integers.
        Some(unsafe { &mut *(start as *mut T) })
    }

    /// The headers, with the transport header at `offset`; after a single comparison.
    #[inline(always)]
    pub(super) fn headers<I, L>(&self, offset: usize) -> Option<Headers<'_, I, L>> {
        let start = self.start();
        if start + offset + size_of::<L>() > self.end() {
            return None;
        }
        // SAFETY: in bounds, since `offset` is behind the other two headers; they do not overlap, and all are plain
        // integers. For alignment see `crate::frame::Frame::at`.
        Some(unsafe {
            Headers {
                macs: &mut *(start as *mut [u32; 3]),
                ip: &mut *((start + IP_AT) as *mut I),
                transport: &mut *((start + offset) as *mut L),
            }
        })
    }
}

/// How the IP versions differ in reading and rewriting plain packets.
pub trait Plain: Source {
    /// The look-up results for its flows.
    fn known() -> &'static LruHashMap<Self, XdpFlow<Self::Address>>;
    /// Whether a packet has a header without options, is whole, and may be forwarded: it has hops left.
    fn is_plain(ip: &Self::Header) -> bool;
    /// Length according to the header, including the header, in bytes.
    fn total_len(ip: &Self::Header) -> u32;
    /// Like [`crate::fib::FibLookup::flow_info`], without the ECN bits.
    fn class(ip: &Self::Header) -> u32;
    /// The tuple of a received packet, between these ports.
    fn tuple(ip: &Self::Header, ports_be: [u16; 2], protocol: u8) -> Self;
    /// The change in the sum under the header's checksum on the way to the next hop, not counting addresses.
    const HOP: Difference;
    /// Rewrites a packet's header as [`XdpWay`] says.
    fn send_on(ip: &mut Self::Header, way: &XdpWay<Self::Address>);
}

impl Plain for Tuple4 {
    #[inline(always)]
    fn known() -> &'static LruHashMap<Self, XdpFlow<Self::Address>> {
        &HEALTH_XDP_FLOWS4
    }

    #[inline(always)]
    fn is_plain(ip: &Ipv4Header) -> bool {
        ip.version_ihl == PLAIN && ip.fragment().is_none() && ip.ttl > 1
    }

    #[inline(always)]
    fn total_len(ip: &Ipv4Header) -> u32 {
        u16::from_be(ip.total_len_be).into()
    }

    #[inline(always)]
    fn class(ip: &Ipv4Header) -> u32 {
        u32::from_ne_bytes([ip.tos & DSCP, 0, 0, 0])
    }

    #[inline(always)]
    fn tuple(ip: &Ipv4Header, [sport_be, dport_be]: [u16; 2], protocol: u8) -> Self {
        Self {
            saddr_be: ip.saddr_be,
            daddr_be: ip.daddr_be,
            sport_be,
            dport_be,
            protocol,
            direction: TUPLE_IN,
            pad: 0,
        }
    }

    const HOP: Difference = HOP;

    #[inline(always)]
    fn send_on(ip: &mut Ipv4Header, way: &XdpWay<u32>) {
        ip.check = apply_folded(way.ip_change, ip.check);
        ip.ttl -= 1;
        (ip.saddr_be, ip.daddr_be) = (way.source_be, way.destination_be);
    }
}

impl Plain for Tuple6 {
    #[inline(always)]
    fn known() -> &'static LruHashMap<Self, XdpFlow<Self::Address>> {
        &HEALTH_XDP_FLOWS6
    }

    #[inline(always)]
    fn is_plain(ip: &Ipv6Header) -> bool {
        ip.is_version_6() && ip.hop_limit > 1
    }

    #[inline(always)]
    fn total_len(ip: &Ipv6Header) -> u32 {
        IPV6_LEN as u32 + u32::from(u16::from_be(ip.payload_len_be))
    }

    #[inline(always)]
    fn class(ip: &Ipv6Header) -> u32 {
        // Without the version, as the kernel expects it (`IPV6_FLOWINFO_MASK`).
        ip.version_class_flow_be & FLOW_INFO_BE
    }

    #[inline(always)]
    fn tuple(ip: &Ipv6Header, [sport_be, dport_be]: [u16; 2], protocol: u8) -> Self {
        Self {
            saddr_be: ip.saddr_be,
            daddr_be: ip.daddr_be,
            sport_be,
            dport_be,
            protocol,
            direction: TUPLE_IN,
            pad: 0,
        }
    }

    const HOP: Difference = Difference::NONE;

    #[inline(always)]
    fn send_on(ip: &mut Ipv6Header, way: &XdpWay<[u32; 4]>) {
        ip.hop_limit -= 1;
        (ip.saddr_be, ip.daddr_be) = (way.source_be, way.destination_be);
    }
}
