//! Stamping probes, matching replies, and keeping the rows of `HEALTH_RTT`.

use core::ptr;

use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::{bpf_spin_lock, bpf_spin_unlock};
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::inflight::{Fate, Inflight, fate, is_younger, same_probe, slot, ticket};
use health_common::metrics::Reason;
use health_common::probe::{Path, ProbeId, ProbeMessage};
use health_common::rtt::{
    ACCOUNT_LOST, ACCOUNT_SAMPLE, ACCOUNTED, ALREADY_ANSWERED, ALREADY_LOST, AccountRequest,
    PROTOCOL_ICMP, RttKey, RttRow, SOURCE_SOCKET, UNKNOWN_PEER,
};

use crate::conntrack;
use crate::maps::{HEALTH_INFLIGHT, HEALTH_RTT};
use crate::turnround::utc_now_ns;

/// Notes when a probe to `peer` left. Called last, so that the stamp is as late as it can be.
#[inline(always)]
pub fn stamp(peer: Addr, message: &ProbeMessage) {
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
        if same_probe(last, ticket) && last != ticket {
            return;
        }
        (*slot).peer = peer;
        (*slot).tag = payload.tag;
        (*slot).rtt_ns = 0;
        (*slot).sent_ns = bpf_ktime_get_ns();
        set_ticket(slot, ticket);
    }
}

/// Matches a reply of `peer` that came at `now_ns`.
#[inline(always)]
pub fn matched(peer: Addr, message: &ProbeMessage, config: &DatapathConfig, now_ns: u64) -> Reason {
    let ProbeMessage { echo, payload } = message;
    let id = payload.id(echo.sequence_be);
    if id.session != config.session {
        return Reason::ProbeUnmatched;
    }
    let Some(slot) = HEALTH_INFLIGHT.get_ptr_mut(slot(&peer, id.sequence)) else {
        return Reason::ProbeUnmatched;
    };
    let wanted = ticket(id, payload.path, Fate::InFlight);
    // SAFETY: as in `stamp`.
    let probe = unsafe { &*slot };
    // SAFETY: as above.
    let is_latest = same_probe(unsafe { ticket_of(slot) }, wanted);
    // The tag of a probe that was stamped stood the test then.
    let is_genuine = is_latest && probe.tag == payload.tag
        || payload.is_genuine(config.probe_key, echo.id_be, echo.sequence_be);
    if !is_genuine || is_latest && probe.peer != peer {
        return Reason::ProbeUnmatched;
    }
    let rtt_ns = now_ns.saturating_sub(probe.sent_ns);
    let mut reply = payload.reply(rtt_ns);
    if payload.tells_arrival(&reply) {
        payload.add_delays(&mut reply, utc_now_ns(config));
    }
    let Some(row) = row(peer, payload.path, PROTOCOL_ICMP) else {
        return Reason::ProbeUnmatched;
    };
    locked(row, |row| {
        // SAFETY: as in `stamp`; fates change under the lock of the row alone.
        let latest = unsafe { ticket_of(slot) };
        let fate = if same_probe(latest, wanted) {
            fate(latest)
        } else {
            // Its number has gone to a younger probe: it was counted long ago.
            if is_younger(latest, wanted) {
                row.late += 1;
            }
            None
        };
        match fate {
            Some(Fate::InFlight) => {
                row.record_reply(&reply, now_ns, id.sequence);
                // SAFETY: as above.
                unsafe {
                    (*slot).rtt_ns = rtt_ns;
                    set_ticket(slot, ticket(id, payload.path, Fate::Answered));
                }
                return Reason::ProbeMatched;
            }
            Some(Fate::Answered | Fate::AnsweredLate) => row.duplicates += 1,
            Some(Fate::Lost) => {
                row.late += 1;
                // SAFETY: as above.
                unsafe { set_ticket(slot, ticket(id, payload.path, Fate::AnsweredLate)) };
            }
            // Not stamped as it left, by another way: the agent counts it.
            None => {}
        }
        Reason::ProbeUnmatched
    })
}

/// Counts a probe of `peer`'s agent that arrived here.
#[inline(always)]
pub fn received(peer: Addr, path: u8) {
    let Some(row) = row(peer, Path::Host as u8, PROTOCOL_ICMP) else {
        return;
    };
    // SAFETY: a map value stays valid memory for the program's run. Nothing else of the row goes with
    // these counters, so an atomic addition does without its lock.
    unsafe {
        if path == Path::Host as u8 {
            conntrack::add(&raw mut (*row).received_host, 1);
        } else if path == Path::Endpoint as u8 {
            conntrack::add(&raw mut (*row).received_endpoint, 1);
        }
    }
}

/// Adds a round trip of another kind than an echo probe's, measured at `now_ns`, to the row under `key`.
/// `false` when there is none.
#[inline(always)]
pub fn record(key: &RttKey, rtt_ns: u64, now_ns: u64, source: u8) -> bool {
    let Some(row) = HEALTH_RTT.get_ptr_mut(key) else {
        return false;
    };
    locked(row, |row| row.record(rtt_ns, now_ns, 0, source));
    true
}

/// Does what the agent asks of a row; the result is the classifier's return value.
#[inline(always)]
pub fn account(request: &AccountRequest) -> u32 {
    let AccountRequest {
        key,
        operation,
        rtt_ns,
        probe,
        ..
    } = *request;
    let Some(row) = HEALTH_RTT.get_ptr_mut(&key) else {
        return UNKNOWN_PEER;
    };
    let fate = match operation {
        ACCOUNT_LOST => Fate::Lost,
        ACCOUNT_SAMPLE => Fate::Answered,
        _ => return UNKNOWN_PEER,
    };
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let Some(slot) = HEALTH_INFLIGHT.get_ptr_mut(slot(&key.peer, probe.sequence)) else {
        return UNKNOWN_PEER;
    };
    locked(row, |row| {
        if probe != ProbeId::default() {
            // SAFETY: as in `stamp`.
            match unsafe { decide(slot, &key, probe, fate) } {
                ACCOUNTED => {}
                refused => return refused,
            }
        }
        match fate {
            Fate::Lost => row.lost += 1,
            _ => row.record(rtt_ns, now_ns, probe.sequence, SOURCE_SOCKET),
        }
        ACCOUNTED
    })
}

/// Sets a probe's fate unless it has one.
///
/// # Safety
///
/// `slot` must point to the slot of the probe's number, and the lock of the row under `key` be held.
#[inline(always)]
unsafe fn decide(slot: *mut Inflight, key: &RttKey, probe: ProbeId, to: Fate) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        let last = ticket_of(slot);
        let ticket = ticket(probe, key.path, to);
        if !same_probe(last, ticket) {
            // It crossed no uplink.
            (*slot).peer = key.peer;
            (*slot).sent_ns = 0;
            (*slot).rtt_ns = 0;
            (*slot).tag = 0;
        } else {
            match fate(last) {
                Some(Fate::Answered | Fate::AnsweredLate) => return ALREADY_ANSWERED,
                Some(Fate::Lost) => return ALREADY_LOST,
                Some(Fate::InFlight) | None => {}
            }
        }
        set_ticket(slot, ticket);
    }
    ACCOUNTED
}

/// Changes a row under its lock. In between, the kernel allows no calls.
#[inline(always)]
fn locked<T>(row: *mut RttRow, change: impl FnOnce(&mut RttRow) -> T) -> T {
    // SAFETY: a map value stays valid memory for the program's run, and whoever else writes or copies
    // it holds its lock.
    unsafe {
        let lock = (&raw mut (*row).lock).cast();
        bpf_spin_lock(lock);
        let result = change(&mut *row);
        bpf_spin_unlock(lock);
        result
    }
}

/// # Safety
///
/// `slot` must point to a value of `HEALTH_INFLIGHT`.
#[inline(always)]
unsafe fn ticket_of(slot: *const Inflight) -> u64 {
    // SAFETY: the caller's promise. Volatile: in one piece, and anew each time.
    unsafe { ptr::read_volatile(&raw const (*slot).ticket) }
}

/// # Safety
///
/// As for [`ticket_of`].
#[inline(always)]
unsafe fn set_ticket(slot: *mut Inflight, ticket: u64) {
    // SAFETY: the caller's promise. Volatile: in one piece, and last.
    unsafe { ptr::write_volatile(&raw mut (*slot).ticket, ticket) }
}

#[inline(always)]
fn row(peer: Addr, path: u8, protocol: u8) -> Option<*mut RttRow> {
    HEALTH_RTT.get_ptr_mut(&RttKey {
        peer,
        path,
        protocol,
        pad: 0,
    })
}
