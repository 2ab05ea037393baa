//! Stops and restarts containers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::runtime::{Runtime, RuntimeError};
use crate::worker::restart::Kill;

/// Delay after the first failed kill of a container; doubled after each further failure, up to the maximum. After a
/// failed restart, the container's back-off applies: `Backoffs` in `worker/restart.rs`.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// An exited container that must be restarted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Restart {
    /// The pod's UID.
    pub(super) pod_uid: Arc<str>,
    /// The container's name.
    pub(super) container: Arc<str>,
    /// The ID of the container that exited.
    pub(super) container_id: Arc<str>,
    /// When the container exited, since the agent started.
    pub(super) ended: Duration,
}

/// The result of an action.
pub(super) enum Acted {
    /// An attempt to stop a container.
    Killed(Kill, Result<(), RuntimeError>),
    /// An attempt to restart a container. On success, with the ID of the started container.
    Restarted(Restart, Result<Option<String>, RuntimeError>),
}

/// The progress of an action on a container.
#[derive(Clone, Copy, Debug)]
enum Progress {
    /// Due at this time.
    Waiting(Instant),
    /// Under way.
    UnderWay,
    /// Done at this time.
    Done(Instant),
}

#[derive(Debug)]
struct Action<T> {
    what: T,
    progress: Progress,
    failures: u32,
}

/// Actions on containers, by container ID: at most one of each kind per container. A failed kill is retried.
#[derive(Default)]
pub(super) struct Actions {
    kills: HashMap<Arc<str>, Action<Kill>>,
    restarts: HashMap<Arc<str>, Action<Restart>>,
    /// Containers that should be killed but are not, with the UIDs of their pods.
    spared: HashMap<Arc<str>, Arc<str>>,
    running: JoinSet<Acted>,
}

impl Actions {
    /// Schedules a container's kill. Returns whether the kill is new.
    pub(super) fn kill(&mut self, kill: &Kill, now: Instant) -> bool {
        if let Some(action) = self.kills.get_mut(&kill.container_id)
            && let Progress::Done(at) = action.progress
            && now >= at + LONGEST_RETRY
        {
            // The container should be gone by now.
            action.progress = Progress::Waiting(now);
        }
        add(&mut self.kills, &kill.container_id, now, || kill.clone())
    }

    /// Records a container that should be killed but is not. Returns whether the record is new.
    pub(super) fn spare(&mut self, kill: &Kill) -> bool {
        let uid = kill.pod_uid.clone();
        self.spared.insert(kill.container_id.clone(), uid).is_none()
    }

    /// The kill of a container, if this agent killed it.
    pub(super) fn killed(&self, container_id: &str) -> Option<&Kill> {
        self.kills.get(container_id).map(|action| &action.what)
    }

    /// Schedules a container's restart at a time. Returns whether the restart is new.
    pub(super) fn restart(&mut self, restart: Restart, at: Instant) -> bool {
        let id = restart.container_id.clone();
        add(&mut self.restarts, &id, at, || restart)
    }

    /// Whether a restart of a pod's container is under way.
    pub(super) fn is_restarting(&self, pod_uid: &str, container: &str) -> bool {
        let is_meant =
            |restart: &Restart| *restart.pod_uid == *pod_uid && *restart.container == *container;
        let mut restarts = self.restarts.values();
        restarts
            .any(|action| is_meant(&action.what) && matches!(action.progress, Progress::UnderWay))
    }

    /// Drops pending restarts that are no longer wanted, and returns them.
    pub(super) fn give_up_restarts(&mut self, is_wanted: impl Fn(&str) -> bool) -> Vec<Restart> {
        let given_up = self.restarts.extract_if(|id, restart| {
            matches!(restart.progress, Progress::Waiting(_)) && !is_wanted(id)
        });
        given_up.map(|(_, restart)| restart.what).collect()
    }

    /// Starts all due actions.
    pub(super) fn begin(&mut self, runtime: &Runtime, now: Instant) {
        for action in self.kills.values_mut().filter(|action| action.is_due(now)) {
            action.progress = Progress::UnderWay;
            let (runtime, kill) = (runtime.clone(), action.what.clone());
            self.running.spawn(async move {
                let stopped = runtime.stop(&kill.container_id, kill.grace).await;
                Acted::Killed(kill, stopped)
            });
        }
        let due = self.restarts.values_mut();
        for action in due.filter(|action| action.is_due(now)) {
            action.progress = Progress::UnderWay;
            let (runtime, restart) = (runtime.clone(), action.what.clone());
            self.running.spawn(async move {
                let started = runtime.restart(&restart.container_id).await;
                Acted::Restarted(restart, started)
            });
        }
    }

    /// When the next action is due.
    pub(super) fn next(&self) -> Option<Instant> {
        let kills = self.kills.values().filter_map(Action::due);
        kills
            .chain(self.restarts.values().filter_map(Action::due))
            .min()
    }

    /// Waits for the next action to finish; forever while no action is running.
    pub(super) async fn acted(&mut self) -> Acted {
        loop {
            match self.running.join_next().await {
                Some(Ok(acted)) => break self.note(acted),
                // The action panicked: the container is checked again.
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }

    fn note(&mut self, acted: Acted) -> Acted {
        match &acted {
            Acted::Killed(kill, result) => {
                if let Some(action) = self.kills.get_mut(&kill.container_id) {
                    action.end(result.is_ok());
                }
            }
            Acted::Restarted(restart, Ok(_)) => {
                if let Some(action) = self.restarts.get_mut(&restart.container_id) {
                    action.end(true);
                }
            }
            // The next look shows which container to start, and when.
            Acted::Restarted(restart, Err(_)) => {
                self.restarts.remove(&restart.container_id);
            }
        }
        acted
    }

    /// Drops pending actions on the containers of a pod.
    pub(super) fn forget_pod(&mut self, uid: &str) {
        let waits = |progress| matches!(progress, Progress::Waiting(_));
        self.kills
            .retain(|_, kill| *kill.what.pod_uid != *uid || !waits(kill.progress));
        self.restarts
            .retain(|_, restart| *restart.what.pod_uid != *uid || !waits(restart.progress));
        self.spared.retain(|_, pod| **pod != *uid);
    }

    /// Forgets actions on containers that no longer exist, except those under way.
    pub(super) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        let is_under_way = |progress| matches!(progress, Progress::UnderWay);
        self.kills
            .retain(|id, kill| is_there(id) || is_under_way(kill.progress));
        self.restarts
            .retain(|id, restart| is_there(id) || is_under_way(restart.progress));
        self.spared.retain(|id, _| is_there(id));
    }
}

fn add<T>(
    actions: &mut HashMap<Arc<str>, Action<T>>,
    id: &Arc<str>,
    at: Instant,
    what: impl FnOnce() -> T,
) -> bool {
    if actions.contains_key(id) {
        return false;
    }
    let action = Action {
        what: what(),
        progress: Progress::Waiting(at),
        failures: 0,
    };
    actions.insert(id.clone(), action);
    true
}

impl<T> Action<T> {
    fn due(&self) -> Option<Instant> {
        match self.progress {
            Progress::Waiting(at) => Some(at),
            Progress::UnderWay | Progress::Done(_) => None,
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|at| at <= now)
    }

    fn end(&mut self, is_done: bool) {
        self.progress = match is_done {
            true => Progress::Done(Instant::now()),
            false => {
                let wait = FIRST_RETRY * 2_u32.saturating_pow(self.failures.min(10));
                self.failures += 1;
                Progress::Waiting(Instant::now() + wait.min(LONGEST_RETRY))
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::ProbeType;

    fn kill() -> Kill {
        Kill {
            pod_uid: Arc::from("u"),
            container: Arc::from("app"),
            container_id: Arc::from("c1"),
            kind: ProbeType::Liveness,
            grace: Duration::ZERO,
            restart: true,
        }
    }

    #[test]
    fn a_container_that_is_spared_is_reported_once_and_wakes_nobody() {
        let mut actions = Actions::default();
        assert!(actions.spare(&kill()));
        assert!(!actions.spare(&kill()));
        assert_eq!(actions.next(), None);
        actions.forget_pod("u");
        assert!(actions.spare(&kill()));
    }

    #[test]
    fn what_waits_for_a_pod_that_is_gone_is_given_up() {
        let mut actions = Actions::default();
        let now = Instant::now();
        assert!(actions.kill(&kill(), now));
        assert!(!actions.kill(&kill(), now));
        assert_eq!(actions.next(), Some(now));
        actions.forget_pod("another");
        assert_eq!(actions.next(), Some(now));
        actions.forget_pod("u");
        assert_eq!(actions.next(), None);
    }
}
