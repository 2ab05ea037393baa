//! Changes of services.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::ServicePortMap;
use crate::spec::{Service, ServiceName, ServicePortName};

/// Collects changes of services. A service that is changed and changed back before the changes are applied has not
/// changed.
#[derive(Debug, Default)]
pub struct ServiceChangeTracker {
    applied: HashMap<ServiceName, Arc<Service>>,
    items: BTreeMap<ServiceName, Change>,
    total: u64,
}

/// A service as last applied and as it is now.
#[derive(Debug)]
struct Change {
    previous: Option<Arc<Service>>,
    current: Option<Arc<Service>>,
}

/// The changes applied by [`ServiceChangeTracker::apply`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceUpdates {
    /// The services that changed in any way.
    pub services: BTreeSet<ServiceName>,
    /// The services that are gone.
    pub deleted: BTreeSet<ServiceName>,
    /// The ports that these services have or had.
    pub ports: BTreeSet<ServicePortName>,
}

impl ServiceChangeTracker {
    /// Adds or changes a service, or removes one that must no longer be served (`None`). Returns whether any change of
    /// any service is pending; `false` when an unknown service is removed.
    pub fn update(&mut self, name: &ServiceName, current: Option<Arc<Service>>) -> bool {
        if current.is_none() && !self.applied.contains_key(name) && !self.items.contains_key(name) {
            return false;
        }
        self.total += 1;
        let applied = &self.applied;
        let change = self.items.entry(name.clone()).or_insert_with(|| Change {
            previous: applied.get(name).cloned(),
            current: None,
        });
        change.current = current;
        if change.previous == change.current {
            self.items.remove(name);
        }
        !self.items.is_empty()
    }

    /// Returns the number of services with changes that wait to be applied.
    pub fn pending(&self) -> usize {
        self.items.len()
    }

    /// Returns the number of changes since the start.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Applies all changes to the map of all ports.
    pub fn apply(&mut self, map: &mut ServicePortMap) -> ServiceUpdates {
        let mut updates = ServiceUpdates::default();
        for (name, change) in std::mem::take(&mut self.items) {
            let mut kept = BTreeSet::new();
            for (port, info) in change.current.iter().flat_map(|service| service.by_name()) {
                kept.insert(port.clone());
                map.insert(port, info.clone());
            }
            for (port, _) in change.previous.iter().flat_map(|service| service.by_name()) {
                if !kept.contains(&port) {
                    map.remove(&port);
                }
                updates.ports.insert(port);
            }
            updates.ports.extend(kept);
            match change.current {
                Some(service) => {
                    self.applied.insert(name.clone(), service);
                }
                None => {
                    self.applied.remove(&name);
                    updates.deleted.insert(name.clone());
                }
            }
            updates.services.insert(name);
        }
        updates
    }
}
