//! Removal of conntrack entries that have expired, with the NAT entries of their flows, on behalf of user
//! space: between the look at an entry and its removal there are only a few instructions here.

use aya_ebpf::maps::LruHashMap;
use health_common::collect::{
    COLLECT_FLOWS, COLLECT_ORPHANS, COLLECTED, CollectHeader, CollectRequest, NOT_A_REQUEST,
    Translated, may_be_orphan,
};
use health_common::ct::{CtEntry, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};

use crate::clock::coarse_now_ns;
use crate::frame::Frame;
use crate::maps::{HEALTH_CT4, HEALTH_CT6, HEALTH_NAT4, HEALTH_NAT6};

/// Does what the frame asks for, and writes the answer into it.
#[inline(always)]
pub fn collect(frame: &Frame) -> u32 {
    let ip_version = match frame.at::<CollectHeader>(0) {
        Some(header) => header.ip_version,
        None => return NOT_A_REQUEST,
    };
    let now_ns = coarse_now_ns();
    match ip_version {
        Tuple4::IP_VERSION => Tables {
            flows: &HEALTH_CT4,
            translations: &HEALTH_NAT4,
        }
        .collect(frame, now_ns),
        Tuple6::IP_VERSION => Tables {
            flows: &HEALTH_CT6,
            translations: &HEALTH_NAT6,
        }
        .collect(frame, now_ns),
        _ => NOT_A_REQUEST,
    }
}

/// The maps of one IP version.
struct Tables<'a, T: Translated> {
    flows: &'a LruHashMap<T, CtEntry>,
    translations: &'a LruHashMap<T, T::Entry>,
}

impl<T: Translated> Tables<'_, T> {
    #[inline(always)]
    fn collect(&self, frame: &Frame, now_ns: u64) -> u32 {
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
                COLLECT_FLOWS => self.collect_flow(header, *key, now_ns),
                COLLECT_ORPHANS => self.collect_orphan(header, *key, now_ns),
                _ => return NOT_A_REQUEST,
            }
        }
        COLLECTED
    }

    #[inline(always)]
    fn collect_flow(&self, header: &mut CollectHeader, key: T, now_ns: u64) {
        let Some(entry) = self.flows.get_ptr(key) else {
            return;
        };
        // SAFETY: a value of that map, of which one word is read.
        if !unsafe { (*entry).has_expired((now_ns / 1_000_000_000) as u32) } {
            header.refreshed += 1;
            return;
        }
        if self.flows.remove(key).is_err() {
            return;
        }
        header.flows += 1;
        self.release(header, key.in_direction(TUPLE_OUT));
    }

    /// Removes the translation of an outbound flow, unless the flow is there again.
    #[inline(always)]
    fn release(&self, header: &mut CollectHeader, flow: T) {
        let Some(out) = self.translation(flow) else {
            return;
        };
        if self.is_tracked(flow) {
            return;
        }
        if self.translations.remove(flow).is_ok() {
            header.translations += 1;
        }
        let back_key = flow.reply_key(&out);
        if let Some(back) = self.translation(back_key)
            && back_key.flow(&back) == flow
            && self.translations.remove(back_key).is_ok()
        {
            header.translations += 1;
        }
    }

    /// Removes an entry of a translation that no flow uses: what is left when the flow's entry was evicted.
    #[inline(always)]
    fn collect_orphan(&self, header: &mut CollectHeader, key: T, now_ns: u64) {
        let Some(entry) = self.translation(key) else {
            return;
        };
        if !may_be_orphan(T::created_ns(&entry), now_ns) || self.is_tracked(key.flow(&entry)) {
            header.refreshed += 1;
            return;
        }
        if self.translations.remove(key).is_ok() {
            header.translations += 1;
        }
    }

    #[inline(always)]
    fn translation(&self, key: T) -> Option<T::Entry> {
        let entry = self.translations.get_ptr(key)?;
        // SAFETY: a value of that map.
        Some(unsafe { *entry })
    }

    #[inline(always)]
    fn is_tracked(&self, flow: T) -> bool {
        self.flows.get_ptr(flow).is_some()
            || self.flows.get_ptr(flow.in_direction(TUPLE_IN)).is_some()
    }
}
