//! Requests from outside: probes of all targets, and path MTUs.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::Engine;
use crate::path_mtu::{PathMtu, PathMtuOutcome};
use crate::sweep::{Sweep, SweepEvent};
use crate::target::Target;

/// Time between two progress reports to clients that wait for a sweep.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

impl Engine {
    /// Starts to probe all targets for `waiter`, or lets it join a sweep that is already running.
    pub(super) fn sweep(&mut self, waiter: mpsc::UnboundedSender<SweepEvent>) {
        let now = self.now();
        if self.sweep.is_none() {
            let spread = self.rate_time(self.targets.len());
            self.schedule.pull_in_all(now, spread);
            self.send_at = self.send_at.min(now);
            let targets = self.targets.iter().map(|(id, target)| (id, target.node));
            let nodes = self.set.nodes.len();
            let timeout = self.options.tuning.timeout;
            self.sweep = Some(Sweep::new(targets, nodes, now, spread, timeout));
            self.progress_at = now + PROGRESS_PERIOD;
        }
        if let Some(sweep) = &mut self.sweep {
            sweep.join(waiter);
        }
    }

    pub(super) fn end_sweep(&mut self) {
        let now = self.now();
        let Some(sweep) = &mut self.sweep else {
            return;
        };
        if sweep.is_over(now) {
            // Closes the channels of the waiting clients.
            self.sweep = None;
        } else if self.progress_at <= now {
            self.progress_at = now + PROGRESS_PERIOD;
            if !sweep.report_progress() {
                self.sweep = None;
            }
        }
    }

    /// Measures the MTU of the paths to a node, or to all, for the holder of the other end of `done`.
    pub(super) fn probe_path_mtu(&mut self, node: Option<&str>, done: oneshot::Sender<()>) {
        let is_wanted = |target: &Target| {
            node.is_none_or(|name| {
                let known = self.set.nodes.get(target.node);
                known.is_some_and(|known| known.full_name() == name)
            })
        };
        let targets = self.targets.iter();
        let ids: Vec<_> = targets
            .filter(|(id, target)| self.path_mtu.has(*id) && is_wanted(target))
            .map(|(id, _)| id)
            .collect();
        let now = self.now();
        self.path_mtu.request(&ids, now, done);
        self.shared.results_mut().await_paths(&ids);
    }

    /// Continues measuring path MTUs.
    pub(super) fn look_at_paths(&mut self) {
        let now = self.now();
        let looked = self.path_mtu.turn(now, &mut self.budget);
        for PathMtuOutcome { id, found } in looked {
            let mut results = self.shared.results_mut();
            let was_reduced = results.path_mtu(id).is_some_and(PathMtu::is_reduced);
            if let Some(found) = &found
                && found.is_reduced() != was_reduced
                && let Some(target) = self.targets.get(id)
            {
                let node = self.node_name(target);
                let address = target.key.address;
                let (mtu, local_mtu) = (found.mtu, found.way.mtu);
                if was_reduced {
                    tracing::info!(node, %address, mtu, "full path MTU restored");
                } else {
                    let reported_by = found.notice.map(|notice| notice.from.to_string());
                    tracing::info!(node, %address, mtu, local_mtu, reported_by, "reduced path MTU");
                }
            }
            results.path_looked_at(id, found);
            drop(results);
            self.path_mtu.end_wait(id);
        }
    }
}
