//! Removal of conntrack entries that have expired, with the NAT entries of their flows, on behalf of user
//! space: between the look at an entry and its removal there are only a few instructions here.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;
use health_common::collect::{
    CHUNK, COLLECT_FLOWS, COLLECT_ORPHANS, COLLECTED, CollectHeader, CollectRequest, NOT_A_REQUEST,
    may_be_orphan,
};
use health_common::ct::{TUPLE_OUT, Tuple4, Tuple6};
use health_common::tuple::Tuple as _;

use crate::bounds::forgotten;
use crate::clock::{coarse_now_ns, seconds};
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::nat::translation;
use crate::{nat, service};

/// What became of a key. Those of a whole request are added up, and none overflows into the next.
const REFRESHED: u32 = 1;
const FLOW_REMOVED: u32 = 1 << 8;
const TRANSLATION_REMOVED: u32 = 1 << 16;

const _: () = assert!(CHUNK * 2 <= 0xff);

/// Does what the frame asks for, and writes the answer into it.
#[inline(always)]
pub fn collect(frame: &Frame) -> u32 {
    let Some(CollectHeader {
        ip_version,
        operation: COLLECT_FLOWS | COLLECT_ORPHANS,
        count,
        ..
    }) = frame.at(0)
    else {
        return NOT_A_REQUEST;
    };
    let now_ns = coarse_now_ns();
    let done = match *ip_version {
        Tuple4::IP_VERSION => collect_keys::<Tuple4>(frame, *count, now_ns),
        Tuple6::IP_VERSION => collect_keys::<Tuple6>(frame, *count, now_ns),
        _ => None,
    };
    let (Some(done), Some(answer)) = (done, frame.at::<CollectHeader>(0)) else {
        return NOT_A_REQUEST;
    };
    answer.refreshed = done & 0xff;
    answer.flows = done >> 8 & 0xff;
    answer.translations = done >> 16;
    COLLECTED
}

#[inline(always)]
fn collect_keys<T: Step>(frame: &Frame, count: u32, now_ns: u64) -> Option<u32> {
    frame.at::<CollectRequest<T>>(0)?;
    let mut done = 0;
    for index in 0..CHUNK as u32 {
        if index >= count {
            break;
        }
        done += T::collect_key(frame.skb(), index, now_ns);
    }
    Some(done)
}

/// A step that is a function of its own in the kernel too: the verifier looks at it once, and not once for each
/// key and each way that leads to it.
trait Step: Version {
    fn collect_key(skb: *mut __sk_buff, index: u32, now_ns: u64) -> u32;
}

macro_rules! step {
    ($tuple:ty, $name:ident) => {
        impl Step for $tuple {
            #[inline(always)]
            fn collect_key(skb: *mut __sk_buff, index: u32, now_ns: u64) -> u32 {
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $name(skb: *mut __sk_buff, index: u32, now_ns: u64) -> u32 {
                    collect_key::<$tuple>(&Frame::new(&TcContext::new(skb)), index, now_ns)
                }
                $name(skb, index, now_ns)
            }
        }
    };
}

step!(Tuple4, collect_key4);
step!(Tuple6, collect_key6);

#[inline(always)]
fn collect_key<T: Version>(frame: &Frame, index: u32, now_ns: u64) -> u32 {
    let index = forgotten(index) as usize;
    let operation = match frame.at::<CollectHeader>(0) {
        Some(header) if index < CHUNK => header.operation,
        _ => return 0,
    };
    let Some(key) = frame.at::<T>(size_of::<CollectHeader>() + index * size_of::<T>()) else {
        return 0;
    };
    // Keys must be on the stack.
    let key = *key;
    match operation {
        COLLECT_FLOWS => collect_flow(key, now_ns),
        _ => collect_orphan(key, now_ns),
    }
}

#[inline(always)]
fn collect_flow<T: Version>(key: T, now_ns: u64) -> u32 {
    let Some(entry) = T::flows().get_ptr(&key) else {
        return 0;
    };
    // SAFETY: a value of that map, of which one word is read.
    if !unsafe { (*entry).has_expired(seconds(now_ns)) } {
        return REFRESHED;
    }
    if T::flows().remove(&key).is_err() {
        return 0;
    }
    if !is_tracked(key) {
        service::forget_untracked(key);
    }
    // One of direction in can be of a translated flow, too, if a late reply was first. The translation is an
    // orphan then.
    if key.direction() == TUPLE_OUT {
        FLOW_REMOVED + release(key)
    } else {
        FLOW_REMOVED
    }
}

/// Removes the translation of an outbound flow, unless the flow is there again.
#[inline(always)]
fn release<T: Version>(flow: T) -> u32 {
    if is_tracked(flow) {
        return 0;
    }
    TRANSLATION_REMOVED * nat::forget(&flow)
}

/// Removes an entry of a translation that no flow uses: what is left when the flow's entry was evicted.
#[inline(always)]
fn collect_orphan<T: Version>(key: T, now_ns: u64) -> u32 {
    let Some(entry) = translation(&key) else {
        return 0;
    };
    if !may_be_orphan(T::created_ns(&entry), now_ns) || is_tracked(key.flow(&entry)) {
        return REFRESHED;
    }
    match T::translations().remove(&key) {
        Ok(()) => TRANSLATION_REMOVED,
        Err(_) => 0,
    }
}

/// Whether an outbound flow is in conntrack, be it because a late reply was its first packet there.
#[inline(always)]
fn is_tracked<T: Version>(flow: T) -> bool {
    T::flows().get_ptr(&flow).is_some() || T::flows().get_ptr(&flow.reply()).is_some()
}
