//! Identities in a Kubernetes cluster, as objects of two kinds that `deploy/kubernetes/crds.yaml` defines. A
//! `HealthIdentity` maps a number, which is its name, to a label set, so that two agents cannot create the same number.
//! All agents try the same numbers in the same order for a label set, so that they meet at one. The
//! `HealthEndpointSlice`s of a node hold the identities and addresses of its endpoints.
//!
//! `objects` reads and writes the objects, `records` converts them to a view, `kept` follows them, `slices` distributes
//! this node's endpoints over its slices, `keeper` makes the store contain this node's wants through `requests` at the
//! pace of `lane` and `quota`, and `collector` removes unused identities.

mod collector;
mod keeper;
mod kept;
mod lane;
mod objects;
mod quota;
mod records;
mod requests;
mod slices;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use health_model::identity::Identity;
use tokio::sync::watch;
use tokio::time::Instant;

use self::keeper::Keeper;
use self::kept::{KeptObjects, Kind};
use self::objects::{IdentityObject, SliceObject};
use self::records::Records;
use self::requests::{RequestError, Requests};
use super::allocator::{Shared, Timing};
use crate::kubernetes::access::Access;
use crate::kubernetes::follow::{Follower, unheard};
use crate::nodes::{LastHeard, Staleness};

/// State that the followers write and the keeper reads.
#[derive(Debug)]
struct Known {
    state: Mutex<State>,
    /// The last known revision that was newer than the reply to a request.
    doubts: watch::Sender<Option<u64>>,
    started: Instant,
}

#[derive(Debug)]
struct State {
    records: Records,
    /// Since when and why each kind of object may be outdated.
    stale: [Option<Staleness>; Kind::ALL.len()],
    /// Since when the store has been unusable; `None` if it can be used.
    interrupted_since: Option<Duration>,
}

impl State {
    /// Since when and why the store cannot be used.
    fn staleness(&self) -> Option<&Staleness> {
        self.stale.iter().flatten().min_by_key(|stale| stale.since)
    }

    /// Records since when and why objects of a kind may be outdated.
    fn note_stale(&mut self, kind: Kind, stale: Option<Staleness>, now: Duration) {
        self.stale[kind as usize] = stale;
        if self.staleness().is_some() {
            self.interrupted_since.get_or_insert(now);
        } else {
            let since = self.interrupted_since.take().unwrap_or(now);
            self.records.resume(now.saturating_sub(since), now);
        }
    }
}

impl Known {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Records an identity as an answer to a request shows it. Returns whether it is up to date.
    fn put_identity(&self, object: IdentityObject) -> bool {
        let now = self.now();
        let later = self.state().records.put_identity(object, now);
        self.doubt(later)
    }

    /// Records a slice as an answer to a request shows it.
    fn put_slice(&self, object: SliceObject) {
        let now = self.now();
        let later = self.state().records.put_slice(object, now);
        self.doubt(later);
    }

    /// Reads the object of a number, whose known state is outdated. Returns whether the answer is up to date.
    async fn look_up(&self, requests: &Requests, identity: Identity) -> Result<bool, RequestError> {
        let version = || self.state().records.version(identity).cloned();
        let (before, begun) = (version(), self.now());
        match requests.read_identity(identity).await? {
            // A deletion that was seen meanwhile is later.
            Some(_) if self.state().records.was_freed_since(identity, begun) => Ok(true),
            Some(object) => Ok(self.put_identity(object)),
            None => {
                if version() == before {
                    let (name, now) = (identity.to_string(), self.now());
                    self.state().records.delete_identity(&name, None, now);
                }
                Ok(true)
            }
        }
    }

    /// Reports that a reply is older than the known revision `later`, if any: the reply is late, or the server's store
    /// was restored. Returns whether the reply is up to date.
    fn doubt(&self, later: Option<u64>) -> bool {
        if later.is_some() {
            self.doubts.send_replace(later);
        }
        later.is_none()
    }

    fn publish(&self, shared: &Shared) {
        let state = self.state();
        let stale = state.staleness().cloned();
        let rejected = state.records.rejected();
        shared.hub.publish(&state.records.view, rejected, stale);
    }
}

/// Deletes the slices of `node`, and returns their number, or why it failed.
pub(super) async fn remove_slices(access: &Access, node: &str) -> Result<usize, String> {
    let removed = async {
        let requests = Requests::open(access).await?;
        let slices = requests.slices_of(node).await?;
        for index in &slices {
            requests.delete_slice(node, *index).await?;
        }
        Ok(slices.len())
    };
    removed
        .await
        .map_err(|error: RequestError| error.to_string())
}

/// Follows the identities of the cluster, and keeps the wants of `node` in the store. Never returns.
pub(super) fn run(
    shared: Arc<Shared>,
    access: Access,
    node: &str,
    timing: Timing,
) -> impl Future<Output = ()> + Send + use<> {
    let heard = Kind::ALL.map(|_| LastHeard::now());
    let state = State {
        records: Records::new(node, timing.settle(), timing.reuse_after),
        stale: heard.each_ref().map(|heard| Some(unheard(heard))),
        interrupted_since: Some(Duration::ZERO),
    };
    let known = Arc::new(Known {
        state: Mutex::new(state),
        doubts: watch::Sender::default(),
        started: Instant::now(),
    });
    let [identities, slices] = Kind::ALL.map(|kind| {
        let kept = KeptObjects::new(kind, shared.clone(), known.clone());
        Follower::new(access.clone(), heard[kind as usize].clone(), kept)
    });
    let keeper = Keeper::new(shared, known, access, node, timing);
    async move {
        tokio::join!(identities.run(), slices.run(), keeper.run());
    }
}
