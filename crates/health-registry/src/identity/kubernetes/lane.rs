//! The pauses of one kind of write after failures. Callers pass the time in.

use std::time::Duration;

use tokio::time::Instant;

use super::requests::{Blame, RequestError};
use crate::backoff::Backoff;

/// The shortest pause while the server is overloaded.
const SHORTEST_OVERLOADED: Duration = Duration::from_secs(1);

/// One kind of write.
#[derive(Debug)]
pub(super) struct Lane {
    backoff: Backoff,
    /// When the next attempt may be made.
    next: Option<Instant>,
    /// Whether the last attempt succeeded.
    is_proven: bool,
    longest_of_object: Duration,
}

impl Lane {
    /// The longest pause while the server refuses requests: a thousand agents must not keep a server overloaded.
    pub(super) const LONGEST: Duration = Duration::from_secs(30);

    /// `longest_of_object` is the longest pause after a refusal that may concern one object only.
    pub(super) const fn new(longest_of_object: Duration) -> Self {
        Self {
            backoff: Backoff::up_to(Self::LONGEST),
            next: None,
            is_proven: false,
            longest_of_object,
        }
    }

    /// The time until the next attempt; `None` if it may be made now.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let left = self.next?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// The number of requests that may be made at once: one until the first success after a failure.
    pub(super) const fn at_once(&self, most: usize) -> usize {
        if self.is_proven { most } else { 1 }
    }

    /// Whether the last attempt did not fail.
    pub(super) const fn is_well(&self) -> bool {
        self.next.is_none()
    }

    /// Notes that there is nothing to write.
    pub(super) const fn rest(&mut self) {
        self.next = None;
    }

    /// Notes that nothing failed.
    pub(super) fn succeed(&mut self) {
        self.backoff.reset();
        self.next = None;
        self.is_proven = true;
    }

    /// Notes a failure. `random` is at least 0 and below 1.
    pub(super) fn fail(&mut self, error: &RequestError, random: f64, now: Instant) {
        let pause = self.backoff.pause(random);
        let pause = match error.blame() {
            Blame::Overload(wished) => pause.max(wished.unwrap_or(SHORTEST_OVERLOADED)),
            Blame::Server => pause,
            Blame::Connection => pause.min(Backoff::LONGEST),
            Blame::Object => pause.min(self.longest_of_object),
        };
        self.next = Some(now + pause.min(Self::LONGEST));
        self.is_proven = false;
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::json;

    use super::*;

    fn refused(status: serde_json::Value) -> RequestError {
        let status: Status = serde_json::from_value(status).unwrap();
        RequestError::Api {
            attempt: "try",
            source: kube::Error::Api(status.boxed()),
        }
    }

    /// The number of attempts in 20 s if each fails in this way.
    fn attempts(error: &RequestError) -> usize {
        let mut lane = Lane::new(Duration::from_secs(1));
        let begun = Instant::now();
        let mut at = begun;
        let mut count = 0;
        while at < begun + Duration::from_secs(20) {
            assert_eq!(lane.at_once(16), 1);
            count += 1;
            lane.fail(error, 0.0, at);
            assert!(!lane.is_well());
            at += lane.wait(at).unwrap();
        }
        count
    }

    #[test]
    fn refusals_are_answered_with_pauses_that_grow_to_what_each_kind_needs() {
        assert!(attempts(&refused(json!({ "code": 429 }))) < 10);
        assert!(attempts(&refused(json!({ "code": 503 }))) < 10);
        let wished = json!({ "code": 429, "details": { "retryAfterSeconds": 7 } });
        assert_eq!(attempts(&refused(wished)), 3);
        assert!(attempts(&refused(json!({ "code": 422 }))) < 50);
    }

    #[test]
    fn after_a_success_many_requests_are_made_at_once_again() {
        let mut lane = Lane::new(Duration::from_secs(1));
        let now = Instant::now();
        lane.fail(&refused(json!({ "code": 500 })), 0.0, now);
        lane.succeed();
        assert_eq!((lane.wait(now), lane.at_once(16)), (None, 16));
        assert!(lane.is_well());
    }
}
