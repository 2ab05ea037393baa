//! Keeps the rows of round-trip times in step with what the probes found.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::rtt::{PROTOCOL_TCP, RttKey, SOURCE_KERNEL};

use super::failure::Failure;
use super::http::Hello;
use super::icmp::Probe;
use super::rtt_store::{LossOutcome, RttStore};
use super::target::{Target, TargetKey};
use crate::api::types::RttSource;
use crate::datapath::clock;

/// The rows of the targets. What the store refuses is logged: a probe's result does not depend on
/// its being counted.
pub(super) struct Accounts {
    store: Arc<dyn RttStore>,
    /// Identifier of the ICMP probes, host byte order.
    icmp_id: u16,
    local_addresses: Vec<IpAddr>,
    /// Whether connections to the targets' addresses are followed.
    passive: bool,
}

impl Accounts {
    /// Accounts of the prober with this ICMP identifier (host byte order) on the host with these
    /// addresses. With `passive`, all connections to targets' addresses are followed.
    pub(super) fn new(
        store: Arc<dyn RttStore>,
        icmp_id: u16,
        local_addresses: Vec<IpAddr>,
        passive: bool,
    ) -> Self {
        Self {
            store,
            icmp_id,
            local_addresses,
            passive,
        }
    }

    /// Makes rows for targets. Without a row, a target is probed and not counted.
    pub(super) fn open(&self, targets: impl Iterator<Item = TargetKey>) {
        let failures = targets.filter_map(|key| self.open_one(key).err());
        let (count, last) = failures.fold((0, None), |(count, _), error| (count + 1, Some(error)));
        if let Some(error) = last {
            tracing::warn!(targets = count, %error, "no round-trip rows for some targets");
        }
    }

    fn open_one(&self, key: TargetKey) -> io::Result<()> {
        self.store.ensure(key.into())?;
        if self.passive {
            self.store.follow(key.address, key.path)?;
        }
        Ok(())
    }

    /// Removes a target's row, and that of the connections to its address.
    pub(super) fn close(&self, key: TargetKey) {
        let removed = self
            .store
            .unfollow(key.address)
            .and_then(|()| self.store.remove(passive_key(key)))
            .and_then(|()| self.store.remove(key.into()));
        if let Err(error) = removed {
            tracing::warn!(peer = %key.address, %error, "round-trip row not removed");
        }
    }

    /// Removes the rows of all other targets, which went while no agent ran.
    pub(super) fn keep_only(&self, targets: impl Iterator<Item = TargetKey>) -> io::Result<()> {
        let mut known: HashSet<RttKey> = HashSet::new();
        let mut followed: HashSet<IpAddr> = HashSet::new();
        for key in targets {
            known.insert(key.into());
            if self.passive {
                known.insert(passive_key(key));
                followed.insert(key.address);
            }
        }
        for peer in self.store.followed()? {
            if !followed.contains(&peer) {
                self.store.unfollow(peer)?;
            }
        }
        for key in self.store.keys()? {
            if !known.contains(&key) {
                self.store.remove(key)?;
            }
        }
        Ok(())
    }

    /// Whether a connection to the target's address was answered in the last `time`.
    pub(super) fn had_traffic(&self, key: TargetKey, time: Duration) -> bool {
        let row = self.store.row(passive_key(key));
        let last_at_ns = row.ok().flatten().map(|row| row.last_at_ns);
        last_at_ns.is_some_and(|at| clock::now_ns().saturating_sub(at) <= nanos(time))
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

    /// An HTTP probe was answered. Returns the round trip of its connection's handshake: as the uplink's
    /// programs timed it, or else as the agent saw it.
    pub(super) fn connected(&self, target: &Target, hello: &Hello) -> (Duration, RttSource) {
        let Some(connection) = hello.connection.filter(|_| target.remote) else {
            self.sample(target.key, hello.connect);
            return (hello.connect, RttSource::Socket);
        };
        let key = RttKey::from(target.key);
        let measured_ns = nanos(hello.connect);
        let counted = self
            .store
            .connected(key, &connection, measured_ns)
            .or_else(|_| {
                // The row may have been removed by hand.
                self.store.ensure(key)?;
                self.store.connected(key, &connection, measured_ns)
            });
        match counted {
            Ok(counted) if counted.by_kernel => {
                (Duration::from_nanos(counted.rtt_ns), RttSource::Kernel)
            }
            Ok(_) => (hello.connect, RttSource::Socket),
            Err(error) => {
                tracing::debug!(peer = %target.key.address, %error, "round trip not counted");
                (hello.connect, RttSource::Socket)
            }
        }
    }

    /// Counts a round trip measured in user space.
    pub(super) fn sample(&self, target: TargetKey, rtt: Duration) {
        let key = RttKey::from(target);
        let rtt_ns = nanos(rtt);
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

/// The row of the connections to a target's address.
fn passive_key(target: TargetKey) -> RttKey {
    RttKey {
        protocol: PROTOCOL_TCP,
        ..target.into()
    }
}

fn nanos(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}
