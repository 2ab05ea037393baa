//! Masquerading: packets that leave on an uplink get this node's address as their source, and replies are passed back
//! to the original senders.
//!
//! `to_netdev` and `from_netdev` pass packets to the programs `masquerade` and `unmasquerade`, which have their own
//! stack. Their work is split into steps, which are subprograms.

mod arriving;
mod entry;
mod error;
mod leaving;
mod passage;
mod port;
mod sender;
mod settings;

use health_common::calls::{CALL_MASQUERADE, CALL_UNMASQUERADE};
use health_common::ct::{Tuple4, Tuple6};
use health_common::metrics::Direction;
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};

use crate::frame::{Frame, MARK_SERVED};
use crate::maps::HEALTH_CALLS;
use crate::metrics::{Verdict, ignore, refuse};
use crate::service;
use arriving::arriving;
pub(crate) use entry::{forget, translation, whole};
use leaving::leaving;
use settings::is_on;
pub(crate) use settings::settings;

/// Tail-calls `masquerade` for a packet that leaves on an uplink, if anything of its IP version is masqueraded.
#[inline(always)]
pub fn leave(frame: &Frame, ethertype: u16) -> Verdict {
    if is_on(ethertype) {
        // SAFETY: a tail call skips destructors, but no value in these programs implements `Drop`.
        unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_MASQUERADE) };
    }
    ignore()
}

/// Tail-calls `unmasquerade` for a packet that came in on an uplink, if it may belong to a masqueraded flow; otherwise
/// passes the packet to services.
#[inline(always)]
pub fn arrive(frame: &Frame, ethertype: u16) -> Verdict {
    if is_on(ethertype) {
        // SAFETY: a tail call skips destructors, but no value in these programs implements `Drop`.
        unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_UNMASQUERADE) };
    }
    service::arrive(frame)
}

/// The `masquerade` program: handles a packet that leaves on an uplink.
#[inline(always)]
pub fn masquerade(frame: &Frame) -> Verdict {
    let result = match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => leaving::<Tuple4>(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => leaving::<Tuple6>(frame, ip_at),
        _ => Ok(()),
    };
    if frame.was_marked(MARK_SERVED) {
        frame.set_mark(0);
    }
    match result {
        Ok(()) => ignore(),
        Err(reason) => refuse(frame, reason, Direction::Egress),
    }
}

/// The `unmasquerade` program: handles a packet that came in on an uplink.
#[inline(always)]
pub fn unmasquerade(frame: &Frame) -> Verdict {
    let result = match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => arriving::<Tuple4>(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => arriving::<Tuple6>(frame, ip_at),
        _ => Ok(()),
    };
    match result {
        Ok(()) => service::arrive(frame),
        Err(reason) => refuse(frame, reason, Direction::Ingress),
    }
}
