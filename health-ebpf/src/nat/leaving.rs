//! Packets that leave on an uplink.

use health_common::ct::TUPLE_OUT;
use health_common::identity;
use health_common::metrics::Reason;
use health_common::nat::{End, NAT_NEEDS_CT};
use health_common::tcp::{ACK, IP_PROTOCOL_TCP, SYN};

use super::entry::{released, translation, whole};
use super::error::leaving_error;
use super::passage::{Content, Passage};
use super::port::{Allocated, allocate, has_socket, mark, take, take_back};
use super::sender::{Sender, is_native, sender, unmasqueraded};
use super::settings::settings;
use crate::clock::are_flows_held;
use crate::conntrack::{Tracked, Traffic, enter, is_known};
use crate::fragment::{Resolved, keep};
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::maps::HEALTH_CONFIG;
use crate::packet::ParsedPacket;
use crate::rewrite::Ends;
use crate::subprogram::{Stage, subprogram};

/// Whether a flow has a translation.
#[repr(u32)]
#[derive(Clone, Copy)]
enum Found {
    /// No, and the packet passes unchanged.
    Passed,
    /// Yes.
    Translation,
    /// Not yet.
    New,
}

// SAFETY: `repr(u32)`, three variants without fields.
unsafe impl Stage for Found {}

/// Handles a packet that leaves on an uplink.
#[inline(always)]
pub(super) fn leaving<T: Version>(frame: &Frame, ip_at: usize) -> Result<(), Reason> {
    let mut passage = Passage::<T>::at(ip_at);
    match read_leaving(frame, &mut passage)? {
        Content::Passed => return Ok(()),
        Content::Error => return leaving_error(frame, &mut passage),
        Content::Flow => {}
    }
    if passage.sender == Sender::NodeInside && !meet(frame, &mut passage) {
        return Ok(());
    }
    let is_translated = match find(frame, &mut passage)? {
        Found::Passed => false,
        Found::Translation => true,
        Found::New => translate(frame, &mut passage)?,
    };
    if is_translated && !passage.is_host_local() {
        rewrite_source(frame, &mut passage)
    } else {
        Ok(())
    }
}

/// Translates a new flow. Returns whether it is translated; otherwise the packet passes unchanged.
#[inline(always)]
fn translate<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> Result<bool, Reason> {
    let protocol = passage.tuple.protocol();
    let allocated = T::translations().with_room(protocol, &Allocated::NoRoom, || {
        match allocate(frame, passage) {
            Allocated::InUse if take_back(frame, passage) => take(frame, passage),
            allocated => allocated,
        }
    });
    match allocated {
        Allocated::Passed => Ok(false),
        Allocated::Port => {
            mark(frame, passage);
            Ok(true)
        }
        Allocated::NoRoom if passage.sender.is_node() => Ok(false),
        Allocated::InUse | Allocated::NoRoom => Err(Reason::NatNoMapping),
    }
}

/// Reads a packet that leaves.
#[subprogram(nat4_read_leaving, nat6_read_leaving)]
fn read_leaving<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> Result<Content, Reason> {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return Ok(Content::Passed);
    };
    let Some((source, destination)) = T::addresses(frame, ip_at) else {
        return Ok(Content::Passed);
    };
    let Some((mut sender, ifindex)) = sender::<T>(frame, &source, settings) else {
        return Ok(Content::Passed);
    };
    if sender == Sender::Node && is_native::<T>(&destination, settings) {
        sender = Sender::NodeInside;
    }
    (passage.sender, passage.ifindex) = (sender, ifindex);
    let unmasqueraded = |reason| {
        unmasqueraded::<T>(sender, &destination, settings, reason).map(|()| Content::Passed)
    };
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_OUT)
    else {
        return unmasqueraded(Reason::NatUnsupported);
    };
    passage.content_at = content_at;
    match Resolved::of(&mut packet) {
        Resolved::Flow => {}
        Resolved::Error => return Ok(Content::Error),
        Resolved::Other => return unmasqueraded(Reason::NatUnsupported),
        Resolved::UnknownFragment => return unmasqueraded(Reason::FragmentUnknown),
    }
    keep(&packet, &config.timeouts);
    passage.take_in(&packet);
    let (protocol, port_be) = (passage.tuple.protocol(), passage.tuple.source().1);
    if sender.is_node() && !settings.is_shared(protocol, port_be) {
        return Ok(Content::Passed);
    }
    Ok(Content::Flow)
}

/// Finds the translation of a flow. If there is none, returns whether to create one.
#[subprogram(nat4_find, nat6_find)]
fn find<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> Result<Found, Reason> {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return Ok(Found::Passed);
    };
    let traffic = Traffic {
        tx_bytes: frame.length() - ip_at as u32,
        source_identity: if passage.sender.is_node() {
            identity::HOST
        } else {
            identity::UNKNOWN
        },
        ifindex: passage.ifindex,
        ..Traffic::default()
    };
    let (flags, timeouts) = (passage.packet_flags(), &config.timeouts);
    let sender = passage.sender;
    // Linux 6.1 only accepts map keys on the stack.
    let mut flow = passage.tuple;
    if let Some(entry) = whole(&flow) {
        passage.entry = entry;
        if T::flags(&entry) & NAT_NEEDS_CT != 0 {
            // A segment that does not belong to its connection is translated anyway.
            let _ = enter(T::flows(), &mut flow, flags, traffic, timeouts);
            flow = flow.outbound();
        }
        passage.tuple = flow;
        return Ok(Found::Translation);
    }
    if matches!(sender, Sender::Endpoint | Sender::Routed)
        && is_native::<T>(&flow.destination().0, settings)
    {
        return Ok(Found::Passed);
    }
    let tracked = if sender == Sender::Endpoint && is_known(T::flows(), &mut flow) {
        Tracked::Known
    } else {
        enter(T::flows(), &mut flow, flags, traffic, timeouts)
    };
    let is_tracked = matches!(tracked, Tracked::Known | Tracked::New);
    passage.tuple = flow;
    // An answer to a peer that already knows its source keeps that source.
    if is_tracked && flow.direction() != TUPLE_OUT {
        return Ok(Found::Passed);
    }
    // The identifier of an echo reply is the request's.
    let is_echo_reply = flow.protocol() == T::ICMP && flow.destination().1 != 0;
    if is_tracked && !is_echo_reply {
        return if are_flows_held(config) {
            Err(Reason::FlowsHeld)
        } else {
            Ok(Found::New)
        };
    }
    if sender.is_node() {
        return Ok(Found::Passed);
    }
    Err(if tracked == Tracked::Full {
        Reason::NatNoMapping
    } else {
        Reason::NatUnsupported
    })
}

/// Whether a flow of this host that is not masqueraded must be translated anyway, because it would otherwise receive
/// another flow's answers. If this host had the port before the other flow began, the other flow did not get that port:
/// see [`super::port::take`].
#[subprogram(nat4_meet, nat6_meet)]
fn meet<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> bool {
    // Map keys must be on the stack, as in `find`.
    let flow = passage.tuple;
    if translation(&flow).is_some() {
        return true;
    }
    let may_begin =
        flow.protocol() != IP_PROTOCOL_TCP || passage.tcp_flags as u8 & (SYN | ACK) == SYN;
    // Without a socket, the packet was already translated, at a port of this bridge.
    if !may_begin || !has_socket(frame) {
        return false;
    }
    let key = flow.reply();
    translation(&key)
        .is_some_and(|back| T::translated(&back) != flow.source() && !released(&key, &back))
}

#[subprogram(nat4_rewrite_source, nat6_rewrite_source)]
fn rewrite_source<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> Result<(), Reason> {
    let ends = Ends::<T> {
        end: End::Source,
        old: passage.tuple.source(),
        new: T::translated(&passage.entry),
    };
    passage.rewrite(frame, &ends)
}
