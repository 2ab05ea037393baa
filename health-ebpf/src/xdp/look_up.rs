//! Looks up what to do with a packet, and stores it for later packets.
//!
//! The steps are separate functions in the kernel too: each uses its stack only while it runs, and the verifier
//! checks it once. They store their results in a [`Draft`].

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_FIB_LKUP_RET_SUCCESS, xdp_md};
use aya_ebpf::helpers::generated::bpf_jiffies64;
use aya_ebpf::programs::XdpContext;
use health_common::config::{DatapathConfig, SERVICES};
use health_common::ct::{TUPLE_OUT, Tuple4, Tuple6};
use health_common::packet::{Kind, Packet};
use health_common::service::xdp::{Pending, XDP_RETURNS, XDP_SENDS, XdpFlow};
use network_types::eth::EthHdr;

use super::conntrack::enter_under_way;
use super::flow::{self, Passage};
use super::frame::{Plain, XdpFrame};
use super::transport::is_between;
use super::{XdpVerdict, counted, handed_over, known, rewrite};
use crate::bounds::forgotten;
use crate::clock::coarse_now_ns;
use crate::fib::FibLookup;
use crate::frame::IP_AT;
use crate::ip_version::Version;
use crate::maps::{HEALTH_CONFIG, HEALTH_XDP_DEVICES, HEALTH_XDP_TIMES};
use crate::source::is_own;

/// State of a packet across the steps.
#[repr(C)]
pub struct Draft<T: Version> {
    /// What to do with the packet.
    pub(super) known: XdpFlow<T::Address>,
    /// Its tuple as received.
    pub(super) received: T,
    /// As [`Passage::flow`].
    pub(super) flow: T,
    /// TCP flags of the segment; 0 for UDP.
    tcp_flags: u32,
    /// Explicit padding, zero.
    pad: u32,
}

impl<T: Plain> Draft<T> {
    /// This CPU's draft.
    #[inline(always)]
    fn here() -> Option<&'static mut Self> {
        let draft = T::drafts().get_ptr_mut(0)?;
        // SAFETY: a map value stays valid memory for the program's run; no other program uses it, and none interrupts
        // this one.
        unsafe { draft.as_mut() }
    }

    /// Starts the look-up of a packet; `None` if there is no draft.
    #[inline(always)]
    pub(super) fn begin(received: &T, tcp_flags: u8) -> Option<()> {
        let draft = Self::here()?;
        // Anything that changes during the look-up counts as later.
        draft.known.made_ns = coarse_now_ns();
        // SAFETY: a helper without arguments.
        draft.known.until_ticks = unsafe { bpf_jiffies64() } + HEALTH_XDP_TIMES.get(0)?.way_ticks;
        draft.received = *received;
        draft.tcp_flags = tcp_flags.into();
        Some(())
    }

    /// As [`is_between`].
    #[inline(always)]
    fn is_between(&self) -> bool {
        is_between(self.received.protocol(), self.tcp_flags as u8)
    }

    /// The packet.
    #[inline(always)]
    fn packet(&self) -> Packet<T> {
        Packet {
            tuple: self.received,
            tcp_flags: self.tcp_flags as u8,
            kind: Kind::Flow,
        }
    }
}

/// A step's result for a packet. Functions in the kernel can only return numbers: this one.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct StepResult(u32);

impl StepResult {
    /// It is for the stack.
    pub(super) const PASSED: Self = Self(0);
    /// Its flow's packets are forwarded.
    pub(super) const FOUND: Self = Self(1);
    /// It opens or ends such a flow.
    pub(super) const ENDS: Self = Self(2);
}

/// The steps.
pub(super) trait Steps: Plain {
    /// See [`known::send_on`].
    fn send_known(ctx: *mut xdp_md) -> XdpVerdict;
    /// See [`find_request`].
    fn find_request(ctx: *mut xdp_md) -> StepResult;
    /// See [`find_answer`].
    fn find_answer(ctx: *mut xdp_md) -> StepResult;
    /// See [`route`].
    fn route(ctx: *mut xdp_md) -> StepResult;
    /// See [`enter`].
    fn enter(ctx: *mut xdp_md) -> XdpVerdict;
    /// See [`known::forget`].
    fn forget(ctx: *mut xdp_md) -> StepResult;
}

macro_rules! steps {
    ($tuple:ty, $first:path as $first_name:ident, $($step:ident -> $result:ident $path:path as $name:ident),+) => {
        impl Steps for $tuple {
            #[inline(always)]
            fn send_known(ctx: *mut xdp_md) -> XdpVerdict {
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $first_name(ctx: *mut xdp_md) -> u32 {
                    $first(&XdpFrame::new(XdpContext::new(ctx))).unwrap_or(XdpVerdict::PASSED).0
                }
                XdpVerdict($first_name(ctx))
            }
        $(
            #[inline(always)]
            fn $step(ctx: *mut xdp_md) -> $result {
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $name(ctx: *mut xdp_md) -> u32 {
                    // Otherwise LLVM would not pass it where a step does not use it, which the verifier rejects.
                    let frame = XdpFrame::new(XdpContext::new(forgotten(ctx)));
                    match Draft::<$tuple>::here() {
                        Some(draft) => $path(&frame, draft).unwrap_or($result::PASSED).0,
                        None => $result::PASSED.0,
                    }
                }
                $result($name(ctx))
            }
        )+}
    };
}

steps!(
    Tuple4,
    known::send_on::<Tuple4> as xdp4_send_known,
    find_request -> StepResult find_request::<Tuple4> as xdp4_find_request,
    find_answer -> StepResult find_answer::<Tuple4> as xdp4_find_answer,
    route -> StepResult route::<Tuple4> as xdp4_route,
    enter -> XdpVerdict enter::<Tuple4> as xdp4_enter,
    forget -> StepResult known::forget::<Tuple4> as xdp4_forget
);
steps!(
    Tuple6,
    known::send_on::<Tuple6> as xdp6_send_known,
    find_request -> StepResult find_request::<Tuple6> as xdp6_find_request,
    find_answer -> StepResult find_answer::<Tuple6> as xdp6_find_answer,
    route -> StepResult route::<Tuple6> as xdp6_route,
    enter -> XdpVerdict enter::<Tuple6> as xdp6_enter,
    forget -> StepResult known::forget::<Tuple6> as xdp6_forget
);

/// Finds the flow of a client's packet. The last step that looks for a flow.
#[inline(always)]
fn find_request<T: Plain>(_frame: &XdpFrame, draft: &mut Draft<T>) -> Option<StepResult>
where
    T::Address: Default,
{
    let found = find(draft, flow::requested);
    if found.is_none() && !draft.is_between() {
        // It opens another connection between the same ports, which may get another backend.
        let key = draft.received;
        known::remove(&key, TUPLE_OUT);
    }
    found
}

/// Finds the flow of a backend's answer.
#[inline(always)]
fn find_answer<T: Plain>(_frame: &XdpFrame, draft: &mut Draft<T>) -> Option<StepResult> {
    find(draft, flow::answered)
}

#[inline(always)]
fn find<T: Plain>(
    draft: &mut Draft<T>,
    passage: impl Fn(&Packet<T>, &DatapathConfig) -> Option<Passage<T>>,
) -> Option<StepResult> {
    let config = HEALTH_CONFIG.get(0)?;
    if config.flags & SERVICES == 0 {
        return None;
    }
    let received = draft.packet();
    let passage = passage(&received, config)?;
    draft.flow = passage.flow;
    let way = &mut draft.known.way;
    (way.source_be, way.destination_be) = (passage.source.0, passage.destination.0);
    way.ports_be = [passage.source.1, passage.destination.1];
    [way.ip_change, way.transport_change] = rewrite::changes(&received.tuple, &passage)?;
    Some(if draft.is_between() {
        StepResult::FOUND
    } else {
        StepResult::ENDS
    })
}

/// Determines where the packet goes.
#[inline(always)]
fn route<T: Plain>(frame: &XdpFrame, draft: &mut Draft<T>) -> Option<StepResult> {
    // The tc programs drop it.
    if is_own::<T>(draft.received.source().0, frame.ifindex()) {
        return None;
    }
    let way = &mut draft.known.way;
    let ip = frame.at::<T::Header>(IP_AT)?;
    (way.from, way.class) = (frame.ifindex(), T::class(ip));
    way.mac = *frame.at::<[u16; 3]>(0)?;
    let mut hop = FibLookup::of::<T>(way.from, way.source_be, way.destination_be);
    hop.protocol = T::protocol_behind(ip);
    // A packet whose length does not fit the field is longer than an uplink accepts.
    hop.total_len = u16::try_from(T::total_len(ip)).ok()?;
    hop.flow_info = way.class;
    // SAFETY: the context of this program.
    if unsafe { hop.ask(frame.ctx().as_ptr()) } != BPF_FIB_LKUP_RET_SUCCESS.into() {
        return None;
    }
    way.mtu = hop.total_len;
    let [own, next] = hop.macs;
    way.macs = [
        u32::from_ne_bytes([next[0], next[1], next[2], next[3]]),
        u32::from_ne_bytes([next[4], next[5], own[0], own[1]]),
        u32::from_ne_bytes([own[2], own[3], own[4], own[5]]),
    ];
    way.to = departure(frame, hop.ifindex)?;
    Some(StepResult::FOUND)
}

/// How a frame to this host leaves on a device: as in [`health_common::service::xdp::XdpWay::to`].
#[inline(always)]
fn departure(frame: &XdpFrame, by: u32) -> Option<u32> {
    let ifindex = frame.ifindex();
    // SAFETY: entries are replaced as a whole.
    let device = unsafe { HEALTH_XDP_DEVICES.get(ifindex) }?;
    if frame.at::<EthHdr>(0)?.dst_addr != device.mac {
        return None;
    }
    if by == ifindex && device.flags & XDP_RETURNS != 0 {
        return Some(0);
    }
    // SAFETY: as above.
    let device = unsafe { HEALTH_XDP_DEVICES.get(by) }?;
    (device.flags & XDP_SENDS != 0).then_some(by)
}

/// Records a packet, and forwards it.
#[inline(always)]
fn enter<T: Plain>(frame: &XdpFrame, draft: &mut Draft<T>) -> Option<XdpVerdict> {
    let config = HEALTH_CONFIG.get(0)?;
    let verdict = handed_over(draft.known.way.to)?;
    // Keys must be on the stack.
    let (key, mut flow) = (draft.received, draft.flow);
    let length = frame.length();
    known::report(&key, flow.direction());
    let lasts_secs = enter_under_way(
        T::flows(),
        &mut flow,
        draft.tcp_flags as u8,
        Pending::packet(length - IP_AT as u32),
        &config.timeouts,
    )?;
    rewrite::packet::<T>(frame, key.protocol(), &draft.known.way)?;
    // If it lasts one second, that may already be over.
    if lasts_secs > 1 {
        known::keep(&key, &draft.known);
    }
    Some(counted(length, verdict))
}
