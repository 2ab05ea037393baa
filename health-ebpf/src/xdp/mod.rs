//! `xdp_netdev`: forwards packets between outside clients and backends on other nodes before they reach the host's
//! stack.
//!
//! It handles packets of flows that `from_netdev` has entered, and makes no decisions about flows. Packets that open,
//! change or end a flow, that are not plain, or that have no known way go to the stack unchanged, where the tc
//! programs do the same work.

mod conntrack;
mod draft;
mod flow;
mod frame;
mod known;
mod look_up;
mod rewrite;
mod transport;
mod verdict;

use health_common::ct::{Tuple4, Tuple6};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use network_types::eth::EthHdr;

pub(crate) use draft::Draft;
use draft::Drafted;
pub use frame::XdpFrame;
use known::{Known, forget, send_known};
use look_up::{Found, enter, find_answer, find_request, route};
use verdict::XdpVerdict;

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
fn send_on<T: Drafted>(frame: &XdpFrame) -> Option<XdpVerdict> {
    if let Known::Done(verdict) = send_known::<T>(frame) {
        return Some(verdict);
    }
    let found = match find_answer::<T>(frame) {
        Found::Passed => find_request::<T>(frame),
        found => found,
    };
    match found {
        Found::Flow if route::<T>(frame) => Some(enter::<T>(frame)),
        Found::Ends => {
            forget::<T>(frame);
            None
        }
        Found::Flow | Found::Passed => None,
    }
}
