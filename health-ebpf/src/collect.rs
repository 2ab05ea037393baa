//! Removal of conntrack entries that have expired, with the NAT entries of their flows, on behalf of user
//! space: between the look at an entry and its removal there are only a few instructions here.

use health_common::collect::{
    COLLECT_FLOWS, COLLECT_ORPHANS, COLLECTED, CollectHeader, CollectRequest, NOT_A_REQUEST,
    may_be_orphan,
};
use health_common::ct::{TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::tuple::Tuple as _;

use crate::clock::{coarse_now_ns, seconds};
use crate::frame::Frame;
use crate::version::Version;

/// Does what the frame asks for, and writes the answer into it.
#[inline(always)]
pub fn collect(frame: &Frame) -> u32 {
    let ip_version = match frame.at::<CollectHeader>(0) {
        Some(header) => header.ip_version,
        None => return NOT_A_REQUEST,
    };
    let now_ns = coarse_now_ns();
    match ip_version {
        Tuple4::IP_VERSION => collect_keys::<Tuple4>(frame, now_ns),
        Tuple6::IP_VERSION => collect_keys::<Tuple6>(frame, now_ns),
        _ => NOT_A_REQUEST,
    }
}

#[inline(always)]
fn collect_keys<T: Version>(frame: &Frame, now_ns: u64) -> u32 {
    let Some(CollectRequest::<T> { header, keys }) = frame.at(0) else {
        return NOT_A_REQUEST;
    };
    let operation = header.operation;
    let count = header.count as usize;
    for (index, key) in keys.iter().enumerate() {
        if index >= count {
            break;
        }
        match operation {
            COLLECT_FLOWS => collect_flow(header, *key, now_ns),
            COLLECT_ORPHANS => collect_orphan(header, *key, now_ns),
            _ => return NOT_A_REQUEST,
        }
    }
    COLLECTED
}

#[inline(always)]
fn collect_flow<T: Version>(header: &mut CollectHeader, key: T, now_ns: u64) {
    let Some(entry) = T::flows().get_ptr(key) else {
        return;
    };
    // SAFETY: a value of that map, of which one word is read.
    if !unsafe { (*entry).has_expired(seconds(now_ns)) } {
        header.refreshed += 1;
        return;
    }
    if T::flows().remove(key).is_err() {
        return;
    }
    header.flows += 1;
    release(header, key.in_direction(TUPLE_OUT));
}

/// Removes the translation of an outbound flow, unless the flow is there again.
#[inline(always)]
fn release<T: Version>(header: &mut CollectHeader, flow: T) {
    let Some(out) = translation(flow) else {
        return;
    };
    if is_tracked(flow) {
        return;
    }
    if T::translations().remove(flow).is_ok() {
        header.translations += 1;
    }
    let back_key = flow.reply_key(&out);
    if let Some(back) = translation(back_key)
        && back_key.flow(&back) == flow
        && T::translations().remove(back_key).is_ok()
    {
        header.translations += 1;
    }
}

/// Removes an entry of a translation that no flow uses: what is left when the flow's entry was evicted.
#[inline(always)]
fn collect_orphan<T: Version>(header: &mut CollectHeader, key: T, now_ns: u64) {
    let Some(entry) = translation(key) else {
        return;
    };
    if !may_be_orphan(T::created_ns(&entry), now_ns) || is_tracked(key.flow(&entry)) {
        header.refreshed += 1;
        return;
    }
    if T::translations().remove(key).is_ok() {
        header.translations += 1;
    }
}

#[inline(always)]
fn translation<T: Version>(key: T) -> Option<T::Translation> {
    let entry = T::translations().get_ptr(key)?;
    // SAFETY: a value of that map.
    Some(unsafe { *entry })
}

#[inline(always)]
fn is_tracked<T: Version>(flow: T) -> bool {
    T::flows().get_ptr(flow).is_some() || T::flows().get_ptr(flow.in_direction(TUPLE_IN)).is_some()
}
