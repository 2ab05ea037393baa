//! The policies of the Kubernetes cluster: which are in force, which are refused, and whether they are known at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use health_model::api::RefusedPolicy;
use health_policy::{ClusterServices, HeldPolicy, Kind, Policy, PolicyName, Repository};
use jiff::Timestamp;
use tracing::warn;

use super::limits::{self, Named};
use super::store::Store;
use super::{EnforceError, Enforcer, lock};

/// The policies of the cluster, as far as they are known.
#[derive(Clone, Debug, Default)]
pub struct ClusterPolicies {
    /// The objects by name: each as a policy, or refused.
    pub objects: BTreeMap<PolicyName, Result<Arc<Policy>, RefusedObject>>,
    /// The kinds of which `objects` has every object. Policies of the other kinds stay as they are.
    pub complete: BTreeSet<Kind>,
    /// The services, by which rules name peers.
    pub services: ClusterServices,
    /// Why kinds are not complete, or services not known.
    pub reason: Option<String>,
}

/// An object that is not a policy which can be enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedObject {
    /// Its UID. The previous form of the same object stays in force.
    pub uid: Option<String>,
    /// Why it is refused.
    pub reason: String,
}

/// What is known about the policies of the cluster.
pub(super) struct ClusterState {
    store: Store,
    /// The refused objects, by name.
    refused: Arc<Vec<RefusedPolicy>>,
    /// The kinds that were complete once, since the start or when the policies were saved.
    known: BTreeSet<Kind>,
    /// Whether everything that policies depend on was known at some time since the start.
    was_known: bool,
    /// Whether the policies in force are saved.
    is_saved: bool,
}

impl ClusterState {
    /// Creates the state at the start of an agent. `is_saved` tells whether `store` has policies: those of all kinds.
    pub(super) fn new(store: Store, is_saved: bool) -> Self {
        let known = match is_saved {
            true => BTreeSet::from(Kind::ALL),
            false => BTreeSet::new(),
        };
        Self {
            store,
            refused: Arc::default(),
            known,
            was_known: false,
            is_saved,
        }
    }

    /// Returns why the policies, or the services that they name, have never been known, if so.
    pub(super) fn unknown(
        &mut self,
        repository: &Repository,
        reason: Option<&str>,
    ) -> Option<String> {
        let has_policies = self.known.len() == Kind::ALL.len();
        let has_services = repository.services().is_known() || !repository.depends_on_services();
        self.was_known |= has_policies && has_services;
        if self.was_known {
            return None;
        }
        let what = match has_policies {
            true => "the services that policies name",
            false => "the policies of the Kubernetes cluster",
        };
        let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
        Some(format!("{what} are not known yet{reason}"))
    }

    /// Keeps the time since when an object is refused for the same reason.
    fn set_refused(&mut self, refused: BTreeMap<PolicyName, String>, now: Timestamp) {
        let former = self.refused.clone();
        let former: BTreeMap<_, _> = former.iter().map(|one| (one.name.as_str(), one)).collect();
        let refused = refused.into_iter().map(|(name, reason)| {
            let name = name.to_string();
            let known = former.get(name.as_str());
            let known = known.filter(|known| known.reason == reason);
            RefusedPolicy {
                since: known.map_or(now, |known| known.since),
                name,
                reason,
            }
        });
        self.refused = Arc::new(refused.collect());
    }

    fn save(&mut self, repository: &Repository) -> Result<(), EnforceError> {
        let saved = self.store.save(repository);
        self.is_saved = saved.is_ok();
        saved.map_err(|source| EnforceError::SaveCluster {
            path: self.store.path().to_owned(),
            source,
        })
    }
}

/// The outcome of a change.
struct InForce {
    repository: Repository,
    /// The refused objects.
    refused: BTreeMap<PolicyName, String>,
    /// Why the services stay as they were, if they do.
    services: Result<(), EnforceError>,
}

impl ClusterPolicies {
    /// Returns the policies that can be read.
    fn policies(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.objects
            .values()
            .filter_map(|object| object.as_ref().ok())
    }

    /// Whether a policy in force stays so until it is replaced. Another object of the same name does not inherit it.
    fn keeps(&self, held: &HeldPolicy) -> bool {
        match self.objects.get(held.name()) {
            Some(Ok(policy)) => policy.uid() == held.uid(),
            Some(Err(refused)) => refused.uid.as_deref() == held.uid(),
            None => {
                let kind = held.name().kind();
                kind.is_some_and(|kind| !self.complete.contains(&kind))
            }
        }
    }

    /// Brings everything that fits into force in a copy of `current`.
    fn put_into(&self, current: &Repository, now: Timestamp) -> InForce {
        let refused = self.objects.iter().filter_map(|(name, object)| {
            let refused = object.as_ref().err()?;
            Some((name.clone(), refused.reason.clone()))
        });
        let refused = refused.collect();
        let mut repository = current.clone();
        repository.retain_of_cluster(|held| self.keeps(held));
        repository.set_services(&self.services);
        for policy in self.policies() {
            repository.set_of_cluster(policy, now);
        }
        let has_changed = repository.revision() != current.revision();
        match has_changed && limits::check(&repository).is_err() {
            true => self.put_one_by_one(current, refused, now),
            false => InForce {
                repository,
                refused,
                services: Ok(()),
            },
        }
    }

    fn put_one_by_one(
        &self,
        current: &Repository,
        mut refused: BTreeMap<PolicyName, String>,
        now: Timestamp,
    ) -> InForce {
        let mut repository = current.clone();
        repository.retain_of_cluster(|held| self.keeps(held));
        let services = set_services(&mut repository, &self.services);
        let mut named = Named::by(&repository);
        for policy in self.policies() {
            let set = repository
                .try_set_of_cluster(policy, now, |before, after| named.replace(before, after));
            if let Err(error) = set {
                refused.insert(policy.name().clone(), error.to_string());
            }
        }
        InForce {
            repository,
            refused,
            services,
        }
    }
}

/// Replaces the known services, unless their addresses do not fit.
fn set_services(
    repository: &mut Repository,
    services: &ClusterServices,
) -> Result<(), EnforceError> {
    let mut with = repository.clone();
    if with.set_services(services) {
        limits::check(&with)?;
    }
    *repository = with;
    Ok(())
}

impl Enforcer {
    /// Brings the policies of the cluster into force. An object that is refused keeps its previous form, if it had one.
    /// Changes nothing if this agent does not follow the policies of a cluster.
    ///
    /// Fails if services have too many addresses, which then stay as they were.
    pub fn set_cluster_policies(&self, given: &ClusterPolicies) -> Result<(), EnforceError> {
        let Some(state) = &self.0.cluster_policies else {
            return Ok(());
        };
        // Held until the state is complete, so that no other change is saved in between.
        let mut state = lock(state);
        let now = (self.0.clock)();
        let mut current = lock(&self.0.repository);
        let InForce {
            repository,
            refused,
            services,
        } = given.put_into(&current, now);
        let repository = Arc::new(repository);
        let has_changed = repository.revision() != current.revision();
        *current = repository.clone();
        if has_changed {
            self.0.revision.send_replace(repository.revision());
        }
        drop(current);
        state.set_refused(refused, now);
        state.known.extend(&given.complete);
        state.is_saved &= !has_changed;
        let unknown = state.unknown(&repository, given.reason.as_deref());
        self.0.unknown_policies.send_if_modified(|known| {
            let differs = *known != unknown;
            *known = unknown;
            differs
        });
        services
    }

    /// Whether the policies of the cluster are known, but not saved in their latest form.
    pub fn has_unsaved_policies(&self) -> bool {
        let state = self.0.cluster_policies.as_ref();
        // Saved policies count as those of all kinds.
        state.is_some_and(|state| !lock(state).is_saved) && self.unknown_policies().is_none()
    }

    /// Saves the policies of the cluster if [they are not](Self::has_unsaved_policies).
    pub fn save_cluster_policies(&self) -> Result<(), EnforceError> {
        let Some(state) = &self.0.cluster_policies else {
            return Ok(());
        };
        // Held until the policies are saved, so that saves happen in order.
        let mut state = lock(state);
        match state.is_saved || self.unknown_policies().is_some() {
            true => Ok(()),
            false => state.save(&self.repository()),
        }
    }

    /// Saves the services that imported policies name, for starts without an answer from the API server. If this fails,
    /// they are saved with the next change of the cluster's policies.
    pub(super) fn save_named_services(&self) {
        let Some(state) = &self.0.cluster_policies else {
            return;
        };
        let mut state = lock(state);
        let repository = self.repository();
        if repository.depends_on_services()
            && state.unknown(&repository, None).is_none()
            && let Err(error) = state.save(&repository)
        {
            warn!(%error, "cannot save the services that a policy names");
        }
    }

    /// Returns the objects of the cluster that are not in force in their current form, by name.
    pub fn refused_policies(&self) -> Arc<Vec<RefusedPolicy>> {
        let state = self.0.cluster_policies.as_ref();
        state.map_or_else(Arc::default, |state| lock(state).refused.clone())
    }

    /// Waits up to `patience` until the policies of the cluster were known once. Fails with the reason if they were
    /// not: an endpoint built now might pass what they deny.
    pub async fn until_policies_known(&self, patience: Duration) -> Result<(), String> {
        let mut unknown = self.0.unknown_policies.subscribe();
        let known = unknown.wait_for(Option::is_none);
        // An error means that the enforcer is gone, which it is not.
        let _ = tokio::time::timeout(patience, known).await;
        self.unknown_policies().map_or(Ok(()), Err)
    }

    /// Returns why the policies of the cluster are not known yet, if so.
    pub fn unknown_policies(&self) -> Option<String> {
        self.0.unknown_policies.borrow().clone()
    }
}
