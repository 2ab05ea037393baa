//! Identities in a Kubernetes cluster, as objects of two kinds that `deploy/kubernetes/crds.yaml` defines. A
//! `HealthIdentity` maps a number, which is its name, to a label set, so that two agents cannot create the same number.
//! All agents try the same numbers in the same order for a label set, so that they meet at one. The
//! `HealthEndpointSlice`s of a node hold the identities and addresses of its endpoints.
//!
//! `objects` reads and writes the objects, `records` converts them to a view, `kept` follows them, `slices` distributes
//! this node's endpoints over its slices, `keeper` makes the store contain this node's wants through `requests`, and
//! `collector` removes unused identities.

mod collector;
mod keeper;
mod kept;
mod objects;
mod records;
mod requests;
mod slices;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use self::keeper::Keeper;
use self::kept::{KeptObjects, Kind};
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
    started: Instant,
}

#[derive(Debug)]
struct State {
    records: Records,
    /// Since when and why each kind of object may be outdated.
    stale: [Option<Staleness>; Kind::ALL.len()],
}

impl State {
    /// Since when and why the store cannot be used.
    fn staleness(&self) -> Option<&Staleness> {
        self.stale.iter().flatten().min_by_key(|stale| stale.since)
    }
}

impl Known {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
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
        records: Records::new(node, timing.settle()),
        stale: heard.each_ref().map(|heard| Some(unheard(heard))),
    };
    let known = Arc::new(Known {
        state: Mutex::new(state),
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
