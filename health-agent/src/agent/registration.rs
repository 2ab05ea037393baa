//! A record of where this agent has registered its node and its endpoints, so that a cleanup can delete these entries.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use health_model::durable;
use health_registry::identity;
use health_registry::nodes::{self, NodeSet};
use health_settings::{RegistrySpec, Settings};
use serde::{Deserialize, Serialize};

use super::own_node::kept_as_of;

/// Name of the file in the state folder that records where this node is registered.
const REGISTERED_FILE: &str = "registered.json";

/// Where this node is registered.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RegistrationNote {
    registry: RegistrySpec,
    cluster: String,
    node: String,
    /// Whether the registry has ever answered an agent and may therefore contain the node. Missing from notes of
    /// earlier versions.
    #[serde(default = "yes")]
    is_reached: bool,
    /// The identity store that holds slices of this node's endpoints, if it is in Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slices: Option<RegistrySpec>,
}

fn yes() -> bool {
    true
}

impl RegistrationNote {
    fn of(config: &Settings, is_reached: bool) -> Self {
        let store = config.identity_store();
        Self {
            slices: Some(store).filter(|store| matches!(store, RegistrySpec::Kubernetes(_))),
            registry: config.node.registry.clone(),
            cluster: config.node.cluster_name.clone(),
            node: config.node.node_name.clone(),
            is_reached,
        }
    }

    fn path(state_dir: &Path) -> PathBuf {
        state_dir.join(REGISTERED_FILE)
    }

    /// The note of an earlier agent, if one exists.
    fn read(state_dir: &Path) -> anyhow::Result<Option<Self>> {
        let path = Self::path(state_dir);
        let json = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            json => json.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let note = serde_json::from_slice(&json)
            .with_context(|| format!("{} is damaged; delete it", path.display()))?;
        Ok(Some(note))
    }

    fn write(&self, state_dir: &Path) -> anyhow::Result<()> {
        let path = Self::path(state_dir);
        durable::write(&path, self).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Records that this node or its endpoints are about to be registered, for [`forget`].
pub(super) fn remember(config: &Settings) -> anyhow::Result<()> {
    let reached = RegistrationNote::of(config, true);
    if !config.node.registry.is_written_by_nodes() && reached.slices.is_none() {
        return Ok(());
    }
    let state_dir = &config.location.state_dir;
    // A damaged note counts as missing.
    let known = RegistrationNote::read(state_dir).unwrap_or_default();
    let is_reached = known.is_some_and(|known| known == reached);
    RegistrationNote::of(config, is_reached).write(state_dir)
}

/// Once the registry answers, records that this node may be in it. Returns whether nothing is left to record.
pub(super) fn note_reached(config: &Settings, set: &NodeSet) -> anyhow::Result<bool> {
    if !config.node.registry.is_written_by_nodes() {
        return Ok(true);
    }
    if kept_as_of(set).is_some() {
        return Ok(false);
    }
    RegistrationNote::of(config, true).write(&config.location.state_dir)?;
    Ok(true)
}

/// Deletes this node's record and the slices of its endpoints if an earlier agent registered them, and returns a list of
/// what was removed. If the record cannot be deleted, fails and keeps the note for the next attempt. Slices that cannot
/// be deleted remain until Kubernetes deletes them with the Node.
pub(super) async fn forget(state_dir: &Path) -> anyhow::Result<Vec<String>> {
    let path = RegistrationNote::path(state_dir);
    let Some(registered) = RegistrationNote::read(state_dir)? else {
        return Ok(Vec::new());
    };
    let mut removed = Vec::new();
    let name = format!("{}/{}", registered.cluster, registered.node);
    match nodes::deregister(&registered.registry, &registered.cluster, &registered.node).await {
        Ok(true) => removed.push(format!("record of {name} in {}", registered.registry)),
        Ok(false) => {}
        // No record was ever written.
        Err(_) if !registered.is_reached => {}
        Err(reason) => anyhow::bail!(
            "cannot delete the record of {name} from {}; retry when it is back, or remove {} to keep the record: {reason}",
            registered.registry,
            path.display()
        ),
    }
    if let Some(store) = &registered.slices {
        let node = &registered.node;
        match identity::remove_slices(store, node).await {
            Ok(0) => {}
            Ok(count) => removed.push(format!("endpoint slices of {node} in Kubernetes ({count})")),
            Err(reason) => eprintln!(
                "warning: the endpoint slices of {node} stay in Kubernetes until its Node is deleted: {reason}"
            ),
        }
    }
    fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    removed.push(format!("file {}", path.display()));
    Ok(removed)
}
