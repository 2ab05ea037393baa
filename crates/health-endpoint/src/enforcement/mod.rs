//! Policy enforcement: compiles rules and identities to the tables of verdicts that this node's endpoints use, and
//! keeps the identity of each address in the ipcache.
//!
//! [`Enforcer::import`] and similar methods change the rules. [`Enforcer::follow`] propagates every change to the
//! affected endpoints, which the [`Manager`] regenerates through this module.

mod backends;
mod build;
mod cluster_policies;
mod error;
mod follow;
mod limits;
mod local;
mod mode;
mod store;
mod subjects;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use health_common::ipcache::IpcacheEntry;
use health_datapath::{Datapath, TrieError, Workload};
use health_model::api::PolicyLag;
use health_model::identity::Identity;
use health_model::labels::{Label, LabelSet};
use health_model::policy::{PolicyMode, PolicyOrigin};
use health_policy::{
    Documents, ImportOutcome, Policy, PolicyName, PolicySettings, Repository, Trace, TraceRequest,
    parse,
};
use health_registry::identity::{Identities, IdentityAllocator};
use health_registry::nodes::Staleness;
use ipnet::IpNet;
use jiff::Timestamp;
use tokio::sync::{Notify, watch};

use crate::regenerate::RegenerationError;

pub use self::cluster_policies::{ClusterPolicies, RefusedObject};
pub use self::error::EnforceError;
pub use self::follow::{HostRoutes, Surroundings};
pub use self::mode::MODE_FILE;
pub use self::store::{CLUSTER_FILE, DAMAGED_CLUSTER_FILE, FILE};

use self::backends::{AllocatorCluster, Cluster, Prefixes, Programs, Tables};
use self::cluster_policies::ClusterState;
use self::mode::Modes;
use self::store::Store;
use self::subjects::{Generation, Subjects, settings_of};

/// Enforces policy. Clones share their state.
#[derive(Clone)]
pub struct Enforcer(Arc<Shared>);

struct Shared {
    settings: watch::Sender<PolicySettings>,
    modes: Mutex<Modes>,
    allow_dhcpv6: bool,
    store: Store,
    repository: Mutex<Arc<Repository>>,
    /// Revision of the repository.
    revision: watch::Sender<u64>,
    /// `None` if this agent does not follow the policies of a Kubernetes cluster.
    cluster_policies: Option<Mutex<ClusterState>>,
    /// Why the policies of the Kubernetes cluster are not known yet, if so.
    unknown_policies: watch::Sender<Option<String>>,
    clock: fn() -> Timestamp,
    cluster: Box<dyn Cluster>,
    identities: watch::Receiver<Arc<Identities>>,
    subjects: Mutex<Subjects>,
    /// Held shared while building single endpoints, and exclusively while changing the tables of several endpoints.
    changing: RwLock<()>,
    /// The latest generation.
    generation: Mutex<Generation>,
    ipcache: Mutex<Box<dyn Prefixes>>,
    /// Whether the ipcache lacked the previous agent's entries at the start.
    is_blank: bool,
    programs: Arc<dyn Programs>,
    /// The node's own addresses, under which it announces its endpoints to other nodes.
    node_addresses: Vec<IpAddr>,
    /// Notified when an endpoint was built or removed.
    built: Notify,
    /// The repository revision that endpoints and maps have reached.
    followed: watch::Sender<u64>,
    /// The mode that endpoints have reached.
    followed_mode: watch::Sender<Option<PolicyMode>>,
    /// The identities that the tables of all endpoints cover.
    covered: watch::Sender<Arc<BTreeMap<Identity, Arc<LabelSet>>>>,
    lag: watch::Sender<Option<PolicyLag>>,
    /// Why endpoints of the previous agent keep their old policy. Until the cluster's identities have been known once
    /// since the start, new tables would lack them and drop packets that the old tables let pass.
    held_back: watch::Sender<Option<RegenerationError>>,
}

/// The options of an enforcer.
pub struct EnforcerOptions {
    /// Settings besides the rules.
    pub settings: PolicySettings,
    /// Whether endpoints may request addresses by DHCPv6.
    pub allow_dhcpv6: bool,
    /// The node's own addresses.
    pub node_addresses: Vec<IpAddr>,
    /// Reports endpoints that lag behind.
    pub lag: watch::Sender<Option<PolicyLag>>,
    /// Whether [`Enforcer::set_cluster_policies`] will report the policies of a Kubernetes cluster. If not, those of
    /// previous agents are dropped.
    pub follows_cluster: bool,
    /// The current time.
    pub clock: fn() -> Timestamp,
}

impl Shared {
    fn new(
        state_dir: &Path,
        options: EnforcerOptions,
        cluster: Box<dyn Cluster>,
        programs: Arc<dyn Programs>,
        tables: Box<dyn Tables>,
        mut ipcache: Box<dyn Prefixes>,
    ) -> Result<Self, EnforceError> {
        let EnforcerOptions {
            mut settings,
            allow_dhcpv6,
            node_addresses,
            lag,
            follows_cluster,
            clock,
        } = options;
        let modes = Modes::load(state_dir, settings.mode)?;
        settings.mode = modes.in_force();
        let mut repository = Repository::default();
        let store = Store::in_dir(state_dir, PolicyOrigin::Imported);
        store
            .load(&mut repository)
            .map_err(|source| EnforceError::Damaged {
                path: store.path().to_owned(),
                source,
            })?;
        let mut cluster_policies = cluster_state(state_dir, follows_cluster, &mut repository)?;
        if cluster_policies.is_none() {
            warn_without_cluster(&repository);
        }
        for error in repository.outdated() {
            tracing::warn!(
                %error,
                "an earlier version imported this policy; this version would reject it, but its meaning is unchanged"
            );
        }
        let former = programs.served();
        let is_blank = programs.is_changing_layout() || ipcache.entries().next().is_none();
        if is_blank {
            announce_former(&mut *ipcache, &former)?;
        }
        let named = former.iter().map(|one| (one.info.id, one.info.policy));
        let identities = cluster.identities();
        let repository = Arc::new(repository);
        let unknown = cluster_policies.as_mut();
        let unknown = unknown.and_then(|state| state.unknown(&repository, None));
        let generation = Generation {
            number: 0,
            repository: repository.clone(),
            settings,
            identities: identities.borrow().labels.clone(),
        };
        Ok(Self {
            settings: watch::Sender::new(settings),
            modes: Mutex::new(modes),
            allow_dhcpv6,
            store,
            revision: watch::Sender::new(repository.revision()),
            repository: Mutex::new(repository),
            cluster_policies: cluster_policies.map(Mutex::new),
            unknown_policies: watch::Sender::new(unknown),
            clock,
            identities,
            generation: Mutex::new(generation),
            changing: RwLock::default(),
            cluster,
            subjects: Mutex::new(Subjects::new(tables, named)),
            ipcache: Mutex::new(ipcache),
            is_blank,
            programs,
            node_addresses,
            built: Notify::new(),
            followed: watch::Sender::new(0),
            followed_mode: watch::Sender::new(None),
            covered: watch::Sender::default(),
            lag,
            held_back: watch::Sender::new(Some(uninformed(None))),
        })
    }
}

impl Enforcer {
    /// Takes over the rules that the previous agent saved in `state_dir`, and the tables that it left in the maps of
    /// `datapath`. `allocator` allocates identities, and knows the cluster's.
    pub fn open(
        state_dir: &Path,
        options: EnforcerOptions,
        allocator: Arc<IdentityAllocator>,
        datapath: Arc<Mutex<Datapath>>,
    ) -> Result<Self, EnforceError> {
        let cluster = Box::new(AllocatorCluster::new(allocator, state_dir));
        let tables = Box::new(lock(&datapath).policy()?);
        let ipcache = Box::new(lock(&datapath).ipcache()?);
        Shared::new(state_dir, options, cluster, datapath, tables, ipcache)
            .map(|shared| Self(Arc::new(shared)))
    }

    /// Returns the current rules.
    pub fn repository(&self) -> Arc<Repository> {
        lock(&self.0.repository).clone()
    }

    /// Returns the current policy settings.
    pub fn settings(&self) -> PolicySettings {
        *self.0.settings.borrow()
    }

    /// Imports all policies in a YAML or JSON document, or none, and saves them. Returns the outcome and the new
    /// revision; [`Self::in_force`] waits until endpoints have reached that revision.
    pub fn import(&self, text: &str) -> Result<(ImportOutcome, u64), EnforceError> {
        // Parsing megabytes must not block other callers.
        let Documents { policies, skipped } = parse(text)?;
        if self.0.cluster_policies.is_none() {
            policies
                .iter()
                .try_for_each(Policy::check_without_cluster)?;
        }
        let imported = self.change(|repository| {
            let outcome = repository.insert(policies, Some((self.0.clock)()));
            limits::check(repository)?;
            Ok(ImportOutcome { skipped, ..outcome })
        })?;
        self.save_named_services();
        Ok(imported)
    }

    /// Deletes an imported policy by name. Fails without deleting anything if there is no such policy.
    pub fn delete(&self, name: &PolicyName) -> Result<u64, EnforceError> {
        let deleted = self.change(|repository| {
            if repository.delete(name) {
                return Ok(());
            }
            let is_of_cluster = repository.of_cluster().any(|held| held.name() == name);
            Err(match is_of_cluster {
                true => EnforceError::OfCluster(name.clone()),
                false => EnforceError::NoPolicy(name.clone()),
            })
        });
        deleted.map(|((), revision)| revision)
    }

    /// Deletes the imported policies that have a rule with all of these labels; without labels, all imported policies.
    pub fn delete_labelled(
        &self,
        labels: &[Label],
    ) -> Result<(Vec<PolicyName>, u64), EnforceError> {
        self.change(|repository| Ok(repository.delete_labelled(labels)))
    }

    /// Waits up to `patience` for endpoints to reach a revision. Returns whether they have.
    pub async fn in_force(&self, revision: u64, patience: Duration) -> bool {
        let mut followed = self.0.followed.subscribe();
        let reached = followed.wait_for(|followed| *followed >= revision);
        tokio::time::timeout(patience, reached).await.is_ok()
    }

    /// Returns the endpoints that lag behind the latest policy, if any.
    pub fn lag(&self) -> Option<PolicyLag> {
        self.0.lag.borrow().clone()
    }

    /// Explains why a packet passes or is dropped. `enforcement` has the settings of the source and the destination.
    pub fn trace(&self, request: &TraceRequest<'_>, enforcement: [PolicyMode; 2]) -> Trace {
        let node = self.settings();
        let settings = enforcement.map(|enforcement| settings_of(node, enforcement));
        self.repository().trace(request, settings)
    }

    /// Returns all known identities.
    pub fn identities(&self) -> Arc<Identities> {
        self.0.identities.borrow().clone()
    }

    /// Returns the identity by which policy judges packets of an address.
    pub fn identity_of(&self, ip: IpAddr) -> Identity {
        let entries = lock(&self.0.ipcache);
        let covering = entries.entries().filter(|(prefix, _)| prefix.contains(&ip));
        let longest = covering.max_by_key(|(prefix, _)| prefix.prefix_len());
        longest.map_or(Identity::WORLD, |(_, entry)| Identity(entry.identity))
    }

    /// Makes a change, and saves it before it takes effect.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Repository) -> Result<T, EnforceError>,
    ) -> Result<(T, u64), EnforceError> {
        let mut current = lock(&self.0.repository);
        let mut changed = Repository::clone(&current);
        let result = change(&mut changed)?;
        let revision = changed.revision();
        if revision != current.revision() {
            self.0
                .store
                .save(&changed)
                .map_err(|source| EnforceError::Save {
                    path: self.0.store.path().to_owned(),
                    source,
                })?;
            *current = Arc::new(changed);
            self.0.revision.send_replace(revision);
        }
        Ok((result, revision))
    }

    /// Captures everything that verdicts currently depend on.
    fn generation(&self) -> Generation {
        let mut latest = lock(&self.0.generation);
        let now = Generation {
            number: latest.number + 1,
            repository: self.repository(),
            settings: self.settings(),
            identities: self.0.identities.borrow().labels.clone(),
        };
        if !now.is_same(&latest) {
            *latest = now;
        }
        latest.clone()
    }

    fn subjects(&self) -> MutexGuard<'_, Subjects> {
        lock(&self.0.subjects)
    }

    /// Whether the cluster's identities have been known once since the start.
    fn is_informed(&self) -> bool {
        self.0.held_back.borrow().is_none()
    }

    /// Runs `work` where it may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, RegenerationError> + Send + 'static,
    ) -> Result<T, RegenerationError> {
        let enforcer = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&enforcer)).await;
        done.map_err(|error| RegenerationError(error.to_string()))?
    }
}

/// Adds the saved policies of the cluster to the repository, or forgets them if this agent does not follow a cluster. If
/// they cannot be read, endpoints wait for the API server.
fn cluster_state(
    state_dir: &Path,
    follows_cluster: bool,
    repository: &mut Repository,
) -> Result<Option<ClusterState>, EnforceError> {
    let store = Store::in_dir(state_dir, PolicyOrigin::Kubernetes);
    if !follows_cluster {
        store.remove().map_err(|source| EnforceError::Forget {
            path: store.path().to_owned(),
            source,
        })?;
        return Ok(None);
    }
    let mut with = repository.clone();
    let is_saved = match store.load(&mut with) {
        Ok(is_saved) => {
            *repository = with;
            is_saved
        }
        Err(error) => {
            store.put_aside(&error);
            false
        }
    };
    Ok(Some(ClusterState::new(store, is_saved)))
}

/// Reports policies that were imported while the agent followed a Kubernetes cluster, and need one.
fn warn_without_cluster(repository: &Repository) {
    for held in repository.iter() {
        if let Err(error) = held.check_without_cluster() {
            tracing::warn!(%error, "an imported policy names peers that do not exist without a cluster");
        }
    }
}

fn uninformed(stale: Option<&Staleness>) -> RegenerationError {
    let reason = stale.map_or_else(String::new, |stale| format!(": {}", stale.reason));
    RegenerationError(format!(
        "the identities of the cluster are not known yet{reason}"
    ))
}

/// Writes the identities of taken-over endpoints' addresses, so that endpoints built earlier know those built later.
fn announce_former(ipcache: &mut dyn Prefixes, former: &[Workload]) -> Result<(), TrieError> {
    for workload in former {
        let entry = IpcacheEntry {
            identity: workload.info.identity,
            ..IpcacheEntry::default()
        };
        for address in &workload.addresses {
            ipcache.set(IpNet::from(*address), entry)?;
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
