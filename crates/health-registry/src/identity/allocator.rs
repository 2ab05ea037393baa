//! The identity allocator: uses a store shared by all nodes to give the same labels the same number on every node,
//! whatever the races.

use std::collections::BTreeMap;
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
use std::fmt::Display;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use health_model::activity::{self, Activity, Problem, Reporter};
use health_model::identity::Identity;
use health_model::labels::{CIDR, Label, LabelSet, RESERVED};
use jiff::Timestamp;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
use tracing::warn;

#[cfg(feature = "etcd")]
use super::etcd;
#[cfg(feature = "kubernetes")]
use super::kubernetes;
use super::view::{Hub, Settle};
use super::wants::Wants;
use super::{Addresses, HeldIdentities, Identities, LocalIdentities, file};
#[cfg(feature = "etcd")]
use crate::etcd::{EtcdConfigError, Source};
#[cfg(feature = "kubernetes")]
use crate::kubernetes::{AccessError, access::Access};
use crate::nodes::Staleness;
use health_settings::RegistrySpec;

/// Why labels got no identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The store does not respond, or is damaged.
    #[error("the identity store {store} cannot be used: {reason}")]
    Unavailable {
        /// The store as written in the settings.
        store: String,
        /// The problem.
        reason: String,
    },
    /// Every number is in use.
    #[error(
        "no identity is left for {labels}: all {count} are in use; drop labels that differ from \
         endpoint to endpoint"
    )]
    Exhausted {
        /// The first labels of the set.
        labels: String,
        /// The total number of identities.
        count: usize,
    },
    /// Too many new label sets come from one place.
    #[error("no new identity is allowed for {labels} now: {reason}")]
    Limited {
        /// The first labels of the set.
        labels: String,
        /// Which namespace or node has too many, and the limit.
        reason: String,
    },
    /// An entry of the store is certainly wrong.
    #[error("the identity store's {key} cannot be used: {reason}; fix or delete it")]
    Corrupt {
        /// The entry's name in the store.
        key: String,
        /// The problem.
        reason: String,
    },
    /// The set has no labels.
    #[error("an endpoint without labels has no identity of its own; give it a label")]
    NoLabels,
    /// An endpoint may not have this label.
    #[error(
        "label {0} is not allowed on endpoints: only the agent assigns {RESERVED} and {CIDR} labels"
    )]
    NotForEndpoints(Label),
}

/// Why no allocator can be created with these settings.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The settings of an etcd cluster cannot be used.
    #[cfg(feature = "etcd")]
    #[error(transparent)]
    Etcd(#[from] EtcdConfigError),
    /// There are no credentials for the Kubernetes cluster.
    #[cfg(feature = "kubernetes")]
    #[error(transparent)]
    Kubernetes(#[from] AccessError),
    /// Objects in Kubernetes cannot have the node's name.
    #[cfg(feature = "kubernetes")]
    #[error(
        "identities in Kubernetes need a node name of at most 240 characters in a-z, 0-9, - and ., not {0:?}; set --node-name"
    )]
    NodeName(String),
    /// This agent was built without support for that kind of store.
    #[error(
        "cannot use {0}: this agent was built without support for it; use another build, or a file"
    )]
    NotBuilt(RegistrySpec),
}

/// Information about an endpoint for users of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointDetails {
    /// The endpoint's pod, as `NAMESPACE/NAME`.
    pub pod: Option<String>,
    /// The endpoint's state, as in listings: `ready`.
    pub state: String,
}

/// What to do while the store cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOutage {
    /// Wait until it can be used again.
    Wait,
    /// Fail with [`IdentityError::Unavailable`], within seconds at most.
    Fail,
}

/// Times that an allocator uses.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long the references and addresses of a node outlive its agent, so that they survive a restart of the agent.
    pub lease: Duration,
    /// How long an entry stays known after it was seen to disappear.
    pub settle_seen: Duration,
    /// How long an entry stays known if it was missing when the store came back.
    pub settle_unseen: Duration,
    /// How long an unused identity is kept.
    pub collect_after: Duration,
    /// Time between two checks for unused identities.
    pub look_period: Duration,
    /// How long the number of a collected identity is reserved.
    pub reuse_after: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(900),
            settle_seen: Duration::from_secs(10),
            settle_unseen: Duration::from_secs(120),
            collect_after: Duration::from_secs(900),
            look_period: Duration::from_secs(60),
            reuse_after: Duration::from_secs(3600),
        }
    }
}

impl Timing {
    pub(super) fn settle(&self) -> Settle {
        Settle {
            seen: self.settle_seen,
            unseen: self.settle_unseen,
        }
    }
}

/// Allocates identities, and reports all existing identities. Dropping it closes the connection to the store. The
/// references and addresses of this node remain there for the duration of a lease, for the node's next agent.
#[derive(Debug)]
pub struct IdentityAllocator {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
    /// Notified when the task may use the store.
    begun: Arc<Notify>,
    activities: IdentityActivities,
}

/// The activities of the tasks that use the store.
#[derive(Clone, Debug)]
pub struct IdentityActivities {
    /// Reads the store, and writes the wants of this node.
    pub store: Activity,
    /// Removes unused identities.
    pub collector: Activity,
}

/// State shared by the callers and the task that talks to the store.
#[derive(Debug)]
pub(super) struct Shared {
    wants: Mutex<Wants>,
    /// Notified when there is work to do.
    pub(super) wake: Notify,
    pub(super) hub: Arc<Hub>,
    /// The store as written in the settings.
    pub(super) store: String,
    /// Reports activity on the store.
    pub(super) store_reporter: Reporter,
    /// Reports activity of the collector.
    pub(super) collector_reporter: Reporter,
}

impl Shared {
    /// Creates the state for a store that has not been heard yet, with its activities.
    pub(super) fn new(store: String) -> (Self, IdentityActivities) {
        let stale = Staleness {
            since: Timestamp::now(),
            reason: "not connected yet".to_owned(),
        };
        let (store_reporter, store_activity) = activity::channel();
        let (collector_reporter, collector) = activity::channel();
        let shared = Self {
            wants: Mutex::default(),
            wake: Notify::new(),
            hub: Arc::new(Hub::new(store.clone(), stale.clone())),
            store,
            store_reporter,
            collector_reporter,
        };
        shared.fail(stale.since, stale.reason);
        let activities = IdentityActivities {
            store: store_activity,
            collector,
        };
        (shared, activities)
    }

    pub(super) fn wants(&self) -> MutexGuard<'_, Wants> {
        self.wants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the store has been unusable since `since`.
    pub(super) fn fail(&self, since: Timestamp, reason: String) {
        self.wants().fail(IdentityError::Unavailable {
            store: self.store.clone(),
            reason: reason.clone(),
        });
        self.store_reporter
            .end(Some(Problem::warning(&reason)), None);
        self.hub.publish_stale(Staleness { since, reason });
    }

    /// Records that this node's wants cannot be written, and logs the error unless it is the `last` one.
    #[cfg(any(feature = "etcd", feature = "kubernetes"))]
    pub(super) fn fail_writing(&self, error: &impl Display, last: &mut Option<String>) {
        self.wants().fail(IdentityError::Unavailable {
            store: self.store.clone(),
            reason: error.to_string(),
        });
        self.report_unwritten(error, last);
    }

    /// Reports that some of this node's wants cannot be written, and logs the error unless it is the `last` one.
    #[cfg(any(feature = "etcd", feature = "kubernetes"))]
    pub(super) fn report_unwritten(&self, error: &impl Display, last: &mut Option<String>) {
        let problem = error.to_string();
        if last.as_ref() != Some(&problem) {
            warn!(%error, "cannot write identities");
        }
        let reported = format!("cannot write identities: {problem}");
        self.store_reporter
            .end(Some(Problem::warning(reported)), None);
        *last = Some(problem);
    }

    /// Records that this node's wants are written, and will be compared again within `period`. There may still be a
    /// `warning`.
    #[cfg(any(feature = "etcd", feature = "kubernetes"))]
    pub(super) fn succeed_writing(
        &self,
        period: Duration,
        last: &mut Option<String>,
        warning: Option<String>,
    ) {
        *last = None;
        self.wants().recover();
        self.store_reporter
            .end(warning.map(Problem::warning), Some(period));
    }
}

/// Where identities are stored.
#[derive(Clone, Debug)]
enum Place {
    #[cfg(feature = "etcd")]
    Etcd(Source),
    File(PathBuf),
    #[cfg(feature = "kubernetes")]
    Kubernetes(Access),
}

impl Place {
    /// Returns the storage that the settings name.
    fn of(store: &RegistrySpec) -> Result<Self, OpenError> {
        match store {
            RegistrySpec::File(path) => Ok(Self::File(path.clone())),
            #[cfg(feature = "kubernetes")]
            RegistrySpec::Kubernetes(path) => Ok(Self::Kubernetes(Access::find(path.as_deref())?)),
            #[cfg(feature = "etcd")]
            RegistrySpec::Etcd(_) | RegistrySpec::EtcdConfig(_) => {
                let source = Source::of(store).ok_or_else(|| OpenError::NotBuilt(store.clone()))?;
                source.access()?;
                Ok(Self::Etcd(source))
            }
            #[cfg(not(all(feature = "etcd", feature = "kubernetes")))]
            _ => Err(OpenError::NotBuilt(store.clone())),
        }
    }
}

impl IdentityAllocator {
    /// Starts to follow a store, as `node` of `cluster`. Fails only if the settings cannot be used; a store that does
    /// not respond is retried. Must be called in a tokio runtime.
    pub fn open(
        store: &RegistrySpec,
        cluster: &str,
        node: &str,
        timing: Timing,
    ) -> Result<Self, OpenError> {
        let allocator = Self::open_idle(store, cluster, node, timing)?;
        allocator.begin();
        Ok(allocator)
    }

    /// Like [`Self::open`], but does not use the store before [`Self::begin`]. Callers wait until then.
    #[cfg_attr(
        not(feature = "etcd"),
        expect(unused_variables, reason = "a file is for one cluster")
    )]
    pub fn open_idle(
        store: &RegistrySpec,
        cluster: &str,
        node: &str,
        timing: Timing,
    ) -> Result<Self, OpenError> {
        let place = Place::of(store)?;
        #[cfg(feature = "kubernetes")]
        if matches!(place, Place::Kubernetes(_)) && !is_object_name(node) {
            return Err(OpenError::NodeName(node.to_owned()));
        }
        let (shared, activities) = Shared::new(store.to_string());
        let shared = Arc::new(shared);
        let begun = Arc::new(Notify::new());
        let task = match place {
            #[cfg(feature = "etcd")]
            Place::Etcd(source) => {
                let run = etcd::run(shared.clone(), source, cluster, node, timing);
                tokio::spawn(once(begun.clone(), run))
            }
            Place::File(path) => {
                let run = file::run(shared.clone(), path, node, timing);
                tokio::spawn(once(begun.clone(), run))
            }
            #[cfg(feature = "kubernetes")]
            Place::Kubernetes(access) => {
                let run = kubernetes::run(shared.clone(), access, node, timing);
                tokio::spawn(once(begun.clone(), run))
            }
        };
        Ok(Self {
            shared,
            task,
            begun,
            activities,
        })
    }

    /// Starts to follow the store.
    pub fn begin(&self) {
        self.begun.notify_one();
    }

    /// Allocates an identity for one endpoint with these labels; release it with [`Self::release`]. Labels of reserved
    /// identities need no store. Cancel safe: nothing is held if this is dropped while waiting.
    pub async fn acquire(
        &self,
        labels: &LabelSet,
        on_outage: OnOutage,
    ) -> Result<Identity, IdentityError> {
        if let Some(reserved) = reserved(labels)? {
            return Ok(reserved);
        }
        let answer = self.shared.wants().want(labels, on_outage);
        let mut unwant = WantWithdrawal {
            allocator: self,
            labels: Some(labels),
        };
        self.shared.wake.notify_one();
        let answer = answer.await.unwrap_or_else(|_| {
            Err(IdentityError::Unavailable {
                store: self.shared.store.clone(),
                reason: "the allocator has stopped".to_owned(),
            })
        })?;
        unwant.labels = None;
        Ok(answer)
    }

    /// Releases an identity; call this once per [`Self::acquire`]. The store is updated as soon as it is usable.
    pub fn release(&self, labels: &LabelSet) {
        self.shared.wants().unwant(labels);
        self.shared.wake.notify_one();
    }

    /// Announces to other nodes the identity of an endpoint's addresses, each with the address of this node by which
    /// they reach it. The store is updated as soon as it is usable.
    pub fn announce(&self, endpoint: u16, identity: Identity, addresses: &[(IpAddr, IpAddr)]) {
        if self.shared.wants().announce(endpoint, identity, addresses) {
            self.shared.wake.notify_one();
        }
    }

    /// Sets the details of announced endpoints, by id. Only Kubernetes stores them, within half a minute.
    pub fn describe(&self, details: BTreeMap<u16, EndpointDetails>) {
        if self.shared.wants().describe(details) {
            self.shared.wake.notify_one();
        }
    }

    /// Withdraws an announced address.
    pub fn withdraw(&self, ip: IpAddr) {
        self.shared.wants().withdraw(ip);
        self.shared.wake.notify_one();
    }

    /// Deletes entries of this node's earlier agents from the store, unless they were acquired or announced again. Call
    /// this once the endpoints are restored; otherwise these entries remain for the duration of a lease.
    pub fn forget_earlier(&self) {
        self.shared.wants().forget_earlier();
        self.shared.wake.notify_one();
    }

    /// Follows all identities; changes arrive up to 100 ms later. The known identities stay in force while the store
    /// fails.
    pub fn identities(&self) -> watch::Receiver<Arc<Identities>> {
        self.shared.hub.identities()
    }

    /// Follows the addresses of the cluster's endpoints; changes arrive up to 100 ms later.
    pub fn addresses(&self) -> watch::Receiver<Arc<Addresses>> {
        self.shared.hub.addresses()
    }

    /// Follows the acquired identities, by labels. An identity changes if the store lost its data and the number was
    /// given to other labels before the identity could be written again.
    pub fn held(&self) -> watch::Receiver<Arc<HeldIdentities>> {
        self.shared.hub.held()
    }

    /// Returns the state of the allocator's activities. Failures are warnings, because the known identities stay in
    /// force.
    pub fn activities(&self) -> IdentityActivities {
        self.activities.clone()
    }

    /// Returns this node's own identities. They are stored in `state_dir` and included in [`Self::identities`].
    pub fn local(&self, state_dir: &Path) -> LocalIdentities {
        LocalIdentities::open(state_dir, self.shared.hub.clone())
    }
}

impl Drop for IdentityAllocator {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Deletes the slices of this node's endpoints from a store in Kubernetes, and returns their number. Other stores have
/// none. Fails if the API server cannot be reached or refuses.
pub async fn remove_slices(store: &RegistrySpec, node: &str) -> Result<usize, String> {
    match store {
        #[cfg(feature = "kubernetes")]
        RegistrySpec::Kubernetes(path) => {
            let access = Access::find(path.as_deref()).map_err(|error| error.to_string())?;
            kubernetes::remove_slices(&access, node).await
        }
        _ => {
            let _ = node;
            Ok(0)
        }
    }
}

/// Whether names of objects can begin with a node's name: a DNS subdomain (RFC 1123), with room for a number.
#[cfg(feature = "kubernetes")]
fn is_object_name(node: &str) -> bool {
    let is_label = |label: &str| {
        let is_inner = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        !label.is_empty() && !label.starts_with('-') && label.bytes().all(is_inner)
    };
    node.len() <= 240
        && !node
            .split('.')
            .any(|label| !is_label(label) || label.ends_with('-'))
}

/// Runs a task once `begun` is notified.
async fn once(begun: Arc<Notify>, run: impl Future<Output = ()>) {
    begun.notified().await;
    run.await;
}

/// Withdraws a request on drop if it has not been answered.
struct WantWithdrawal<'a> {
    allocator: &'a IdentityAllocator,
    labels: Option<&'a LabelSet>,
}

impl Drop for WantWithdrawal<'_> {
    fn drop(&mut self) {
        if let Some(labels) = self.labels {
            self.allocator.release(labels);
        }
    }
}

/// Returns the reserved identity of a label set, if any; an error for sets that no endpoint may have.
fn reserved(labels: &LabelSet) -> Result<Option<Identity>, IdentityError> {
    if labels.is_empty() {
        return Err(IdentityError::NoLabels);
    }
    let Some(label) = not_for_endpoints(labels) else {
        return Ok(None);
    };
    Identity::by_reserved_name(label.key())
        .filter(|identity| identity.reserved_labels().as_ref() == Some(labels))
        .map(Some)
        .ok_or_else(|| IdentityError::NotForEndpoints(label.clone()))
}

/// Returns the first label that no endpoint may have.
pub(super) fn not_for_endpoints(labels: &LabelSet) -> Option<&Label> {
    labels.iter().find(|label| !label.is_for_endpoints())
}

/// Returns the first labels of the set, for messages.
pub(super) fn shown(labels: &LabelSet) -> String {
    const MOST: usize = 5;
    let first: Vec<_> = labels.iter().take(MOST).map(Label::to_string).collect();
    let more = if labels.iter().len() > MOST {
        ", ..."
    } else {
        ""
    };
    first.join(", ") + more
}

#[cfg(all(test, feature = "kubernetes"))]
mod tests {
    use super::*;

    #[test]
    fn a_node_whose_name_no_object_can_have_is_refused() {
        for name in ["n1", "0.node-a.example", &"a".repeat(240)] {
            assert!(is_object_name(name), "{name}");
        }
        for name in [
            "",
            "Node",
            "node_a",
            "-a",
            "a-",
            "a..b",
            "a.-b",
            &"a".repeat(241),
        ] {
            assert!(!is_object_name(name), "{name}");
        }
    }
}
