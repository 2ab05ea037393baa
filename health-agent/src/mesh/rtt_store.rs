//! What the mesh needs of the datapath: rows of round-trip times, by peer.

use std::io;

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

    /// Gives up an ICMP probe, known by the identifier and sequence number of its header in host
    /// byte order. `stamped` tells whether it was to cross an uplink.
    fn lost(&self, key: RttKey, id: u16, sequence: u16, stamped: bool) -> io::Result<LossOutcome>;

    /// Counts the loss of a probe that the kernel does not follow (HTTP).
    fn lost_untracked(&self, key: RttKey) -> io::Result<LossOutcome>;
}
