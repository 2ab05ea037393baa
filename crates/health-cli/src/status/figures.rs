//! The statistics behind the verdicts: round-trip times from the kernel, and the probe results of the last minute, ten
//! minutes and hour.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use health_api::client::{Client, ClientError};
use health_api::rtt::RttFigures;
use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, RttKey, RttRow};
use health_datapath::dump::Pinned;
use health_model::api::{
    ContainerProbeSummary, HistoryWindow, PathKind, PathMtuEntry, PathMtuStatus, Protocol,
    TargetHistory,
};
use health_model::duration::{go_duration, short_duration};
use health_model::settings::Location;
use health_net::clock;
use hyper::StatusCode;

use super::view::Target;

/// Rows of `HEALTH_RTT`.
pub(crate) type RttRows = BTreeMap<RttKey, RttRow>;

/// Data about the targets beyond their last results.
pub(crate) struct Figures {
    /// Statistics, or why they are unavailable.
    pub(crate) rtt: Result<RttRows, String>,
    /// By node.
    pub(crate) history: BTreeMap<String, Vec<TargetHistory>>,
    /// Number of results to show per target.
    pub(crate) last_results: usize,
    /// Path MTUs by node address.
    pub(crate) path_mtus: BTreeMap<IpAddr, PathMtuStatus>,
    /// The state of container probes; not enabled if the agent probes no containers.
    pub(crate) containers: ContainerProbeSummary,
}

impl Figures {
    /// Reads the figures of the agent at `location`.
    pub(crate) async fn read(client: &Client, location: &Location) -> Result<Self, ClientError> {
        let mut history: BTreeMap<String, Vec<TargetHistory>> = BTreeMap::new();
        for target in read_history(client).await? {
            history.entry(target.node.clone()).or_default().push(target);
        }
        Ok(Self {
            rtt: rtt_rows(client, location),
            history,
            last_results: 0,
            path_mtus: read_path_mtus(client).await?,
            containers: read_containers(client).await?,
        })
    }

    /// The statistics of a target, one line each.
    pub(super) fn lines(&self, node: &str, target: Target) -> Vec<String> {
        let mut lines = Vec::new();
        if let Ok(rows) = &self.rtt
            && let Some(row) = rows.get(&rtt_key(target))
        {
            let figures = RttFigures::new(row.into(), clock::state().ok());
            lines.push(figures.to_string());
            lines.extend(figures.split());
            lines.extend(figures.directions());
        }
        let history = self.history.get(node).into_iter().flatten();
        for history in history.filter(|h| (h.ip, h.path, h.protocol) == target) {
            lines.extend(distinct_windows(&history.windows).map(window_line));
            lines.extend(last_results_line(
                &history.last_results_ns,
                self.last_results,
            ));
        }
        lines
    }
}

/// The known path MTUs, by node address.
pub(crate) async fn read_path_mtus(
    client: &Client,
) -> Result<BTreeMap<IpAddr, PathMtuStatus>, ClientError> {
    let paths: Vec<PathMtuEntry> = client.get("/v1beta/status/path-mtu").await?;
    let known = paths.into_iter();
    Ok(known
        .filter_map(|path| Some((path.ip, path.path_mtu?)))
        .collect())
}

/// The history of all targets; empty if the agent keeps none.
pub(crate) async fn read_history(client: &Client) -> Result<Vec<TargetHistory>, ClientError> {
    match client.get("/v1/history").await {
        Err(ClientError::Refused { code, .. }) if code == StatusCode::NOT_FOUND => Ok(Vec::new()),
        history => history,
    }
}

/// The state of container probes; the default for agents that do not support them.
async fn read_containers(client: &Client) -> Result<ContainerProbeSummary, ClientError> {
    match client.get("/v1/probes/summary").await {
        Err(ClientError::Refused { code, .. }) if code == StatusCode::NOT_FOUND => {
            Ok(ContainerProbeSummary::default())
        }
        summary => summary,
    }
}

/// Reads the statistics from the pinned map, which only root may read. Returns the reason if that fails.
pub(crate) fn rtt_rows(client: &Client, location: &Location) -> Result<RttRows, String> {
    if client.is_remote() {
        return Err("the map is on the agent's machine".to_owned());
    }
    Pinned::open(location)
        .and_then(|pinned| pinned.rtt())
        .map(|rows| rows.into_iter().collect())
        .map_err(|error| error.to_string())
}

fn rtt_key((ip, kind, protocol): Target) -> RttKey {
    let path = match kind {
        PathKind::Host => Path::Host,
        PathKind::Endpoint => Path::Endpoint,
    };
    RttKey {
        peer: ip.into(),
        path: path as u8,
        protocol: match protocol {
            Protocol::Icmp => PROTOCOL_ICMP,
            Protocol::Http => PROTOCOL_HTTP,
        },
        pad: 0,
    }
}

/// The windows with results, except those that contain no more results than the previous one.
fn distinct_windows(windows: &[HistoryWindow]) -> impl Iterator<Item = &HistoryWindow> {
    let before = [None].into_iter().chain(windows.iter().map(Some));
    let grows = |&(window, before): &(&HistoryWindow, Option<&HistoryWindow>)| {
        window.probes > 0 && before.is_none_or(|before| before.covered_ns < window.covered_ns)
    };
    windows
        .iter()
        .zip(before)
        .filter(grows)
        .map(|(window, _)| window)
}

/// Formats a window: `1m: 6 probes, 1 lost (16.7%), p50=21.3µs ...`, plus the covered part if it is incomplete.
fn window_line(window: &HistoryWindow) -> String {
    let mut text = short_length(window.length_ns);
    // The newest results are always seconds old, so mention the coverage only if more than a tenth is missing.
    if window.covered_ns < window.length_ns / 10 * 9 {
        let covered = Duration::from_nanos(window.covered_ns).as_secs();
        text += &format!(" (the last {})", short_length(covered * 1_000_000_000));
    }
    text += &format!(": {} probes, {} lost", window.probes, window.lost);
    if window.lost > 0 {
        let percent = 100.0 * f64::from(window.lost) / f64::from(window.probes);
        text += &format!(" ({percent:.1}%)");
    }
    let figures = [
        ("p50", window.p50_ns),
        ("p90", window.p90_ns),
        ("p99", window.p99_ns),
        ("max", window.max_ns),
        ("jitter", window.jitter_ns),
    ];
    let known = figures
        .into_iter()
        .filter_map(|(name, ns)| Some((name, ns?)));
    for (index, (name, ns)) in known.enumerate() {
        let comma = if index == 0 { "," } else { "" };
        text += &format!("{comma} {name}={}", short_duration(ns));
    }
    text
}

/// The newest `count` results.
fn last_results_line(results: &[Option<u64>], count: usize) -> Option<String> {
    let shown: Vec<String> = results
        .iter()
        .take(count)
        .map(|result| result.map_or_else(|| "lost".to_owned(), short_duration))
        .collect();
    (!shown.is_empty()).then(|| format!("newest first: {}", shown.join(" ")))
}

fn nanoseconds(ns: u64) -> String {
    go_duration(i64::try_from(ns).unwrap_or(i64::MAX))
}

/// Formats a length without the parts that are zero: `1m` for a minute.
fn short_length(ns: u64) -> String {
    let text = nanoseconds(ns);
    let text = text
        .strip_suffix("m0s")
        .map_or(text.clone(), |t| format!("{t}m"));
    text.strip_suffix("h0m")
        .map_or(text.clone(), |t| format!("{t}h"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60_000_000_000;

    fn window() -> HistoryWindow {
        HistoryWindow {
            length_ns: MINUTE,
            covered_ns: MINUTE - 7_000_000,
            probes: 6,
            lost: 0,
            p50_ns: Some(21_300),
            p90_ns: Some(30_000),
            p99_ns: Some(31_049),
            max_ns: Some(1_199_500),
            jitter_ns: Some(125),
        }
    }

    #[test]
    fn a_window_takes_a_line() {
        assert_eq!(
            window_line(&window()),
            "1m: 6 probes, 0 lost, p50=21.3µs p90=30µs p99=31µs max=1.2ms jitter=125ns"
        );
    }

    #[test]
    fn loss_and_a_short_past_are_said() {
        let lost = HistoryWindow {
            length_ns: 60 * MINUTE,
            covered_ns: 90_500_000_000,
            lost: 1,
            jitter_ns: None,
            ..window()
        };
        assert_eq!(
            window_line(&lost),
            "1h (the last 1m30s): 6 probes, 1 lost (16.7%), p50=21.3µs p90=30µs p99=31µs max=1.2ms"
        );
        let silent = HistoryWindow {
            length_ns: 10 * MINUTE,
            covered_ns: 10 * MINUTE,
            lost: 6,
            p50_ns: None,
            p90_ns: None,
            p99_ns: None,
            max_ns: None,
            jitter_ns: None,
            ..window()
        };
        assert_eq!(window_line(&silent), "10m: 6 probes, 6 lost (100.0%)");
    }

    #[test]
    fn a_window_that_reports_nothing_new_is_left_out() {
        let length = |length_ns, covered_ns| HistoryWindow {
            length_ns,
            covered_ns,
            ..window()
        };
        let windows = [
            length(MINUTE, 20_000_000_000),
            length(10 * MINUTE, 20_000_000_000),
            length(60 * MINUTE, 20_000_000_001),
        ];
        let lengths: Vec<u64> = distinct_windows(&windows)
            .map(|window| window.length_ns)
            .collect();
        assert_eq!(lengths, [MINUTE, 60 * MINUTE]);
        let mut windows = windows;
        windows[0].probes = 0;
        assert_eq!(distinct_windows(&windows).count(), 1);
        assert_eq!(distinct_windows(&[]).count(), 0);
    }

    #[test]
    fn the_last_results_are_the_newest() {
        let results = [Some(21_300), None, Some(1_000)];
        assert_eq!(
            last_results_line(&results, 2).as_deref(),
            Some("newest first: 21.3µs lost")
        );
        assert_eq!(last_results_line(&results, 0), None);
        assert_eq!(last_results_line(&[], 2), None);
    }
}
