//! What a provider is to bring into the kernel.
//!
//! For each port of a service and each family: where its traffic arrives, and which endpoints it may go to. A sync
//! takes what the trackers have and names the ports whose state is another than before; its cost grows with what
//! changed, not with what there is.

mod claims;
mod frontend;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use jiff::Timestamp;

use crate::choice::{Choice, Topology};
use crate::spec::{Algorithm, Endpoint, PortKey, ServiceName, ServicePortName};
use crate::tracker::{EndpointsChangeTracker, EndpointsMap, ServiceChangeTracker, ServicePortMap};
use claims::{Claims, Place, Touched};

pub use claims::Conflict;
pub use frontend::{Frontend, FrontendKind, Listen, Target};

/// A backend of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its share of new flows relative to others of the port. At least 1.
    pub weight: u16,
    /// Whether it is on this node, and may reach itself through the service.
    pub is_local: bool,
}

/// What is to be done for a port in a family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortState {
    /// Where its traffic arrives.
    pub frontends: Vec<Frontend>,
    /// The backends of traffic with [`Target::Cluster`].
    pub cluster: Vec<Backend>,
    /// The backends of traffic with [`Target::Local`].
    pub local: Vec<Backend>,
    /// Endpoints that serve, but are in none of the lists: new flows do not go there, and flows that go there may stay.
    pub lingering: Vec<SocketAddr>,
    /// How long a client stays with its backend after its last packet; none for no affinity.
    pub affinity: Option<Duration>,
    /// How a backend is chosen; none for the node's default.
    pub algorithm: Option<Algorithm>,
}

/// What a sync changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The ports whose state is another than before, or that are gone.
    pub ports: BTreeSet<PortKey>,
    /// The services that are gone.
    pub deleted: BTreeSet<ServiceName>,
    /// When what changed the endpoints happened, by service: until a provider has programmed it, the change takes time.
    pub trigger_times: BTreeMap<ServiceName, Vec<Timestamp>>,
}

/// What load balancers are told of a service on its health-check node port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port.
    pub port: u16,
    /// How many addresses its ready endpoints on this node have.
    pub local_endpoints: usize,
}

/// How many ports have endpoints, but none on this node for traffic that may use no other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoLocalEndpoints {
    /// Traffic to ClusterIPs.
    pub internal: usize,
    /// All other traffic.
    pub external: usize,
}

/// All that is to be done.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    topology: Topology,
    services: ServicePortMap,
    endpoints: EndpointsMap,
    claims: Claims,
    ports: BTreeMap<PortKey, PortState>,
    /// Never empty for a port.
    conflicts: BTreeMap<PortKey, Vec<Conflict>>,
    health_checks: BTreeMap<ServiceName, u16>,
    no_local_endpoints: NoLocalEndpoints,
}

impl State {
    /// Nothing yet, on a node that is there.
    pub fn new(topology: Topology) -> Self {
        Self {
            topology,
            services: ServicePortMap::default(),
            endpoints: EndpointsMap::default(),
            claims: Claims::default(),
            ports: BTreeMap::new(),
            conflicts: BTreeMap::new(),
            health_checks: BTreeMap::new(),
            no_local_endpoints: NoLocalEndpoints::default(),
        }
    }

    /// Takes what has changed.
    pub fn sync(
        &mut self,
        services: &mut ServiceChangeTracker,
        endpoints: &mut EndpointsChangeTracker,
    ) -> Changes {
        let services = services.apply(&mut self.services);
        let endpoints = endpoints.apply(&mut self.endpoints);
        for service in &services.services {
            self.note_health_check(service);
        }
        let mut affected = self.claim(&services.ports);
        affected.extend(endpoints.ports);
        Changes {
            ports: self.update(affected),
            deleted: services.deleted,
            trigger_times: endpoints.trigger_times,
        }
    }

    /// Where the node is.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The node is elsewhere now. Returns the ports whose state is another than before.
    pub fn set_topology(&mut self, topology: Topology) -> BTreeSet<PortKey> {
        if self.topology == topology {
            return BTreeSet::new();
        }
        self.topology = topology;
        self.update(self.ports.keys().cloned().collect())
    }

    /// The same state, computed from all services and endpoints at once.
    #[must_use]
    pub fn recomputed(&self) -> Self {
        let mut state = Self::new(self.topology.clone());
        state.services = self.services.clone();
        state.endpoints = self.endpoints.clone();
        let names: BTreeSet<_> = state
            .services
            .iter()
            .map(|(name, _)| name.clone())
            .collect();
        for name in &names {
            state.note_health_check(&name.service);
        }
        let affected = state.claim(&names);
        state.update(affected);
        state
    }

    /// What is to be done for a port; none if nothing is.
    pub fn port(&self, key: &PortKey) -> Option<&PortState> {
        self.ports.get(key)
    }

    /// All ports.
    pub fn ports(&self) -> impl Iterator<Item = (&PortKey, &PortState)> {
        self.ports.iter()
    }

    /// The ports of services that there are, served or not.
    pub fn services(&self) -> &ServicePortMap {
        &self.services
    }

    /// The endpoints that there are, used or not.
    pub fn endpoints(&self) -> &EndpointsMap {
        &self.endpoints
    }

    /// Which ports are not served at an address, since another port has it.
    pub fn conflicts(&self) -> impl Iterator<Item = &Conflict> {
        self.conflicts.values().flatten()
    }

    /// The port that has a place; none if none claims it.
    pub fn owner(
        &self,
        family: Family,
        protocol: Protocol,
        listen: Listen,
    ) -> Option<&ServicePortName> {
        self.claims.owner(&Place::new(family, protocol, listen))
    }

    /// How many ports have endpoints, but none on this node for traffic that may use no other.
    pub fn no_local_endpoints(&self) -> NoLocalEndpoints {
        self.no_local_endpoints
    }

    /// What load balancers of this family are told, for each service that has a health-check node port.
    pub fn health_checks(&self, family: Family) -> BTreeMap<ServiceName, HealthCheck> {
        let has_family = |service: &ServiceName| {
            let port = self.services.of_service(service).next();
            port.is_some_and(|(_, port)| {
                let mut ips = port.service.cluster_ips.iter();
                ips.any(|ip| Family::of(*ip) == family)
            })
        };
        let checks = self.health_checks.iter();
        checks
            .filter(|(service, _)| has_family(service))
            .map(|(service, port)| {
                let check = HealthCheck {
                    port: *port,
                    local_endpoints: self.local_endpoints(service, family),
                };
                (service.clone(), check)
            })
            .collect()
    }

    /// How many addresses the ready endpoints of a service on this node have.
    fn local_endpoints(&self, service: &ServiceName, family: Family) -> usize {
        let of_service = self.endpoints.of_service(service);
        let of_family = of_service.filter(|(key, _)| key.family == family);
        let local: HashSet<_> = of_family
            .flat_map(|(_, endpoints)| endpoints)
            .filter(|endpoint| endpoint.is_local && endpoint.conditions.ready)
            .map(|endpoint| endpoint.address.ip())
            .collect();
        local.len()
    }

    fn note_health_check(&mut self, service: &ServiceName) {
        let mut ports = self.services.of_service(service);
        match ports
            .next()
            .and_then(|(_, port)| port.service.health_check_node_port)
        {
            Some(port) => self.health_checks.insert(service.clone(), port),
            None => self.health_checks.remove(service),
        };
    }

    /// Claims the places of these ports as they are now, and no others. Returns all ports that must be looked at: they,
    /// and those that gain or lose a place.
    fn claim(&mut self, names: &BTreeSet<ServicePortName>) -> BTreeSet<PortKey> {
        let mut touched = Touched::default();
        let mut affected = BTreeSet::new();
        for name in names {
            for family in Family::ALL {
                let key = PortKey {
                    name: name.clone(),
                    family,
                };
                let had = self.ports.get(&key).into_iter();
                let had = had.flat_map(|state| state.frontends.iter().map(|had| had.listen));
                let lacked = self.conflicts.get(&key).into_iter().flatten();
                for listen in had.chain(lacked.map(|conflict| conflict.listen)) {
                    self.claims.remove(&key, listen, &mut touched);
                }
                if let Some(port) = self.services.get(name) {
                    for wanted in frontend::wanted(port, family) {
                        self.claims.add(&key, wanted, port, &mut touched);
                    }
                }
                affected.insert(key);
            }
        }
        affected.extend(self.claims.moved(touched));
        affected
    }

    /// Computes the state of these ports anew. Returns those that have another than before.
    fn update(&mut self, keys: BTreeSet<PortKey>) -> BTreeSet<PortKey> {
        keys.into_iter()
            .filter(|key| self.update_port(key))
            .collect()
    }

    fn update_port(&mut self, key: &PortKey) -> bool {
        let (state, conflicts) = match self.compute(key) {
            Some((state, conflicts)) => (Some(state), conflicts),
            None => (None, Vec::new()),
        };
        if conflicts.is_empty() {
            self.conflicts.remove(key);
        } else {
            self.conflicts.insert(key.clone(), conflicts);
        }
        if self.ports.get(key) == state.as_ref() {
            return false;
        }
        let counts = state.as_ref().map(PortState::no_local_endpoints);
        let before = match state {
            Some(state) => self.ports.insert(key.clone(), state),
            None => self.ports.remove(key),
        };
        let before = before.as_ref().map(PortState::no_local_endpoints);
        let total = &mut self.no_local_endpoints;
        let (counts, before) = (counts.unwrap_or_default(), before.unwrap_or_default());
        total.internal = total.internal + counts.internal - before.internal;
        total.external = total.external + counts.external - before.external;
        true
    }

    /// What is to be done for a port, and where others are before it.
    fn compute(&self, key: &PortKey) -> Option<(PortState, Vec<Conflict>)> {
        let port = self.services.get(&key.name)?;
        let wanted = frontend::wanted(port, key.family);
        if wanted.is_empty() {
            return None;
        }
        let endpoints = self.endpoints.get(key);
        let choice = Choice::of(endpoints, port, &self.topology);
        let source_ranges = frontend::source_ranges(port, key.family);
        let mut frontends = Vec::new();
        let mut conflicts = Vec::new();
        for (listen, kind) in wanted {
            match self.claims.owner(&Place::of(key, listen)) {
                Some(owner) if *owner != key.name => conflicts.push(Conflict {
                    key: key.clone(),
                    listen,
                    kind,
                    owner: owner.clone(),
                }),
                _ => frontends.push(Frontend::new(
                    (listen, kind),
                    port,
                    &choice,
                    source_ranges.as_ref(),
                )),
            }
        }
        let backends = |list: &[&Endpoint]| -> Vec<_> {
            let backend = |endpoint: &&Endpoint| Backend {
                address: endpoint.address,
                weight: endpoint.weight,
                is_local: endpoint.is_local,
            };
            list.iter().map(backend).collect()
        };
        let state = PortState {
            frontends,
            cluster: backends(&choice.cluster),
            local: backends(&choice.local),
            lingering: lingering(endpoints, &choice),
            affinity: port.service.affinity,
            algorithm: port.service.algorithm,
        };
        Some((state, conflicts))
    }
}

/// The endpoints that serve, and that new flows do not go to.
fn lingering(endpoints: &[Endpoint], choice: &Choice<'_>) -> Vec<SocketAddr> {
    let used: HashSet<_> = choice
        .cluster
        .iter()
        .chain(&choice.local)
        .map(|endpoint| endpoint.address)
        .collect();
    let serving = endpoints
        .iter()
        .filter(|endpoint| endpoint.conditions.serving);
    serving
        .map(|endpoint| endpoint.address)
        .filter(|address| !used.contains(address))
        .collect()
}

impl PortState {
    /// Of this port: 1 or 0.
    fn no_local_endpoints(&self) -> NoLocalEndpoints {
        let drops = |is_internal: bool| {
            let mut frontends = self.frontends.iter();
            frontends.any(|frontend| {
                (frontend.kind == FrontendKind::ClusterIp) == is_internal
                    && frontend.outside == Target::Drop
            })
        };
        NoLocalEndpoints {
            internal: drops(true).into(),
            external: drops(false).into(),
        }
    }
}
