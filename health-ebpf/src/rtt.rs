//! Stamping probes, matching replies, and keeping the rows of `HEALTH_RTT`.

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

/// How often the lock of a row is tried. It is held for some ten nanoseconds, but by a virtual CPU that
/// may have been taken off in the midst.
const LOCK_ATTEMPTS: u32 = 64;

/// Notes that a probe to `peer` leaves by `ifindex`. To be called as late as can be: what the program does
/// besides is no part of the round trip.
#[inline(always)]
pub fn stamp(local: Addr, peer: Addr, message: &ProbeMessage, ifindex: u32) {
    let ProbeMessage { echo, payload } = message;
    let id = payload.id(echo.sequence_be);
    let Some(slot) = HEALTH_INFLIGHT.get_ptr_mut(slot(&peer, id.sequence)) else {
        return;
    };
    let ticket = ticket(id, payload.path, Fate::InFlight);
    // SAFETY: a map value stays valid memory for the program's run. The fields are of one probe for
    // all who find its ticket: the agent gives a sequence number to one probe at a time.
    unsafe {
        let last = ticket_of(slot);
        // A packet can cross two uplinks, a bridge and its port; an old one sent once more is not
        // measured again.
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

/// Matches a reply of `peer` that came at `now_ns` to its probe, and notes what it tells. `false` where it
/// is no answer to a probe that waits for one.
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
    // The tag of a probe that was stamped was verified then.
    if !is_stamped || probe.tag != payload.tag {
        unexpected(slot, peer, message, config);
        return false;
    }
    if probe.peer != peer {
        return false;
    }
    let rtt_ns = now_ns.saturating_sub(probe.sent_ns);
    let mut reply = payload.reply(rtt_ns);
    if payload.tells_arrival(&reply) {
        payload.add_delays(&mut reply, utc_now_ns(config));
    }
    // SAFETY: as above. Who makes the first of these two turns is alone with the slot until the second.
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

/// Counts a reply to a probe that waits for none: one more, a late one, or none of ours at all.
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
    // Of a busy row nothing is changed.
    let _ = locked(
        row,
        #[inline(always)]
        |row| {
            // SAFETY: as in `stamp`.
            let latest = unsafe { ticket_of(slot) };
            if !same_probe(latest, wanted) {
                // Its number has gone to a younger probe: it was counted long ago. Else it was not stamped
                // as it left, by another way: the agent counts it.
                row.late += u64::from(is_younger(latest, wanted));
                return;
            }
            match fate(latest) {
                Some(Fate::Lost) => {
                    row.late += 1;
                    // SAFETY: as above; a lost probe's fate changes under the lock of its row alone.
                    unsafe { set_ticket(slot, ticket(id, payload.path, Fate::AnsweredLate)) };
                }
                Some(Fate::InFlight) | None => {}
                Some(_) => row.duplicates += 1,
            }
        },
    );
}

/// Adds a round trip of another kind than an echo probe's, measured at `now_ns`, to the row under `key`.
/// `false` when there is none, or others write it all the time.
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

/// Does what the agent asks of a row; the result is the classifier's return value.
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
    // An exchange, so that nothing of the slot is read before its ticket.
    // SAFETY: as in `stamp`.
    let has_returned = is_followed && unsafe { turn(slot, returned, returned) };
    // SAFETY: as in `stamp`; of a probe that has returned, nothing but the fate changes any more.
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
        // Not done where it leaves and returns: it would cost there as much as all the rest.
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

/// Gives the probe of the ticket `to` its last fate, unless it has one. [`BUSY`] while its reply is being
/// matched.
///
/// # Safety
///
/// `slot` must point to the slot of the probe's number, and the lock of its row be held.
#[inline(always)]
unsafe fn decide(slot: *mut Inflight, peer: Addr, from: u64, to: u64) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        let last = ticket_of(slot);
        if !same_probe(last, to) {
            // It crossed no uplink.
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

/// Changes a row while nobody else does. `None` when it stayed locked: nothing was changed.
#[inline(always)]
fn locked<T>(row: *mut RttRow, change: impl FnOnce(&mut RttRow) -> T) -> Option<T> {
    // SAFETY: a map value stays valid memory for the program's run, and other writers wait for the
    // lock; readers tell a copy that was taken in between.
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

/// Writes what tells others that a change is done: after the change, for the compiler and for all CPUs.
///
/// # Safety
///
/// `word` must point into a map value.
#[inline(always)]
unsafe fn publish<T: Copy>(word: *mut T, value: T) {
    if cfg!(bpf_target_arch = "x86_64") {
        // Stores are seen in the order in which x86 makes them, without an instruction that waits for them.
        // SAFETY: no instruction at all, before which the compiler makes all stores. The caller's promise.
        unsafe {
            asm!("", options(nostack, preserves_flags));
            ptr::write_volatile(word, value);
        }
    } else {
        // SAFETY: as above. An exchange is what BPF has to put stores in order on every CPU.
        unsafe { atomic_xchg::<T, { AtomicOrdering::SeqCst }>(word, value) };
    }
}

/// Tries once to lock a row. Returns what the lock holds then, or 0 if somebody else has it.
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

/// Tries again and again to lock a row; as [`lock`].
///
/// A function of its own in the kernel too, as is the one below: the verifier looks at its loop once, and
/// not once for each state of a program that leads there.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn lock_contended(row: *mut RttRow) -> u64 {
    // The verifier takes nothing for granted that such a function is given.
    if row.is_null() {
        return 0;
    }
    let mut attempts = 0;
    while attempts < LOCK_ATTEMPTS {
        // SAFETY: not null, so a row: this is called by `locked` alone.
        let locked = unsafe { lock(row) };
        if locked != 0 {
            return locked;
        }
        attempts += 1;
    }
    0
}

/// Makes room in a histogram, which must be locked. The result says nothing: the verifier wants one.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn halve_histogram(row: *mut RttRow) -> u32 {
    if !row.is_null() {
        // SAFETY: not null, so a row.
        unsafe { (*row).halve_histogram() };
    }
    0
}

/// Writes a word, unless another CPU has changed it from what it was last. In order with all before and
/// after.
///
/// # Safety
///
/// `word` must point into a map value.
#[inline(always)]
unsafe fn exchange(word: *mut u64, last: u64, next: u64) -> bool {
    // SAFETY: the caller's promise. For why an intrinsic see `conntrack::add`.
    let (seen, _) = unsafe {
        atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
            word, last, next,
        )
    };
    seen == last
}

/// Gives a probe another fate, unless it has got one meanwhile.
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
    // SAFETY: the caller's promise. Volatile, to read it in one piece each time; and the compiler moves no read of
    // another field before it.
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

/// A bucket in bounds that the verifier sees. They are there before it is put on the stack: of a copy that is compared
/// later, Linux 6.1 learns nothing about the one there.
#[inline(always)]
fn bounded(bucket: usize) -> usize {
    forgotten(forgotten(bucket).min(HISTOGRAM_BUCKETS - 1))
}
