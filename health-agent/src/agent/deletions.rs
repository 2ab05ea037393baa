//! Carrying out what was to be deleted while no agent ran.

use std::time::Duration;

use health_endpoint::manager::{Manager, Selector};
use health_endpoint::workload::{StateDir, WorkloadError};
use health_model::settings::Location;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::deletions::{Deletion, Deletions, DeletionsError};

/// How soon something is looked for that was written down while this agent did not answer.
const PERIOD: Duration = Duration::from_secs(1);
/// How often what fails is tried again.
const AGAIN: Duration = Duration::from_secs(10);

/// Writes into the endpoints' files which of them are to be deleted, so that nobody wonders where their devices are.
pub(super) fn announce(location: &Location, states: &StateDir) -> Result<(), AnnounceError> {
    if !Deletions::is_anything_waiting(location) {
        return Ok(());
    }
    let (waiting, _) = Deletions::lock(location)?.read()?;
    let (saved, _) = states.load()?;
    for mut saved in saved {
        let mut waiting = waiting.iter();
        if waiting.any(|one| saved.is_of(&one.container_id, &one.ifname)) {
            saved.is_deleting = true;
            states.save(&saved)?;
        }
    }
    Ok(())
}

/// Why it cannot be written into the endpoints' files.
#[derive(Debug, thiserror::Error)]
pub(super) enum AnnounceError {
    #[error(transparent)]
    Deletions(#[from] DeletionsError),
    #[error(transparent)]
    States(#[from] WorkloadError),
}

/// Carries out what waits now. Returns whether all of it is done.
pub(super) async fn carry_out(location: &Location, manager: &Manager) -> bool {
    if !Deletions::is_anything_waiting(location) {
        return true;
    }
    let place = location.clone();
    let locked = tokio::task::spawn_blocking(move || {
        let deletions = Deletions::lock(&place)?;
        let read = deletions.read()?;
        Ok::<_, DeletionsError>((deletions, read))
    });
    let (deletions, (waiting, problems)) = match locked.await {
        Ok(Ok(locked)) => locked,
        Ok(Err(error)) => {
            warn!(%error, "cannot read which endpoints are to be deleted");
            return false;
        }
        Err(error) => {
            warn!(%error, "cannot read which endpoints are to be deleted");
            return false;
        }
    };
    for problem in problems {
        warn!(
            problem,
            "an endpoint to be deleted is not known: its file cannot be read"
        );
    }
    let mut is_done = true;
    for deletion in waiting {
        let Deletion {
            container_id,
            ifname,
        } = deletion.clone();
        let meant = Selector::Attachment {
            container_id,
            ifname,
        };
        let outcome = match manager.delete(&meant).await {
            Ok(ids) => {
                info!(
                    ?ids,
                    container = deletion.container_id,
                    ifname = deletion.ifname,
                    "deleted as asked for earlier"
                );
                deletions
                    .remove(&deletion)
                    .map(drop)
                    .map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = outcome {
            warn!(
                error,
                container = deletion.container_id,
                "cannot delete an endpoint; it is tried again"
            );
            is_done = false;
        }
    }
    is_done
}

/// Carries out what is written down from now on, until the agent ends.
pub(super) async fn keep_carrying_out(location: Location, manager: Manager) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !carry_out(&location, &manager).await {
            tokio::time::sleep(AGAIN).await;
        }
    }
}
