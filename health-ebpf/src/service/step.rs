//! State and results of the steps, and the macros that make them separate functions.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;
use health_common::ct::{Tuple4, Tuple6};
use health_common::metrics::Reason;
use health_common::packet::Packet;
use health_common::service::Origin;
use health_common::tuple::ServiceFlowParts;

use super::answer::{answer, restore};
use super::backend::{choose, enter, take};
use super::connected::{avoid_socket, leave_to_socket};
use super::direct::accept::{accept, relay, take_off};
use super::direct::{Direct, follow, settle, tell};
use super::error::{
    answer_error, read_error, rewrite_around, rewrite_quoted, send_error, tell_client,
};
use super::forward::{forward, note};
use super::reject::{Unreachable, reject};
use super::request::{
    find, forget_ports, pass_by, rewrite, take_answers, withdraw, withdraw_from_outside,
};
use crate::bounds::{forgotten, header_at};
use crate::frame::{Frame, IP_AT};
use crate::ip_version::Version;

/// A step's result for a packet. Functions in the kernel can only return numbers: this one.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct StepResult(pub(super) u32);

/// Reasons for drops here.
pub(super) const DROPS: [Reason; 6] = [
    Reason::WriteFailed,
    Reason::ServiceNoBackend,
    Reason::ServiceNoLocal,
    Reason::ServiceSourceRange,
    Reason::FlowsHeld,
    Reason::DirectInvalid,
];

impl StepResult {
    /// The packet passes unchanged.
    pub(super) const PASSED: Self = Self(0);
    /// The request contains the backend.
    pub(super) const FOUND: Self = Self(1);
    /// A packet to a service, of a flow without a backend so far.
    pub(super) const IS_NEW: Self = Self(2);
    /// It is an ICMP error.
    pub(super) const IS_ERROR: Self = Self(3);
    /// It goes back to its sender.
    pub(super) const TURNED: Self = Self(4);
    /// Its sender must be notified that there is no backend.
    pub(super) const REJECTED: Self = Self(5);
    /// It was passed to the device that it leaves on.
    pub(super) const FORWARDED: Self = Self(6);
    /// The request contains the backend of a new flow, which must be entered.
    pub(super) const CHOSEN: Self = Self(7);
    /// It must be delivered to an endpoint of this node.
    pub(super) const DELIVERABLE: Self = Self(8);
    /// As [`Self::IS_NEW`], unless the packet answers a process of the host that uses the service's port too.
    pub(super) const MAY_ANSWER: Self = Self(9);
    /// It is not for a service, but may open a connection without one, or belong to a flow that another node
    /// forwarded here.
    pub(super) const HAS_NO_SERVICE: Self = Self(10);
    /// As [`Self::CHOSEN`], but the backend's answers to this port belong to another flow: another port or backend
    /// must be tried.
    pub(super) const TAKEN: Self = Self(11);
    /// The maps have no space for another flow.
    pub(super) const HAS_NO_ROOM: Self = Self(12);
    /// It answers a flow whose `OUT` entry is missing.
    pub(super) const LOST: Self = Self(13);

    /// As [`Self::FOUND`], but the client's own port must still be written into the transport header at `content_at`:
    /// see [`super::answer::restore_port`].
    #[inline(always)]
    pub(super) const fn with_port(content_at: u32, is_tcp: bool, own_be: u16) -> Self {
        Self(1 << 31 | (is_tcp as u32) << 30 | (content_at & 0x3fff) << 16 | own_be as u32)
    }

    /// It is an ICMP error, which starts at `content_at`.
    #[inline(always)]
    pub(super) const fn error_at(content_at: u32) -> Self {
        Self(1 << 30 | content_at & 0xffff)
    }

    /// The argument of [`Self::error_at`].
    #[inline(always)]
    pub(super) const fn begins_error_at(self) -> Option<u32> {
        if self.0 >> 30 == 1 {
            Some(self.0 & 0xffff)
        } else {
            None
        }
    }

    /// Whether [`Self::with_port`] created this.
    #[inline(always)]
    pub(super) const fn has_port(self) -> bool {
        self.0 >> 31 != 0
    }

    /// The arguments of [`Self::with_port`].
    #[inline(always)]
    pub(super) const fn port(self) -> (u32, bool, u16) {
        (self.0 >> 16 & 0x3fff, self.0 >> 30 & 1 != 0, self.0 as u16)
    }

    /// The packet is dropped. The numbers of these reasons start at 128.
    #[inline(always)]
    pub(super) const fn dropped(reason: Reason) -> Self {
        Self(reason as u32)
    }
}

/// The hook of the programs that run the steps.
pub trait Hook {
    /// Where the flows come from.
    const ORIGIN: Origin;
    /// At an uplink, not at an endpoint's device.
    const IS_UPLINK: bool = matches!(Self::ORIGIN, Origin::Outside);
    /// Offset of the packet's IP header.
    fn ip_at<T: Version>(request: &Request<T>) -> Option<usize>;
}

/// At the device of an endpoint.
pub struct AtEndpoint;
/// At an uplink.
pub struct AtUplink;

impl Hook for AtEndpoint {
    const ORIGIN: Origin = Origin::Inside;

    #[inline(always)]
    fn ip_at<T: Version>(_request: &Request<T>) -> Option<usize> {
        Some(IP_AT)
    }
}

impl Hook for AtUplink {
    const ORIGIN: Origin = Origin::Outside;

    #[inline(always)]
    fn ip_at<T: Version>(request: &Request<T>) -> Option<usize> {
        header_at(request.ip_at)
    }
}

/// State of a packet to a service across the steps.
#[repr(C)]
pub struct Request<T: Version> {
    /// The packet's tuple, in direction out.
    pub(super) tuple: T,
    /// Address of the backend.
    pub(super) addr_be: T::Address,
    /// Port of the backend.
    pub(super) port_be: u16,
    /// The receiver of an ICMP error: a [`super::error::Told`].
    pub(super) told: u16,
    /// Index of the backend of a new flow.
    pub(super) backend: u32,
    /// Number of the service port, for a new flow.
    pub(super) service: u32,
    /// Number of ports, or backends, that were tried for it and are taken.
    pub(super) attempt: u16,
    /// Whether the service has affinity, for a new flow.
    pub(super) has_affinity: u16,
    /// At an uplink: offset of the IP header.
    pub(super) ip_at: u32,
    /// Offset of the transport header or the ICMP error.
    pub(super) content_at: u32,
    /// A later fragment: there is no transport header.
    pub(super) is_later: u16,
    /// The client's port as seen by the backend, if it differs: see [`health_common::service::FLOW_MOVED`]. Else 0.
    pub(super) moved_port_be: u16,
    /// TCP flags of the segment; 0 for other protocols.
    pub(super) tcp_flags: u16,
    /// At an uplink: an answer that passes through this node, and gets the service's source when it leaves.
    pub(super) is_passing: u16,
    /// Flags of the packet's flow.
    pub(super) flow_flags: u32,
    /// For an ICMP error: offset of the transport header of the packet that it quotes. Else 0. The tuple is then that
    /// of a reply to this packet.
    pub(super) quoted_at: u16,
    /// Number of the quoted packet's bytes from that offset on.
    pub(super) quoted_len: u16,
}

impl<T: Version> Request<T>
where
    T::Address: Default,
{
    /// For a packet that has not been read yet.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self::at(IP_AT)
    }

    #[inline(always)]
    pub(super) fn at(ip_at: usize) -> Self {
        Self {
            tuple: T::default(),
            addr_be: T::Address::default(),
            port_be: 0,
            told: 0,
            backend: 0,
            service: 0,
            attempt: 0,
            has_affinity: 0,
            ip_at: ip_at as u32,
            content_at: 0,
            is_later: 0,
            moved_port_be: 0,
            tcp_flags: 0,
            flow_flags: 0,
            is_passing: 0,
            quoted_at: 0,
            quoted_len: 0,
        }
    }

    /// For a whole packet with this tuple and these TCP flags.
    #[inline(always)]
    pub(super) fn of(packet: &Packet<T>) -> Self {
        Self {
            tuple: packet.tuple,
            tcp_flags: packet.tcp_flags.into(),
            ..Self::new()
        }
    }
}

impl<T: Version> Request<T> {
    /// The address and port that the backend listens on.
    #[inline(always)]
    pub(super) fn backend(&self) -> (T::Address, u16) {
        (self.addr_be, self.port_be)
    }

    #[inline(always)]
    pub(super) fn set_backend(&mut self, (addr_be, port_be): (T::Address, u16)) {
        (self.addr_be, self.port_be) = (addr_be, port_be);
    }

    /// The packet's tuple, with the source port that the backend sees.
    #[inline(always)]
    pub(super) fn moved(&self) -> T {
        if self.moved_port_be == 0 {
            self.tuple
        } else {
            self.tuple.with_source_port(self.moved_port_be)
        }
    }

    /// Records the parts of the packet's flow.
    #[inline(always)]
    pub(super) fn take_in(&mut self, parts: &ServiceFlowParts<T::Address>) {
        self.set_backend(parts.to);
        self.flow_flags = parts.flags.into();
        self.moved_port_be = parts.client_port_be;
    }

    /// Whether the packet itself belongs to a flow, and is not an error about one.
    #[inline(always)]
    pub(super) fn has_flow(&self) -> bool {
        self.tuple.protocol() != 0 && !self.is_error()
    }

    /// Whether it is such an error, and the packet that it quotes was read.
    #[inline(always)]
    pub(super) fn is_error(&self) -> bool {
        self.quoted_at != 0
    }

    /// Whether the packet's IP header follows an Ethernet header, without a VLAN tag.
    #[inline(always)]
    pub(super) fn is_untagged(&self, frame: &Frame) -> bool {
        self.ip_at == IP_AT as u32 && !frame.has_vlan_tag()
    }

    /// Offset of the transport header, if there is one.
    #[inline(always)]
    pub(super) fn content_at(&self) -> Option<u32> {
        (self.is_later == 0).then_some(self.content_at)
    }
}

/// The steps as separate functions: the verifier checks each one once, not once per path that leads there. These
/// steps run at both hooks.
pub trait SharedSteps<P: Hook>: Version<Address: Default> + Unreachable {
    /// See [`find`].
    fn find(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`pass_by`].
    fn pass_by(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`take_answers`].
    fn take_answers(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`leave_to_socket`].
    fn leave_to_socket(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`choose`].
    fn choose(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`take`].
    fn take(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`avoid_socket`]. At endpoints there are no such sockets.
    fn avoid_socket(_skb: *mut __sk_buff, _request: &mut Request<Self>) -> StepResult {
        StepResult::CHOSEN
    }
    /// See [`settle`]. At endpoints there is nothing to settle.
    fn settle(_skb: *mut __sk_buff, _request: &mut Request<Self>) -> StepResult {
        StepResult::CHOSEN
    }
    /// See [`enter`].
    fn enter(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`rewrite`].
    fn rewrite(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`read_error`].
    fn read_error(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`send_error`].
    fn send_error(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`answer_error`].
    fn answer_error(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`rewrite_quoted`].
    fn rewrite_quoted(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`rewrite_around`].
    fn rewrite_around(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`reject`].
    fn reject(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
}

/// The steps at endpoint devices. Except for the shared ones, they create their own request: it takes no stack space
/// of the caller while other functions run.
pub trait Steps: SharedSteps<AtEndpoint> {
    /// See [`answer`].
    fn answer(skb: *mut __sk_buff) -> StepResult;
    /// See [`restore`].
    fn restore(skb: *mut __sk_buff) -> StepResult;
    /// See [`tell_client`].
    fn tell_client(skb: *mut __sk_buff, error_at: u32) -> StepResult;
    /// See [`forget_ports`].
    fn forget_ports(skb: *mut __sk_buff) -> StepResult;
    /// See [`withdraw`].
    fn withdraw(skb: *mut __sk_buff) -> StepResult;
    /// See [`withdraw_from_outside`].
    fn withdraw_from_outside(skb: *mut __sk_buff) -> StepResult;
}

/// The steps at uplinks.
pub trait UplinkSteps: SharedSteps<AtUplink> + Direct {
    /// See [`accept`].
    fn accept(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`relay`].
    fn relay(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`take_off`].
    fn take_off(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`follow`].
    fn follow(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`tell`].
    fn tell(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`answer`].
    fn answer(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`restore`].
    fn restore(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`forward`].
    fn forward(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
    /// See [`note`].
    fn note(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult;
}

macro_rules! steps {
    ($steps:path, $tuple:ty, $hook:ty: $($step:ident as $name:ident),+ $(,)?) => {
        impl $steps for $tuple {$(
            #[inline(always)]
            fn $step(skb: *mut __sk_buff, request: &mut Request<Self>) -> StepResult {
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $name(skb: *mut __sk_buff, request: *mut Request<$tuple>) -> u32 {
                    // Otherwise LLVM would not pass it where a step does not use it, which the verifier rejects.
                    let frame = Frame::new(TcContext::new(forgotten(skb)));
                    // SAFETY: a reference, in the only call.
                    let result = match unsafe { request.as_mut() } {
                        Some(request) => $step::<$tuple, $hook>(&frame, request),
                        None => StepResult::PASSED,
                    };
                    result.0
                }
                StepResult($name(skb, request))
            }
        )+}
    };
}

macro_rules! steps_alone {
    ($tuple:ty: tell_client as $tell_client:ident, $($step:ident as $name:ident),+ $(,)?) => {
        impl Steps for $tuple {
            #[inline(always)]
            fn tell_client(skb: *mut __sk_buff, error_at: u32) -> StepResult {
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $tell_client(skb: *mut __sk_buff, error_at: u32) -> u32 {
                    let mut request = Request::<$tuple>::new();
                    request.content_at = error_at;
                    tell_client::<$tuple, AtEndpoint>(skb, &mut request).0
                }
                StepResult($tell_client(skb, error_at))
            }

            $(
            #[inline(always)]
            fn $step(skb: *mut __sk_buff) -> StepResult {
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $name(skb: *mut __sk_buff) -> u32 {
                    let frame = Frame::new(TcContext::new(skb));
                    let mut request = Request::<$tuple>::new();
                    $step::<$tuple, AtEndpoint>(&frame, &mut request).0
                }
                StepResult($name(skb))
            }
        )+}
    };
}

steps!(
    SharedSteps<AtEndpoint>, Tuple4, AtEndpoint:
    find as service4_find,
    pass_by as service4_pass_by,
    take_answers as service4_take_answers,
    leave_to_socket as service4_leave_to_socket,
    choose as service4_choose,
    take as service4_take,
    enter as service4_enter,
    rewrite as service4_rewrite,
    read_error as service4_read_error,
    send_error as service4_send_error,
    answer_error as service4_answer_error,
    rewrite_quoted as service4_rewrite_quoted,
    rewrite_around as service4_rewrite_around,
    reject as service4_reject,
);
steps!(
    SharedSteps<AtUplink>, Tuple4, AtUplink:
    find as uplink4_find,
    pass_by as uplink4_pass_by,
    take_answers as uplink4_take_answers,
    leave_to_socket as uplink4_leave_to_socket,
    choose as uplink4_choose,
    take as uplink4_take,
    avoid_socket as uplink4_avoid_socket,
    settle as uplink4_settle,
    enter as uplink4_enter,
    rewrite as uplink4_rewrite,
    read_error as uplink4_read_error,
    send_error as uplink4_send_error,
    answer_error as uplink4_answer_error,
    rewrite_quoted as uplink4_rewrite_quoted,
    rewrite_around as uplink4_rewrite_around,
    reject as uplink4_reject,
);
steps!(
    UplinkSteps, Tuple4, AtUplink:
    accept as uplink4_accept,
    relay as uplink4_relay,
    take_off as uplink4_take_off,
    follow as uplink4_follow,
    tell as uplink4_tell,
    answer as uplink4_answer,
    restore as uplink4_restore,
    forward as uplink4_forward,
    note as uplink4_note,
);
steps_alone!(
    Tuple4:
    tell_client as service4_tell_client,
    answer as service4_answer,
    restore as service4_restore,
    forget_ports as service4_forget_ports,
    withdraw as service4_withdraw,
    withdraw_from_outside as service4_withdraw_from_outside,
);
steps!(
    SharedSteps<AtEndpoint>, Tuple6, AtEndpoint:
    find as service6_find,
    pass_by as service6_pass_by,
    take_answers as service6_take_answers,
    leave_to_socket as service6_leave_to_socket,
    choose as service6_choose,
    take as service6_take,
    enter as service6_enter,
    rewrite as service6_rewrite,
    read_error as service6_read_error,
    send_error as service6_send_error,
    answer_error as service6_answer_error,
    rewrite_quoted as service6_rewrite_quoted,
    rewrite_around as service6_rewrite_around,
    reject as service6_reject,
);
steps!(
    SharedSteps<AtUplink>, Tuple6, AtUplink:
    find as uplink6_find,
    pass_by as uplink6_pass_by,
    take_answers as uplink6_take_answers,
    leave_to_socket as uplink6_leave_to_socket,
    choose as uplink6_choose,
    take as uplink6_take,
    avoid_socket as uplink6_avoid_socket,
    settle as uplink6_settle,
    enter as uplink6_enter,
    rewrite as uplink6_rewrite,
    read_error as uplink6_read_error,
    send_error as uplink6_send_error,
    answer_error as uplink6_answer_error,
    rewrite_quoted as uplink6_rewrite_quoted,
    rewrite_around as uplink6_rewrite_around,
    reject as uplink6_reject,
);
steps!(
    UplinkSteps, Tuple6, AtUplink:
    accept as uplink6_accept,
    relay as uplink6_relay,
    take_off as uplink6_take_off,
    follow as uplink6_follow,
    tell as uplink6_tell,
    answer as uplink6_answer,
    restore as uplink6_restore,
    forward as uplink6_forward,
    note as uplink6_note,
);
steps_alone!(
    Tuple6:
    tell_client as service6_tell_client,
    answer as service6_answer,
    restore as service6_restore,
    forget_ports as service6_forget_ports,
    withdraw as service6_withdraw,
    withdraw_from_outside as service6_withdraw_from_outside,
);
