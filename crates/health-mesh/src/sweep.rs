//! Probes of all targets on request, and the clients that wait for them.

use std::time::Duration;

use slotmap::SecondaryMap;
use tokio::sync::mpsc;

use super::target::TargetId;

/// Time between the end of the last probe and the end of the sweep: for results still in flight.
const MARGIN: Duration = Duration::from_millis(50);

/// Sent to waiting clients. The channel closes when the sweep has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SweepEvent {
    /// All targets of the node with this index in the current set have a result.
    Node(usize),
    /// Number of targets that have a result.
    Progress {
        /// Targets with a result.
        done: usize,
        /// All targets.
        total: usize,
    },
}

/// A request to probe all targets; requests that arrive meanwhile join it.
#[derive(Debug)]
pub(super) struct Sweep {
    begun: Duration,
    /// The latest time at which it ends.
    deadline: Duration,
    /// Targets without a result, with their nodes.
    awaited: SecondaryMap<TargetId, usize>,
    total: usize,
    /// Number of targets with a result at the last progress event.
    reported: usize,
    nodes: usize,
    /// Number of awaited targets per node.
    by_node: Vec<usize>,
    waiters: Vec<mpsc::UnboundedSender<SweepEvent>>,
}

impl Sweep {
    /// A sweep over `targets`, each given with the index of its node; there are `nodes` nodes. The last probe is sent
    /// after `spread` and waits for `timeout`.
    pub(super) fn new(
        targets: impl Iterator<Item = (TargetId, usize)>,
        nodes: usize,
        now: Duration,
        spread: Duration,
        timeout: Duration,
    ) -> Self {
        let mut sweep = Self {
            begun: now,
            deadline: now + spread + timeout + MARGIN,
            awaited: SecondaryMap::new(),
            total: 0,
            reported: 0,
            nodes,
            by_node: vec![0; nodes],
            waiters: Vec::new(),
        };
        for (id, node) in targets {
            sweep.awaited.insert(id, node);
            sweep.total += 1;
            if let Some(count) = sweep.by_node.get_mut(node) {
                *count += 1;
            }
        }
        sweep
    }

    /// The latest time at which it ends.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Whether it has ended.
    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.awaited.is_empty() || self.deadline <= now
    }

    /// Sends `waiter` what is already known, then further events. Their number is bounded by the number of nodes plus
    /// that of engine turns.
    pub(super) fn join(&mut self, waiter: mpsc::UnboundedSender<SweepEvent>) {
        let complete = (0..self.nodes).filter(|&node| self.by_node[node] == 0);
        for node in complete {
            // The client may be gone.
            let _ = waiter.send(SweepEvent::Node(node));
        }
        self.waiters.push(waiter);
    }

    /// Records a result for a target, from a probe sent at `sent`.
    pub(super) fn result(&mut self, id: TargetId, sent: Duration) {
        if sent >= self.begun {
            self.end_wait(id);
        }
    }

    /// Stops waiting for a removed target.
    pub(super) fn remove(&mut self, id: TargetId) {
        self.end_wait(id);
    }

    /// Updates the node indexes: `node_of` returns the new ones.
    pub(super) fn renumber(&mut self, nodes: usize, node_of: impl Fn(TargetId) -> Option<usize>) {
        self.nodes = nodes;
        self.by_node = vec![0; nodes];
        for (id, node) in &mut self.awaited {
            if let Some(index) = node_of(id) {
                *node = index;
                if let Some(count) = self.by_node.get_mut(index) {
                    *count += 1;
                }
            }
        }
    }

    /// Sends the progress to waiting clients if it changed. Returns whether any client is still waiting.
    pub(super) fn report_progress(&mut self) -> bool {
        let done = self.total - self.awaited.len();
        self.waiters.retain(|waiter| !waiter.is_closed());
        if done != self.reported {
            self.reported = done;
            let total = self.total;
            for waiter in &self.waiters {
                // The client may be gone.
                let _ = waiter.send(SweepEvent::Progress { done, total });
            }
        }
        !self.waiters.is_empty()
    }

    fn end_wait(&mut self, id: TargetId) {
        let Some(node) = self.awaited.remove(id) else {
            return;
        };
        if let Some(count) = self.by_node.get_mut(node) {
            *count -= 1;
            if *count == 0 {
                self.waiters
                    .retain(|waiter| waiter.send(SweepEvent::Node(node)).is_ok());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn a_sweep_ends_with_the_last_result_or_when_the_last_probe_has_timed_out() {
        let mut ids = SlotMap::<TargetId, ()>::with_key();
        let [a, b, c] = std::array::from_fn(|_| ids.insert(()));
        let [begun, spread, timeout] = [5_u64, 2, 1].map(Duration::from_secs);
        let targets = [(a, 0), (b, 0), (c, 1)];
        let start = || Sweep::new(targets.into_iter(), 2, begun, spread, timeout);
        let silent = start();
        let end = begun + spread + timeout + MARGIN;
        assert_eq!(silent.deadline(), end);
        assert!(!silent.is_over(end - Duration::from_nanos(1)) && silent.is_over(end));

        let mut sweep = start();
        let [(first, mut to_first), (late, mut to_late)] =
            std::array::from_fn(|_| mpsc::unbounded_channel());
        sweep.join(first);
        // An earlier probe does not count.
        sweep.result(c, begun - Duration::from_nanos(1));
        for id in [a, b] {
            sweep.result(id, begun);
        }
        sweep.join(late);
        assert!(!sweep.is_over(begun));
        sweep.result(c, begun);
        // A latecomer shares the probes and the end.
        assert!(sweep.is_over(begun));
        drop(sweep);
        for events in [&mut to_first, &mut to_late] {
            let events: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).collect();
            assert_eq!(events, [SweepEvent::Node(0), SweepEvent::Node(1)]);
        }
    }
}
