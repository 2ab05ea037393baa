//! Follows the node's MTU, which an uplink may change while endpoints exist.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::Manager;
use crate::error::EndpointError;

/// How soon to retry an endpoint that could not follow.
const AGAIN: Duration = Duration::from_secs(5);

impl Manager {
    /// Sets the MTU, in bytes, of all present and future endpoints. Returns at once.
    pub fn set_mtu(&self, mtu: u32) {
        self.0
            .mtu
            .send_if_modified(|known| std::mem::replace(known, mtu) != mtu);
    }

    pub(super) async fn follow_mtu(self, mut mtu: watch::Receiver<u32>) {
        loop {
            let wanted = *mtu.borrow_and_update();
            let all_follow = self.resize_all(wanted).await;
            let again = async {
                match all_follow {
                    true => std::future::pending().await,
                    false => sleep(AGAIN).await,
                }
            };
            tokio::select! {
                changed = mtu.changed() => if changed.is_err() {
                    return;
                },
                () = again => {}
            }
        }
    }

    /// Sets the MTU of all endpoints. Returns whether all of them have it now.
    async fn resize_all(&self, mtu: u32) -> bool {
        let others: Vec<(u16, bool)> = {
            let table = self.table();
            let entries = table.entries.values();
            let others = entries.filter(|entry| entry.saved.mtu != mtu);
            let living = others.filter(|entry| !entry.state().is_ending());
            living
                .map(|entry| (entry.saved.id, entry.is_complete))
                .collect()
        };
        let mut all_follow = true;
        for (id, is_complete) in others {
            // An endpoint that is being created gets the new MTU once it exists.
            let follows = is_complete
                && match self.resize(id, mtu).await {
                    Ok(()) => {
                        info!(id, mtu, "endpoint MTU updated");
                        true
                    }
                    Err(EndpointError::NotFound(_) | EndpointError::Deleted(_)) => true,
                    Err(error) => {
                        warn!(id, mtu, %error, "cannot update the MTU of an endpoint; it will be retried");
                        false
                    }
                };
            all_follow &= follows;
        }
        all_follow
    }

    async fn resize(&self, id: u16, mtu: u32) -> Result<(), EndpointError> {
        let mut blueprint = self.blueprint(id)?;
        blueprint.mtu = mtu;
        self.0.devices.set_mtu(&blueprint).await?;
        self.with(id, |entry, _| entry.saved.mtu = mtu)?;
        self.save(id).await
    }
}
