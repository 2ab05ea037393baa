//! The mesh's view of the datapath: RTT rows by peer.

use std::io;
use std::net::{IpAddr, SocketAddr};

use health_common::probe::{Path, ProbeId};
use health_common::rtt::{RttKey, RttRow};

/// The result of a lost-probe report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossOutcome {
    /// Counted as lost.
    Counted,
    /// The kernel had already matched the reply: not lost.
    AlreadyAnswered,
    /// Already counted as lost.
    AlreadyLost,
    /// This peer has no row (any more).
    UnknownPeer,
}

/// The source of the round-trip time that was counted for a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measurement {
    /// Measured by the uplinks' programs, in nanoseconds.
    ByKernel(u64),
    /// Measured by the agent, at its socket.
    AtSocket,
}

/// A connection from this host to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Address and port on this side.
    pub local: SocketAddr,
    /// Port of the peer.
    pub peer_port: u16,
    /// When the connection was started: `CLOCK_MONOTONIC`, in nanoseconds.
    pub begun_ns: u64,
}

/// Rows of `HEALTH_RTT`. A row must exist before the kernel counts anything in it.
pub trait RttStore: Send + Sync + 'static {
    /// Creates an empty row unless one exists.
    fn ensure(&self, key: RttKey) -> io::Result<()>;

    /// Removes a row.
    fn remove(&self, key: RttKey) -> io::Result<()>;

    /// Resets a row atomically. Returns `false` if it does not exist.
    fn reset(&self, key: RttKey) -> io::Result<bool>;

    /// Returns all keys, for dropping rows whose peer disappeared while no agent ran.
    fn keys(&self) -> io::Result<Vec<RttKey>>;

    /// Reads a consistent snapshot of a row.
    fn row(&self, key: RttKey) -> io::Result<Option<RttRow>>;

    /// Records the reply to an echo probe, with the round-trip time that the agent measured, which is counted unless
    /// the kernel has counted its own. `NotFound` if the row does not exist.
    fn answered(&self, key: RttKey, probe: ProbeId, at_socket_ns: u64) -> io::Result<Measurement>;

    /// Gives up on an echo probe.
    fn lost(&self, key: RttKey, probe: ProbeId) -> io::Result<LossOutcome>;

    /// Counts a round trip, in nanoseconds, of a probe that the kernel does not track (HTTP). `NotFound` if the row
    /// does not exist.
    fn sample(&self, key: RttKey, rtt_ns: u64) -> io::Result<()>;

    /// Counts the loss of a probe that the kernel does not track.
    fn lost_untracked(&self, key: RttKey) -> io::Result<LossOutcome>;

    /// Counts still unanswered echo probes of earlier agents as lost. Nothing else gives up on these probes,
    /// and replies no longer match them. Returns their number. Must be called before the first probe.
    fn give_up_leftovers(&self) -> io::Result<u64>;

    /// Counts a probe that was answered over `connection`: with the round-trip time of the connection's handshake as
    /// timed on the uplink, or else with the agent's own measurement, in nanoseconds. `NotFound` if the row does not
    /// exist.
    fn connected(
        &self,
        key: RttKey,
        connection: &Connection,
        at_socket_ns: u64,
    ) -> io::Result<Measurement>;

    /// Registers a peer's address. Packets to it keep their source address. If passive RTT is enabled, the round trips
    /// of all connections to it are counted, in a row that is created with the first connection.
    fn follow(&self, peer: IpAddr, path: Path) -> io::Result<()>;

    /// Unregisters the address. The row stays.
    fn unfollow(&self, peer: IpAddr) -> io::Result<()>;

    /// Returns the addresses registered as peers'.
    fn followed(&self) -> io::Result<Vec<IpAddr>>;
}
