//! Health endpoint addresses reported by peers, kept across restarts.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use health_model::durable;
use health_registry::nodes::Node;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Name of the file in the state folder.
pub const FILE: &str = "learned.json";

/// Changes within this time are written together: on a first start, all peers report their endpoints within seconds.
const WRITE_DELAY: Duration = Duration::from_millis(500);

type Addresses = BTreeMap<String, Vec<IpAddr>>;

/// The addresses, by full node name.
#[derive(Debug)]
pub(super) struct LearnedAddresses {
    /// The current addresses. They are written some time after a change; they are copied only if they change during a
    /// write.
    known: watch::Sender<Arc<Addresses>>,
    writer: JoinHandle<()>,
}

impl LearnedAddresses {
    /// Loads the addresses that an earlier agent saved in `state_dir`, and starts to save changes. If the file cannot
    /// be read, the peers will report their addresses again.
    pub(super) fn load(state_dir: &Path) -> Self {
        let path = state_dir.join(FILE);
        let addresses = match read(&path) {
            Ok(addresses) => addresses,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot read learned addresses");
                Addresses::new()
            }
        };
        let (known, changes) = watch::channel(Arc::new(addresses));
        Self {
            known,
            writer: tokio::spawn(keep(path, changes)),
        }
    }

    /// Returns the endpoint addresses that a node reported, if they still fit the node's current pod CIDRs; an empty
    /// list if it has no endpoint. `None` if nothing is known.
    pub(super) fn get(&self, node: &Node) -> Option<Vec<IpAddr>> {
        let known = self.known.borrow();
        let known = known.get(&node.full_name())?;
        fits(node, known).then(|| known.clone())
    }

    /// Records what a node reports about its own endpoint. Returns whether the report differs from what was known;
    /// addresses outside the node's pod CIDRs are rejected.
    pub(super) fn learn(&mut self, node: &Node, reported: &[IpAddr]) -> bool {
        let name = node.full_name();
        if self
            .known
            .borrow()
            .get(&name)
            .is_some_and(|of_node| of_node == reported)
        {
            return false;
        }
        if !fits(node, reported) {
            tracing::debug!(
                node = name,
                ?reported,
                "health addresses outside the pod CIDRs ignored"
            );
            return false;
        }
        tracing::info!(node = name, addresses = ?reported, "health endpoint learned");
        self.known.send_modify(|known| {
            Arc::make_mut(known).insert(name, reported.to_vec());
        });
        true
    }

    /// Forgets all nodes that `keep` rejects.
    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.known.send_if_modified(|known| {
            let all_stay = known.keys().all(|name| keep(name));
            if !all_stay {
                Arc::make_mut(known).retain(|name, _| keep(name));
            }
            !all_stay
        });
    }

    /// Writes pending changes.
    pub(super) async fn close(self) {
        drop(self.known);
        if let Err(error) = self.writer.await {
            tracing::warn!(%error, "writer of learned addresses failed");
        }
    }
}

/// Whether these can be the addresses of a node's health endpoint: inside its pod CIDRs, and at most one per family.
fn fits(node: &Node, addresses: &[IpAddr]) -> bool {
    let inside = |ip: &IpAddr| node.pod_cidrs.iter().any(|cidr| cidr.contains(ip));
    let v4 = addresses.iter().filter(|ip| ip.is_ipv4()).count();
    addresses.iter().all(inside) && v4 <= 1 && addresses.len() - v4 <= 1
}

/// Writes each change until the sender is dropped.
async fn keep(path: PathBuf, mut changes: watch::Receiver<Arc<Addresses>>) {
    while changes.changed().await.is_ok() {
        let mut sender = changes.clone();
        let sender_gone = async { while sender.changed().await.is_ok() {} };
        // Cut short when the sender is dropped.
        let _ = tokio::time::timeout(WRITE_DELAY, sender_gone).await;
        let addresses = changes.borrow_and_update().clone();
        let to = path.clone();
        match tokio::task::spawn_blocking(move || durable::write(&to, &*addresses)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(path = %path.display(), %error, "cannot save learned addresses");
            }
            Err(error) => tracing::warn!(%error, "cannot save learned addresses"),
        }
    }
}

fn read(path: &Path) -> io::Result<Addresses> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Addresses::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(pod_cidrs: &[&str]) -> Node {
        Node {
            name: "a".to_owned(),
            cluster: "default".to_owned(),
            addresses: vec![IpAddr::from([172, 30, 0, 1])],
            secondary_addresses: Vec::new(),
            pod_cidrs: pod_cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
            health_addresses: Vec::new(),
            labels: BTreeMap::new(),
        }
    }

    fn ips(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    #[tokio::test]
    async fn addresses_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("state");
        let node = node(&["10.244.1.0/24", "fd00:10:244:1::/64"]);
        let reported = ips(&["10.244.1.7", "fd00:10:244:1::7"]);
        let mut learned = LearnedAddresses::load(&state_dir);
        assert!(learned.learn(&node, &reported));
        assert!(!learned.learn(&node, &reported));
        learned.close().await;

        let learned = LearnedAddresses::load(&state_dir);
        assert_eq!(learned.get(&node), Some(reported.clone()));
        learned.close().await;

        std::fs::write(state_dir.join(FILE), "{").unwrap();
        let mut learned = LearnedAddresses::load(&state_dir);
        assert_eq!(learned.get(&node), None);
        assert!(learned.learn(&node, &reported));
        learned.retain(|_| false);
        learned.close().await;
        assert_eq!(
            std::fs::read_to_string(state_dir.join(FILE)).unwrap(),
            "{}\n"
        );
    }

    /// CPU time used by this thread.
    fn cpu_time() -> Duration {
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID)
            .unwrap()
            .into()
    }

    #[tokio::test]
    async fn what_is_learned_of_a_node_does_not_cost_more_with_more_nodes() {
        const NODES: u16 = 10_000;
        /// Includes formatting names, comparing addresses and notifying the writer.
        const FACTOR: u32 = 50;
        let dir = tempfile::tempdir().unwrap();
        let nodes: Vec<(Node, Vec<IpAddr>)> = (0..NODES)
            .map(|number| {
                let [high, low] = number.to_be_bytes();
                let node = Node {
                    name: format!("node{number}"),
                    ..node(&[&format!("10.{high}.{low}.0/24")])
                };
                (node, vec![IpAddr::from([10, high, low, 7])])
            })
            .collect();
        let begun = cpu_time();
        let known: Addresses = nodes
            .iter()
            .map(|(node, reported)| (node.full_name(), reported.clone()))
            .collect();
        let reference = cpu_time() - begun;

        let mut learned = LearnedAddresses::load(dir.path());
        let begun = cpu_time();
        for (node, reported) in &nodes {
            assert!(learned.learn(node, reported));
        }
        let took = cpu_time() - begun;
        assert!(
            took < reference * FACTOR,
            "{took:?}, and a map of the same takes {reference:?}"
        );
        learned.close().await;
        let written: Addresses =
            serde_json::from_slice(&std::fs::read(dir.path().join(FILE)).unwrap()).unwrap();
        assert_eq!(written, known);
    }

    #[tokio::test]
    async fn what_a_node_cannot_rightly_say_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let mut learned = LearnedAddresses::load(dir.path());
        let node1 = node(&["10.244.1.0/24"]);
        assert!(!learned.learn(&node1, &ips(&["10.244.2.7"])));
        assert!(!learned.learn(&node1, &ips(&["10.244.1.7", "10.244.1.8"])));
        assert!(learned.learn(&node1, &ips(&["10.244.1.7"])));
        // The node has other prefixes now.
        assert_eq!(learned.get(&node(&["10.9.0.0/16"])), None);
        // It no longer has any.
        assert!(learned.learn(&node1, &[]));
        assert_eq!(learned.get(&node1), Some(Vec::new()));
    }
}
