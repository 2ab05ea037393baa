//! Removes expired conntrack entries and the NAT entries of their flows, on behalf of user space. In the kernel, only a
//! few instructions separate the check of an entry from its removal.

use health_common::collect::{
    CHUNK, COLLECT_FLOWS, COLLECT_ORPHANS, COLLECT_SERVICE_FLOWS, COLLECTED, CollectHeader,
    CollectRequest, NOT_A_REQUEST, may_be_orphan,
};
use health_common::ct::{TUPLE_OUT, Tuple4, Tuple6};
use health_common::tuple::Tuple as _;

use crate::bounds::forgotten;
use crate::clock::{coarse_now_ns, seconds};
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::nat::translation;
use crate::subprogram::subprogram;
use crate::{nat, service};

/// Units of the result for one key. The results of a whole request are summed, and no field overflows into the next.
const REFRESHED: u32 = 1;
const FLOW_REMOVED: u32 = 1 << 8;
const TRANSLATION_REMOVED: u32 = 1 << 16;

const _: () = assert!(CHUNK * 2 <= 0xff);

/// Performs the request in the frame, and writes the result back into the frame.
#[inline(always)]
pub fn collect(frame: &Frame) -> u32 {
    let Some(CollectHeader {
        ip_version,
        operation: COLLECT_FLOWS | COLLECT_ORPHANS | COLLECT_SERVICE_FLOWS,
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
fn collect_keys<T: Version>(frame: &Frame, count: u32, now_ns: u64) -> Option<u32> {
    let is_of_services =
        frame.at::<CollectRequest<T>>(0)?.header.operation == COLLECT_SERVICE_FLOWS;
    let mut done = 0;
    for index in 0..CHUNK as u32 {
        if index >= count {
            break;
        }
        done += if is_of_services {
            collect_service_flow::<T>(frame, index, now_ns)
        } else {
            collect_key::<T>(frame, index, now_ns)
        };
    }
    Some(done)
}

/// The request's operation and one of its keys.
#[inline(always)]
fn key<T>(frame: &Frame, index: u32) -> Option<(u32, &T)> {
    let index = forgotten(index) as usize;
    let header = frame.at::<CollectHeader>(0)?;
    if index >= CHUNK {
        return None;
    }
    let operation = header.operation;
    let key = frame.at::<T>(size_of::<CollectHeader>() + index * size_of::<T>())?;
    Some((operation, key))
}

/// Removes the conntrack entry under a key if it has expired, or the translation under a key if no flow uses it.
#[subprogram(collect_key4, collect_key6)]
fn collect_key<T: Version>(frame: &Frame, index: u32, now_ns: u64) -> u32 {
    // Map keys must be on the stack.
    let Some((operation, &key)) = key::<T>(frame, index) else {
        return 0;
    };
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
    // SAFETY: a value of that map; only one word is read.
    if !unsafe { (*entry).has_expired(seconds(now_ns)) } {
        return REFRESHED;
    }
    if T::flows().remove(&key).is_err() {
        return 0;
    }
    if !is_tracked(key) {
        service::forget_untracked(key);
    }
    // An `IN` entry can also belong to a translated flow, if the first packet that conntrack saw was a late reply. The
    // translation is then an orphan.
    if key.direction() == TUPLE_OUT {
        FLOW_REMOVED + release(key)
    } else {
        FLOW_REMOVED
    }
}

/// Removes the translation of an outbound flow, unless the flow has reappeared.
#[inline(always)]
fn release<T: Version>(flow: T) -> u32 {
    if is_tracked(flow) {
        return 0;
    }
    TRANSLATION_REMOVED * nat::forget(&flow)
}

/// Removes a translation entry that no flow uses: one left behind when its flow's conntrack entry was evicted.
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

/// Removes a service flow whose conntrack entry was evicted, given the key of one of its own entries.
#[subprogram(collect_service_flow4, collect_service_flow6)]
fn collect_service_flow<T: Version>(frame: &Frame, index: u32, now_ns: u64) -> u32 {
    // Map keys must be on the stack.
    let Some((_, &key)) = key::<T>(frame, index) else {
        return 0;
    };
    let Some(entry) = T::service_flows().get_ptr(&key) else {
        return 0;
    };
    // SAFETY: a value of that map.
    let entry = unsafe { &*entry };
    let is_young = T::service_flow_parts(entry).expires > seconds(now_ns);
    match service::tracked_flow(&key, entry) {
        Some(flow) if !is_young && !is_tracked(flow) => {
            service::forget(flow.with_direction(TUPLE_OUT));
            // The other entry may be gone.
            let _ = T::service_flows().remove(&key);
            FLOW_REMOVED
        }
        _ => REFRESHED,
    }
}

/// Whether conntrack has an entry for an outbound flow, even if the first packet that it saw was a late reply.
#[inline(always)]
fn is_tracked<T: Version>(flow: T) -> bool {
    T::flows().get_ptr(&flow).is_some() || T::flows().get_ptr(&flow.reply()).is_some()
}
