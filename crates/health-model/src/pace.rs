//! How probes are spread over time. Pure: time comes in as the duration since the start.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::time::Duration;

/// Time whose unused probes may be sent later, at most: what falls due within a turn of the engine
/// goes out together, and no burst comes of it.
const ADVANCE: Duration = Duration::from_millis(50);

/// A token bucket, kept as the time until when the probes sent so far have used it up.
#[derive(Debug)]
pub struct Budget {
    /// Time between two probes in the long run.
    period: Duration,
    /// What may be drawn on in advance; at least one probe.
    advance: Duration,
    used_until: Duration,
}

impl Budget {
    /// A full bucket for so many probes a second.
    pub fn new(rate: u32) -> Self {
        Self::with_advance(rate, ADVANCE)
    }

    /// The same, of which what falls due within `advance` may go out together.
    pub fn with_advance(rate: u32, advance: Duration) -> Self {
        let period = Duration::from_secs(1) / rate.max(1);
        Self {
            period,
            advance: advance.max(period),
            used_until: Duration::ZERO,
        }
    }

    /// The time between two probes in the long run.
    pub fn period(&self) -> Duration {
        self.period
    }

    /// When a probe may be sent.
    pub fn ready(&self) -> Duration {
        (self.used_until + self.period).saturating_sub(self.advance)
    }

    /// Whether a probe may be sent `now`.
    pub fn allows(&self, now: Duration) -> bool {
        self.ready() <= now
    }

    /// A probe is sent. Returns when it would be if probes were sent evenly: not before `now`, and later for one that
    /// draws on the advance.
    pub fn take(&mut self, now: Duration) -> Duration {
        let even = self.used_until.max(now);
        self.used_until = even + self.period;
        even
    }
}

/// The phase of something that is done once an interval, in units of `2^-64` of the interval.
pub fn phase(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The first time with this phase of the interval that is not before `earliest`.
pub fn regular_after(earliest: Duration, interval: Duration, phase: u64) -> Duration {
    let phase = fraction(interval, phase);
    let interval = interval.as_nanos().max(1);
    let past = earliest.saturating_sub(phase).as_nanos();
    let periods = past.div_ceil(interval);
    phase + Duration::from_nanos(u64::try_from(periods * interval).unwrap_or(u64::MAX))
}

/// `part / 2^64` of `whole`.
pub fn fraction(whole: Duration, part: u64) -> Duration {
    // Below `whole` in nanoseconds; those fit 64 bits for 584 years.
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
