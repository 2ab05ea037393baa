//! Echo probes and their results.

use std::time::Duration;

use super::Engine;
use crate::failure::Failure;
use crate::icmp::{IcmpEvent, Probe};
use crate::proof::KeyAge;
use crate::results::Answer;
use crate::target::{Protocol, TargetId};

/// Pause before retrying a probe for which the socket had no space.
const DEFERRED_RETRY: Duration = Duration::from_millis(10);
/// Maximum number of consecutive retries per target. After that, the probe counts as failed, because the shortage may
/// not go away.
const DEFERRALS: u8 = 20;

impl Engine {
    pub(super) fn begin_icmp(&mut self, id: TargetId, late: Duration) {
        if let Some(target) = self.targets.get(id) {
            let now = self.now();
            let expiry = now + self.options.tuning.timeout;
            let probe = Probe::new(id, target.key, now, expiry);
            self.confirmation.sent(id, now, expiry);
            self.relief.forget(id);
            self.shared.sending().tried(Protocol::Icmp, now, late);
            self.icmp.push(probe, &mut self.icmp_events);
        }
    }

    pub(super) fn receive_icmp(&mut self) {
        let now = self.now();
        if let Err(error) = self.icmp.receive(now, &mut self.icmp_events) {
            tracing::warn!(%error, "cannot receive ICMP replies");
        }
        self.take_icmp_events();
    }

    pub(super) fn take_icmp_events(&mut self) {
        let mut events = std::mem::take(&mut self.icmp_events);
        for event in events.drain(..) {
            match event {
                IcmpEvent::Answered { probe, rtt } => {
                    self.deferrals.remove(probe.id);
                    let (rtt, source) = self.accounts.answered(&probe, rtt);
                    let answer = Answer {
                        rtt,
                        source,
                        http: None,
                        key: KeyAge::Current,
                    };
                    if self.answered(probe.id, probe.sent, answer) {
                        let now = self.now();
                        self.schedule.settle(probe.id, now);
                    }
                    self.note_remote(&probe);
                }
                IcmpEvent::Failed { probe, failure } => self.icmp_failed(&probe, failure),
                IcmpEvent::Deferred { probe, errno } => {
                    let failure = Failure::Os(errno);
                    let deferrals = self.deferrals.get(probe.id).copied().unwrap_or_default();
                    if deferrals >= DEFERRALS {
                        self.icmp_failed(&probe, failure);
                        continue;
                    }
                    self.deferrals.insert(probe.id, deferrals + 1);
                    self.shared.sending().unsent(Protocol::Icmp, &failure);
                    let at = self.now() + DEFERRED_RETRY;
                    self.confirmation.withdrawn(probe.id, at);
                    self.schedule.pull_in(probe.id, at);
                }
            }
        }
        self.icmp_events = events;
    }

    fn icmp_failed(&mut self, probe: &Probe, failure: Failure) {
        self.deferrals.remove(probe.id);
        if failure.is_unsent() {
            self.shared.sending().unsent(Protocol::Icmp, &failure);
        }
        self.lost(probe, &failure);
        self.failed(probe.id, probe.sent, failure);
    }

    /// Counts a lost probe. If this host did not send it or did not pass on its reply, records that for its way.
    pub(super) fn lost(&self, probe: &Probe, failure: &Failure) {
        let unseen = !self.accounts.lost(probe);
        let unsent = failure.is_unsent();
        if !unseen && !unsent {
            return;
        }
        let mut results = self.shared.results_mut();
        if !results.ways().is_empty()
            && let Some(target) = self.targets.get(probe.id)
            && let Some(way) = results.way_of(target.node, target.key)
        {
            let ways = results.ways();
            if unsent {
                ways.unsent(way);
            } else {
                ways.unseen(way);
            }
        }
    }

    /// Records where the extra time of a latency shift is spent, as reported by the peer's programs.
    pub(super) fn note_remote(&self, probe: &Probe) {
        if self.shared.results().is_shifted(probe.id)
            && let Some(row) = self.accounts.row(probe.key)
        {
            self.shared.results_mut().note_remote(probe.id, row.remote);
        }
    }
}
