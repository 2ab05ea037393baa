//! Changes of endpoint slices.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use jiff::Timestamp;

use super::EndpointsMap;
use crate::spec::{
    Conditions, Endpoint, EndpointSlice, PortKey, ServiceName, ServicePortName, SliceName,
};

/// Collects changes of endpoint slices.
#[derive(Debug)]
pub struct EndpointsChangeTracker {
    /// The name of this node.
    node: Arc<str>,
    started: Timestamp,
    services: HashMap<ServiceName, Slices>,
    /// The service of each existing slice.
    owners: HashMap<SliceName, ServiceName>,
    /// The services with pending slices.
    changed: BTreeSet<ServiceName>,
    trigger_times: BTreeMap<ServiceName, Vec<Timestamp>>,
    pending: u64,
    total: u64,
}

/// The slices of a service, sorted by name, because the choice between two equal endpoints must not depend on the order
/// of events.
#[derive(Debug, Default)]
struct Slices {
    applied: BTreeMap<SliceName, Arc<EndpointSlice>>,
    /// `None` for a removed slice.
    pending: BTreeMap<SliceName, Option<Arc<EndpointSlice>>>,
}

/// The changes applied by [`EndpointsChangeTracker::apply`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointsUpdates {
    /// The services of the slices that changed.
    pub services: BTreeSet<ServiceName>,
    /// The ports whose endpoints have changed.
    pub ports: BTreeSet<PortKey>,
    /// When the events happened that changed the slices, by service.
    pub trigger_times: BTreeMap<ServiceName, Vec<Timestamp>>,
}

impl EndpointsChangeTracker {
    /// Creates a tracker for the node with this name, whose endpoints are local. `started` is the time when this
    /// process started.
    pub fn new(node: impl Into<Arc<str>>, started: Timestamp) -> Self {
        Self {
            node: node.into(),
            started,
            services: HashMap::new(),
            owners: HashMap::new(),
            changed: BTreeSet::new(),
            trigger_times: BTreeMap::new(),
            pending: 0,
            total: 0,
        }
    }

    /// Adds or changes a slice. `trigger_time` is the time of the event that changed it. Returns whether the slice
    /// differs from the known one. A slice that moves to another service is removed from the old one.
    pub fn update(&mut self, slice: Arc<EndpointSlice>, trigger_time: Option<Timestamp>) -> bool {
        self.total += 1;
        let owner = self.owners.get(&slice.name);
        if let Some(former) = owner.filter(|owner| **owner != slice.service).cloned() {
            self.pend(&former, &slice.name, None);
        }
        let (name, service) = (slice.name.clone(), slice.service.clone());
        let is_change = self.pend(&service, &name, Some(slice));
        if is_change {
            // With times before the start, the metric would include the time during which this process was not running.
            if let Some(time) = trigger_time.filter(|time| *time > self.started) {
                let times = self.trigger_times.entry(service.clone()).or_default();
                times.push(time);
            }
            self.owners.insert(name, service);
        }
        is_change
    }

    /// Removes a slice that is gone, or that this proxy should no longer serve. Returns whether the slice was known.
    pub fn remove(&mut self, slice: &SliceName) -> bool {
        self.total += 1;
        let Some(service) = self.owners.remove(slice) else {
            return false;
        };
        // The slice's time refers to its last change, not to its removal.
        self.trigger_times.remove(&service);
        self.pend(&service, slice, None)
    }

    /// Records the new content of a slice. Returns whether it differs from the known one.
    fn pend(
        &mut self,
        service: &ServiceName,
        name: &SliceName,
        slice: Option<Arc<EndpointSlice>>,
    ) -> bool {
        let slices = self.services.entry(service.clone()).or_default();
        let is_known = match slices.pending.get(name) {
            Some(pending) => *pending == slice,
            None => slices.applied.get(name) == slice.as_ref(),
        };
        if is_known {
            return false;
        }
        slices.pending.insert(name.clone(), slice);
        self.changed.insert(service.clone());
        self.pending += 1;
        true
    }

    /// Returns the number of changes that wait to be applied.
    pub fn pending(&self) -> u64 {
        self.pending
    }

    /// Returns the number of changes reported since the start.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Applies all changes to the map of all endpoints.
    pub fn apply(&mut self, map: &mut EndpointsMap) -> EndpointsUpdates {
        self.pending = 0;
        let mut updates = EndpointsUpdates {
            services: std::mem::take(&mut self.changed),
            ports: BTreeSet::new(),
            trigger_times: std::mem::take(&mut self.trigger_times),
        };
        for service in &updates.services {
            let Some(slices) = self.services.get_mut(service) else {
                continue;
            };
            for (name, slice) in std::mem::take(&mut slices.pending) {
                match slice {
                    Some(slice) => slices.applied.insert(name, slice),
                    None => slices.applied.remove(&name),
                };
            }
            let current = slices.endpoints(&self.node);
            let previous: Vec<_> = map
                .of_service(service)
                .map(|(key, _)| key.clone())
                .collect();
            let mut former: HashMap<_, _> = previous
                .into_iter()
                .filter_map(|key| map.remove(&key).map(|list| (key, list)))
                .collect();
            for (key, endpoints) in current {
                if former.remove(&key).as_deref() != Some(&*endpoints) {
                    updates.ports.insert(key.clone());
                }
                map.insert(key, endpoints);
            }
            updates.ports.extend(former.into_keys());
            if slices.applied.is_empty() {
                self.services.remove(service);
            }
        }
        updates
    }
}

impl Slices {
    /// Returns the endpoints of all ports. Of several endpoints with the same address, the one with the best [`rank`]
    /// is used or, if the ranks are equal, the one of the first slice.
    fn endpoints(&self, node: &str) -> BTreeMap<PortKey, Vec<Endpoint>> {
        let mut ports: BTreeMap<PortKey, Vec<Endpoint>> = BTreeMap::new();
        for slice in self.applied.values() {
            for port in &slice.ports {
                let key = PortKey {
                    name: ServicePortName {
                        service: slice.service.clone(),
                        port: port.name.clone(),
                        protocol: port.protocol,
                    },
                    family: slice.family,
                };
                let endpoints = slice.endpoints.iter().map(|endpoint| Endpoint {
                    address: SocketAddr::new(endpoint.address, port.port),
                    conditions: endpoint.conditions,
                    is_local: endpoint.node.as_deref() == Some(node),
                    weight: slice.weight,
                    node: endpoint.node.clone(),
                    zone: endpoint.zone.clone(),
                    hints: endpoint.hints.clone(),
                });
                ports.entry(key).or_default().extend(endpoints);
            }
        }
        ports.retain(|_, endpoints| !endpoints.is_empty());
        for endpoints in ports.values_mut() {
            endpoints.sort_by_cached_key(|endpoint| endpoint.address.to_string());
            endpoints.dedup_by(|later, earlier| {
                let is_same = later.address == earlier.address;
                if is_same && rank(later) < rank(earlier) {
                    std::mem::swap(later, earlier);
                }
                is_same
            });
        }
        ports
    }
}

/// Decides which of several endpoints with the same address is used: the one with the smallest rank. While a pod is
/// terminating, a new pod may already have its address, so endpoints that are not terminating come first, then serving
/// ones, then ready ones, and then those on this node.
fn rank(endpoint: &Endpoint) -> [bool; 4] {
    let Conditions {
        ready,
        serving,
        terminating,
    } = endpoint.conditions;
    [terminating, !serving, !ready, !endpoint.is_local]
}
