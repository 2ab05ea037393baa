//! What the mesh needs of the datapath: rows of round-trip times, by peer.

use std::io;
use std::net::{IpAddr, SocketAddr};

use health_common::probe::Path;
use health_common::rtt::{RttKey, RttRow};

/// How the kernel took the report of a lost probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossOutcome {
    /// Counted as lost.
    Counted,
    /// The reply had been matched in the kernel before: not lost.
    AlreadyAnswered,
    /// There is no row for this peer (any more).
    UnknownPeer,
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

/// A round trip that was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Nanoseconds.
    pub rtt_ns: u64,
    /// Whether the programs on the uplink timed it; else it is what the agent measured.
    pub by_kernel: bool,
}

/// Rows of `HEALTH_RTT`. A row must exist before the kernel counts anything in it.
pub trait RttStore: Send + Sync + 'static {
    /// Makes an empty row unless there is one.
    fn ensure(&self, key: RttKey) -> io::Result<()>;

    /// Forgets a row.
    fn remove(&self, key: RttKey) -> io::Result<()>;

    /// All keys, for dropping those whose peer has gone while no agent ran.
    fn keys(&self) -> io::Result<Vec<RttKey>>;

    /// Reads a row.
    fn row(&self, key: RttKey) -> io::Result<Option<RttRow>>;

    /// Counts a round trip that the agent measured itself, nanoseconds.
    fn sample(&self, key: RttKey, rtt_ns: u64) -> io::Result<()>;

    /// Counts a probe that was answered over `connection`: the round trip of its handshake, or where that
    /// was not timed on an uplink, the one that the agent measured, nanoseconds.
    fn connected(
        &self,
        key: RttKey,
        connection: &Connection,
        measured_ns: u64,
    ) -> io::Result<Counted>;

    /// Gives up an ICMP probe, known by the identifier and sequence number of its header in host
    /// byte order. `stamped` tells whether it was to cross an uplink.
    fn lost(&self, key: RttKey, id: u16, sequence: u16, stamped: bool) -> io::Result<LossOutcome>;

    /// Counts the loss of a probe that the kernel does not follow (HTTP).
    fn lost_untracked(&self, key: RttKey) -> io::Result<LossOutcome>;

    /// Has the round trips of all connections to an address counted, in a row that comes with the first.
    fn follow(&self, peer: IpAddr, path: Path) -> io::Result<()>;

    /// Ends that. The row stays.
    fn unfollow(&self, peer: IpAddr) -> io::Result<()>;

    /// The addresses whose connections are counted.
    fn followed(&self) -> io::Result<Vec<IpAddr>>;
}
