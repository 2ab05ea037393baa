//! Telling a client that a service has no backend.

use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
use aya_ebpf::helpers::generated::{bpf_skb_adjust_room, bpf_skb_change_tail};
use health_common::ct::{Tuple4, Tuple6};
use health_common::service::unreachable::{Quoted4, Quoted6, Unreachable4, Unreachable6};

use super::step::{Request, StepResult};
use crate::frame::{Frame, IP_AT};
use crate::ip_version::Version;
use crate::packet::load;

/// The error of an IP version.
pub trait Unreachable: Version {
    /// The start of the packet that it is about: a header without options or extensions, and eight bytes.
    type Quoted: Default;
    /// The error.
    type Error;
    /// Makes it.
    fn about(quoted: Self::Quoted) -> Self::Error;
}

impl Unreachable for Tuple4 {
    type Quoted = Quoted4;
    type Error = Unreachable4;

    #[inline(always)]
    fn about(quoted: Quoted4) -> Unreachable4 {
        Unreachable4::about(quoted)
    }
}

impl Unreachable for Tuple6 {
    type Quoted = Quoted6;
    type Error = Unreachable6;

    #[inline(always)]
    fn about(quoted: Quoted6) -> Unreachable6 {
        Unreachable6::about(quoted)
    }
}

/// Makes an ICMP error out of the packet that it is about. What has options, extensions or no transport header is
/// dropped silently.
#[inline(always)]
pub(super) fn reject<T: Unreachable>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    let mut quoted = T::Quoted::default();
    let (len, skb) = (size_of::<T::Quoted>() as u32, frame.skb());
    if request.content_at() != Some(T::L4_AT as u32)
        || load(frame, IP_AT as u32, &mut quoted, len).is_none()
    {
        return StepResult::REJECTED;
    }
    let error = T::about(quoted);
    let room = (size_of::<T::Error>() - size_of::<T::Quoted>()) as i32;
    // SAFETY: a valid context; the helpers check the rest.
    let is_resized = unsafe {
        bpf_skb_change_tail(skb, IP_AT as u32 + len, 0) == 0
            && bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, 0) == 0
    };
    if is_resized && frame.store(IP_AT, &error) {
        StepResult::TURNED
    } else {
        StepResult::REJECTED
    }
}
