//! The state of probes that currently have no worker.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use super::SavedWorker;
use super::restart::RESET_AFTER;
use crate::spec::ProbeType;

/// Maximum number of remembered probes of removed pods.
const KEPT: usize = 1000;

type Key = (String, String, ProbeType);

/// An earlier agent's state for pods that have not appeared yet, and the held results of removed pods, which may come
/// back.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// The saved workers, each with the time until which it is kept; `None` while its pod may still exist.
    workers: HashMap<Key, (SavedWorker, Option<Duration>)>,
}

impl Left {
    /// Takes over an earlier agent's state. State of pods that had not been removed is kept until the sources have
    /// listed all their pods.
    pub(super) fn by_earlier_agent(workers: impl IntoIterator<Item = SavedWorker>) -> Self {
        let workers = workers.into_iter().map(|mut saved| {
            let until = saved.gone.take();
            let until = until.map(|gone| RESET_AFTER.saturating_sub(gone));
            (key(&saved), (saved, until))
        });
        Self {
            workers: workers.collect(),
        }
    }

    /// Keeps the held results of a pod that is removed `now`.
    pub(super) fn keep(&mut self, now: Duration, workers: impl IntoIterator<Item = SavedWorker>) {
        let held = workers.into_iter().filter(|saved| saved.on_hold);
        let until = Some(now + RESET_AFTER);
        self.workers
            .extend(held.map(|saved| (key(&saved), (saved, until))));
        self.forget_old(now);
    }

    /// Removes and returns the state of a probe that starts `now`.
    pub(super) fn take(
        &mut self,
        now: Duration,
        pod_uid: &str,
        container: &str,
        kind: ProbeType,
    ) -> Option<SavedWorker> {
        let key = (pod_uid.to_owned(), container.to_owned(), kind);
        let (saved, until) = self.workers.remove(&key)?;
        until.is_none_or(|until| now < until).then_some(saved)
    }

    /// Forgets a pod.
    pub(super) fn remove_pod(&mut self, uid: &str) {
        self.workers.retain(|(pod, _, _), _| *pod != *uid);
    }

    /// Drops the state of pods that are not desired, except for held results, which are kept for a while.
    pub(super) fn cleanup(&mut self, now: Duration, is_desired: impl Fn(&str) -> bool) {
        self.workers.retain(|(pod, _, _), (saved, until)| {
            if !is_desired(pod) && until.is_none() {
                *until = Some(now + RESET_AFTER);
                return saved.on_hold;
            }
            true
        });
        self.forget_old(now);
    }

    /// Returns the whole state as of `now`.
    pub(super) fn save(&self, now: Duration) -> impl Iterator<Item = SavedWorker> {
        let workers = self.workers.values();
        workers.map(move |(saved, until)| SavedWorker {
            gone: until.map(|until| RESET_AFTER.saturating_sub(until.saturating_sub(now))),
            ..saved.clone()
        })
    }

    fn forget_old(&mut self, now: Duration) {
        self.workers
            .retain(|_, (_, until)| until.is_none_or(|until| now < until));
        let ends = self.workers.iter();
        let mut ends: Vec<_> = ends
            .filter_map(|(key, (_, until))| Some((Reverse((*until)?), key.clone())))
            .collect();
        ends.sort_unstable_by_key(|(until, _)| *until);
        for (_, key) in ends.into_iter().skip(KEPT) {
            self.workers.remove(&key);
        }
    }
}

fn key(saved: &SavedWorker) -> Key {
    (saved.pod_uid.clone(), saved.container.clone(), saved.kind)
}
