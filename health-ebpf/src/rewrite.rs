//! Rewrites one end of a packet, or of the packet inside an ICMP error, and all checksums that cover it.

use core::ffi::c_long;

use aya_ebpf::bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM};
use aya_ebpf::helpers::generated::{bpf_l3_csum_replace, bpf_l4_csum_replace, bpf_skb_store_bytes};
use health_common::ct::IP_PROTOCOL_UDP;
use health_common::nat::{ChecksumField, Difference, End, checksum_field, port_at};

use crate::bounds::forgotten;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::packet::{ERROR_LEN, Inner, load};

/// Flag of `bpf_l4_csum_replace`, since Linux 6.16: the pseudo header is that of IPv6, and no other checksum
/// compensates for its addresses. Newer than the generated bindings.
const BPF_F_IPV6: u64 = 1 << 7;
/// An offset in bytes that no packet reaches: past the end of the longest one.
const NOWHERE: u32 = 1 << 16;
/// The checksum field of an ICMP message. ICMPv6 also covers a pseudo header, but that does not depend on the message's
/// content.
const ICMP_CHECK: ChecksumField = ChecksumField {
    at: 2,
    has_pseudo_header: false,
    is_optional: false,
};

/// How to rewrite one end of a packet.
pub struct Ends<T: Version> {
    /// The end to rewrite.
    pub end: End,
    /// Address and port before, network byte order.
    pub old: (T::Address, u16),
    /// Address and port after.
    pub new: (T::Address, u16),
}

impl<T: Version> Ends<T> {
    #[inline(always)]
    const fn address_at(&self) -> u32 {
        T::ADDRESSES_AT[match self.end {
            End::Source => 0,
            End::Destination => 1,
        }]
    }
}

/// Rewrites a packet whose IP header is at `ip_at`. Its transport header is at `content_at`; later fragments have
/// none. If this returns `None`, the packet is damaged.
#[inline(always)]
pub fn packet<T: Version>(
    frame: &Frame,
    ip_at: u32,
    content_at: Option<u32>,
    protocol: u8,
    ends: &Ends<T>,
) -> Option<()> {
    let change = T::change(&ends.old, &ends.new);
    let has_other_port = ends.old.1 != ends.new.1;
    if let Some(content_at) = content_at {
        if let Some(field) = checksum_field(protocol) {
            if field.has_pseudo_header {
                replace_pseudo::<T>(frame, content_at, &field, change.address)?;
            }
            if has_other_port {
                replace(frame, content_at, &field, change.port, 0)?;
            }
        }
        if has_other_port && let Some(at) = port_at(protocol, ends.end) {
            store(frame, content_at + at, &ends.new.1)?;
        }
    }
    if let Some(check_at) = T::IP_CHECK_AT {
        replace_ip(frame, ip_at + check_at, change.address)?;
    }
    store(frame, ip_at + ends.address_at(), &ends.new.0)
}

/// Rewrites only the port of one end, from `old` to `new` (network byte order), in the same way as [`packet`].
#[inline(always)]
pub fn port(
    frame: &Frame,
    content_at: Option<u32>,
    protocol: u8,
    end: End,
    (old, new): (u16, u16),
) -> Option<()> {
    let Some(content_at) = content_at else {
        return Some(());
    };
    if let Some(field) = checksum_field(protocol) {
        replace(frame, content_at, &field, Difference::of16(old, new), 0)?;
    }
    match port_at(protocol, end) {
        Some(at) => store(frame, content_at + at, &new),
        None => Some(()),
    }
}

/// Rewrites the packet inside an ICMP error that starts at `error_at`, and the error's checksum, but not the error's
/// own addresses. If this returns `None`, the packet is damaged.
#[inline(always)]
pub fn inner<T: Version>(
    frame: &Frame,
    error_at: u32,
    inner: &Inner<T>,
    ends: &Ends<T>,
) -> Option<()> {
    let protocol = inner.reply.protocol();
    let ip_check_at = T::IP_CHECK_AT.map(|at| inner.ip_at + at);
    let ip_check = match ip_check_at {
        Some(at) => Some(load_check(frame, at)?),
        None => None,
    };
    let check_at = match checksum_field(protocol) {
        Some(field) if field.at + 2 <= inner.content_len => Some(inner.content_at + field.at),
        _ => None,
    };
    let check = match check_at {
        Some(at) => Some(load_check(frame, at)?),
        None => None,
    };
    let inside = T::change(&ends.old, &ends.new).inside(protocol, ip_check, check);
    if let (Some(at), Some(check)) = (ip_check_at, inside.ip_check) {
        store(frame, at, &check)?;
    }
    if let (Some(at), Some(check)) = (check_at, inside.transport_check) {
        store(frame, at, &check)?;
    }
    if let Some(at) = port_at(protocol, ends.end) {
        store(frame, inner.content_at + at, &ends.new.1)?;
    }
    store(frame, inner.ip_at + ends.address_at(), &ends.new.0)?;
    replace(frame, error_at, &ICMP_CHECK, inside.around, 0)
}

/// The packet inside an ICMP error, and how to rewrite it. Its protocol has ports, and a checksum that covers the
/// addresses.
pub struct Quoted<T: Version> {
    /// Offset of its transport header.
    pub content_at: u32,
    /// Number of its bytes from the transport header on.
    pub content_len: u32,
    /// Its protocol.
    pub protocol: u8,
    /// Source and destination before: address and port, network byte order.
    pub old: [(T::Address, u16); 2],
    /// Source and destination after.
    pub new: [(T::Address, u16); 2],
}

/// Rewrites both ends of the packet inside an ICMP error that starts at `error_at`, and the error's checksum, but not
/// the error's own addresses. If this returns `None`, the packet is damaged.
#[inline(always)]
pub fn quoted<T: Version>(frame: &Frame, error_at: u32, quoted: &Quoted<T>) -> Option<()> {
    let ip_at = error_at + ERROR_LEN;
    let change =
        T::change(&quoted.old[0], &quoted.new[0]).and(T::change(&quoted.old[1], &quoted.new[1]));
    // The inner checksums change too, and the error's own checksum covers them.
    let covered = change.address.and(change.port);
    let mut around = covered;
    if let Some(check_at) = T::IP_CHECK_AT {
        let old = load_check(frame, ip_at + check_at)?;
        let new = change.address.apply(old);
        store(frame, ip_at + check_at, &new)?;
        around = around.and(Difference::of16(old, new));
    }
    // A number, not an `Option`: LLVM would split an `Option` into two values, one of which the verifier considers
    // uninitialised.
    let check_at = forgotten(checksum_field(quoted.protocol).map_or(NOWHERE, |field| field.at));
    if check_at + 2 <= quoted.content_len {
        let check_at = quoted.content_at + check_at;
        let old = load_check(frame, check_at)?;
        let new = if quoted.protocol == IP_PROTOCOL_UDP {
            covered.apply_optional(old)
        } else {
            covered.apply(old)
        };
        store(frame, check_at, &new)?;
        around = around.and(Difference::of16(old, new));
    }
    let [source, destination] = quoted.new;
    store(frame, quoted.content_at, &[source.1, destination.1])?;
    store(
        frame,
        ip_at + T::ADDRESSES_AT[0],
        &[source.0, destination.0],
    )?;
    replace(frame, error_at, &ICMP_CHECK, around, 0)
}

/// Rewrites the source and destination address of an ICMP message that starts at `content_at`, whose IP header is at
/// `ip_at`. If this returns `None`, the packet is damaged.
#[inline(always)]
pub fn around<T: Version>(
    frame: &Frame,
    ip_at: u32,
    content_at: u32,
    old: [T::Address; 2],
    new: [T::Address; 2],
) -> Option<()> {
    let change = T::change(&(old[0], 0), &(new[0], 0)).and(T::change(&(old[1], 0), &(new[1], 0)));
    if let Some(field) = checksum_field(T::ICMP)
        && field.has_pseudo_header
    {
        replace_pseudo::<T>(frame, content_at, &field, change.address)?;
    }
    if let Some(check_at) = T::IP_CHECK_AT {
        replace_ip(frame, ip_at + check_at, change.address)?;
    }
    store(frame, ip_at + T::ADDRESSES_AT[0], &new)
}

/// Updates the checksum of an IPv4 header.
#[inline(always)]
fn replace_ip(frame: &Frame, at: u32, difference: Difference) -> Option<()> {
    // SAFETY: a valid context; the helper checks the rest.
    let result =
        unsafe { bpf_l3_csum_replace(frame.skb(), at, 0, u64::from(difference.word()), 0) };
    done(result)
}

/// Updates a checksum for a change in the pseudo header.
#[inline(always)]
fn replace_pseudo<T: Version>(
    frame: &Frame,
    content_at: u32,
    field: &ChecksumField,
    difference: Difference,
) -> Option<()> {
    let pseudo = u64::from(BPF_F_PSEUDO_HDR);
    if T::IP_VERSION == 6
        && replace(frame, content_at, field, difference, pseudo | BPF_F_IPV6).is_some()
    {
        return Some(());
    }
    // An older kernel rejects the flag and has changed nothing.
    replace(frame, content_at, field, difference, pseudo)
}

#[inline(always)]
fn replace(
    frame: &Frame,
    content_at: u32,
    field: &ChecksumField,
    difference: Difference,
    flags: u64,
) -> Option<()> {
    let optional = if field.is_optional {
        u64::from(BPF_F_MARK_MANGLED_0)
    } else {
        0
    };
    // SAFETY: a valid context; the helper checks the rest.
    let result = unsafe {
        bpf_l4_csum_replace(
            frame.skb(),
            content_at + field.at,
            0,
            u64::from(difference.word()),
            flags | optional,
        )
    };
    done(result)
}

/// Decrements the time to live or hop limit of the packet whose IP header is at `ip_at`, as a router does. `None`,
/// with nothing changed, if it would reach zero.
#[inline(always)]
pub fn decrement_ttl<T: Version>(frame: &Frame, ip_at: u32) -> Option<()> {
    let at = ip_at + T::TTL_AT;
    let mut ttl = 0_u8;
    load(frame, at, &mut ttl, 1)?;
    if ttl <= 1 {
        return None;
    }
    let left = ttl - 1;
    if let Some(check_at) = T::IP_CHECK_AT {
        // The TTL is the upper half of a 16-bit word of the header.
        let [old, new] = [ttl, left].map(|ttl| u64::from(u16::from_ne_bytes([ttl, 0])));
        // SAFETY: a valid context; the helper checks the rest.
        let result = unsafe { bpf_l3_csum_replace(frame.skb(), ip_at + check_at, old, new, 2) };
        done(result)?;
    }
    // The device's checksum over the whole packet covers the IPv6 header, which has no checksum that compensates for
    // the change.
    let flags = if T::IP_VERSION == 6 {
        BPF_F_RECOMPUTE_CSUM
    } else {
        0
    };
    // SAFETY: as above, and a value of one byte.
    let result = unsafe {
        bpf_skb_store_bytes(
            frame.skb(),
            at,
            (&raw const left).cast(),
            1,
            u64::from(flags),
        )
    };
    done(result)
}

#[inline(always)]
fn load_check(frame: &Frame, at: u32) -> Option<u16> {
    let mut check = 0_u16;
    load(frame, at, &mut check, 2)?;
    Some(check)
}

/// Overwrites bytes. The device's checksum over the whole packet stays correct: the packet's own checksums change by
/// the same amount.
#[inline(always)]
fn store<V>(frame: &Frame, at: u32, value: &V) -> Option<()> {
    store_with(frame, at, value, 0)
}

/// Overwrites bytes, and updates the device's checksum over the whole packet to match.
#[inline(always)]
pub fn store_recomputed<V>(frame: &Frame, at: u32, value: &V) -> Option<()> {
    store_with(frame, at, value, BPF_F_RECOMPUTE_CSUM)
}

#[inline(always)]
fn store_with<V>(frame: &Frame, at: u32, value: &V, flags: u32) -> Option<()> {
    // SAFETY: a valid context and a value of that size.
    let result = unsafe {
        bpf_skb_store_bytes(
            frame.skb(),
            at,
            core::ptr::from_ref(value).cast(),
            size_of::<V>() as u32,
            u64::from(flags),
        )
    };
    done(result)
}

#[inline(always)]
fn done(result: c_long) -> Option<()> {
    (result == 0).then_some(())
}
