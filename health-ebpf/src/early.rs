//! Fragments that come before the first one of their packet, which alone tells its flow. They are held until that comes,
//! and then sent after it. A host that reassembles waits for it just so.

#![allow(
    clippy::needless_borrows_for_generic_args,
    reason = "keys are in a map: copies of them would be on the stack, which has no room"
)]

use aya_ebpf::Global;
use aya_ebpf::bindings::{
    __sk_buff, BPF_ANY, BPF_F_INGRESS, BPF_F_INVALIDATE_HASH, BPF_F_RECOMPUTE_CSUM,
};
use aya_ebpf::helpers::generated::{
    bpf_clone_redirect, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes,
};
use aya_ebpf::programs::TcContext;
use health_common::addr::Addr;
use health_common::config::EARLY_FRAGMENTS;
use health_common::masquerade::Address as _;
use health_common::metrics::{Direction, Reason};

use crate::bounds::{header_at, within};
use crate::clock::{coarse_now_ns, coarse_now_secs};
use crate::fragment::{self, Fragments};
use crate::frame::Frame;
use crate::maps::{
    HEALTH_CONFIG, HEALTH_EARLY, HEALTH_EARLY_DRAFT, HEALTH_EARLY_FRAMES, HEALTH_EARLY_SOURCES,
};
use crate::metrics::{Verdict, held};

/// About how many fragments of all packets are held; the oldest go first.
pub const HELD_FRAGMENTS: u32 = 1_024;
/// About how many packets are known of which a fragment was held or the first one was seen.
pub const EARLY_PACKETS: u32 = 8_192;
/// About how many sources of early fragments are counted.
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
/// How long a first fragment can be on its way through the queue of a processor. After that it is lost.
const QUEUED_NS: u64 = 20_000_000;

/// From when on fragments are held, seconds of `CLOCK_MONOTONIC`: a while after the programs take over. They know nothing
/// of packets whose first fragment others saw. Set as the programs are loaded.
#[unsafe(no_mangle)]
static HOLDS_FROM: Global<u32> = Global::new(0);

/// A packet in fragments.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PacketKey {
    source: Addr,
    destination: Addr,
    id_be: u32,
    /// With IPv4, whose identifications each protocol may count for itself; 0 with IPv6.
    protocol: u32,
}

/// What is known of it.
#[repr(C)]
pub struct EarlyPacket {
    /// When the first fragment was sent on together with others, `CLOCK_MONOTONIC`.
    released_ns: u64,
    /// Until when this holds: seconds of `CLOCK_MONOTONIC`. Identifications come again.
    expires: u32,
    /// How many fragments are held.
    held: u32,
    /// One of the following.
    state: u32,
    /// Explicit padding, zero.
    pad: u32,
}

/// The first fragment has not come yet.
const WAITING: u32 = 0;
/// It is in a queue, to come by its device again.
const QUEUED: u32 = 1;
/// It has passed.
const PASSED: u32 = 2;

/// A fragment that is held: its packet, and its place among those.
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
    /// The device by which it came.
    ifindex: u32,
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
}

/// Puts fragments in order at the device by which they come: `Some` when this one is held, or was sent on together with those
/// that waited for it, to come by its device once more.
#[inline(always)]
pub fn put_in_order<T: Fragments>(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    // What is held would come again with the tag of the first one, or without its own.
    let is_tagged = frame.has_vlan_tag() || ip_at != frame.link_header_len();
    if is_tagged || !T::may_be_fragment(frame.at(ip_at)?) {
        return None;
    }
    (arrange::<T>(frame.skb(), ip_at as u32) == HELD)
        .then(|| held(frame, Reason::FragmentHeld, Direction::Ingress))
}

/// The packet goes on.
const FORWARD: u64 = 0;
/// Its bytes are elsewhere now: what is left of it goes no further.
const HELD: u64 = 1;

/// A function of its own in the kernel too: the frames of its callers have no room.
#[inline(never)]
fn arrange<T: Fragments>(skb: *mut __sk_buff, ip_at: u32) -> u64 {
    let ctx = TcContext::new(skb);
    let frame = &Frame::new(&ctx);
    let (Some(ip_at), Some(config)) = (header_at(ip_at), HEALTH_CONFIG.get(0)) else {
        return FORWARD;
    };
    if config.flags & EARLY_FRAGMENTS == 0 {
        return FORWARD;
    }
    let Some((draft, is_first)) = draft::<T>(frame, ip_at) else {
        return FORWARD;
    };
    let now = coarse_now_secs();
    let expires = now + config.timeouts.fragment;
    // SAFETY: a value of that map. Fragments of one packet come by one queue of a device; where they do not, one may be lost.
    let known = HEALTH_EARLY
        .get_ptr_mut(&draft.key.packet)
        .map(|known| unsafe { &mut *known })
        .filter(|known| known.expires > now);
    if is_first {
        return first(frame, draft, known, expires);
    }
    let number = match &known {
        Some(known) if known.state == PASSED => return FORWARD,
        Some(known) if known.state == QUEUED => return queue_behind(frame, known),
        Some(known) => known.held,
        None => 0,
    };
    if now < HOLDS_FROM.load()
        || number >= HELD_OF_PACKET
        || !has_share(&draft.key.packet.source, now)
        || !keep(frame, draft, number)
    {
        return FORWARD;
    }
    match known {
        Some(known) => known.held = number + 1,
        None => note(draft, WAITING, expires),
    }
    HELD
}

/// The draft with the key of a fragment's packet, and whether this is the first one; `None` for one that waits for nobody.
#[inline(always)]
fn draft<T: Fragments>(frame: &Frame, ip_at: usize) -> Option<(&'static mut EarlyDraft, bool)> {
    let (fragment, protocol) = T::fragment_at(frame, ip_at)?;
    let (source, destination) = T::addresses(frame, ip_at)?;
    if !fragment.first && fragment::is_known::<T>(source, destination, fragment.id_be, protocol) {
        return None;
    }
    // SAFETY: a value of that map, of this CPU alone: programs on one CPU do not interrupt each other here.
    let draft = unsafe { &mut *HEALTH_EARLY_DRAFT.get_ptr_mut(0)? };
    draft.key = FrameKey {
        packet: PacketKey {
            source: source.to_addr(),
            destination: destination.to_addr(),
            id_be: fragment.id_be,
            protocol: protocol.into(),
        },
        number: 0,
    };
    Some((draft, fragment.first))
}

/// The first fragment of a packet: goes on, or into the queue with those that waited for it behind.
#[inline(always)]
fn first(
    frame: &Frame,
    draft: &mut EarlyDraft,
    known: Option<&mut EarlyPacket>,
    expires: u32,
) -> u64 {
    let Some(known) = known else {
        note(draft, PASSED, expires);
        return FORWARD;
    };
    let count = known.held;
    known.expires = expires;
    // The kernel may have no room in the queue: the next one that comes tries again.
    if count == 0 || !send(frame, frame.ifindex()) {
        known.state = PASSED;
        return FORWARD;
    }
    known.held = 0;
    known.released_ns = coarse_now_ns();
    known.state = QUEUED;
    release(frame, draft, count);
    HELD
}

/// A fragment that comes while the first one of its packet is in the queue.
#[inline(always)]
fn queue_behind(frame: &Frame, known: &EarlyPacket) -> u64 {
    // The other one may be lost: nothing goes round for ever.
    let is_queued = coarse_now_ns().wrapping_sub(known.released_ns) < QUEUED_NS;
    if is_queued && send(frame, frame.ifindex()) {
        HELD
    } else {
        FORWARD
    }
}

/// Notes a packet of which nothing was known.
#[inline(always)]
fn note(draft: &EarlyDraft, state: u32, expires: u32) {
    let packet = EarlyPacket {
        released_ns: 0,
        expires,
        held: (state == WAITING).into(),
        state,
        pad: 0,
    };
    // Without room, later fragments are held in vain.
    let _ = HEALTH_EARLY.insert(&draft.key.packet, packet, u64::from(BPF_ANY));
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
fn keep(frame: &Frame, draft: &mut EarlyDraft, number: u32) -> bool {
    let Some(length) = within(frame.length(), 1, FRAME_MAX) else {
        return false;
    };
    draft.key.number = number;
    draft.frame.length = length;
    draft.frame.ifindex = frame.ifindex();
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
            .insert(&draft.key, &draft.frame, u64::from(BPF_ANY))
            .is_ok()
}

/// Sends what waited to the devices by which it came. Each is a copy of the packet at hand, whose bytes are then those of the
/// next.
#[inline(always)]
fn release(frame: &Frame, draft: &mut EarlyDraft, count: u32) {
    for number in 0..HELD_OF_PACKET {
        if number >= count {
            break;
        }
        draft.key.number = number;
        // Evicted ones are lost, as any packet may be.
        if let Some(held) = HEALTH_EARLY_FRAMES.get_ptr(&draft.key) {
            // SAFETY: a value of that map, which nobody changes before it is removed.
            let held = unsafe { &*held };
            if become_copy(frame, held) {
                send(frame, held.ifindex);
            }
            let _ = HEALTH_EARLY_FRAMES.remove(&draft.key);
        }
    }
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

/// Puts a copy of the packet into the queue of this processor, to come by the device.
#[inline(always)]
fn send(frame: &Frame, ifindex: u32) -> bool {
    // SAFETY: a valid context.
    unsafe { bpf_clone_redirect(frame.skb(), ifindex, u64::from(BPF_F_INGRESS)) == 0 }
}
