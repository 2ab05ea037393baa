//! Follows the objects of one kind, and says how well it does.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::Client;
use kube::api::Api;
use kube::runtime::watcher::{self, Event};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};

use super::access::{self, Access};
use crate::nodes::backoff::Backoff;
use crate::nodes::{LastHeard, Staleness};

/// Objects in a page of a list: some megabytes of text, which is what a list costs in memory.
const PAGE_SIZE: u32 = 200;
/// Range of the time after which the server ends a watch and the agent begins the next one. Random,
/// so that agents which came back together do not come together again.
const WATCH_SECS: std::ops::Range<u32> = 240..300;
/// A watch that was accepted and goes well for this long is taken for a good one.
const SETTLED: Duration = Duration::from_millis(500);
/// A change is shown at once, and those that come within this time after it are collected: objects come and go by the
/// hundred.
const COLLECT: Duration = Duration::from_millis(100);

/// What is kept of the objects, and shown to others.
pub(crate) trait Kept: Send {
    /// An object as it is read.
    type Object: Clone + Debug + DeserializeOwned + Send + 'static;

    /// What the API calls them all: `nodes`.
    fn resource(&self) -> &'static str;
    /// Where they are, and which of them are wanted: a label selector or a field selector.
    fn api(&self, client: Client) -> Api<Self::Object>;
    /// Sets the selectors.
    fn select(&self, config: watcher::Config) -> watcher::Config;

    /// A list begins.
    fn begin_list(&mut self);
    /// Takes an object of a list.
    fn list(&mut self, object: Self::Object);
    /// The list is complete. Fails if it cannot be right: what was known stays.
    fn end_list(&mut self) -> Result<(), String>;
    /// Takes a new or changed object. Tells whether what is shown may differ.
    fn apply(&mut self, object: Self::Object) -> bool;
    /// Forgets an object. Tells whether what is shown may differ.
    fn delete(&mut self, object: Self::Object) -> bool;
    /// Shows what is known.
    fn publish(&mut self);
    /// Shows since when and why what is known may no longer be right, or that it is.
    fn set_stale(&mut self, stale: Option<Staleness>);
}

/// Keeps what is known of the objects right.
pub(crate) struct Follower<K> {
    access: Access,
    kept: K,
    heard: LastHeard,
    stale: Option<Staleness>,
    backoff: Backoff,
}

/// What holds before the first answer.
pub(crate) fn unheard(heard: &LastHeard) -> Staleness {
    Staleness {
        since: heard.time(),
        reason: "no answer of the API server yet".to_owned(),
    }
}

impl<K: Kept> Follower<K>
where
    K::Object: kube::Resource,
{
    /// `kept` is [`unheard`] of so far, and shows so.
    pub(crate) fn new(access: Access, heard: LastHeard, kept: K) -> Self {
        Self {
            access,
            kept,
            stale: Some(unheard(&heard)),
            heard,
            backoff: Backoff::default(),
        }
    }

    /// Goes on until it is dropped.
    pub(crate) async fn run(mut self) {
        loop {
            let watched = Arc::new(Notify::new());
            match self.access.client(watched.clone()).await {
                Ok(client) => {
                    let api = self.kept.api(client);
                    self.follow(api, &watched).await;
                }
                Err(error) => self.fail(error.to_string()),
            }
            self.pause().await;
        }
    }

    /// Returns when it must begin anew, with credentials that are read again and another list.
    async fn follow(&mut self, api: Api<K::Object>, watched: &Notify) {
        let config = watcher::Config::default()
            .page_size(PAGE_SIZE)
            .timeout(rand::random_range(WATCH_SECS));
        let mut events = pin!(watcher::watcher(api, self.kept.select(config)));
        let mut settled_at = None;
        let mut publish_at = None;
        let mut next_turn = Instant::now();
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => match self.take(event) {
                        Ok(Effect::None) => {}
                        Ok(Effect::Change) => {
                            publish_at.get_or_insert_with(|| next_turn.max(Instant::now()));
                        }
                        Err(reason) => return self.fail(reason),
                    },
                    Some(Err(error)) => {
                        settled_at = None;
                        if publish_at.take().is_some() {
                            self.kept.publish();
                        }
                        if let Some(reason) = failure(&error, self.kept.resource()) {
                            self.fail(reason);
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
                    self.kept.publish();
                    next_turn = Instant::now() + COLLECT;
                }
            }
        }
    }

    fn take(&mut self, event: Event<K::Object>) -> Result<Effect, String> {
        let changed = match event {
            Event::Init => {
                self.kept.begin_list();
                false
            }
            Event::InitApply(object) => {
                self.kept.list(object);
                false
            }
            Event::InitDone => {
                self.kept.end_list()?;
                // Objects first, so that nobody sees a set that is neither complete nor stale.
                self.kept.publish();
                self.recover();
                false
            }
            Event::Apply(object) => {
                self.heard.note();
                self.kept.apply(object)
            }
            Event::Delete(object) => {
                self.heard.note();
                self.kept.delete(object)
            }
        };
        Ok(match changed {
            true => Effect::Change,
            false => Effect::None,
        })
    }

    fn fail(&mut self, reason: String) {
        if self
            .stale
            .as_ref()
            .is_some_and(|stale| stale.reason == reason)
        {
            return;
        }
        if self.stale.is_none() {
            // A list or watch that breaks off is noticed at once; a dead host, within the keepalive.
            self.heard.note();
        }
        let since = self.heard.time();
        let stale = Staleness { since, reason };
        self.stale = Some(stale.clone());
        self.kept.set_stale(Some(stale));
    }

    fn recover(&mut self) {
        self.heard.note();
        if self.stale.take().is_some() {
            self.kept.set_stale(None);
        }
    }

    async fn pause(&mut self) {
        sleep(self.backoff.pause(rand::random())).await;
    }
}

/// What follows from an event.
enum Effect {
    None,
    /// What is shown may differ.
    Change,
}

/// Never, where there is no time.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// What an error says about what is known. Nothing, when the server no longer keeps the changes
/// since the last one that we know: a list follows.
fn failure(error: &watcher::Error, resource: &str) -> Option<String> {
    use watcher::Error::{
        InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed,
    };
    let cannot_watch = |reason: &str| format!("cannot watch {resource}: {reason}");
    match error {
        InitialListFailed(source) => Some(format!(
            "cannot list {resource}: {}",
            access::reason(source)
        )),
        error if is_gone(error) => None,
        WatchStartFailed(source) | WatchFailed(source) => {
            Some(cannot_watch(&access::reason(source)))
        }
        WatchError(status) => Some(cannot_watch(&access::line(&status.to_string()))),
        NoResourceVersion => Some(cannot_watch("the answer has no resource version")),
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
