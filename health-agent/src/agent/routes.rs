//! Keeps the routes to peers' pod CIDRs in step with the node registry, and keeps free addresses of this node's pod
//! CIDRs unreachable.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use health_endpoint::peer_routes::{PeerRouteError, PeerRoutes};
use health_endpoint::pod_routes;
use health_model::activity::{Problem, Reporter};
use health_net::netlink::Handle;
use health_registry::nodes::{Node, NodeSet};
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

/// Minimum time between two checks of the routes. The kernel drops routes without a notification when their device goes
/// down, so they are polled.
const PERIOD: Duration = Duration::from_secs(2);
/// Checks take at most this fraction of the time (1/`SHARE`).
const SHARE: u32 = 50;
/// Maximum number of failures logged one by one; only the number of further failures is logged.
const LOGGED: usize = 8;

/// Syncs the routes with each set from `nodes` and with the kernel's state until the task is dropped. Reports each
/// round. `own` is this node.
pub(super) async fn keep(
    netlink: Handle,
    own: Node,
    mut nodes: Receiver<Arc<NodeSet>>,
    reporter: Reporter,
) {
    let mut keeper = Keeper {
        netlink,
        own,
        routes: PeerRoutes::default(),
        failures: HashSet::new(),
        hasher: RandomState::new(),
    };
    loop {
        reporter.begin();
        let begun = Instant::now();
        let set = nodes.borrow_and_update().clone();
        let problem = keeper.sync(&set).await;
        let pause = PERIOD.max(begun.elapsed() * SHARE);
        reporter.end(problem, Some(pause));
        // If the registry is gone, its last set stays in force.
        let changed = async {
            if nodes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        // The next check is due after a change as well as after a timeout.
        let _ = tokio::time::timeout(pause, changed).await;
    }
}

struct Keeper {
    netlink: Handle,
    own: Node,
    routes: PeerRoutes,
    /// Hashes of the failures that were already logged; the messages themselves could be too many to keep.
    failures: HashSet<u64>,
    hasher: RandomState,
}

impl Keeper {
    /// Syncs all routes. Returns the remaining problem.
    async fn sync(&mut self, set: &NodeSet) -> Option<Problem> {
        let own = self.own.full_name();
        let peers = set.nodes.iter().filter(|node| node.full_name() != own);
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
        let nodes = set.nodes.iter().chain([&self.own]);
        let addresses =
            nodes.flat_map(|node| node.addresses.iter().chain(&node.secondary_addresses));
        let addresses: Vec<IpAddr> = addresses.copied().collect();
        let to_nobody = pod_routes::sync(&self.netlink, &self.own.pod_cidrs, &addresses).await;
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
                warn!(error, "cannot add the route to a pod CIDR");
            }
        };
        let own_problem = match to_nobody {
            Ok(changes) => {
                for change in changes {
                    info!(%change, "changed an unreachable route for free addresses of a pod CIDR");
                }
                None
            }
            Err(error) => {
                note(error.to_string());
                Some(Problem::warning(error))
            }
        };
        let problem = match synced {
            Ok(outcome) => {
                for change in outcome.changes {
                    info!(%change, "changed a route to match the node registry");
                }
                for error in &outcome.failed {
                    note(error.to_string());
                }
                problem_of(&outcome.failed)
            }
            Err(error) => {
                note(error.to_string());
                Some(Problem::warning(error))
            }
        };
        if fresh > LOGGED {
            let more = fresh - LOGGED;
            warn!(more, "cannot add routes to more pod CIDRs");
        }
        problem.or(own_problem)
    }
}

/// Summarizes failed routes as a problem of this agent, kernel errors first. A single bad address in the registry can
/// cause such errors, so the problem is only a warning. Routes to nodes behind a router are not reported: the routers
/// have these routes.
fn problem_of(failed: &[PeerRouteError]) -> Option<Problem> {
    let is_refused = |error: &&PeerRouteError| matches!(error, PeerRouteError::Kernel(_));
    let reported = |error: &&PeerRouteError| !matches!(error, PeerRouteError::NotOnLink { .. });
    let reported: Vec<&PeerRouteError> = failed.iter().filter(reported).collect();
    let refused = reported.iter().copied().find(is_refused);
    let shown = refused.or(reported.first().copied())?;
    let reason = match reported.len() {
        1 => shown.to_string(),
        count => format!("{shown}; {count} pod CIDRs in total are unreachable"),
    };
    Some(Problem::warning(reason))
}

#[cfg(test)]
mod tests {
    use health_model::activity::Severity;
    use health_net::sysctl::Setting;

    use super::*;

    #[test]
    fn what_the_kernel_refuses_is_a_failure_and_what_others_did_a_warning() {
        let cidr = "10.1.0.0/24".parse().unwrap();
        let [via, kept] = ["192.0.2.1", "192.0.2.2"].map(|text| text.parse().unwrap());
        let behind = || PeerRouteError::NotOnLink { cidr, via };
        let conflict = || PeerRouteError::Conflict { cidr, kept, via };
        let refused = || {
            let error = Setting::new("no/such/setting", "1").apply();
            PeerRouteError::Kernel(error.unwrap_err())
        };
        assert_eq!(problem_of(&[]), None);
        assert_eq!(problem_of(&[behind()]), None);
        let reported = problem_of(&[behind(), conflict()]).unwrap();
        assert_eq!(reported, Problem::warning(conflict()));
        let reported = problem_of(&[conflict(), refused()]).unwrap();
        assert_eq!(reported.severity, Severity::Warning);
        assert!(reported.reason.contains("no/such/setting"), "{reported:?}");
        assert!(
            reported
                .reason
                .ends_with("2 pod CIDRs in total are unreachable")
        );
    }
}
