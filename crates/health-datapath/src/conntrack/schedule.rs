//! Schedules the next collection: sooner if much has expired, later if little has. Pure arithmetic; times are durations
//! since any fixed moment.

use std::time::Duration;

/// Time to the first collection.
const FIRST: Duration = Duration::from_secs(5 * 60);
/// Shortest time between two collections, whatever triggers them.
pub const SHORTEST: Duration = Duration::from_secs(10);
/// If a larger part of the entries is removed, the next collection comes sooner.
const MUCH: f64 = 0.25;
/// The removed part beyond which the interval shrinks no further.
const MOST: f64 = 0.9;
/// If a smaller part of the entries is removed, the next collection comes later.
const LITTLE: f64 = 0.05;
/// The factor by which the interval then grows.
const GROWTH: f64 = 1.5;

/// How the time between two collections is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Adapts to how much each collection removes, up to this limit.
    Adaptive {
        /// Longest time between two collections.
        longest: Duration,
    },
    /// Always the same.
    Fixed(Duration),
}

/// When to collect.
#[derive(Clone, Debug)]
pub struct Schedule {
    pace: Pace,
    interval: Duration,
    due: Duration,
    last: Option<Duration>,
}

impl Schedule {
    /// The first collection is due five minutes after `now`, or after the fixed time.
    pub fn new(pace: Pace, now: Duration) -> Self {
        let interval = match pace {
            Pace::Adaptive { longest } => FIRST.min(longest),
            Pace::Fixed(interval) => interval,
        };
        Self {
            pace,
            interval,
            due: now + interval,
            last: None,
        }
    }

    /// When the next collection is due.
    pub fn due(&self) -> Duration {
        self.due
    }

    /// The current time between two collections.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Whether a nearly full map may trigger a collection at `now`. Some time must have passed since the last
    /// collection, because all entries that it kept were alive.
    pub fn may_hurry(&self, now: Duration) -> bool {
        self.last.is_none_or(|last| now >= last + SHORTEST)
    }

    /// Records a collection that ended at `now` and removed this part of the entries.
    pub fn collected(&mut self, now: Duration, removed: f64) {
        if let Pace::Adaptive { longest } = self.pace {
            self.interval = adapted(self.interval, removed).clamp(SHORTEST.min(longest), longest);
        }
        self.ended(now);
    }

    /// Records a collection that failed at `now`. The interval stays unchanged, because a failure does not show how
    /// many entries expire; the next collection follows soon.
    pub fn failed(&mut self, now: Duration) {
        self.last = Some(now);
        self.due = now + self.interval.min(SHORTEST);
    }

    fn ended(&mut self, now: Duration) {
        self.last = Some(now);
        self.due = now + self.interval;
    }
}

fn adapted(interval: Duration, removed: f64) -> Duration {
    let factor = if removed > MUCH {
        1.0 - removed.min(MOST)
    } else if removed < LITTLE {
        GROWTH
    } else {
        return interval;
    };
    Duration::from_secs(interval.mul_f64(factor).as_secs_f64().round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(12 * 3600);

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn adaptive() -> Schedule {
        Schedule::new(Pace::Adaptive { longest: LONGEST }, secs(0))
    }

    /// The intervals after collections that removed these parts.
    fn intervals(removed: &[f64]) -> Vec<u64> {
        let mut schedule = adaptive();
        removed
            .iter()
            .map(|&removed| {
                schedule.collected(schedule.due(), removed);
                schedule.interval().as_secs()
            })
            .collect()
    }

    #[test]
    fn the_first_collection_is_due_after_five_minutes() {
        assert_eq!(adaptive().due(), secs(300));
    }

    #[test]
    fn much_that_expired_brings_the_next_collection_forward() {
        assert_eq!(intervals(&[0.26, 0.5, 0.9]), [222, 111, 11]);
        // The interval shrinks by at most nine tenths, and never below ten seconds.
        assert_eq!(intervals(&[1.0, 1.0]), [30, 10]);
    }

    #[test]
    fn little_that_expired_puts_it_off() {
        assert_eq!(intervals(&[0.049, 0.0, 0.0]), [450, 675, 1013]);
        let many = [0.0; 30];
        assert_eq!(intervals(&many).last(), Some(&LONGEST.as_secs()));
    }

    #[test]
    fn what_is_between_changes_nothing() {
        assert_eq!(intervals(&[0.05, 0.25, 0.1]), [300, 300, 300]);
    }

    #[test]
    fn the_next_one_is_due_an_interval_after_the_last_and_soon_after_a_failure() {
        let mut schedule = adaptive();
        schedule.collected(secs(1_000), 0.5);
        assert_eq!(schedule.due(), secs(1_150));
        schedule.failed(secs(2_000));
        assert_eq!(schedule.due(), secs(2_010));
    }

    #[test]
    fn a_fixed_interval_stays() {
        let mut schedule = Schedule::new(Pace::Fixed(secs(2)), secs(7));
        assert_eq!(schedule.due(), secs(9));
        schedule.collected(secs(9), 0.9);
        assert_eq!(schedule.due(), secs(11));
    }

    #[test]
    fn a_short_longest_interval_holds_from_the_start() {
        let mut schedule = Schedule::new(Pace::Adaptive { longest: secs(60) }, secs(0));
        assert_eq!(schedule.due(), secs(60));
        schedule.collected(secs(60), 0.0);
        assert_eq!(schedule.due(), secs(120));
    }

    #[test]
    fn full_maps_hurry_at_once_but_not_all_the_time() {
        let mut schedule = adaptive();
        assert!(schedule.may_hurry(secs(0)));
        schedule.collected(secs(3), 0.0);
        assert!(!schedule.may_hurry(secs(12)));
        assert!(schedule.may_hurry(secs(13)));
    }
}
