//! ICMP errors about packets of translated flows.

use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::metrics::Reason;
use health_common::nat::{End, NAT_HOST_LOCAL};

use super::entry::translation;
use super::passage::Passage;
use super::sender::{Sender, unmasqueraded};
use super::settings::settings;
use crate::conntrack::is_known;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::packet::Inner;
use crate::rewrite::{self, Ends};
use crate::subprogram::subprogram;

/// Handles a leaving ICMP error about a packet that came in for a host whose flow is translated.
#[subprogram(nat4_leaving_error, nat6_leaving_error)]
pub(super) fn leaving_error<T: Version>(
    frame: &Frame,
    passage: &mut Passage<T>,
) -> Result<(), Reason> {
    let (Some(ip_at), Some(settings)) = (passage.ip_at(), settings::<T>()) else {
        return Ok(());
    };
    let Some((source, destination)) = T::addresses(frame, ip_at) else {
        return Ok(());
    };
    let sender = passage.sender;
    let Some(mut inner) = T::read_inner(frame, ip_at, passage.content_at, TUPLE_OUT) else {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    };
    // The error must go to the sender of the inner packet. If it comes from an endpoint, which is subject to policy, it
    // must be about a packet to that endpoint.
    let is_between = inner.reply.destination().0 == destination
        && (sender != Sender::Endpoint || inner.reply.source().0 == source);
    if !is_between {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    }
    let Some(entry) = translation(&inner.reply) else {
        // The error is about a packet whose sender knows the untranslated destination.
        if is_known(T::flows(), &mut inner.reply) && inner.reply.direction() == TUPLE_IN {
            return Ok(());
        }
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    };
    if T::flags(&entry) & NAT_HOST_LOCAL != 0 {
        return Ok(());
    }
    let inside = Ends::<T> {
        end: End::Destination,
        old: inner.reply.source(),
        new: T::translated(&entry),
    };
    let around = Ends::<T> {
        end: End::Source,
        old: (source, 0),
        new: (settings.node_be, 0),
    };
    rewrite_error(frame, passage, &inner, &inside, &around)
}

/// Handles an ICMP error to this node's address, about a packet that was translated.
#[subprogram(nat4_arriving_error, nat6_arriving_error)]
pub(super) fn arriving_error<T: Version>(
    frame: &Frame,
    passage: &mut Passage<T>,
) -> Result<(), Reason> {
    let (Some(ip_at), Some(settings)) = (passage.ip_at(), settings::<T>()) else {
        return Ok(());
    };
    let Some(inner) = T::read_inner(frame, ip_at, passage.content_at, TUPLE_IN) else {
        return Ok(());
    };
    let Some(entry) = translation(&inner.reply) else {
        return Ok(());
    };
    if T::flags(&entry) & NAT_HOST_LOCAL != 0 {
        return Ok(());
    }
    let to = T::translated(&entry);
    let inside = Ends::<T> {
        end: End::Source,
        old: inner.reply.destination(),
        new: to,
    };
    let around = Ends::<T> {
        end: End::Destination,
        old: (settings.node_be, 0),
        new: (to.0, 0),
    };
    rewrite_error(frame, passage, &inner, &inside, &around)
}

#[inline(always)]
fn rewrite_error<T: Version>(
    frame: &Frame,
    passage: &Passage<T>,
    inner: &Inner<T>,
    inside: &Ends<T>,
    around: &Ends<T>,
) -> Result<(), Reason> {
    let error_at = passage.content_at;
    rewrite::inner(frame, error_at, inner, inside)
        .and_then(|()| rewrite::packet(frame, passage.ip_at, Some(error_at), T::ICMP, around))
        .ok_or(Reason::WriteFailed)
}
