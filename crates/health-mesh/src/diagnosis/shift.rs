//! Latency shifts: since when, and whether the time went to the peer's host, to the network or to this
//! host.

use std::time::Duration;

use health_common::probe::Path;
use health_common::rtt::RemoteTime;
use jiff::Timestamp;

use super::{Context, PeerFacts, SHIFT_FACTOR, SHIFT_SAMPLES, TargetFacts, Verdict};
use crate::history::{LONGEST, Latency};
use crate::target::Protocol;

/// Fewest round trips since a shift that tell where its time went.
const SHIFT_TOLD_BY: u32 = 4;
/// Round trips that may be of the shift when it is noticed: as many as make one.
const NOTICED_BY: u64 = 8;
/// Fewest round trips before a shift that tell what was usual.
const USUAL_SAMPLES: u64 = 20;

/// What is known of a shift besides the round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shift {
    /// When the first of the longer round trips began.
    pub(crate) since: Timestamp,
    /// The round trips before it.
    pub(crate) usual: Latency,
    /// Of echoes: how much of the time is spent where; `None` where peers do not tell, or not yet.
    pub(crate) growth: Option<Growth>,
    /// Of HTTP: which part of a request takes longer; `None` where that is not known, or not yet.
    pub(crate) slow_part: Option<(RequestPart, Duration)>,
}

/// A part of an HTTP request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestPart {
    /// From the uplink to the agent, of all that comes.
    ThisHost,
    /// On the way and in the stack of the peer's host.
    Way,
    /// In the peer's agent.
    PeerAgent,
}

/// By how much round trips have grown, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    /// In the peer's host, now.
    pub(crate) remote: Duration,
    /// Of the round trip's growth, what the peer's host makes.
    pub(crate) in_host: Duration,
    /// The rest.
    pub(crate) in_network: Duration,
}

/// A shift under way: where its time goes, by what the rows of the datapath say of the time in the peer's
/// host, and by the parts of HTTP requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShiftWatch {
    since: Timestamp,
    /// When it was noticed, since the mesh's start.
    noticed: Duration,
    usual: Latency,
    /// When the shift was noticed, and last.
    remote: Option<(RemoteTime, RemoteTime)>,
    requests: Requests,
}

/// Sums over HTTP requests since a shift.
#[derive(Clone, Copy, Debug, Default)]
struct Requests {
    count: u32,
    /// From SYN to SYN-ACK, on the uplink.
    handshake: Duration,
    /// The same, as the agent sees it.
    connect: Duration,
    total: Duration,
}

impl ShiftWatch {
    /// A shift, noticed at `noticed`, of round trips that were `usual` before.
    pub(crate) fn new(since: Timestamp, noticed: Duration, usual: Latency) -> Self {
        Self {
            since,
            noticed,
            usual,
            remote: None,
            requests: Requests::default(),
        }
    }

    /// Whether the shift has become what is usual.
    pub(crate) fn is_outdated(&self, now: Duration) -> bool {
        now.saturating_sub(self.noticed) >= LONGEST
    }

    /// Takes in an HTTP request: the time from SYN to SYN-ACK on the uplink, the same as the agent saw
    /// it, and the time until the answer was there.
    pub(crate) fn note_request(&mut self, handshake: Duration, connect: Duration, total: Duration) {
        let requests = &mut self.requests;
        requests.count += 1;
        requests.handshake += handshake;
        requests.connect += connect;
        requests.total += total;
    }

    /// Takes in what the row says after a round trip.
    pub(crate) fn note(&mut self, now: RemoteTime) {
        self.remote = match self.remote {
            // A row that was made anew begins at zero.
            Some((first, last)) if last.samples <= now.samples => Some((first, now)),
            _ => Some((now, now)),
        };
    }

    /// What is known by now.
    pub(crate) fn shift(&self) -> Shift {
        Shift {
            since: self.since,
            usual: self.usual,
            growth: self.growth(),
            slow_part: self.slow_part(),
        }
    }

    /// The part of a request that makes most of its growth.
    fn slow_part(&self) -> Option<(RequestPart, Duration)> {
        let Requests {
            count,
            handshake,
            connect,
            total,
        } = self.requests;
        if count < SHIFT_TOLD_BY {
            return None;
        }
        let growth = (total / count).checked_sub(self.usual.p50)?;
        // The answer takes the same way as the handshake, up to the agents.
        let parts = [
            (RequestPart::ThisHost, connect.saturating_sub(handshake) * 2),
            (RequestPart::Way, handshake * 2),
            (RequestPart::PeerAgent, total.saturating_sub(connect * 2)),
        ];
        let (part, time) = parts.into_iter().max_by_key(|(_, time)| *time)?;
        Some((part, (time / count).min(growth)))
    }

    fn growth(&self) -> Option<Growth> {
        let (first, last) = self.remote?;
        let samples = last.samples - first.samples;
        let usual_samples = first.samples.saturating_sub(NOTICED_BY);
        if samples < u64::from(SHIFT_TOLD_BY) || usual_samples < USUAL_SAMPLES {
            return None;
        }
        let mean = |sum: u64, samples: u64| Duration::from_nanos(sum / samples);
        let remote_sum = last.sum_ns.checked_sub(first.sum_ns)?;
        let remote = mean(remote_sum, samples);
        let rtt = mean(last.rtt_sum_ns.checked_sub(first.rtt_sum_ns)?, samples);
        let of_shift = (remote_sum / samples).saturating_mul(NOTICED_BY);
        let usual_remote = mean(first.sum_ns.saturating_sub(of_shift), usual_samples);
        // Of a round trip, no more than all of it is in the host.
        let usual_remote = usual_remote.min(self.usual.p50);
        let growth = rtt.checked_sub(self.usual.p50)?;
        let in_host = remote.saturating_sub(usual_remote).min(growth);
        Some(Growth {
            remote,
            in_host,
            in_network: growth - in_host,
        })
    }
}

impl Shift {
    /// Since when, and the time in the peer's host now.
    pub(super) fn evidence(&self) -> String {
        let in_host = self.growth.map_or_else(String::new, |growth| {
            format!(", {:.1?} of it in the peer's host", growth.remote)
        });
        format!(", since {:.0}{in_host}", self.since)
    }
}

impl Context<'_> {
    /// The newest round trips of a target and those before, if the newest are well above. While a shift is
    /// known, those before it: the longer it lasts, the more usual it would seem.
    pub(crate) fn shifted(&self, target: &TargetFacts<'_>) -> Option<(Latency, Latency)> {
        let recent = target.trend.recent?;
        let usual = match target.shift {
            Some(shift) => shift.usual,
            None => target.trend.usual?,
        };
        let least = match target.key.protocol {
            Protocol::Icmp => self.thresholds.icmp_shift,
            Protocol::Http => self.thresholds.http_shift,
        };
        let enough = recent.samples >= SHIFT_SAMPLES.0 && usual.samples >= SHIFT_SAMPLES.1;
        let higher = recent.p50 >= usual.p50 * SHIFT_FACTOR && recent.p50 >= usual.p50 + least;
        // Of two latencies that alternate, the higher is no shift.
        let apart = recent.p25 > usual.p90;
        (enough && higher && apart).then_some((recent, usual))
    }

    /// What a message adds to the times of a shift.
    pub(super) fn shift_told(&self, peer: &PeerFacts<'_>, target: &TargetFacts<'_>) -> String {
        let Some(shift) = target.shift else {
            return String::new();
        };
        let since = format!(", since {:.0}", shift.since);
        let place = match (shift.growth, shift.slow_part) {
            (Some(growth), _) => self.growth_told(growth, peer, target),
            (None, Some((part, time))) => part_told(part, time),
            (None, None) => String::new(),
        };
        since + &place
    }

    fn growth_told(
        &self,
        growth: Growth,
        peer: &PeerFacts<'_>,
        target: &TargetFacts<'_>,
    ) -> String {
        let Growth {
            in_host,
            in_network,
            ..
        } = growth;
        if in_network > in_host {
            return format!("; {in_network:.1?} of the increase in the network");
        }
        let told = format!("; {in_host:.1?} of the increase in the peer's host");
        if !self.is_of_the_stack_alone(peer, target) {
            return told;
        }
        told + "; its health endpoint, for which eBPF answers, is as fast as before: suspect the network \
                stack and the interrupt load of the peer's host"
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

/// Where an HTTP request takes longer.
fn part_told(part: RequestPart, time: Duration) -> String {
    match part {
        RequestPart::ThisHost => format!(
            "; {time:.1?} of the increase in this host, between uplink and agent: suspect its own network \
             stack and load"
        ),
        RequestPart::Way => {
            format!(
                "; {time:.1?} of the increase in the network or the network stack of the peer's host"
            )
        }
        RequestPart::PeerAgent => format!(
            "; {time:.1?} of the increase after the handshake: suspect the peer's agent and the load of its \
             host"
        ),
    }
}
