//! The round trips of the last minutes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::histogram::Histogram;

/// The period that summaries cover.
const WINDOW: Duration = Duration::from_secs(600);
/// Minimum time between two marks. It bounds the number of marks, however frequent scrapes are.
const STEP: Duration = Duration::from_secs(60);

/// Snapshots of the totals at intervals.
#[derive(Debug)]
pub(super) struct TotalsHistory<T> {
    oldest: (Instant, T),
    later: VecDeque<(Instant, T)>,
}

impl<T: Clone> TotalsHistory<T> {
    /// Starts with these totals.
    pub(super) fn new(now: Instant, totals: T) -> Self {
        Self {
            oldest: (now, totals),
            later: VecDeque::new(),
        }
    }

    /// Records the totals at `now`, and returns those of ten minutes ago, or the first totals if they are more recent.
    pub(super) fn mark(&mut self, now: Instant, totals: &T) -> &T {
        let age = |at: Instant| now.saturating_duration_since(at);
        let last = self.later.back().unwrap_or(&self.oldest);
        if age(last.0) >= STEP {
            self.later.push_back((now, totals.clone()));
        }
        while let Some(next) = self.later.pop_front_if(|(at, _)| age(*at) >= WINDOW) {
            self.oldest = next;
        }
        &self.oldest.1
    }
}

/// The contents of a summary.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Quantiles {
    /// Quantiles and their values in seconds; empty without round trips.
    pub(super) values: Vec<(f64, f64)>,
    /// Sum of the round trips since the agent started, in seconds.
    pub(super) sum_seconds: f64,
    /// Number of these round trips.
    pub(super) count: u64,
}

/// The quantiles in summaries.
pub(super) const QUANTILES: [f64; 3] = [0.5, 0.9, 0.99];

impl Quantiles {
    /// Quantiles of the round trips in `recent`.
    pub(super) fn of(recent: &Histogram, sum_ns: u64, count: u64) -> Self {
        let values = QUANTILES.into_iter().filter_map(|quantile| {
            let ns = recent.quantile_ns(quantile)?;
            Some((quantile, ns as f64 / 1e9))
        });
        Self {
            values: values.collect(),
            sum_seconds: sum_ns as f64 / 1e9,
            count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_ten_minutes_old_however_often_is_scraped() {
        for period in [1, 15, 60, 90] {
            let start = Instant::now();
            let mut recent = TotalsHistory::new(start, 0);
            for at in (0..3_600).step_by(period) {
                let now = start + Duration::from_secs(at);
                let mark = *recent.mark(now, &at);
                let age = at - mark;
                assert!(age == at || (600..700).contains(&age), "{age} at {at}");
                assert!(recent.later.len() < 12);
            }
        }
    }
}
