//! Packets that come in on an uplink.

use aya_ebpf::bindings::BPF_NOEXIST;
use health_common::ct::TUPLE_IN;
use health_common::masquerade::Address;
use health_common::nat::End;
use health_common::packet::Kind;

use super::entry::{mark_masqueraded, translation};
use super::settings;
use super::step::{Passage, StepResult, Steps};
use crate::clock::coarse_now_secs;
use crate::conntrack::{PacketFlags, Traffic, enter};
use crate::fragment::resolve;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::maps::{HEALTH_CONFIG, HEALTH_ENDPOINTS};
use crate::packet::ParsedPacket;
use crate::rewrite::Ends;

#[inline(always)]
pub(super) fn arriving<T: Steps>(frame: &Frame, ip_at: usize) -> StepResult {
    let Some(settings) = settings::<T>() else {
        return StepResult::PASSED;
    };
    let skb = frame.skb();
    let mut passage = Passage::<T>::at(ip_at);
    match T::addresses(frame, ip_at) {
        Some((_, destination)) if destination == settings.node_be => {}
        Some((_, destination))
            if settings.is_behind(&destination) && !is_endpoint(&destination) =>
        {
            return T::note_opened(skb, &mut passage);
        }
        _ => return StepResult::PASSED,
    }
    match T::read_arriving(skb, &mut passage) {
        StepResult::FOUND => {}
        StepResult::IS_ERROR => return T::arriving_error(skb, &mut passage),
        result => return result,
    }
    match T::find_reply(skb, &mut passage) {
        StepResult::FOUND => T::rewrite_destination(skb, &mut passage),
        result => result,
    }
}

/// Whether this is the address of an endpoint, whose flows are entered once its policy has allowed them.
#[inline(always)]
fn is_endpoint(address: &impl Address) -> bool {
    HEALTH_ENDPOINTS.get_ptr(address.to_addr()).is_some()
}

/// Reads a packet to this node's address.
#[inline(always)]
pub(super) fn read_arriving<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return StepResult::PASSED;
    };
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_IN)
    else {
        return StepResult::PASSED;
    };
    passage.content_at = content_at;
    match packet.kind {
        Kind::Flow | Kind::Fragment(_) => {}
        Kind::IcmpError => return StepResult::IS_ERROR,
        Kind::NoFlow => return StepResult::PASSED,
    }
    if !resolve(&mut packet, &config.timeouts) {
        return StepResult::PASSED;
    }
    passage.take_in(&packet);
    if settings.is_shared(packet.tuple.protocol(), packet.tuple.destination().1) {
        StepResult::FOUND
    } else {
        StepResult::PASSED
    }
}

/// Finds the translation for a packet to this node's address.
#[inline(always)]
pub(super) fn find_reply<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let (Some(ip_at), Some(config)) = (passage.ip_at(), HEALTH_CONFIG.get(0)) else {
        return StepResult::PASSED;
    };
    // As in `find`.
    let key = passage.tuple;
    let Some(entry) = translation(&key) else {
        return StepResult::PASSED;
    };
    passage.entry = entry;
    let mut flow = key.flow(&entry);
    if let Some(tracked) = T::flows().get_ptr_mut(&flow) {
        // A flow that has expired and only waits to be collected receives nothing any more.
        // SAFETY: a value of that map.
        if unsafe { (*tracked).has_expired(coarse_now_secs()) } {
            return StepResult::PASSED;
        }
        // It may have been recreated while its translation still existed.
        // SAFETY: as above.
        unsafe { mark_masqueraded::<T>(tracked, &entry) };
    }
    // Both entries are looked up, so that an LRU map evicts neither before the other. An evicted one is recreated.
    if T::translations().get_ptr(&flow).is_none() {
        let out = T::translation(key.destination(), T::flags(&entry), T::created_ns(&entry));
        // If this fails, the next packet out tries again.
        let _ = T::translations().insert(&flow, &out, u64::from(BPF_NOEXIST));
    }
    if passage.needs_ct() && !is_endpoint(&flow.source().0) {
        flow = flow.reply();
        let traffic = received(frame, ip_at);
        // As for leaving packets.
        let _ = enter(
            T::flows(),
            &mut flow,
            passage.packet_flags(),
            traffic,
            &config.timeouts,
        );
    }
    if passage.is_host_local() {
        StepResult::PASSED
    } else {
        StepResult::FOUND
    }
}

#[inline(always)]
pub(super) fn rewrite_destination<T: Version>(
    frame: &Frame,
    passage: &mut Passage<T>,
) -> StepResult {
    let ends = Ends::<T> {
        end: End::Destination,
        old: passage.tuple.destination(),
        new: T::translated(&passage.entry),
    };
    passage.rewrite(frame, &ends)
}

/// Records a packet to a host behind this gateway, so that the host's answers can be told from flows that it opens.
#[inline(always)]
pub(super) fn note_opened<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let (Some(ip_at), Some(config)) = (passage.ip_at(), HEALTH_CONFIG.get(0)) else {
        return StepResult::PASSED;
    };
    let Some(ParsedPacket { mut packet, .. }) = T::read(frame, ip_at, TUPLE_IN) else {
        return StepResult::PASSED;
    };
    if !matches!(packet.kind, Kind::Flow | Kind::Fragment(_)) {
        return StepResult::PASSED;
    }
    if resolve(&mut packet, &config.timeouts) {
        let flags = PacketFlags::of(&packet);
        let traffic = received(frame, ip_at);
        // It does not matter whether it was recorded.
        let _ = enter(
            T::flows(),
            &mut packet.tuple,
            flags,
            traffic,
            &config.timeouts,
        );
    }
    StepResult::PASSED
}

#[inline(always)]
fn received(frame: &Frame, ip_at: usize) -> Traffic {
    Traffic {
        rx_bytes: frame.length() - ip_at as u32,
        ifindex: frame.ifindex(),
        ..Traffic::default()
    }
}
