//! Observes an agent's reports from outside: polls its status and records the time of every change.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use health_model::api::{HealthStatus, NodeStatus, PathKind, Protocol};

use super::super::requests::Asker;
use crate::Node;
use crate::process::print_line;

const STATUS: &str = "/v1beta/status";

/// Wall-clock time since the epoch, from the same clock as the timestamps of packets.
pub(super) fn clock() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// A target of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) path: PathKind,
    pub(super) protocol: Protocol,
    pub(super) address: IpAddr,
}

/// A value and the time when it first appeared. It applies until the next value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TimedReport<T> {
    pub(super) at: Duration,
    pub(super) value: T,
}

/// Whether a target is reachable; if not, the reason.
pub(super) type Verdict = Result<(), String>;

/// All reports about a node in chronological order.
#[derive(Clone, Debug, Default)]
pub(super) struct Story {
    pub(super) verdicts: HashMap<Place, Vec<TimedReport<Verdict>>>,
    /// Causes; `None` while there is no diagnosis.
    pub(super) diagnoses: Vec<TimedReport<Option<String>>>,
}

impl Story {
    fn take_in(&mut self, node: &NodeStatus, at: Duration) {
        let host = [(PathKind::Host, &node.host)];
        let endpoint = node.health_endpoint.iter();
        let endpoint = endpoint.map(|group| (PathKind::Endpoint, group));
        for (path, group) in host.into_iter().chain(endpoint) {
            for status in group.paths() {
                for (protocol, result) in [
                    (Protocol::Icmp, &status.icmp),
                    (Protocol::Http, &status.http),
                ] {
                    let Some(result) = result else { continue };
                    let place = Place {
                        path,
                        protocol,
                        address: status.ip,
                    };
                    let verdict = match result.is_ok() {
                        true => Ok(()),
                        false => Err(result.status.clone()),
                    };
                    push_change(self.verdicts.entry(place).or_default(), at, verdict);
                }
            }
        }
        let cause = node.diagnosis.as_ref().map(|d| d.cause.clone());
        push_change(&mut self.diagnoses, at, cause);
    }

    /// Whether all targets are reachable.
    pub(super) fn is_well(&self) -> bool {
        let last =
            |reports: &Vec<TimedReport<Verdict>>| reports.last().is_some_and(|r| r.value.is_ok());
        !self.verdicts.is_empty() && self.verdicts.values().all(last)
    }

    /// The last diagnosis.
    pub(super) fn cause(&self) -> Option<&str> {
        self.diagnoses.last()?.value.as_deref()
    }
}

fn push_change<T: PartialEq>(reports: &mut Vec<TimedReport<T>>, at: Duration, value: T) {
    if reports.last().is_none_or(|last| last.value != value) {
        reports.push(TimedReport { at, value });
    }
}

/// Polls an agent's status.
pub(super) struct Watch {
    stories: Arc<Mutex<HashMap<String, Story>>>,
    asker: Asker,
}

impl Watch {
    /// Starts polling the agent of `node`, with this pause between requests.
    pub(super) fn start(node: &Node, pause: Duration) -> Self {
        let stories: Arc<Mutex<HashMap<String, Story>>> = Arc::default();
        let taken_in = stories.clone();
        let asker = Asker::start(node.socket(), STATUS, pause, move |body, _| {
            let at = clock();
            match serde_json::from_str::<HealthStatus>(body) {
                Ok(status) => {
                    let mut stories = lock(&taken_in);
                    for node in &status.nodes {
                        stories
                            .entry(node.name.clone())
                            .or_default()
                            .take_in(node, at);
                    }
                    if let Some(diagnosis) = status.local.diagnosis {
                        let own = stories.entry(status.local.name).or_default();
                        push_change(&mut own.diagnoses, at, Some(diagnosis.cause));
                    }
                }
                Err(error) => print_line(format_args!("bench: cannot read the status: {error}")),
            }
            Ok(())
        });
        Self { stories, asker }
    }

    /// The reports about a node, given as `cluster/node`.
    pub(super) fn story(&self, node: &str) -> Story {
        lock(&self.stories).get(node).cloned().unwrap_or_default()
    }

    /// Stops polling and returns all stories by `cluster/node`.
    pub(super) fn finish(self) -> anyhow::Result<HashMap<String, Story>> {
        self.asker.finish()?;
        Ok(std::mem::take(&mut lock(&self.stories)))
    }
}

fn lock(stories: &Mutex<HashMap<String, Story>>) -> MutexGuard<'_, HashMap<String, Story>> {
    stories.lock().unwrap_or_else(PoisonError::into_inner)
}
