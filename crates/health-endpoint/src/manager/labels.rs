//! Changes of endpoints' labels: by request, and when Kubernetes changes those of a pod.

use std::sync::Arc;
use std::time::Duration;

use health_model::api::{Endpoint, PodName};
use health_model::labels::pod::{IdentityLabels, K8S, PORT};
use health_model::labels::{Label, LabelError, LabelSet};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::table::{Entry, Table};
use super::{Manager, NewEndpoint};
use crate::error::EndpointError;
use crate::lifecycle::{Judgement, Side, State};
use crate::log::Status;
use crate::pods::PodLabels;
use crate::workload::SavedEndpoint;

/// Time after which labels that could not be changed are tried again, even if no endpoint has changed.
const RETRY_PERIOD: Duration = Duration::from_secs(5);

/// A change of an endpoint's labels.
#[derive(Clone, Debug)]
pub(super) enum LabelChange {
    /// Labels to add, which replace those of the same source and key, and labels to remove by source and key.
    Edit { add: Vec<Label>, remove: Vec<Label> },
    /// The labels of its pod.
    Pod(LabelSet),
}

/// The labels of a new endpoint.
pub(super) struct FirstLabels {
    pub(super) labels: LabelSet,
    /// The labels that were given, while those of its pod are not known.
    pub(super) given: Option<LabelSet>,
}

/// Endpoints whose labels differ from those of their pods.
#[derive(Default)]
struct OutdatedLabels {
    /// Each with its pod and the labels of that pod.
    wanted: Vec<(u16, PodName, LabelSet)>,
    /// Whether there are more that accept no labels yet.
    is_behind: bool,
    /// Whether an endpoint shows another problem now.
    has_noted: bool,
}

impl Manager {
    /// Returns the labels with which an endpoint starts. The table must be locked meanwhile, so that a change of the
    /// pod's labels finds the endpoint.
    pub(super) fn first_labels(&self, new: &NewEndpoint) -> FirstLabels {
        let (Some(pods), Some(pod)) = (&self.0.pods, &new.pod) else {
            return FirstLabels {
                labels: new.labels.clone(),
                given: None,
            };
        };
        let pods = pods.borrow();
        match pods.of(pod) {
            Some(IdentityLabels { labels, .. }) => FirstLabels {
                labels: with_pod_labels(&new.labels, labels).0,
                given: None,
            },
            None => FirstLabels {
                labels: LabelSet::default(),
                given: Some(new.labels.clone()),
            },
        }
    }

    /// Keeps the labels of endpoints equal to those of their pods.
    pub(super) async fn follow_pods(self, mut pods: watch::Receiver<Arc<PodLabels>>) {
        let mut changes = self.changes();
        loop {
            let known = pods.borrow_and_update().clone();
            changes.mark_unchanged();
            let is_behind = self.take_pod_labels(&known).await;
            tokio::select! {
                changed = pods.changed() => if changed.is_err() {
                    return;
                },
                // An endpoint that is being created or restored accepts no new labels yet.
                _ = changes.changed(), if is_behind => {}
                () = sleep(RETRY_PERIOD), if is_behind => {}
            }
        }
    }

    /// Gives endpoints the labels of their pods. Returns whether an endpoint must be tried again.
    async fn take_pod_labels(&self, known: &PodLabels) -> bool {
        let now = self.now();
        let OutdatedLabels {
            wanted,
            mut is_behind,
            has_noted,
        } = self.table().outdated_labels(known, now);
        if has_noted {
            self.note_change();
        }
        for (id, pod, labels) in wanted {
            match self.relabel(id, LabelChange::Pod(labels)).await {
                Ok(_) => info!(id, %pod, "endpoint has the labels of its pod"),
                Err(EndpointError::Deleted(_) | EndpointError::NotFound(_)) => {}
                Err(EndpointError::Busy(_) | EndpointError::Refused { .. }) => is_behind = true,
                Err(error) => {
                    warn!(id, %pod, %error, "cannot change the labels of an endpoint");
                    is_behind = true;
                }
            }
        }
        is_behind
    }

    pub(super) async fn relabel(
        &self,
        id: u16,
        change: LabelChange,
    ) -> Result<Arc<Endpoint>, EndpointError> {
        let relabelled = self.at_files(move |manager| manager.keep_labels(id, &change));
        if relabelled.await? {
            tokio::spawn(self.clone().resolve(id));
        }
        self.note_change();
        self.with(id, |entry, _| entry.shown())
    }

    /// Changes an endpoint's labels, in its file first, so that a failure changes nothing. Returns whether the identity
    /// must now be requested. Callers must hold the lock of the files.
    fn keep_labels(&self, id: u16, change: &LabelChange) -> Result<bool, EndpointError> {
        const REASON: &str = "labels changed";
        let follows_pods = self.0.pods.is_some();
        let changed = self.with(id, |entry, now| {
            if !entry.is_complete {
                return Err(EndpointError::Busy(id));
            }
            let labels = match change {
                LabelChange::Edit { add, remove } => {
                    check_owner(&entry.saved, add, remove, follows_pods)?;
                    edited(&entry.saved.labels, add, remove)?
                }
                LabelChange::Pod(labels) => with_pod_labels(entry.saved.given(), labels).0,
            };
            if labels == entry.saved.labels && entry.saved.given_labels.is_none() {
                return Ok(None);
            }
            let to = State::WaitingForIdentity;
            if entry.state().judge(Side::Manager, to) == Judgement::Forbidden {
                let refused = entry.set(Side::Manager, to, now, REASON);
                refused.map_err(|refused| EndpointError::Refused { id, refused })?;
            }
            let mut saved = entry.saved.clone();
            saved.relabel(labels);
            Ok(Some(saved))
        })??;
        let Some(saved) = changed else {
            return Ok(false);
        };
        self.0.states.save(&saved)?;
        self.with(id, |entry, now| {
            // The endpoint may already be waiting.
            let _ = entry.set(Side::Manager, State::WaitingForIdentity, now, REASON);
            entry.saved.relabel(saved.labels);
            entry.touch();
            !std::mem::replace(&mut entry.is_resolving, true)
        })
    }
}

impl Table {
    /// Finds the endpoints whose pods have other labels. Records which lack labels of their pods, and why.
    fn outdated_labels(&mut self, known: &PodLabels, now: jiff::Timestamp) -> OutdatedLabels {
        let mut found = OutdatedLabels::default();
        for (id, entry) in &mut self.entries {
            let saved = &entry.saved;
            let Some(pod) = saved.pod.as_ref().filter(|_| !entry.state().is_ending()) else {
                continue;
            };
            // Nothing changes while a pod is not known.
            let Some(identity) = known.of(pod) else {
                continue;
            };
            let (next, dropped) = with_pod_labels(saved.given(), &identity.labels);
            let problem = identity.problem.as_ref().or(dropped.as_ref());
            let problem = problem.map(|error| format!("labels of pod {pod} are missing: {error}"));
            if next != saved.labels || saved.given_labels.is_some() {
                let accepts = entry.is_complete && entry.state() != State::Restoring;
                found.is_behind |= !accepts;
                let wanted = accepts.then(|| (*id, pod.clone(), identity.labels.clone()));
                found.wanted.extend(wanted);
            }
            found.has_noted |= entry.note_pod_problem(problem, now);
        }
        found
    }
}

impl Entry {
    /// Returns whether the problem is new, or over.
    fn note_pod_problem(&mut self, problem: Option<String>, now: jiff::Timestamp) -> bool {
        if self.pod_problem == problem {
            return false;
        }
        if let Some(problem) = &problem {
            self.note(now, Status::Warning, problem.clone());
        }
        self.pod_problem = problem;
        self.touch();
        true
    }
}

/// Returns the given labels with those of a pod, which alone has labels and named ports from Kubernetes. If these are too many together,
/// the pod's labels, which policies for its namespace need, and the error.
fn with_pod_labels(given: &LabelSet, pod: &LabelSet) -> (LabelSet, Option<LabelError>) {
    let own = given
        .iter()
        .filter(|label| !matches!(label.source(), K8S | PORT));
    match LabelSet::new(own.chain(pod.iter()).cloned()) {
        Ok(labels) => (labels, None),
        Err(error) => (pod.clone(), Some(error)),
    }
}

/// Fails if the labels are not for a request to change.
fn check_owner(
    saved: &SavedEndpoint,
    add: &[Label],
    remove: &[Label],
    follows_pods: bool,
) -> Result<(), EndpointError> {
    let Some(pod) = saved.pod.as_ref().filter(|_| follows_pods) else {
        return Ok(());
    };
    let (id, pod) = (saved.id, pod.clone());
    if saved.given_labels.is_some() {
        return Err(EndpointError::AwaitsPod { id, pod });
    }
    match add.iter().chain(remove).find(|label| label.source() == K8S) {
        Some(label) => Err(EndpointError::LabelOfPod {
            label: label.to_string(),
            pod,
        }),
        None => Ok(()),
    }
}

/// Returns the labels without those to remove; the labels to add replace those with the same source and key.
fn edited(labels: &LabelSet, add: &[Label], remove: &[Label]) -> Result<LabelSet, LabelError> {
    let same_key = |a: &Label, b: &Label| (a.source(), a.key()) == (b.source(), b.key());
    let kept = labels
        .iter()
        .filter(|label| !remove.iter().chain(add).any(|other| same_key(other, label)));
    LabelSet::new(kept.chain(add).cloned())
}
