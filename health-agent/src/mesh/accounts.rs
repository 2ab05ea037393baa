//! Keeps the rows of round-trip times in step with what the probes found.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::rtt::{RttKey, SOURCE_KERNEL};

use super::failure::Failure;
use super::icmp::Probe;
use super::rtt_store::{LossOutcome, RttStore};
use super::target::TargetKey;
use crate::api::types::RttSource;

/// The rows of the targets. What the store refuses is logged: a probe's result does not depend on
/// its being counted.
pub(super) struct Accounts {
    store: Arc<dyn RttStore>,
    /// Identifier of the ICMP probes, host byte order.
    icmp_id: u16,
    local_addresses: Vec<IpAddr>,
}

impl Accounts {
    /// Accounts of the prober with this ICMP identifier (host byte order) on the host with these
    /// addresses.
    pub(super) fn new(
        store: Arc<dyn RttStore>,
        icmp_id: u16,
        local_addresses: Vec<IpAddr>,
    ) -> Self {
        Self {
            store,
            icmp_id,
            local_addresses,
        }
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
    /// else as the socket did, which is then counted.
    pub(super) fn answered(
        &self,
        probe: &Probe,
        sequence: u16,
        at_socket: Duration,
    ) -> (Duration, RttSource) {
        if probe.stamped
            && let Ok(Some(row)) = self.store.row(probe.key.into())
            && row.last_sequence == sequence
            && row.source == SOURCE_KERNEL
        {
            return (Duration::from_nanos(row.last_ns), RttSource::Kernel);
        }
        self.sample(probe.key, at_socket);
        (at_socket, RttSource::Socket)
    }

    /// Counts a round trip measured in user space.
    pub(super) fn sample(&self, target: TargetKey, rtt: Duration) {
        let key = RttKey::from(target);
        let rtt_ns = rtt.as_nanos().try_into().unwrap_or(u64::MAX);
        let sampled = self.store.sample(key, rtt_ns).or_else(|_| {
            // The row may have been removed by hand.
            self.store.ensure(key)?;
            self.store.sample(key, rtt_ns)
        });
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
    pub(super) fn lost(&self, probe: &Probe, sequence: u16, failure: &Failure) {
        // An error that this host reports to itself: the probe never got as far as the uplink.
        let refused_here = matches!(failure, Failure::Icmp(error)
            if self.local_addresses.contains(&error.from));
        let stamped = probe.stamped && !refused_here;
        if let Err(error) = self.count_loss(probe.key, sequence, stamped) {
            tracing::debug!(peer = %probe.key.address, %error, "lost probe not counted");
        }
    }

    fn count_loss(&self, target: TargetKey, sequence: u16, stamped: bool) -> io::Result<()> {
        let key = RttKey::from(target);
        let lost = |stamped| self.store.lost(key, self.icmp_id, sequence, stamped);
        match lost(stamped)? {
            LossOutcome::Counted => {}
            // The kernel holds no stamp of the probe. Either it matched a reply that the socket
            // did not get, or the probe never left, for want of the peer's hardware address.
            LossOutcome::AlreadyAnswered => {
                let row = self.store.row(key)?;
                if row.is_some_and(|row| row.last_sequence == sequence) {
                    tracing::debug!(
                        peer = %target.address,
                        sequence,
                        "the kernel saw a reply that did not reach the socket in time"
                    );
                } else {
                    lost(false)?;
                }
            }
            LossOutcome::UnknownPeer => {
                // The row may have been removed by hand.
                self.store.ensure(key)?;
                lost(false)?;
            }
        }
        Ok(())
    }
}
