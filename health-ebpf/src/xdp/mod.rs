//! `xdp_netdev`: sends packets between clients outside and backends on other nodes on before the host's stack has them.
//!
//! It takes packets of flows that `from_netdev` has entered, and decides nothing about flows: what opens, changes or
//! ends one, what is not a plain packet, and what has no known way goes on to the stack untouched, where the programs of
//! tc do the same with it.

mod flow;
mod frame;
mod rewrite;

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::BPF_FIB_LKUP_RET_SUCCESS;
use aya_ebpf::bindings::xdp_action::{XDP_PASS, XDP_REDIRECT, XDP_TX};
use aya_ebpf::helpers::bpf_redirect;
use health_common::config::SERVICES;
use health_common::ct::{Tuple4, Tuple6};
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::service::xdp::{XDP_RETURNS, XDP_SENDS};
use network_types::eth::EthHdr;

use crate::conntrack::enter_under_way;
use crate::fib::FibLookup;
use crate::frame::IP_AT;
use crate::maps::{HEALTH_CONFIG, HEALTH_XDP_DEVICES};
use crate::metrics::count_bytes;
use flow::Passage;
use frame::Plain;
pub use frame::XdpFrame;

/// What becomes of a packet. Made by the functions of this module alone.
#[must_use]
#[derive(Clone, Copy)]
pub struct XdpVerdict(u32);

impl XdpVerdict {
    /// On to the host's stack.
    const PASS: Self = Self(XDP_PASS);

    /// The verdict as the return value of a program.
    #[inline(always)]
    pub const fn code(self) -> u32 {
        self.0
    }
}

/// A packet that came by an uplink.
#[inline(always)]
pub fn xdp_netdev(frame: &XdpFrame) -> XdpVerdict {
    let Some(ethernet) = frame.at::<EthHdr>(0) else {
        return XdpVerdict::PASS;
    };
    let done = match u16::from_be(ethernet.ether_type) {
        ETHERTYPE_IPV4 => send_on::<Tuple4>(frame),
        ETHERTYPE_IPV6 => send_on::<Tuple6>(frame),
        _ => None,
    };
    done.unwrap_or(XdpVerdict::PASS)
}

/// Sends a packet on; `None`, with the packet as it was, if it is for the stack.
#[inline(always)]
fn send_on<T: Plain>(frame: &XdpFrame) -> Option<XdpVerdict>
where
    T::Address: Default,
{
    let config = HEALTH_CONFIG.get(0)?;
    if config.flags & SERVICES == 0 {
        return None;
    }
    let mut passage: Passage<T> = flow::find(frame, config)?;
    let ip = frame.at::<T::Header>(IP_AT)?;
    let ends = (passage.source.0, passage.destination.0);
    let mut hop = FibLookup::of::<T>(frame.ifindex(), ends.0, ends.1);
    hop.protocol = passage.flow.protocol();
    hop.total_len = T::total_len(ip) as u16;
    hop.flow_info = T::class(ip);
    // SAFETY: the context of this program.
    if unsafe { hop.ask(frame.ctx().as_ptr()) } != BPF_FIB_LKUP_RET_SUCCESS.into() {
        return None;
    }
    let verdict = way(frame, hop.ifindex)?;
    let traffic = passage.traffic(frame.length() - IP_AT as u32);
    let timeouts = &config.timeouts;
    if !enter_under_way(
        T::flows(),
        &mut passage.flow,
        passage.tcp_flags,
        traffic,
        timeouts,
    ) {
        return None;
    }
    let [own, next] = hop.macs;
    rewrite::packet(frame, &passage, [next, own])?;
    count_bytes(frame.length(), Reason::ForwardedByXdp, Direction::Ingress);
    Some(verdict)
}

/// How a frame that is for this host leaves by a device.
#[inline(always)]
fn way(frame: &XdpFrame, by: u32) -> Option<XdpVerdict> {
    let ifindex = frame.ifindex();
    // SAFETY: entries are replaced as a whole.
    let device = unsafe { HEALTH_XDP_DEVICES.get(ifindex) }?;
    if frame.at::<EthHdr>(0)?.dst_addr != device.mac {
        return None;
    }
    if by == ifindex && device.flags & XDP_RETURNS != 0 {
        return Some(XdpVerdict(XDP_TX));
    }
    // SAFETY: as above.
    let device = unsafe { HEALTH_XDP_DEVICES.get(by) }?;
    if device.flags & XDP_SENDS == 0 {
        return None;
    }
    // SAFETY: a helper without memory arguments.
    let code = unsafe { bpf_redirect(by, 0) };
    (code == i64::from(XDP_REDIRECT)).then_some(XdpVerdict(XDP_REDIRECT))
}
