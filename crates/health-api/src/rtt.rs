//! Rows of round-trip times as shown by the API and the command line.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use health_common::probe::Path;
use health_common::rtt::{
    PROTOCOL_HTTP, PROTOCOL_ICMP, PROTOCOL_TCP, RttKey, SOURCE_KERNEL, SOURCE_SOCKET,
};
use health_model::api::NodeList;
use health_model::duration::short_duration;
use health_net::clock::ClockState;
use serde::Serialize;

use super::rtt_summary::{Histogram, RttSummary};

/// The `cluster/node` name for each address of the nodes and their health endpoints.
pub fn names_by_address(list: NodeList) -> HashMap<IpAddr, String> {
    let mut names = HashMap::new();
    for node in list.nodes {
        for address in node.addresses.into_iter().chain(node.health_addresses) {
            names.insert(address, node.name.clone());
        }
    }
    names
}

/// Round trips to one address: a row of `GET /v1/rtt` and of `bpf rtt list`. Times are in nanoseconds, and `null` if
/// unknown.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct RttEntry<'a> {
    /// `cluster/node`, if known.
    pub node: Option<&'a str>,
    /// The measured path.
    #[serde(flatten)]
    pub path: RttPath,
    /// The measurements.
    #[serde(flatten)]
    pub figures: RttFigures,
}

/// The path measured by a row of `HEALTH_RTT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct RttPath {
    /// The address.
    pub peer: IpAddr,
    /// `host` or `endpoint`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["host", "endpoint", "unknown"])))]
    pub path: &'static str,
    /// Probes by `ICMP` or `HTTP`, or existing `TCP` connections.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["ICMP", "HTTP", "TCP", "unknown"])))]
    pub protocol: &'static str,
}

impl From<&RttKey> for RttPath {
    fn from(key: &RttKey) -> Self {
        Self {
            peer: key.peer.to_ip(),
            path: path_name(key.path),
            protocol: match key.protocol {
                PROTOCOL_ICMP => "ICMP",
                PROTOCOL_HTTP => "HTTP",
                PROTOCOL_TCP => "TCP",
                _ => "unknown",
            },
        }
    }
}

impl fmt::Display for RttPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.peer, self.path, self.protocol)
    }
}

/// The name of a [`Path`] that is stored as a byte in a map.
pub fn path_name(path: u8) -> &'static str {
    match Path::from_u8(path) {
        Some(Path::Host) => "host",
        Some(Path::Endpoint) => "endpoint",
        None => "unknown",
    }
}

/// The values of a row in `HEALTH_RTT`. Times are in nanoseconds; unknown values are `null`.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct RttFigures {
    /// Who timestamped the last round trip: `kernel` or `socket`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["kernel", "socket", null])))]
    pub source: Option<&'static str>,
    /// Round trips measured.
    pub samples: u64,
    /// Probes without a reply.
    pub lost: u64,
    /// Share of the probes that were lost, 0 to 1.
    #[cfg_attr(feature = "openapi", schemars(range(min = 0, max = 1)))]
    pub loss_ratio: Option<f64>,
    /// Replies to probes that had already timed out.
    pub late: u64,
    /// Additional replies to probes that had already been answered.
    pub duplicates: u64,
    /// The last round trip.
    pub last_ns: Option<u64>,
    /// The shortest round trip.
    pub min_ns: Option<u64>,
    /// The mean round trip.
    pub mean_ns: Option<u64>,
    /// 50th percentile of the round trips.
    pub p50_ns: Option<u64>,
    /// 90th percentile.
    pub p90_ns: Option<u64>,
    /// 99th percentile.
    pub p99_ns: Option<u64>,
    /// The longest round trip.
    pub max_ns: Option<u64>,
    /// Smoothed round trip, gain 1/8 (RFC 6298).
    pub smoothed_ns: Option<u64>,
    /// Mean deviation between consecutive round trips, gain 1/16 (RFC 3550).
    pub jitter_ns: Option<u64>,
    /// Round trips with a known time in the peer's host.
    pub remote_samples: u64,
    /// Time in the peer's host in the last round trip.
    pub remote_last_ns: Option<u64>,
    /// Mean time in the peer's host.
    pub remote_mean_ns: Option<u64>,
    /// Smoothed time in the peer's host, gain 1/8.
    pub remote_smoothed_ns: Option<u64>,
    /// Longest time in the peer's host.
    pub remote_max_ns: Option<u64>,
    /// Share of the round trips not spent in the peer's host, 0 to 1.
    #[cfg_attr(feature = "openapi", schemars(range(min = 0, max = 1)))]
    pub network_share: Option<f64>,
    /// Round trips with a known delay per direction.
    pub one_way_samples: u64,
    /// Delay to the peer in the last round trip.
    pub forward_last_ns: Option<i64>,
    /// The shortest delay to the peer.
    pub forward_min_ns: Option<i64>,
    /// Smoothed delay to the peer, gain 1/8.
    pub forward_smoothed_ns: Option<i64>,
    /// Delay back in the last round trip.
    pub back_last_ns: Option<i64>,
    /// The shortest delay back.
    pub back_min_ns: Option<i64>,
    /// Smoothed delay back, gain 1/8.
    pub back_smoothed_ns: Option<i64>,
    /// Whether this host's clock is synchronised; `null` without one-way delays.
    pub clock_synchronised: Option<bool>,
    /// Estimated current error of this host's clock; `null` while it is not synchronised.
    pub clock_error_ns: Option<u64>,
    /// Maximum error of this host's clock.
    pub clock_max_error_ns: Option<u64>,
    /// Number of round trips by duration.
    pub histogram_ns: Histogram,
}

impl RttFigures {
    /// The values of `row`. This host's `clock` determines the accuracy of the one-way delays.
    pub fn new(row: RttSummary, clock: Option<ClockState>) -> Self {
        let remote = |ns| (row.remote.samples > 0).then_some(ns);
        let one_way = |ns| (row.one_way.samples > 0).then_some(ns);
        let (forward, back) = (row.one_way.forward, row.one_way.back);
        let clock = clock.filter(|_| row.one_way.samples > 0);
        let synchronised = clock.filter(|clock| clock.synchronised);
        let percentiles = row.percentiles_ns([50.0, 90.0, 99.0]);
        let source = match row.source {
            SOURCE_KERNEL => Some("kernel"),
            SOURCE_SOCKET => Some("socket"),
            _ => None,
        };
        Self {
            source: source.filter(|_| row.samples > 0),
            samples: row.samples,
            lost: row.lost,
            loss_ratio: row.loss_ratio().map(ratio),
            late: row.late,
            duplicates: row.duplicates,
            last_ns: row.last_ns(),
            min_ns: row.min_ns(),
            mean_ns: row.mean_ns(),
            p50_ns: percentiles.map(|[p50, _, _]| p50),
            p90_ns: percentiles.map(|[_, p90, _]| p90),
            p99_ns: percentiles.map(|[_, _, p99]| p99),
            max_ns: row.max_ns(),
            smoothed_ns: row.known(row.smoothed_ns),
            jitter_ns: row.jitter_ns(),
            remote_samples: row.remote.samples,
            remote_last_ns: remote(row.remote.last_ns),
            remote_mean_ns: row.remote.sum_ns.checked_div(row.remote.samples),
            remote_smoothed_ns: remote(row.remote.smoothed_ns),
            remote_max_ns: row.remote.max_ns,
            network_share: row.network_share().map(ratio),
            one_way_samples: row.one_way.samples,
            forward_last_ns: one_way(forward.last_ns),
            forward_min_ns: forward.min_ns,
            forward_smoothed_ns: one_way(forward.smoothed_ns),
            back_last_ns: one_way(back.last_ns),
            back_min_ns: back.min_ns,
            back_smoothed_ns: one_way(back.smoothed_ns),
            clock_synchronised: clock.map(|clock| clock.synchronised),
            clock_error_ns: synchronised.map(|clock| nanoseconds(clock.estimated_error_us)),
            clock_max_error_ns: synchronised.map(|clock| nanoseconds(clock.max_error_us)),
            histogram_ns: row.histogram,
        }
    }

    /// Where the time was spent, as far as the peer's programs report it.
    pub fn split(&self) -> Option<String> {
        let share = self.network_share?;
        let times = [
            ("mean", self.remote_mean_ns),
            ("last", self.remote_last_ns),
            ("max", self.remote_max_ns),
        ];
        let times: Vec<String> = times
            .into_iter()
            .filter_map(|(name, ns)| Some(format!("{name}={}", short_duration(ns?))))
            .collect();
        Some(format!(
            "network {}, in the peer's host {}",
            percent(share),
            times.join(" ")
        ))
    }

    /// The delays of both directions and their accuracy.
    pub fn directions(&self) -> Option<String> {
        Some(format!(
            "there {}, back {} (this clock: {})",
            signed(self.forward_smoothed_ns?),
            signed(self.back_smoothed_ns?),
            self.clock()?
        ))
    }

    /// How accurate this host's clock is.
    pub fn clock(&self) -> Option<String> {
        let synchronised = self.clock_synchronised?;
        Some(match (synchronised, self.clock_error_ns) {
            (true, Some(error)) => format!(
                "±{}, at most {}",
                short_duration(error),
                short_duration(self.clock_max_error_ns.unwrap_or(error))
            ),
            _ => "unsynchronised".to_owned(),
        })
    }
}

impl fmt::Display for RttFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "samples={} lost={}", self.samples, self.lost)?;
        let times = [
            ("min", self.min_ns),
            ("mean", self.mean_ns),
            ("p50", self.p50_ns),
            ("p90", self.p90_ns),
            ("p99", self.p99_ns),
            ("max", self.max_ns),
            ("jitter", self.jitter_ns),
        ];
        for (name, ns) in times {
            if let Some(ns) = ns {
                write!(f, " {name}={}", short_duration(ns))?;
            }
        }
        Ok(())
    }
}

/// Rounds to a hundredth of a percent: the inputs are not more precise.
fn ratio(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// Formats a ratio as a percentage.
pub fn percent(ratio: f64) -> String {
    let thousandths = (ratio * 1e3).round();
    if thousandths % 10.0 == 0.0 {
        format!("{:.0}%", thousandths / 10.0)
    } else {
        format!("{:.1}%", thousandths / 10.0)
    }
}

/// Formats a delay, which clock errors may make negative.
pub fn signed(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    format!("{sign}{}", short_duration(ns.unsigned_abs()))
}

fn nanoseconds(microseconds: u64) -> u64 {
    let duration = Duration::from_micros(microseconds);
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}
