//! Keeps the rows of round-trip times in step with what the probes found.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use health_common::rtt::RttKey;

use super::icmp::Probe;
use super::rtt_store::{LossOutcome, Measured, RttStore};
use super::target::TargetKey;
use crate::api::types::RttSource;

/// The rows of the targets. What the store refuses is logged: a probe's result does not depend on
/// its being counted.
pub(super) struct Accounts {
    store: Arc<dyn RttStore>,
}

impl Accounts {
    /// Accounts that begin empty: what probes of agents before this one are still open is counted.
    pub(super) fn new(store: Arc<dyn RttStore>) -> io::Result<Self> {
        let leftovers = store.give_up_leftovers()?;
        if leftovers > 0 {
            tracing::info!(
                probes = leftovers,
                "an agent before this one left probes; counted as lost"
            );
        }
        Ok(Self { store })
    }

    /// Makes rows for targets. Without a row, a target is probed and not counted.
    pub(super) fn open(&self, targets: impl Iterator<Item = TargetKey>) {
        let failures = targets.filter_map(|key| self.store.ensure(key.into()).err());
        let (count, last) = failures.fold((0, None), |(count, _), error| (count + 1, Some(error)));
        if let Some(error) = last {
            tracing::warn!(targets = count, %error, "no round-trip rows for some targets");
        }
    }

    /// Removes a target's row.
    pub(super) fn close(&self, key: TargetKey) {
        if let Err(error) = self.store.remove(key.into()) {
            tracing::warn!(peer = %key.address, %error, "round-trip row not removed");
        }
    }

    /// Removes the rows of all other targets, which went while no agent ran.
    pub(super) fn keep_only(&self, targets: impl Iterator<Item = TargetKey>) -> io::Result<()> {
        let known: HashSet<RttKey> = targets.map(RttKey::from).collect();
        for key in self.store.keys()? {
            if !known.contains(&key) {
                self.store.remove(key)?;
            }
        }
        Ok(())
    }

    /// An ICMP probe was answered. Returns the round trip as the uplink's programs measured it, or
    /// else as the socket did.
    pub(super) fn answered(&self, probe: &Probe, at_socket: Duration) -> (Duration, RttSource) {
        let key = RttKey::from(probe.key);
        let answered = self.or_with_row(key, || {
            self.store.answered(key, probe.number, nanos(at_socket))
        });
        match answered {
            Ok(Measured::ByKernel(rtt_ns)) => (Duration::from_nanos(rtt_ns), RttSource::Kernel),
            Ok(Measured::AtSocket) => (at_socket, RttSource::Socket),
            Err(error) => {
                tracing::debug!(peer = %probe.key.address, %error, "round trip not counted");
                (at_socket, RttSource::Socket)
            }
        }
    }

    /// Counts a round trip measured in user space.
    pub(super) fn sample(&self, target: TargetKey, rtt: Duration) {
        let key = RttKey::from(target);
        let sampled = self.or_with_row(key, || self.store.sample(key, nanos(rtt)));
        if let Err(error) = sampled {
            tracing::debug!(peer = %target.address, %error, "round trip not counted");
        }
    }

    /// Counts the loss of an HTTP probe.
    pub(super) fn lost_untracked(&self, target: TargetKey) {
        if let Err(error) = self.store.lost_untracked(target.into()) {
            tracing::debug!(peer = %target.address, %error, "lost probe not counted");
        }
    }

    /// Counts the loss of an ICMP probe.
    pub(super) fn lost(&self, probe: &Probe) {
        let key = RttKey::from(probe.key);
        let lost = self.or_with_row(key, || match self.store.lost(key, probe.number)? {
            LossOutcome::UnknownPeer => Err(io::ErrorKind::NotFound.into()),
            outcome => Ok(outcome),
        });
        match lost {
            Ok(LossOutcome::AlreadyAnswered) => tracing::debug!(
                peer = %probe.key.address,
                sequence = probe.number.sequence,
                "the kernel saw a reply that did not reach the socket in time"
            ),
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(peer = %probe.key.address, %error, "lost probe not counted");
            }
        }
    }

    /// Does something to a row, once more if it had been removed by hand.
    fn or_with_row<T>(&self, key: RttKey, work: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match work() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.store.ensure(key)?;
                work()
            }
            other => other,
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}
