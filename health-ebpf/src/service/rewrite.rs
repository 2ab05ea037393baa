//! Rewriting of packets whose backend was found.

use health_common::metrics::Reason;
use health_common::nat::End;

use super::flow::gateway;
use super::request::Request;
use crate::frame::Frame;
use crate::hook::Hook;
use crate::ip_version::Version;
use crate::rewrite::{self, Ends};
use crate::subprogram::{Stage, subprogram};

/// Where a packet goes after rewriting.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rewritten {
    /// It was not rewritten.
    Passed,
    /// To its destination.
    On,
    /// Back to its sender.
    Back,
}

// SAFETY: `repr(u32)`, three variants without fields.
unsafe impl Stage for Rewritten {}

/// Rewrites a packet whose backend was found.
///
/// An endpoint that is its own backend gets the packet from the gateway, so that it does not see itself as the
/// sender. Its answers to the gateway are found as a flow too, and go back the same way.
#[subprogram(service4_rewrite, service6_rewrite, uplink4_rewrite, uplink6_rewrite)]
pub(super) fn rewrite<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<Rewritten, Reason> {
    let flow = request.tuple;
    let (source, destination) = (flow.source(), flow.destination());
    let backend = request.backend();
    let moved_port_be = request.moved().source().1;
    if !P::IS_UPLINK {
        let gateway = gateway::<T>();
        if gateway.is_some_and(|gateway| gateway == destination.0) {
            let client_port_be = match request.moved_port_be {
                0 => destination.1,
                own_port_be => own_port_be,
            };
            let client = (source.0, client_port_be);
            return both::<T, P>(frame, request, (source, backend), (destination, client));
        }
        if backend.0 == source.0 {
            let Some(gateway) = gateway else {
                return Err(Reason::ServiceNoBackend);
            };
            let client = (gateway, moved_port_be);
            return both::<T, P>(frame, request, (source, client), (destination, backend));
        }
    }
    let (content_at, protocol) = (request.content_at(), flow.protocol());
    let ports = (source.1, moved_port_be);
    let is_written = end::<T, P>(frame, request, End::Destination, destination, backend).is_some()
        && (ports.0 == ports.1
            || rewrite::port(frame, content_at, protocol, End::Source, ports).is_some());
    if is_written {
        Ok(Rewritten::On)
    } else {
        Err(Reason::WriteFailed)
    }
}

/// An end before and after rewriting.
type Change<T> = (
    (<T as health_common::tuple::Tuple>::Address, u16),
    (<T as health_common::tuple::Tuple>::Address, u16),
);

#[inline(always)]
fn both<T: Version, P: Hook>(
    frame: &Frame,
    request: &Request<T>,
    source: Change<T>,
    destination: Change<T>,
) -> Result<Rewritten, Reason> {
    let is_written = end::<T, P>(frame, request, End::Source, source.0, source.1).is_some()
        && end::<T, P>(
            frame,
            request,
            End::Destination,
            destination.0,
            destination.1,
        )
        .is_some();
    if is_written {
        Ok(Rewritten::Back)
    } else {
        Err(Reason::WriteFailed)
    }
}

#[inline(always)]
fn end<T: Version, P: Hook>(
    frame: &Frame,
    request: &Request<T>,
    end: End,
    old: (T::Address, u16),
    new: (T::Address, u16),
) -> Option<()> {
    let ends = Ends::<T> { end, old, new };
    let protocol = request.tuple.protocol();
    let ip_at = request.ip_at::<P>()? as u32;
    rewrite::packet(frame, ip_at, request.content_at(), protocol, &ends)
}
