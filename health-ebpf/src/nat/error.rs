//! ICMP errors about packets of translated flows.

use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::metrics::Reason;
use health_common::nat::{End, NAT_HOST_LOCAL};

use super::entry::translation;
use super::leaving::unmasqueraded;
use super::settings;
use super::step::{Passage, Sender, StepResult};
use crate::conntrack::is_known;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::packet::Inner;
use crate::rewrite::{self, Ends};

/// Handles an outgoing ICMP error about an incoming packet of a translated flow.
#[inline(always)]
pub(super) fn leaving_error<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let (Some(ip_at), Some(settings)) = (passage.ip_at(), settings::<T>()) else {
        return StepResult::PASSED;
    };
    let Some((source, destination)) = T::addresses(frame, ip_at) else {
        return StepResult::PASSED;
    };
    let sender = passage.sender;
    let Some(mut inner) = T::read_inner(frame, ip_at, passage.content_at, TUPLE_OUT) else {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    };
    // It must go to the sender of that packet. If it comes from an endpoint, to which policy applies, it must be
    // about a packet to that endpoint.
    let is_between = inner.reply.destination().0 == destination
        && (sender != Sender::Endpoint || inner.reply.source().0 == source);
    if !is_between {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    }
    let Some(entry) = translation(&inner.reply) else {
        // It is about a packet whose sender knows the untranslated destination.
        if is_known(T::flows(), &mut inner.reply) && inner.reply.direction() == TUPLE_IN {
            return StepResult::PASSED;
        }
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    };
    if T::flags(&entry) & NAT_HOST_LOCAL != 0 {
        return StepResult::PASSED;
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
#[inline(always)]
pub(super) fn arriving_error<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let (Some(ip_at), Some(settings)) = (passage.ip_at(), settings::<T>()) else {
        return StepResult::PASSED;
    };
    let Some(inner) = T::read_inner(frame, ip_at, passage.content_at, TUPLE_IN) else {
        return StepResult::PASSED;
    };
    let Some(entry) = translation(&inner.reply) else {
        return StepResult::PASSED;
    };
    if T::flags(&entry) & NAT_HOST_LOCAL != 0 {
        return StepResult::PASSED;
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
) -> StepResult {
    let error_at = passage.content_at;
    if rewrite::inner(frame, error_at, inner, inside).is_none() {
        return StepResult::dropped(Reason::WriteFailed);
    }
    StepResult::written(rewrite::packet(
        frame,
        passage.ip_at,
        Some(error_at),
        T::ICMP,
        around,
    ))
}
