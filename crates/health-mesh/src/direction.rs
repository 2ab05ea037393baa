//! Finds where echo probes to a peer are lost: on the way there, in the peer's host, on the way back or in this host.
//!
//! The peer's programs count the probes of this agent that arrive and the replies that leave; its agent reports the
//! counts in its answers to `GET /hello`. Between two such *exchanges*, the probes sent here are compared with those
//! that arrived there. Packets in flight while counts are read are covered by bounds: the real loss is at least as
//! large as the reported one. Contradictory counts are ignored.
//!
//! The peer counts packets, not probes, so a duplicate looks like one more reply that may still be on its way back. The
//! number of duplicates is known only once they have arrived. An exchange therefore ends an interval only when a later
//! exchange shows what arrived after it.
//!
//! A *way* is a path by one IP version. Ways are followed from their first exchange after a loss for as long as there
//! are losses. Pure: times are durations since the mesh's start.

use std::collections::VecDeque;
use std::time::Duration;

use health_common::arrivals::WayCounts;
use slotmap::SparseSecondaryMap;

use super::target::TargetId;

/// The windows in which losses are looked for, longest first.
pub(super) const WINDOWS: [Duration; 2] = [Duration::from_secs(600), Duration::from_secs(60)];

/// Maximum number of ways followed at a time. If more ways lose probes, the remaining losses are not located.
const MOST_TRACKS: usize = 2048;
/// Maximum number of exchanges kept per way, about 72 bytes each.
const MOST_POINTS: usize = 20;
/// If three exchanges lie closer together than this, the middle one is dropped.
const DENSE: Duration = Duration::from_secs(2);
/// A reply that has left the peer arrives within this time, or counts as lost.
const SETTLING: Duration = Duration::from_secs(1);

/// This side's counts of a way's echo probes. The counts wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnCounts {
    /// Probes that were answered or given up.
    pub(super) settled: u32,
    /// Probes still waiting for an answer.
    pub(super) in_flight: u32,
    /// Replies that came back to the uplink: in time, late or duplicate.
    pub(super) returned: u32,
    /// Those replies for which no probe was waiting: late or duplicate.
    pub(super) surplus: u32,
}

/// The counts of both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange {
    /// When the peer was asked.
    pub(super) asked: Duration,
    /// This side's counts at that time.
    pub(super) before: OwnCounts,
    /// When its answer arrived.
    pub(super) answered: Duration,
    /// This side's counts at that time.
    pub(super) after: OwnCounts,
    /// When the peer's counts started, by the peer's clock.
    pub(super) since_ns: u64,
    /// The peer's counts at some moment in between.
    pub(super) counts: WayCounts,
}

/// What happened to a way's probes between two exchanges. Losses are lower bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Passage {
    /// Time between the exchanges.
    pub(super) time: Duration,
    /// Probes that left this host.
    pub(super) sent: u32,
    /// Probes that arrived at the peer's host.
    pub(super) arrived: u32,
    /// Replies that left the peer's host.
    pub(super) replied: u32,
    /// Replies that came back to this host.
    pub(super) returned: u32,
    /// Probes lost on the way there.
    pub(super) lost_there: u32,
    /// Probes lost in the peer's host.
    pub(super) lost_in_peer: u32,
    /// Replies lost on the way back.
    pub(super) lost_back: u32,
    /// Replies that came back but did not reach the agent in time.
    pub(super) lost_here: u32,
}

/// The followed ways, each keyed by its first target.
#[derive(Debug, Default)]
pub(super) struct Ways(SparseSecondaryMap<TargetId, Track>);

/// A followed way.
#[derive(Debug, Default)]
struct Track {
    /// Probes that this host failed to send.
    unsent: u32,
    /// Replies that the uplink saw but the agent did not.
    unseen: u32,
    /// In time order, further apart the older they are.
    points: VecDeque<Point>,
}

/// An exchange. This side's counts are bounds: minimum, maximum.
#[derive(Clone, Copy, Debug)]
struct Point {
    asked: Duration,
    answered: Duration,
    since_ns: u64,
    counts: WayCounts,
    sent: (u32, u32),
    returned: (u32, u32),
    /// Replies for which no probe was waiting, when the peer was asked.
    surplus: u32,
    unseen: u32,
}

impl Ways {
    /// Whether no way is followed.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a way is followed.
    pub(super) fn is_followed(&self, way: TargetId) -> bool {
        self.0.contains_key(way)
    }

    /// Starts to follow a way, unless too many are followed already.
    pub(super) fn follow(&mut self, way: TargetId) {
        if self.0.len() < MOST_TRACKS && !self.0.contains_key(way) {
            self.0.insert(way, Track::default());
        }
    }

    /// Stops following a way.
    pub(super) fn forget(&mut self, way: TargetId) {
        self.0.remove(way);
    }

    /// Records a probe that this host failed to send.
    pub(super) fn unsent(&mut self, way: TargetId) {
        if let Some(track) = self.0.get_mut(way) {
            track.unsent = track.unsent.wrapping_add(1);
        }
    }

    /// Records a reply that reached the uplink but not the agent.
    pub(super) fn unseen(&mut self, way: TargetId) {
        if let Some(track) = self.0.get_mut(way) {
            track.unseen = track.unseen.wrapping_add(1);
        }
    }

    /// Records an exchange about a followed way.
    pub(super) fn exchanged(&mut self, way: TargetId, exchange: &Exchange) {
        if let Some(track) = self.0.get_mut(way) {
            track.exchanged(exchange);
        }
    }

    /// What happened to the probes since the first exchange after `from`; `None` if unknown.
    pub(super) fn passage(&self, way: TargetId, from: Duration) -> Option<Passage> {
        self.0.get(way)?.passage(from)
    }
}

impl Track {
    fn passage(&self, from: Duration) -> Option<Passage> {
        let first = self.points.iter().find(|p| p.asked >= from)?;
        let later = self.points.back()?;
        let is_settled = |p: &&Point| p.answered + SETTLING <= later.asked;
        let last = self.points.iter().rev().find(is_settled)?;
        first.passage(last, later)
    }

    fn exchanged(&mut self, exchange: &Exchange) {
        let Exchange {
            asked,
            before,
            answered,
            after,
            ..
        } = *exchange;
        let point = Point {
            asked,
            answered,
            since_ns: exchange.since_ns,
            counts: exchange.counts,
            sent: (
                before.settled.wrapping_sub(self.unsent),
                after
                    .settled
                    .wrapping_add(after.in_flight)
                    .wrapping_sub(self.unsent),
            ),
            returned: (
                before.returned,
                after.returned.wrapping_add(after.in_flight),
            ),
            surplus: before.surplus,
            unseen: self.unseen,
        };
        if let Some(last) = self.points.back() {
            // Two concurrent exchanges: nobody knows whose counts are older.
            if asked < last.answered {
                return;
            }
            // One of the two sides restarted its counts.
            if !last.precedes(&point) {
                self.points.clear();
            }
        }
        self.points.push_back(point);
        self.thin_out(answered);
    }

    /// Drops exchanges that are outside all windows or too close together for their age.
    fn thin_out(&mut self, now: Duration) {
        let points = &mut self.points;
        while points.len() > MOST_POINTS
            || points
                .front()
                .is_some_and(|p| p.asked + WINDOWS[0] < now && points.len() > 1)
        {
            points.pop_front();
        }
        let mut middle = points.len().saturating_sub(2);
        while middle > 0 {
            let (older, newer) = (points[middle - 1].asked, points[middle + 1].asked);
            let gap = newer.saturating_sub(older);
            if gap < DENSE || gap * 3 < now.saturating_sub(older) * 2 {
                points.remove(middle);
            }
            middle -= 1;
        }
    }
}

impl Point {
    /// Whether all counts continue from this exchange to a later one.
    fn precedes(&self, later: &Self) -> bool {
        self.since_ns == later.since_ns
            && increase(self.counts.arrived, later.counts.arrived).is_some()
            && increase(self.counts.replied, later.counts.replied).is_some()
            && increase(self.sent.0, later.sent.0).is_some()
            && increase(self.returned.0, later.returned.0).is_some()
            && increase(self.surplus, later.surplus).is_some()
    }

    /// What happened to the probes between this exchange and `last`; `None` if the counts contradict each other. All
    /// replies in flight at `last` have arrived by the time `later` starts.
    fn passage(&self, last: &Self, later: &Self) -> Option<Passage> {
        if last.asked < self.answered || !self.precedes(last) {
            return None;
        }
        let arrived = increase(self.counts.arrived, last.counts.arrived)?;
        let replied = increase(self.counts.replied, last.counts.replied)?;
        let sent_most = increase(self.sent.0, last.sent.1)?;
        let sent_least = increase(self.sent.1, last.sent.0).unwrap_or(0);
        // Any reply that arrived after the last exchange may have left the peer before it.
        let surplus = increase(last.surplus, later.surplus)?;
        let returned_most = increase(self.returned.0, last.returned.1)?.saturating_add(surplus);
        let returned_least = increase(self.returned.1, last.returned.0).unwrap_or(0);
        // At each step there cannot be more packets than at the step before, except for duplicates, which show up as
        // surplus.
        let duplicates = increase(self.surplus, later.surplus)?;
        let unsure = self.unsure().saturating_add(duplicates);
        if arrived > sent_most.saturating_add(duplicates)
            || replied > arrived.saturating_add(unsure)
            || returned_least > replied.saturating_add(unsure)
        {
            return None;
        }
        Some(Passage {
            time: last.answered.saturating_sub(self.asked),
            sent: sent_least.max(arrived),
            arrived,
            replied,
            returned: returned_most.min(replied),
            lost_there: sent_least.saturating_sub(arrived),
            lost_in_peer: arrived
                .saturating_sub(replied + last.unsure())
                .saturating_sub(surplus),
            lost_back: replied.saturating_sub(returned_most),
            lost_here: increase(self.unseen, last.unseen)?,
        })
    }

    /// Returns the number of probes that may belong to either side of the exchange.
    fn unsure(&self) -> u32 {
        self.sent.1.wrapping_sub(self.sent.0)
    }
}

/// Increase of a wrapping count; `None` if it decreased.
fn increase(before: u32, after: u32) -> Option<u32> {
    let increase = after.wrapping_sub(before);
    (increase <= u32::MAX / 2).then_some(increase)
}

#[cfg(test)]
mod tests;
