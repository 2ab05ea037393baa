//! This agent's probes, by IP version and sequence number: `HEALTH_INFLIGHT`.
//!
//! The map is an array, so a probe in flight is never evicted, and each probe is counted exactly once: as a sample or
//! as lost. The data of its reply stays in the slot until the agent receives the reply or gives up on the probe; only
//! then does the agent have the data recorded in the probe's row. So a packet waits at most for its slot, never for a
//! row.

use crate::addr::Addr;
use crate::probe::ProbeId;
use crate::rtt::{Reply, UNKNOWN_DELAY};

/// Number of slots: one for each sequence number of each IP version.
pub const INFLIGHT_SLOTS: u32 = 2 << 16;

/// The state of a probe.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Still in flight: no reply has arrived yet.
    InFlight = 1,
    /// Its reply is counted as a sample in its row.
    Answered = 2,
    /// The agent gave up on it.
    Lost = 3,
    /// Its reply arrived after the agent had given up on it.
    AnsweredLate = 4,
    /// Its reply has arrived and is being written into the slot.
    Returning = 5,
    /// Its reply is in the slot, but not yet in a row.
    Returned = 6,
}

/// Value of `HEALTH_INFLIGHT`: the latest probe with the slot's sequence number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inflight {
    /// The probed address.
    pub peer: Addr,
    /// The probe's source address, if it crossed an uplink.
    pub local: Addr,
    /// When the probe left: `CLOCK_MONOTONIC`, in nanoseconds; 0 if it did not cross an uplink.
    pub sent_ns: u64,
    /// Round-trip time in nanoseconds if the reply arrived over an uplink; else 0.
    pub rtt_ns: u64,
    /// [`Reply::remote_ns`] of that reply.
    pub remote_ns: u64,
    /// [`Reply::forward_ns`] of that reply.
    pub forward_ns: i64,
    /// [`crate::probe::ProbePayload::tag`] of a probe that crossed an uplink.
    pub tag: u64,
    /// Ifindex of the uplink on which it left.
    pub ifindex: u32,
    /// Explicit padding, zero.
    pub pad: u32,
    /// Probe id and [`Fate`] in one word, written last: see [`ticket`]. 0 if no probe has used this sequence number
    /// yet.
    pub ticket: u64,
}

crate::map_types!(Inflight = 88);

/// Index of a probe's slot.
#[inline(always)]
pub const fn slot(peer: &Addr, sequence: u16) -> u32 {
    ((!peer.is_v4()) as u32) << 16 | sequence as u32
}

/// Combines the id of the probe in a slot (without the sequence number, which the slot implies), its path and its fate.
#[inline(always)]
pub const fn ticket(id: ProbeId, path: u8, fate: Fate) -> u64 {
    (id.session as u64) << 32 | (id.round as u64) << 16 | (path as u64) << 8 | fate as u64
}

/// Whether two tickets belong to the same probe, regardless of fate.
#[inline(always)]
pub const fn same_probe(ticket: u64, other: u64) -> bool {
    (ticket ^ other) >> 8 == 0
}

/// Whether a ticket belongs to a probe with the same sequence number that was sent later in the same session.
#[inline(always)]
pub const fn is_younger(ticket: u64, than: u64) -> bool {
    let rounds = ((ticket >> 16) as u16).wrapping_sub((than >> 16) as u16);
    (ticket ^ than) >> 32 == 0 && rounds != 0 && rounds < 1 << 15
}

/// The fate in a ticket; `None` if no probe has used this sequence number yet.
#[inline(always)]
pub const fn fate(ticket: u64) -> Option<Fate> {
    match ticket as u8 {
        1 => Some(Fate::InFlight),
        2 => Some(Fate::Answered),
        3 => Some(Fate::Lost),
        4 => Some(Fate::AnsweredLate),
        5 => Some(Fate::Returning),
        6 => Some(Fate::Returned),
        _ => None,
    }
}

impl Inflight {
    /// The probe's id, given the slot's index.
    pub const fn id(&self, slot: u32) -> ProbeId {
        ProbeId {
            session: (self.ticket >> 32) as u32,
            round: (self.ticket >> 16) as u16,
            sequence: slot as u16,
        }
    }

    /// [`crate::probe::Path`] as a byte.
    pub const fn path(&self) -> u8 {
        (self.ticket >> 8) as u8
    }

    /// The reply to a probe whose fate is [`Fate::Returned`].
    #[inline(always)]
    pub const fn reply(&self) -> Reply {
        Reply {
            rtt_ns: self.rtt_ns,
            remote_ns: self.remote_ns,
            forward_ns: self.forward_ns,
            // The rest of the round trip, without the way there and the time in the peer's host.
            back_ns: match self.forward_ns {
                UNKNOWN_DELAY => UNKNOWN_DELAY,
                forward_ns => (self.rtt_ns - self.remote_ns).wrapping_sub(forward_ns as u64) as i64,
            },
        }
    }

    /// Whether the probe is not yet counted, as a sample or as lost.
    pub const fn is_open(&self) -> bool {
        matches!(
            self.fate(),
            Some(Fate::InFlight | Fate::Returning | Fate::Returned)
        )
    }

    /// The probe's fate; `None` if no probe has used this sequence number yet.
    #[inline(always)]
    pub const fn fate(&self) -> Option<Fate> {
        fate(self.ticket)
    }
}

#[cfg(test)]
mod tests {
    use core::net::{Ipv4Addr, Ipv6Addr};

    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_slot_identifies_its_probe(session: u32, round: u16, sequence: u16, path in 1_u8..3, v6: bool) {
            let peer = if v6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
            let id = ProbeId { session, round, sequence };
            let slot = slot(&peer, sequence);
            prop_assert!(slot < INFLIGHT_SLOTS && (slot > 0xffff) == v6);
            for fate in [
                Fate::InFlight,
                Fate::Answered,
                Fate::Lost,
                Fate::AnsweredLate,
                Fate::Returning,
                Fate::Returned,
            ] {
                let probe = Inflight { ticket: ticket(id, path, fate), ..Inflight::default() };
                prop_assert_eq!((probe.id(slot), probe.path(), probe.fate()), (id, path, Some(fate)));
                prop_assert!(same_probe(probe.ticket, ticket(id, path, Fate::InFlight)));
            }
            let next = ProbeId { round: round.wrapping_add(1), ..id };
            let [old, young] = [id, next].map(|id| ticket(id, path, Fate::Lost));
            prop_assert!(!same_probe(old, young));
            prop_assert!(is_younger(young, old) && !is_younger(old, young) && !is_younger(old, old));
            let foreign = ticket(ProbeId { session: !session, ..next }, path, Fate::Lost);
            prop_assert!(!is_younger(foreign, old));
        }
    }
}
