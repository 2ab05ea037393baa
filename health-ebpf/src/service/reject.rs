//! Notifies a client that a service has no backend.

use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
use aya_ebpf::helpers::generated::{bpf_skb_adjust_room, bpf_skb_change_tail};
use health_common::ct::{Tuple4, Tuple6};
use health_common::service::unreachable::{
    HEADER4, HEADER6, LONG, Quoted4, Quoted6, SHORT, Unreachable4, Unreachable6,
};

use super::request::Request;
use crate::clock::coarse_now_secs;
use crate::frame::{Frame, IP_AT};
use crate::hook::Hook;
use crate::ip_version::Version;
use crate::maps::HEALTH_SENT_ERRORS;
use crate::packet::load;
use crate::subprogram::subprogram;

/// The start of a packet that an error quotes: a header without options or extensions, and some of the data after it.
pub trait Quoted: Default {
    /// The error.
    type Error;
    /// Builds the error.
    fn into_error(self) -> Self::Error;
}

macro_rules! quoted {
    ($($quoted:ty => $error:ty),+ $(,)?) => {$(
        impl Quoted for $quoted {
            type Error = $error;

            #[inline(always)]
            fn into_error(self) -> $error {
                <$error>::about(self)
            }
        }
    )+};
}

type Short4 = Quoted4<{ HEADER4 + SHORT }>;
type Long4 = Quoted4<{ HEADER4 + LONG }>;
type Short6 = Quoted6<{ HEADER6 + SHORT }>;
type Long6 = Quoted6<{ HEADER6 + LONG }>;

quoted!(
    Short4 => Unreachable4<{ HEADER4 + SHORT }>,
    Long4 => Unreachable4<{ HEADER4 + LONG }>,
    Short6 => Unreachable6<{ HEADER6 + SHORT }>,
    Long6 => Unreachable6<{ HEADER6 + LONG }>,
);

/// The quoted data in errors of an IP version.
pub trait Unreachable: Version {
    /// For a packet that is too short for more.
    type Short: Quoted;
    /// For any other packet.
    type Long: Quoted;
}

impl Unreachable for Tuple4 {
    type Short = Short4;
    type Long = Long4;
}

impl Unreachable for Tuple6 {
    type Short = Short6;
    type Long = Long6;
}

/// Maximum number of errors per second and CPU to outside clients: anyone can make us send them to any address that
/// they use as a source (RFC 1812 section 4.3.2.8, RFC 4443 section 2.4).
const ERRORS_A_SECOND: u32 = 100;

/// Number of errors that a CPU has sent to outside clients.
#[repr(C)]
pub struct SentErrors {
    /// The second of `CLOCK_MONOTONIC` that is counted.
    second: u32,
    /// The number of errors in that second.
    count: u32,
}

/// Whether another error may be sent to an outside client.
#[inline(always)]
fn may_send_error() -> bool {
    let Some(sent) = HEALTH_SENT_ERRORS.get_ptr_mut(0) else {
        return false;
    };
    let now = coarse_now_secs();
    // SAFETY: a value of that per-CPU map: programs on one CPU do not interrupt each other here.
    let sent = unsafe { &mut *sent };
    if sent.second != now {
        (sent.second, sent.count) = (now, 0);
    }
    sent.count += 1;
    sent.count <= ERRORS_A_SECOND
}

/// Turns a packet into the ICMP error about it. Packets with options, extensions or no transport header are dropped
/// silently, and so are those that exceed the rate limit. Returns whether it is an error now.
#[subprogram(service4_reject, service6_reject, uplink4_reject, uplink6_reject)]
pub(super) fn reject<T: Unreachable, P: Hook>(frame: &Frame, request: &mut Request<T>) -> bool {
    // Tags between the headers would stay in place.
    let ip_at = if P::IS_UPLINK {
        frame.link_header_len()
    } else {
        IP_AT
    };
    if P::IS_UPLINK && request.ip_at != ip_at as u32
        || request.content_at() != Some((ip_at + T::HEADER_LEN) as u32)
    {
        return false;
    }
    if P::IS_UPLINK && !may_send_error() {
        return false;
    }
    let is_told = if frame.length() as usize >= ip_at + size_of::<T::Long>() {
        replace::<T::Long>(frame, ip_at)
    } else {
        replace::<T::Short>(frame, ip_at)
    };
    is_told.is_some()
}

#[inline(always)]
fn replace<Q: Quoted>(frame: &Frame, ip_at: usize) -> Option<()> {
    let mut quoted = Q::default();
    let (len, skb) = (size_of::<Q>() as u32, frame.skb());
    load(frame, ip_at as u32, &mut quoted, len)?;
    let error = quoted.into_error();
    let room = (size_of::<Q::Error>() - size_of::<Q>()) as i32;
    // SAFETY: a valid context; the helpers check the rest.
    let is_resized = unsafe {
        bpf_skb_change_tail(skb, ip_at as u32 + len, 0) == 0
            && bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, 0) == 0
    };
    (is_resized && frame.store(ip_at, &error)).then_some(())
}
