//! What the steps know of a packet, what they return, and what makes them functions of their own.

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

/// What a step makes of a packet. Functions in the kernel return nothing but numbers: this one.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct StepResult(pub(super) u32);

impl StepResult {
    /// The packet goes on as it is.
    pub(super) const PASSED: Self = Self(0);
    /// On to the next step.
    pub(super) const FOUND: Self = Self(1);
    /// It is an ICMP error.
    pub(super) const IS_ERROR: Self = Self(2);
    /// The flow has no translation yet.
    pub(super) const IS_NEW: Self = Self(3);
    /// The port is another's.
    pub(super) const IS_TAKEN: Self = Self(4);
    /// The maps have no room for another translation.
    pub(super) const HAS_NO_ROOM: Self = Self(5);

    /// The packet is dropped. The numbers of such reasons begin at 128.
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

/// Who sends a packet that leaves.
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    /// The node's own address: this host, or one that was masqueraded already.
    Node,
    /// The same, to a destination that is not masqueraded: its ports are shared with the clients of services alone.
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

/// What the steps know of a packet.
#[repr(C)]
pub(super) struct Passage<T: Version> {
    /// Leaving: the flow, in direction out. Arriving: the key of the entry of direction in.
    pub(super) tuple: T,
    /// The translation: for a packet that arrives, the entry of direction in.
    pub(super) entry: T::Translation,
    /// Where the IP header begins.
    pub(super) ip_at: u32,
    /// Where the transport header or the ICMP error begins.
    pub(super) content_at: u32,
    pub(super) sender: Sender,
    /// The port, network byte order, of the oldest flow that nobody answered, of those whose ports were tried.
    pub(super) oldest_be: u16,
    /// Its age: see [`super::port::consider`]; 0 without one.
    pub(super) oldest_age: u32,
    /// Device that the entry of its flow names, if that is made.
    pub(super) ifindex: u32,
    /// A later fragment: there is no transport header.
    pub(super) is_later: u16,
    /// Of the segment, 0 for other protocols.
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

    /// Where the IP header begins, in bounds that the verifier sees.
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

/// The steps as functions of their own. The verifier does not take a pointer for granted that is handed to
/// such a function.
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
                    // Else LLVM would hand nothing over for it where a step does not use it, which the verifier refuses.
                    let ctx = TcContext::new(forgotten(skb));
                    // SAFETY: a reference, in the only call.
                    let result = match unsafe { passage.as_mut() } {
                        Some(passage) => $step::<$tuple>(&Frame::new(&ctx), passage),
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
