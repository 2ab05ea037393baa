//! Regenerates endpoints: several concurrently, and each until it succeeds.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use super::Manager;
use crate::lifecycle::{Side, State};
use crate::log::Status;
use crate::regenerate::Regeneration;

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

impl Manager {
    /// Starts regenerations as soon as possible.
    pub(super) async fn build_forever(self) {
        loop {
            let begun = self.table().queue.begin();
            match begun {
                Some((id, reason)) => {
                    tokio::spawn(self.clone().build(id, reason));
                }
                None => self.0.work.notified().await,
            }
        }
    }

    async fn build(self, id: u16, reason: String) {
        if let Some(endpoint) = self.begin_to_build(id, &reason) {
            self.note_change();
            let begun = Instant::now();
            let built = self.0.regenerator.regenerate(&endpoint).await;
            let took = begun.elapsed();
            let now = self.now();
            let failures = {
                let mut table = self.table();
                table.note_regeneration(built.is_ok(), took);
                table.entries.get_mut(&id).and_then(|entry| match built {
                    Ok(realized) => {
                        entry.realized = Some(realized);
                        entry.settings_in_force = Some(endpoint.settings);
                        entry.is_closed = endpoint.fails_closed;
                        entry.failures = 0;
                        entry.problem = None;
                        entry.touch();
                        let message = format!("regenerated in {took:.1?}: {reason}");
                        // Superseded if the next build is already requested or another identity is awaited.
                        let is_ready = match entry.saved.lacks_identity() {
                            false => entry.set(Side::Builder, State::Ready, now, &message),
                            // This transition is allowed from that state.
                            true => entry.set(Side::Manager, State::WaitingForIdentity, now, &message),
                        };
                        if is_ready.is_err() && entry.state() == State::WaitingForIdentity {
                            entry.note(now, Status::Ok, message);
                        }
                        // If the endpoint got another identity meanwhile, packets meet the old one until the next
                        // build.
                        (entry.saved.identity == endpoint.identity).then_some(0)
                    }
                    Err(error) => {
                        warn!(id, %error, "cannot regenerate an endpoint; its previous policy stays in force");
                        entry.failures += 1;
                        let message = format!("not regenerated, its previous policy stays in force: {error}");
                        entry.problem = Some(error.to_string());
                        entry.note(now, Status::Failure, message);
                        if entry.state() == State::Regenerating {
                            let to = State::WaitingToRegenerate;
                            let _ = entry.set(Side::Manager, to, now, "will retry");
                        }
                        Some(entry.failures)
                    }
                })
            };
            match failures {
                Some(0) => self.release_former(id).await,
                Some(failures) => {
                    tokio::spawn(self.clone().try_again(id, failures));
                }
                None => {}
            }
        }
        self.table().queue.end(id);
        self.note_change();
        self.0.work.notify_one();
    }

    /// Returns the intended state of the endpoint if it needs to be built.
    fn begin_to_build(&self, id: u16, reason: &str) -> Option<Regeneration> {
        let now = self.now();
        let mut table = self.table();
        let entry = table.living(id).ok()?;
        // An endpoint whose labels have changed keeps its old identity until the new one is known.
        if entry.state() != State::WaitingForIdentity
            && let Err(refused) = entry.set(Side::Builder, State::Regenerating, now, reason)
        {
            debug!(id, %refused, "not regenerated");
            return None;
        }
        let saved = &entry.saved;
        Some(Regeneration {
            id,
            identity: saved.identity,
            labels: saved.labels_in_use().clone(),
            fails_closed: saved.lacks_identity(),
            settings: saved.settings,
            addresses: saved.addresses().collect(),
            device: saved.device.clone(),
            ifindex: saved.ifindex?,
            mac: saved.mac,
            host_mac: saved.host_mac,
        })
    }

    async fn try_again(self, id: u16, failures: u32) {
        let doublings = failures.saturating_sub(1).min(8);
        sleep((FIRST_PAUSE * 2_u32.pow(doublings)).min(LONGEST_PAUSE)).await;
        let is_wanted = self.with(id, |entry, _| {
            let state = entry.state();
            let waits = matches!(
                state,
                State::WaitingToRegenerate | State::WaitingForIdentity
            );
            waits && entry.failures == failures
        });
        if is_wanted.unwrap_or(false) {
            self.table().push(id, "tried again");
            self.0.work.notify_one();
        }
    }
}
