//! A packet as the driver hands it over, and those of which XDP reads the headers.

use core::arch::asm;
use core::mem::offset_of;

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::maps::{LruHashMap, PerCpuArray};
use aya_ebpf::programs::XdpContext;
use health_common::ct::{IP_PROTOCOL_UDP, TUPLE_IN, Tuple4, Tuple6};
use health_common::echo::{IPV6_LEN, Ipv4Header, Ipv6Header};
use health_common::nat::Difference;
use health_common::packet::{Kind, Packet, TransportStart, Upper, read4, read6};
use health_common::service::xdp::XdpFlow;
use health_common::tcp::{ACK, FIN, IP_PROTOCOL_TCP, RST, SYN, TcpHeader};

use super::Draft;
use crate::frame::IP_AT;
use crate::ip_version::Version;
use crate::maps::{HEALTH_XDP_DRAFT4, HEALTH_XDP_DRAFT6, HEALTH_XDP_FLOWS4, HEALTH_XDP_FLOWS6};

/// Version and length of an IPv4 header without options.
const PLAIN: u8 = 0x45;

/// Traffic class and flow label in the first word of an IPv6 header, without the bits of ECN.
const FLOW_INFO_BE: u32 = 0x0fcf_ffff_u32.to_be();

/// The bits of a type of service that routes may depend on: those of ECN change on the way (RFC 3168).
const DSCP: u8 = 0xfc;

/// The word of a TCP header that ends with its flags.
const FLAGS_WORD: usize = offset_of!(TcpHeader, flags) / 2;

/// UDP header (RFC 768), network byte order.
#[repr(C)]
pub(super) struct UdpHeader {
    pub(super) source_be: u16,
    pub(super) destination_be: u16,
    pub(super) len_be: u16,
    /// 0 for none.
    pub(super) check: u16,
}

/// A packet before the host's stack has it.
pub struct XdpFrame<'a> {
    ctx: &'a XdpContext,
}

impl<'a> XdpFrame<'a> {
    /// Wraps the hook's context.
    #[inline(always)]
    pub const fn new(ctx: &'a XdpContext) -> Self {
        Self { ctx }
    }

    #[inline(always)]
    pub(super) const fn ctx(&self) -> &'a XdpContext {
        self.ctx
    }

    /// Length from the Ethernet header on, bytes.
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

    /// A pointer of the context, which holds it in 32 bits: LLVM would put it away in as many, and the verifier wants all 64.
    #[inline(always)]
    fn pointer<const AT: usize>(&self) -> usize {
        let pointer: u64;
        // SAFETY: a field of the context, which no helper that is called here changes.
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

    /// The device that the packet came by.
    #[inline(always)]
    pub(super) fn ifindex(&self) -> u32 {
        self.ctx.ingress_ifindex() as u32
    }

    /// The bytes at `offset` as `T`; `None` when they are not all there. For alignment see [`crate::frame::Frame::at`].
    #[inline(always)]
    #[allow(
        clippy::mut_from_ref,
        reason = "the bytes belong to the packet, not to the context"
    )]
    pub fn at<T>(&self, offset: usize) -> Option<&'a mut T> {
        let start = self.start() + offset;
        if start + size_of::<T>() > self.end() {
            return None;
        }
        // SAFETY: in bounds as just compared, and all `T` used are plain integers.
        Some(unsafe { &mut *(start as *mut T) })
    }
}

/// What reading and rewriting of plain packets differs in between the IP versions.
pub(super) trait Plain: Version {
    /// What was found out of its flows.
    fn known() -> &'static LruHashMap<Self, XdpFlow<Self::Address>>;
    /// Where one of these values is made.
    fn drafts() -> &'static PerCpuArray<Draft<Self>>;
    /// Whether a packet has a header without options, is whole, and may be sent on: its time is not over.
    fn is_plain(ip: &Self::Header) -> bool;
    /// Length that the header tells, itself included, bytes.
    fn total_len(ip: &Self::Header) -> u32;
    /// As [`crate::fib::FibLookup::flow_info`], without the bits of ECN.
    fn class(ip: &Self::Header) -> u32;
    /// The packet, of which the header tells the length, with the first bytes of its transport header.
    fn packet(ip: &Self::Header, start: &TransportStart, direction: u8) -> Option<Packet<Self>>;
    /// Sends a packet on between other addresses: as many bits of its sum change as `addresses` says.
    fn send_on(ip: &mut Self::Header, ends: (Self::Address, Self::Address), addresses: Difference);
}

impl Plain for Tuple4 {
    #[inline(always)]
    fn known() -> &'static LruHashMap<Self, XdpFlow<Self::Address>> {
        &HEALTH_XDP_FLOWS4
    }

    #[inline(always)]
    fn drafts() -> &'static PerCpuArray<Draft<Self>> {
        &HEALTH_XDP_DRAFT4
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
    fn packet(ip: &Ipv4Header, start: &TransportStart, direction: u8) -> Option<Packet<Self>> {
        read4(ip, Self::total_len(ip), start, direction)
    }

    #[inline(always)]
    fn send_on(ip: &mut Ipv4Header, ends: (u32, u32), addresses: Difference) {
        let word = |ttl| u16::from_ne_bytes([ttl, ip.protocol]);
        let (old, new) = (word(ip.ttl), word(ip.ttl - 1));
        ip.check = addresses.and(Difference::of16(old, new)).apply(ip.check);
        ip.ttl -= 1;
        (ip.saddr_be, ip.daddr_be) = ends;
    }
}

impl Plain for Tuple6 {
    #[inline(always)]
    fn known() -> &'static LruHashMap<Self, XdpFlow<Self::Address>> {
        &HEALTH_XDP_FLOWS6
    }

    #[inline(always)]
    fn drafts() -> &'static PerCpuArray<Draft<Self>> {
        &HEALTH_XDP_DRAFT6
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
        // Without the version, as the kernel wants it (`IPV6_FLOWINFO_MASK`).
        ip.version_class_flow_be & FLOW_INFO_BE
    }

    #[inline(always)]
    fn packet(ip: &Ipv6Header, start: &TransportStart, direction: u8) -> Option<Packet<Self>> {
        let upper = Upper {
            protocol: ip.next_header,
            len: u16::from_be(ip.payload_len_be).into(),
            fragment: None,
        };
        read6(ip, &upper, start, direction)
    }

    #[inline(always)]
    fn send_on(ip: &mut Ipv6Header, ends: ([u32; 4], [u32; 4]), _addresses: Difference) {
        ip.hop_limit -= 1;
        (ip.saddr_be, ip.daddr_be) = ends;
    }
}

/// Reads a packet as one that came: a whole datagram of UDP, or a whole segment of TCP. `None` for all else.
#[inline(always)]
pub(super) fn read<T: Plain>(frame: &XdpFrame) -> Option<Packet<T>> {
    let ip = frame.at::<T::Header>(IP_AT)?;
    if !T::is_plain(ip) || frame.length() < IP_AT as u32 + T::total_len(ip) {
        return None;
    }
    let mut start = TransportStart::default();
    match T::protocol_behind(ip) {
        IP_PROTOCOL_TCP => {
            let tcp = frame.at::<TcpHeader>(T::L4_AT)?;
            start.words_be[0] = tcp.source_be;
            start.words_be[1] = tcp.destination_be;
            start.words_be[FLAGS_WORD] = u16::from_be_bytes([tcp.offset, tcp.flags]).to_be();
        }
        IP_PROTOCOL_UDP => {
            let udp = frame.at::<UdpHeader>(T::L4_AT)?;
            start.words_be[0] = udp.source_be;
            start.words_be[1] = udp.destination_be;
        }
        _ => return None,
    }
    T::packet(ip, &start, TUPLE_IN).filter(|packet| matches!(packet.kind, Kind::Flow))
}

/// Whether a packet neither opens nor ends a connection.
#[inline(always)]
pub(super) fn is_between<T: Plain>(packet: &Packet<T>) -> bool {
    packet.tuple.protocol() == IP_PROTOCOL_UDP || packet.tcp_flags & (SYN | FIN | RST | ACK) == ACK
}
