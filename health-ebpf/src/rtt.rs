//! Stamps probes, matches replies, and maintains the rows of `HEALTH_RTT`.

use core::arch::asm;
use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xchg};
use core::ptr;

use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::inflight::{Fate, Inflight, fate, is_younger, same_probe, slot, ticket};
use health_common::probe::{ProbeId, ProbeMessage};
use health_common::rtt::{
    ACCOUNT_LOST, ACCOUNT_RESET, ACCOUNT_SAMPLE, ACCOUNTED, ALREADY_ANSWERED, ALREADY_LOST,
    AccountRequest, BUSY, HISTOGRAM_BUCKETS, PROTOCOL_ICMP, Reply, RttKey, RttRow, SOURCE_KERNEL,
    SOURCE_SOCKET, UNKNOWN_PEER, bucket,
};

use crate::bounds::forgotten;
use crate::clock::{now_ns, utc_now_ns};
use crate::maps::{HEALTH_CONFIG, HEALTH_INFLIGHT, HEALTH_RTT};
use crate::probe_flow;

/// Maximum number of attempts to take a row's lock. The lock is held for about ten nanoseconds, unless its holder is a
/// virtual CPU that is preempted meanwhile.
const LOCK_ATTEMPTS: u32 = 64;

/// Records that a probe to `peer` leaves on `ifindex`. Call this as late as possible: the program's other work is not
/// part of the round trip.
#[inline(always)]
pub fn stamp(local: Addr, peer: Addr, message: &ProbeMessage, ifindex: u32) {
    let ProbeMessage { echo, payload } = message;
    let id = payload.id(echo.sequence_be);
    let Some(slot) = HEALTH_INFLIGHT.get_ptr_mut(slot(&peer, id.sequence)) else {
        return;
    };
    let ticket = ticket(id, payload.path, Fate::InFlight);
    // SAFETY: a map value stays valid while the program runs. A slot that holds a probe's ticket also holds that
    // probe's fields: the agent gives a sequence number to only one probe at a time.
    unsafe {
        let last = ticket_of(slot);
        // A packet can cross two uplinks (a bridge and its port). An old probe that is sent again is not measured
        // again.
        if last == ticket || !same_probe(last, ticket) {
            (*slot).peer = peer;
            (*slot).local = local;
            (*slot).tag = payload.tag;
            (*slot).ifindex = ifindex;
            (*slot).rtt_ns = 0;
            (*slot).sent_ns = now_ns();
            set_ticket(slot, ticket);
        }
    }
}

/// Matches a reply from `peer`, which came in at `now_ns`, to its probe, and records the reply's contents. `false` if
/// it does not answer a waiting probe.
#[inline(always)]
pub fn matched(peer: Addr, message: &ProbeMessage, config: &DatapathConfig, now_ns: u64) -> bool {
    let ProbeMessage { echo, payload } = message;
    let id = payload.id(echo.sequence_be);
    if id.session != config.session {
        return false;
    }
    let Some(slot) = HEALTH_INFLIGHT.get_ptr_mut(slot(&peer, id.sequence)) else {
        return false;
    };
    let waiting = ticket(id, payload.path, Fate::InFlight);
    // SAFETY: as in `stamp`. The ticket is read before all other fields.
    let is_stamped = unsafe { ticket_of(slot) } == waiting;
    // SAFETY: as above.
    let probe = unsafe { &*slot };
    // The tag of a stamped probe was verified when it was stamped.
    if !is_stamped || probe.tag != payload.tag {
        unexpected(slot, peer, message, config);
        return false;
    }
    if probe.peer != peer {
        return false;
    }
    let rtt_ns = now_ns.saturating_sub(probe.sent_ns);
    let mut reply = payload.reply(rtt_ns);
    if payload.reports_arrival(&reply) {
        payload.add_delays(&mut reply, utc_now_ns(config));
    }
    // SAFETY: as above. Whichever CPU makes the first of these two transitions owns the slot until the second.
    unsafe {
        if !turn(slot, waiting, ticket(id, payload.path, Fate::Returning)) {
            unexpected(slot, peer, message, config);
            return false;
        }
        (*slot).rtt_ns = reply.rtt_ns;
        (*slot).remote_ns = reply.remote_ns;
        (*slot).forward_ns = reply.forward_ns;
        set_ticket(slot, ticket(id, payload.path, Fate::Returned));
    }
    true
}

/// Counts a reply that no probe is waiting for: a duplicate, a late one, or not one of ours.
#[inline(always)]
fn unexpected(slot: *mut Inflight, peer: Addr, message: &ProbeMessage, config: &DatapathConfig) {
    let ProbeMessage { echo, payload } = message;
    let id = payload.id(echo.sequence_be);
    let wanted = ticket(id, payload.path, Fate::InFlight);
    // SAFETY: as in `stamp`. The ticket is read before all other fields.
    let is_latest = same_probe(unsafe { ticket_of(slot) }, wanted);
    // SAFETY: as above.
    let probe = unsafe { &*slot };
    if is_latest && probe.peer != peer
        || !payload.is_genuine(config.probe_key, echo.id_be, echo.sequence_be)
    {
        return;
    }
    let Some(row) = row(peer, payload.path, PROTOCOL_ICMP) else {
        return;
    };
    // A busy row is left unchanged.
    let _ = locked(
        row,
        #[inline(always)]
        |row| {
            // SAFETY: as in `stamp`.
            let latest = unsafe { ticket_of(slot) };
            if !same_probe(latest, wanted) {
                // If a newer probe has the sequence number now, this one was counted long ago. Otherwise, this probe
                // was not stamped, because it left by another path, and the agent counts it.
                row.late += u64::from(is_younger(latest, wanted));
                return;
            }
            match fate(latest) {
                Some(Fate::Lost) => {
                    row.late += 1;
                    // SAFETY: as above; a lost probe's fate changes only under the lock of its row.
                    unsafe { set_ticket(slot, ticket(id, payload.path, Fate::AnsweredLate)) };
                }
                Some(Fate::InFlight) | None => {}
                Some(_) => row.duplicates += 1,
            }
        },
    );
}

/// Adds a round trip other than an echo probe's, measured at `now_ns`, to the row under `key`. `false` if there is no
/// such row, or if other writers keep it busy.
#[inline(always)]
pub fn record(key: &RttKey, rtt_ns: u64, now_ns: u64, source: u8) -> bool {
    let Some(row) = HEALTH_RTT.get_ptr_mut(key) else {
        return false;
    };
    let bucket = bounded(bucket(rtt_ns));
    let recorded = locked(
        row,
        #[inline(always)]
        |row| {
            if !row.record_in(bucket, rtt_ns, now_ns, 0, source) {
                halve_histogram(row);
            }
        },
    );
    recorded.is_some()
}

/// Performs the agent's request on a row; the result is the classifier's return value.
#[inline(always)]
pub fn account(request: &mut AccountRequest) -> u32 {
    let AccountRequest {
        key,
        operation,
        rtt_ns,
        probe: id,
        ..
    } = *request;
    let Some(row) = HEALTH_RTT.get_ptr_mut(key) else {
        return UNKNOWN_PEER;
    };
    let asked = match operation {
        ACCOUNT_LOST => Fate::Lost,
        ACCOUNT_SAMPLE => Fate::Answered,
        ACCOUNT_RESET => return locked(row, RttRow::clear).map_or(BUSY, |()| ACCOUNTED),
        _ => return UNKNOWN_PEER,
    };
    let Some(slot) = HEALTH_INFLIGHT.get_ptr_mut(slot(&key.peer, id.sequence)) else {
        return UNKNOWN_PEER;
    };
    let is_followed = id != ProbeId::default();
    let returned = ticket(id, key.path, Fate::Returned);
    // An atomic exchange, so that no field of the slot is read before its ticket.
    // SAFETY: as in `stamp`.
    let has_returned = is_followed && unsafe { turn(slot, returned, returned) };
    // SAFETY: as in `stamp`; once a probe has returned, only its fate still changes.
    let probe = unsafe { &*slot };
    let now_ns = now_ns();
    let (from, to, reply, at_ns, source) = if has_returned {
        let at_ns = probe.sent_ns + probe.rtt_ns;
        (
            returned,
            Fate::Answered,
            probe.reply(),
            at_ns,
            SOURCE_KERNEL,
        )
    } else {
        let waiting = ticket(id, key.path, Fate::InFlight);
        (waiting, asked, Reply::new(rtt_ns), now_ns, SOURCE_SOCKET)
    };
    let bucket = bounded(bucket(reply.rtt_ns));
    let result = locked(
        row,
        #[inline(always)]
        |row| {
            if is_followed {
                // SAFETY: as in `stamp`, and the row is locked.
                let decision = unsafe { decide(slot, key.peer, from, ticket(id, key.path, to)) };
                if decision != ACCOUNTED {
                    return decision;
                }
            }
            if to == Fate::Lost {
                row.lost += 1;
            } else if !row.record_reply(bucket, &reply, at_ns, id.sequence, source) {
                halve_histogram(row);
            }
            ACCOUNTED
        },
    );
    let result = result.unwrap_or(BUSY);
    if is_followed && result == ACCOUNTED && probe.sent_ns != 0 {
        // Not done when the probe leaves or returns, where it would cost as much as everything else.
        if let Some(config) = HEALTH_CONFIG.get(0) {
            probe_flow::exchanged(probe, to != Fate::Lost, config, now_ns);
        }
    }
    if has_returned && result == ACCOUNTED || result == ALREADY_ANSWERED {
        request.rtt_ns = probe.rtt_ns;
        return ALREADY_ANSWERED;
    }
    result
}

/// Gives the probe of the ticket `to` its final fate, unless it already has one. Returns [`BUSY`] while its reply is
/// being matched.
///
/// # Safety
///
/// `slot` must point to the slot of the probe's sequence number, and the lock of its row must be held.
#[inline(always)]
unsafe fn decide(slot: *mut Inflight, peer: Addr, from: u64, to: u64) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        let last = ticket_of(slot);
        if !same_probe(last, to) {
            // The probe did not cross an uplink.
            (*slot).peer = peer;
            (*slot).sent_ns = 0;
            (*slot).rtt_ns = 0;
            (*slot).tag = 0;
            set_ticket(slot, to);
            return ACCOUNTED;
        }
        match fate(last) {
            Some(Fate::Answered | Fate::AnsweredLate) => ALREADY_ANSWERED,
            Some(Fate::Lost) => ALREADY_LOST,
            _ if last == from && turn(slot, from, to) => ACCOUNTED,
            _ => BUSY,
        }
    }
}

/// Changes a row under its lock. `None` if the row stayed locked: nothing was changed.
#[inline(always)]
fn locked<T>(row: *mut RttRow, change: impl FnOnce(&mut RttRow) -> T) -> Option<T> {
    // SAFETY: a map value stays valid while the program runs, and other writers wait for the lock; readers detect a
    // copy that was taken during the change.
    unsafe {
        let locked = match lock(row) {
            0 => lock_contended(row),
            locked => locked,
        };
        if locked == 0 {
            return None;
        }
        let result = change(&mut *row);
        publish(&raw mut (*row).version, locked as u32);
        Some(result)
    }
}

/// Publishes a completed change: the compiler and all CPUs order this write after the change.
///
/// # Safety
///
/// `word` must point into a map value.
#[inline(always)]
unsafe fn publish<T: Copy>(word: *mut T, value: T) {
    if cfg!(bpf_target_arch = "x86_64") {
        // x86 stores become visible in program order, without a fence.
        // SAFETY: no instruction at all, but the compiler completes all stores before it. The caller's promise.
        unsafe {
            asm!("", options(nostack, preserves_flags));
            ptr::write_volatile(word, value);
        }
    } else {
        // SAFETY: as above. An atomic exchange is how BPF orders stores on every CPU.
        unsafe { atomic_xchg::<T, { AtomicOrdering::SeqCst }>(word, value) };
    }
}

/// Tries once to lock a row. Returns the new value of the lock, or 0 if another CPU holds it.
///
/// # Safety
///
/// `row` must point to a value of `HEALTH_RTT`.
#[inline(always)]
unsafe fn lock(row: *mut RttRow) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        let lock = &raw mut (*row).lock;
        let last = ptr::read_volatile(lock);
        if ptr::read_volatile(&raw const (*row).version) == last as u32
            && exchange(lock, last, last + 1)
        {
            last + 1
        } else {
            0
        }
    }
}

/// Like [`lock`], but retries.
///
/// Kept as a separate BPF function, like the one below, so that the verifier checks its loop once rather than once per
/// program state that reaches it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn lock_contended(row: *mut RttRow) -> u64 {
    // The verifier does not trust the arguments of such a function.
    if row.is_null() {
        return 0;
    }
    let mut attempts = 0;
    while attempts < LOCK_ATTEMPTS {
        // SAFETY: not null, so a row: only `locked` calls this.
        let locked = unsafe { lock(row) };
        if locked != 0 {
            return locked;
        }
        attempts += 1;
    }
    0
}

/// Makes space in the histogram of a row, which must be locked. The result is meaningless, but the verifier requires
/// one.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn halve_histogram(row: *mut RttRow) -> u32 {
    if !row.is_null() {
        // SAFETY: not null, so a row.
        unsafe { (*row).halve_histogram() };
    }
    0
}

/// Writes a word, unless another CPU has changed it since `last` was read. Ordered with all accesses before and after.
///
/// # Safety
///
/// `word` must point into a map value.
#[inline(always)]
unsafe fn exchange(word: *mut u64, last: u64, next: u64) -> bool {
    // SAFETY: the caller's promise. See `conntrack::add` for why this is an intrinsic.
    let (seen, _) = unsafe {
        atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
            word, last, next,
        )
    };
    seen == last
}

/// Changes a probe's fate, unless it has changed in the meantime.
///
/// # Safety
///
/// `slot` must point to a value of `HEALTH_INFLIGHT`.
#[inline(always)]
unsafe fn turn(slot: *mut Inflight, from: u64, to: u64) -> bool {
    // SAFETY: the caller's promise.
    unsafe { exchange(&raw mut (*slot).ticket, from, to) }
}

/// # Safety
///
/// `slot` must point to a value of `HEALTH_INFLIGHT`.
#[inline(always)]
unsafe fn ticket_of(slot: *const Inflight) -> u64 {
    // SAFETY: the caller's promise. Volatile, so that the ticket is read in one piece each time; also, the compiler
    // moves no read of another field before this one.
    unsafe {
        let ticket = ptr::read_volatile(&raw const (*slot).ticket);
        asm!("", options(nostack, preserves_flags));
        ticket
    }
}

/// # Safety
///
/// As for [`ticket_of`].
#[inline(always)]
unsafe fn set_ticket(slot: *mut Inflight, ticket: u64) {
    // SAFETY: the caller's promise.
    unsafe { publish(&raw mut (*slot).ticket, ticket) }
}

#[inline(always)]
fn row(peer: Addr, path: u8, protocol: u8) -> Option<*mut RttRow> {
    HEALTH_RTT.get_ptr_mut(RttKey {
        peer,
        path,
        protocol,
        pad: 0,
    })
}

/// Limits a bucket to bounds that the verifier sees. The bounds are set before the value is spilled to the stack: if a
/// copy is compared later, Linux 6.1 learns nothing about the spilled value.
#[inline(always)]
fn bounded(bucket: usize) -> usize {
    forgotten(forgotten(bucket).min(HISTOGRAM_BUCKETS - 1))
}
