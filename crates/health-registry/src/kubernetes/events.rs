//! Writes events about objects, as `kubectl describe` and `kubectl get events` show them.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ApiResource, DynamicObject, PostParams};
use serde_json::json;
use tokio::sync::Notify;

use super::access::{self, Access, AccessError};

/// Namespace of events about objects that have none, as for Kubernetes' own controllers.
const CLUSTER_NAMESPACE: &str = "default";
/// The component that events name as their source.
const COMPONENT: &str = "health-agent";
/// Maximum length in bytes of the object's name in an event's name, which may have 253 bytes.
const OBJECT_NAME_MAX: usize = 230;
/// Maximum length of an event's message in bytes, which the API server enforces.
const MESSAGE_MAX: usize = 1024;

/// An event about an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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

/// Writes events to a cluster's API server.
#[derive(Clone, Debug)]
pub struct EventWriter {
    access: Access,
    /// Node that events name as their source.
    node: String,
}

impl EventWriter {
    /// Uses the kubeconfig at the given path, else the service account of this process's pod, else the environment's
    /// kubeconfig. Fails if there are no credentials.
    pub fn open(kubeconfig: Option<&Path>, node: &str) -> Result<Self, AccessError> {
        Ok(Self {
            access: Access::find(kubeconfig)?,
            node: node.to_owned(),
        })
    }

    /// Writes a warning, unless another agent has written the same one. Returns why it could not be written.
    pub async fn warn(&self, event: &ObjectEvent, now: Timestamp) -> Result<(), String> {
        let client = self.access.client(Arc::new(Notify::new())).await;
        let client = client.map_err(|error| error.to_string())?;
        let namespace = event.namespace.as_deref().unwrap_or(CLUSTER_NAMESPACE);
        let kind = ApiResource::erase::<Event>(&());
        let events: Api<DynamicObject> = Api::namespaced_with(client, namespace, &kind);
        let event = self.object(event, &kind, now);
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
