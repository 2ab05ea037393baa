//! The fate of a packet in XDP, and how packets are forwarded there.

use aya_ebpf::bindings::xdp_action::{XDP_PASS, XDP_REDIRECT, XDP_TX};
use aya_ebpf::helpers::bpf_redirect;
use health_common::metrics::{Direction, Reason};

use crate::metrics::count_bytes;
use crate::subprogram::Returned;

/// The fate of a packet. Only the functions of this module create it.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct XdpVerdict(u32);

impl XdpVerdict {
    /// Pass it to the host's stack.
    pub(super) const PASSED: Self = Self(XDP_PASS);

    /// The verdict as the return value of a program.
    #[inline(always)]
    pub const fn code(self) -> u32 {
        self.0
    }
}

impl Returned for XdpVerdict {
    #[inline(always)]
    fn encode(self) -> u32 {
        self.0
    }

    #[inline(always)]
    fn decode(number: u32) -> Self {
        Self(number)
    }
}

/// Redirects a packet to a device, or sends it back on the one that it came in on: as in
/// [`XdpWay::to`](health_common::service::xdp::XdpWay::to).
#[inline(always)]
pub(super) fn handed_over(to: u32) -> Option<XdpVerdict> {
    if to == 0 {
        return Some(XdpVerdict(XDP_TX));
    }
    // SAFETY: a helper without memory arguments.
    let code = unsafe { bpf_redirect(to, 0) };
    (code == i64::from(XDP_REDIRECT)).then_some(XdpVerdict(XDP_REDIRECT))
}

/// Counts a forwarded packet of this length.
#[inline(always)]
pub(super) fn counted(length: u32, verdict: XdpVerdict) -> XdpVerdict {
    count_bytes(length, Reason::ForwardedByXdp, Direction::Ingress);
    verdict
}
