//! Routes to other nodes' pod CIDRs, each via the node's address.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use health_model::ipam::Family;
use health_net::KernelError;
use health_net::netlink::Handle;
use health_net::route::{self, Route};
use ipnet::IpNet;

/// A changed route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The route was added.
    Added {
        /// The pod CIDR.
        cidr: IpNet,
        /// The node's address.
        via: IpAddr,
    },
    /// The route was changed; it led via another node before.
    Replaced {
        /// The pod CIDR.
        cidr: IpNet,
        /// The node's address.
        via: IpAddr,
    },
    /// The route was deleted, because no node has the pod CIDR any more.
    Deleted {
        /// The pod CIDR.
        cidr: IpNet,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Added { cidr, via } => write!(f, "added route {cidr} via {via}"),
            Self::Replaced { cidr, via } => write!(f, "replaced route {cidr}, now via {via}"),
            Self::Deleted { cidr } => write!(f, "deleted route {cidr}"),
        }
    }
}

/// Reasons why a route could not be set.
#[derive(Debug, thiserror::Error)]
pub enum PeerRouteError {
    /// The node's address is of the other IP version.
    #[error("no route to {cidr}: node address {via} is of the other IP version")]
    OtherFamily {
        /// The pod CIDR.
        cidr: IpNet,
        /// The node's address.
        via: IpAddr,
    },
    /// Two nodes have the same pod CIDR.
    #[error("pod CIDR {cidr} belongs to two nodes, {kept} and {via}; using the first")]
    Conflict {
        /// The pod CIDR.
        cidr: IpNet,
        /// The first node's address.
        kept: IpAddr,
        /// The other node's address.
        via: IpAddr,
    },
    /// The node is behind a router, not on a network of this host.
    #[error(
        "no route to {cidr}: node {via} is not on any network of this host; configure routes to \
         the pod CIDRs on the routers in between"
    )]
    NotOnLink {
        /// The pod CIDR.
        cidr: IpNet,
        /// The node's address.
        via: IpAddr,
    },
    /// A foreign route for the pod CIDR leads elsewhere.
    #[error(
        "no route to {cidr} via {via}: a route exists that is not this agent's ({existing}); \
         delete it, or correct the node registry"
    )]
    Foreign {
        /// The pod CIDR.
        cidr: IpNet,
        /// The node's address.
        via: IpAddr,
        /// The existing route.
        existing: Route,
    },
    /// The kernel refused for another reason.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Time until a node that was on no network of this host is retried. With very many such nodes the attempts take long,
/// and hosts' addresses hardly ever change.
const OFF_LINK_RETRY: Duration = Duration::from_secs(30);

/// The result of [`PeerRoutes::sync`].
#[derive(Debug, Default)]
pub struct Outcome {
    /// The changed routes.
    pub changes: Vec<Change>,
    /// The routes that could not be changed. All others were still handled.
    pub failed: Vec<PeerRouteError>,
}

/// Maintains the routes to peers' pod CIDRs.
#[derive(Debug, Default)]
pub struct PeerRoutes {
    /// Routes whose node is behind a router or whose device is away.
    off_link: HashSet<(IpNet, IpAddr)>,
    /// When to retry the routes in `off_link`.
    retry_at: Option<Instant>,
    /// Routes that this agent had set: if one is off link now, its device is away.
    had: HashSet<(IpNet, IpAddr)>,
}

impl PeerRoutes {
    /// Makes the routes of our protocol with a gateway exactly these, each given as a pod CIDR and its node's address.
    /// The health endpoint's own routes have no gateway. Foreign routes are neither replaced nor deleted; one that
    /// leads the same way is sufficient.
    pub async fn sync(
        &mut self,
        handle: &Handle,
        wanted: &[(IpNet, IpAddr)],
        now: Instant,
    ) -> Result<Outcome, KernelError> {
        if self.retry_at.is_none_or(|at| at <= now) {
            self.retry_at = Some(now + OFF_LINK_RETRY);
            self.off_link.clear();
        }
        let mut outcome = Outcome::default();
        let wanted = consistent(wanted, &mut outcome.failed);
        let existing = existing(handle).await?;
        self.had.retain(|(cidr, via)| wanted.get(cidr) == Some(via));
        // Each time, try one of the routes whose device is away, to notice when the device is back.
        let mut is_away = false;
        for (&cidr, &via) in &wanted {
            let ours = existing.get(&cidr);
            if ours.is_some_and(|route| route.gateway == Some(via)) {
                self.had.insert((cidr, via));
                continue;
            }
            let is_tried = !is_away && self.had.contains(&(cidr, via));
            if ours.is_none() && self.off_link.contains(&(cidr, via)) && !is_tried {
                outcome.failed.push(PeerRouteError::NotOnLink { cidr, via });
                continue;
            }
            match set(handle, cidr, via, ours.is_some()).await {
                Ok(change) => {
                    self.had.insert((cidr, via));
                    if self.off_link.remove(&(cidr, via)) {
                        self.off_link.retain(|route| !self.had.contains(route));
                    }
                    outcome.changes.extend(change);
                }
                Err(error) => {
                    if matches!(error, PeerRouteError::NotOnLink { .. }) {
                        self.off_link.insert((cidr, via));
                        is_away |= is_tried;
                    }
                    outcome.failed.push(error);
                }
            }
        }
        for (cidr, route) in existing {
            if wanted.contains_key(&cidr) {
                continue;
            }
            match route::delete(handle, &route).await {
                Ok(true) => outcome.changes.push(Change::Deleted { cidr }),
                Ok(false) => {}
                Err(error) => outcome.failed.push(error.into()),
            }
        }
        Ok(outcome)
    }
}

/// Returns the routes that do not conflict with each other.
fn consistent(
    wanted: &[(IpNet, IpAddr)],
    failed: &mut Vec<PeerRouteError>,
) -> BTreeMap<IpNet, IpAddr> {
    let mut routes = BTreeMap::new();
    for &(cidr, via) in wanted {
        let cidr = cidr.trunc();
        if Family::of(cidr.addr()) != Family::of(via) {
            failed.push(PeerRouteError::OtherFamily { cidr, via });
            continue;
        }
        let kept = *routes.entry(cidr).or_insert(via);
        if kept != via {
            failed.push(PeerRouteError::Conflict { cidr, kept, via });
        }
    }
    routes
}

async fn existing(handle: &Handle) -> Result<HashMap<IpNet, Route>, KernelError> {
    let ours = route::list_ours(handle).await?;
    Ok(ours
        .into_iter()
        .filter(|route| route.gateway.is_some())
        .map(|route| (route.destination, route))
        .collect())
}

async fn set(
    handle: &Handle,
    cidr: IpNet,
    via: IpAddr,
    ours: bool,
) -> Result<Option<Change>, PeerRouteError> {
    let route = Route {
        gateway: Some(via),
        ..Route::to(cidr)
    };
    let done = if ours {
        route::replace(handle, &route).await
    } else {
        route::add(handle, &route).await
    };
    match done {
        Ok(()) if ours => Ok(Some(Change::Replaced { cidr, via })),
        Ok(()) => Ok(Some(Change::Added { cidr, via })),
        Err(error) => match error.os_code() {
            Some(libc::EEXIST) => match route::matching(handle, cidr.addr()).await? {
                Some(existing) if existing.gateway == Some(via) => Ok(None),
                Some(existing) => Err(PeerRouteError::Foreign {
                    cidr,
                    via,
                    existing,
                }),
                None => Err(error.into()),
            },
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH) => {
                Err(PeerRouteError::NotOnLink { cidr, via })
            }
            _ => Err(error.into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_named_and_the_rest_kept() {
        let wanted = [
            ("10.1.0.9/24", "192.0.2.1"),
            ("10.1.0.0/24", "192.0.2.1"),
            ("10.1.0.0/24", "192.0.2.2"),
            ("10.2.0.0/24", "fd00::1"),
            ("fd01::/64", "fd00::1"),
        ]
        .map(|(cidr, via)| (cidr.parse().unwrap(), via.parse().unwrap()));
        let mut failed = Vec::new();
        let kept = consistent(&wanted, &mut failed);
        let kept: Vec<_> = kept.iter().map(|(c, v)| format!("{c} {v}")).collect();
        assert_eq!(kept, ["10.1.0.0/24 192.0.2.1", "fd01::/64 fd00::1"]);
        let failed: Vec<_> = failed.iter().map(ToString::to_string).collect();
        assert_eq!(
            failed,
            [
                "pod CIDR 10.1.0.0/24 belongs to two nodes, 192.0.2.1 and 192.0.2.2; using the first",
                "no route to 10.2.0.0/24: node address fd00::1 is of the other IP version",
            ]
        );
    }
}
