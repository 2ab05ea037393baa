//! Latency shifts: when they started, and whether the extra time is spent in the peer's host, in the network or in this
//! host.

use std::time::Duration;

use health_common::probe::Path;
use health_common::rtt::RemoteTime;
use jiff::Timestamp;

use super::{Context, PeerFacts, SHIFT_FACTOR, SHIFT_SAMPLES, TargetFacts, Verdict};
use crate::history::{LONGEST, Latency};
use crate::target::Protocol;

/// Minimum number of round trips since a shift that show where its time goes.
const SHIFT_REQUESTS: u32 = 4;
/// Number of round trips that may already belong to the shift when it is noticed: as many as form one.
const NOTICED_BY: u64 = 8;
/// Minimum number of round trips before a shift that establish what was usual.
const USUAL_SAMPLES: u64 = 20;

/// What is known about a shift besides the round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shift {
    /// When the first of the longer round trips started.
    pub(crate) since: Timestamp,
    /// The round trips before it.
    pub(crate) usual: Latency,
    /// For echoes: where the extra time is spent; `None` if peers do not report it, or not yet.
    pub(crate) growth: Option<Growth>,
    /// For HTTP: which part of a request takes longer; `None` if that is unknown, or not known yet.
    pub(crate) slow_part: Option<(RequestPart, Duration)>,
}

/// A part of an HTTP request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestPart {
    /// From the uplink to the agent, for everything that arrives.
    ThisHost,
    /// In the network and in the stack of the peer's host.
    Way,
    /// In the peer's agent.
    PeerAgent,
}

/// How much round trips have grown, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    /// Current time in the peer's host.
    pub(crate) remote: Duration,
    /// The part of the growth that is spent in the peer's host.
    pub(crate) in_host: Duration,
    /// The rest of the growth.
    pub(crate) in_network: Duration,
}

/// An ongoing shift, with the data that shows where its time goes: the times in the peer's host from the datapath's
/// rows, and the parts of HTTP requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShiftWatch {
    since: Timestamp,
    /// When it was noticed, since the mesh's start.
    noticed: Duration,
    usual: Latency,
    /// Values when the shift was noticed, and the latest ones.
    remote: Option<(RemoteTime, RemoteTime)>,
    requests: Requests,
}

/// Sums over HTTP requests since a shift.
#[derive(Clone, Copy, Debug, Default)]
struct Requests {
    count: u32,
    /// From SYN to SYN-ACK, on the uplink.
    handshake: Duration,
    /// The same, as seen by the agent.
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

    /// Whether the shift has lasted so long that it is now the usual state.
    pub(crate) fn is_outdated(&self, now: Duration) -> bool {
        now.saturating_sub(self.noticed) >= LONGEST
    }

    /// Records an HTTP request: the time from SYN to SYN-ACK as seen on the uplink and as seen by the agent, and the
    /// time until the response arrived.
    pub(crate) fn note_request(&mut self, handshake: Duration, connect: Duration, total: Duration) {
        let requests = &mut self.requests;
        requests.count += 1;
        requests.handshake += handshake;
        requests.connect += connect;
        requests.total += total;
    }

    /// Records the row's values after a round trip.
    pub(crate) fn note(&mut self, now: RemoteTime) {
        self.remote = match self.remote {
            // A recreated row starts at zero.
            Some((first, last)) if last.samples <= now.samples => Some((first, now)),
            _ => Some((now, now)),
        };
    }

    /// What is known so far.
    pub(crate) fn shift(&self) -> Shift {
        Shift {
            since: self.since,
            usual: self.usual,
            growth: self.growth(),
            slow_part: self.slow_part(),
        }
    }

    /// The part of a request that accounts for most of its growth.
    fn slow_part(&self) -> Option<(RequestPart, Duration)> {
        let Requests {
            count,
            handshake,
            connect,
            total,
        } = self.requests;
        if count < SHIFT_REQUESTS {
            return None;
        }
        let growth = (total / count).checked_sub(self.usual.p50)?;
        // The answer takes the same path as the handshake, up to the agents.
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
        if samples < u64::from(SHIFT_REQUESTS) || usual_samples < USUAL_SAMPLES {
            return None;
        }
        let mean = |sum: u64, samples: u64| Duration::from_nanos(sum / samples);
        let remote_sum = last.sum_ns.checked_sub(first.sum_ns)?;
        let remote = mean(remote_sum, samples);
        let rtt = mean(last.rtt_sum_ns.checked_sub(first.rtt_sum_ns)?, samples);
        let of_shift = (remote_sum / samples).saturating_mul(NOTICED_BY);
        let usual_remote = mean(first.sum_ns.saturating_sub(of_shift), usual_samples);
        // The time in the host cannot exceed the whole round trip.
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
    /// The start of the shift, and the current time in the peer's host.
    pub(super) fn evidence(&self) -> String {
        let in_host = self.growth.map_or_else(String::new, |growth| {
            format!(", {:.1?} of it in the peer's host", growth.remote)
        });
        format!(", since {:.0}{in_host}", self.since)
    }
}

impl Context<'_> {
    /// Returns the newest and the earlier round trips of a target if the newest take much longer. During a known shift,
    /// the earlier round trips are those before the shift: otherwise a lasting shift would gradually seem usual.
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
        // If two latencies alternate, the higher one is not a shift.
        let apart = recent.p25 > usual.p90;
        (enough && higher && apart).then_some((recent, usual))
    }

    /// Text that a message appends to the times of a shift.
    pub(super) fn shift_text(&self, peer: &PeerFacts<'_>, target: &TargetFacts<'_>) -> String {
        let Some(shift) = target.shift else {
            return String::new();
        };
        let since = format!(", since {:.0}", shift.since);
        let place = match (shift.growth, shift.slow_part) {
            (Some(growth), _) => self.growth_text(growth, peer, target),
            (None, Some((part, time))) => part_text(part, time),
            (None, None) => String::new(),
        };
        since + &place
    }

    fn growth_text(
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
        let reported = format!("; {in_host:.1?} of the increase in the peer's host");
        if !self.is_of_the_stack_alone(peer, target) {
            return reported;
        }
        reported
            + "; its health endpoint, for which eBPF answers, is as fast as before: suspect the network \
                stack and the interrupt load of the peer's host"
    }

    /// Whether a host's address is slow by ICMP but its endpoint is not.
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

/// Says which part of an HTTP request takes longer.
fn part_text(part: RequestPart, time: Duration) -> String {
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
