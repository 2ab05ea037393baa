//! Writes events about objects, as `kubectl describe` and `kubectl get events` show them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::{self, Activity, Controller, Reporter};
use health_model::task::AbortOnDrop;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, PostParams};
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::access::{self, Access, AccessError};

/// Namespace of events about objects that have none, as for Kubernetes' own controllers.
const CLUSTER_NAMESPACE: &str = "default";
/// The component that events name as their source.
const COMPONENT: &str = "health-agent";
/// Maximum length in bytes of the object's name in an event's name, which may have 253 bytes.
const OBJECT_NAME_MAX: usize = 230;
/// Maximum length of an event's message in bytes, which the API server enforces.
const MESSAGE_MAX: usize = 1024;

/// The longest pause before an event is written, for each agent that writes it. All notice its cause at the same time.
const PAUSE: Duration = Duration::from_millis(50);
/// When an event is written again. API servers forget events after an hour unless `--event-ttl` says otherwise.
const RENEWAL: Duration = Duration::from_secs(61 * 60);
/// The pause after a first failure to write an event. It doubles with each further failure.
const SHORTEST_RETRY: Duration = Duration::from_secs(1);
/// The longest pause after a failure.
const LONGEST_RETRY: Duration = Duration::from_secs(600);

/// An event about an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectEvent {
    /// The object's kind.
    pub kind: String,
    /// The object's API version.
    pub api_version: String,
    /// The object's namespace, if it has one.
    pub namespace: Option<String>,
    /// The object's name.
    pub name: String,
    /// The object's UID.
    pub uid: String,
    /// Why the event occurs, in one word.
    pub reason: &'static str,
    /// What is wrong.
    pub message: String,
}

/// Writes events to a cluster's API server until dropped.
#[derive(Debug)]
pub struct EventWriter {
    wanted: watch::Sender<Wanted>,
    activity: Activity,
    _task: AbortOnDrop,
}

/// The events that should exist.
#[derive(Clone, Debug, Default)]
struct Wanted {
    events: Arc<BTreeSet<ObjectEvent>>,
    /// How many agents write them.
    agents: u32,
}

impl EventWriter {
    /// Uses the kubeconfig at the given path, else the service account of this process's pod, else the environment's
    /// kubeconfig. Events name this node as their source. Fails if there are no credentials. Must be called in a tokio
    /// runtime.
    pub fn open(kubeconfig: Option<&Path>, node: &str) -> Result<Self, AccessError> {
        let (wanted, receiver) = watch::channel(Wanted::default());
        let (reporter, activity) = activity::channel();
        let writing = Writing {
            access: Access::find(kubeconfig)?,
            client: None,
            node: node.to_owned(),
            attempts: BTreeMap::new(),
            reporter,
        };
        Ok(Self {
            wanted,
            activity,
            _task: AbortOnDrop::spawn(writing.run(receiver)),
        })
    }

    /// What is known about the writing of events.
    pub fn controller(&self) -> Controller {
        Controller::new("kubernetes-events", self.activity.clone())
    }

    /// Makes exactly these events exist from now on: writes each once, again if that fails, and again when the server
    /// has forgotten it. If this many `agents` want the same event, only one of them writes it.
    pub fn keep(&self, events: BTreeSet<ObjectEvent>, agents: usize) {
        let agents = u32::try_from(agents).unwrap_or(u32::MAX);
        self.wanted.send_if_modified(|wanted| {
            wanted.agents = agents;
            let differs = *wanted.events != events;
            if differs {
                wanted.events = Arc::new(events);
            }
            differs
        });
    }
}

/// When to write an event.
struct Attempt {
    at: Instant,
    /// The pause after another failure.
    retry: Duration,
}

impl Attempt {
    fn after(pause: Duration) -> Self {
        Self {
            at: Instant::now() + pause,
            retry: SHORTEST_RETRY,
        }
    }
}

struct Writing {
    access: Access,
    /// Kept from one event to the next, so that they share a connection.
    client: Option<Client>,
    node: String,
    attempts: BTreeMap<ObjectEvent, Attempt>,
    reporter: Reporter,
}

impl Writing {
    /// Writes one event after the other.
    async fn run(mut self, mut wanted: watch::Receiver<Wanted>) {
        loop {
            let Wanted { events, agents } = wanted.borrow_and_update().clone();
            let scatter = || (PAUSE * agents).mul_f64(rand::random());
            self.attempts.retain(|event, _| events.contains(event));
            for event in &*events {
                if !self.attempts.contains_key(event) {
                    self.attempts
                        .insert(event.clone(), Attempt::after(scatter()));
                }
            }
            let first = self.attempts.iter().min_by_key(|(_, attempt)| attempt.at);
            let first = first.map(|(event, attempt)| (event.clone(), attempt.at));
            let due = async {
                match &first {
                    Some((_, at)) => sleep_until(*at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = wanted.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
                () = due => {}
            }
            if let Some((event, _)) = first {
                let written = self.write(&event).await;
                self.note(event, written, RENEWAL + scatter());
            }
        }
    }

    /// Plans the next attempt.
    fn note(&mut self, event: ObjectEvent, written: Result<(), String>, renewal: Duration) {
        let Err(error) = written else {
            self.reporter.succeeded();
            self.attempts.insert(event, Attempt::after(renewal));
            return;
        };
        self.reporter.failed(&error);
        // The next attempt reads the credentials again.
        self.client = None;
        if let Some(attempt) = self.attempts.get_mut(&event) {
            if attempt.retry == SHORTEST_RETRY {
                tracing::warn!(
                    object = event.name,
                    error,
                    "cannot write an event; trying again"
                );
            }
            attempt.at = Instant::now() + attempt.retry;
            attempt.retry = (attempt.retry * 2).min(LONGEST_RETRY);
        }
    }

    /// Writes an event, unless another agent has written the same one.
    async fn write(&mut self, event: &ObjectEvent) -> Result<(), String> {
        let client = match &self.client {
            Some(client) => client.clone(),
            None => {
                let client = self.access.client(Arc::new(Notify::new())).await;
                let client = client.map_err(|error| error.to_string())?;
                self.client.insert(client).clone()
            }
        };
        let namespace = event.namespace.as_deref().unwrap_or(CLUSTER_NAMESPACE);
        let kind = ApiResource::erase::<Event>(&());
        let events: Api<DynamicObject> = Api::namespaced_with(client, namespace, &kind);
        let event = self.object(event, &kind, Timestamp::now());
        match events.create(&PostParams::default(), &event).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            Err(error) => Err(access::reason(&error)),
        }
    }

    fn object(&self, event: &ObjectEvent, kind: &ApiResource, now: Timestamp) -> DynamicObject {
        let mut message = event.message.clone();
        message.truncate(message.floor_char_boundary(MESSAGE_MAX));
        let time = format!("{now:.0}");
        DynamicObject::new(&event_name(event), kind).data(json!({
            "involvedObject": {
                "apiVersion": event.api_version,
                "kind": event.kind,
                "namespace": event.namespace,
                "name": event.name,
                "uid": event.uid,
            },
            "reason": event.reason,
            "message": message,
            "type": "Warning",
            "source": { "component": COMPONENT, "host": self.node },
            "reportingComponent": COMPONENT,
            "reportingInstance": self.node,
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }))
    }
}

/// Derives the event's name from its contents, so that the API server has one for all agents.
fn event_name(event: &ObjectEvent) -> String {
    let mut hasher = DefaultHasher::new();
    event.hash(&mut hasher);
    let name = &event.name;
    let name = &name[..name.floor_char_boundary(OBJECT_NAME_MAX)];
    format!("{name}.{:016x}", hasher.finish())
}
