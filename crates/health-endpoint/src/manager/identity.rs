//! Determines an endpoint's identity from its labels and the store.

use std::sync::Arc;
use std::time::Duration;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_registry::identity::HeldIdentities;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

use super::Manager;
use super::table::{Entry, NO_IDENTITY};
use crate::error::EndpointError;
use crate::identities::{Hold, IdentityUnavailable};
use crate::lifecycle::{Side, State};
use crate::log::Status;

/// How long the source may take before the endpoint continues without an identity.
const PATIENCE: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Manager {
    /// Gives a new endpoint its identity. If the identity is not known at once, the endpoint fails closed.
    pub(super) async fn first_identity(&self, id: u16) -> Result<(), EndpointError> {
        let labels = self.with(id, |entry, now| {
            if entry.saved.labels.is_empty() {
                let why = entry.saved.awaited_labels();
                let why = why.unwrap_or_else(|| "no labels are known".to_owned());
                entry.note(now, Status::Ok, format!("{why}: identity reserved:init"));
            }
            entry.saved.labels.clone()
        })?;
        if labels.is_empty() {
            return Ok(());
        }
        let (mut hold, problem) = match self.acquire(&labels).await {
            Ok(hold) => (Some(hold), None),
            Err(error) => (None, Some(error)),
        };
        let noted = self.with(id, |entry, now| {
            if let Some(hold) = hold.take() {
                let identity = hold.identity;
                entry.held.push(hold);
                entry.saved.identity = identity;
                entry.note(
                    now,
                    Status::Ok,
                    format!("identity {identity} for its labels"),
                );
                entry.touch();
            }
            if let Some(error) = problem {
                note_no_identity(entry, now, &error);
            }
        });
        // The endpoint was deleted meanwhile.
        if let Some(hold) = hold {
            self.0.identities.release(hold).await;
        }
        noted
    }

    /// If the held identity does not match the labels, requests the identity until it is known.
    pub(super) fn resolve_if_needed(&self, id: u16) {
        let needs = self.with(id, |entry, _| {
            let is_old = entry.held.is_empty() || entry.is_renumbered;
            let is_former = entry.saved.former_labels.is_some();
            let needs = is_former || !entry.saved.labels.is_empty() && is_old;
            needs && !std::mem::replace(&mut entry.is_resolving, true)
        });
        if needs.unwrap_or(false) {
            tokio::spawn(self.clone().resolve(id));
        }
    }

    /// Makes endpoints follow when the store gives their labels another identity.
    pub(super) async fn follow_identities(self, mut held: watch::Receiver<Arc<HeldIdentities>>) {
        let mut before = held.borrow_and_update().clone();
        while held.changed().await.is_ok() {
            let now = held.borrow_and_update().clone();
            for (labels, identity) in now.iter() {
                if before.get(labels).is_some_and(|was| was != identity) {
                    self.renumber(labels, *identity);
                }
            }
            before = now;
        }
    }

    /// Makes the endpoints with these labels request their identity again if it has changed.
    fn renumber(&self, labels: &LabelSet, identity: Identity) {
        let now = self.now();
        let mut waiting = Vec::new();
        for (id, entry) in &mut self.table().entries {
            let is_one = entry.saved.labels == *labels && entry.saved.identity != identity;
            if !is_one || entry.state().is_ending() {
                continue;
            }
            entry.is_renumbered = true;
            if entry.is_complete && !entry.is_resolving {
                // A taken-over endpoint stays in state restoring until it is built.
                if entry.state() != State::Restoring {
                    let reason = "the identity of its labels has changed";
                    // This transition is allowed from the other states of a running endpoint.
                    let _ = entry.set(Side::Manager, State::WaitingForIdentity, now, reason);
                }
                waiting.push(*id);
            }
        }
        for id in waiting {
            self.resolve_if_needed(id);
        }
        self.note_change();
    }

    /// Requests the identity of an endpoint's labels until it is known and the labels did not change meanwhile.
    pub(super) async fn resolve(self, id: u16) {
        let mut pause = FIRST_PAUSE;
        let mut last_problem = None;
        loop {
            let asked = self.with(id, |entry, _| {
                entry.is_renumbered = false;
                (unheld_former(entry), entry.saved.labels.clone())
            });
            let Ok((former, labels)) = asked else {
                return;
            };
            if let Some(former) = former
                && let Ok(hold) = self.acquire(&former).await
            {
                self.hold_former(id, hold).await;
            }
            let acquired = match labels.is_empty() {
                true => Ok(None),
                false => self.acquire(&labels).await.map(Some),
            };
            let hold = match acquired {
                Ok(hold) => hold,
                Err(error) => {
                    if last_problem.as_ref() != Some(&error) {
                        warn!(id, %error, "endpoint is waiting for its identity");
                        let noted = self.with(id, |entry, now| {
                            note_no_identity(entry, now, &error);
                        });
                        if noted.is_err() {
                            return;
                        }
                        self.note_change();
                        last_problem = Some(error);
                    }
                    self.close_without_identity(id);
                    sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    continue;
                }
            };
            if let Some(hold) = &hold {
                self.until_covered(id, hold.identity).await;
            }
            if self.take_identity(id, &labels, hold).await {
                // The identity may have changed since.
                return self.resolve_if_needed(id);
            }
        }
    }

    /// Waits until the policies of all endpoints cover the next identity of an endpoint.
    async fn until_covered(&self, id: u16, next: Identity) {
        let is_new = self.with(id, |entry, _| entry.saved.identity != next);
        if is_new.unwrap_or(false) {
            self.0.regenerator.until_covered(next).await;
        }
    }

    /// Builds an endpoint that must fail closed but does not do so yet.
    fn close_without_identity(&self, id: u16) {
        let is_open = self.with(id, |entry, _| {
            entry.is_complete && entry.saved.lacks_identity() && !entry.is_closed
        });
        if is_open.unwrap_or(false) {
            self.table().push(id, NO_IDENTITY);
            self.0.work.notify_one();
        }
    }

    /// Holds the identity of the labels in force until the identity of the new labels is known.
    async fn hold_former(&self, id: u16, hold: Hold) {
        let mut hold = Some(hold);
        let _ = self.with(id, |entry, _| {
            let is_wanted = |hold: &mut Hold| unheld_former(entry).as_ref() == Some(&hold.labels);
            let taken = hold.take_if(is_wanted);
            entry.held.extend(taken);
        });
        if let Some(hold) = hold {
            self.0.identities.release(hold).await;
        }
    }

    async fn acquire(&self, labels: &LabelSet) -> Result<Hold, IdentityUnavailable> {
        let acquired = timeout(PATIENCE, self.0.identities.acquire(labels)).await;
        acquired
            .unwrap_or_else(|_| Err(IdentityUnavailable("the store does not answer".to_owned())))
    }

    /// Gives an endpoint the identity that was acquired for these labels, or `reserved:init` if none was. Returns false
    /// if the endpoint's labels have changed meanwhile.
    async fn take_identity(&self, id: u16, labels: &LabelSet, mut hold: Option<Hold>) -> bool {
        let identity = hold.as_ref().map_or(Identity::INIT, |hold| hold.identity);
        let now = self.now();
        // Done under one lock: otherwise a label change or the end of a build could see a half-made change.
        let taken = {
            let mut table = self.table();
            let is_asked_for = table.queue.is_asked_for(id);
            table.living(id).map(|entry| {
                (entry.saved.labels == *labels).then(|| {
                    entry.is_resolving = false;
                    entry.held.extend(hold.take());
                    change_identity(entry, identity, is_asked_for, now)
                })
            })
        };
        let is_new = match taken {
            Ok(Some(is_new)) => is_new,
            not_taken => {
                if let Some(hold) = hold {
                    self.0.identities.release(hold).await;
                }
                return not_taken.is_err();
            }
        };
        if is_new {
            // If saving fails, the next agent finds the identity again from the labels.
            if let Err(error) = self.save(id).await {
                warn!(id, %error, "cannot save an endpoint's identity");
            }
            self.table().push(id, "identity changed");
            self.0.work.notify_one();
        } else {
            self.release_former(id).await;
        }
        self.note_change();
        true
    }

    /// Releases all holds on identities that packets can no longer meet, which leaves one hold on the identity in use.
    pub(super) async fn release_former(&self, id: u16) {
        let former = self.with(id, |entry, _| {
            let current = entry.saved.identity;
            let mut former = std::mem::take(&mut entry.held);
            if let Some(place) = former.iter().rposition(|hold| hold.identity == current) {
                entry.held.push(former.remove(place));
            }
            former
        });
        for hold in former.unwrap_or_default() {
            self.0.identities.release(hold).await;
        }
    }
}

/// Returns the labels in force while the identity of the new ones is requested, if nobody holds their identity: the
/// previous agent held it, and the store reassigns numbers that are not held.
fn unheld_former(entry: &Entry) -> Option<LabelSet> {
    let former = entry.saved.former_labels.as_ref()?;
    let is_held = entry.held.iter().any(|hold| hold.labels == *former);
    let is_its_own = !former.is_empty() && entry.saved.identity != Identity::INIT;
    (is_its_own && !is_held).then(|| former.clone())
}

/// Gives an endpoint the identity of its labels. Returns whether it must be regenerated, even if that was already
/// requested: the requested build may have started with the old identity.
fn change_identity(
    entry: &mut Entry,
    identity: Identity,
    is_asked_for: bool,
    now: jiff::Timestamp,
) -> bool {
    // A store that lost the number may have given it to other labels.
    let is_of_others = entry.saved.former_labels.take().is_some();
    let is_waiting = entry.state() == State::WaitingForIdentity;
    let is_same = entry.saved.identity == identity && !is_of_others && !entry.is_closed;
    entry.identity_problem = None;
    // An endpoint that this agent never built is not ready, whatever its identity.
    let is_built = entry.realized.is_some() && entry.problem.is_none() && !is_asked_for;
    if is_same && (is_built || !is_waiting) {
        if is_waiting {
            // This transition is allowed from that state.
            let message = format!("identity is still {identity}");
            let _ = entry.set(Side::Manager, State::Ready, now, &message);
        }
        return false;
    }
    entry.saved.identity = identity;
    entry.touch();
    if entry.state() == State::Restoring {
        entry.note(
            now,
            Status::Ok,
            format!("identity {identity} for its labels"),
        );
        return true;
    }
    if !is_waiting {
        // This transition is allowed from all states of a running endpoint.
        let _ = entry.set(
            Side::Manager,
            State::WaitingForIdentity,
            now,
            "identity changes",
        );
    }
    entry
        .set(
            Side::Manager,
            State::WaitingToRegenerate,
            now,
            &identity_message(identity),
        )
        .is_ok()
}

/// Logs why there is no identity for an endpoint's labels, and the consequence.
fn note_no_identity(entry: &mut Entry, now: jiff::Timestamp, problem: &IdentityUnavailable) {
    let message = match entry.saved.lacks_identity() {
        true => format!("{NO_IDENTITY}: {problem}"),
        false => problem.to_string(),
    };
    entry.note(now, Status::Warning, message);
    entry.identity_problem = Some(problem.to_string());
    entry.touch();
}

fn identity_message(identity: Identity) -> String {
    match identity {
        Identity::INIT => {
            "identity reserved:init: no other identity is allocated for its labels".to_owned()
        }
        identity => format!("identity {identity} for its labels"),
    }
}
