//! Packets that come in on an uplink.

use aya_ebpf::bindings::BPF_NOEXIST;
use health_common::ct::TUPLE_IN;
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::nat::End;
use health_common::packet::Kind;

use super::entry::{mark_masqueraded, translation};
use super::error::arriving_error;
use super::passage::{Content, Passage};
use super::settings::settings;
use crate::clock::coarse_now_secs;
use crate::conntrack::{PacketFlags, Traffic, enter};
use crate::fragment::{Resolved, find, keep};
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::ipcache::is_endpoint;
use crate::maps::HEALTH_CONFIG;
use crate::packet::ParsedPacket;
use crate::rewrite::Ends;
use crate::subprogram::subprogram;

/// Handles a packet that came in on an uplink.
#[inline(always)]
pub(super) fn arriving<T: Version>(frame: &Frame, ip_at: usize) -> Result<(), Reason> {
    let Some(settings) = settings::<T>() else {
        return Ok(());
    };
    let mut passage = Passage::<T>::at(ip_at);
    match T::addresses(frame, ip_at) {
        Some((_, destination)) if destination == settings.node_be => {}
        // Flows of endpoints are entered only once policy has allowed them.
        Some((_, destination))
            if settings.is_behind(&destination) && !is_endpoint(destination.to_addr()) =>
        {
            note_opened(frame, &mut passage);
            return Ok(());
        }
        _ => return Ok(()),
    }
    match read_arriving(frame, &mut passage) {
        Content::Passed => Ok(()),
        Content::Error => arriving_error(frame, &mut passage),
        Content::Flow => {
            if find_reply(frame, &mut passage) {
                rewrite_destination(frame, &mut passage)
            } else {
                Ok(())
            }
        }
    }
}

/// Reads a packet to this node's address.
#[subprogram(nat4_read_arriving, nat6_read_arriving)]
fn read_arriving<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> Content {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return Content::Passed;
    };
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_IN)
    else {
        return Content::Passed;
    };
    passage.content_at = content_at;
    match Resolved::of(&mut packet) {
        Resolved::Flow => {}
        Resolved::Error => return Content::Error,
        Resolved::Other | Resolved::UnknownFragment => return Content::Passed,
    }
    keep(&packet, &config.timeouts);
    passage.take_in(&packet);
    let (protocol, port_be) = (passage.tuple.protocol(), passage.tuple.destination().1);
    if settings.is_shared(protocol, port_be) {
        Content::Flow
    } else {
        Content::Passed
    }
}

/// Finds the translation for a packet to this node's address. Returns whether the packet must be rewritten.
#[subprogram(nat4_find_reply, nat6_find_reply)]
fn find_reply<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> bool {
    let (Some(ip_at), Some(config)) = (passage.ip_at(), HEALTH_CONFIG.get(0)) else {
        return false;
    };
    // Linux 6.1 only accepts map keys on the stack.
    let key = passage.tuple;
    let Some(entry) = translation(&key) else {
        return false;
    };
    passage.entry = entry;
    let mut flow = key.flow(&entry);
    if let Some(tracked) = T::flows().get_ptr_mut(&flow) {
        // An expired flow receives nothing more, even before it is collected.
        // SAFETY: a value of that map.
        if unsafe { (*tracked).has_expired(coarse_now_secs()) } {
            return false;
        }
        // The flow's entry may have been recreated while its translation still existed.
        // SAFETY: as above.
        unsafe { mark_masqueraded::<T>(tracked, &entry) };
    }
    // Look up both entries, so that an LRU map does not evict one before the other. Recreate an evicted one.
    if T::translations().get_ptr(&flow).is_none() {
        let out = T::translation(key.destination(), T::flags(&entry), T::created_ns(&entry));
        // If this fails, the next outgoing packet tries again.
        let _ = T::translations().insert(&flow, &out, u64::from(BPF_NOEXIST));
    }
    if passage.needs_ct() && !is_endpoint(flow.source().0.to_addr()) {
        flow = flow.reply();
        let traffic = received(frame, ip_at);
        // As for leaving packets, a segment that does not belong to its connection is translated anyway.
        let _ = enter(
            T::flows(),
            &mut flow,
            passage.packet_flags(),
            traffic,
            &config.timeouts,
        );
    }
    !passage.is_host_local()
}

#[subprogram(nat4_rewrite_destination, nat6_rewrite_destination)]
fn rewrite_destination<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> Result<(), Reason> {
    let ends = Ends::<T> {
        end: End::Destination,
        old: passage.tuple.destination(),
        new: T::translated(&passage.entry),
    };
    passage.rewrite(frame, &ends)
}

/// Records a packet to a host behind this gateway, so that the host's answers can be distinguished from flows that it
/// opens.
#[subprogram(nat4_note_opened, nat6_note_opened)]
fn note_opened<T: Version>(frame: &Frame, passage: &mut Passage<T>) {
    let (Some(ip_at), Some(config)) = (passage.ip_at(), HEALTH_CONFIG.get(0)) else {
        return;
    };
    let Some(ParsedPacket { mut packet, .. }) = T::read(frame, ip_at, TUPLE_IN) else {
        return;
    };
    if !matches!(packet.kind, Kind::Flow | Kind::Fragment(_)) {
        return;
    }
    // Both calls come before the branch, so that the verifier follows fewer paths.
    let is_known = find(&mut packet);
    keep(&packet, &config.timeouts);
    if is_known {
        let flags = PacketFlags::of(&packet);
        let traffic = received(frame, ip_at);
        // It does not matter whether this succeeds.
        let _ = enter(
            T::flows(),
            &mut packet.tuple,
            flags,
            traffic,
            &config.timeouts,
        );
    }
}

#[inline(always)]
fn received(frame: &Frame, ip_at: usize) -> Traffic {
    Traffic {
        rx_bytes: frame.length() - ip_at as u32,
        ifindex: frame.ifindex(),
        ..Traffic::default()
    }
}
