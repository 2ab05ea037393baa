//! Keeps the routes to peers' pod CIDRs in step with the node registry.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch::Receiver;
use tracing::{info, warn};

use crate::endpoint::peer_routes::PeerRoutes;
use crate::net::netlink::Handle;
use crate::nodes::NodeSet;

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
    /// What was logged already.
    failures: HashSet<String>,
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
        let failures = match synced {
            Ok(outcome) => {
                for change in outcome.changes {
                    info!(%change, "routes follow the node registry");
                }
                outcome.failed.iter().map(ToString::to_string).collect()
            }
            Err(error) => HashSet::from([error.to_string()]),
        };
        let mut fresh: Vec<_> = failures.difference(&self.failures).collect();
        fresh.sort();
        for error in fresh.iter().take(LOGGED) {
            warn!(error, "a pod CIDR cannot be reached");
        }
        if fresh.len() > LOGGED {
            let more = fresh.len() - LOGGED;
            warn!(more, "more pod CIDRs cannot be reached");
        }
        self.failures = failures;
    }
}
