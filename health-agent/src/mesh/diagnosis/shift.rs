//! Latency shifts: since when, and whether the time went to the peer's host or to the network.

use std::time::Duration;

use health_common::probe::Path;
use health_common::rtt::RemoteTime;
use jiff::Timestamp;

use super::super::target::Protocol;
use super::{Context, PeerFacts, TargetFacts, Verdict};

/// Fewest round trips since a shift that tell where its time went.
const REMOTE_SAMPLES: u64 = 4;
/// Round trips that may be of the shift when it is noticed: as many as make one.
const NOTICED_BY: u64 = 8;
/// Fewest round trips before a shift that tell what was usual.
const USUAL_SAMPLES: u64 = 20;

/// What is known of a shift besides the round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::mesh) struct Shift {
    /// When the first of the longer round trips began.
    pub(in crate::mesh) since: Timestamp,
    /// How much of the time is spent where; `None` where peers do not tell, or not yet.
    pub(in crate::mesh) growth: Option<Growth>,
}

/// By how much round trips have grown, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::mesh) struct Growth {
    /// In the peer's host, now.
    pub(in crate::mesh) remote: Duration,
    /// In the peer's host, before.
    pub(in crate::mesh) usual_remote: Duration,
    /// Of the round trip's growth, what the peer's host makes.
    pub(in crate::mesh) in_host: Duration,
    /// The rest.
    pub(in crate::mesh) in_network: Duration,
}

/// A shift under way: what the rows of the datapath say of the time in the peer's host.
#[derive(Clone, Copy, Debug)]
pub(in crate::mesh) struct ShiftWatch {
    since: Timestamp,
    usual_rtt: Duration,
    /// When the shift was noticed, and last.
    remote: Option<(RemoteTime, RemoteTime)>,
}

impl ShiftWatch {
    /// A shift of round trips that took `usual_rtt` before.
    pub(in crate::mesh) fn new(since: Timestamp, usual_rtt: Duration) -> Self {
        Self {
            since,
            usual_rtt,
            remote: None,
        }
    }

    /// Takes in what the row says after a round trip.
    pub(in crate::mesh) fn note(&mut self, now: RemoteTime) {
        self.remote = match self.remote {
            // A row that was made anew begins at zero.
            Some((first, last)) if last.samples <= now.samples => Some((first, now)),
            _ => Some((now, now)),
        };
    }

    /// What is known by now.
    pub(in crate::mesh) fn shift(&self) -> Shift {
        Shift {
            since: self.since,
            growth: self.growth(),
        }
    }

    fn growth(&self) -> Option<Growth> {
        let (first, last) = self.remote?;
        let samples = last.samples - first.samples;
        let usual_samples = first.samples.saturating_sub(NOTICED_BY);
        if samples < REMOTE_SAMPLES || usual_samples < USUAL_SAMPLES {
            return None;
        }
        let mean = |sum: u64, samples: u64| Duration::from_nanos(sum / samples);
        let remote = mean(last.sum_ns.checked_sub(first.sum_ns)?, samples);
        let rtt = mean(last.rtt_sum_ns.checked_sub(first.rtt_sum_ns)?, samples);
        let of_shift = NOTICED_BY.saturating_mul(first.smoothed_ns);
        let usual_remote = mean(first.sum_ns.saturating_sub(of_shift), usual_samples);
        // Of a round trip, no more than all of it is in the host.
        let usual_remote = usual_remote.min(self.usual_rtt);
        let growth = rtt.checked_sub(self.usual_rtt)?;
        let in_host = remote.saturating_sub(usual_remote).min(growth);
        Some(Growth {
            remote,
            usual_remote,
            in_host,
            in_network: growth - in_host,
        })
    }
}

impl Shift {
    pub(super) fn evidence(&self) -> String {
        self.growth.map_or_else(String::new, |growth| {
            let Growth {
                remote,
                usual_remote,
                ..
            } = growth;
            format!(", in the peer's host {remote:.1?} now, {usual_remote:.1?} before")
        })
    }
}

impl Context<'_> {
    /// What a message adds to the times of a shift.
    pub(super) fn shift_told(&self, peer: &PeerFacts<'_>, target: &TargetFacts<'_>) -> String {
        let mut told = String::new();
        let growth = target.shift.and_then(|shift| {
            told += &format!(", since {:.0}", shift.since);
            shift.growth
        });
        let in_network = growth.filter(|growth| growth.in_network > growth.in_host);
        match (growth, in_network) {
            (_, Some(Growth { in_network, .. })) => {
                told += &format!("; {in_network:.1?} of the increase in the network");
            }
            (Some(Growth { in_host, .. }), None) => {
                told += &format!("; {in_host:.1?} of the increase in the peer's host");
            }
            (None, None) => {}
        }
        if in_network.is_none() && self.is_of_the_stack_alone(peer, target) {
            told += "; its health endpoint, for which eBPF answers, is as fast as before: suspect the \
                     network stack and the interrupt load of the peer's host";
        }
        told
    }

    /// Whether a host's address is slow by ICMP while its endpoint is not.
    fn is_of_the_stack_alone(&self, peer: &PeerFacts<'_>, target: &TargetFacts<'_>) -> bool {
        let key = target.key;
        if key.protocol != Protocol::Icmp || key.path != Path::Host || peer.local {
            return false;
        }
        let mut endpoints = peer.targets.iter().filter(|other| {
            other.key.path == Path::Endpoint
                && other.key.protocol == Protocol::Icmp
                && other.key.address.is_ipv4() == key.address.is_ipv4()
                && !matches!(other.verdict, Verdict::Off)
        });
        endpoints.next().is_some_and(|endpoint| {
            matches!(endpoint.verdict, Verdict::Reachable) && self.degraded(endpoint).is_none()
        })
    }
}
