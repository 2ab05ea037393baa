//! Follows the objects of one kind, and reports problems.

use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use health_model::activity::{self, Activity, Reporter};
use k8s_openapi::api::core::v1::Namespace;
use kube::Client;
use kube::api::{Api, ListParams};
use kube::runtime::watcher::{self, Event};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::access::{self, Access};
use crate::backoff::Backoff;
use crate::nodes::{LastHeard, Staleness};

/// Objects per page of a listing. A page is some megabytes of JSON, which determines the memory cost of a listing. If a
/// page of large objects is too long, later ones have half as many objects.
const PAGE_SIZE: u32 = 200;
/// Range of the time after which the server ends a watch and the agent starts the next one. Random, so that agents
/// whose watches started together do not keep restarting them together.
const WATCH_SECS: std::ops::Range<u32> = 240..300;
/// Range of the pause before the next look for a kind of object that the server does not have. Each of a thousand
/// agents looks on its own.
const LACKING_SECS: std::ops::Range<u64> = 20..30;
/// The pause while the server has not answered often enough that it does not have the kind.
const UNSURE_LACKING: Duration = Duration::from_secs(2);
/// An accepted watch that runs this long without an error counts as good.
const SETTLED: Duration = Duration::from_millis(500);
/// The first change is published immediately; changes within this time after it are batched, because objects come and
/// go by the hundred.
const COLLECT: Duration = Duration::from_millis(100);

/// The state kept of the objects and published.
pub(crate) trait Kept: Send {
    /// An object as read from the API.
    type Object: Clone + Debug + DeserializeOwned + Send + 'static;

    /// The resource name of the objects in the API: `nodes`.
    fn resource(&self) -> &'static str;
    /// The API that serves the objects.
    fn api(&self, client: Client) -> Api<Self::Object>;
    /// Sets the label selector or field selector of the wanted objects.
    fn select(&self, config: watcher::Config) -> watcher::Config;

    /// Whether the listing so far is only believed of a server that has namespaces. Asked before [`Self::end_list`].
    fn is_doubtful(&self) -> bool {
        false
    }
    /// Starts a listing.
    fn begin_list(&mut self);
    /// Adds an object of a listing.
    fn list(&mut self, object: Self::Object);
    /// Completes a listing. Fails if the listing cannot be correct; the known state then stays.
    fn end_list(&mut self) -> Result<(), String>;
    /// Records a new or changed object. Returns whether the published state may differ.
    fn apply(&mut self, object: Self::Object) -> bool;
    /// Removes an object. Returns whether the published state may differ.
    fn delete(&mut self, object: Self::Object) -> bool;
    /// Publishes the known state.
    fn publish(&mut self);
    /// Publishes since when and why the known state may be outdated, or that it is up to date.
    fn set_stale(&mut self, stale: Option<Staleness>);
    /// Whether a server may lack this kind of object.
    fn is_optional(&self) -> bool {
        false
    }
    /// Publishes that the server does not have this kind of object. Called only if [`Self::is_optional`]. Returns
    /// whether the server has answered this often enough to count.
    fn set_lacking(&mut self) -> bool {
        true
    }
    /// Receives a revision that was seen if an answer to a request has an older one.
    fn doubts(&self) -> watch::Receiver<Option<u64>> {
        watch::Sender::default().subscribe()
    }
}

/// Keeps the known state of the objects up to date.
pub(crate) struct Follower<K> {
    access: Access,
    kept: K,
    heard: LastHeard,
    stale: Option<Staleness>,
    backoff: Backoff,
    page_size: u32,
    reporter: Reporter,
}

/// The staleness before the first response.
pub(crate) fn unheard(heard: &LastHeard) -> Staleness {
    Staleness {
        since: heard.time(),
        reason: "no answer from the API server yet".to_owned(),
    }
}

impl<K: Kept> Follower<K>
where
    K::Object: kube::Resource,
{
    /// Creates a follower and publishes `kept`, which must be [`unheard`] so far.
    pub(crate) fn new(access: Access, heard: LastHeard, kept: K) -> Self {
        Self {
            access,
            kept,
            stale: Some(unheard(&heard)),
            heard,
            backoff: Backoff::default(),
            page_size: PAGE_SIZE,
            reporter: activity::channel().0,
        }
    }

    /// What is known about the follower's work.
    pub(crate) fn activity(&self) -> Activity {
        self.reporter.activity()
    }

    /// Follows the objects until dropped.
    pub(crate) async fn run(mut self) {
        loop {
            let (sender, watched) = watch::channel(None);
            let end = match self.access.client(sender).await {
                Ok(client) => self.follow(client, watched).await,
                Err(error) => {
                    self.fail(error.to_string());
                    End::Broken
                }
            };
            match end {
                End::Broken => self.pause().await,
                End::LargePages | End::WentBack => {}
                End::Lacking { is_sure: false } => sleep(UNSURE_LACKING).await,
                End::Lacking { is_sure: true } => {
                    sleep(Duration::from_secs(rand::random_range(LACKING_SECS))).await;
                }
            }
        }
    }

    /// Follows the objects. Returns when everything must start over, with newly read credentials and a new listing.
    async fn follow(&mut self, client: Client, mut watched: watch::Receiver<Option<u64>>) -> End {
        let api = self.kept.api(client.clone());
        let mut history = History::new(api.clone(), self.kept.doubts());
        let config = watcher::Config::default()
            .page_size(self.page_size)
            .timeout(rand::random_range(WATCH_SECS));
        let mut events = pin!(watcher::watcher(api, self.kept.select(config)));
        let mut settled_at = None;
        let mut publish_at = None;
        let mut next_turn = Instant::now();
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => match self.take(event, &client).await {
                        Ok(Effect::None) => {}
                        Ok(Effect::List) => history.note_list(),
                        Ok(Effect::Change) => {
                            publish_at.get_or_insert_with(|| next_turn.max(Instant::now()));
                        }
                        Err(reason) => {
                            self.fail(reason);
                            return End::Broken;
                        }
                    },
                    Some(Err(error)) if self.kept.is_optional() && is_unknown_kind(&error) => {
                        self.heard.note();
                        self.stale = None;
                        self.backoff.reset();
                        self.reporter.succeeded();
                        let is_sure = self.kept.set_lacking();
                        return End::Lacking { is_sure };
                    }
                    Some(Err(error)) if self.page_size > 1 && is_too_long(&error) => {
                        self.page_size /= 2;
                        return End::LargePages;
                    }
                    Some(Err(error)) => {
                        settled_at = None;
                        history.interrupt();
                        if publish_at.take().is_some() {
                            self.kept.publish();
                        }
                        if let Some(reason) = failure(&error, self.kept.resource()) {
                            self.fail(reason);
                        }
                        if must_begin_anew(&error) {
                            return End::Broken;
                        }
                        self.pause().await;
                    }
                    None => return End::Broken,
                },
                Ok(()) = watched.changed() => {
                    history.note_watch(*watched.borrow_and_update());
                    settled_at = Some(Instant::now() + SETTLED);
                }
                () = at(settled_at) => {
                    settled_at = None;
                    history.check();
                }
                checked = history.checked() => match self.take_check(checked, settled_at) {
                    Ok(next) => settled_at = next,
                    Err(end) => return end,
                },
                () = at(publish_at) => {
                    publish_at = None;
                    self.kept.publish();
                    next_turn = Instant::now() + COLLECT;
                }
            }
        }
    }

    /// Takes the result of a check of the server's history. Returns the time of the next check, which is
    /// `settled_at` if there will be one anyway.
    fn take_check(
        &mut self,
        checked: Result<Option<String>, kube::Error>,
        settled_at: Option<Instant>,
    ) -> Result<Option<Instant>, End> {
        match checked {
            Ok(Some(reason)) => {
                self.fail(reason);
                return Err(End::WentBack);
            }
            Ok(None) if settled_at.is_none() => {
                self.backoff.reset();
                self.recover();
            }
            Ok(None) => {}
            Err(error) => {
                if self.stale.is_some() {
                    self.fail(cannot_list(&error, self.kept.resource()));
                }
                return Ok(Some(Instant::now() + self.backoff.pause(rand::random())));
            }
        }
        Ok(settled_at)
    }

    async fn take(&mut self, event: Event<K::Object>, client: &Client) -> Result<Effect, String> {
        let is_list = matches!(event, Event::InitDone);
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
                if self.kept.is_doubtful() {
                    check_store(client, self.kept.resource()).await?;
                }
                self.kept.end_list()?;
                // Publish the objects first, so that no reader sees a set that is neither complete nor stale.
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
            false if is_list => Effect::List,
            false => Effect::None,
        })
    }

    fn fail(&mut self, reason: String) {
        self.reporter.failed(&reason);
        if self
            .stale
            .as_ref()
            .is_some_and(|stale| stale.reason == reason)
        {
            return;
        }
        if self.stale.is_none() {
            // A broken listing or watch is noticed immediately, a dead host within the keepalive time.
            self.heard.note();
        }
        let since = self.heard.time();
        let stale = Staleness { since, reason };
        self.stale = Some(stale.clone());
        self.kept.set_stale(Some(stale));
    }

    fn recover(&mut self) {
        self.heard.note();
        self.reporter.succeeded();
        if self.stale.take().is_some() {
            self.kept.set_stale(None);
        }
    }

    async fn pause(&mut self) {
        sleep(self.backoff.pause(rand::random())).await;
    }
}

/// Notices a server whose store was restored from a backup. Such a server accepts a watch from a revision that it
/// has not reached yet, and sends nothing until it has passed that revision.
struct History<K> {
    api: Api<K>,
    /// Revisions that were seen although a later reply has an older one.
    doubts: watch::Receiver<Option<u64>>,
    /// Whether a listing was the last news: the next watch begins with its revision.
    is_listed: bool,
    /// Whether a watch runs.
    is_watching: bool,
    /// The revision that the server must have reached.
    reached: Option<u64>,
    asked: Option<BoxFuture<'static, Result<Option<u64>, kube::Error>>>,
}

impl<K> History<K>
where
    K: Clone + Debug + DeserializeOwned + Send + 'static,
{
    const fn new(api: Api<K>, doubts: watch::Receiver<Option<u64>>) -> Self {
        Self {
            api,
            doubts,
            is_listed: false,
            is_watching: false,
            reached: None,
            asked: None,
        }
    }

    /// Notes that a listing is complete.
    fn note_list(&mut self) {
        self.is_listed = true;
        self.reached = None;
    }

    /// Notes that the server accepts a watch from a revision on.
    fn note_watch(&mut self, revision: Option<u64>) {
        self.is_watching = true;
        let is_from_list = std::mem::take(&mut self.is_listed);
        self.reached = revision.filter(|_| !is_from_list).max(self.reached);
    }

    /// Notes that the connection broke.
    fn interrupt(&mut self) {
        self.is_listed = false;
        self.is_watching = false;
        self.asked = None;
    }

    /// Begins to check the server's revision. If there is none to compare with, [`Self::checked`] responds at once.
    fn check(&mut self) {
        let api = self.api.clone();
        let is_needed = self.reached.is_some();
        let latest = async move {
            if !is_needed {
                return Ok(None);
            }
            // Consistent, and one object: the revision is all that matters.
            let listed = api.list_metadata(&ListParams::default().limit(1)).await?;
            let revision = listed.metadata.resource_version;
            Ok(revision.and_then(|revision| revision.parse().ok()))
        };
        self.asked = Some(latest.boxed());
    }

    /// Waits for the end of a check. Returns why the server's history is another one, if it is.
    async fn checked(&mut self) -> Result<Option<String>, kube::Error> {
        loop {
            let latest = tokio::select! {
                latest = answer(&mut self.asked) => latest,
                Ok(()) = self.doubts.changed() => {
                    self.reached = (*self.doubts.borrow_and_update()).max(self.reached);
                    // The next watch is checked anyway.
                    if self.is_watching {
                        self.check();
                    }
                    continue;
                }
            };
            self.asked = None;
            let latest = latest?;
            let reached = self.reached.take();
            let has_gone_back = latest < reached && latest.is_some();
            return Ok(has_gone_back.then(|| {
                let [latest, reached] = [latest, reached].map(Option::unwrap_or_default);
                format!(
                    "the API server's revision went back from {reached} to {latest}: its store was restored"
                )
            }));
        }
    }
}

/// Why following the objects ended.
enum End {
    /// The connection or the answers cannot be used any more.
    Broken,
    /// The pages of the listing were too long.
    LargePages,
    /// The server's store was restored: its history differs from the one seen before.
    WentBack,
    /// The server does not have this kind of object.
    Lacking {
        /// Whether it has answered this often enough.
        is_sure: bool,
    },
}

/// The effect of an event.
enum Effect {
    None,
    /// A listing is complete.
    List,
    /// The published state may differ.
    Change,
}

/// Checks that a server that lists nothing has not lost its store: a cluster always has namespaces.
async fn check_store(client: &Client, resource: &str) -> Result<(), String> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let listed = namespaces
        .list_metadata(&ListParams::default().limit(1))
        .await;
    let listed =
        listed.map_err(|error| format!("cannot list namespaces: {}", access::reason(&error)))?;
    match listed.items.is_empty() {
        false => Ok(()),
        true => Err(format!(
            "the API server lists no {resource} and no namespaces; its store may have been lost"
        )),
    }
}

/// Waits for the end of a request, or forever if there is none.
async fn answer<T>(request: &mut Option<BoxFuture<'static, T>>) -> T {
    match request {
        Some(request) => request.await,
        None => std::future::pending().await,
    }
}

/// Waits until `time`, or forever if there is none.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// The meaning of an error for the known state. `None` if the server no longer has the changes since the last one known
/// here: a new listing follows.
fn failure(error: &watcher::Error, resource: &str) -> Option<String> {
    use watcher::Error::{
        InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed,
    };
    let cannot_watch = |reason: &str| format!("cannot watch {resource}: {reason}");
    match error {
        InitialListFailed(source) => Some(cannot_list(source, resource)),
        error if is_gone(error) => None,
        WatchStartFailed(source) | WatchFailed(source) => {
            let remedy = remedy(source, "watch", resource);
            Some(cannot_watch(&(access::reason(source) + &remedy)))
        }
        WatchError(status) => Some(cannot_watch(&access::line(&status.to_string()))),
        NoResourceVersion => Some(cannot_watch("the answer has no resource version")),
    }
}

fn cannot_list(error: &kube::Error, resource: &str) -> String {
    let remedy = remedy(error, "list", resource);
    format!("cannot list {resource}: {}{remedy}", access::reason(error))
}

/// What to do about an error.
fn remedy(error: &kube::Error, verb: &str, resource: &str) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            format!("; the agent's role must allow `{verb}` on `{resource}`, as in rbac.yaml")
        }
        _ => String::new(),
    }
}

/// Whether a page of a listing has more bytes than are read.
fn is_too_long(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(source) if access::is_too_long(source))
}

/// Whether the server does not know the kind of object: a definition that does not exist, or not yet.
fn is_unknown_kind(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    match error {
        InitialListFailed(kube::Error::Api(status))
        | WatchStartFailed(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}

fn is_gone(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchError(status) => status.code == 410,
        watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 410,
        _ => false,
    }
}

/// Whether to start over with a new watcher. The watcher itself lists again if its watch ends because its resource
/// version is too old, but not if the watch is refused for that reason; and it never reads the credentials again.
fn must_begin_anew(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    match error {
        InitialListFailed(kube::Error::Api(status)) => status.code == 401,
        WatchStartFailed(kube::Error::Api(status)) => matches!(status.code, 401 | 410),
        InitialListFailed(kube::Error::Auth(_)) | WatchStartFailed(kube::Error::Auth(_)) => true,
        _ => false,
    }
}
