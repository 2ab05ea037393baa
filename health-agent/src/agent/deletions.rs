//! Carries out deletions that were queued while no agent ran.

use std::time::{Duration, Instant};

use health_cni::deletions::{Deletion, Deletions, DeletionsError};
use health_endpoint::manager::{Manager, Selector};
use health_endpoint::workload::{StateDir, WorkloadError};
use health_model::activity::{Problem, Reporter};
use health_model::settings::Location;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

/// How often the agent looks for deletions that were queued because it did not respond.
const PERIOD: Duration = Duration::from_secs(1);
/// Time between two attempts at a failing deletion.
const AGAIN: Duration = Duration::from_secs(10);

/// After locking the folder for this long, leave it unlocked for a moment. Other processes poll for the lock every 5 ms
/// and would otherwise never find it free between two deletions.
const LOCKED: Duration = Duration::from_millis(100);
const UNLOCKED: Duration = Duration::from_millis(20);

/// Marks endpoints with a queued deletion in their state files, so that their missing devices are not reported as
/// unexpected.
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

/// Why the state files cannot be marked.
#[derive(Debug, thiserror::Error)]
pub(super) enum AnnounceError {
    #[error(transparent)]
    Deletions(#[from] DeletionsError),
    #[error(transparent)]
    States(#[from] WorkloadError),
}

/// Carries out the currently queued deletions. Returns whether all of them succeeded.
pub(super) async fn carry_out(location: &Location, manager: &Manager) -> bool {
    if !Deletions::is_anything_waiting(location) {
        return true;
    }
    let delete = |deletion: Deletion| async move {
        let Deletion {
            container_id,
            ifname,
        } = deletion.clone();
        let meant = Selector::Attachment {
            container_id,
            ifname,
        };
        let ids = manager
            .delete(&meant)
            .await
            .map_err(|error| error.to_string())?;
        info!(
            ?ids,
            container = deletion.container_id,
            ifname = deletion.ifname,
            "deleted an endpoint as requested earlier"
        );
        Ok(())
    };
    carry_out_by(location, delete).await
}

/// Calls `delete` for each currently queued deletion. Locks the folder for one deletion at a time, so that the plugin,
/// which waits only a few seconds for the lock, can queue more in between. Returns whether all deletions succeeded.
async fn carry_out_by<F: Future<Output = Result<(), String>>>(
    location: &Location,
    delete: impl Fn(Deletion) -> F,
) -> bool {
    let read = locked(location, |deletions| deletions.read());
    let (waiting, problems) = match read.await {
        Ok((_, read)) => read,
        Err(error) => {
            warn!(error, "cannot read the queued endpoint deletions");
            return false;
        }
    };
    for problem in problems {
        warn!(
            problem,
            "cannot read the file of a queued endpoint deletion"
        );
    }
    let mut is_done = true;
    let mut since = Instant::now();
    for deletion in waiting {
        if since.elapsed() >= LOCKED {
            tokio::time::sleep(UNLOCKED).await;
            since = Instant::now();
        }
        if let Err(error) = carry_out_one(location, &deletion, &delete).await {
            warn!(
                error,
                container = deletion.container_id,
                "cannot delete an endpoint; it will be retried"
            );
            is_done = false;
        }
    }
    is_done
}

async fn carry_out_one<F: Future<Output = Result<(), String>>>(
    location: &Location,
    deletion: &Deletion,
    delete: &impl Fn(Deletion) -> F,
) -> Result<(), String> {
    let meant = deletion.clone();
    // As long as the deletion is queued, no endpoint is created for this container and interface.
    let (deletions, waits) = locked(location, move |deletions| Ok(deletions.waits(&meant))).await?;
    if !waits {
        return Ok(());
    }
    delete(deletion.clone()).await?;
    let removed = deletions.remove(deletion);
    removed.map(drop).map_err(|error| error.to_string())
}

/// Locks the folder and runs `work` on it.
async fn locked<T: Send + 'static>(
    location: &Location,
    work: impl FnOnce(&Deletions) -> Result<T, DeletionsError> + Send + 'static,
) -> Result<(Deletions, T), String> {
    let location = location.clone();
    let done = tokio::task::spawn_blocking(move || {
        let deletions = Deletions::lock(&location)?;
        let result = work(&deletions)?;
        Ok::<_, DeletionsError>((deletions, result))
    });
    match done.await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// Carries out deletions that are queued from now on, until the agent stops.
pub(super) async fn keep_carrying_out(location: Location, manager: Manager, reporter: Reporter) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if carry_out(&location, &manager).await {
            reporter.end(None, Some(PERIOD));
        } else {
            let problem = Problem::warning("cannot carry out all deletions; see the log");
            reporter.end(Some(problem), Some(AGAIN));
            tokio::time::sleep(AGAIN).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::Path;
    use std::thread;

    use super::*;

    fn location(root: &Path) -> Location {
        Location {
            instance: "default".to_owned(),
            runtime_dir: root.join("run"),
            state_dir: root.join("state"),
            bpf_root: root.join("bpf"),
        }
    }

    fn deletion(number: usize) -> Deletion {
        Deletion {
            container_id: format!("c{number}"),
            ifname: "eth0".to_owned(),
        }
    }

    #[tokio::test]
    async fn a_new_deletion_is_written_down_while_many_others_are_carried_out() {
        let dir = tempfile::tempdir().unwrap();
        let location = location(dir.path());
        let write_down = |number| {
            let deletions = Deletions::lock(&location).unwrap();
            deletions.add(&deletion(number)).unwrap();
        };
        (0..60).for_each(write_down);
        let (writer, deleted) = (RefCell::new(None), RefCell::new(0));
        let delete = |_| {
            *deleted.borrow_mut() += 1;
            let is_written = {
                let mut writer = writer.borrow_mut();
                let place = location.clone();
                let writer = writer.get_or_insert_with(|| {
                    thread::spawn(move || Deletions::lock(&place)?.add(&deletion(60)))
                });
                writer.is_finished()
            };
            async move {
                // Together, the deletions take longer than the plugin waits.
                if !is_written {
                    tokio::time::sleep(LOCKED).await;
                }
                Ok(())
            }
        };
        assert!(carry_out_by(&location, delete).await);
        assert_eq!(deleted.take(), 60);
        let written = writer.take().unwrap().join().unwrap();
        written.expect("the plugin finds the folder unlocked");
        // The plugin's deletion gets its turn.
        assert!(carry_out_by(&location, async |_| Ok(())).await);
        assert!(!Deletions::is_anything_waiting(&location));
    }

    #[tokio::test]
    async fn what_somebody_else_has_deleted_meanwhile_is_not_deleted_again() {
        let dir = tempfile::tempdir().unwrap();
        let location = location(dir.path());
        for number in 0..2 {
            let deletions = Deletions::lock(&location).unwrap();
            deletions.add(&deletion(number)).unwrap();
        }
        let read = locked(&location, |deletions| deletions.read()).await;
        let (deletions, (waiting, _)) = read.unwrap();
        assert!(deletions.remove(&waiting[0]).unwrap());
        drop(deletions);
        let deleted = RefCell::new(Vec::new());
        let delete = |one| {
            deleted.borrow_mut().push(one);
            async { Ok(()) }
        };
        for one in &waiting {
            carry_out_one(&location, one, &delete).await.unwrap();
        }
        assert_eq!(deleted.take(), waiting[1..]);
    }
}
