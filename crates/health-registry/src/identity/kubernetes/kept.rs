//! Follows the objects of one kind into the records.

use std::sync::Arc;

use jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::watcher;
use tokio::sync::watch;
use tracing::{info, warn};

use super::Known;
use super::objects::{IdentityObject, SliceObject, identity_kind, slice_kind};
use crate::identity::allocator::Shared;
use crate::kubernetes::follow::Kept;
use crate::nodes::{Staleness, UnusableEntry};

/// The kinds of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Identities,
    Slices,
}

impl Kind {
    pub(super) const ALL: [Self; 2] = [Self::Identities, Self::Slices];

    fn resource(self) -> ApiResource {
        match self {
            Self::Identities => identity_kind(),
            Self::Slices => slice_kind(),
        }
    }
}

/// The objects of one kind.
pub(super) struct KeptObjects {
    kind: Kind,
    shared: Arc<Shared>,
    known: Arc<Known>,
    /// The objects of a listing that is not complete yet.
    identities: Vec<IdentityObject>,
    slices: Vec<SliceObject>,
    /// The unusable objects that were logged.
    reported: Vec<UnusableEntry>,
}

impl KeptObjects {
    pub(super) fn new(kind: Kind, shared: Arc<Shared>, known: Arc<Known>) -> Self {
        Self {
            kind,
            shared,
            known,
            identities: Vec::new(),
            slices: Vec::new(),
            reported: Vec::new(),
        }
    }

    fn report_rejected(&mut self) {
        let mut rejected = self.known.state().records.rejected();
        let of_kind = format!("{}/", Kept::resource(self));
        rejected.retain(|entry| entry.key.starts_with(&of_kind));
        for entry in &rejected {
            if !self.reported.contains(entry) {
                let UnusableEntry { key, reason } = entry;
                warn!(
                    object = key,
                    reason, "an object of identities cannot be used; leaving it as it is"
                );
            }
        }
        self.reported = rejected;
    }

    /// Records whether the objects may be outdated. Without the other kind, the store cannot be used either.
    fn note_stale(&self, stale: Option<Staleness>) {
        let staleness = {
            let now = self.known.now();
            let mut state = self.known.state();
            state.note_stale(self.kind, stale, now);
            state.staleness().cloned()
        };
        match staleness {
            Some(stale) => self.shared.fail(stale.since, stale.reason),
            None => self.known.publish(&self.shared),
        }
        self.shared.wake.notify_one();
    }
}

impl Kept for KeptObjects {
    type Object = DynamicObject;

    fn resource(&self) -> &'static str {
        match self.kind {
            Kind::Identities => "healthidentities",
            Kind::Slices => "healthendpointslices",
        }
    }

    fn api(&self, client: Client) -> Api<DynamicObject> {
        Api::all_with(client, &self.kind.resource())
    }

    fn select(&self, config: watcher::Config) -> watcher::Config {
        config
    }

    fn begin_list(&mut self) {
        self.identities.clear();
        self.slices.clear();
    }

    fn list(&mut self, object: DynamicObject) {
        match self.kind {
            Kind::Identities => self.identities.push(object.into()),
            Kind::Slices => self.slices.push(object.into()),
        }
    }

    fn end_list(&mut self) -> Result<(), String> {
        {
            let now = self.known.now();
            let records = &mut self.known.state().records;
            match self.kind {
                Kind::Identities => {
                    records.replace_identities(std::mem::take(&mut self.identities), now);
                }
                Kind::Slices => records.replace_slices(std::mem::take(&mut self.slices), now),
            }
        }
        // The follower does not know that a server that lacked the kind was unusable.
        self.note_stale(None);
        Ok(())
    }

    fn apply(&mut self, object: DynamicObject) -> bool {
        let now = self.known.now();
        let records = &mut self.known.state().records;
        match self.kind {
            Kind::Identities => records.put_identity(object.into(), now),
            Kind::Slices => records.put_slice(object.into(), now),
        };
        true
    }

    fn delete(&mut self, object: DynamicObject) -> bool {
        let now = self.known.now();
        let name = object.metadata.name.unwrap_or_default();
        let uid = object.metadata.uid.as_deref();
        let records = &mut self.known.state().records;
        match self.kind {
            Kind::Identities => records.delete_identity(&name, uid, now),
            Kind::Slices => records.delete_slice(&name, uid, now),
        }
        true
    }

    fn publish(&mut self) {
        self.report_rejected();
        self.known.publish(&self.shared);
        self.shared.wake.notify_one();
    }

    fn set_stale(&mut self, stale: Option<Staleness>) {
        let resource = Kept::resource(self);
        match &stale {
            Some(Staleness { reason, .. }) => warn!(
                reason,
                "Kubernetes {resource} are not up to date; keeping the last known identities"
            ),
            None => info!("Kubernetes {resource} are up to date"),
        }
        self.note_stale(stale);
    }

    fn is_optional(&self) -> bool {
        true
    }

    fn doubts(&self) -> watch::Receiver<Option<u64>> {
        self.known.doubts.subscribe()
    }

    fn set_lacking(&mut self) -> bool {
        let resource = Kept::resource(self);
        let reason = format!(
            "the API server has no {resource}.health-agent.io; install deploy/kubernetes/crds.yaml"
        );
        let known = self.known.state().stale[self.kind as usize].clone();
        if known.is_some_and(|known| known.reason == reason) {
            return true;
        }
        warn!(reason, "no identities can be given");
        let since = Timestamp::now();
        self.note_stale(Some(Staleness { since, reason }));
        true
    }
}
