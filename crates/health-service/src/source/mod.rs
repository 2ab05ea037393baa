//! Where services and their endpoints come from.
//!
//! A source tells what it knows as a [`ServiceSet`], now and whenever that changes: [`Folder`] reads manifests, and
//! [`Known`] is an object of a source that others follow, the API of Kubernetes or etcd. [`Probed`] has the probes of this
//! node say which endpoints of [`Manifests`] are ready. [`merge`] makes one set of several.

mod folder;
mod known;
mod merge;
mod object;
mod readiness;
#[cfg(test)]
pub(crate) mod testing;

use std::collections::BTreeMap;
use std::sync::Arc;

use health_model::api::ServiceProblem;
use jiff::Timestamp;

use crate::spec::{EndpointSlice, Service, ServiceName, SliceName};

pub use folder::Folder;
pub use known::{Known, KnownService, KnownSlice, ServiceDocument};
pub use merge::merge;
pub use readiness::{Manifests, Probed, Readiness, with_readiness};

/// What a source knows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceSet {
    /// The services, by name.
    pub services: BTreeMap<ServiceName, Sourced<Service>>,
    /// The endpoint slices, by name.
    pub slices: BTreeMap<SliceName, Sourced<EndpointSlice>>,
    /// What is wrong with some.
    pub problems: Vec<ServiceProblem>,
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

impl<T> Clone for Sourced<T> {
    fn clone(&self) -> Self {
        Self {
            object: self.object.clone(),
            trigger_time: self.trigger_time,
            source: self.source.clone(),
        }
    }
}
