//! The objects of one kind, as the cluster's API server reports them.

use std::sync::Arc;
use std::time::Duration;

use health_model::activity::Controller;
use imbl::OrdMap;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::watcher;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::access::Access;
use super::follow::{Follower, Kept, unheard};
use crate::nodes::{LastHeard, Staleness};

/// How long a server must lack a kind of object before the known objects of that kind count as gone. A server that has
/// just started may not know its definitions yet.
const LACKING: Duration = Duration::from_secs(60);
/// How often in a row a server must answer that it lacks a kind before that counts at all.
const LACKING_ANSWERS: u32 = 3;

/// The objects of one kind.
#[derive(Debug, PartialEq)]
pub struct ObjectTable<T> {
    /// The objects as converted by `read`, by `NAMESPACE/NAME`, or by name if they have no namespace.
    pub objects: OrdMap<String, Arc<T>>,
    /// Since when the objects may be outdated, and why. They show the state at that time.
    pub stale: Option<Staleness>,
    /// Whether there was a complete listing. If so, an object that is not in the table does not exist.
    pub is_complete: bool,
    /// Set while the server answers that it does not have this kind of object. The table then has none.
    pub lacking: Option<Lacking>,
}

/// The answers of a server that does not have a kind of object, one after the other. An outage ends them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lacking {
    answers: u32,
    first: Instant,
    last: Instant,
}

impl Lacking {
    /// Adds an answer to those `before` it.
    fn after(before: Option<Self>) -> Self {
        let now = Instant::now();
        Self {
            answers: before.map_or(0, |before| before.answers).saturating_add(1),
            first: before.map_or(now, |before| before.first),
            last: now,
        }
    }

    fn is_sure(&self) -> bool {
        self.answers >= LACKING_ANSWERS
    }
}

impl<T> ObjectTable<T> {
    /// Whether an object that is not in the table does not exist: after a complete listing, or after several answers in
    /// a row that the server lacks the kind. If objects are known from earlier, as `has_former` tells, the last of these
    /// answers must come a minute after the first.
    pub fn has_all(&self, has_former: impl FnOnce() -> bool) -> bool {
        let is_lacking = self.lacking.is_some_and(|lacking| {
            lacking.is_sure() && (lacking.last - lacking.first >= LACKING || !has_former())
        });
        self.is_complete || is_lacking
    }
}

impl<T> Clone for ObjectTable<T> {
    fn clone(&self) -> Self {
        Self {
            objects: self.objects.clone(),
            stale: self.stale.clone(),
            is_complete: self.is_complete,
            lacking: self.lacking,
        }
    }
}

/// Which objects to follow.
#[derive(Clone)]
pub(super) struct Scope {
    /// The resource name of the objects in the API: `pods`.
    pub(super) resource: &'static str,
    /// Kind and version.
    pub(super) kind: ApiResource,
    /// Label selector.
    pub(super) labels: Option<String>,
    /// Field selector.
    pub(super) fields: Option<String>,
    /// What a listing without any object says.
    pub(super) empty: Empty,
    /// Whether a server may lack the kind itself.
    pub(super) is_optional: bool,
}

/// What a listing without any object says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Empty {
    /// That there are none.
    Believed,
    /// That there are none, if the server has namespaces. Otherwise it has lost its store.
    Checked,
    /// That the server has lost its store.
    Lost,
}

/// Follows the objects of one kind. Dropping it ends the watch.
#[derive(Debug)]
pub struct ObjectWatch<T> {
    table: watch::Receiver<Arc<ObjectTable<T>>>,
    controller: Controller,
    task: JoinHandle<()>,
}

impl<T: PartialEq + Send + Sync + 'static> ObjectWatch<T> {
    /// Starts to follow objects. `read` converts an object to the form that is kept; it is also passed the previous
    /// result for the object of that name.
    pub(super) fn start(
        access: Access,
        scope: Scope,
        read: impl FnMut(Value, Option<&T>) -> T + Send + 'static,
    ) -> Self {
        let heard = LastHeard::now();
        let name = format!("kubernetes-{}", scope.resource);
        let table = ObjectTable {
            objects: OrdMap::new(),
            stale: Some(unheard(&heard)),
            is_complete: false,
            lacking: None,
        };
        let (sender, receiver) = watch::channel(Arc::new(table.clone()));
        let kept = KeptObjects {
            scope,
            read,
            table,
            listed: OrdMap::new(),
            is_reported: false,
            sender,
        };
        let follower = Follower::new(access, heard, kept);
        Self {
            table: receiver,
            controller: Controller::new(name, follower.activity()),
            task: tokio::spawn(follower.run()),
        }
    }

    /// Follows the objects: first the current ones, then every change.
    pub fn table(&self) -> watch::Receiver<Arc<ObjectTable<T>>> {
        self.table.clone()
    }

    /// What is known about the watch itself.
    pub fn controller(&self) -> Controller {
        self.controller.clone()
    }
}

impl<T> Drop for ObjectWatch<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct KeptObjects<T, R> {
    scope: Scope,
    read: R,
    table: ObjectTable<T>,
    /// The objects of a listing that is not complete yet.
    listed: OrdMap<String, Arc<T>>,
    /// Whether it was logged that the objects are outdated.
    is_reported: bool,
    sender: watch::Sender<Arc<ObjectTable<T>>>,
}

impl<T, R: FnMut(Value, Option<&T>) -> T> KeptObjects<T, R> {
    fn read(&mut self, object: DynamicObject) -> (String, T) {
        let key = key(&object);
        let before = self.table.objects.get(&key).map(Arc::as_ref);
        let read = (self.read)(value(object, &self.scope.kind), before);
        (key, read)
    }
}

impl<T, R> Kept for KeptObjects<T, R>
where
    T: PartialEq + Send + Sync,
    R: FnMut(Value, Option<&T>) -> T + Send,
{
    type Object = DynamicObject;

    fn resource(&self) -> &'static str {
        self.scope.resource
    }

    fn api(&self, client: Client) -> Api<DynamicObject> {
        Api::all_with(client, &self.scope.kind)
    }

    fn select(&self, mut config: watcher::Config) -> watcher::Config {
        if let Some(labels) = &self.scope.labels {
            config = config.labels(labels);
        }
        if let Some(fields) = &self.scope.fields {
            config = config.fields(fields);
        }
        config
    }

    fn is_doubtful(&self) -> bool {
        self.listed.is_empty() && self.scope.empty == Empty::Checked
    }

    fn begin_list(&mut self) {
        self.listed.clear();
    }

    fn list(&mut self, object: DynamicObject) {
        let (key, read) = self.read(object);
        // An unchanged object keeps its allocation.
        let known = self.table.objects.get(&key);
        let known = known.filter(|before| ***before == read).cloned();
        let read = known.unwrap_or_else(|| Arc::new(read));
        self.listed.insert(key, read);
    }

    fn end_list(&mut self) -> Result<(), String> {
        if self.listed.is_empty() && self.scope.empty == Empty::Lost {
            let resource = self.scope.resource;
            return Err(format!(
                "the API server lists no {resource}; its store may have been lost"
            ));
        }
        self.table.objects = std::mem::take(&mut self.listed);
        self.table.is_complete = true;
        self.table.lacking = None;
        Ok(())
    }

    fn apply(&mut self, object: DynamicObject) -> bool {
        let (key, read) = self.read(object);
        let known = self.table.objects.get(&key);
        if known.is_some_and(|before| **before == read) {
            return false;
        }
        self.table.objects.insert(key, Arc::new(read));
        true
    }

    fn delete(&mut self, object: DynamicObject) -> bool {
        self.table.objects.remove(&key(&object)).is_some()
    }

    fn publish(&mut self) {
        let next = Arc::new(self.table.clone());
        self.sender.send_if_modified(|table| {
            let differs = **table != *next;
            if differs {
                *table = next;
            }
            differs
        });
    }

    fn set_stale(&mut self, stale: Option<Staleness>) {
        let resource = self.scope.resource;
        match &stale {
            Some(stale) if !self.is_reported => {
                self.is_reported = true;
                tracing::warn!(
                    reason = stale.reason,
                    "Kubernetes {resource} are not up to date; keeping the last known ones"
                );
            }
            Some(_) => {}
            None => {
                self.is_reported = false;
                let count = self.table.objects.len();
                tracing::info!(count, "Kubernetes {resource} are up to date");
            }
        }
        if stale.is_some() {
            self.table.lacking = None;
        }
        self.table.stale = stale;
        self.publish();
    }

    fn is_optional(&self) -> bool {
        self.scope.is_optional
    }

    fn set_lacking(&mut self) -> bool {
        if self.table.lacking.is_none() {
            let resource = self.scope.resource;
            tracing::info!("the Kubernetes API server has no {resource}");
            self.is_reported = false;
            self.table.objects.clear();
            self.table.is_complete = false;
            self.table.stale = None;
        }
        let lacking = Lacking::after(self.table.lacking);
        self.table.lacking = Some(lacking);
        self.publish();
        lacking.is_sure()
    }
}

fn key(object: &DynamicObject) -> String {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    match &object.metadata.namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

/// Returns the object as in the API, without the metadata that only the API needs.
fn value(object: DynamicObject, kind: &ApiResource) -> Value {
    let DynamicObject {
        metadata, mut data, ..
    } = object;
    data["apiVersion"] = kind.api_version.as_str().into();
    data["kind"] = kind.kind.as_str().into();
    data["metadata"] = json!({
        "name": metadata.name,
        "namespace": metadata.namespace,
        "uid": metadata.uid,
        "labels": metadata.labels,
        "annotations": metadata.annotations,
        "creationTimestamp": metadata.creation_timestamp,
        "deletionTimestamp": metadata.deletion_timestamp,
    });
    data
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::networking::v1::NetworkPolicy;

    use super::*;

    fn kept() -> KeptObjects<(), fn(Value, Option<&()>)> {
        let table = ObjectTable {
            objects: OrdMap::new(),
            stale: Some(unheard(&LastHeard::now())),
            is_complete: false,
            lacking: None,
        };
        KeptObjects {
            scope: Scope {
                resource: "policies",
                kind: ApiResource::erase::<NetworkPolicy>(&()),
                labels: None,
                fields: None,
                empty: Empty::Checked,
                is_optional: true,
            },
            read: |_, _| (),
            sender: watch::Sender::new(Arc::new(table.clone())),
            table,
            listed: OrdMap::new(),
            is_reported: false,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_is_not_lacking_before_the_server_has_said_so_several_times() {
        let mut kept = kept();
        for _ in 0..2 {
            assert!(!kept.set_lacking());
            assert!(!kept.table.has_all(|| false));
        }
        assert!(kept.set_lacking());
        assert!(kept.table.has_all(|| false) && !kept.table.has_all(|| true));
        tokio::time::advance(LACKING).await;
        assert!(!kept.table.has_all(|| true), "nobody has asked again");
        kept.set_lacking();
        assert!(kept.table.has_all(|| true));
        kept.end_list().unwrap();
        assert_eq!(kept.table.lacking, None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_does_not_count_as_time_without_a_kind() {
        let mut kept = kept();
        for _ in 0..3 {
            kept.set_lacking();
        }
        tokio::time::advance(LACKING / 2).await;
        kept.set_stale(Some(unheard(&LastHeard::now())));
        tokio::time::advance(LACKING).await;
        assert!(!kept.table.has_all(|| false) && !kept.table.has_all(|| true));
        for _ in 0..3 {
            kept.set_lacking();
        }
        assert!(!kept.table.has_all(|| true));
        tokio::time::advance(LACKING).await;
        kept.set_lacking();
        assert!(kept.table.has_all(|| true));
    }
}
