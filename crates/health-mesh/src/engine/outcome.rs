//! What an answer or its absence means for a target, and who is notified.

use std::time::Duration;

use health_registry::nodes::Node;
use jiff::Timestamp;

use super::Engine;
use crate::confirm::Judgement;
use crate::failure::Failure;
use crate::results::{Answer, ConfirmedFailure};
use crate::target::{Target, TargetId};

impl Engine {
    /// Records an answer. Returns whether the target is reachable.
    pub(super) fn answered(&mut self, id: TargetId, sent: Duration, answer: Answer) -> bool {
        let now = self.now();
        let took = answer.took();
        let judgement = self.confirmation.answered(id, sent, took, now);
        let mut results = self.shared.results_mut();
        results.note(id, sent, Some(took), now);
        if judgement != Judgement::Reachable {
            drop(results);
            self.unchanged(id, sent);
            return false;
        }
        let was_reachable = results.is_reachable(id);
        results.answered(id, sent, self.wall_clock(sent), answer);
        drop(results);
        if was_reachable == Some(false)
            && let Some(target) = self.targets.get(id)
        {
            let node = self.node_name(target);
            tracing::info!(node, target = %target.key, "reachable again");
            self.probe_siblings(id, sent);
        }
        self.end_wait(id, sent);
        true
    }

    pub(super) fn failed(&mut self, id: TargetId, sent: Duration, failure: Failure) {
        let now = self.now();
        self.shared.results_mut().note(id, sent, None, now);
        let was_in_doubt = self.confirmation.in_doubt(id);
        match self.confirmation.failed(id, sent, &failure, now) {
            Judgement::Unreachable => {
                if was_in_doubt {
                    self.schedule.retry(id, now);
                }
                self.record_failure(id, sent, failure);
            }
            Judgement::Reachable | Judgement::Unchanged => self.unchanged(id, sent),
        }
    }

    pub(super) fn record_failure(&mut self, id: TargetId, sent: Duration, failure: Failure) {
        let mut results = self.shared.results_mut();
        if results.is_reachable(id) != Some(false)
            && let Some(target) = self.targets.get(id)
        {
            let node = self.node_name(target);
            tracing::info!(node, target = %target.key, status = %failure, "unreachable");
        }
        let unanswered = ConfirmedFailure {
            failure,
            probes: self.confirmation.unanswered(id),
            since: self.confirmation.unanswered_since(id),
        };
        results.unreachable(id, sent, self.wall_clock(sent), unanswered);
        drop(results);
        self.end_wait(id, sent);
    }

    /// Handles a result that does not change the reported verdict.
    pub(super) fn unchanged(&mut self, id: TargetId, sent: Duration) {
        if !self.confirmation.in_doubt(id) {
            self.end_wait(id, sent);
        }
    }

    /// Stops the sweep from waiting for the target, if the probe belongs to the sweep.
    pub(super) fn end_wait(&mut self, id: TargetId, sent: Duration) {
        if let Some(sweep) = &mut self.sweep {
            sweep.result(id, sent);
        }
    }

    pub(super) fn node_name(&self, target: &Target) -> String {
        let node = self.set.nodes.get(target.node);
        node.map(Node::full_name).unwrap_or_default()
    }

    pub(super) fn wall_clock(&self, at: Duration) -> Timestamp {
        let ago = self.now().saturating_sub(at);
        let now = Timestamp::now();
        now.checked_sub(ago).unwrap_or(now)
    }
}
