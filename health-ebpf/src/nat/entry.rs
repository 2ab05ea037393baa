//! Translations, which have two map entries each, and the flows that they belong to.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_or};

use aya_ebpf::bindings::BPF_NOEXIST;
use health_common::collect::may_be_orphan;
use health_common::ct::{CT_MASQUERADED, CT_STATE_OFFSET, CtEntry, CtState};
use health_common::nat::{NAT_CREATED_OFFSET, NAT_HOST_LOCAL};

use crate::clock::{coarse_now_ns, coarse_now_secs};
use crate::ip_version::Version;
use crate::table::EEXIST;

/// The entry under a key.
#[inline(always)]
pub(crate) fn translation<T: Version>(key: &T) -> Option<T::Translation> {
    let entry = T::translations().get_ptr(key)?;
    // SAFETY: a value of that map.
    Some(unsafe { *entry })
}

/// The translation of an outbound flow. If its entry for replies was evicted, recreates that entry. An LRU map does not
/// keep one entry without the other for long, since both are looked up.
#[inline(always)]
pub(crate) fn whole<T: Version>(flow: &T) -> Option<T::Translation> {
    let out = translation(flow)?;
    let key = flow.reply_key(&out);
    match translation(&key) {
        Some(back) if T::translated(&back) == flow.source() => return Some(out),
        Some(_) => {}
        None => {
            let back = T::translation(flow.source(), T::flags(&out), T::created_ns(&out));
            // If there is no space, replies are lost until there is.
            let made = T::translations().insert(&key, &back, u64::from(BPF_NOEXIST));
            if made != Err(EEXIST) {
                return Some(out);
            }
        }
    }
    // Its port belongs to another flow by now.
    let _ = T::translations().remove(flow);
    None
}

/// Removes both entries of an outbound flow's translation. Returns the number of entries removed.
#[inline(always)]
pub(crate) fn forget<T: Version>(flow: &T) -> u32 {
    let Some(out) = translation(flow) else {
        return 0;
    };
    let mut removed = 0;
    let back_key = flow.reply_key(&out);
    if translation(&back_key).is_some_and(|back| T::translated(&back) == flow.source())
        && T::translations().remove(&back_key).is_ok()
    {
        removed += 1;
    }
    if T::translations().remove(flow).is_ok() {
        removed += 1;
    }
    removed
}

/// Removes the translation whose `IN` entry is `back` if its flow has expired but was not collected yet.
/// `false` if the flow has not expired, or if another CPU removes the translation.
#[inline(always)]
pub(super) fn released<T: Version>(key: &T, back: &T::Translation) -> bool {
    let flow = key.flow(back);
    let (created_ns, now_ns) = (T::created_ns(back), coarse_now_ns());
    let is_over = has_expired(&flow).unwrap_or_else(|| may_be_orphan(created_ns, now_ns));
    is_over && removed(key, &flow, created_ns, now_ns)
}

/// Whether the translation whose `IN` entry is `back` may lose its port when ports run out, because its flow was never
/// answered. If conntrack does not know the flow, [`released`] decides.
#[inline(always)]
pub(super) fn is_unanswered<T: Version>(key: &T, back: &T::Translation) -> bool {
    let flow = key.flow(back);
    let tracked = T::flows().get_ptr(&flow);
    T::flags(back) & NAT_HOST_LOCAL == 0
        // SAFETY: a value of that map.
        && tracked.is_some_and(|entry| unsafe { (*entry).is_attempt(flow.protocol()) })
}

/// Like [`released`], for a flow that was never answered.
#[inline(always)]
pub(super) fn taken_back<T: Version>(key: &T, back: &T::Translation) -> bool {
    is_unanswered(key, back) && removed(key, &key.flow(back), T::created_ns(back), coarse_now_ns())
}

/// Removes both entries of a translation. `false` if another CPU does.
#[inline(always)]
fn removed<T: Version>(key: &T, flow: &T, created_ns: u64, now_ns: u64) -> bool {
    let Some(entry) = T::translations().get_ptr_mut(key) else {
        return false;
    };
    // SAFETY: an aligned word of a map value. See `conntrack::add` for why this is an intrinsic. Only the CPU that
    // changes the word removes the entries: otherwise two CPUs could, and the second would remove entries that the
    // first has created since.
    let (seen_ns, _) = unsafe {
        atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
            entry.cast::<u8>().add(NAT_CREATED_OFFSET).cast::<u64>(),
            created_ns,
            now_ns,
        )
    };
    if seen_ns != created_ns {
        return false;
    }
    let _ = T::translations().remove(flow);
    T::translations().remove(key).is_ok()
}

/// Whether a flow has expired in conntrack; `None` if it is not there.
#[inline(always)]
fn has_expired<T: Version>(flow: &T) -> Option<bool> {
    let entry = T::flows().get_ptr(flow)?;
    // SAFETY: a value of that map.
    Some(unsafe { (*entry).has_expired(coarse_now_secs()) })
}

/// Records in conntrack that a flow's source is translated.
///
/// # Safety
///
/// `tracked` must point to a value of a conntrack map.
#[inline(always)]
pub(super) unsafe fn mark_masqueraded<T: Version>(tracked: *mut CtEntry, entry: &T::Translation) {
    let is_host_local = T::flags(entry) & NAT_HOST_LOCAL != 0;
    // SAFETY: the caller's promise.
    if is_host_local || unsafe { (*tracked).flags } & CT_MASQUERADED != 0 {
        return;
    }
    let bits = CtState::default().with(CT_MASQUERADED).word();
    // SAFETY: an aligned word in the entry, in which bits are set. See `conntrack::add` for why this is an intrinsic.
    unsafe {
        let word = tracked.cast::<u8>().add(CT_STATE_OFFSET).cast::<u32>();
        atomic_or::<u32, u32, { AtomicOrdering::Relaxed }>(word, bits);
    }
}
