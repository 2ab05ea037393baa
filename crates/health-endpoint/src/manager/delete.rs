//! Deletes endpoints.

use std::time::Instant;

use tracing::{error, info, warn};

use super::Manager;
use crate::error::EndpointError;
use crate::identities::Hold;
use crate::lifecycle::{Side, State};
use crate::log::Status;
use crate::workload::{SavedEndpoint, WorkloadError};

/// How to delete an endpoint.
enum Way {
    /// Nothing to do: the endpoint does not exist.
    Gone,
    /// Wait until the task that works on the endpoint has removed it.
    Wait,
    /// Remove the endpoint.
    Remove,
}

impl Manager {
    /// Deletes an endpoint. Returns whether it existed.
    pub(super) async fn unmake(&self, id: u16) -> Result<bool, EndpointError> {
        let mut was_there = false;
        loop {
            match self.begin_to_delete(id) {
                Way::Gone => return Ok(was_there),
                Way::Wait => {
                    was_there = true;
                    self.note_change();
                    self.wait_until(|table| match table.entries.get(&id) {
                        Some(entry) if entry.is_being_removed || !entry.is_complete => None,
                        _ => Some(()),
                    })
                    .await;
                }
                Way::Remove => {
                    self.note_change();
                    self.remove(id).await?;
                    info!(id, "endpoint deleted");
                    return Ok(true);
                }
            }
        }
    }

    fn begin_to_delete(&self, id: u16) -> Way {
        let now = self.now();
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&id) else {
            return Way::Gone;
        };
        if !entry.state().is_ending() {
            // This transition is allowed from all other states.
            let _ = entry.set(Side::Manager, State::Disconnecting, now, "deleted");
            entry.problem = None;
        }
        let way = match entry.is_being_removed || !entry.is_complete {
            true => Way::Wait,
            false => {
                entry.is_being_removed = true;
                Way::Remove
            }
        };
        table.queue.forget(id);
        way
    }

    /// Removes the remains of an endpoint that could not be created.
    pub(super) async fn clear_away(&self, id: u16, problem: &EndpointError) {
        let now = self.now();
        if let Some(entry) = self.table().entries.get_mut(&id) {
            entry.note(now, Status::Failure, format!("creation failed: {problem}"));
            // The endpoint may have been deleted meanwhile.
            let _ = entry.set(Side::Manager, State::Disconnecting, now, "creation failed");
            entry.problem = None;
            entry.is_being_removed = true;
        }
        self.table().queue.forget(id);
        self.note_change();
        if let Err(error) = self.remove(id).await {
            error!(id, %error, "cannot clean up after a failed endpoint creation; the next start will retry");
        }
    }

    /// Removes an endpoint completely. If this fails, the endpoint remains in state disconnecting with all its traffic
    /// dropped, and can be deleted again.
    async fn remove(&self, id: u16) -> Result<(), EndpointError> {
        let removed = self.remove_parts(id).await;
        let held = self.note_removal(id, &removed);
        if removed.is_err() {
            self.shut_off(id).await;
        }
        self.note_change();
        if removed.is_ok() {
            tokio::spawn(self.clone().forget_later());
        }
        for hold in held {
            self.0.identities.release(hold).await;
        }
        removed
    }

    /// Drops all traffic of an endpoint that cannot be deleted.
    async fn shut_off(&self, id: u16) {
        let shut_off = self.0.regenerator.shut_off(id).await;
        let now = self.now();
        if let Some(entry) = self.table().entries.get_mut(&id) {
            match shut_off {
                Ok(None) => {}
                Ok(Some(realized)) => {
                    entry.realized = Some(realized);
                    entry.note(now, Status::Warning, "all its traffic is dropped");
                }
                Err(error) => {
                    warn!(id, %error, "cannot drop the traffic of an endpoint that cannot be deleted; its previous policy stays in force");
                    let message = format!("its previous policy stays in force: {error}");
                    entry.note(now, Status::Failure, message);
                }
            }
        }
    }

    /// Records the result. Returns the holds on identities that the endpoint still has.
    fn note_removal(&self, id: u16, removed: &Result<(), EndpointError>) -> Vec<Hold> {
        let now = self.now();
        let mut table = self.table();
        match removed {
            Ok(()) => {
                table.ipam.release(id, Instant::now());
                let Some(mut entry) = table.entries.remove(&id) else {
                    return Vec::new();
                };
                // This transition is allowed from that state.
                let _ = entry.set(Side::Manager, State::Disconnected, now, "deleted");
                let held = std::mem::take(&mut entry.held);
                table.departed.show(entry, tokio::time::Instant::now());
                held
            }
            Err(error) => {
                if let Some(entry) = table.entries.get_mut(&id) {
                    entry.is_being_removed = false;
                    // The remains of a failed creation are deleted like any other endpoint.
                    entry.is_complete = true;
                    entry.problem = Some(error.to_string());
                    entry.note(now, Status::Failure, format!("cannot be deleted: {error}"));
                }
                Vec::new()
            }
        }
    }

    /// Records on disk that an endpoint is being deleted, so that the next agent knows why its device is missing.
    async fn note_deletion(&self, id: u16) {
        let noted = self.at_files(move |manager| {
            let saved = manager.table().entries.get(&id).map(|entry| SavedEndpoint {
                is_deleting: true,
                ..entry.saved.clone()
            });
            // The next agent rolls back an endpoint without a device in any case.
            let saved = saved.filter(|saved| saved.ifindex.is_some());
            saved.map_or(Ok(()), |saved| Ok(manager.0.states.save(&saved)?))
        });
        // Continue the deletion anyway.
        if let Err(error) = noted.await {
            warn!(id, %error, "cannot record that an endpoint is being deleted");
        }
    }

    /// Removes the device first, so that nothing passes without a policy. Removes the file last, as it tells the next
    /// agent what may still exist.
    async fn remove_parts(&self, id: u16) -> Result<(), EndpointError> {
        self.wait_until(|table| (!table.queue.is_running(id)).then_some(()))
            .await;
        self.note_deletion(id).await;
        // Without an ifindex there is no device: a failing creation removes its device itself.
        let device = self.table().entries.get(&id).and_then(|entry| {
            let is_there = entry.saved.ifindex.is_some();
            is_there.then(|| entry.saved.device.clone())
        });
        if let Some(device) = device {
            match self.0.devices.remove(&device).await {
                // Another program created this device after ours was gone.
                Err(WorkloadError::ForeignDevice { .. }) => {
                    warn!(
                        id,
                        device, "a device with this name belongs to another program; left alone"
                    );
                }
                removed => {
                    removed?;
                }
            }
        }
        let removed = self.0.regenerator.remove(id).await;
        removed.map_err(|source| EndpointError::Regenerate { id, source })?;
        self.at_files(move |manager| Ok(manager.0.states.remove(id).map(drop)?))
            .await
    }
}
