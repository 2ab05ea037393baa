//! Spreads probes over time, and limits rates. Pure: time is passed in as the duration since the start.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::time::Duration;

/// Maximum time for which unused probes may be saved up: probes that fall due within one turn of the engine go out
/// together without causing a burst.
const ADVANCE: Duration = Duration::from_millis(50);

/// A token bucket of probes or other events, stored as the time until which those so far have used it up.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Average time between two probes.
    period: Duration,
    /// How much may be drawn in advance; at least one probe.
    advance: Duration,
    used_until: Duration,
}

impl Budget {
    /// Creates a full bucket for `rate` probes a second.
    pub fn new(rate: u32) -> Self {
        Self::with_advance(rate, ADVANCE)
    }

    /// Like [`Self::new`], but probes that fall due within `advance` may go out together.
    pub fn with_advance(rate: u32, advance: Duration) -> Self {
        let period = Duration::from_secs(1) / rate.max(1);
        Self {
            period,
            advance: advance.max(period),
            used_until: Duration::ZERO,
        }
    }

    /// Creates a full bucket for `burst` events in a row, at least one, and one more after each `period`.
    pub fn with_burst(period: Duration, burst: u32) -> Self {
        Self {
            period,
            advance: period * burst.max(1),
            used_until: Duration::ZERO,
        }
    }

    /// Average time between two probes.
    pub fn period(&self) -> Duration {
        self.period
    }

    /// When the next probe may be sent.
    pub fn ready(&self) -> Duration {
        (self.used_until + self.period).saturating_sub(self.advance)
    }

    /// Whether the bucket is full: nothing that was taken counts any more.
    pub fn is_full(&self, now: Duration) -> bool {
        self.used_until <= now
    }

    /// Whether a probe may be sent `now`.
    pub fn allows(&self, now: Duration) -> bool {
        self.ready() <= now
    }

    /// Records that a probe is sent. Returns when it would be sent at an even pace: not before `now`, and later if it
    /// draws on the advance.
    pub fn take(&mut self, now: Duration) -> Duration {
        let even = self.used_until.max(now);
        self.used_until = even + self.period;
        even
    }
}

/// Phase of something that happens once per interval, in units of `2^-64` of the interval.
pub fn phase(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The first time at or after `earliest` that has this phase within the interval.
pub fn regular_after(earliest: Duration, interval: Duration, phase: u64) -> Duration {
    let phase = fraction(interval, phase);
    let interval = interval.as_nanos().max(1);
    let past = earliest.saturating_sub(phase).as_nanos();
    let periods = past.div_ceil(interval);
    phase + Duration::from_nanos(u64::try_from(periods * interval).unwrap_or(u64::MAX))
}

/// `part / 2^64` of `whole`.
pub fn fraction(whole: Duration, part: u64) -> Duration {
    // Less than `whole`, in nanoseconds; 64 bits hold 584 years.
    Duration::from_nanos(((whole.as_nanos() * u128::from(part)) >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_second_holds_more_than_the_rate(
            rate in 1_u32..5000,
            steps in prop::collection::vec(0_u64..20_000_000, 1..300),
        ) {
            let mut budget = Budget::new(rate);
            let mut now = Duration::ZERO;
            let mut sent = Vec::new();
            for step in steps {
                now += Duration::from_nanos(step);
                while budget.allows(now) {
                    budget.take(now);
                    sent.push(now);
                }
            }
            let burst = (rate / 20).max(1) as usize + 1;
            for (index, at) in sent.iter().enumerate() {
                let end = sent.partition_point(|other| *other < *at + Duration::from_secs(1));
                prop_assert!(end - index <= rate as usize + burst);
            }
        }
    }

    #[test]
    fn a_burst_is_followed_by_one_event_for_each_period() {
        let period = Duration::from_secs(300);
        let mut budget = Budget::with_burst(period, 25);
        let start = Duration::from_secs(7);
        assert!(budget.is_full(start));
        let taken = (0..3600).filter(|second| {
            let now = start + Duration::from_secs(*second);
            let is_allowed = budget.allows(now);
            if is_allowed {
                budget.take(now);
            }
            is_allowed
        });
        assert_eq!(taken.count(), 25 + 3599 / 300);
        let empty_at = start + period * (25 + 3599 / 300);
        assert!(!budget.is_full(empty_at - Duration::from_nanos(1)));
        assert!(budget.is_full(empty_at));
    }

    #[test]
    fn what_was_not_used_is_used_for_a_short_time_only() {
        let mut budget = Budget::new(1000);
        let now = Duration::from_secs(100);
        let mut burst = 0;
        while budget.allows(now) {
            assert_eq!(budget.take(now), now + Duration::from_millis(burst));
            burst += 1;
        }
        assert_eq!(burst, 50);
        assert_eq!(budget.ready(), now + Duration::from_millis(1));
    }
}
