//! Shifts of round-trip times compared with their own past.

use std::time::Duration;

use health_common::rtt::RemoteTime;
use jiff::Timestamp;

use super::Results;
use crate::diagnosis::{ShiftWatch, TargetFacts};
use crate::target::TargetId;

impl Results {
    /// The facts by which a target is judged, including its trend.
    pub(super) fn judged(&self, id: TargetId, now: Duration) -> Option<TargetFacts<'_>> {
        let known = self.known.get(id)?;
        Some(TargetFacts {
            trend: known.trend(now),
            shift: self.shifts.get(id).map(ShiftWatch::shift),
            ..known.facts(now)
        })
    }

    /// Starts or stops tracking where the extra time of a latency shift is spent.
    pub(super) fn watch_shift(&mut self, id: TargetId, now: Duration) {
        let watch = self.shifts.get(id);
        if watch.is_some_and(|watch| watch.is_outdated(now)) {
            self.shifts.remove(id);
        }
        let shifted = self
            .judged(id, now)
            .and_then(|facts| self.context().shifted(&facts));
        let (Some((_, usual)), Some(known)) = (shifted, self.known.get(id)) else {
            self.shifts.remove(id);
            return;
        };
        if self.is_shifted(id) {
            return;
        }
        let since = known.history.risen_since(usual.p90).unwrap_or(now);
        let wall_clock = Timestamp::now();
        let since = wall_clock.checked_sub(now.saturating_sub(since));
        let watch = ShiftWatch::new(since.unwrap_or(wall_clock), now, usual);
        self.shifts.insert(id, watch);
    }

    /// Whether the target's latency has shifted.
    pub(crate) fn is_shifted(&self, id: TargetId) -> bool {
        self.shifts.contains_key(id)
    }

    /// Records the time in the peer's host, for a target whose latency has shifted.
    pub(crate) fn note_remote(&mut self, id: TargetId, remote: RemoteTime) {
        if let Some(watch) = self.shifts.get_mut(id) {
            watch.note(remote);
        }
    }
}
