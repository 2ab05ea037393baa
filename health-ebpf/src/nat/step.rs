//! State and results of the steps, and the macro that makes them separate functions.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;
use health_common::ct::{Tuple4, Tuple6};
use health_common::metrics::Reason;
use health_common::nat::{NAT_HOST_LOCAL, NAT_NEEDS_CT};
use health_common::packet::Packet;

use super::arriving::{find_reply, note_opened, read_arriving, rewrite_destination};
use super::error::{arriving_error, leaving_error};
use super::leaving::{find, meet, read_leaving, rewrite_source};
use super::port::{consider, mark, take, take_back, translate};
use crate::bounds::{forgotten, header_at};
use crate::conntrack::PacketFlags;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::rewrite::{self, Ends};

/// A step's result for a packet. Functions in the kernel can only return numbers: this one.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct StepResult(pub(super) u32);

impl StepResult {
    /// The packet passes unchanged.
    pub(super) const PASSED: Self = Self(0);
    /// Continue with the next step.
    pub(super) const FOUND: Self = Self(1);
    /// It is an ICMP error.
    pub(super) const IS_ERROR: Self = Self(2);
    /// The flow has no translation yet.
    pub(super) const IS_NEW: Self = Self(3);
    /// Another flow has the port.
    pub(super) const IS_TAKEN: Self = Self(4);
    /// The maps have no space for another translation.
    pub(super) const HAS_NO_ROOM: Self = Self(5);

    /// The packet is dropped. The numbers of these reasons start at 128.
    #[inline(always)]
    pub(super) const fn dropped(reason: Reason) -> Self {
        Self(reason as u32)
    }

    /// The packet was rewritten, or damaged in the attempt.
    #[inline(always)]
    pub(super) const fn written(result: Option<()>) -> Self {
        match result {
            Some(()) => Self::PASSED,
            None => Self::dropped(Reason::WriteFailed),
        }
    }
}

/// The sender of a packet that leaves.
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    /// The node's own address: this host, or a sender that was already masqueraded.
    Node,
    /// The same, to a destination that is not masqueraded: only clients of services share its ports.
    NodeInside,
    /// An endpoint of this node, whose packets are in conntrack.
    Endpoint,
    /// A host behind this gateway.
    Routed,
    /// A client of a service, whose packet goes to a backend elsewhere.
    Served,
}

impl Sender {
    /// Whether the packet has the node's own address.
    #[inline(always)]
    pub(super) fn is_node(self) -> bool {
        matches!(self, Self::Node | Self::NodeInside)
    }
}

/// State of a packet across the steps.
#[repr(C)]
pub(super) struct Passage<T: Version> {
    /// Leaving: the flow, in direction out. Arriving: the key of the `IN` entry.
    pub(super) tuple: T,
    /// The translation: for a packet that arrives, the `IN` entry.
    pub(super) entry: T::Translation,
    /// Offset of the IP header.
    pub(super) ip_at: u32,
    /// Offset of the transport header or the ICMP error.
    pub(super) content_at: u32,
    pub(super) sender: Sender,
    /// The port, network byte order, of the oldest unanswered flow among those whose ports were tried.
    pub(super) oldest_be: u16,
    /// The age of that flow: see [`super::port::consider`]; 0 if there is none.
    pub(super) oldest_age: u32,
    /// The device to store in the flow's entry, if that is created.
    pub(super) ifindex: u32,
    /// A later fragment: there is no transport header.
    pub(super) is_later: u16,
    /// TCP flags of the segment; 0 for other protocols.
    pub(super) tcp_flags: u16,
}

impl<T: Version> Passage<T> {
    #[inline(always)]
    pub(super) fn at(ip_at: usize) -> Self {
        Self {
            tuple: T::default(),
            entry: T::Translation::default(),
            ip_at: ip_at as u32,
            content_at: 0,
            sender: Sender::Node,
            oldest_be: 0,
            oldest_age: 0,
            ifindex: 0,
            is_later: 0,
            tcp_flags: 0,
        }
    }

    #[inline(always)]
    pub(super) fn take_in(&mut self, packet: &Packet<T>) {
        self.tuple = packet.tuple;
        self.is_later = packet.is_later().into();
        self.tcp_flags = packet.tcp_flags.into();
    }

    #[inline(always)]
    pub(super) fn packet_flags(&self) -> PacketFlags {
        if self.is_later != 0 {
            PacketFlags::Unknown
        } else {
            PacketFlags::Tcp(self.tcp_flags as u8)
        }
    }

    /// Offset of the IP header, with bounds that the verifier sees.
    #[inline(always)]
    pub(super) fn ip_at(&self) -> Option<usize> {
        header_at(self.ip_at)
    }

    #[inline(always)]
    pub(super) fn is_host_local(&self) -> bool {
        T::flags(&self.entry) & NAT_HOST_LOCAL != 0
    }

    #[inline(always)]
    pub(super) fn needs_ct(&self) -> bool {
        T::flags(&self.entry) & NAT_NEEDS_CT != 0
    }

    /// Rewrites an end of the packet.
    #[inline(always)]
    pub(super) fn rewrite(&self, frame: &Frame, ends: &Ends<T>) -> StepResult {
        let content_at = (self.is_later == 0).then_some(self.content_at);
        let protocol = self.tuple.protocol();
        StepResult::written(rewrite::packet(
            frame, self.ip_at, content_at, protocol, ends,
        ))
    }
}

/// The steps as separate functions. The verifier does not trust a pointer that is passed to such a function.
pub(super) trait Steps: Version {
    fn read_leaving(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn meet(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn find(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn translate(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn take(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn mark(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn consider(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn take_back(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn rewrite_source(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn leaving_error(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn read_arriving(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn find_reply(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn rewrite_destination(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn arriving_error(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
    fn note_opened(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult;
}

macro_rules! steps {
    ($tuple:ty, $($step:ident as $name:ident),+) => {
        impl Steps for $tuple {$(
            #[inline(always)]
            fn $step(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> StepResult {
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $name(skb: *mut __sk_buff, passage: *mut Passage<$tuple>) -> u32 {
                    // Otherwise LLVM would not pass it where a step does not use it, which the verifier rejects.
                    let frame = Frame::new(TcContext::new(forgotten(skb)));
                    // SAFETY: a reference, in the only call.
                    let result = match unsafe { passage.as_mut() } {
                        Some(passage) => $step::<$tuple>(&frame, passage),
                        None => StepResult::PASSED,
                    };
                    result.0
                }
                StepResult($name(skb, passage))
            }
        )+}
    };
}

steps!(
    Tuple4,
    read_leaving as nat4_read_leaving,
    meet as nat4_meet,
    find as nat4_find,
    translate as nat4_translate,
    take as nat4_take,
    mark as nat4_mark,
    consider as nat4_consider,
    take_back as nat4_take_back,
    rewrite_source as nat4_rewrite_source,
    leaving_error as nat4_leaving_error,
    read_arriving as nat4_read_arriving,
    find_reply as nat4_find_reply,
    rewrite_destination as nat4_rewrite_destination,
    arriving_error as nat4_arriving_error,
    note_opened as nat4_note_opened
);
steps!(
    Tuple6,
    read_leaving as nat6_read_leaving,
    meet as nat6_meet,
    find as nat6_find,
    translate as nat6_translate,
    take as nat6_take,
    mark as nat6_mark,
    consider as nat6_consider,
    take_back as nat6_take_back,
    rewrite_source as nat6_rewrite_source,
    leaving_error as nat6_leaving_error,
    read_arriving as nat6_read_arriving,
    find_reply as nat6_find_reply,
    rewrite_destination as nat6_rewrite_destination,
    arriving_error as nat6_arriving_error,
    note_opened as nat6_note_opened
);
