//! Early fragments: those that arrive before the first fragment of their packet, which alone identifies the flow. They
//! are held until the first fragment arrives, and then sent on after it. A host that reassembles the packet waits for
//! its first fragment in the same way.

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

/// Approximate number of fragments held for all packets together; the oldest are evicted first.
pub const HELD_FRAGMENTS: u32 = 1_024;
/// Approximate number of packets remembered because a fragment was held or their first fragment was seen.
pub const EARLY_PACKETS: u32 = 8_192;
/// Approximate number of sources whose early fragments are counted.
pub const EARLY_SOURCES: u32 = 1_024;
/// Maximum length of a held fragment, in bytes from the link header on: enough for an MTU of 1,500 bytes plus tags. On
/// jumbo frames, early fragments belong to no known flow.
const FRAME_MAX: u32 = 2_040;
/// Maximum number of fragments held per packet: 65,535 bytes in pieces of 1,280, the minimum MTU of IPv6, make 54.
const HELD_OF_PACKET: u32 = 64;
/// Maximum number of fragments held per source in [`WINDOW_SECS`].
const HELD_OF_SOURCE: u32 = 256;
/// See [`HELD_OF_SOURCE`].
const WINDOW_SECS: u32 = 4;
/// Longest time that a first fragment can spend in a CPU's queue. After that, it is considered lost.
const QUEUED_NS: u64 = 20_000_000;

/// When to start holding fragments (`CLOCK_MONOTONIC`, in seconds): some time after these programs take over, since
/// they do not know packets whose first fragment was seen by other programs. Set when the programs are loaded.
#[unsafe(no_mangle)]
static HOLDS_FROM: Global<u32> = Global::new(0);

/// Identifies a fragmented packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PacketKey {
    source: Addr,
    destination: Addr,
    id_be: u32,
    /// IP protocol for IPv4, where each protocol may number its packets separately; 0 for IPv6.
    protocol: u32,
}

/// State of a fragmented packet.
#[repr(C)]
pub struct EarlyPacket {
    /// When the first fragment was sent on, followed by the held ones: `CLOCK_MONOTONIC`.
    released_ns: u64,
    /// When this entry expires (`CLOCK_MONOTONIC`, in seconds). Identifications get reused.
    expires: u32,
    /// Number of fragments held.
    held: u32,
    /// `WAITING`, `QUEUED` or `PASSED`.
    state: u32,
    /// Explicit padding, zero.
    pad: u32,
}

/// The first fragment has not arrived yet.
const WAITING: u32 = 0;
/// The first fragment is in a queue, and will pass its device again.
const QUEUED: u32 = 1;
/// The first fragment has passed.
const PASSED: u32 = 2;

/// Key of a held fragment: its packet, and its number within the packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FrameKey {
    packet: PacketKey,
    number: u32,
}

/// The bytes of a held fragment.
#[repr(C)]
pub struct EarlyFrame {
    length: u32,
    /// The device on which the fragment came in.
    ifindex: u32,
    bytes: [u8; FRAME_MAX as usize],
}

/// Number of fragments of one source that were held since `since` (`CLOCK_MONOTONIC`, in seconds).
#[repr(C)]
pub struct EarlySource {
    since: u32,
    count: u32,
}

/// Per-CPU scratch space for data that does not fit on the stack.
#[repr(C)]
pub struct EarlyDraft {
    key: FrameKey,
    frame: EarlyFrame,
}

/// Puts fragments in order at the device on which they come in. `Some` if this fragment is held, or if it was queued
/// together with the fragments that waited for it, to pass its device again.
#[inline(always)]
pub fn put_in_order<T: Fragments>(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    // A held fragment would come back with the first fragment's tag, or without its own.
    let is_tagged = frame.has_vlan_tag() || ip_at != frame.link_header_len();
    if is_tagged || !T::may_be_fragment(frame.at(ip_at)?) {
        return None;
    }
    (arrange::<T>(frame.skb(), ip_at as u32) == HELD)
        .then(|| held(frame, Reason::FragmentHeld, Direction::Ingress))
}

/// The packet passes.
const FORWARD: u64 = 0;
/// The packet's bytes are now stored elsewhere: drop the original.
const HELD: u64 = 1;

/// A separate function in the kernel as well: its callers have no stack space left.
#[inline(never)]
fn arrange<T: Fragments>(skb: *mut __sk_buff, ip_at: u32) -> u64 {
    let frame = &Frame::new(TcContext::new(skb));
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
    // SAFETY: a value of that map. All fragments of a packet come in on the same queue of a device; if they do not, a
    // fragment may be lost.
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

/// The draft, with the key of the fragment's packet filled in, and whether this is the first fragment; `None` if the
/// fragment need not wait.
#[inline(always)]
fn draft<T: Fragments>(frame: &Frame, ip_at: usize) -> Option<(&'static mut EarlyDraft, bool)> {
    let (fragment, protocol) = T::fragment_at(frame, ip_at)?;
    let (source, destination) = T::addresses(frame, ip_at)?;
    if !fragment.first && fragment::is_known::<T>(source, destination, fragment.id_be, protocol) {
        return None;
    }
    // SAFETY: a per-CPU value of that map; programs on one CPU do not interrupt each other here.
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

/// Handles the first fragment of a packet: lets it pass, or queues it with the held fragments behind it.
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
    // Nothing waits for this fragment, or the kernel's queue is full: it passes at once.
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

/// Handles a fragment that arrives while the first one of its packet is in the queue.
#[inline(always)]
fn queue_behind(frame: &Frame, known: &EarlyPacket) -> u64 {
    // The first fragment may be lost: make sure that no fragment circulates forever.
    let is_queued = coarse_now_ns().wrapping_sub(known.released_ns) < QUEUED_NS;
    if is_queued && send(frame, frame.ifindex()) {
        HELD
    } else {
        FORWARD
    }
}

/// Records a packet that was unknown.
#[inline(always)]
fn note(draft: &EarlyDraft, state: u32, expires: u32) {
    let packet = EarlyPacket {
        released_ns: 0,
        expires,
        held: (state == WAITING).into(),
        state,
        pad: 0,
    };
    // If there is no space, later fragments are held in vain.
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
    // SAFETY: a value of that map. A count that is off by one does no harm.
    let counted = unsafe { &mut *counted };
    if now.wrapping_sub(counted.since) >= WINDOW_SECS {
        (counted.since, counted.count) = (now, 0);
    }
    counted.count += 1;
    counted.count <= HELD_OF_SOURCE
}

/// Holds a fragment by storing a copy of it.
#[inline(always)]
fn keep(frame: &Frame, draft: &mut EarlyDraft, number: u32) -> bool {
    let Some(length) = within(frame.length(), 1, FRAME_MAX) else {
        return false;
    };
    draft.key.number = number;
    draft.frame.length = length;
    draft.frame.ifindex = frame.ifindex();
    // SAFETY: `within` limits the length to the size of the buffer, which the verifier sees.
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

/// Sends the held fragments to the devices on which they came in. Each is sent as a copy of the current packet, whose
/// bytes are first overwritten with the fragment's.
#[inline(always)]
fn release(frame: &Frame, draft: &mut EarlyDraft, count: u32) {
    for number in 0..HELD_OF_PACKET {
        if number >= count {
            break;
        }
        draft.key.number = number;
        // Evicted fragments are lost, as any packet may be.
        if let Some(held) = HEALTH_EARLY_FRAMES.get_ptr(&draft.key) {
            // SAFETY: a value of that map, which does not change before it is removed.
            let held = unsafe { &*held };
            if become_copy(frame, held) {
                send(frame, held.ifindex);
            }
            let _ = HEALTH_EARLY_FRAMES.remove(&draft.key);
        }
    }
}

/// Overwrites the current packet with the bytes of a fragment.
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

/// Queues a copy of the packet on this CPU, as if received on the device.
#[inline(always)]
fn send(frame: &Frame, ifindex: u32) -> bool {
    // SAFETY: a valid context.
    unsafe { bpf_clone_redirect(frame.skb(), ifindex, u64::from(BPF_F_INGRESS)) == 0 }
}
