//! `xdp_netdev`: forwards packets between outside clients and backends on other nodes before they reach the host's
//! stack.
//!
//! It handles packets of flows that `from_netdev` has entered, and makes no decisions about flows. Packets that open,
//! change or end a flow, that are not plain, or that have no known way go to the stack unchanged, where the tc
//! programs do the same work.

mod conntrack;
mod flow;
mod frame;
mod known;
mod look_up;
mod rewrite;
mod transport;

use aya_ebpf::bindings::xdp_action::{XDP_ABORTED, XDP_PASS, XDP_REDIRECT, XDP_TX};
use aya_ebpf::helpers::bpf_redirect;
use health_common::ct::{Tuple4, Tuple6};
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use network_types::eth::EthHdr;

use crate::metrics::count_bytes;
pub use frame::XdpFrame;
pub(crate) use look_up::Draft;
use look_up::{StepResult, Steps};

/// The fate of a packet. Only the functions of this module create it.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct XdpVerdict(u32);

impl XdpVerdict {
    /// Pass it to the host's stack.
    const PASSED: Self = Self(XDP_PASS);
    /// Not known yet.
    const LOOK_UP: Self = Self(XDP_ABORTED);

    /// The verdict as the return value of a program.
    #[inline(always)]
    pub const fn code(self) -> u32 {
        self.0
    }
}

/// Handles a packet that came in on an uplink.
#[inline(always)]
pub fn xdp_netdev(frame: &XdpFrame) -> XdpVerdict {
    let Some(ethernet) = frame.at::<EthHdr>(0) else {
        return XdpVerdict::PASSED;
    };
    let done = match u16::from_be(ethernet.ether_type) {
        ETHERTYPE_IPV4 => send_on::<Tuple4>(frame),
        ETHERTYPE_IPV6 => send_on::<Tuple6>(frame),
        _ => None,
    };
    done.unwrap_or(XdpVerdict::PASSED)
}

/// Forwards a packet; `None`, with the packet unchanged, if it is for the stack.
#[inline(always)]
fn send_on<T: Steps>(frame: &XdpFrame) -> Option<XdpVerdict> {
    let ctx = frame.ctx().ctx;
    let verdict = T::send_known(ctx);
    if verdict != XdpVerdict::LOOK_UP {
        return Some(verdict);
    }
    let mut found = T::find_answer(ctx);
    if found == StepResult::PASSED {
        found = T::find_request(ctx);
    }
    match found {
        StepResult::FOUND if T::route(ctx) == StepResult::FOUND => Some(T::enter(ctx)),
        StepResult::ENDS => {
            let _ = T::forget(ctx);
            None
        }
        _ => None,
    }
}

/// Redirects a packet to a device, or sends it back on the one that it came in on: as in
/// [`XdpWay::to`](health_common::service::xdp::XdpWay::to).
#[inline(always)]
fn handed_over(to: u32) -> Option<XdpVerdict> {
    if to == 0 {
        return Some(XdpVerdict(XDP_TX));
    }
    // SAFETY: a helper without memory arguments.
    let code = unsafe { bpf_redirect(to, 0) };
    (code == i64::from(XDP_REDIRECT)).then_some(XdpVerdict(XDP_REDIRECT))
}

/// Counts a forwarded packet of this length.
#[inline(always)]
fn counted(length: u32, verdict: XdpVerdict) -> XdpVerdict {
    count_bytes(length, Reason::ForwardedByXdp, Direction::Ingress);
    verdict
}
