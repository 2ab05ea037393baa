//! Probe results of the last hour.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::path::{PathKind, Protocol};

/// One target of `GET /v1/history`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct TargetHistory {
    /// `cluster/node`.
    pub node: String,
    /// The address.
    pub ip: IpAddr,
    /// What the address belongs to.
    pub path: PathKind,
    /// How it is probed.
    pub protocol: Protocol,
    /// The last minute, ten minutes and hour.
    pub windows: Vec<HistoryWindow>,
    /// The last results, newest first: round-trip times in nanoseconds, `null` for a lost probe.
    pub last_results_ns: Vec<Option<u64>>,
}

/// Probe results within one time window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct HistoryWindow {
    /// Length of the window.
    pub length_ns: u64,
    /// The part of the window for which results are known.
    pub covered_ns: u64,
    /// Probes whose outcome is known, including confirmation probes.
    pub probes: u32,
    /// Probes without an answer.
    pub lost: u32,
    /// Median round-trip time.
    pub p50_ns: Option<u64>,
    /// 90th percentile.
    pub p90_ns: Option<u64>,
    /// 99th percentile.
    pub p99_ns: Option<u64>,
    /// Maximum.
    pub max_ns: Option<u64>,
    /// Mean difference between successive round-trip times.
    pub jitter_ns: Option<u64>,
}
