//! What the mesh needs of the datapath: rows of round-trip times, by peer.

use std::io;
use std::net::{IpAddr, SocketAddr};

use health_common::probe::{Path, ProbeId};
use health_common::rtt::{RttKey, RttRow};

/// How the kernel took the report of a lost probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossOutcome {
    /// Counted as lost.
    Counted,
    /// The reply had been matched in the kernel before: not lost.
    AlreadyAnswered,
    /// Counted as lost before.
    AlreadyLost,
    /// There is no row for this peer (any more).
    UnknownPeer,
}

/// Whose measurement of a probe's round trip was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measurement {
    /// The uplinks' programs', nanoseconds.
    ByKernel(u64),
    /// The agent's own, at its socket.
    AtSocket,
}

/// A connection of this host to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Address and port on this side.
    pub local: SocketAddr,
    /// Port of the peer.
    pub peer_port: u16,
    /// When it was begun: `CLOCK_MONOTONIC`, nanoseconds.
    pub begun_ns: u64,
}

/// Rows of `HEALTH_RTT`. A row must exist before the kernel counts anything in it.
pub trait RttStore: Send + Sync + 'static {
    /// Makes an empty row unless there is one.
    fn ensure(&self, key: RttKey) -> io::Result<()>;

    /// Forgets a row.
    fn remove(&self, key: RttKey) -> io::Result<()>;

    /// Makes a row empty, all of it at one moment. `false` when there is none.
    fn reset(&self, key: RttKey) -> io::Result<bool>;

    /// All keys, for dropping those whose peer has gone while no agent ran.
    fn keys(&self) -> io::Result<Vec<RttKey>>;

    /// Reads a row, all of it as it was at one moment.
    fn row(&self, key: RttKey) -> io::Result<Option<RttRow>>;

    /// Takes in the answer to an echo probe, with the round trip that the agent measured. That is counted
    /// unless the kernel counted its own. `NotFound` where there is no row.
    fn answered(&self, key: RttKey, probe: ProbeId, at_socket_ns: u64) -> io::Result<Measurement>;

    /// Gives up an echo probe.
    fn lost(&self, key: RttKey, probe: ProbeId) -> io::Result<LossOutcome>;

    /// Counts a round trip of a probe that the kernel does not follow (HTTP), nanoseconds. `NotFound`
    /// where there is no row.
    fn sample(&self, key: RttKey, rtt_ns: u64) -> io::Result<()>;

    /// Counts the loss of a probe that the kernel does not follow.
    fn lost_untracked(&self, key: RttKey) -> io::Result<LossOutcome>;

    /// Counts the echo probes as lost that agents before this one left without an answer: nobody else
    /// gives them up, and no reply to them is matched any more. Returns how many there were. To be called
    /// before the first probe.
    fn give_up_leftovers(&self) -> io::Result<u64>;

    /// Counts a probe that was answered over `connection`: the round trip of its handshake as it was timed
    /// on the uplink, or else the one that the agent measured, nanoseconds. `NotFound` where there is no
    /// row.
    fn connected(
        &self,
        key: RttKey,
        connection: &Connection,
        at_socket_ns: u64,
    ) -> io::Result<Measurement>;

    /// Names an address as a peer's: packets to it keep their source, and with passive round trips on, those of
    /// all connections to it are counted, in a row that comes with the first.
    fn follow(&self, peer: IpAddr, path: Path) -> io::Result<()>;

    /// Ends that. The row stays.
    fn unfollow(&self, peer: IpAddr) -> io::Result<()>;

    /// The addresses named as peers'.
    fn followed(&self) -> io::Result<Vec<IpAddr>>;
}
