//! Writes events about objects, as `kubectl describe` and `kubectl get events` show them.

mod occurrences;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::{self, Activity, Controller, Reporter};
use health_model::task::AbortOnDrop;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use self::occurrences::{Occurred, Occurrences};
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
/// Maximum number of occurrences that wait to be recorded. Further ones are dropped.
const QUEUE: usize = 256;

/// Whether an event is a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventType {
    /// Something happened as it should.
    Normal,
    /// Something is wrong.
    Warning,
}

impl EventType {
    const fn text(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

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
    /// The part of the object: `spec.containers{web}`.
    pub field_path: Option<String>,
    /// Whether it is a problem.
    pub event_type: EventType,
    /// Why the event occurs, in one word.
    pub reason: &'static str,
    /// What is wrong.
    pub message: String,
}

/// Writes events to a cluster's API server until dropped.
#[derive(Debug)]
pub struct EventWriter {
    wanted: watch::Sender<Wanted>,
    occurred: mpsc::Sender<ObjectEvent>,
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
        let (occurred, queue) = mpsc::channel(QUEUE);
        let (reporter, activity) = activity::channel();
        let writing = Writing {
            access: Access::find(kubeconfig)?,
            client: None,
            node: node.to_owned(),
            attempts: BTreeMap::new(),
            occurrences: Occurrences::new(Instant::now()),
            reporter,
        };
        Ok(Self {
            wanted,
            occurred,
            activity,
            _task: AbortOnDrop::spawn(writing.run(receiver, queue)),
        })
    }

    /// Whether the writes succeed.
    pub fn controller(&self) -> Controller {
        Controller::new("kubernetes-events", self.activity.clone())
    }

    /// Writes an event that has just occurred on this node. Repetitions within an hour are counted in one object. For
    /// each object, 25 occurrences are written, and one more every 5 minutes; others are dropped.
    pub fn occur(&self, event: ObjectEvent) {
        // A full queue means that there are more than can be written.
        let _ = self.occurred.try_send(event);
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
#[derive(Clone, Debug)]
struct Attempt {
    at: Instant,
    /// The pause after another failure.
    retry: Duration,
}

impl Attempt {
    fn after(pause: Duration) -> Self {
        Self::at(Instant::now() + pause)
    }

    fn at(at: Instant) -> Self {
        Self {
            at,
            retry: SHORTEST_RETRY,
        }
    }

    /// Postpones the attempt after a failure. Returns whether this was the first failure.
    fn retry(&mut self, now: Instant) -> bool {
        let is_first = self.retry == SHORTEST_RETRY;
        self.at = now + self.retry;
        self.retry = (self.retry * 2).min(LONGEST_RETRY);
        is_first
    }
}

struct Writing {
    access: Access,
    /// Kept from one event to the next, so that they share a connection.
    client: Option<Client>,
    node: String,
    attempts: BTreeMap<ObjectEvent, Attempt>,
    occurrences: Occurrences,
    reporter: Reporter,
}

impl Writing {
    /// Writes one event after the other.
    async fn run(
        mut self,
        mut wanted: watch::Receiver<Wanted>,
        mut queue: mpsc::Receiver<ObjectEvent>,
    ) {
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
            let kept = self.attempts.iter().min_by_key(|(_, attempt)| attempt.at);
            let kept = kept.map(|(event, attempt)| (event.clone(), attempt.at));
            let occurred = self.occurrences.next();
            let occurred = occurred.map(|(at, event)| (event.clone(), at));
            tokio::select! {
                changed = wanted.changed() => match changed {
                    Ok(()) => {}
                    Err(_) => return,
                },
                Some(event) = queue.recv() => {
                    self.occurrences.note(event, Instant::now(), Timestamp::now());
                }
                event = due(kept) => {
                    let written = self.write_kept(&event).await;
                    self.note_kept(event, written, RENEWAL + scatter());
                }
                event = due(occurred) => self.write_occurred(&event).await,
            }
        }
    }

    /// Plans the next attempt for an event that should exist.
    fn note_kept(&mut self, event: ObjectEvent, written: Result<(), String>, renewal: Duration) {
        let Err(error) = written else {
            self.reporter.succeeded();
            self.attempts.insert(event, Attempt::after(renewal));
            return;
        };
        let attempt = self.attempts.get_mut(&event);
        let is_first = attempt.is_some_and(|attempt| attempt.retry(Instant::now()));
        self.note_failure(&event, &error, is_first);
    }

    fn note_failure(&mut self, event: &ObjectEvent, error: &str, is_first: bool) {
        self.reporter.failed(error);
        // The next attempt reads the credentials again.
        self.client = None;
        if is_first {
            tracing::warn!(
                object = event.name,
                error,
                "cannot write an event; trying again"
            );
        }
    }

    /// The events of an event's namespace in the API server.
    async fn events(&mut self, event: &ObjectEvent) -> Result<Api<DynamicObject>, String> {
        let client = match &self.client {
            Some(client) => client.clone(),
            None => {
                let client = self.access.client(watch::Sender::default()).await;
                let client = client.map_err(|error| error.to_string())?;
                self.client.insert(client).clone()
            }
        };
        let namespace = event.namespace.as_deref().unwrap_or(CLUSTER_NAMESPACE);
        Ok(Api::namespaced_with(client, namespace, &event_kind()))
    }

    /// Writes an event that should exist, unless another agent has written the same one.
    async fn write_kept(&mut self, event: &ObjectEvent) -> Result<(), String> {
        let events = self.events(event).await?;
        let now = Timestamp::now();
        let object = self.object(event, &event_name(event, &()), (now, now, 1));
        create(&events, &object).await
    }

    /// Writes an event that has occurred, and plans the next attempt.
    async fn write_occurred(&mut self, event: &ObjectEvent) {
        let Some(occurred) = self.occurrences.get(event) else {
            return;
        };
        match self.write_count(event, &occurred).await {
            Ok(written) => {
                self.reporter.succeeded();
                let now = Instant::now();
                self.occurrences.note_written(event, written, now);
            }
            Err(error) => {
                let is_first = self.occurrences.note_failed(event, Instant::now());
                self.note_failure(event, &error, is_first);
            }
        }
    }

    /// Writes how often an event has occurred. Returns the count in the API server, which is 0 if it has forgotten the
    /// object.
    async fn write_count(
        &mut self,
        event: &ObjectEvent,
        occurred: &Occurred,
    ) -> Result<u32, String> {
        let events = self.events(event).await?;
        let Occurred {
            series,
            last,
            count,
            written,
            ..
        } = occurred;
        let name = event_name(event, &(&self.node, series));
        if *written == 0 {
            let object = self.object(event, &name, (*series, *last, *count));
            create(&events, &object).await?;
            return Ok(*count);
        }
        let patch = json!({ "count": count, "lastTimestamp": format!("{last:.0}") });
        let patched = events
            .patch(&name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        match patched {
            Ok(_) => Ok(*count),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(0),
            Err(error) => Err(access::reason(&error)),
        }
    }

    fn object(
        &self,
        event: &ObjectEvent,
        name: &str,
        (first, last, count): (Timestamp, Timestamp, u32),
    ) -> DynamicObject {
        let mut message = event.message.clone();
        message.truncate(message.floor_char_boundary(MESSAGE_MAX));
        DynamicObject::new(name, &event_kind()).data(json!({
            "involvedObject": {
                "apiVersion": event.api_version,
                "kind": event.kind,
                "namespace": event.namespace,
                "name": event.name,
                "uid": event.uid,
                "fieldPath": event.field_path,
            },
            "reason": event.reason,
            "message": message,
            "type": event.event_type.text(),
            "source": { "component": COMPONENT, "host": self.node },
            "reportingComponent": COMPONENT,
            "reportingInstance": self.node,
            "firstTimestamp": format!("{first:.0}"),
            "lastTimestamp": format!("{last:.0}"),
            "count": count,
        }))
    }
}

fn event_kind() -> ApiResource {
    ApiResource::erase::<Event>(&())
}

/// Creates an event, unless there is one of that name.
async fn create(events: &Api<DynamicObject>, event: &DynamicObject) -> Result<(), String> {
    match events.create(&PostParams::default(), event).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(access::reason(&error)),
    }
}

/// Waits until an event is due; forever without one.
async fn due(next: Option<(ObjectEvent, Instant)>) -> ObjectEvent {
    match next {
        Some((event, at)) => {
            sleep_until(at).await;
            event
        }
        None => std::future::pending().await,
    }
}

/// Derives the event's name from its contents and `series`. All agents derive the same name from the same contents,
/// so that the API server has one event for all.
fn event_name(event: &ObjectEvent, series: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    event.hash(&mut hasher);
    series.hash(&mut hasher);
    let name = &event.name;
    let name = &name[..name.floor_char_boundary(OBJECT_NAME_MAX)];
    format!("{name}.{:016x}", hasher.finish())
}
