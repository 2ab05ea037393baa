//! Sources of services and their endpoints.
//!
//! A source publishes its objects as a [`ServiceSet`], with all changes. [`Folder`] reads manifests. [`Gathered`]
//! builds a set from objects, each a [`Known`], that other code follows in the Kubernetes API or in etcd. [`Probed`]
//! takes endpoints out of service that the probes of this node find not ready. [`Merger`] merges several sets into
//! one.
//!
//! The maps of a set are persistent: sets share all equal parts, and differences are found without visiting these. The
//! cost of a change therefore depends only on its size, no matter how many services there are.

mod folder;
mod gathered;
mod known;
mod members;
mod merge;
mod object;
mod readiness;
#[cfg(test)]
pub(crate) mod testing;

use std::sync::Arc;

use health_model::api::ServiceProblem;
use imbl::OrdMap;
use jiff::Timestamp;

use crate::spec::{EndpointSlice, Service, ServiceName, SliceName};

pub use folder::{Folder, check};
pub use gathered::Gathered;
pub use known::{Known, KnownService, KnownSlice, ServiceDocument};
pub use merge::Merger;
pub use readiness::{Probed, Readiness};

/// The objects of a source.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceSet {
    /// The services, by name.
    pub services: OrdMap<ServiceName, Sourced<Service>>,
    /// The endpoint slices, by name.
    pub slices: OrdMap<SliceName, Sourced<EndpointSlice>>,
    /// Problems with some of the objects.
    pub problems: Arc<[ServiceProblem]>,
    /// The kinds of objects that were read completely.
    pub synced: Synced,
}

/// The kinds of objects that were read completely at least once. Objects of such a kind that are missing from the set
/// do not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Services.
    pub services: bool,
    /// Endpoint slices.
    pub slices: bool,
}

impl Synced {
    /// Whether all kinds were read completely.
    pub const fn is_complete(self) -> bool {
        self.services && self.slices
    }
}

/// An object of a source.
#[derive(Debug, PartialEq, Eq)]
pub struct Sourced<T> {
    /// The object; `None` if it must not be served.
    pub object: Option<Arc<T>>,
    /// When the event happened that led to this version of the object.
    pub trigger_time: Option<Timestamp>,
    /// The location from which the object was read.
    pub source: Arc<str>,
}

impl<T> Sourced<T> {
    /// Whether the object is from a cluster's API, where a controller decides which endpoints are ready.
    pub fn is_of_api(&self) -> bool {
        *self.source == *known::API
    }
}

impl Sourced<Service> {
    /// Whether this node's probes, too, decide which endpoints of the service are ready.
    pub fn follows_probes(&self) -> bool {
        let service = self.object.as_ref();
        !self.is_of_api() || service.is_some_and(|service| service.common.local_readiness)
    }
}

impl<T> Clone for Sourced<T> {
    fn clone(&self) -> Self {
        Self {
            object: self.object.clone(),
            trigger_time: self.trigger_time,
            source: self.source.clone(),
        }
    }
}
