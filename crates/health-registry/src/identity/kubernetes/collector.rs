//! Collects unused identities at a bounded rate: marks them first, and deletes them a while later, unless an agent that
//! uses one again has removed the mark.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::Problem;
use health_model::identity::Identity;
use jiff::Timestamp;
use tokio::time::Instant;
use tracing::info;

use super::super::allocator::{Shared, Timing};
use super::Known;
use super::objects::ObjectVersion;
use super::requests::{RequestError, Requests};

/// Minimum time between two writes of the collector.
const SHORTEST_GAP: Duration = Duration::from_secs(1);

/// A step of the collection of an identity, which fails if the object has another version by then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Collection {
    pub(super) identity: Identity,
    pub(super) version: ObjectVersion,
    /// Whether the identity is to be deleted, not marked.
    pub(super) is_deletion: bool,
}

/// When an identity is collected.
pub(super) struct CollectTerms<'a> {
    /// How long no node must have referred to the identity.
    pub(super) unreferenced: Duration,
    /// How long the identity must have been marked.
    pub(super) marked: Duration,
    /// The additional time for each node that comes before this one.
    pub(super) turn: Duration,
    pub(super) order: &'a NodeOrder,
    /// The time on the wall clock.
    pub(super) clock: Timestamp,
}

/// The order in which the nodes may collect an identity, a different one for each identity (rendezvous hashing). An
/// agent that does not run only delays the others.
pub(super) struct NodeOrder {
    own: u64,
    others: Vec<u64>,
}

impl NodeOrder {
    /// The order of `own` among all nodes.
    pub(super) fn new(own: &str, nodes: &BTreeSet<&str>) -> Self {
        let hash = |node: &str| {
            let mut hasher = DefaultHasher::new();
            node.hash(&mut hasher);
            hasher.finish()
        };
        let others = nodes.iter().filter(|node| **node != own);
        Self {
            own: hash(own),
            others: others.map(|node| hash(node)).collect(),
        }
    }

    /// The number of nodes that come before this one.
    pub(super) fn place(&self, identity: Identity) -> u32 {
        let weight = |node: &u64| {
            let mixed = (node ^ u64::from(identity.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93)
        };
        let own = weight(&self.own);
        let before = self.others.iter().filter(|node| weight(node) > own);
        u32::try_from(before.count()).unwrap_or(u32::MAX)
    }
}

/// Collects unused identities.
pub(super) struct Collector {
    shared: Arc<Shared>,
    known: Arc<Known>,
    timing: Timing,
    due: VecDeque<Collection>,
    look_at: Instant,
    write_at: Instant,
    problem: Option<Problem>,
}

impl Collector {
    pub(super) fn new(shared: Arc<Shared>, known: Arc<Known>, timing: Timing) -> Self {
        let now = Instant::now();
        shared.collector_reporter.due_within(timing.look_period);
        Self {
            shared,
            known,
            timing,
            due: VecDeque::new(),
            look_at: now + timing.look_period,
            write_at: now,
            problem: None,
        }
    }

    /// Does at most one step. Returns the time until the next one. A failure is tried again at the next check.
    pub(super) async fn turn(&mut self, requests: &Requests) -> Duration {
        let now = Instant::now();
        if now >= self.look_at {
            self.look_at = now + self.timing.look_period;
            self.due = self.look();
            let period = self.timing.look_period;
            let problem = self.problem.take();
            self.shared.collector_reporter.end(problem, Some(period));
        }
        if now >= self.write_at
            && let Some(next) = self.due.pop_front()
        {
            self.write_at = now + SHORTEST_GAP.min(self.timing.look_period);
            if let Err(error) = self.collect(requests, &next).await {
                let problem = Problem::warning(error);
                self.problem = Some(problem.clone());
                self.shared
                    .collector_reporter
                    .end(Some(problem), Some(self.timing.look_period));
                self.due.clear();
            }
        }
        let next = match self.due.is_empty() {
            true => self.look_at,
            false => self.look_at.min(self.write_at),
        };
        next.saturating_duration_since(Instant::now())
    }

    /// Returns the steps that are due on this node, at most as many as it may do until the next check.
    fn look(&self) -> VecDeque<Collection> {
        let period = self.timing.look_period;
        let at_most = (period.as_millis() / SHORTEST_GAP.as_millis()).max(1);
        let held: BTreeSet<Identity> = self.shared.wants().held().into_values().collect();
        let now = self.known.now();
        let state = self.known.state();
        let terms = CollectTerms {
            unreferenced: self.timing.collect_after,
            marked: self.timing.reuse_after,
            turn: period,
            order: &state.records.node_order(),
            clock: Timestamp::now(),
        };
        let unused = state.records.unused(&terms, now);
        unused
            .filter(|one| !held.contains(&one.identity))
            .take(usize::try_from(at_most).unwrap_or(usize::MAX))
            .collect()
    }

    async fn collect(&self, requests: &Requests, one: &Collection) -> Result<(), RequestError> {
        let Collection {
            identity,
            version,
            is_deletion,
        } = one;
        let is_held = || {
            let held = self.shared.wants().held();
            held.values().any(|held| held == identity)
        };
        if self.known.state().records.view.is_referenced(*identity) || is_held() {
            return Ok(());
        }
        if !is_deletion {
            let clock = Timestamp::now();
            match requests.mark(*identity, version, Some(clock)).await? {
                Some(object) => self.known.put_identity(object),
                None => self.known.look_up(requests, *identity).await?,
            };
        } else if requests.delete_identity(*identity, version).await? {
            info!(%identity, "collected an unused identity");
            let now = self.known.now();
            let name = identity.to_string();
            let records = &mut self.known.state().records;
            records.delete_identity(&name, Some(&version.uid), now);
        } else {
            // Another version, which is tried again only once it is known.
            self.known.look_up(requests, *identity).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_identity_has_one_node_that_comes_first_and_the_nodes_share_them() {
        let names: Vec<String> = (0..20).map(|i| format!("node-{i}")).collect();
        let nodes: BTreeSet<&str> = names.iter().map(String::as_str).collect();
        let orders: Vec<_> = names
            .iter()
            .map(|own| NodeOrder::new(own, &nodes))
            .collect();
        let mut firsts = vec![0; orders.len()];
        for identity in (256..2256).map(Identity) {
            let mut places: Vec<u32> = orders.iter().map(|order| order.place(identity)).collect();
            let first = places.iter().position(|place| *place == 0).unwrap();
            firsts[first] += 1;
            places.sort_unstable();
            assert!(places.into_iter().eq(0..20), "{identity}");
        }
        assert!(
            firsts.iter().all(|count| (40..250).contains(count)),
            "{firsts:?}"
        );
    }
}
