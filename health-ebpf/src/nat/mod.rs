//! Masquerading: packets that leave on an uplink get this node's address as their source, and replies are passed back
//! to the original senders.
//!
//! `to_netdev` and `from_netdev` pass packets to the programs `masquerade` and `unmasquerade`, which have their own
//! stack. The work there is split into steps that are separate functions in the kernel too: the verifier checks each
//! one once, not once per path that leads there.

mod arriving;
mod entry;
mod error;
mod leaving;
mod port;
mod step;

use aya_ebpf::Global;
use health_common::calls::{CALL_MASQUERADE, CALL_UNMASQUERADE};
use health_common::ct::{Tuple4, Tuple6};
use health_common::masquerade::Masquerade;
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};

use crate::bounds::forgotten;
use crate::frame::{Frame, MARK_SERVED};
use crate::ip_version::Version;
use crate::maps::{HEALTH_CALLS, HEALTH_MASQUERADE};
use crate::metrics::{Verdict, ignore, refuse_for};
use crate::service;
use arriving::arriving;
pub(crate) use entry::{forget, translation, whole};
use leaving::leaving;
use step::StepResult;

/// Reasons for drops here.
const DROPS: [Reason; 5] = [
    Reason::NatNoMapping,
    Reason::NatUnsupported,
    Reason::FragmentUnknown,
    Reason::WriteFailed,
    Reason::FlowsHeld,
];

/// Tail-calls `masquerade` for a packet that leaves on an uplink, if anything of its IP version is masqueraded.
#[inline(always)]
pub fn leave(frame: &Frame, ethertype: u16) -> Verdict {
    if is_on(ethertype) {
        // SAFETY: a tail call runs no drops, and no value of these programs implements `Drop`.
        unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_MASQUERADE) };
    }
    ignore()
}

/// Tail-calls `unmasquerade` for a packet that came in on an uplink, if it may belong to a masqueraded flow; else
/// passes it to services.
#[inline(always)]
pub fn arrive(frame: &Frame, ethertype: u16) -> Verdict {
    if is_on(ethertype) {
        // SAFETY: a tail call runs no drops, and no value of these programs implements `Drop`.
        unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_UNMASQUERADE) };
    }
    service::arrive(frame)
}

/// Whether the agent that loads the programs may ever masquerade. The verifier treats it as a constant.
#[unsafe(no_mangle)]
static HAS_MASQUERADE: Global<u8> = Global::new(1);

#[inline(always)]
fn is_on(ethertype: u16) -> bool {
    if HAS_MASQUERADE.load() == 0 {
        return false;
    }
    match (HEALTH_MASQUERADE.get(0), ethertype) {
        (Some(config), ETHERTYPE_IPV4) => config.v4.is_on(),
        (Some(config), ETHERTYPE_IPV6) => config.v6.is_on(),
        _ => false,
    }
}

/// The program `masquerade`: handles a packet that leaves on an uplink.
#[inline(always)]
pub fn masquerade(frame: &Frame) -> Verdict {
    let result = match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => leaving::<Tuple4>(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => leaving::<Tuple6>(frame, ip_at),
        _ => StepResult::PASSED,
    };
    if frame.was_marked(MARK_SERVED) {
        frame.set_mark(0);
    }
    dropped(frame, result, Direction::Egress).unwrap_or_else(ignore)
}

/// The program `unmasquerade`: handles a packet that came in on an uplink.
#[inline(always)]
pub fn unmasquerade(frame: &Frame) -> Verdict {
    let result = match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => arriving::<Tuple4>(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => arriving::<Tuple6>(frame, ip_at),
        _ => StepResult::PASSED,
    };
    match dropped(frame, result, Direction::Ingress) {
        Some(verdict) => verdict,
        None => service::arrive(frame),
    }
}

#[inline(always)]
fn dropped(frame: &Frame, result: StepResult, direction: Direction) -> Option<Verdict> {
    refuse_for(frame, result.0, DROPS, direction)
}

/// The masquerading settings of an IP version.
#[inline(always)]
pub(crate) fn settings<T: Version>() -> Option<&'static Masquerade<T::Address>> {
    // Otherwise LLVM would add the field's offset before the null check, which older verifiers reject.
    Some(T::masquerade(forgotten(HEALTH_MASQUERADE.get(0)?)))
}
