//! The owner of a frontend, its backends, and the reasons for its choice of backends.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use axum::http::StatusCode;
use health_common::service::{Frontend, KIND_NODE_PORT, Origin};
use health_datapath::services::{Connection, ListedBackend, ListedFrontend};
use health_model::api::{
    ServiceBackend, ServiceEntry, ServiceFrontend, ServicePortEntry, SourceKind, TracedPool,
    TracedSource,
};
use health_model::ipam::Family;
use health_model::policy::Protocol;

use super::ends::ports_of;
use super::hook::TraceHook;
use crate::answer::Refusal;
use crate::services::ServiceCatalog;

/// Maximum number of excluded endpoints that a reason names.
const LEFT_OUT: usize = 5;

/// The owner of a frontend, as the agent sees it.
pub(super) struct Owner {
    pub(super) service: ServiceEntry,
    port: ServicePortEntry,
    pub(super) frontend: ServiceFrontend,
    family: Family,
}

impl Owner {
    /// Finds the owner of the flow's destination, whether or not the programs have a frontend for it. A service's
    /// address takes precedence over a node port.
    pub(super) fn find(
        catalog: &ServiceCatalog,
        flow: &Connection,
        found: Option<&ListedFrontend>,
        is_own_address: bool,
    ) -> Option<Self> {
        let family = Family::of(flow.destination.ip());
        let node_port = format!("node port {}", flow.destination.port());
        let may_be_node_port =
            found.map_or(is_own_address, |found| found.entry.kind == KIND_NODE_PORT);
        let listens = [flow.destination.to_string()];
        let listens = listens
            .into_iter()
            .chain(may_be_node_port.then_some(node_port));
        let protocol = Protocol(flow.protocol).to_string();
        listens.into_iter().find_map(|listen| {
            let is_it = |frontend: &ServiceFrontend| {
                frontend.listen == listen && frontend.family == family.name()
            };
            let has = |port: &ServicePortEntry| {
                port.protocol == protocol && port.frontends.iter().any(is_it)
            };
            let mut services = catalog.services_with(|service| service.ports.iter().any(has));
            let service = services.pop()?;
            let port = service.ports.iter().find(|port| has(port))?.clone();
            let frontend = port.frontends.iter().find(|one| is_it(one))?.clone();
            Some(Self {
                service,
                port,
                frontend,
                family,
            })
        })
    }

    /// `NAMESPACE/NAME`, or `NAMESPACE/NAME:PORT` if the port has a name.
    pub(super) fn title(&self) -> String {
        let name = self.service.full_name();
        match &*self.port.name {
            "" => name,
            port => format!("{name}:{port}"),
        }
    }

    /// What the agent knows about a backend.
    pub(super) fn backend(&self, address: SocketAddr) -> Option<&ServiceBackend> {
        let mut backends = self.port.backends.iter();
        backends.find(|backend| backend.address == address)
    }

    /// Where new flows go: `cluster`, `local`, `drop` or `reject`.
    fn target(&self, origin: Origin) -> &str {
        origin.pick(&self.frontend.inside, &self.frontend.outside)
    }

    /// The traffic policy, which says which endpoints the flow may use.
    fn policy(&self, origin: Origin) -> &str {
        match &*self.frontend.kind {
            "ClusterIP" => &self.service.internal_policy,
            // Traffic from the node and its endpoints may always use the whole cluster.
            _ if origin == Origin::Inside => "Cluster",
            _ => &self.service.external_policy,
        }
    }

    fn backends(&self) -> impl Iterator<Item = &ServiceBackend> {
        let backends = self.port.backends.iter();
        backends.filter(|backend| Family::of(backend.address.ip()) == self.family)
    }

    /// How the pool in the maps differs from the agent's intent.
    pub(super) fn difference(
        &self,
        origin: Origin,
        entry: &Frontend,
        pool: &[ListedBackend],
    ) -> Option<String> {
        let target = self.target(origin);
        let meant: BTreeSet<_> = self
            .backends()
            .filter(|backend| is_in_list(backend, target))
            .map(|backend| backend.address)
            .collect();
        let found: BTreeSet<_> = pool.iter().map(ListedBackend::address).collect();
        if meant != found {
            return Some(format!(
                "the programs use {}, but the agent expects {}",
                listed(&found),
                listed(&meant)
            ));
        }
        let is_dropped = entry.drops(origin);
        (found.is_empty() && is_dropped != (target == "drop")).then(|| {
            let does = if is_dropped { "drop" } else { "reject" };
            format!("the programs {does} the flow, but the agent chose `{target}`")
        })
    }

    fn reasons(&self, origin: Origin) -> Vec<String> {
        let target = self.target(origin);
        let mut reasons = Vec::new();
        let is_inside = origin == Origin::Inside;
        if self.frontend.kind != "ClusterIP" && is_inside && self.service.external_policy == "Local"
        {
            reasons.push(
                "flows from this node and its endpoints may use the whole cluster, whatever the policy"
                    .to_owned(),
            );
        }
        let chosen: Vec<_> = self
            .backends()
            .filter(|backend| is_in_list(backend, target))
            .collect();
        let are_ending = !chosen.is_empty() && chosen.iter().all(|backend| !backend.ready);
        match target {
            "local" => reasons.push("only endpoints on this node".to_owned()),
            "drop" if self.policy(origin) == "Local" => {
                reasons.push("there are endpoints, but none on this node is serving".to_owned());
            }
            "drop" => {
                reasons.push("there are endpoints, but this flow may use none of them".to_owned());
            }
            "reject" => reasons.push("no endpoint is serving".to_owned()),
            _ => {}
        }
        if are_ending {
            reasons.push(
                "no endpoint is ready; terminating endpoints that still serve get the flows"
                    .to_owned(),
            );
        } else if target == "cluster" {
            let family = self.family.name();
            let topology = self.port.topology.iter().filter(|one| one.family == family);
            reasons.extend(topology.map(|one| one.reason.clone()));
        }
        let left_out = self
            .backends()
            .filter(|backend| !is_in_list(backend, target));
        let left_out: Vec<_> = left_out.map(|backend| why_not(backend, target)).collect();
        let more = left_out.len().saturating_sub(LEFT_OUT);
        reasons.extend(left_out.into_iter().take(LEFT_OUT));
        if more > 0 {
            reasons.push(format!("{more} more get no flows"));
        }
        reasons
    }
}

fn is_in_list(backend: &ServiceBackend, target: &str) -> bool {
    match target {
        "cluster" => backend.in_cluster_list,
        "local" => backend.in_local_list,
        _ => false,
    }
}

/// Why a backend gets no traffic.
fn why_not(backend: &ServiceBackend, target: &str) -> String {
    let why = match (backend.ready, backend.probed, target) {
        (true, _, "local" | "drop") if !backend.local => "on another node",
        (true, ..) => "others are preferred",
        (false, Some(false), _) => "its probe fails",
        (false, ..) => backend.state(),
    };
    format!("{} gets no flows: {why}", backend.address)
}

fn listed(addresses: &BTreeSet<SocketAddr>) -> String {
    if addresses.is_empty() {
        return "no backend".to_owned();
    }
    let addresses: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
    addresses.join(", ")
}

/// The pool from which the flow's backend is chosen.
pub(super) fn pool(
    flow: &Connection,
    source: &TracedSource,
    found: Option<&ListedFrontend>,
    owner: Option<&Owner>,
) -> TracedPool {
    let origin = TraceHook::of(source.kind).origin();
    let mut reasons = owner.map_or_else(Vec::new, |owner| owner.reasons(origin));
    let senders = match source.kind {
        SourceKind::RemoteEndpoint => Some("endpoints"),
        SourceKind::Node => Some("processes"),
        SourceKind::Endpoint | SourceKind::Host | SourceKind::Outside => None,
    };
    if let Some(senders) = senders {
        let node = source.name.as_deref().unwrap_or("its node");
        reasons.push(format!(
            "{node} chooses for its own {senders}; this trace is for packets that arrive here untranslated"
        ));
    }
    let has_frontend = found.is_some();
    if !has_frontend {
        reasons.push(format!(
            "the programs have no frontend {}",
            flow.destination
        ));
    }
    TracedPool {
        inside: origin == Origin::Inside,
        policy: owner.map(|owner| owner.policy(origin).to_owned()),
        reasons,
    }
}

/// The refusal for a destination without a service. Names the services at the same address.
pub(super) fn nobody(catalog: &ServiceCatalog, flow: &Connection) -> Refusal {
    let (destination, protocol) = (flow.destination, Protocol(flow.protocol));
    let ip = destination.ip();
    let is_at = |frontend: &ServiceFrontend| {
        let address = frontend.listen.parse::<SocketAddr>();
        address.is_ok_and(|address| address.ip() == ip)
    };
    let has = |port: &ServicePortEntry| port.frontends.iter().any(is_at);
    let near = catalog.services_with(|service| service.ports.iter().any(has));
    let near: Vec<_> = near
        .iter()
        .map(|service| {
            format!(
                "{ip} belongs to {}, which has {}",
                service.full_name(),
                ports_of(service)
            )
        })
        .collect();
    let near = match near.is_empty() {
        true => "`health-agent service list` lists the existing ones".to_owned(),
        false => near.join("; "),
    };
    Refusal(
        StatusCode::NOT_FOUND,
        format!("destination: no service at {destination}/{protocol}; {near}"),
    )
}

#[cfg(test)]
mod tests;
