//! The times that this host writes into its peers' probes: when they arrived, and how long they stayed.

use health_common::checksum;
use health_common::config::DatapathConfig;
use health_common::probe::{ASK_ONE_WAY, ProbeMessage, Times};

use crate::clock::{now_ns, utc_now_ns};
use crate::frame::Frame;

/// Writes the current time as the arrival time into a peer's request, whose message starts at `offset`. `false` if it
/// is not a probe of the mesh, or cannot be written to.
#[inline(always)]
pub fn arrive(
    frame: &Frame,
    offset: usize,
    message: &ProbeMessage,
    config: &DatapathConfig,
) -> bool {
    let now_ns = now_ns();
    let ProbeMessage { echo, payload } = message;
    if !payload.is_genuine(config.probe_key, echo.id_be, echo.sequence_be) {
        return false;
    }
    let utc_ns = if payload.flags & ASK_ONE_WAY == 0 {
        0
    } else {
        utc_now_ns(config)
    };
    write(frame, offset, message, Times::of_arrival(now_ns, utc_ns))
}

/// Replaces the arrival time in the reply to a peer's probe with the time elapsed since. `false` if it is not a reply
/// to a probe of the mesh, carries no arrival time, or cannot be written to.
#[inline(always)]
pub fn depart(
    frame: &Frame,
    offset: usize,
    message: &ProbeMessage,
    config: &DatapathConfig,
) -> bool {
    let ProbeMessage { echo, payload } = message;
    if !payload.is_genuine(config.probe_key, echo.id_be, echo.sequence_be) {
        return false;
    }
    let now_ns = now_ns();
    match Times::of_departure(payload, now_ns) {
        Some(times) => write(frame, offset, message, times),
        None => false,
    }
}

/// Writes the times into a message. The checksum is updated only by their difference (RFC 1624), so a damaged message
/// stays damaged.
#[inline(always)]
fn write(frame: &Frame, offset: usize, message: &ProbeMessage, times: Times) -> bool {
    let before = Times::from(&message.payload);
    // Writes the whole message in one call: the cost of the call does not depend on its length.
    let mut changed = *message;
    changed.echo.check = checksum::replace(message.echo.check, &before.words(), &times.words());
    changed.payload.turnround_be = times.turnround_be;
    changed.payload.arrived_be = times.arrived_be;
    frame.store(offset, &changed)
}
