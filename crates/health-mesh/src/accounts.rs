//! Keeps the rows of round-trip times in sync with the probe results.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_TCP, RttKey, RttRow};
use health_datapath::rtt_store::{LossOutcome, Measurement, RttStore};
use health_model::api::RttSource;
use health_net::clock;

use super::http::Hello;
use super::icmp::Probe;
use super::target::TargetKey;

/// The rows of the targets. Store errors are only logged: a probe's result does not depend on whether it is counted.
pub(super) struct Accounts {
    store: Arc<dyn RttStore>,
    /// Whether connections to the targets' addresses get rows.
    passive: bool,
    /// Addresses that the BPF programs know as peers, in ascending order.
    peers: Vec<(IpAddr, Path)>,
}

impl Accounts {
    /// Creates empty accounts, and counts the open probes of earlier agents as lost. With `passive`, all connections to
    /// targets' addresses get rows.
    pub(super) fn new(store: Arc<dyn RttStore>, passive: bool) -> io::Result<Self> {
        let leftovers = store.give_up_leftovers()?;
        if leftovers > 0 {
            tracing::info!(
                probes = leftovers,
                "probes of the previous agent are counted as lost"
            );
        }
        Ok(Self {
            store,
            passive,
            peers: Vec::new(),
        })
    }

    /// Creates rows for targets. A target without a row is probed but not counted.
    pub(super) fn open(&self, targets: impl Iterator<Item = TargetKey>) {
        let failures = targets.filter_map(|key| self.store.ensure(key.into()).err());
        let (count, last) = counted(failures);
        if let Some(error) = last {
            tracing::warn!(targets = count, %error, "no round-trip rows for some targets");
        }
    }

    /// Tells the BPF programs that exactly these addresses are peers, whether they are probed or not. If two paths
    /// share an address, the first path wins.
    pub(super) fn set_peers(&mut self, peers: impl Iterator<Item = (IpAddr, Path)>) {
        let mut peers: Vec<_> = peers.collect();
        peers.sort_by_key(|(address, _)| *address);
        peers.dedup_by_key(|(address, _)| *address);
        let gone = self
            .peers
            .iter()
            .filter(|(old, _)| path_of(&peers, *old).is_none());
        let fresh = peers
            .iter()
            .filter(|(new, path)| path_of(&self.peers, *new) != Some(*path));
        let ended = gone.filter_map(|(address, _)| self.store.unfollow(*address).err());
        let begun = fresh.filter_map(|(address, path)| self.store.follow(*address, *path).err());
        let (count, last) = counted(ended.chain(begun));
        if let Some(error) = last {
            tracing::warn!(
                addresses = count,
                %error,
                "cannot update some peers' addresses in the maps"
            );
        }
        self.peers = peers;
    }

    /// Removes a target's row, and the row of the connections to its address.
    pub(super) fn close(&self, key: TargetKey) {
        let removed = self
            .store
            .remove(passive_key(key))
            .and_then(|()| self.store.remove(key.into()));
        if let Err(error) = removed {
            tracing::warn!(peer = %key.address, %error, "cannot remove a round-trip row");
        }
    }

    /// Removes the rows of all other targets, which disappeared while no agent was running.
    pub(super) fn keep_only(&self, targets: impl Iterator<Item = TargetKey>) -> io::Result<()> {
        let mut known: HashSet<RttKey> = HashSet::new();
        for key in targets {
            known.insert(key.into());
            if self.passive {
                known.insert(passive_key(key));
            }
        }
        for peer in self.store.followed()? {
            if path_of(&self.peers, peer).is_none() {
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

    /// Whether the target answered on a connection to its address within the last `time`.
    pub(super) fn had_traffic(&self, key: TargetKey, time: Duration) -> bool {
        let row = self.store.row(passive_key(key));
        let last_at_ns = row.ok().flatten().map(|row| row.last_at_ns);
        last_at_ns.is_some_and(|at| clock::now_ns().saturating_sub(at) <= nanos(time))
    }

    /// Records the response to an HTTP probe. Returns the round-trip time of its TCP handshake, measured by the
    /// uplink's programs if possible, otherwise by the agent.
    pub(super) fn connected(&self, target: TargetKey, hello: &Hello) -> (Duration, RttSource) {
        let at_socket = (hello.connect, RttSource::Socket);
        let Some(connection) = hello.connection else {
            self.sample(target, hello.connect);
            return at_socket;
        };
        let key = RttKey::from(target);
        let counted = self.or_with_row(key, || {
            self.store.connected(key, &connection, nanos(hello.connect))
        });
        match counted {
            Ok(Measurement::ByKernel(rtt_ns)) => (Duration::from_nanos(rtt_ns), RttSource::Kernel),
            Ok(Measurement::AtSocket) => at_socket,
            Err(error) => {
                tracing::debug!(peer = %target.address, %error, "cannot count a round trip");
                at_socket
            }
        }
    }

    /// Records the reply to an ICMP probe. Returns the round-trip time, measured by the uplink's programs if possible,
    /// otherwise by the socket.
    pub(super) fn answered(&self, probe: &Probe, at_socket: Duration) -> (Duration, RttSource) {
        let key = RttKey::from(probe.key);
        let answered = self.or_with_row(key, || {
            self.store.answered(key, probe.number, nanos(at_socket))
        });
        match answered {
            Ok(Measurement::ByKernel(rtt_ns)) => (Duration::from_nanos(rtt_ns), RttSource::Kernel),
            Ok(Measurement::AtSocket) => (at_socket, RttSource::Socket),
            Err(error) => {
                tracing::debug!(peer = %probe.key.address, %error, "cannot count a round trip");
                (at_socket, RttSource::Socket)
            }
        }
    }

    /// Counts a round trip that was measured in user space.
    pub(super) fn sample(&self, target: TargetKey, rtt: Duration) {
        let key = RttKey::from(target);
        let sampled = self.or_with_row(key, || self.store.sample(key, nanos(rtt)));
        if let Err(error) = sampled {
            tracing::debug!(peer = %target.address, %error, "cannot count a round trip");
        }
    }

    /// Counts a lost HTTP probe.
    pub(super) fn lost_untracked(&self, target: TargetKey) {
        if let Err(error) = self.store.lost_untracked(target.into()) {
            tracing::debug!(peer = %target.address, %error, "cannot count a lost probe");
        }
    }

    /// A target's row, if it can be read.
    pub(super) fn row(&self, key: TargetKey) -> Option<RttRow> {
        self.store.row(key.into()).ok().flatten()
    }

    /// Counts a lost ICMP probe. Returns whether the kernel counts the probe as lost too: it may have seen the reply.
    pub(super) fn lost(&self, probe: &Probe) -> bool {
        let key = RttKey::from(probe.key);
        let lost = self.or_with_row(key, || match self.store.lost(key, probe.number)? {
            LossOutcome::UnknownPeer => Err(io::ErrorKind::NotFound.into()),
            outcome => Ok(outcome),
        });
        match lost {
            Ok(LossOutcome::AlreadyAnswered) => {
                tracing::debug!(
                    peer = %probe.key.address,
                    sequence = probe.number.sequence,
                    "the kernel received a reply that did not reach the socket in time"
                );
                return false;
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(peer = %probe.key.address, %error, "cannot count a lost probe");
            }
        }
        true
    }

    /// Applies `work` to a row; recreates the row and retries once if it was removed externally.
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

/// The path of an address, if it belongs to one of these peers.
fn path_of(peers: &[(IpAddr, Path)], address: IpAddr) -> Option<Path> {
    let place = peers.binary_search_by_key(&address, |(peer, _)| *peer);
    place.ok().map(|place| peers[place].1)
}

/// Returns the number of failures and the last failure.
fn counted(failures: impl Iterator<Item = io::Error>) -> (usize, Option<io::Error>) {
    failures.fold((0, None), |(count, _), error| (count + 1, Some(error)))
}

/// Key of the row for connections to a target's address.
fn passive_key(target: TargetKey) -> RttKey {
    RttKey {
        protocol: PROTOCOL_TCP,
        ..target.into()
    }
}

/// Converts a duration to the unit of the rows.
pub(super) fn nanos(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}
