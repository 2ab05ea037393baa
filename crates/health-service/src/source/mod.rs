//! Where services and their endpoints come from.
//!
//! A source tells what it knows as a [`ServiceSet`], now and whenever that changes. [`Folder`] reads manifests.
//! [`Gathered`] makes a set of objects that others follow in the API of Kubernetes or in etcd, each of which is a [`Known`].
//! [`Probed`] has the probes of this node say which endpoints of [`Manifests`] are ready. [`Merger`] makes one set of several.
//!
//! The maps of a set are persistent: another set shares with it all that is the same, and what differs is found without
//! a look at the rest. So one change costs what it changes, however many services there are.

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

pub use folder::Folder;
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
    /// What is wrong with some.
    pub problems: Arc<[ServiceProblem]>,
    /// What was read as a whole.
    pub synced: Synced,
}

/// What was read as a whole at least once: what the set does not have of it is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Services.
    pub services: bool,
    /// Endpoint slices.
    pub slices: bool,
}

impl Synced {
    /// Whether all was.
    pub const fn is_complete(self) -> bool {
        self.services && self.slices
    }
}

/// An object of a source.
#[derive(Debug, PartialEq, Eq)]
pub struct Sourced<T> {
    /// It; none if it is not to be served.
    pub object: Option<Arc<T>>,
    /// When what it shows happened.
    pub trigger_time: Option<Timestamp>,
    /// Where it was read.
    pub source: Arc<str>,
}

impl<T> Sourced<T> {
    /// Whether a controller of a cluster says which endpoints are ready, and no probe of this node.
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
