//! Follows the cluster's Node objects, and says how well it does.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::api::{Api, ApiResource};
use kube::runtime::watcher::{self, Event};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::client::{self, Access, AccessError};
use super::object::{NodeObject, Record, SELECTOR};
use super::view::{EmptyList, View};
use crate::nodes::backoff::Backoff;
use crate::nodes::{LastHeard, Node, NodeSet, SourceState, Staleness};

/// Objects in a page of a list: some megabytes of text, which is what a list costs in memory.
const PAGE_SIZE: u32 = 200;
/// Range of the time after which the server ends a watch and the agent begins the next one. Random,
/// so that agents which came back together do not come together again.
const WATCH_SECS: std::ops::Range<u32> = 240..300;
/// A watch that was accepted and goes well for this long is taken for a good one.
const SETTLED: Duration = Duration::from_millis(500);
/// Changes are collected for this long: nodes come and go by the hundred.
const COLLECT: Duration = Duration::from_millis(100);

/// This node's name, and where the addresses go that its object is annotated with.
pub(super) type OwnObject = (String, watch::Sender<Option<Vec<String>>>);

/// Keeps the node set.
pub(super) struct Follower {
    access: Access,
    cluster: String,
    own: Option<OwnObject>,
    view: View,
    state: SourceState,
    sender: watch::Sender<Arc<NodeSet>>,
    backoff: Backoff,
}

/// Why the set is not known to be right.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Empty(#[from] EmptyList),
    #[error("cannot list nodes: {0}")]
    List(String),
    #[error("cannot watch nodes: {0}")]
    Watch(String),
}

impl Follower {
    /// With a set that is empty, and stale until the first answer.
    pub(super) fn new(
        access: Access,
        registry: String,
        cluster: String,
        own: Option<OwnObject>,
    ) -> (Self, watch::Receiver<Arc<NodeSet>>) {
        let heard = LastHeard::now();
        let state = SourceState {
            registry,
            cluster: cluster.clone(),
            stale: Some(Staleness {
                since: heard.time(),
                reason: "no answer of the API server yet".to_owned(),
            }),
            heard,
            rejected: Vec::new(),
        };
        let set = NodeSet {
            nodes: Vec::new(),
            sources: vec![state.clone()],
        };
        let (sender, receiver) = watch::channel(Arc::new(set));
        let follower = Self {
            access,
            cluster,
            own,
            view: View::default(),
            state,
            sender,
            backoff: Backoff::default(),
        };
        (follower, receiver)
    }

    /// Goes on until it is dropped.
    pub(super) async fn run(mut self) {
        loop {
            let watched = Arc::new(Notify::new());
            match self.access.client(watched.clone()).await {
                Ok(client) => {
                    let nodes = Api::all_with(
                        client,
                        &ApiResource::erase::<k8s_openapi::api::core::v1::Node>(&()),
                    );
                    self.follow(nodes, &watched).await;
                }
                Err(error) => self.fail(&error.into()),
            }
            self.pause().await;
        }
    }

    /// Returns when it must begin anew, with credentials that are read again and another list.
    async fn follow(&mut self, nodes: Api<NodeObject>, watched: &Notify) {
        let config = watcher::Config::default()
            .labels(SELECTOR)
            .page_size(PAGE_SIZE)
            .timeout(rand::random_range(WATCH_SECS));
        let mut events = pin!(watcher::watcher(nodes, config));
        let mut settled_at = None;
        let mut publish_at = None;
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => match self.take(event) {
                        Ok(Effect::None) => {}
                        Ok(Effect::Change) => {
                            publish_at.get_or_insert_with(|| Instant::now() + COLLECT);
                        }
                        Err(error) => return self.fail(&error.into()),
                    },
                    Some(Err(error)) => {
                        settled_at = None;
                        if publish_at.take().is_some() {
                            self.publish();
                        }
                        if let Some(failure) = failure(&error) {
                            self.fail(&failure);
                        }
                        if must_begin_anew(&error) {
                            return;
                        }
                        self.pause().await;
                    }
                    None => return,
                },
                () = watched.notified() => settled_at = Some(Instant::now() + SETTLED),
                () = at(settled_at) => {
                    settled_at = None;
                    self.backoff.reset();
                    self.recover();
                }
                () = at(publish_at) => {
                    publish_at = None;
                    self.publish();
                }
            }
        }
    }

    fn take(&mut self, event: Event<NodeObject>) -> Result<Effect, EmptyList> {
        let changed = match event {
            Event::Init => {
                self.view.begin_list();
                false
            }
            Event::InitApply(object) => {
                self.view.list(object.into());
                false
            }
            Event::InitDone => {
                self.view.end_list()?;
                self.note_own();
                // Nodes first, so that nobody sees a set that is neither complete nor stale.
                self.publish();
                self.recover();
                false
            }
            Event::Apply(object) => {
                self.state.heard.note();
                self.view.apply(object.into())
            }
            Event::Delete(object) => {
                self.state.heard.note();
                self.view.delete(Record::from(object).name())
            }
        };
        if !changed {
            return Ok(Effect::None);
        }
        self.note_own();
        Ok(Effect::Change)
    }

    /// Tells the publisher what this node's object is annotated with.
    fn note_own(&self) {
        let Some((name, seen)) = &self.own else {
            return;
        };
        let own = self.view.get(name);
        let annotated = own.map(|own| own.health_addresses().to_vec());
        seen.send_if_modified(|seen| {
            let differs = *seen != annotated;
            *seen = annotated;
            differs
        });
    }

    fn fail(&mut self, failure: &Failure) {
        let reason = failure.to_string();
        let before = self.state.stale.as_ref();
        if before.is_some_and(|stale| stale.reason == reason) {
            return;
        }
        tracing::warn!(
            registry = self.state.registry,
            cluster = self.cluster,
            reason,
            "nodes are not up to date; the last good set stands"
        );
        if before.is_none() {
            // A list or watch that breaks off is noticed at once; a dead host, within the keepalive.
            self.state.heard.note();
        }
        let since = self.state.heard.time();
        self.state.stale = Some(Staleness { since, reason });
        let nodes = self.sender.borrow().nodes.clone();
        self.send(nodes);
    }

    fn recover(&mut self) {
        self.state.heard.note();
        if self.state.stale.take().is_some() {
            let nodes = self.sender.borrow().nodes.clone();
            tracing::info!(
                registry = self.state.registry,
                cluster = self.cluster,
                nodes = nodes.len(),
                "nodes are up to date"
            );
            self.send(nodes);
        }
    }

    fn publish(&mut self) {
        let (nodes, rejected) = self.view.nodes(&self.cluster);
        for new in rejected
            .iter()
            .filter(|new| !self.state.rejected.contains(new))
        {
            tracing::warn!(
                registry = self.state.registry,
                node = new.key,
                reason = new.reason,
                "a node is left out"
            );
        }
        self.state.rejected = rejected;
        self.send(nodes);
    }

    fn send(&self, nodes: Vec<Node>) {
        let next = NodeSet {
            nodes,
            sources: vec![self.state.clone()],
        };
        self.sender.send_if_modified(|set| {
            let differs = **set != next;
            if differs {
                *set = Arc::new(next);
            }
            differs
        });
    }

    async fn pause(&mut self) {
        sleep(self.backoff.pause(rand::random())).await;
    }
}

/// What follows from an event.
enum Effect {
    None,
    /// The set may differ.
    Change,
}

/// Never, where there is no time.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// What an error says about the set. Nothing, when the server no longer keeps the changes since the
/// last one that we know: a list follows.
fn failure(error: &watcher::Error) -> Option<Failure> {
    use watcher::Error::{
        InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed,
    };
    match error {
        InitialListFailed(source) => Some(Failure::List(client::reason(source))),
        error if is_gone(error) => None,
        WatchStartFailed(source) | WatchFailed(source) => {
            Some(Failure::Watch(client::reason(source)))
        }
        WatchError(status) => Some(Failure::Watch(client::line(&status.to_string()))),
        NoResourceVersion => Some(Failure::Watch(
            "the answer has no resource version".to_owned(),
        )),
    }
}

fn is_gone(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchError(status) => status.code == 410,
        watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 410,
        _ => false,
    }
}

/// The watcher lists again when its watch is told that it is too old, but not when it is refused for
/// that; and it keeps the credentials that it has.
fn must_begin_anew(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    match error {
        InitialListFailed(kube::Error::Api(status)) => status.code == 401,
        WatchStartFailed(kube::Error::Api(status)) => matches!(status.code, 401 | 410),
        InitialListFailed(kube::Error::Auth(_)) | WatchStartFailed(kube::Error::Auth(_)) => true,
        _ => false,
    }
}
