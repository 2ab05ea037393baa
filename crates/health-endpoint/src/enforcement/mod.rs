//! Policy enforcement: compiles rules and identities to tables of verdicts that this node's endpoints use, and keeps in
//! the ipcache which identity each address has.
//!
//! [`Enforcer::import`] and similar methods change the rules. [`Enforcer::follow`] propagates every change to the
//! affected endpoints, which the [`Manager`] regenerates through this module.

mod backends;
mod error;
mod follow;
mod store;
mod subjects;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use health_common::endpoint::{
    ENDPOINT_DHCPV6, ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, EndpointInfo,
};
use health_common::ipcache::{IPCACHE_ENTRIES, IpcacheEntry};
use health_datapath::ipcache::IpcacheError;
use health_datapath::policy::PolicyError;
use health_datapath::{Datapath, Workload};
use health_model::api::PolicyLag;
use health_model::identity::Identity;
use health_model::labels::{Label, LabelSet};
use health_policy::{
    Documents, ImportOutcome, PolicyName, PolicySettings, Repository, Trace, TraceRequest, parse,
};
use health_registry::identity::{Identities, IdentityAllocator};
use health_registry::nodes::Staleness;
use ipnet::IpNet;
use tokio::sync::{Notify, watch};

use crate::regenerate::{RealizedPolicy, Regeneration, RegenerationError, Regenerator};

pub use self::error::EnforceError;
pub use self::follow::{HostRoutes, Surroundings};

pub use self::store::FILE;

use self::backends::{AllocatorCluster, Cluster, Prefixes, Programs, Tables};
use self::store::Store;
use self::subjects::{BuildFailure, Generation, Subject, Subjects};

/// How long building a new endpoint waits for the cluster's identities, if the store can be used.
const PATIENCE: Duration = Duration::from_secs(5);

/// Enforces policy. Clones share the state.
#[derive(Clone)]
pub struct Enforcer(Arc<Shared>);

struct Shared {
    settings: PolicySettings,
    allow_dhcpv6: bool,
    store: Store,
    repository: Mutex<Arc<Repository>>,
    /// Revision of the repository.
    revision: watch::Sender<u64>,
    cluster: Box<dyn Cluster>,
    identities: watch::Receiver<Arc<Identities>>,
    subjects: Mutex<Subjects>,
    /// Shared by builds of single endpoints; exclusive for changes to the tables of several endpoints.
    changing: RwLock<()>,
    /// The latest generation.
    generation: Mutex<Generation>,
    ipcache: Mutex<Box<dyn Prefixes>>,
    /// Whether, at the start, the ipcache lacked what the previous agent knew.
    is_blank: bool,
    programs: Arc<dyn Programs>,
    /// The node's own addresses, under which its endpoints are announced to other nodes.
    node_addresses: Vec<IpAddr>,
    /// Notified when an endpoint was built or removed.
    built: Notify,
    /// Repository revision that endpoints and maps have reached.
    followed: watch::Sender<u64>,
    lag: watch::Sender<Option<PolicyLag>>,
    /// Why endpoints of the previous agent keep their policy: until the cluster's identities have been known once since
    /// the start, new tables would lack them and drop what the previous tables let pass.
    held_back: watch::Sender<Option<RegenerationError>>,
}

/// Which endpoints to build again, after space was freed.
enum Room {
    /// For some of these, possibly.
    Swept(BTreeSet<u16>),
    /// These endpoints, for which nothing passes until they are built.
    Closed(BTreeSet<u16>),
}

/// The parts of an enforcer.
pub struct Parts {
    /// Settings besides the rules.
    pub settings: PolicySettings,
    /// Whether endpoints may request addresses by DHCPv6.
    pub allow_dhcpv6: bool,
    /// Allocates identities, and knows the cluster's.
    pub allocator: Arc<IdentityAllocator>,
    /// The programs and their maps.
    pub datapath: Arc<Mutex<Datapath>>,
    /// The node's own addresses.
    pub node_addresses: Vec<IpAddr>,
    /// Reports endpoints that lag behind.
    pub lag: watch::Sender<Option<PolicyLag>>,
}

/// The backends of an enforcer, and what it finds in them.
struct Backends {
    cluster: Box<dyn Cluster>,
    programs: Arc<dyn Programs>,
    tables: Box<dyn Tables>,
    ipcache: Box<dyn Prefixes>,
    /// The endpoints that are already being served.
    former: Vec<Workload>,
    /// Whether programs with another map layout serve some of them.
    is_changing_layout: bool,
}

/// The enforcer's settings.
struct Options {
    settings: PolicySettings,
    allow_dhcpv6: bool,
    node_addresses: Vec<IpAddr>,
    lag: watch::Sender<Option<PolicyLag>>,
}

/// Maximum networks that all policies name together: half the capacity of the map of identities, so that the addresses
/// of endpoints and nodes always fit.
const NETWORKS_MAX: usize = IPCACHE_ENTRIES as usize / 2;

fn check_networks(count: usize, max: usize) -> Result<(), EnforceError> {
    match count > max {
        true => Err(EnforceError::TooManyNetworks { count, max }),
        false => Ok(()),
    }
}

impl Enforcer {
    /// Takes over the rules that the previous agent saved in `state_dir`, and the tables that it left.
    pub fn open(state_dir: &Path, parts: Parts) -> Result<Self, EnforceError> {
        let Parts {
            settings,
            allow_dhcpv6,
            allocator,
            datapath,
            node_addresses,
            lag,
        } = parts;
        let datapath_now = lock(&datapath);
        let backends = Backends {
            cluster: Box::new(AllocatorCluster::new(allocator, state_dir)),
            programs: datapath.clone(),
            tables: Box::new(datapath_now.policy()?),
            ipcache: Box::new(datapath_now.ipcache()?),
            former: datapath_now.workloads().cloned().collect(),
            is_changing_layout: datapath_now.is_changing_layout(),
        };
        drop(datapath_now);
        let options = Options {
            settings,
            allow_dhcpv6,
            node_addresses,
            lag,
        };
        Self::with_backends(state_dir, backends, options)
    }

    fn with_backends(
        state_dir: &Path,
        backends: Backends,
        options: Options,
    ) -> Result<Self, EnforceError> {
        let Backends {
            cluster,
            programs,
            tables,
            mut ipcache,
            former,
            is_changing_layout,
        } = backends;
        let settings = options.settings;
        let store = Store::in_dir(state_dir);
        let repository = store.load()?;
        for error in repository.outdated() {
            tracing::warn!(
                %error,
                "an earlier version imported this policy; this version would reject it, but its meaning is unchanged"
            );
        }
        let is_blank = is_changing_layout || ipcache.entries().next().is_none();
        if is_blank {
            tell_of_former(&mut *ipcache, &former)?;
        }
        let named = former.iter().map(|one| (one.info.id, one.info.policy));
        let identities = cluster.identities();
        let repository = Arc::new(repository);
        let generation = Generation {
            number: 0,
            repository: repository.clone(),
            settings,
            identities: identities.borrow().labels.clone(),
        };
        let shared = Shared {
            settings,
            allow_dhcpv6: options.allow_dhcpv6,
            store,
            revision: watch::Sender::new(repository.revision()),
            repository: Mutex::new(repository),
            identities,
            generation: Mutex::new(generation),
            changing: RwLock::default(),
            cluster,
            subjects: Mutex::new(Subjects::new(tables, named)),
            ipcache: Mutex::new(ipcache),
            is_blank,
            programs,
            node_addresses: options.node_addresses,
            built: Notify::new(),
            followed: watch::Sender::new(0),
            lag: options.lag,
            held_back: watch::Sender::new(Some(uninformed(None))),
        };
        Ok(Self(Arc::new(shared)))
    }

    /// The current rules.
    pub fn repository(&self) -> Arc<Repository> {
        lock(&self.0.repository).clone()
    }

    /// The settings of policy.
    pub fn settings(&self) -> PolicySettings {
        self.0.settings
    }

    /// Imports the policies of a text in YAML or JSON, all or none, and saves them. Returns what was done, and the new
    /// revision; [`Self::in_force`] waits until endpoints have reached it.
    pub fn import(&self, text: &str) -> Result<(ImportOutcome, u64), EnforceError> {
        // Parsing megabytes must not block other callers.
        let Documents { policies, skipped } = parse(text)?;
        self.change(|repository| {
            let outcome = repository.insert(policies);
            check_networks(repository.prefixes().len(), NETWORKS_MAX)?;
            Ok(ImportOutcome { skipped, ..outcome })
        })
    }

    /// Deletes a policy by name. If it does not exist, this is an error and nothing is deleted.
    pub fn delete(&self, name: &PolicyName) -> Result<u64, EnforceError> {
        let deleted = self.change(|repository| match repository.delete(name) {
            true => Ok(()),
            false => Err(EnforceError::NoPolicy(name.clone())),
        });
        deleted.map(|((), revision)| revision)
    }

    /// Deletes the policies that have a rule with all of these labels; without labels, all policies.
    pub fn delete_labelled(
        &self,
        labels: &[Label],
    ) -> Result<(Vec<PolicyName>, u64), EnforceError> {
        self.change(|repository| Ok(repository.delete_labelled(labels)))
    }

    /// Waits up to `patience` until endpoints have reached a revision. Returns whether they have.
    pub async fn in_force(&self, revision: u64, patience: Duration) -> bool {
        let mut followed = self.0.followed.subscribe();
        let reached = followed.wait_for(|followed| *followed >= revision);
        tokio::time::timeout(patience, reached).await.is_ok()
    }

    /// The endpoints that lag behind the latest policy, if any.
    pub fn lag(&self) -> Option<PolicyLag> {
        self.0.lag.borrow().clone()
    }

    /// Explains why a packet passes or not.
    pub fn trace(&self, request: &TraceRequest<'_>) -> Trace {
        self.repository().trace(request, self.0.settings)
    }

    /// All known identities.
    pub fn identities(&self) -> Arc<Identities> {
        self.0.identities.borrow().clone()
    }

    /// The identity by which policy judges packets of an address.
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
            self.0.store.save(&changed)?;
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
            settings: self.0.settings,
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

    /// Builds an endpoint. May block.
    fn build(&self, endpoint: &Regeneration) -> Result<RealizedPolicy, RegenerationError> {
        let generation = self.generation();
        let built = self.build_by(endpoint, &generation);
        if let Err(error) = &built {
            let failure = BuildFailure {
                generation: generation.number,
                lacks_room: matches!(error, EnforceError::Table(PolicyError::Full { .. })),
                reason: error.to_string(),
            };
            self.subjects().fail(endpoint.id, failure);
        }
        self.0.built.notify_one();
        built.map_err(|error| RegenerationError(error.to_string()))
    }

    fn build_by(
        &self,
        endpoint: &Regeneration,
        generation: &Generation,
    ) -> Result<RealizedPolicy, EnforceError> {
        let changing = self.0.changing.read();
        let _changing = changing.unwrap_or_else(PoisonError::into_inner);
        let labels = subject_labels(endpoint.identity, &endpoint.labels);
        let realized =
            self.subjects()
                .plan(endpoint.id, endpoint.subject(), &labels, generation)?;
        self.0.programs.set(self.workload(endpoint, realized))?;
        let former = self.subjects().settle(endpoint.id, &endpoint.addresses);
        // The endpoint may send packets at once, which are judged by its identity.
        self.tell_ipcache(endpoint)?;
        self.withdraw(former.iter().filter(|ip| !endpoint.addresses.contains(ip)));
        self.announce(endpoint);
        Ok(realized)
    }

    /// Removes unused tables. If all are used, blocks everything for the endpoints of one identity that was not
    /// `closed` so before: their tables then make space for the new ones. Returns which endpoints may have enough space
    /// now.
    fn make_room(&self, closed: &mut BTreeSet<Subject>) -> Result<Room, EnforceError> {
        let changing = self.0.changing.write();
        let _changing = changing.unwrap_or_else(PoisonError::into_inner);
        let cramped = self.subjects().cramped();
        if cramped.is_empty() || self.subjects().sweep()? {
            return Ok(Room::Swept(cramped));
        }
        let subject = self.subjects().to_close();
        let Some(subject) = subject.filter(|subject| closed.insert(*subject)) else {
            return Ok(Room::Swept(BTreeSet::new()));
        };
        let (table, ids) = self.subjects().close(subject)?;
        for id in &ids {
            self.0.programs.set_policy(*id, table)?;
            self.subjects().moved(*id, table);
        }
        self.subjects().sweep()?;
        Ok(Room::Closed(ids))
    }

    /// Makes an endpoint use a table that lets nothing pass, in both directions.
    fn name_empty_table(&self, id: u16) -> Result<Option<RealizedPolicy>, EnforceError> {
        let changing = self.0.changing.read();
        let _changing = changing.unwrap_or_else(PoisonError::into_inner);
        // Locked until the endpoint uses the table, so that it is not swept.
        let mut subjects = self.subjects();
        let Some(table) = subjects.empty_table(id)? else {
            return Ok(None);
        };
        self.0.programs.shut_off(id, table)?;
        subjects.moved(id, table);
        Ok(Some(RealizedPolicy {
            policy: table,
            enforces_ingress: true,
            enforces_egress: true,
        }))
    }

    /// An endpoint in the form that the programs take.
    fn workload(&self, endpoint: &Regeneration, realized: RealizedPolicy) -> Workload {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        Workload {
            device: endpoint.device.clone(),
            addresses: endpoint.addresses.clone(),
            info: EndpointInfo {
                ifindex: endpoint.ifindex,
                identity: endpoint.identity.0,
                flags: flag(realized.enforces_ingress, ENDPOINT_ENFORCE_INGRESS)
                    | flag(realized.enforces_egress, ENDPOINT_ENFORCE_EGRESS)
                    | flag(self.0.allow_dhcpv6, ENDPOINT_DHCPV6),
                policy: realized.policy,
                id: endpoint.id,
                mac: endpoint.mac.0,
                host_mac: endpoint.host_mac.0,
                pad: 0,
            },
        }
    }

    fn tell_ipcache(&self, endpoint: &Regeneration) -> Result<(), IpcacheError> {
        let entry = IpcacheEntry {
            identity: endpoint.identity.0,
            ..IpcacheEntry::default()
        };
        let mut ipcache = lock(&self.0.ipcache);
        let mut addresses = endpoint.addresses.iter();
        addresses.try_for_each(|address| ipcache.set(IpNet::from(*address), entry))
    }

    fn take_away(&self, id: u16) -> Result<(), RegenerationError> {
        let removed = self.0.programs.remove(id);
        removed.map_err(|error| RegenerationError(error.to_string()))?;
        let addresses = self.subjects().forget(id);
        self.withdraw(addresses.iter());
        self.0.built.notify_one();
        Ok(())
    }

    /// Announces the identity of an endpoint's addresses to the other nodes.
    fn announce(&self, endpoint: &Regeneration) {
        for ip in &endpoint.addresses {
            let of_family = |node: &&IpAddr| node.is_ipv4() == ip.is_ipv4();
            let nodes = &self.0.node_addresses;
            if let Some(node) = nodes.iter().find(of_family).or(nodes.first()) {
                self.0.cluster.announce(*ip, endpoint.identity, *node);
            }
        }
    }

    fn withdraw<'a>(&self, addresses: impl Iterator<Item = &'a IpAddr>) {
        for ip in addresses {
            self.0.cluster.withdraw(*ip);
        }
    }

    /// Whether the cluster's identities have been known once since the start.
    fn is_informed(&self) -> bool {
        self.0.held_back.borrow().is_none()
    }

    /// Runs work where it may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, RegenerationError> + Send + 'static,
    ) -> Result<T, RegenerationError> {
        let enforcer = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&enforcer)).await;
        done.map_err(|error| RegenerationError(error.to_string()))?
    }
}

impl Regenerator for Enforcer {
    fn held_back(&self) -> watch::Receiver<Option<RegenerationError>> {
        self.0.held_back.subscribe()
    }

    fn until_informed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let mut held_back = self.0.held_back.subscribe();
            let mut identities = self.0.identities.clone();
            // Identities that are still missing arrive with the next change.
            tokio::select! {
                _ = held_back.wait_for(Option::is_none) => {}
                _ = identities.wait_for(|known| known.stale.is_some()) => {}
                () = tokio::time::sleep(PATIENCE) => {}
            }
        })
    }

    fn regenerate<'a>(
        &'a self,
        endpoint: &'a Regeneration,
    ) -> Pin<Box<dyn Future<Output = Result<RealizedPolicy, RegenerationError>> + Send + 'a>> {
        let endpoint = endpoint.clone();
        Box::pin(self.blocking(move |enforcer| enforcer.build(&endpoint)))
    }

    fn shut_off(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<Option<RealizedPolicy>, RegenerationError>> + Send + '_>>
    {
        Box::pin(self.blocking(move |enforcer| {
            let named = enforcer.name_empty_table(id);
            // The failed deletion must be reported.
            enforcer.0.built.notify_one();
            named.map_err(|error| RegenerationError(error.to_string()))
        }))
    }

    fn remove(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<(), RegenerationError>> + Send + '_>> {
        Box::pin(self.blocking(move |enforcer| enforcer.take_away(id)))
    }
}

fn uninformed(stale: Option<&Staleness>) -> RegenerationError {
    let reason = stale.map_or_else(String::new, |stale| format!(": {}", stale.reason));
    RegenerationError(format!(
        "the identities of the cluster are not known yet{reason}"
    ))
}

/// Writes the identities of taken-over endpoints' addresses, so that endpoints built earlier know those built later.
fn tell_of_former(ipcache: &mut dyn Prefixes, former: &[Workload]) -> Result<(), IpcacheError> {
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

impl Regeneration {
    fn subject(&self) -> Subject {
        Subject {
            identity: self.identity,
            fails_closed: self.fails_closed,
        }
    }
}

/// The labels by which policy selects an endpoint. Until it has an identity of its own, these are the label of the
/// reserved identity, whatever the endpoint's labels are.
fn subject_labels(identity: Identity, labels: &LabelSet) -> LabelSet {
    identity.reserved_labels().unwrap_or_else(|| labels.clone())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
