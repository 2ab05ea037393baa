//! The policies of the Kubernetes cluster: which are in force, which are refused, and whether they are known at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use health_model::api::RefusedPolicy;
use health_policy::{ClusterServices, Kind, Policy, PolicyName, Repository};
use jiff::Timestamp;
use tracing::warn;

use super::store::Store;
use super::{EnforceError, Enforcer, NETWORKS_MAX, check_networks, lock};

/// The policies of the cluster, as far as they are known.
#[derive(Clone, Debug, Default)]
pub struct ClusterPolicies {
    /// The objects by name: each as a policy, or why it is refused.
    pub objects: BTreeMap<PolicyName, Result<Arc<Policy>, String>>,
    /// The kinds of which `objects` has every object. Policies of the other kinds stay as they are.
    pub complete: BTreeSet<Kind>,
    /// The services, by which rules name peers.
    pub services: ClusterServices,
    /// Why kinds are not complete, or services not known.
    pub reason: Option<String>,
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
        let former = std::mem::take(&mut self.refused);
        let since = |name: &str, reason: &str| {
            let known = former
                .iter()
                .find(|one| one.name == name && one.reason == reason);
            known.map_or(now, |known| known.since)
        };
        let refused = refused.into_iter().map(|(name, reason)| {
            let name = name.to_string();
            let since = since(&name, &reason);
            RefusedPolicy {
                name,
                reason,
                since,
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
    /// The refused objects.
    refused: BTreeMap<PolicyName, String>,
    /// Why the services stay as they were, if they do.
    services: Result<(), EnforceError>,
    /// Whether the rules in force have changed.
    has_changed: bool,
}

/// Replaces the known services, unless their addresses do not fit.
fn set_services(
    repository: &mut Repository,
    services: &ClusterServices,
) -> Result<(), EnforceError> {
    let mut with = repository.clone();
    if with.set_services(services) {
        check_networks(with.prefixes().len(), NETWORKS_MAX)?;
    }
    *repository = with;
    Ok(())
}

impl Enforcer {
    /// Brings the policies of the cluster into force and saves them. An object that is refused keeps its previous form,
    /// if it had one. Changes nothing if this agent does not follow the policies of a cluster.
    ///
    /// Fails if services have too many addresses, which then stay as they were, or if the policies are in force but could
    /// not be saved; the next call tries again.
    pub fn set_cluster_policies(&self, given: &ClusterPolicies) -> Result<(), EnforceError> {
        let Some(state) = &self.0.cluster_policies else {
            return Ok(());
        };
        // Held until the policies are saved, so that saves happen in order.
        let mut state = lock(state);
        let now = (self.0.clock)();
        let InForce {
            refused,
            services,
            has_changed,
        } = self.put_in_force(given, now);
        state.set_refused(refused, now);
        state.known.extend(&given.complete);
        state.is_saved &= !has_changed;
        let repository = self.repository();
        let unknown = state.unknown(&repository, given.reason.as_deref());
        // Saved policies count as those of all kinds.
        let must_save = unknown.is_none() && !state.is_saved;
        self.0.unknown_policies.send_if_modified(|known| {
            let differs = *known != unknown;
            *known = unknown;
            differs
        });
        if must_save {
            state.save(&repository)?;
        }
        services
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

    fn put_in_force(&self, given: &ClusterPolicies, now: Timestamp) -> InForce {
        let mut refused = BTreeMap::new();
        let mut current = lock(&self.0.repository);
        let mut changed = Repository::clone(&current);
        changed.retain_of_cluster(|name| {
            let kind = name.kind();
            kind.is_some_and(|kind| !given.complete.contains(&kind))
                || given.objects.contains_key(name)
        });
        let services = set_services(&mut changed, &given.services);
        let mut policies = Vec::new();
        for (name, object) in &given.objects {
            match object {
                Ok(policy) => policies.push(policy),
                Err(reason) => {
                    refused.insert(name.clone(), reason.clone());
                }
            }
        }
        let mut all = changed.clone();
        for policy in &policies {
            all.set_of_cluster(policy, now);
        }
        if check_networks(all.prefixes().len(), NETWORKS_MAX).is_ok() {
            changed = all;
        } else {
            for policy in policies {
                let mut with = changed.clone();
                with.set_of_cluster(policy, now);
                match check_networks(with.prefixes().len(), NETWORKS_MAX) {
                    Ok(()) => changed = with,
                    Err(error) => {
                        refused.insert(policy.name().clone(), error.to_string());
                    }
                }
            }
        }
        let revision = changed.revision();
        let has_changed = revision != current.revision();
        if changed.services() != current.services() || has_changed {
            *current = Arc::new(changed);
        }
        if has_changed {
            self.0.revision.send_replace(revision);
        }
        InForce {
            refused,
            services,
            has_changed,
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
    pub(super) fn unknown_policies(&self) -> Option<String> {
        self.0.unknown_policies.borrow().clone()
    }
}
