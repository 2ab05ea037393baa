//! The destination of a packet: the backend of its flow, or one for a new flow, which is then entered.

use health_common::metrics::Reason;
use health_common::service::{FLOW_OF_HOST, FLOW_SHARED};

use super::connected::{avoid_socket, is_answer};
use super::direct::{Direct, settle};
use super::look_up::{Found, find, must_move, take_answers};
use super::new_flow::{Attempt, Entered, PORT_ATTEMPTS, choose, enter, take};
use super::request::Request;
use crate::frame::Frame;
use crate::hook::Hook;
use crate::ip_version::Version;

/// Where a packet goes.
pub(super) enum Destination {
    /// To its own destination, unchanged.
    Own,
    /// To a backend, which the request contains.
    Backend {
        /// Its flow has just been entered.
        is_new: bool,
    },
    /// It is an ICMP error.
    Error,
}

/// Finds the destination of a packet. Fails with [`Reason::ServiceRejected`] if the sender must be notified that there
/// is no backend.
#[inline(always)]
pub(super) fn find_destination<T: Direct, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<Destination, Reason> {
    let is_new = match find::<T, P>(frame, request) {
        Found::Passed => false,
        Found::Backend => {
            if request.has(FLOW_SHARED) {
                take_answers::<T, P>(frame, request);
            }
            return Ok(Destination::Backend { is_new: false });
        }
        Found::New => true,
        Found::NewUnlessAnswer => !is_answer::<T, P>(frame, request),
        Found::NoService => must_move::<T, P>(frame, request)?,
        Found::Error => return Ok(Destination::Error),
    };
    if is_new && open::<T, P>(frame, request)? {
        Ok(Destination::Backend { is_new })
    } else {
        Ok(Destination::Own)
    }
}

/// Opens a flow. `false`: its packet passes unchanged.
#[inline(always)]
fn open<T: Direct, P: Hook>(frame: &Frame, request: &mut Request<T>) -> Result<bool, Reason> {
    let mut attempt = Attempt::Again;
    for _ in 0..PORT_ATTEMPTS {
        if !choose::<T, P>(frame, request)? {
            return Ok(false);
        }
        attempt = take::<T, P>(frame, request)?;
        if P::IS_UPLINK && attempt == Attempt::Done && request.has(FLOW_OF_HOST) {
            attempt = avoid_socket(frame, request)?;
        }
        if attempt == Attempt::Done {
            break;
        }
    }
    if attempt == Attempt::Again {
        return Err(Reason::ServiceNoBackend);
    }
    if P::IS_UPLINK {
        settle(frame, request);
    }
    enter_with_room(request, |request| Ok(enter::<T, P>(frame, request)))
}

/// Enters a flow with `step`, and retries once if the maps can make space. `false`: its packet passes unchanged.
#[inline(always)]
pub(super) fn enter_with_room<T: Version>(
    request: &mut Request<T>,
    step: impl Fn(&mut Request<T>) -> Result<Entered, Reason>,
) -> Result<bool, Reason> {
    let protocol = request.tuple.protocol();
    match T::service_flows().with_room(protocol, &Ok(Entered::NoRoom), || step(request))? {
        Entered::Passed => Ok(false),
        Entered::Done => Ok(true),
        Entered::NoRoom => Err(Reason::ServiceNoBackend),
    }
}
