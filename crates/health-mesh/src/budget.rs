//! How many probes may be sent. Pure: time comes in as the duration since the start.

use std::time::Duration;

/// Time whose unused probes may be sent later, at most: what falls due within a turn of the engine
/// goes out together, and no burst comes of it.
const ADVANCE: Duration = Duration::from_millis(50);

/// A token bucket, kept as the time until when the probes sent so far have used it up.
#[derive(Debug)]
pub(super) struct Budget {
    /// Time between two probes in the long run.
    period: Duration,
    /// What may be drawn on in advance; at least one probe.
    advance: Duration,
    used_until: Duration,
}

impl Budget {
    /// A full bucket for so many probes a second.
    pub(super) fn new(rate: u32) -> Self {
        let period = Duration::from_secs(1) / rate.max(1);
        Self {
            period,
            advance: ADVANCE.max(period),
            used_until: Duration::ZERO,
        }
    }

    /// The time between two probes in the long run.
    pub(super) fn period(&self) -> Duration {
        self.period
    }

    /// When a probe may be sent.
    pub(super) fn ready(&self) -> Duration {
        (self.used_until + self.period).saturating_sub(self.advance)
    }

    /// Whether a probe may be sent `now`.
    pub(super) fn allows(&self, now: Duration) -> bool {
        self.ready() <= now
    }

    /// A probe is sent.
    pub(super) fn take(&mut self, now: Duration) {
        self.used_until = self.used_until.max(now) + self.period;
    }
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
            budget.take(now);
            burst += 1;
        }
        assert_eq!(burst, 50);
        assert_eq!(budget.ready(), now + Duration::from_millis(1));
    }
}
