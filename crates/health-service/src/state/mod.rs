//! The desired state that a provider writes into the kernel.
//!
//! For each port of a service and each family, the state tells where traffic arrives and which endpoints it may use. A
//! sync takes the trackers' changes and returns the ports whose state has changed. The cost depends on the number of
//! changes, not on the number of services.

mod claims;
mod frontend;
mod reserved;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use health_model::settings::ServiceForwarding;
use imbl::OrdMap;
use jiff::Timestamp;

use crate::choice::{Choice, Topology};
use crate::spec::{Algorithm, Endpoint, PortKey, ServiceName, ServicePortName};
use crate::tracker::{EndpointsChangeTracker, EndpointsMap, ServiceChangeTracker, ServicePortMap};
use claims::{CheckPorts, Claim, Claimed, Claims, Permits, Touched};

pub use claims::{Conflict, Owner};
pub use frontend::{Frontend, FrontendKind, Listen, Target};
pub use reserved::{ExternalIps, Peer, Reserved, ReservedFor};

/// A backend of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backend {
    /// The address and port on which the backend listens.
    pub address: SocketAddr,
    /// The backend's share of new flows, relative to the other backends of the port. At least 1.
    pub weight: u16,
    /// Whether the backend is on this node, and so may reach itself through the service.
    pub is_local: bool,
}

/// The desired state of a port in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortState {
    /// The destinations at which the port's traffic arrives.
    pub frontends: Vec<Frontend>,
    /// The backends for traffic with [`Target::Cluster`].
    pub cluster: Vec<Backend>,
    /// The backends for traffic with [`Target::Local`].
    pub local: Vec<Backend>,
    /// Endpoints that still serve but are in neither list. They get no new flows, but keep existing ones.
    pub lingering: Vec<SocketAddr>,
    /// How long a client stays with its backend after it last opened a flow; `None` for no affinity.
    pub affinity: Option<Duration>,
    /// How to choose a backend; `None` for the node's default.
    pub algorithm: Option<Algorithm>,
    /// How packets from external clients reach backends on other nodes; `None` for the node's default.
    pub forwarding: Option<ServiceForwarding>,
}

/// The changes made by a sync.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The ports whose state has changed, or that are gone.
    pub ports: BTreeSet<PortKey>,
    /// The services that are gone.
    pub deleted: BTreeSet<ServiceName>,
    /// When the events happened that changed the endpoints, by service. The programming-latency metric measures the
    /// time from an event until the provider is done.
    pub trigger_times: BTreeMap<ServiceName, Vec<Timestamp>>,
}

/// The report of a service's health-check node port to load balancers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The health-check node port.
    pub port: u16,
    /// The number of distinct addresses of the service's ready endpoints on this node.
    pub local_endpoints: usize,
}

/// Number of ports that have endpoints, but none on this node, although some of their traffic must stay on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoLocalEndpoints {
    /// Ports where this concerns traffic to ClusterIPs.
    pub internal: usize,
    /// Ports where this concerns all other traffic.
    pub external: usize,
}

/// The reports of all services' health-check node ports.
pub type HealthChecks = OrdMap<ServiceName, HealthCheck>;

/// The conflicts of each port that has any.
pub type Conflicts = OrdMap<PortKey, Arc<[Conflict]>>;

/// The complete desired state. A clone shares everything with the original.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    topology: Topology,
    services: ServicePortMap,
    endpoints: EndpointsMap,
    claims: Claims,
    reserved: Arc<Reserved>,
    /// The health-check node ports of all services.
    checks: CheckPorts,
    ports: OrdMap<PortKey, Arc<PortState>>,
    conflicts: Conflicts,
    /// The health checks by family, in the order of [`Family::ALL`].
    health_checks: [HealthChecks; 2],
    no_local_endpoints: NoLocalEndpoints,
}

impl State {
    /// Creates an empty state, on a node at this place in the topology.
    pub fn new(topology: Topology) -> Self {
        Self {
            topology,
            services: ServicePortMap::default(),
            endpoints: EndpointsMap::default(),
            claims: Claims::default(),
            reserved: Arc::default(),
            checks: CheckPorts::new(),
            ports: OrdMap::new(),
            conflicts: OrdMap::new(),
            health_checks: [OrdMap::new(), OrdMap::new()],
            no_local_endpoints: NoLocalEndpoints::default(),
        }
    }

    /// Applies the trackers' changes.
    pub fn sync(
        &mut self,
        services: &mut ServiceChangeTracker,
        endpoints: &mut EndpointsChangeTracker,
    ) -> Changes {
        let services = services.apply(&mut self.services);
        let endpoints = endpoints.apply(&mut self.endpoints);
        let mut affected = BTreeSet::new();
        for service in services.services.union(&endpoints.services) {
            affected.extend(self.note_health_checks(service));
        }
        affected.extend(self.claim(&services.ports));
        affected.extend(endpoints.ports);
        Changes {
            ports: self.update(affected),
            deleted: services.deleted,
            trigger_times: endpoints.trigger_times,
        }
    }

    /// Returns the node's place in the topology.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Moves the node to another place in the topology. Returns the ports whose state has changed.
    pub(crate) fn set_topology(&mut self, topology: Topology) -> BTreeSet<PortKey> {
        if self.topology == topology {
            return BTreeSet::new();
        }
        self.topology = topology;
        self.update(self.ports.keys().cloned().collect())
    }

    /// Sets the addresses and ports that services must leave to the node and its peers. Returns the ports whose state
    /// has changed.
    pub(crate) fn set_reserved(&mut self, reserved: &Arc<Reserved>) -> BTreeSet<PortKey> {
        if self.reserved == *reserved {
            return BTreeSet::new();
        }
        let before = std::mem::replace(&mut self.reserved, reserved.clone());
        let (had, has) = (&before.addresses, &reserved.addresses);
        let ips = had.keys().chain(has.keys());
        let changed = ips.filter(|ip| had.get(ip) != has.get(ip));
        let mut affected: BTreeSet<_> = changed.flat_map(|ip| self.claims.at(*ip)).collect();
        // Endpoints' addresses change all the time, the rest seldom.
        if !before.differs_in_addresses_alone(reserved) {
            affected.extend(self.claims.written());
            let own = before.own.union(&reserved.own);
            let peers = before.peers.keys().chain(reserved.peers.keys());
            affected.extend(own.chain(peers).flat_map(|ip| self.claims.at(*ip)));
        }
        self.update(affected)
    }

    /// Returns the same state, computed from all services and endpoints at once.
    #[cfg(test)]
    #[must_use]
    fn recomputed(&self) -> Self {
        let mut state = Self::new(self.topology.clone());
        state.services = self.services.clone();
        state.endpoints = self.endpoints.clone();
        state.reserved = self.reserved.clone();
        let names: BTreeSet<_> = state
            .services
            .iter()
            .map(|(name, _)| name.clone())
            .collect();
        for name in &names {
            let _ = state.note_health_checks(&name.service);
        }
        let affected = state.claim(&names);
        state.update(affected);
        state
    }

    /// Returns the desired state of a port; `None` if the port is not served.
    pub fn port(&self, key: &PortKey) -> Option<&PortState> {
        self.ports.get(key).map(Arc::as_ref)
    }

    /// Returns all ports.
    pub fn ports(&self) -> impl Iterator<Item = (&PortKey, &PortState)> {
        self.ports.iter().map(|(key, port)| (key, &**port))
    }

    /// Returns the ports of all known services, served or not.
    pub fn services(&self) -> &ServicePortMap {
        &self.services
    }

    /// Returns all known endpoints, used or not.
    pub fn endpoints(&self) -> &EndpointsMap {
        &self.endpoints
    }

    /// Returns the ports that are not served at an address because something else owns the address.
    pub fn conflicts(&self) -> impl Iterator<Item = &Conflict> {
        self.conflicts.values().flat_map(|list| &**list)
    }

    /// Returns the conflicts by port.
    pub(crate) fn conflicts_by_port(&self) -> &Conflicts {
        &self.conflicts
    }

    /// Returns the port that is served at an address or node port that it claims itself; an address at which only its
    /// NodePort is served does not count. `None` if there is no such port.
    pub fn owner(
        &self,
        family: Family,
        protocol: Protocol,
        listen: Listen,
    ) -> Option<&ServicePortName> {
        let claimed = Claimed::new(family, protocol, listen);
        let owner = self.claims.owner(&claimed, self.permits())?;
        let rival = self.claims.rival(owner, &claimed, self.permits());
        rival.is_none().then_some(&owner.name)
    }

    fn permits(&self) -> Permits<'_> {
        Permits {
            reserved: &self.reserved,
            checks: &self.checks,
        }
    }

    /// Returns how many ports have endpoints, but none on this node, although some of their traffic must stay on this
    /// node.
    pub fn no_local_endpoints(&self) -> NoLocalEndpoints {
        self.no_local_endpoints
    }

    /// Returns the results for load balancers that check through this family, for each service with a health-check node
    /// port. A service without this family reports the health of its other family.
    pub fn health_checks(&self, family: Family) -> &HealthChecks {
        &self.health_checks[family as usize]
    }

    /// Returns the number of distinct addresses of a service's ready endpoints on this node.
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

    /// Updates the health checks of a service. Returns the ports to recompute: those that claim a node port that is or
    /// was used by a health check.
    fn note_health_checks(&mut self, service: &ServiceName) -> BTreeSet<PortKey> {
        let port_of = |checks: &[HealthChecks; 2]| {
            let mut found = checks.iter().filter_map(|checks| checks.get(service));
            found.next().map(|check| check.port)
        };
        let before = port_of(&self.health_checks);
        let port = self.services.of_service(service).next();
        let common = port.map(|(_, port)| port.service.clone());
        for family in Family::ALL {
            // A load balancer may check through either family, no matter which family the service has, as with
            // kube-proxy, whose single listener accepts both.
            let counted = common.as_deref().and_then(|common| {
                let has = |wanted: &Family| {
                    common
                        .cluster_ips
                        .iter()
                        .any(|ip| Family::of(*ip) == *wanted)
                };
                [family].into_iter().chain(Family::ALL).find(has)
            });
            let check = common
                .as_deref()
                .zip(counted)
                .and_then(|(common, counted)| {
                    Some(HealthCheck {
                        port: common.health_check_node_port?,
                        local_endpoints: self.local_endpoints(service, counted),
                    })
                });
            let checks = &mut self.health_checks[family as usize];
            match check {
                Some(check) if checks.get(service) == Some(&check) => None,
                Some(check) => checks.insert(service.clone(), check),
                None => checks.remove(service),
            };
        }
        let now = port_of(&self.health_checks);
        if before == now {
            return BTreeSet::new();
        }
        if let Some(port) = before
            && let Some(services) = self.checks.get_mut(&port)
        {
            services.remove(service);
            if services.is_empty() {
                self.checks.remove(&port);
            }
        }
        if let Some(port) = now {
            self.checks.entry(port).or_default().insert(service.clone());
        }
        let ports = before.into_iter().chain(now);
        let own = &self.reserved.own;
        ports
            .flat_map(|port| self.claims.at_port(Protocol::TCP, port, own))
            .collect()
    }

    /// Updates these ports' claims, and drops their old ones. Returns the ports to recompute: these, and those that
    /// gain or lose an address.
    fn claim(&mut self, names: &BTreeSet<ServicePortName>) -> BTreeSet<PortKey> {
        let mut touched = Touched::default();
        let mut affected = BTreeSet::new();
        let permits = Permits {
            reserved: &self.reserved,
            checks: &self.checks,
        };
        for name in names {
            for family in Family::ALL {
                let key = PortKey {
                    name: name.clone(),
                    family,
                };
                let had = self.ports.get(&key).into_iter();
                let had = had.flat_map(|state| state.frontends.iter().map(|had| had.listen));
                let lacked = self
                    .conflicts
                    .get(&key)
                    .into_iter()
                    .flat_map(|list| &**list);
                for listen in had.chain(lacked.map(|conflict| conflict.listen)) {
                    self.claims.remove(&key, listen, permits, &mut touched);
                }
                if let Some(port) = self.services.get(name) {
                    for wanted in frontend::wanted(port, family) {
                        self.claims.add(&key, wanted, port, permits, &mut touched);
                    }
                }
                affected.insert(key);
            }
        }
        affected.extend(self.claims.moved(touched, permits));
        affected
    }

    /// Recomputes the state of these ports. Returns those whose state has changed.
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
            self.conflicts.insert(key.clone(), conflicts.into());
        }
        if self.port(key) == state.as_ref() {
            return false;
        }
        let counts = state.as_ref().map(PortState::no_local_endpoints);
        let before = match state {
            Some(state) => self.ports.insert(key.clone(), Arc::new(state)),
            None => self.ports.remove(key),
        };
        let before = before.as_deref().map(PortState::no_local_endpoints);
        let total = &mut self.no_local_endpoints;
        let (counts, before) = (counts.unwrap_or_default(), before.unwrap_or_default());
        total.internal = total.internal + counts.internal - before.internal;
        total.external = total.external + counts.external - before.external;
        true
    }

    /// Returns the owner of a claimed address, unless that is the claimant.
    fn taken_by(&self, claim: &Claim, claimed: &Claimed, kind: FrontendKind) -> Option<Owner> {
        let permits = self.permits();
        if let Some(reserved) = permits.reason(kind, claimed) {
            return Some(Owner::Node(reserved));
        }
        let rival = self.claims.rival(claim, claimed, permits)?;
        Some(Owner::Port(rival.name.clone()))
    }

    /// Returns the desired state of a port, and the addresses that it loses to other owners.
    fn compute(&self, key: &PortKey) -> Option<(PortState, Vec<Conflict>)> {
        let port = self.services.get(&key.name)?;
        let wanted = frontend::wanted(port, key.family);
        if wanted.is_empty() {
            return None;
        }
        let endpoints = self.endpoints.get(key);
        let choice = Choice::of(endpoints, port, &self.topology);
        let permits = self.permits();
        let source_ranges = frontend::source_ranges(port, key.family);
        let mut frontends = Vec::new();
        let mut conflicts = Vec::new();
        for (listen, kind) in wanted {
            let conflict = |listen, owner| Conflict {
                key: key.clone(),
                listen,
                kind,
                owner,
            };
            let claimed = Claimed::of(key, listen);
            let claim = Claim::of(port, &key.name, kind);
            if let Some(owner) = self.taken_by(&claim, &claimed, kind) {
                conflicts.push(conflict(listen, owner));
                continue;
            }
            // At some of its addresses, a NodePort may lose to other claims.
            for place in claimed.addresses(&self.reserved) {
                if let Some(other) = self.claims.rival(&claim, &place, permits) {
                    let owner = Owner::Port(other.name.clone());
                    conflicts.push(conflict(place.listen, owner));
                }
            }
            let place = (listen, kind);
            frontends.push(Frontend::new(place, port, &choice, source_ranges.as_ref()));
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
            forwarding: port.service.forwarding,
        };
        Some((state, conflicts))
    }
}

/// Returns the endpoints that serve but get no new flows.
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
    /// Returns 1 or 0 for this port alone.
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
