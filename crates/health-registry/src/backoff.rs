//! Pauses between failed attempts: growing, bounded, and randomized so that many agents do not return to a store at the
//! same moment.

use std::time::Duration;

/// The first pause.
const SHORTEST: Duration = Duration::from_millis(100);
/// Computes the pause before the next attempt.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::up_to(Self::LONGEST)
    }
}

impl Backoff {
    /// The longest pause by default. Short enough for every agent to return to its registry within seconds.
    pub(crate) const LONGEST: Duration = Duration::from_millis(2500);

    /// Pauses that grow up to `longest`.
    pub(crate) const fn up_to(longest: Duration) -> Self {
        let next = SHORTEST;
        Self { next, longest }
    }

    /// The pause after another failure: a random part, at least half, of a time that doubles with each failure.
    /// `random` is at least 0 and below 1.
    pub(crate) fn pause(&mut self, random: f64) -> Duration {
        let full = self.next;
        self.next = (full * 2).min(self.longest);
        full.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0)
    }

    /// Starts over after a success.
    pub(crate) fn reset(&mut self) {
        self.next = SHORTEST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_are_scattered() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..7).map(|_| backoff.pause(0.999_999)).collect();
        for pair in pauses.windows(2) {
            assert!(pair[1] >= pair[0]);
        }
        assert!(pauses[0] <= SHORTEST && pauses[6] <= Backoff::LONGEST);
        assert!(pauses[6] > Backoff::LONGEST - Duration::from_millis(10));
        assert_eq!(backoff.pause(0.0), Backoff::LONGEST / 2);
        backoff.reset();
        assert_eq!(backoff.pause(0.0), SHORTEST / 2);
    }
}
