//! Merges several registries: this cluster's, and one per remote cluster.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use health_model::activity::{self, Activity, Controller, Reporter};
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::cache::Cache;
use super::validate::{Claims, Entry};
use super::{LastHeard, Node, NodeSet, Registry, Standing, UnusableEntry, WATCH};

/// Changes that arrive within this time are saved together.
const SAVE_DELAY: Duration = Duration::from_millis(500);
/// How often the unchanged set of a registry is recorded as still correct.
const NOTE_PERIOD: Duration = Duration::from_secs(60);

/// A registry to merge.
pub(super) struct Source {
    pub(super) registry: Box<dyn Registry>,
    pub(super) role: Role,
    /// Whether the registry's last good set is kept across restarts.
    pub(super) cached: bool,
}

/// Which cluster's nodes a registry holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The nodes of this node's cluster, and, in a file, possibly of other clusters.
    Own,
    /// Only the nodes of the cluster with this name.
    Remote(String),
}

/// The registries merged into one. If two registries claim the same name or address, the first one wins, in the order
/// in which they were given; this cluster's registry comes first.
pub struct MergedRegistry {
    sources: Vec<(Box<dyn Registry>, Role)>,
    saving: Activity,
    nodes: watch::Receiver<Arc<NodeSet>>,
    task: JoinHandle<()>,
}

impl MergedRegistry {
    /// Merges the registries. For registries without contents so far, uses the contents that an earlier agent saved in
    /// `state_dir`. Must be called in a tokio runtime.
    pub(super) fn new(sources: Vec<Source>, state_dir: &Path) -> Self {
        let inputs: Vec<Input> = sources
            .iter()
            .map(|source| Input {
                nodes: source.registry.watch(),
                role: source.role.clone(),
                cached: source.cached,
                open: true,
            })
            .collect();
        let mut merger = Merger {
            inputs,
            cache: Cache::load(state_dir),
            reporter: activity::channel().0,
        };
        let (sender, nodes) = watch::channel(Arc::new(merger.merge()));
        Self {
            sources: sources
                .into_iter()
                .map(|source| (source.registry, source.role))
                .collect(),
            saving: merger.reporter.activity(),
            nodes,
            task: tokio::spawn(merger.follow(sender)),
        }
    }
}

impl Drop for MergedRegistry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Registry for MergedRegistry {
    fn watch(&self) -> watch::Receiver<Arc<NodeSet>> {
        self.nodes.clone()
    }

    fn publish(&self, own: Node) {
        if let Some((own_cluster, _)) = self.sources.first() {
            own_cluster.publish(own);
        }
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        match self.sources.first() {
            Some((own_cluster, _)) => own_cluster.standing(),
            None => watch::channel(Standing::Unknown).1,
        }
    }

    fn controllers(&self) -> Vec<Controller> {
        let of_sources = self.sources.iter().flat_map(|(registry, role)| {
            let mut controllers = registry.controllers();
            if let Role::Remote(cluster) = role {
                // This node is not registered in other clusters.
                controllers.truncate(1);
                for controller in &mut controllers {
                    controller.name = format!("{WATCH}-{cluster}");
                }
            }
            controllers
        });
        let saving = Controller::new("node-cache", self.saving.clone());
        of_sources.chain([saving]).collect()
    }
}

struct Input {
    nodes: watch::Receiver<Arc<NodeSet>>,
    role: Role,
    cached: bool,
    /// Whether more sets may arrive.
    open: bool,
}

struct Merger {
    inputs: Vec<Input>,
    cache: Cache,
    /// Reports whether the cache is saved.
    reporter: Reporter,
}

impl Merger {
    async fn follow(mut self, sender: watch::Sender<Arc<NodeSet>>) {
        let mut notes = tokio::time::interval(NOTE_PERIOD);
        let mut save_at: Option<Instant> = None;
        loop {
            let save = async {
                match save_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = changed(&mut self.inputs) => {}
                _ = notes.tick() => {}
                () = save => {
                    save_at = None;
                    self.save().await;
                }
            }
            let set = self.merge();
            sender.send_if_modified(|known| {
                let is_new = **known != set;
                if is_new {
                    *known = Arc::new(set);
                }
                is_new
            });
            if self.cache.unsaved {
                save_at.get_or_insert_with(|| Instant::now() + SAVE_DELAY);
            }
        }
    }

    fn merge(&mut self) -> NodeSet {
        let mut sets = Vec::with_capacity(self.inputs.len());
        for input in &mut self.inputs {
            let set = input.nodes.borrow_and_update().clone();
            let set = if input.cached {
                with_cache(&mut self.cache, (*set).clone())
            } else {
                (*set).clone()
            };
            sets.push((input.role.clone(), set));
        }
        merge(sets)
    }

    async fn save(&mut self) {
        let save = self.cache.take_unsaved();
        let path = save.path().to_owned();
        let written = tokio::task::spawn_blocking(move || save.write()).await;
        match written {
            Ok(Ok(())) => self.reporter.succeeded(),
            Ok(Err(error)) => {
                self.reporter
                    .failed(format!("cannot write {}: {error}", path.display()));
                tracing::warn!(path = %path.display(), %error, "cannot save the nodes");
            }
            Err(error) => {
                self.reporter.failed(&error);
                tracing::warn!(%error, "cannot save the nodes");
            }
        }
    }
}

/// Waits until any input has a new set.
async fn changed(inputs: &mut [Input]) {
    let open = inputs.iter_mut().filter(|input| input.open);
    let waiting: Vec<_> = open
        .map(|input| {
            Box::pin(async {
                if input.nodes.changed().await.is_err() {
                    input.open = false;
                }
            })
        })
        .collect();
    if waiting.is_empty() {
        return std::future::pending().await;
    }
    select_all(waiting).await;
}

/// Caches the set of a registry that can be trusted. For a registry that has not responded since the start, adds the
/// cached nodes; its own set contains at most this node.
fn with_cache(cache: &mut Cache, mut set: NodeSet) -> NodeSet {
    let [state] = set.sources.as_mut_slice() else {
        return set;
    };
    let Some(stale) = &mut state.stale else {
        cache.note(
            &state.cluster,
            &state.registry,
            &set.nodes,
            Timestamp::now(),
        );
        return set;
    };
    if set.nodes.len() > 1 {
        return set;
    }
    let Some((as_of, kept)) = cache.get(&state.cluster, &state.registry) else {
        return set;
    };
    stale.since = as_of;
    state.heard = LastHeard::at(as_of);
    let mut claims = Claims::default();
    let all = std::mem::take(&mut set.nodes).into_iter().chain(kept);
    for node in all {
        // The cached entry of this node is older than the entry in the registry's set.
        set.nodes
            .extend(claims.take(Entry::from_node(&node, "the kept nodes"), &state.cluster));
    }
    set.nodes.sort_by(|a, b| a.name.cmp(&b.name));
    set
}

/// Merges all sets into one.
fn merge(sets: Vec<(Role, NodeSet)>) -> NodeSet {
    if let [(Role::Own, _)] = sets.as_slice() {
        return sets
            .into_iter()
            .map(|(_, set)| set)
            .next()
            .unwrap_or_default();
    }
    let mut merged = NodeSet::default();
    let mut claims = Claims::default();
    for (role, mut set) in sets {
        let mut rejected = Vec::new();
        for node in set.nodes {
            let shown = set.sources.first().map_or("", |source| &source.registry);
            let taken = match &role {
                Role::Remote(cluster) if node.cluster != *cluster => Err(format!(
                    "it belongs to cluster {:?}, not to {cluster:?}",
                    node.cluster
                )),
                _ => claims
                    .take(Entry::from_node(&node, shown), &node.cluster)
                    .map_err(|refused| refused.to_string()),
            };
            match taken {
                Ok(node) => merged.nodes.push(node),
                Err(reason) => rejected.push(UnusableEntry {
                    key: node.full_name(),
                    reason,
                }),
            }
        }
        if let Some(source) = set.sources.first_mut() {
            source.rejected.extend(rejected);
        }
        merged.sources.extend(set.sources);
    }
    merged
        .nodes
        .sort_by(|a, b| (&a.cluster, &a.name).cmp(&(&b.cluster, &b.name)));
    merged
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::nodes::{SourceState, Staleness};

    fn node(cluster: &str, name: &str, address: &str) -> Node {
        Node {
            name: name.to_owned(),
            cluster: cluster.to_owned(),
            addresses: vec![address.parse().unwrap()],
            secondary_addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            health_addresses: Vec::new(),
            labels: BTreeMap::new(),
        }
    }

    fn set(cluster: &str, stale: Option<&str>, nodes: Vec<Node>) -> NodeSet {
        NodeSet {
            nodes,
            sources: vec![SourceState {
                registry: format!("etcd:http://{cluster}"),
                cluster: cluster.to_owned(),
                heard: LastHeard::now(),
                stale: stale.map(|reason| Staleness {
                    since: Timestamp::now(),
                    reason: reason.to_owned(),
                }),
                rejected: Vec::new(),
            }],
        }
    }

    fn names(set: &NodeSet) -> Vec<String> {
        set.nodes.iter().map(Node::full_name).collect()
    }

    #[test]
    fn clusters_are_distinguished_and_the_first_claim_stands() {
        let own = set("home", None, vec![node("home", "a", "10.0.0.1")]);
        let west = set(
            "west",
            None,
            vec![
                node("west", "a", "10.0.0.2"),
                node("west", "b", "10.0.0.1"),
                node("home", "c", "10.0.0.3"),
            ],
        );
        let east = set("east", Some("away"), vec![node("east", "a", "10.0.0.4")]);
        let remote = |name: &str| Role::Remote(name.to_owned());
        let merged = merge(vec![
            (Role::Own, own),
            (remote("west"), west),
            (remote("east"), east),
        ]);
        assert_eq!(names(&merged), ["east/a", "home/a", "west/a"]);
        assert_eq!(merged.sources.len(), 3);
        assert!(merged.sources[2].stale.is_some());
        let rejected: Vec<_> = merged.sources[1].rejected.iter().collect();
        assert_eq!(rejected[0].key, "west/b");
        assert_eq!(
            rejected[0].reason,
            "address 10.0.0.1 is listed twice, first at etcd:http://home as home/a"
        );
        assert_eq!(rejected[1].key, "home/c");
        assert_eq!(
            rejected[1].reason,
            "it belongs to cluster \"home\", not to \"west\""
        );
    }

    struct Fixed(watch::Sender<Arc<NodeSet>>);

    impl Registry for Fixed {
        fn controllers(&self) -> Vec<Controller> {
            Vec::new()
        }

        fn watch(&self) -> watch::Receiver<Arc<NodeSet>> {
            self.0.subscribe()
        }

        fn publish(&self, _own: Node) {}
    }

    fn merged_with_cache(
        set: NodeSet,
        dir: &Path,
    ) -> (MergedRegistry, watch::Sender<Arc<NodeSet>>) {
        let sender = watch::Sender::new(Arc::new(set));
        let source = Source {
            registry: Box::new(Fixed(sender.clone())),
            role: Role::Own,
            cached: true,
        };
        (MergedRegistry::new(vec![source], dir), sender)
    }

    #[tokio::test]
    async fn an_agent_that_starts_without_its_registry_begins_with_the_last_good_set() {
        let dir = tempfile::tempdir().unwrap();
        let me = node("home", "me", "10.0.0.1");
        let you = node("home", "you", "10.0.0.2");
        let (first, _sender) =
            merged_with_cache(set("home", None, vec![me.clone(), you.clone()]), dir.path());
        let path = dir.path().join(super::super::cache::FILE);
        tokio::time::timeout(Duration::from_secs(120), async {
            while !path.exists() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .expect("the set is kept");
        drop(first);

        let moved = node("home", "me", "10.0.0.9");
        let away = set("home", Some("away"), vec![moved.clone()]);
        let (second, sender) = merged_with_cache(away, dir.path());
        let mut watch = second.watch();
        let start = watch.borrow_and_update().clone();
        assert_eq!(start.nodes, [moved, you]);
        let stale = start.sources[0].stale.as_ref().expect("it is stale");
        assert!(stale.since < Timestamp::now());

        sender.send_replace(Arc::new(set("home", None, vec![me.clone()])));
        watch.changed().await.unwrap();
        assert_eq!(watch.borrow_and_update().nodes, [me]);
    }
}
