//! When containers exited, on the monotonic clock.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;

use crate::runtime::{Observation, RuntimeContainer};
use crate::worker::ContainerState;

/// When containers exited, since the agent started. A runtime reports wall-clock time, and the wall clock may be set
/// meanwhile, so the reported time is clamped to the interval between two looks.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// Exit times by container ID.
    ended: HashMap<String, Duration>,
    /// When the runtime last responded to a query.
    looked: Duration,
}

impl Ends {
    /// Records the runtime's response, received `now`, to a query sent at `asked`.
    pub(super) fn note(
        &mut self,
        observation: &Observation,
        asked: Duration,
        now: Duration,
        wall: Timestamp,
    ) {
        let containers = observation.pods.iter().flat_map(|pod| &pod.containers);
        let has_ended =
            |one: &&RuntimeContainer| matches!(one.state, ContainerState::Terminated { .. });
        let looked = self.looked.min(now);
        let before = std::mem::take(&mut self.ended);
        self.ended = containers
            .filter(has_ended)
            .map(|one| {
                let ended = before.get(&one.id).copied().unwrap_or_else(|| {
                    // An exit in the future counts as an exit now.
                    let ago = one.finished_at.map(|at| wall.duration_since(at));
                    let ago = ago.and_then(|ago| Duration::try_from(ago).ok());
                    now.saturating_sub(ago.unwrap_or_default()).max(looked)
                });
                (one.id.clone(), ended)
            })
            .collect();
        self.looked = asked;
    }

    /// When a container exited, if it has.
    pub(super) fn of(&self, container_id: &str) -> Option<Duration> {
        self.ended.get(container_id).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::RuntimePod;

    const WALL: &str = "2026-11-21T03:00:00Z";

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A pod with containers of these IDs that exited this many seconds after [`WALL`] on the wall clock.
    fn observed(ended: &[(&str, Option<i64>)]) -> Observation {
        let wall: Timestamp = WALL.parse().unwrap();
        let container = |&(id, after): &(&str, Option<i64>)| RuntimeContainer {
            id: id.to_owned(),
            name: id.to_owned(),
            attempt: 0,
            state: ContainerState::Terminated { exit_code: 1 },
            pid: None,
            finished_at: after.map(|after| wall + jiff::SignedDuration::from_secs(after)),
        };
        Observation {
            pods: vec![RuntimePod {
                uid: "u".to_owned(),
                namespace: "default".to_owned(),
                name: "a".to_owned(),
                sandbox_id: "s".to_owned(),
                is_ready: true,
                ips: Vec::new(),
                pid: None,
                containers: ended.iter().map(container).collect(),
            }],
            problems: Vec::new(),
        }
    }

    #[test]
    fn a_container_ended_between_two_looks_whatever_the_wall_clock_says() {
        let wall: Timestamp = WALL.parse().unwrap();
        let mut ends = Ends::default();
        ends.note(&observed(&[]), secs(100), secs(101), wall);
        let all = [
            ("reported", Some(-2)),
            ("stepped", Some(-3600)),
            ("never", Some(i64::from(i32::MIN))),
            ("future", Some(3600)),
            ("unreported", None),
        ];
        ends.note(&observed(&all), secs(109), secs(110), wall);
        let of = |ends: &Ends| all.map(|(id, _)| ends.of(id).map(|at| at.as_secs()));
        let expected = [108, 100, 100, 110, 110].map(Some);
        assert_eq!(of(&ends), expected);
        // An exit time does not change once it is determined.
        let later = wall + jiff::SignedDuration::from_hours(1);
        ends.note(&observed(&all), secs(119), secs(120), later);
        assert_eq!(of(&ends), expected);
        ends.note(&observed(&[]), secs(129), secs(130), wall);
        assert_eq!(of(&ends), [None; 5]);
    }

    #[test]
    fn what_ended_before_the_agent_began_ended_when_it_began() {
        let mut ends = Ends::default();
        let all = observed(&[("old", Some(-3600)), ("new", Some(-1))]);
        ends.note(&all, secs(2), secs(3), WALL.parse().unwrap());
        assert_eq!(
            (ends.of("old"), ends.of("new")),
            (Some(secs(0)), Some(secs(2)))
        );
    }
}
