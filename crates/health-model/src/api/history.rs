//! What became of the probes of the last hour.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::path::{PathKind, Protocol};

/// One target of `GET /v1/history`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TargetHistory {
    /// `cluster/node`.
    pub node: String,
    /// The address.
    pub ip: IpAddr,
    /// What it belongs to.
    pub path: PathKind,
    /// How it is probed.
    pub protocol: Protocol,
    /// The last minute, ten minutes and hour.
    pub windows: Vec<HistoryWindow>,
    /// The last results, the newest first: round trips in nanoseconds, `null` for a lost probe.
    pub last_results_ns: Vec<Option<u64>>,
}

/// What became of the probes of some time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HistoryWindow {
    /// Its length.
    pub length_ns: u64,
    /// For how much of it results are known.
    pub covered_ns: u64,
    /// Probes whose fate is known, the confirming ones included.
    pub probes: u32,
    /// Those without an answer.
    pub lost: u32,
    /// Half of the round trips took this time at most.
    pub p50_ns: Option<u64>,
    /// Nine tenths.
    pub p90_ns: Option<u64>,
    /// 99 in a hundred.
    pub p99_ns: Option<u64>,
    /// The longest.
    pub max_ns: Option<u64>,
    /// Mean difference between one round trip and the next.
    pub jitter_ns: Option<u64>,
}
