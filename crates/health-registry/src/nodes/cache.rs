//! The last known contents of registries, kept across restarts: an agent that starts while a registry is unavailable
//! starts with these.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use health_model::durable;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Node;
use super::record::NodeRecord;
use super::validate::Claims;

/// Name of the file in the state folder.
pub const FILE: &str = "nodes.json";

/// Maximum age of the file while nothing changes. The file records when its nodes were last correct, so it is rewritten
/// from time to time.
const LONGEST_AGE: Duration = Duration::from_secs(600);

/// The last good set of each cluster.
#[derive(Debug)]
pub(super) struct Cache {
    path: PathBuf,
    clusters: BTreeMap<String, CachedCluster>,
    /// Whether there are changes that are not in the file yet.
    pub(super) unsaved: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CachedCluster {
    registry: String,
    as_of: Timestamp,
    nodes: Vec<NodeRecord>,
}

impl Cache {
    /// Reads the file that an earlier agent saved in `state_dir`. An unreadable file counts as absent.
    pub(super) fn load(state_dir: &Path) -> Self {
        let path = state_dir.join(FILE);
        let clusters = read(&path).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "cannot read the saved nodes");
            BTreeMap::new()
        });
        Self {
            path,
            clusters,
            unsaved: false,
        }
    }

    /// Returns the last known nodes of a cluster in this registry, and when they were last known to be correct.
    pub(super) fn get(&self, cluster: &str, registry: &str) -> Option<(Timestamp, Vec<Node>)> {
        let kept = self.clusters.get(cluster)?;
        if kept.registry != registry {
            return None;
        }
        let mut claims = Claims::default();
        let nodes = kept.nodes.iter().filter_map(|record| {
            // The file may have been edited.
            claims.take(record.clone().into_entry(FILE), cluster).ok()
        });
        Some((kept.as_of, nodes.collect()))
    }

    /// Records the contents of a registry, which are correct as of `now`.
    pub(super) fn note(&mut self, cluster: &str, registry: &str, nodes: &[Node], now: Timestamp) {
        let kept = CachedCluster {
            registry: registry.to_owned(),
            as_of: now,
            nodes: nodes.iter().map(NodeRecord::from).collect(),
        };
        let known = self.clusters.get(cluster);
        let is_news = known.is_none_or(|known| {
            let age = now.duration_since(known.as_of);
            (&known.registry, &known.nodes) != (&kept.registry, &kept.nodes)
                || age.unsigned_abs() >= LONGEST_AGE
        });
        if is_news {
            self.clusters.insert(cluster.to_owned(), kept);
            self.unsaved = true;
        }
    }

    /// Takes the contents to write, and the path.
    pub(super) fn take_unsaved(&mut self) -> Save {
        self.unsaved = false;
        Save {
            path: self.path.clone(),
            clusters: self.clusters.clone(),
        }
    }
}

/// One version of the file's contents.
#[derive(Debug)]
pub(super) struct Save {
    path: PathBuf,
    clusters: BTreeMap<String, CachedCluster>,
}

impl Save {
    /// Replaces the file atomically: readers see either the complete old file or the complete new file.
    pub(super) fn write(&self) -> io::Result<()> {
        durable::write(&self.path, &self.clusters)
    }

    /// Path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn read(path: &Path) -> io::Result<BTreeMap<String, CachedCluster>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> Node {
        Node {
            name: name.to_owned(),
            cluster: "west".to_owned(),
            addresses: vec!["10.0.0.1".parse().unwrap()],
            secondary_addresses: Vec::new(),
            pod_cidrs: vec!["10.1.0.0/24".parse().unwrap()],
            health_addresses: vec!["10.1.0.7".parse().unwrap()],
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn a_set_survives_a_restart_with_its_age_for_the_same_registry_only() {
        let dir = tempfile::tempdir().unwrap();
        let then = Timestamp::from_second(1_000_000).unwrap();
        let mut cache = Cache::load(dir.path());
        cache.note("west", "etcd:http://a", &[node("a")], then);
        assert!(cache.unsaved);
        cache.take_unsaved().write().unwrap();
        assert!(!cache.unsaved);

        let cache = Cache::load(dir.path());
        let kept = cache.get("west", "etcd:http://a");
        assert_eq!(kept, Some((then, vec![node("a")])));
        assert_eq!(cache.get("west", "etcd:http://b"), None);
        assert_eq!(cache.get("east", "etcd:http://a"), None);

        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert_eq!(Cache::load(dir.path()).get("west", "etcd:http://a"), None);
    }

    #[test]
    fn only_news_and_old_age_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let then = Timestamp::from_second(1_000_000).unwrap();
        let mut cache = Cache::load(dir.path());
        cache.note("west", "r", &[node("a")], then);
        cache.take_unsaved();
        cache.note("west", "r", &[node("a")], then);
        assert!(!cache.unsaved);
        cache.note("west", "r", &[node("a")], then + LONGEST_AGE);
        assert!(cache.unsaved);
        cache.take_unsaved();
        cache.note("west", "r", &[node("b")], then + LONGEST_AGE);
        assert!(cache.unsaved);
    }
}
