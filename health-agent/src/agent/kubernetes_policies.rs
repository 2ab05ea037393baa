//! The network policies of the Kubernetes cluster: brings them into force, and reports refused ones as events.

mod services;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use health_endpoint::enforcement::{ClusterPolicies, EnforceError, Enforcer, RefusedObject};
use health_model::activity::{Controller, Problem, Reporter};
use health_model::task::AbortOnDrop;
use health_policy::{Kind, Policy, PolicyName, read_policy};
use health_registry::kubernetes::{AccessError, EventType, ObjectEvent, ObjectTable, PolicyWatch};
use health_settings::{ApiAccess, Settings};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::warn;

use self::services::NamedServices;
use super::kubernetes_events::KubernetesEvents;

/// How often changed policies are saved at most. The agent also saves them when it stops.
const SAVE_PAUSE: Duration = Duration::from_secs(1);
/// How soon policies that could not be saved are saved again.
const SAVE_AGAIN: Duration = Duration::from_secs(5);
/// Reason of the events about refused policies.
const REFUSED: &str = "PolicyRefused";

/// The kinds of policy, in the order of the tables.
const KINDS: [Kind; 3] = [
    Kind::NetworkPolicy,
    Kind::CiliumNetworkPolicy,
    Kind::CiliumClusterwideNetworkPolicy,
];

/// The objects of each kind.
type Tables = [Arc<ObjectTable<ReadObject>>; 3];

/// Follows the policies until dropped.
pub(super) struct KubernetesPolicies {
    watch: PolicyWatch<ReadObject>,
    services: NamedServices,
    events: KubernetesEvents,
}

/// A policy object as read from the API.
#[derive(Debug, PartialEq)]
struct ReadObject {
    kind: Kind,
    namespace: Option<String>,
    name: String,
    uid: String,
    /// The policy, or why it is refused.
    policy: Result<Arc<Policy>, String>,
}

impl KubernetesPolicies {
    /// Starts watching the policies without waiting for a response; `events` are about refused ones. Returns `None` if
    /// the settings name no API server. Fails if no credentials are available. Must be called in a tokio runtime.
    pub(super) fn open(
        config: &Settings,
        events: Option<KubernetesEvents>,
    ) -> Result<Option<Self>, AccessError> {
        let access = config.policy.policies_from_kubernetes.as_ref();
        let kubeconfig = ApiAccess::of_cluster(access, &config.node.registry);
        let (Some(kubeconfig), Some(events)) = (kubeconfig, events) else {
            return Ok(None);
        };
        Ok(Some(Self {
            watch: PolicyWatch::open(kubeconfig, KINDS.map(reader))?,
            services: NamedServices::open(kubeconfig)?,
            events,
        }))
    }

    /// What is known about the watches.
    pub(super) fn controllers(&self) -> impl Iterator<Item = Controller> {
        let watches = self.watch.controllers().into_iter();
        watches.chain(self.services.controllers())
    }

    /// Brings every change into force until dropped. `nodes` tells how many agents the cluster has.
    pub(super) fn follow(
        self,
        enforcer: Enforcer,
        nodes: impl Fn() -> usize + Send + 'static,
        reporter: Reporter,
    ) -> AbortOnDrop {
        AbortOnDrop::spawn(async move {
            let mut tables = self.watch.tables();
            let mut services = self.services;
            let mut announcer = Announcer {
                events: self.events,
                announced: BTreeMap::new(),
            };
            let mut saver = Saver {
                next: Instant::now(),
                problem: None,
            };
            loop {
                reporter.begin();
                let now = tables
                    .each_mut()
                    .map(|table| table.borrow_and_update().clone());
                let has_policies = |kind| {
                    let repository = enforcer.repository();
                    repository
                        .of_cluster()
                        .any(|held| held.name().kind() == Some(kind))
                };
                let mut known = known(&now, has_policies);
                let service_tables = services.now();
                known.services = service_tables.known(enforcer.repository().services());
                known.reason = known.reason.or_else(|| service_tables.reason());
                announcer.announce(&now, nodes());
                let set = set(&enforcer, known).await;
                saver.save(&enforcer).await;
                let needs_services = enforcer.repository().depends_on_services();
                let outcome = set
                    .and(saver.outcome())
                    .and(outcome(&now))
                    .and(service_tables.outcome(needs_services))
                    .and(refused(enforcer.refused_policies().len()));
                let pause = saver.pause(&enforcer);
                reporter.end(outcome.err(), pause);
                if !changed(&mut tables, &mut services, pause).await {
                    return;
                }
            }
        })
    }
}

/// Returns the function that reads the objects of a kind.
fn reader(kind: Kind) -> impl FnMut(Value, Option<&ReadObject>) -> ReadObject + Send + 'static {
    move |object, before| ReadObject::read(kind, &object, before)
}

impl ReadObject {
    fn read(kind: Kind, object: &Value, before: Option<&Self>) -> Self {
        let text = |path: &str| {
            object
                .pointer(path)
                .and_then(Value::as_str)
                .map(str::to_owned)
        };
        let document = document(object);
        let known = before.and_then(|before| before.policy.as_ref().ok());
        let known = known.filter(|known| *known.document() == document).cloned();
        let mut read = Self {
            kind,
            namespace: text("/metadata/namespace"),
            name: text("/metadata/name").unwrap_or_default(),
            uid: text("/metadata/uid").unwrap_or_default(),
            policy: Err(String::new()),
        };
        read.policy = known.map_or_else(|| read.read_policy(&document), Ok);
        read
    }

    fn read_policy(&self, document: &Value) -> Result<Arc<Policy>, String> {
        read_policy(document).map(Arc::new).map_err(|error| {
            let error = error.to_string();
            // The name is shown beside the reason.
            let name = format!("{}: ", self.policy_name());
            error.strip_prefix(&name).unwrap_or(&error).to_owned()
        })
    }

    fn policy_name(&self) -> PolicyName {
        PolicyName::Object {
            kind: self.kind,
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }

    fn held(&self) -> Result<Arc<Policy>, RefusedObject> {
        self.policy.clone().map_err(|reason| RefusedObject {
            uid: Some(self.uid.clone()).filter(|uid| !uid.is_empty()),
            reason,
        })
    }

    /// The event about the refused object.
    fn event(&self, reason: &str) -> ObjectEvent {
        ObjectEvent {
            api_version: self.kind.api_version().to_owned(),
            kind: self.kind.name().to_owned(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            field_path: None,
            event_type: EventType::Warning,
            reason: REFUSED,
            message: reason.to_owned(),
        }
    }
}

/// The parts of an object that the policy depends on. Annotations and the status change more often.
fn document(object: &Value) -> Value {
    let mut document = json!({
        "apiVersion": object["apiVersion"],
        "kind": object["kind"],
        "metadata": {},
    });
    for key in ["name", "namespace", "uid", "labels", "creationTimestamp"] {
        let value = &object["metadata"][key];
        if !value.is_null() {
            document["metadata"][key] = value.clone();
        }
    }
    for key in ["spec", "specs"] {
        if !object[key].is_null() {
            document[key] = object[key].clone();
        }
    }
    document
}

/// What the tables say. `has_policies` tells whether policies of a kind are in force.
fn known(tables: &Tables, has_policies: impl Fn(Kind) -> bool) -> ClusterPolicies {
    let mut known = ClusterPolicies::default();
    for (kind, table) in KINDS.into_iter().zip(tables) {
        for object in table.objects.values() {
            known.objects.insert(object.policy_name(), object.held());
        }
        if table.has_all(|| has_policies(kind)) {
            known.complete.insert(kind);
        } else if known.reason.is_none() {
            let stale = table.stale.as_ref().map(|stale| stale.reason.clone());
            let lacking = || format!("the API server has no {}; asking again", kind.name());
            known.reason = stale.or_else(|| table.lacking.map(|_| lacking()));
        }
    }
    known
}

async fn set(enforcer: &Enforcer, policies: ClusterPolicies) -> Result<(), Problem> {
    let enforcer = enforcer.clone();
    let set = tokio::task::spawn_blocking(move || enforcer.set_cluster_policies(&policies)).await;
    set.map_err(Problem::failure)?
        .map_err(|error: EnforceError| {
            warn!(%error, "cannot follow all services that policies of the Kubernetes cluster name");
            Problem::warning(error)
        })
}

/// The problem to report if policies may be outdated.
fn outcome(tables: &Tables) -> Result<(), Problem> {
    let stale = tables.iter().find_map(|table| table.stale.as_ref());
    stale.map_or(Ok(()), |stale| {
        Err(Problem::warning(stale.using("policies")))
    })
}

/// What to report if objects are refused, which is the fault of whoever wrote them.
fn refused(count: usize) -> Result<(), Problem> {
    let objects = match count {
        0 => return Ok(()),
        1 => "1 policy of the Kubernetes cluster is refused".to_owned(),
        _ => format!("{count} policies of the Kubernetes cluster are refused"),
    };
    Err(Problem::finding(format!(
        "{objects}; `health-agent policy get` shows why"
    )))
}

/// Waits for a change of a table, or for the pause. Returns whether the tables are still followed.
async fn changed(
    tables: &mut [watch::Receiver<Arc<ObjectTable<ReadObject>>>; 3],
    services: &mut NamedServices,
    pause: Option<Duration>,
) -> bool {
    let [network, cilium, clusterwide] = tables;
    let paused = async {
        match pause {
            Some(pause) => sleep(pause).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        changed = network.changed() => changed.is_ok(),
        changed = cilium.changed() => changed.is_ok(),
        changed = clusterwide.changed() => changed.is_ok(),
        is_followed = services.changed() => is_followed,
        () = paused => true,
    }
}

/// Saves the policies in force, but not after each of many changes.
struct Saver {
    /// When to save next.
    next: Instant,
    /// Why the last attempt failed, if it did.
    problem: Option<String>,
}

impl Saver {
    async fn save(&mut self, enforcer: &Enforcer) {
        if !enforcer.has_unsaved_policies() {
            self.problem = None;
            return;
        }
        if Instant::now() < self.next {
            return;
        }
        let saving = enforcer.clone();
        let saved = tokio::task::spawn_blocking(move || {
            let saved = saving.save_cluster_policies();
            saved.map_err(|error| error.to_string())
        });
        let saved = saved.await.unwrap_or_else(|error| Err(error.to_string()));
        self.problem = saved.err();
        let pause = match &self.problem {
            None => SAVE_PAUSE,
            Some(error) => {
                warn!(error, "cannot save the policies of the Kubernetes cluster");
                SAVE_AGAIN
            }
        };
        self.next = Instant::now() + pause;
    }

    fn outcome(&self) -> Result<(), Problem> {
        let problem = self.problem.as_ref();
        problem.map_or(Ok(()), |problem| Err(Problem::warning(problem)))
    }

    /// How long to wait for the next attempt, if there is something to save.
    fn pause(&self, enforcer: &Enforcer) -> Option<Duration> {
        let pause = self.next.saturating_duration_since(Instant::now());
        enforcer.has_unsaved_policies().then_some(pause)
    }
}

/// Announces each object that is refused, in the log and in an event.
struct Announcer {
    events: KubernetesEvents,
    /// The reasons why objects are refused.
    announced: BTreeMap<PolicyName, String>,
}

impl Announcer {
    fn announce(&mut self, tables: &Tables, nodes: usize) {
        let objects = tables.iter().flat_map(|table| table.objects.values());
        let refused = objects.filter_map(|object| Some((object, object.policy.as_ref().err()?)));
        let refused: Vec<_> = refused.collect();
        let named = refused.iter();
        let named = named.map(|(object, reason)| (object.policy_name(), (*reason).clone()));
        let named: BTreeMap<_, _> = named.collect();
        for (name, reason) in &named {
            if self.announced.get(name) != Some(reason) {
                warn!(policy = %name, reason, "a policy of the Kubernetes cluster is refused");
            }
        }
        self.announced = named;
        let events = refused.iter();
        let events = events.map(|(object, reason)| object.event(reason));
        self.events.writer().keep(events.collect(), nodes);
    }
}
