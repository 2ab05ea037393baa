//! Keeps the routes to peers' pod CIDRs in step with the node registry.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use health_endpoint::peer_routes::PeerRoutes;
use health_net::netlink::Handle;
use health_registry::nodes::NodeSet;
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

/// Time between two looks at the routes, at least: the kernel drops routes with a device that goes
/// down, and nobody tells.
const PERIOD: Duration = Duration::from_secs(2);
/// A look takes one part in so many of the time, at most.
const SHARE: u32 = 50;
/// Failures that are logged one by one; of more, the first and their number.
const LOGGED: usize = 8;

/// Brings the routes in line with each set that `nodes` brings, and with what is there, until the
/// task is dropped. `own` is this node's full name.
pub(super) async fn keep(netlink: Handle, own: String, mut nodes: Receiver<Arc<NodeSet>>) {
    let mut keeper = Keeper {
        netlink,
        own,
        routes: PeerRoutes::default(),
        failures: HashSet::new(),
        hasher: RandomState::new(),
    };
    loop {
        let begun = Instant::now();
        let set = nodes.borrow_and_update().clone();
        keeper.sync(&set).await;
        let pause = PERIOD.max(begun.elapsed() * SHARE);
        // A registry that has gone leaves what it said last.
        let changed = async {
            if nodes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        // Either way, it is time to look.
        let _ = tokio::time::timeout(pause, changed).await;
    }
}

struct Keeper {
    netlink: Handle,
    own: String,
    routes: PeerRoutes,
    /// Hashes of what was logged already: there may be very many.
    failures: HashSet<u64>,
    hasher: RandomState,
}

impl Keeper {
    async fn sync(&mut self, set: &NodeSet) {
        let peers = set.nodes.iter().filter(|node| node.full_name() != self.own);
        let wanted: Vec<_> = peers
            .flat_map(|node| {
                node.pod_cidrs.iter().filter_map(|cidr| {
                    let same_family = |addr: &&IpAddr| addr.is_ipv4() == cidr.addr().is_ipv4();
                    Some((*cidr, *node.addresses.iter().find(same_family)?))
                })
            })
            .collect();
        let synced = self
            .routes
            .sync(&self.netlink, &wanted, Instant::now())
            .await;
        let before = std::mem::take(&mut self.failures);
        let mut fresh = 0;
        let mut note = |error: String| {
            let hash = self.hasher.hash_one(&error);
            self.failures.insert(hash);
            if before.contains(&hash) {
                return;
            }
            fresh += 1;
            if fresh <= LOGGED {
                warn!(error, "a pod CIDR cannot be reached");
            }
        };
        match synced {
            Ok(outcome) => {
                for change in outcome.changes {
                    info!(%change, "routes follow the node registry");
                }
                for error in outcome.failed {
                    note(error.to_string());
                }
            }
            Err(error) => note(error.to_string()),
        }
        if fresh > LOGGED {
            let more = fresh - LOGGED;
            warn!(more, "more pod CIDRs cannot be reached");
        }
    }
}
