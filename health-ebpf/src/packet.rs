//! Fetches the parts of a packet from which `health_common::packet` reads its tuple.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::helpers::bpf_skb_load_bytes;
use health_common::ct::{Tuple4, Tuple6};
use health_common::echo::{ECHO_LEN, IPV4_LEN, IPV6_LEN, Ipv4Header, Ipv6Header};
use health_common::fragment::FragmentHeader;
use health_common::packet::{
    self, EXTENSION_FRAGMENT, EXTENSIONS_MAX, Packet, TransportStart, Upper, extension, inner4,
    inner6, is_extension, transport_len,
};

use crate::bounds::within;
use crate::frame::Frame;

/// Bytes of an ICMP error before the packet that it quotes (RFC 792, RFC 4443 section 3).
pub const ERROR_LEN: u32 = ECHO_LEN as u32;

/// A packet whose headers were read.
pub struct ParsedPacket<T> {
    /// The parts that conntrack needs.
    pub packet: Packet<T>,
    /// Offset of the transport header, after IP options and extension headers.
    pub content_at: u32,
}

/// The packet inside an ICMP error.
pub struct Inner<T> {
    /// The tuple of a reply to this packet.
    pub reply: T,
    /// Offset of its IP header.
    pub ip_at: u32,
    /// Offset of its transport header.
    pub content_at: u32,
    /// Number of its bytes from the transport header on.
    pub content_len: u32,
}

/// Reads the IPv4 packet whose header is at `ip_at` and which travels in `direction` (as in a tuple). `None` if it is
/// truncated or not IPv4.
#[inline(always)]
pub fn read4(frame: &Frame, ip_at: usize, direction: u8) -> Option<ParsedPacket<Tuple4>> {
    let ip = frame.at::<Ipv4Header>(ip_at)?;
    let content_at = ip_at as u32 + ip.header_len();
    let start = transport_start(frame, content_at, transport_len(ip.protocol));
    let packet = packet::read4(ip, frame.length() - ip_at as u32, &start, direction)?;
    Some(ParsedPacket { packet, content_at })
}

/// Reads the packet inside an IPv4 ICMP error. The error starts at `error_at`, in the packet at `outer_at`, and travels
/// in `direction`.
#[inline(always)]
pub fn read_inner4(
    frame: &Frame,
    outer_at: usize,
    error_at: u32,
    direction: u8,
) -> Option<Inner<Tuple4>> {
    let outer = frame.at::<Ipv4Header>(outer_at)?;
    let outer_at = outer_at as u32;
    let end = outer_at + outer.header_len() + outer.data_len(frame.length() - outer_at)?;
    let ip_at = error_at + ERROR_LEN;
    let mut ip = Ipv4Header::default();
    load(frame, ip_at, &mut ip, IPV4_LEN as u32)?;
    let content_at = ip_at + ip.header_len();
    let start = transport_start(frame, content_at, ERROR_LEN);
    let len = end.checked_sub(ip_at)?;
    Some(Inner {
        reply: inner4(&ip, len, &start, direction)?,
        ip_at,
        content_at,
        content_len: ip.data_len(len)?,
    })
}

/// Like [`read4`].
#[inline(always)]
pub fn read6(frame: &Frame, ip_at: usize, direction: u8) -> Option<ParsedPacket<Tuple6>> {
    let ip = frame.at::<Ipv6Header>(ip_at)?;
    let (upper, content_at) = upper(frame, ip_at as u32, ip, frame.length())?;
    let start = transport_start(frame, content_at, transport_len(upper.protocol));
    let packet = packet::read6(ip, &upper, &start, direction)?;
    Some(ParsedPacket { packet, content_at })
}

/// Like [`read_inner4`].
#[inline(always)]
pub fn read_inner6(
    frame: &Frame,
    outer_at: usize,
    error_at: u32,
    direction: u8,
) -> Option<Inner<Tuple6>> {
    let outer = frame.at::<Ipv6Header>(outer_at)?;
    let outer_at = outer_at as u32;
    let end = outer_at + IPV6_LEN as u32 + outer.data_len(frame.length() - outer_at)?;
    let ip_at = error_at + ERROR_LEN;
    let mut ip = Ipv6Header::default();
    load(frame, ip_at, &mut ip, IPV6_LEN as u32)?;
    let (upper, content_at) = upper(frame, ip_at, &ip, end)?;
    let start = transport_start(frame, content_at, ERROR_LEN);
    Some(Inner {
        reply: inner6(&ip, &upper, &start, direction)?,
        ip_at,
        content_at,
        content_len: upper.len,
    })
}

/// Walks the extension headers of the packet whose IP header is at `ip_at`, and which ends at `end` or earlier. Returns
/// the header after them, and its offset.
#[inline(always)]
fn upper(frame: &Frame, ip_at: u32, ip: &Ipv6Header, end: u32) -> Option<(Upper, u32)> {
    let mut protocol = ip.next_header;
    let mut at = ip_at + IPV6_LEN as u32;
    let end = at + ip.data_len(end.checked_sub(ip_at)?)?;
    let mut fragment = FragmentHeader::default();
    for _ in 0..EXTENSIONS_MAX {
        if !is_extension(protocol) {
            break;
        }
        let mut start = [0_u8; 2];
        load(frame, at, &mut start, 2)?;
        if protocol == EXTENSION_FRAGMENT {
            load(frame, at, &mut fragment, size_of::<FragmentHeader>() as u32)?;
        }
        let header = extension(protocol, start)?;
        protocol = header.next_header;
        at += header.len;
        if matches!(fragment.fragment(), Some(fragment) if !fragment.first) {
            break;
        }
    }
    let is_later = matches!(fragment.fragment(), Some(fragment) if !fragment.first);
    if is_extension(protocol) && !is_later {
        return None;
    }
    let upper = Upper {
        protocol,
        len: end.checked_sub(at)?,
        fragment: fragment.fragment(),
    };
    Some((upper, at))
}

/// Reads the first bytes of a transport header: at least `len`, unless the packet is shorter. The rest is zero.
#[inline(always)]
fn transport_start(frame: &Frame, at: u32, len: u32) -> TransportStart {
    let mut start = TransportStart::default();
    if let Some(len) = within(len, 1, size_of::<TransportStart>() as u32) {
        // If this fails, the packet is too short to belong to a flow, as its length shows.
        let _ = load(frame, at, &mut start, len);
    }
    start
}

/// Copies `len` bytes at `offset` of the packet into `to`.
#[inline(always)]
pub fn load<T>(frame: &Frame, offset: u32, to: &mut T, len: u32) -> Option<()> {
    // SAFETY: `len` is at most the size of `T`, which the verifier checks against the stack.
    let failed = unsafe {
        bpf_skb_load_bytes(
            frame.ctx().as_ptr().cast(),
            offset,
            core::ptr::from_mut(to).cast(),
            len,
        )
    };
    (failed == 0).then_some(())
}
