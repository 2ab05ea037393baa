//! The node registry in a YAML file, reloaded when the file changes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::{self, Activity, Controller, Reporter};
use health_model::file::FileIdentity;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use super::document::{self, DocumentError};
use super::{LastHeard, Node, NodeSet, Registry, SourceState, Staleness, WATCH};
use health_settings::RegistrySpec;

/// How often the file is checked. A change is accepted when two consecutive checks agree, so that a file is not read
/// while it is being written.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file does not exist.
    #[error("nodes file {0} does not exist; name an existing one with --nodes-file")]
    Absent(PathBuf),
    /// The file cannot be read.
    #[error("cannot read nodes file {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The contents are invalid.
    #[error("nodes file {path}: {source}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The problem, and where it is.
        source: Box<DocumentError>,
    },
}

/// The node registry in a file. Dropping it ends the watch.
#[derive(Debug)]
pub struct FileRegistry {
    nodes: watch::Receiver<Arc<NodeSet>>,
    activity: Activity,
    task: JoinHandle<()>,
}

impl FileRegistry {
    /// Reads the file and starts to watch it. Nodes without a cluster belong to `default_cluster`. Fails if the file
    /// cannot be used now; after later errors, the last good set stays, and [`SourceState::stale`] reports the error.
    /// Must be called in a tokio runtime.
    pub fn open(path: &Path, default_cluster: &str) -> Result<Self, FileError> {
        let mut file = RegistryFile {
            path: path.to_owned(),
            default_cluster: default_cluster.to_owned(),
            taken: None,
            heard: LastHeard::now(),
            reporter: activity::channel().0,
        };
        file.taken = file.identity();
        let nodes = file.read()?;
        let (sender, receiver) = watch::channel(Arc::new(file.set(nodes, None)));
        Ok(Self {
            nodes: receiver,
            activity: file.reporter.activity(),
            task: tokio::spawn(file.follow(sender)),
        })
    }
}

impl Drop for FileRegistry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Registry for FileRegistry {
    fn watch(&self) -> watch::Receiver<Arc<NodeSet>> {
        self.nodes.clone()
    }

    fn publish(&self, _own: Node) {}

    fn controllers(&self) -> Vec<Controller> {
        vec![Controller::new(WATCH, self.activity.clone())]
    }
}

struct RegistryFile {
    path: PathBuf,
    default_cluster: String,
    /// The version of the file that was last read; `None` if there was no file.
    taken: Option<FileIdentity>,
    /// When the nodes were last known to match the file.
    heard: LastHeard,
    reporter: Reporter,
}

impl RegistryFile {
    fn identity(&self) -> Option<FileIdentity> {
        FileIdentity::of(&self.path).ok()
    }

    fn read(&self) -> Result<Vec<Node>, FileError> {
        let text = std::fs::read_to_string(&self.path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => FileError::Absent(self.path.clone()),
            _ => FileError::Unreadable {
                path: self.path.clone(),
                source,
            },
        })?;
        document::parse(&text, &self.default_cluster).map_err(|source| FileError::Invalid {
            path: self.path.clone(),
            source: Box::new(source),
        })
    }

    fn set(&self, nodes: Vec<Node>, stale: Option<Staleness>) -> NodeSet {
        NodeSet {
            nodes,
            sources: vec![SourceState {
                registry: RegistrySpec::File(self.path.clone()).to_string(),
                cluster: self.default_cluster.clone(),
                heard: self.heard.clone(),
                stale,
                rejected: Vec::new(),
            }],
        }
    }

    async fn follow(mut self, sender: watch::Sender<Arc<NodeSet>>) {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut previous = self.taken;
        loop {
            ticks.tick().await;
            let current = self.identity();
            let settled = current == previous;
            previous = current;
            if settled && current != self.taken {
                self.taken = current;
                self.reload(&sender);
            } else if settled && !is_stale(&sender.borrow()) {
                self.heard.note();
                self.reporter.end(None, Some(POLL_INTERVAL));
            }
        }
    }

    fn reload(&self, sender: &watch::Sender<Arc<NodeSet>>) {
        let last_good = sender.borrow().clone();
        let next = match self.read() {
            Ok(nodes) => {
                tracing::info!(path = %self.path.display(), nodes = nodes.len(), "nodes file read");
                self.heard.note();
                self.reporter.end(None, Some(POLL_INTERVAL));
                self.set(nodes, None)
            }
            Err(error) => {
                tracing::warn!(%error, "nodes file rejected; keeping the last good one");
                self.reporter.failed(&error);
                let stale = Staleness {
                    since: self.heard.time(),
                    reason: error.to_string(),
                };
                self.set(last_good.nodes.clone(), Some(stale))
            }
        };
        if next != *last_good {
            sender.send_replace(Arc::new(next));
        }
    }
}

fn is_stale(set: &NodeSet) -> bool {
    set.sources.iter().any(|source| source.stale.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_node(name: &str) -> String {
        format!("nodes:\n- name: {name}\n  addresses: [10.0.0.1]\n")
    }

    fn stale(set: &NodeSet) -> Option<&str> {
        let stale = set.sources[0].stale.as_ref();
        stale.map(|stale| stale.reason.as_str())
    }

    async fn next(watch: &mut watch::Receiver<Arc<NodeSet>>) -> Arc<NodeSet> {
        // Long enough for the busiest machine.
        tokio::time::timeout(Duration::from_secs(120), watch.changed())
            .await
            .expect("a change")
            .expect("the registry lives");
        watch.borrow_and_update().clone()
    }

    #[tokio::test]
    async fn an_unusable_file_fails_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nodes.yaml");
        let error = FileRegistry::open(&path, "default").unwrap_err();
        assert!(matches!(error, FileError::Absent(_)), "{error}");
        std::fs::write(&path, "nodes: [\n").unwrap();
        let error = FileRegistry::open(&path, "default")
            .unwrap_err()
            .to_string();
        assert!(error.contains("nodes.yaml: line "), "{error}");
        std::fs::write(&path, b"nodes: \xff\n").unwrap();
        let error = FileRegistry::open(&path, "default").unwrap_err();
        assert!(matches!(error, FileError::Unreadable { .. }), "{error}");
    }

    #[tokio::test]
    async fn edits_are_taken_and_broken_ones_keep_the_last_good_set() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nodes.yaml");
        std::fs::write(&path, one_node("a")).unwrap();
        let registry = FileRegistry::open(&path, "default").unwrap();
        let mut watch = registry.watch();
        assert_eq!(watch.borrow_and_update().nodes[0].name, "a");

        std::fs::write(&path, one_node("b")).unwrap();
        let set = next(&mut watch).await;
        assert_eq!((set.nodes[0].name.as_str(), stale(&set)), ("b", None));

        // Each check of an unchanged file confirms the nodes.
        let heard = &set.sources[0].heard;
        let first = heard.time();
        while heard.time() == first {
            tokio::time::sleep(POLL_INTERVAL).await;
        }

        std::fs::write(&path, "nodes:\n- nam: c\n").unwrap();
        let set = next(&mut watch).await;
        let since = set.sources[0].stale.as_ref().map(|stale| stale.since);
        tokio::time::sleep(POLL_INTERVAL * 3).await;
        assert_eq!(since, Some(set.sources[0].heard.time()));
        assert_eq!(set.nodes[0].name, "b");
        let reason = stale(&set).unwrap();
        assert!(reason.contains("line 2, column 3"), "{reason}");

        std::fs::remove_file(&path).unwrap();
        let set = next(&mut watch).await;
        assert_eq!(set.nodes[0].name, "b");
        assert!(stale(&set).unwrap().contains("does not exist"));

        std::fs::write(&path, one_node("b")).unwrap();
        let set = next(&mut watch).await;
        assert_eq!(stale(&set), None);
    }

    #[tokio::test]
    async fn replacement_by_rename_and_by_link_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nodes.yaml");
        // As with a mounted ConfigMap, the file is a link through another link, which is swapped.
        for (version, name) in [("v1", "a"), ("v2", "b")] {
            std::fs::create_dir(dir.path().join(version)).unwrap();
            std::fs::write(dir.path().join(version).join("nodes.yaml"), one_node(name)).unwrap();
        }
        std::os::unix::fs::symlink("v1", dir.path().join("data")).unwrap();
        std::os::unix::fs::symlink("data/nodes.yaml", &path).unwrap();
        let registry = FileRegistry::open(&path, "default").unwrap();
        let mut watch = registry.watch();
        std::os::unix::fs::symlink("v2", dir.path().join("data.new")).unwrap();
        std::fs::rename(dir.path().join("data.new"), dir.path().join("data")).unwrap();
        assert_eq!(next(&mut watch).await.nodes[0].name, "b");

        std::fs::write(dir.path().join("fresh"), one_node("c")).unwrap();
        std::fs::rename(dir.path().join("fresh"), &path).unwrap();
        assert_eq!(next(&mut watch).await.nodes[0].name, "c");
    }
}
