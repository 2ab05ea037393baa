//! Which identity an endpoint has, as its labels and the store say.

use std::sync::Arc;
use std::time::Duration;

use health_model::api::Endpoint;
use health_model::identity::Identity;
use health_model::labels::{Label, LabelSet};
use health_registry::identity::HeldIdentities;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

use super::Manager;
use super::table::Entry;
use crate::error::EndpointError;
use crate::identities::IdentityUnavailable;
use crate::lifecycle::{Side, State};
use crate::log::Status;

/// How long the source may take until an endpoint goes on without.
const PATIENCE: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Manager {
    /// Gives a new endpoint its identity; `reserved:init` where it cannot be told at once.
    pub(super) async fn first_identity(&self, id: u16) -> Result<(), EndpointError> {
        let labels = self.with(id, |entry, _| entry.saved.labels.clone())?;
        if labels.is_empty() {
            return self.with(id, |entry, now| {
                entry.note(
                    now,
                    Status::Ok,
                    "no labels are known: identity reserved:init",
                );
            });
        }
        let acquired = self.acquire(&labels).await;
        self.with(id, |entry, now| match acquired {
            Ok(identity) => {
                entry.held.push(identity);
                entry.saved.identity = identity;
                entry.note(
                    now,
                    Status::Ok,
                    format!("identity {identity} for its labels"),
                );
                entry.touch();
            }
            Err(error) => {
                let message = format!("identity reserved:init meanwhile: {error}");
                entry.note(now, Status::Warning, message);
            }
        })
    }

    /// Asks for the identity until it is there, if what is held is not that of the labels.
    pub(super) fn resolve_if_needed(&self, id: u16) {
        let needs = self.with(id, |entry, _| {
            let is_old = entry.held.is_empty() || entry.is_renumbered;
            let needs = !entry.saved.labels.is_empty() && is_old;
            needs && !std::mem::replace(&mut entry.is_resolving, true)
        });
        if needs.unwrap_or(false) {
            tokio::spawn(self.clone().resolve(id));
        }
    }

    /// Has endpoints follow when their labels get another identity.
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

    /// Has the endpoints of these labels ask for their identity again, where it is another one.
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
                // One that was taken over is restoring until it is built.
                if entry.state() != State::Restoring {
                    let reason = "the identity of its labels has changed";
                    // From the other states of a running endpoint that is allowed.
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

    pub(super) async fn relabel(
        &self,
        id: u16,
        add: &[Label],
        remove: &[Label],
    ) -> Result<Arc<Endpoint>, EndpointError> {
        let same_key = |a: &Label, b: &Label| (a.source(), a.key()) == (b.source(), b.key());
        let changed = self.with(id, |entry, now| {
            if !entry.is_complete {
                return Err(EndpointError::Busy(id));
            }
            let kept = entry
                .saved
                .labels
                .iter()
                .filter(|label| !remove.iter().chain(add).any(|other| same_key(other, label)));
            let labels = LabelSet::new(kept.chain(add).cloned())?;
            if labels == entry.saved.labels {
                return Ok(false);
            }
            let waits = entry.set(
                Side::Manager,
                State::WaitingForIdentity,
                now,
                "labels changed",
            );
            match waits {
                Err(refused) if !refused.is_superseded => {
                    return Err(EndpointError::Refused { id, refused });
                }
                _ => {}
            }
            entry.saved.labels = labels;
            entry.touch();
            Ok(!std::mem::replace(&mut entry.is_resolving, true))
        })??;
        self.note_change();
        self.save(id).await?;
        if changed {
            tokio::spawn(self.clone().resolve(id));
        }
        self.with(id, |entry, _| entry.shown())
    }

    /// Asks for the identity of an endpoint's labels until it is there and they are still the same.
    pub(super) async fn resolve(self, id: u16) {
        let mut pause = FIRST_PAUSE;
        let mut last_problem = None;
        loop {
            let asked = self.with(id, |entry, _| {
                entry.is_renumbered = false;
                entry.saved.labels.clone()
            });
            let Ok(labels) = asked else {
                return;
            };
            let acquired = match labels.is_empty() {
                true => Ok(Identity::INIT),
                false => self.acquire(&labels).await,
            };
            let identity = match acquired {
                Ok(identity) => identity,
                Err(error) => {
                    if last_problem.as_ref() != Some(&error) {
                        warn!(id, %error, "an endpoint waits for its identity");
                        let noted = self.with(id, |entry, now| {
                            entry.note(now, Status::Warning, error.to_string());
                        });
                        if noted.is_err() {
                            return;
                        }
                        last_problem = Some(error);
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    continue;
                }
            };
            if self.take_identity(id, &labels, identity).await {
                // It may have changed since.
                return self.resolve_if_needed(id);
            }
        }
    }

    async fn acquire(&self, labels: &LabelSet) -> Result<Identity, IdentityUnavailable> {
        let acquired = timeout(PATIENCE, self.0.identities.acquire(labels)).await;
        acquired
            .unwrap_or_else(|_| Err(IdentityUnavailable("the store does not answer".to_owned())))
    }

    /// Gives an endpoint the identity that was acquired for these labels. Returns false if it has others
    /// by now.
    async fn take_identity(&self, id: u16, labels: &LabelSet, identity: Identity) -> bool {
        let is_held = !labels.is_empty();
        let taken = self.with(id, |entry, _| {
            let is_same = entry.saved.labels == *labels;
            if is_same {
                entry.is_resolving = false;
                if is_held {
                    entry.held.push(identity);
                }
            }
            is_same
        });
        if !matches!(taken, Ok(true)) {
            if is_held {
                self.0.identities.release(identity).await;
            }
            return taken.is_err();
        }
        let is_new = self.with(id, |entry, now| change_identity(entry, identity, now));
        match is_new {
            Ok(true) => {
                // What cannot be written down is known again from the labels.
                if let Err(error) = self.save(id).await {
                    warn!(id, %error, "an endpoint's identity cannot be kept");
                }
                self.table().queue.push(id, "identity changed");
                self.0.work.notify_one();
            }
            Ok(false) => self.release_former(id).await,
            Err(_) => {}
        }
        self.note_change();
        true
    }

    /// Gives back what packets cannot meet any more: all that is held but the identity in use, once.
    pub(super) async fn release_former(&self, id: u16) {
        let former = self.with(id, |entry, _| {
            let current = entry.saved.identity;
            let kept = entry.held.iter().rposition(|held| *held == current);
            let held = std::mem::take(&mut entry.held);
            let mut former = Vec::new();
            for (place, identity) in held.into_iter().enumerate() {
                match Some(place) == kept {
                    true => entry.held.push(identity),
                    false => former.push(identity),
                }
            }
            former
        });
        for identity in former.unwrap_or_default() {
            self.0.identities.release(identity).await;
        }
    }
}

/// Returns whether the endpoint is to be regenerated.
fn change_identity(entry: &mut Entry, identity: Identity, now: jiff::Timestamp) -> bool {
    let is_waiting = entry.state() == State::WaitingForIdentity;
    // One that was never built by this agent is not ready, whatever its identity.
    let is_same = entry.saved.identity == identity && (entry.realized.is_some() || !is_waiting);
    if is_same && !entry.is_outdated {
        if is_waiting {
            // From there that is allowed.
            let message = format!("identity is {identity} as before");
            let _ = entry.set(Side::Manager, State::Ready, now, &message);
        }
        return false;
    }
    entry.is_outdated = false;
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
        // From the states of a running endpoint that is allowed.
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

fn identity_message(identity: Identity) -> String {
    match identity {
        Identity::INIT => "identity reserved:init: no other is allocated for its labels".to_owned(),
        identity => format!("identity {identity} for its labels"),
    }
}
