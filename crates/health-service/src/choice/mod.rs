//! Chooses the endpoints that get the traffic of a port (`pkg/proxy/topology.go` of Kubernetes).

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use crate::spec::{Endpoint, Hints, ServicePort};

/// This node's place in the topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The node's name.
    pub node: Arc<str>,
    /// The node's zone, as named in hints.
    pub zone: Option<Arc<str>>,
}

/// Which endpoints the hints prefer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologyMode {
    /// No preference: all endpoints are used.
    All,
    /// Endpoints with a hint for this node.
    PreferSameNode,
    /// Endpoints with a hint for this zone.
    PreferSameZone,
}

/// Which endpoints are preferred, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preference {
    /// The preferred endpoints.
    pub mode: TopologyMode,
    /// The reason.
    pub reason: String,
}

/// The endpoints chosen for a port, in the order of the port's list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice<'a> {
    /// Endpoints for traffic under the policy `Cluster`.
    pub cluster: Vec<&'a Endpoint>,
    /// Endpoints for traffic under the policy `Local`.
    pub local: Vec<&'a Endpoint>,
    /// Whether any endpoint of the cluster could serve. If so, traffic whose list is empty is dropped, so that a load
    /// balancer tries another node; otherwise the traffic is rejected.
    pub has_any: bool,
}

impl<'a> Choice<'a> {
    /// Chooses the endpoints that the traffic of a port may use on this node.
    pub fn of(endpoints: &'a [Endpoint], port: &ServicePort, topology: &Topology) -> Self {
        let mut choice = Self {
            has_any: endpoints
                .iter()
                .any(|endpoint| endpoint.conditions.ready || is_last_resort(endpoint)),
            ..Self::default()
        };
        if port.uses_cluster_endpoints() {
            let mode = TopologyMode::of(endpoints, topology);
            let is_preferred =
                |endpoint: &Endpoint| endpoint.conditions.ready && mode.prefers(endpoint, topology);
            choice.cluster = first_that_has(endpoints, [&is_preferred, &is_last_resort]);
        }
        if port.uses_local_endpoints() {
            let is_ready = |endpoint: &Endpoint| endpoint.is_local && endpoint.conditions.ready;
            let is_last = |endpoint: &Endpoint| endpoint.is_local && is_last_resort(endpoint);
            choice.local = first_that_has(endpoints, [&is_ready, &is_last]);
        }
        choice
    }

    /// Returns the endpoints in either list without duplicates: the cluster list, then the endpoints that are only in
    /// the local list.
    pub fn reachable(&self) -> Vec<&'a Endpoint> {
        let mut seen = HashSet::new();
        let all = self.cluster.iter().chain(&self.local).copied();
        all.filter(|endpoint| seen.insert(endpoint.address))
            .collect()
    }
}

/// Whether an endpoint gets traffic only if no other is ready: it is terminating, but still serves.
fn is_last_resort(endpoint: &Endpoint) -> bool {
    endpoint.conditions.serving && endpoint.conditions.terminating
}

/// Returns the endpoints that pass the first test or, if there are none, those that pass the second.
fn first_that_has<'a>(
    endpoints: &'a [Endpoint],
    tests: [&dyn Fn(&Endpoint) -> bool; 2],
) -> Vec<&'a Endpoint> {
    let passing = |test: &dyn Fn(&Endpoint) -> bool| -> Vec<_> {
        endpoints.iter().filter(|endpoint| test(endpoint)).collect()
    };
    let first = passing(tests[0]);
    if first.is_empty() {
        passing(tests[1])
    } else {
        first
    }
}

impl Preference {
    /// Returns the preference for these endpoints; `None` if no ready endpoint has a hint.
    pub fn of(endpoints: &[Endpoint], topology: &Topology) -> Option<Self> {
        let ready = || endpoints.iter().filter(|one| one.conditions.ready);
        if ready().all(|endpoint| endpoint.hints.is_none()) {
            return None;
        }
        let mode = TopologyMode::of(endpoints, topology);
        let node = &topology.node;
        let reason = match (mode, &topology.zone) {
            (TopologyMode::PreferSameNode, _) => format!("hints are for nodes, including {node}"),
            (TopologyMode::PreferSameZone, Some(zone)) => {
                format!("hints are for zones, including {zone}")
            }
            (TopologyMode::PreferSameZone, None) => "hints are for zones".to_owned(),
            (TopologyMode::All, zone) => {
                let without = ready().find(|endpoint| endpoint.hints.is_none());
                match (without, zone) {
                    (Some(without), _) => format!(
                        "hints are ignored: {} is ready and has none",
                        without.address
                    ),
                    (None, Some(zone)) => format!(
                        "hints are ignored: not all ready endpoints have a hint for nodes \
                         including {node}, or for zones including {zone}"
                    ),
                    (None, None) => format!(
                        "hints are ignored: not all ready endpoints have a hint for nodes \
                         including {node}, and this node's zone is unknown"
                    ),
                }
            }
        };
        Some(Self { mode, reason })
    }
}

impl TopologyMode {
    /// Returns the mode for these endpoints. Hints count only if every ready endpoint has one and at least one hint is
    /// for this node or zone: incomplete hints could leave traffic with too few endpoints, or none.
    pub fn of(endpoints: &[Endpoint], topology: &Topology) -> Self {
        let mut ready = endpoints
            .iter()
            .filter(|endpoint| endpoint.conditions.ready)
            .peekable();
        if ready.peek().is_none() {
            return Self::All;
        }
        let (mut have_nodes, mut have_zones) = (true, true);
        let (mut same_node, mut same_zone) = (false, false);
        for endpoint in ready {
            let Some(hints) = endpoint.hints.as_deref() else {
                return Self::All;
            };
            have_nodes &= !hints.nodes.is_empty();
            have_zones &= !hints.zones.is_empty();
            same_node |= is_for_node(hints, topology);
            same_zone |= is_for_zone(hints, topology);
        }
        if have_nodes && same_node {
            Self::PreferSameNode
        } else if have_zones && same_zone {
            Self::PreferSameZone
        } else {
            Self::All
        }
    }

    fn prefers(self, endpoint: &Endpoint, topology: &Topology) -> bool {
        let hints = endpoint.hints.as_deref();
        match self {
            Self::All => true,
            Self::PreferSameNode => hints.is_some_and(|hints| is_for_node(hints, topology)),
            Self::PreferSameZone => hints.is_some_and(|hints| is_for_zone(hints, topology)),
        }
    }
}

fn is_for_node(hints: &Hints, topology: &Topology) -> bool {
    hints.nodes.contains(&topology.node)
}

fn is_for_zone(hints: &Hints, topology: &Topology) -> bool {
    let zone = topology.zone.as_ref();
    zone.is_some_and(|zone| hints.zones.contains(zone))
}
