//! Fragments that come before the first one of their packet, which alone tells its flow. They are held until that comes,
//! and then sent after it. A host that reassembles waits for it just so.

use aya_ebpf::bindings::{
    __sk_buff, BPF_ANY, BPF_F_INGRESS, BPF_F_INVALIDATE_HASH, BPF_F_RECOMPUTE_CSUM,
};
use aya_ebpf::helpers::generated::{
    bpf_clone_redirect, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes,
};
use aya_ebpf::programs::TcContext;
use health_common::addr::Addr;
use health_common::config::EARLY_FRAGMENTS;
use health_common::ct::{Tuple4, Tuple6};
use health_common::fragment::{Fragment, FragmentHeader};
use health_common::masquerade::Address as _;
use health_common::metrics::{Direction, Reason};
use health_common::packet::EXTENSION_FRAGMENT;

use crate::bounds::within;
use crate::clock::coarse_now_secs;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::maps::{
    HEALTH_CONFIG, HEALTH_EARLY, HEALTH_EARLY_DRAFT, HEALTH_EARLY_FRAMES, HEALTH_EARLY_SOURCES,
};
use crate::metrics::{Verdict, held};
use crate::packet::load;

/// How many fragments of all packets are held; the oldest go first.
pub const HELD_FRAGMENTS: u32 = 1_024;
/// How many packets are known of which a fragment was held or the first one was seen.
pub const EARLY_PACKETS: u32 = 8_192;
/// How many sources of early fragments are counted.
pub const EARLY_SOURCES: u32 = 1_024;
/// How long a fragment is that can be held, from the link header on, bytes: those of devices of 1,500 bytes, with room for
/// tags. On jumbo frames early fragments are of no known flow.
const FRAME_MAX: u32 = 2_040;
/// How many fragments of one packet are held: 65,535 bytes in the least that IPv6 allows, 1,280, are 54.
const HELD_OF_PACKET: u32 = 64;
/// How many fragments of one source are held in [`WINDOW_SECS`].
const HELD_OF_SOURCE: u32 = 256;
/// See [`HELD_OF_SOURCE`].
const WINDOW_SECS: u32 = 4;

/// A packet in fragments, at a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PacketKey {
    source: Addr,
    destination: Addr,
    id_be: u32,
    ifindex: u32,
}

/// What is known of it.
#[repr(C)]
pub struct EarlyPacket {
    /// Until when: seconds of `CLOCK_MONOTONIC`. Identifications come again.
    expires: u32,
    /// How many of its fragments are held.
    held: u32,
    /// Whether the first one was seen.
    is_seen: u32,
}

/// A fragment that is held: the how-manieth of which packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FrameKey {
    packet: PacketKey,
    number: u32,
}

/// Its bytes.
#[repr(C)]
pub struct EarlyFrame {
    length: u32,
    bytes: [u8; FRAME_MAX as usize],
}

/// How many fragments of a source were held since `since`, seconds of `CLOCK_MONOTONIC`.
#[repr(C)]
pub struct EarlySource {
    since: u32,
    count: u32,
}

/// What a CPU puts together here, for which the stack has no room.
#[repr(C)]
pub struct EarlyDraft {
    key: FrameKey,
    frame: EarlyFrame,
    is_first: u32,
}

/// Finds out whether a packet is a fragment.
pub trait Pieces: Version {
    /// Which fragment the packet is whose IP header is at `ip_at`. With IPv6 the fragment header has to follow it.
    fn piece(frame: &Frame, ip_at: usize) -> Option<Fragment>;
}

impl Pieces for Tuple4 {
    #[inline(always)]
    fn piece(frame: &Frame, ip_at: usize) -> Option<Fragment> {
        frame.at::<Self::Header>(ip_at)?.fragment()
    }
}

impl Pieces for Tuple6 {
    #[inline(always)]
    fn piece(frame: &Frame, ip_at: usize) -> Option<Fragment> {
        if frame.at::<Self::Header>(ip_at)?.next_header != EXTENSION_FRAGMENT {
            return None;
        }
        let mut header = FragmentHeader::default();
        let at = (ip_at + Self::HEADER_LEN) as u32;
        load(frame, at, &mut header, size_of::<FragmentHeader>() as u32)?;
        header.fragment()
    }
}

/// Puts fragments in order at the device by which they come: `Some` when this one is held, or was sent on together with those
/// that waited for it, to come by this device once more.
#[inline(always)]
pub fn put_in_order<T: Pieces>(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    let fragment = T::piece(frame, ip_at)?;
    let (source, destination) = T::addresses(frame, ip_at)?;
    // SAFETY: a value of that map, of this CPU alone: programs on one CPU do not interrupt each other here.
    let draft = unsafe { &mut *HEALTH_EARLY_DRAFT.get_ptr_mut(0)? };
    draft.key = FrameKey {
        packet: PacketKey {
            source: source.to_addr(),
            destination: destination.to_addr(),
            id_be: fragment.id_be,
            ifindex: frame.ifindex(),
        },
        number: 0,
    };
    draft.is_first = fragment.first.into();
    (order(frame.skb()) == WAITS).then(|| held(frame, Reason::FragmentHeld, Direction::Ingress))
}

/// The packet goes on.
const GOES: u64 = 0;
/// Its bytes are elsewhere now: what is left of it goes no further.
const WAITS: u64 = 1;

/// A function of its own in the kernel too: the verifier looks at it once for both IP versions.
#[inline(never)]
fn order(skb: *mut __sk_buff) -> u64 {
    let ctx = TcContext::new(skb);
    let frame = &Frame::new(&ctx);
    let (Some(draft), Some(config)) = (HEALTH_EARLY_DRAFT.get_ptr_mut(0), HEALTH_CONFIG.get(0))
    else {
        return GOES;
    };
    if config.flags & EARLY_FRAGMENTS == 0 {
        return GOES;
    }
    // SAFETY: as in `put_in_order`.
    let draft = unsafe { &mut *draft };
    let now = coarse_now_secs();
    let expires = now + config.timeouts.fragment;
    // SAFETY: a value of that map. Fragments of one packet come by one queue of a device; where they do not, one may be lost.
    let known = HEALTH_EARLY
        .get_ptr_mut(draft.key.packet)
        .map(|known| unsafe { &mut *known })
        .filter(|known| known.expires > now);
    if draft.is_first != 0 {
        let Some(known) = known else {
            return note(draft, expires, 0);
        };
        known.expires = expires;
        known.is_seen = 1;
        let count = known.held;
        known.held = 0;
        return if count == 0 {
            GOES
        } else {
            release(frame, draft, count)
        };
    }
    let number = match &known {
        Some(known) if known.is_seen != 0 => return GOES,
        Some(known) => known.held,
        None => 0,
    };
    if number >= HELD_OF_PACKET || !has_share(&draft.key.packet.source, now) {
        return GOES;
    }
    draft.key.number = number;
    if !keep(frame, draft) {
        return GOES;
    }
    match known {
        Some(known) => known.held = number + 1,
        None => {
            note(draft, expires, 1);
        }
    }
    WAITS
}

/// Notes that the first fragment of a packet was seen, or that so many others are held.
#[inline(always)]
fn note(draft: &EarlyDraft, expires: u32, held: u32) -> u64 {
    let packet = EarlyPacket {
        expires,
        held,
        is_seen: (held == 0).into(),
    };
    let _ = HEALTH_EARLY.insert(draft.key.packet, packet, u64::from(BPF_ANY));
    GOES
}

/// Whether another fragment of this source may be held.
#[inline(always)]
fn has_share(source: &Addr, now: u32) -> bool {
    let Some(counted) = HEALTH_EARLY_SOURCES.get_ptr_mut(source) else {
        let first = EarlySource {
            since: now,
            count: 1,
        };
        return HEALTH_EARLY_SOURCES
            .insert(source, first, u64::from(BPF_ANY))
            .is_ok();
    };
    // SAFETY: a value of that map. A fragment more or less does no harm.
    let counted = unsafe { &mut *counted };
    if now.wrapping_sub(counted.since) >= WINDOW_SECS {
        (counted.since, counted.count) = (now, 0);
    }
    counted.count += 1;
    counted.count <= HELD_OF_SOURCE
}

/// Copies a fragment to where it is held.
#[inline(always)]
fn keep(frame: &Frame, draft: &mut EarlyDraft) -> bool {
    let Some(length) = within(frame.length(), 1, FRAME_MAX) else {
        return false;
    };
    draft.frame.length = length;
    // SAFETY: `within` bounds the length by that of the bytes, as the verifier sees.
    let failed = unsafe {
        bpf_skb_load_bytes(
            frame.skb().cast(),
            0,
            draft.frame.bytes.as_mut_ptr().cast(),
            length,
        )
    };
    failed == 0
        && HEALTH_EARLY_FRAMES
            .insert(draft.key, &draft.frame, u64::from(BPF_ANY))
            .is_ok()
}

/// Sends the first fragment, and behind it those that waited, to the device by which they came. Each is a copy of the
/// packet at hand, whose bytes are then those of the next.
#[inline(always)]
fn release(frame: &Frame, draft: &mut EarlyDraft, count: u32) -> u64 {
    if !send(frame) {
        return GOES;
    }
    for number in 0..HELD_OF_PACKET {
        if number >= count {
            break;
        }
        draft.key.number = number;
        // Evicted ones are lost, as any packet may be.
        if let Some(held) = HEALTH_EARLY_FRAMES.get_ptr(draft.key) {
            // SAFETY: a value of that map, which nobody changes before it is removed.
            if become_copy(frame, unsafe { &*held }) {
                send(frame);
            }
            let _ = HEALTH_EARLY_FRAMES.remove(draft.key);
        }
    }
    WAITS
}

/// Gives the packet at hand the bytes of a fragment.
#[inline(always)]
fn become_copy(frame: &Frame, held: &EarlyFrame) -> bool {
    let Some(length) = within(held.length, 1, FRAME_MAX) else {
        return false;
    };
    let flags = u64::from(BPF_F_RECOMPUTE_CSUM | BPF_F_INVALIDATE_HASH);
    // SAFETY: a valid context, and as many bytes as `within` allows.
    unsafe {
        bpf_skb_change_tail(frame.skb(), length, 0) == 0
            && bpf_skb_store_bytes(
                frame.skb().cast(),
                0,
                held.bytes.as_ptr().cast(),
                length,
                flags,
            ) == 0
    }
}

/// Sends a copy of the packet to its device, on its way in.
#[inline(always)]
fn send(frame: &Frame) -> bool {
    // SAFETY: a valid context.
    unsafe { bpf_clone_redirect(frame.skb(), frame.ifindex(), u64::from(BPF_F_INGRESS)) == 0 }
}
