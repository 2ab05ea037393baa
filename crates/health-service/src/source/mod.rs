//! Where services and their endpoints come from.
//!
//! A source publishes what it knows as a [`ServiceSet`], now and whenever that changes. [`Folder`] reads manifests.
//! [`Gathered`] builds a set from objects that others follow in the Kubernetes API or in etcd, each of which is a
//! [`Known`]. [`Probed`] lets the probes of this node decide which endpoints of [`Manifests`] are ready. [`Merger`]
//! merges several sets into one.
//!
//! The maps of a set are persistent: sets share all equal parts, and differences are found without looking at the rest.
//! So a change costs only what it changes, however many services there are.

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
pub use readiness::{Manifests, Probed, Readiness};

/// What a source knows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceSet {
    /// The services, by name.
    pub services: OrdMap<ServiceName, Sourced<Service>>,
    /// The endpoint slices, by name.
    pub slices: OrdMap<SliceName, Sourced<EndpointSlice>>,
    /// Problems with some of them.
    pub problems: Arc<[ServiceProblem]>,
    /// What was read completely.
    pub synced: Synced,
}

/// What was read completely at least once: anything of that kind that the set lacks does not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Services.
    pub services: bool,
    /// Endpoint slices.
    pub slices: bool,
}

impl Synced {
    /// Whether everything was.
    pub const fn is_complete(self) -> bool {
        self.services && self.slices
    }
}

/// An object of a source.
#[derive(Debug, PartialEq, Eq)]
pub struct Sourced<T> {
    /// The object; `None` if it must not be served.
    pub object: Option<Arc<T>>,
    /// When the event happened that it shows.
    pub trigger_time: Option<Timestamp>,
    /// Where it was read from.
    pub source: Arc<str>,
}

impl<T> Sourced<T> {
    /// Whether a cluster's controller says which endpoints are ready, rather than this node's probes.
    pub fn is_of_api(&self) -> bool {
        *self.source == *known::API
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
