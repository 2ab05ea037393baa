//! Unreachable routes for the free addresses of this node's pod CIDRs. Without these routes, the host forwards packets
//! for such an address to its router, which sends them back until their TTL expires.
//!
//! Each endpoint has a route of its own with a longer prefix. A foreign route for the whole pod CIDR takes precedence.

use std::net::IpAddr;

use health_net::KernelError;
use health_net::netlink::Handle;
use health_net::route::{self, Route, RouteKind};
use ipnet::IpNet;

/// A changed route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodRouteChange {
    /// The route was added.
    Added(IpNet),
    /// The route was deleted: this node no longer has the pod CIDR, or the CIDR contains the address of a node.
    Deleted(IpNet),
}

impl std::fmt::Display for PodRouteChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Added(cidr) => write!(f, "added route unreachable {cidr}"),
            Self::Deleted(cidr) => write!(f, "deleted route unreachable {cidr}"),
        }
    }
}

/// Makes the unreachable routes of our protocol cover exactly these pod CIDRs, except those that contain the address of
/// a node: the route to that node may have a shorter prefix. Returns the changes.
pub async fn sync(
    handle: &Handle,
    pod_cidrs: &[IpNet],
    nodes: &[IpAddr],
) -> Result<Vec<PodRouteChange>, KernelError> {
    let mut changes = Vec::new();
    let ours = route::list_ours(handle).await?.into_iter();
    let ours = ours.filter(|route| route.kind == RouteKind::Unreachable);
    let mut missing = without_nodes(pod_cidrs, nodes);
    for there in ours {
        let destination = there.destination;
        if missing.contains(&destination) {
            missing.retain(|cidr| *cidr != destination);
        } else if route::delete(handle, &there).await? {
            changes.push(PodRouteChange::Deleted(destination));
        }
    }
    for cidr in missing {
        match route::add(handle, &Route::to_nobody(cidr)).await {
            Ok(()) => changes.push(PodRouteChange::Added(cidr)),
            // A foreign route for the pod CIDR exists already.
            Err(error) if error.os_code() == Some(libc::EEXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(changes)
}

fn without_nodes(pod_cidrs: &[IpNet], nodes: &[IpAddr]) -> Vec<IpNet> {
    let cidrs = pod_cidrs.iter().map(IpNet::trunc);
    let mut cidrs: Vec<_> = cidrs
        .filter(|cidr| !nodes.iter().any(|node| cidr.contains(node)))
        .collect();
    cidrs.sort();
    cidrs.dedup();
    cidrs
}

#[cfg(test)]
mod tests {
    use super::*;

    use health_net::testing::in_a_namespace;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn where_a_node_is_somebody_may_be() {
        let nodes = ["10.2.0.1", "fd00::1"].map(|text| text.parse().unwrap());
        let cidrs = nets(&[
            "10.1.0.9/24",
            "10.1.0.0/24",
            "10.2.0.0/16",
            "fd00::/64",
            "fd01::/64",
        ]);
        let kept = without_nodes(&cidrs, &nodes);
        assert_eq!(kept, nets(&["10.1.0.0/24", "fd01::/64"]));
    }

    /// Returns the routes of a namespace as shown by `ip`.
    fn shown(family: &str) -> Vec<String> {
        let mut ip = std::process::Command::new("ip");
        let shown = ip.args([family, "route", "show", "type", "unreachable"]);
        let text = String::from_utf8(shown.output().unwrap().stdout).unwrap();
        text.lines()
            .map(|line| line.trim_end().to_owned())
            .collect()
    }

    #[test]
    fn routes_follow_the_pod_cidrs_and_leave_those_of_others() {
        in_a_namespace(async || {
            let handle = health_net::netlink::open().unwrap();
            let foreign = Route {
                protocol: 99,
                ..Route::to_nobody("10.9.0.0/24".parse().unwrap())
            };
            route::add(&handle, &foreign).await.unwrap();
            let cidrs = nets(&["10.1.0.0/24", "fd01::/64"]);
            let added = [0, 1].map(|at| PodRouteChange::Added(cidrs[at]));
            assert_eq!(sync(&handle, &cidrs, &[]).await.unwrap(), added);
            assert_eq!(sync(&handle, &cidrs, &[]).await.unwrap(), []);
            assert_eq!(shown("-4").len(), 2, "{:?}", shown("-4"));
            assert_eq!(shown("-6").len(), 1, "{:?}", shown("-6"));

            let others = nets(&["10.9.0.0/24", "fd01::/64"]);
            let changed = [PodRouteChange::Deleted(cidrs[0])];
            assert_eq!(sync(&handle, &others, &[]).await.unwrap(), changed);
            let deleted = [PodRouteChange::Deleted(cidrs[1])];
            assert_eq!(sync(&handle, &[], &[]).await.unwrap(), deleted);
            assert_eq!(shown("-4").len(), 1, "{:?}", shown("-4"));
            assert_eq!(shown("-6"), Vec::<String>::new());
        });
    }
}
