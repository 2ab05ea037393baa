//! Stamping probes, matching replies, and keeping the rows of `HEALTH_RTT`.

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use health_common::addr::Addr;
use health_common::echo::EchoHeader;
use health_common::probe::ProbePayload;
use health_common::rtt::{
    ACCOUNT_CONNECTION, ACCOUNT_LOST, ACCOUNT_SAMPLE, ACCOUNTED, ALREADY_ANSWERED, AccountRequest,
    Inflight, InflightKey, PROTOCOL_ICMP, RttKey, RttRow, SOURCE_KERNEL, SOURCE_SOCKET,
    UNKNOWN_PEER,
};

use crate::maps::{HEALTH_INFLIGHT, HEALTH_RTT};
use crate::tcp;

/// Notes when a probe to `peer` left. Called last, so that the stamp is as late as it can be.
#[inline(always)]
pub fn stamp(peer: Addr, echo: &EchoHeader, payload: &ProbePayload) {
    let key = inflight_key(peer, echo);
    // SAFETY: a helper without arguments.
    let sent_ns = unsafe { bpf_ktime_get_ns() };
    let probe = Inflight {
        sent_ns,
        path: payload.path,
        pad: [0; 7],
    };
    // An LRU map takes new entries for as long as there is memory; without, the agent falls back to
    // its socket's stamps.
    let _ = HEALTH_INFLIGHT.insert(key, probe, u64::from(BPF_ANY));
}

/// Matches a reply of `peer` that came at `now_ns`. `false` when no such probe is in flight.
#[inline(always)]
pub fn matched(peer: Addr, echo: &EchoHeader, path: u8, now_ns: u64) -> bool {
    let key = inflight_key(peer, echo);
    // SAFETY: read once, before the entry is removed.
    let probe = unsafe { HEALTH_INFLIGHT.get(key) }.copied();
    if let Some(probe) = probe
        && HEALTH_INFLIGHT.remove(key).is_ok()
    {
        if let Some(row) = row(peer, probe.path, PROTOCOL_ICMP) {
            let rtt_ns = now_ns.saturating_sub(probe.sent_ns);
            row.record(
                rtt_ns,
                now_ns,
                u16::from_be(echo.sequence_be),
                SOURCE_KERNEL,
            );
        }
        return true;
    }
    if let Some(row) = row(peer, path, PROTOCOL_ICMP) {
        row.late += 1;
    }
    false
}

/// Does what the agent asks of a row; the result is the classifier's return value.
#[inline(always)]
pub fn account(request: &mut AccountRequest) -> u32 {
    let key = request.key;
    let Some(row) = row(key.peer, key.path, key.protocol) else {
        return UNKNOWN_PEER;
    };
    match request.operation {
        ACCOUNT_LOST => {
            let inflight = InflightKey {
                peer: key.peer,
                id_be: request.id_be,
                sequence_be: request.sequence_be,
            };
            // Whoever removes the entry decides: here a loss, in `matched` an answer.
            if HEALTH_INFLIGHT.remove(inflight).is_err() && request.unstamped == 0 {
                return ALREADY_ANSWERED;
            }
            row.lost += 1;
            ACCOUNTED
        }
        ACCOUNT_SAMPLE => {
            // SAFETY: a helper without arguments.
            let now_ns = unsafe { bpf_ktime_get_ns() };
            row.record(
                request.rtt_ns,
                now_ns,
                u16::from_be(request.sequence_be),
                SOURCE_SOCKET,
            );
            ACCOUNTED
        }
        ACCOUNT_CONNECTION => {
            request.source = u32::from(SOURCE_SOCKET);
            tcp::take_handshake(request);
            // SAFETY: a helper without arguments.
            let now_ns = unsafe { bpf_ktime_get_ns() };
            row.record(request.rtt_ns, now_ns, 0, request.source as u8);
            ACCOUNTED
        }
        _ => UNKNOWN_PEER,
    }
}

#[inline(always)]
fn inflight_key(peer: Addr, echo: &EchoHeader) -> InflightKey {
    InflightKey {
        peer,
        id_be: echo.id_be,
        sequence_be: echo.sequence_be,
    }
}

#[inline(always)]
pub(crate) fn row(peer: Addr, path: u8, protocol: u8) -> Option<&'static mut RttRow> {
    let key = RttKey {
        peer,
        path,
        protocol,
        pad: 0,
    };
    // SAFETY: a map value stays valid memory for the program's run. Probes of one path are seconds
    // apart, so two CPUs do not meet in one row.
    HEALTH_RTT.get_ptr_mut(key).map(|row| unsafe { &mut *row })
}
