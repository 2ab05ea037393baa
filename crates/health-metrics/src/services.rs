//! Metrics of services, with kube-proxy's names, so that dashboards and alerts for kube-proxy continue to work.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use std::{fmt, io, iter};

use health_service::services::{ChangeCounts, Work};
use health_service::spec::PortKey;
use health_service::state::NoLocalEndpoints;
use health_settings::ServiceProxyMode;
use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::format::Format;
use super::write::write;

const PREFIX: &str = "kubeproxy";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Code {
    code: u32,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Policy {
    traffic_policy: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Namespace {
    namespace: String,
}

type Seconds = Gauge<f64, AtomicU64>;

/// Counters and measurements since the start.
#[derive(Debug)]
pub struct ServiceMetrics {
    mode: ServiceProxyMode,
    syncs: Histogram,
    full_syncs: Histogram,
    partial_syncs: Histogram,
    programming: Histogram,
    last_sync: Seconds,
    failures: Counter,
    refused: Family<Namespace, Gauge>,
    no_local_endpoints: Family<Policy, Gauge>,
    healthz: Family<Code, Counter>,
    livez: Family<Code, Counter>,
}

impl ServiceMetrics {
    /// Creates metrics for services in this mode.
    pub fn new(mode: ServiceProxyMode) -> Self {
        // 1 ms to 16 s, as in kube-proxy.
        let syncs = || Histogram::new(exponential_buckets(0.001, 2.0, 15));
        Self {
            mode,
            syncs: syncs(),
            full_syncs: syncs(),
            partial_syncs: syncs(),
            programming: Histogram::new(programming_buckets()),
            last_sync: Gauge::default(),
            failures: Counter::default(),
            refused: Family::default(),
            no_local_endpoints: Family::default(),
            healthz: Family::default(),
            livez: Family::default(),
        }
    }
}

/// Bounds in seconds, as in kube-proxy: 0.25, 0.5, each second of the first minute, then wider steps up to five
/// minutes.
fn programming_buckets() -> impl Iterator<Item = f64> {
    let steps = |first: u16, last, by| (first..=last).step_by(by).map(f64::from);
    [0.25, 0.5]
        .into_iter()
        .chain(steps(1, 59, 1))
        .chain(steps(60, 115, 5))
        .chain(steps(120, 300, 30))
}

impl ServiceMetrics {
    /// The mode in force.
    pub fn mode(&self) -> ServiceProxyMode {
        self.mode
    }

    /// Records a sync, its duration and its end. Even if the sync failed, the state may be in force except for refused
    /// ports.
    pub fn note_sync(
        &self,
        work: &Work<'_>,
        took: Duration,
        is_success: bool,
        is_in_force: bool,
        end: Timestamp,
    ) {
        let seconds = took.as_secs_f64();
        self.syncs.observe(seconds);
        let of_kind = match work.is_full {
            true => &self.full_syncs,
            false => &self.partial_syncs,
        };
        of_kind.observe(seconds);
        if !is_success {
            self.failures.inc();
        }
        if !is_in_force {
            return;
        }
        self.last_sync.set(seconds_of(end));
        for time in work.changes.trigger_times.values().flatten() {
            let waited = end.duration_since(*time).as_secs_f64();
            // Negative if a clock was set back.
            if waited >= 0.0 {
                self.programming.observe(waited);
            }
        }
        let NoLocalEndpoints { internal, external } = work.state.no_local_endpoints();
        for (traffic_policy, count) in [("internal", internal), ("external", external)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            let gauges = &self.no_local_endpoints;
            gauges.get_or_create(&Policy { traffic_policy }).set(count);
        }
    }

    /// Records the ports that are not in force.
    pub fn note_refused<'a>(&self, ports: impl Iterator<Item = &'a PortKey>) {
        let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
        for port in ports {
            *counts.entry(&port.name.service.namespace).or_default() += 1;
        }
        self.refused.clear();
        for (namespace, count) in counts {
            let namespace = namespace.to_owned();
            let gauge = self.refused.get_or_create(&Namespace { namespace });
            gauge.set(count);
        }
    }

    /// Counts a response to `GET /healthz` with this HTTP status.
    pub fn note_healthz(&self, code: u16) {
        self.healthz
            .get_or_create(&Code { code: code.into() })
            .inc();
    }

    /// Counts a response to `GET /livez` with this HTTP status.
    pub fn note_livez(&self, code: u16) {
        self.livez.get_or_create(&Code { code: code.into() }).inc();
    }

    /// Writes all metrics, including these counts of changes.
    pub fn scrape(
        self: &Arc<Self>,
        changes: ChangeCounts,
        format: Format,
        out: &mut dyn io::Write,
    ) -> io::Result<()> {
        let mut registry = Registry::with_prefix(PREFIX);
        let scrape = Scrape {
            metrics: self.clone(),
            changes,
        };
        registry.register_collector(Box::new(scrape));
        write(&registry, iter::empty(), format, out)
    }
}

/// Seconds since 1970.
fn seconds_of(time: Timestamp) -> f64 {
    time.duration_since(Timestamp::UNIX_EPOCH).as_secs_f64()
}

/// The contents of one scrape.
#[derive(Debug)]
struct Scrape {
    metrics: Arc<ServiceMetrics>,
    changes: ChangeCounts,
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode_syncs(&mut encoder)?;
        self.encode_changes(&mut encoder)?;
        self.encode_answers(&mut encoder)
    }
}

/// Name, help and values of a metric.
type Described<'a> = (&'a str, &'a str, &'a dyn EncodeMetric);

impl Scrape {
    fn encode_syncs(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let metrics = &*self.metrics;
        let sync_failures = format!("sync_proxy_rules_{}_sync_failures", metrics.mode);
        let last_queued = self.changes.last_queued.map(seconds_of).unwrap_or_default();
        let families: [Described<'_>; 8] = [
            (
                "sync_proxy_rules_duration_seconds",
                "Duration of syncs",
                &metrics.syncs,
            ),
            (
                "sync_full_proxy_rules_duration_seconds",
                "Duration of full syncs, which check the whole datapath",
                &metrics.full_syncs,
            ),
            (
                "sync_partial_proxy_rules_duration_seconds",
                "Duration of partial syncs, which only apply changes",
                &metrics.partial_syncs,
            ),
            (
                "network_programming_duration_seconds",
                "Time from a change to endpoints in the cluster until it was in the kernel",
                &metrics.programming,
            ),
            (
                "sync_proxy_rules_last_timestamp_seconds",
                "Time of the last successful sync, in seconds since 1970",
                &metrics.last_sync,
            ),
            (
                "sync_proxy_rules_last_queued_timestamp_seconds",
                "Time when a change was last noticed, in seconds since 1970",
                &ConstGauge::new(last_queued),
            ),
            (&sync_failures, "Failed syncs", &metrics.failures),
            (
                "sync_proxy_rules_refused_ports",
                "Ports that are not in force because a map is full",
                &metrics.refused,
            ),
        ];
        encode_all(&families, encoder)
    }

    fn encode_changes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let changes = &self.changes;
        let families: [Described<'_>; 4] = [
            (
                "sync_proxy_rules_service_changes",
                "Changes to services",
                &ConstCounter::new(changes.services),
            ),
            (
                "sync_proxy_rules_service_changes_pending",
                "Changes to services that are not in the kernel yet",
                &ConstGauge::new(changes.pending_services),
            ),
            (
                "sync_proxy_rules_endpoint_changes",
                "Changes to endpoint slices",
                &ConstCounter::new(changes.endpoints),
            ),
            (
                "sync_proxy_rules_endpoint_changes_pending",
                "Changes to endpoint slices that are not in the kernel yet",
                &ConstGauge::new(changes.pending_endpoints),
            ),
        ];
        encode_all(&families, encoder)
    }

    fn encode_answers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let metrics = &*self.metrics;
        let families: [Described<'_>; 3] = [
            (
                "sync_proxy_rules_no_local_endpoints_total",
                "Ports with endpoints, but none on this node, although some of their traffic must stay on it",
                &metrics.no_local_endpoints,
            ),
            (
                "proxy_healthz",
                "Answers to GET /healthz by HTTP status",
                &metrics.healthz,
            ),
            (
                "proxy_livez",
                "Answers to GET /livez by HTTP status",
                &metrics.livez,
            ),
        ];
        encode_all(&families, encoder)
    }
}

fn encode_all(families: &[Described<'_>], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    for (name, help, metric) in families {
        let described = encoder.encode_descriptor(name, help, None, metric.metric_type())?;
        metric.encode(described)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use health_model::policy::Protocol;
    use health_service::choice::Topology;
    use health_service::spec::{ServiceName, ServicePortName};
    use health_service::state::{Changes, State};

    use super::*;

    fn scraped(metrics: &Arc<ServiceMetrics>) -> String {
        let changes = ChangeCounts {
            services: 7,
            pending_services: 1,
            endpoints: 9,
            pending_endpoints: 2,
            last_queued: Timestamp::from_second(50).ok(),
        };
        let mut text = Vec::new();
        metrics.scrape(changes, Format::Classic, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    /// Metrics of a full sync that succeeded after 3 ms, and of a partial sync that failed.
    fn metrics() -> Arc<ServiceMetrics> {
        let metrics = Arc::new(ServiceMetrics::new(ServiceProxyMode::Ebpf));
        let state = State::new(Topology {
            node: "here".into(),
            zone: None,
        });
        let second = |second| Timestamp::from_second(second).unwrap();
        let web = ServiceName::new("shop", "web");
        let times = vec![second(98), second(200)];
        let changes = Changes {
            trigger_times: BTreeMap::from([(web, times)]),
            ..Changes::default()
        };
        let work = |is_full| Work {
            state: &state,
            changes: &changes,
            is_full,
        };
        let took = Duration::from_millis(3);
        metrics.note_sync(&work(true), took, true, true, second(100));
        metrics.note_sync(&work(false), took, false, false, second(101));
        let port = |namespace, port: &str| PortKey {
            name: ServicePortName {
                service: ServiceName::new(namespace, "web"),
                port: port.into(),
                protocol: Protocol::TCP,
            },
            family: health_model::ipam::Family::V4,
        };
        metrics.note_refused([port("gone", "a")].iter());
        metrics.note_refused([port("shop", "a"), port("shop", "b")].iter());
        metrics.note_healthz(503);
        metrics.note_livez(200);
        metrics
    }

    #[test]
    fn syncs_changes_and_answers_have_the_names_of_kube_proxy() {
        let text = scraped(&metrics());
        for line in [
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.002\"} 0",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.004\"} 2",
            "kubeproxy_sync_full_proxy_rules_duration_seconds_count 1",
            "kubeproxy_sync_partial_proxy_rules_duration_seconds_count 1",
            "kubeproxy_network_programming_duration_seconds_bucket{le=\"2.0\"} 1",
            "kubeproxy_network_programming_duration_seconds_count 1",
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds 100.0",
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds 50.0",
            "kubeproxy_sync_proxy_rules_ebpf_sync_failures_total 1",
            "kubeproxy_sync_proxy_rules_refused_ports{namespace=\"shop\"} 2",
            "kubeproxy_sync_proxy_rules_service_changes_total 7",
            "kubeproxy_sync_proxy_rules_service_changes_pending 1",
            "kubeproxy_sync_proxy_rules_endpoint_changes_total 9",
            "kubeproxy_sync_proxy_rules_endpoint_changes_pending 2",
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"external\"} 0",
            "kubeproxy_proxy_healthz_total{code=\"503\"} 1",
            "kubeproxy_proxy_livez_total{code=\"200\"} 1",
        ] {
            assert!(text.lines().any(|one| one == line), "no {line} in:\n{text}");
        }
        assert!(!text.contains("gone"), "{text}");
    }

    #[test]
    fn the_page_on_metrics_lists_exactly_those_there_are() {
        let page = include_str!("../../../docs/metrics.md");
        let (_, page) = page.split_once("| metric, after `kubeproxy_` |").unwrap();
        let (page, _) = page.split_once("\n\n").unwrap();
        let names = page.lines().filter_map(|line| {
            let (cell, _) = line.strip_prefix("| `")?.split_once("` |")?;
            Some(cell.split("`, `").map(|name| format!("{PREFIX}_{name}")))
        });
        let documented: BTreeSet<String> = names.flatten().collect();
        let text = scraped(&metrics());
        let described: BTreeSet<String> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
            .map(str::to_owned)
            .collect();
        assert_eq!(described, documented);
    }
}
