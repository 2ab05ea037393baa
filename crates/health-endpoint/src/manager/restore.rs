//! Finds and takes over the endpoints of the previous agent.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use health_model::ipam::Owner;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use super::Manager;
use super::table::Entry;
use crate::lifecycle::Lifecycle;
use crate::log::Status;
use crate::regenerate::RegenerationError;
use crate::workload::{DamagedFile, Devices, FoundDevice, SavedEndpoint, StateDir, WorkloadError};

/// How long endpoints may be held back before their logs say why.
const PATIENCE: Duration = Duration::from_secs(5);

/// The endpoints of the previous agent.
#[derive(Debug, Default)]
pub struct Survey {
    /// The live endpoints.
    pub living: Vec<SavedEndpoint>,
    /// The endpoints that are not alive, with the reason. Only programs may still know anything about them.
    pub dropped: Vec<(u16, &'static str)>,
    /// Endpoints whose device is not found, with the reason. There are so many that the search itself is in doubt:
    /// their state is kept, but nothing serves them.
    pub lost: Vec<(SavedEndpoint, &'static str)>,
}

/// Maximum number of endpoints that a start drops because their devices are gone. If more are missing, the agent may be
/// looking in the wrong place.
const MOST_DROPPED: usize = 1;

/// Finds all existing endpoints, and removes everything that belongs to no live endpoint: half-created endpoints,
/// endpoints whose device or namespace is gone, and devices without saved state.
pub async fn survey(states: &StateDir, devices: &dyn Devices) -> Result<Survey, WorkloadError> {
    let (saved, damaged) = states.load()?;
    for DamagedFile { path, problem } in damaged {
        warn!(file = %path.display(), problem, "unreadable endpoint state file was set aside");
    }
    let mut found: BTreeMap<u16, FoundDevice> = devices
        .list()
        .await?
        .into_iter()
        .map(|found| (found.endpoint, found))
        .collect();
    for SavedEndpoint { id, ifindex, .. } in &saved {
        // An endpoint is never dropped only because the dump lacks its device.
        if let Some(ifindex) = *ifindex
            && found.get(id).is_none_or(|found| found.ifindex != ifindex)
            && let Some(there) = devices.find(ifindex).await?
            && there.endpoint == *id
        {
            found.insert(*id, there);
        }
    }
    let mut survey = Survey::default();
    let mut kept = BTreeSet::new();
    let is_doubtful = |saved: &SavedEndpoint| {
        let is_expected = saved.ifindex.is_none() || saved.is_deleting || saved.is_of_former_boot();
        !is_expected && fate(saved, found.get(&saved.id)).is_some()
    };
    let doubtful = saved.iter().filter(|saved| is_doubtful(saved)).count();
    for saved in saved {
        match fate(&saved, found.get(&saved.id)) {
            None => {
                kept.insert(saved.id);
                let device = found.get(&saved.id).map(|found| found.device.clone());
                survey.living.push(SavedEndpoint {
                    device: device.unwrap_or_else(|| saved.device.clone()),
                    // The deletion must be requested again.
                    is_deleting: false,
                    ..saved
                });
            }
            Some(why) if doubtful > MOST_DROPPED && is_doubtful(&saved) => {
                warn!(id = saved.id, netns = %saved.netns.display(), why, "keeping an endpoint that nothing serves");
                kept.insert(saved.id);
                survey.lost.push((saved, why));
            }
            Some(why) => {
                warn!(id = saved.id, netns = %saved.netns.display(), why, "endpoint dropped");
                remove_device(devices, &saved.device).await?;
                states.remove(saved.id)?;
                survey.dropped.push((saved.id, why));
            }
        }
    }
    for orphan in found
        .values()
        .filter(|found| !kept.contains(&found.endpoint))
    {
        if remove_device(devices, &orphan.device).await? {
            warn!(
                id = orphan.endpoint,
                device = orphan.device,
                "removed a device without an endpoint"
            );
        }
    }
    Ok(survey)
}

/// Returns why an endpoint must be dropped; `None` if it is alive. A start thereby rolls back an endpoint that was only
/// partly created (its file has no ifindex). A missing namespace file proves nothing, as the agent may not see the
/// folder in which the runtime mounted it.
pub(super) fn fate(saved: &SavedEndpoint, found: Option<&FoundDevice>) -> Option<&'static str> {
    let Some(ifindex) = saved.ifindex else {
        return Some("it was only partly created");
    };
    match found.filter(|found| found.ifindex == ifindex) {
        None => Some("its device is gone"),
        Some(found) => (!found.has_peer).then_some("its network namespace is gone"),
    }
}

async fn remove_device(devices: &dyn Devices, device: &str) -> Result<bool, WorkloadError> {
    match devices.remove(device).await {
        Err(WorkloadError::ForeignDevice { .. }) => Ok(false),
        removed => removed,
    }
}

impl Manager {
    /// Takes over live endpoints. Until they are regenerated, packets meet the datapath that the previous agent built.
    pub(super) fn take_over(&self, survey: Survey) {
        let now = self.now();
        let mut table = self.table();
        let living = survey.living.into_iter().map(|saved| (saved, None));
        let lost = survey
            .lost
            .into_iter()
            .map(|(saved, why)| (saved, Some(why)));
        for (saved, lost) in living.chain(lost) {
            let id = saved.id;
            let owner = Owner {
                endpoint: id,
                name: saved.name.clone().unwrap_or_default(),
            };
            let mut entry = Entry::new(
                saved,
                Lifecycle::restored(now, "restored from its state file"),
                &table.ipam,
            );
            entry.is_complete = true;
            if self.0.pods.is_none()
                && let Some(given) = entry.saved.given_labels.take()
            {
                entry.saved.relabel(given);
            }
            if let Some(why) = lost {
                entry.lose(now, why);
            }
            for address in entry.saved.addresses() {
                if let Err(error) = table.ipam.claim(address, owner.clone()) {
                    warn!(id, %error, "an endpoint keeps an address outside this node's pod CIDRs");
                    entry.note(now, Status::Warning, error.to_string());
                }
            }
            if lost.is_none() {
                info!(id, identity = %entry.saved.identity, "endpoint restored");
            }
            table.entries.insert(id, entry);
        }
        if !table.holds_back {
            table.take_over();
        }
        let ids: Vec<u16> = table.entries.keys().copied().collect();
        drop(table);
        for id in ids {
            self.resolve_if_needed(id);
        }
    }

    /// Builds the taken-over endpoints as soon as that is allowed. Until then, they take no slot in the queue.
    pub(super) async fn follow_held_back(
        self,
        mut held_back: watch::Receiver<Option<RegenerationError>>,
    ) {
        // A short delay is not worth a line in each log.
        let _ = timeout(PATIENCE, held_back.wait_for(Option::is_none)).await;
        loop {
            let reason = held_back.borrow_and_update().clone();
            let Some(reason) = reason else {
                break;
            };
            warn!(%reason, "endpoints keep the datapath that the previous agent built");
            let now = self.now();
            self.table().note_held_back(&reason, now);
            self.note_change();
            if held_back.changed().await.is_err() {
                return;
            }
        }
        self.table().take_over();
        self.note_change();
        self.0.work.notify_one();
    }
}
