//! Sample data for the tests in this folder.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_ICMP, RttKey, RttRow};
use health_datapath::conntrack::{Cause, CollectionOutcome, Counts, Family, Fill, Pass};
use health_datapath::dump::{DumpError, MetricRow};
use health_endpoint::lifecycle::State;
use health_endpoint::manager::DURATION_BOUNDS;
use health_model::api::{
    AddressGroupStatus, ConnectivityStatus, ContainerProbeSummary, Diagnosis, HealthStatus,
    NodeStatus, PathStatus, PodProblem, SelfStatus,
};
use health_probe::prober::{Histogram, ProbeStats, Stats};
use health_probe::spec::{self, ProbeType};
use jiff::Timestamp;

use super::Maps;
use super::containers::Sample;
use super::summary::Summary;

/// Maps that contain these rows.
pub(super) struct Rows(pub(super) Vec<(RttKey, RttRow)>);

impl Maps for Rows {
    fn rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow)) -> Result<(), DumpError> {
        self.0.iter().for_each(|(key, row)| each(key, row));
        Ok(())
    }

    fn counters(&self) -> Result<Vec<MetricRow>, DumpError> {
        Ok(Vec::new())
    }
}

/// A pod with a liveness probe that failed twice and succeeded once, and a container that was restarted.
pub(super) fn containers() -> Sample {
    let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, namespace: shop, uid: u-1}\n\
                spec: {containers: [{name: app}]}";
    let pod = Arc::new(spec::read(text).pods.remove(0));
    let mut durations = Histogram {
        sum: Duration::from_millis(1_012),
        ..Histogram::default()
    };
    durations.buckets[3] = 2;
    durations.buckets[9] = 1;
    let app: Arc<str> = "app".into();
    let liveness = ProbeStats {
        pod: pod.clone(),
        runs: [1, 2, 0, 4],
        durations: durations.clone(),
    };
    Sample {
        statistics: Stats {
            probes: HashMap::from([(
                (pod.uid.clone(), app.clone(), ProbeType::Liveness),
                liveness,
            )]),
            delays: durations,
            ..Stats::default()
        },
        restarts: vec![(pod, app, 3)],
        summary: ContainerProbeSummary {
            enabled: true,
            pods: 12,
            ready_pods: 11,
            probes: 30,
            failing: 1,
            errored: 2,
            overdue: 3,
            problems: vec![PodProblem {
                subject: "pods/db.yaml".into(),
                problem: "no object".into(),
            }],
            ..ContainerProbeSummary::default()
        },
    }
}

/// Event counts after the last monitor client has left.
pub(super) fn events() -> health_datapath::events::Counts {
    health_datapath::events::Counts {
        readers: 0,
        read: 20,
        lost_in_ring: 3,
        lost_by_readers: 4,
    }
}

/// One collection of IPv4 entries, triggered by a full map, and one of IPv6 entries that failed.
pub(super) fn collections() -> Counts {
    let mut counts = Counts::default();
    counts.interval = Duration::from_secs(300);
    counts.fills.push(Fill {
        map: "HEALTH_CT4",
        entries: 16_384,
        capacity: 65_536,
    });
    let collected = CollectionOutcome {
        flows: Pass {
            removed: 3,
            refreshed: 1,
            alive: 5,
        },
        translations: Pass {
            removed: 6,
            ..Pass::default()
        },
    };
    let took = Duration::from_millis(5);
    counts.note(Family::Ipv4, Cause::Pressure, collected, took);
    counts.note_failure(Family::Ipv6);
    counts
}

/// A result with this error text; if the text is empty, a success after 2 ms.
pub(super) fn result(status: &str) -> Option<ConnectivityStatus> {
    Some(ConnectivityStatus {
        latency: if status.is_empty() { 2_000_000 } else { 0 },
        status: status.to_owned(),
        last_probed: Timestamp::UNIX_EPOCH,
        rtt_source: None,
        connect_latency: None,
        total_latency: None,
        consecutive_failures: 0,
        last_change: None,
        degraded: None,
    })
}

/// Results of one address.
pub(super) fn path(
    ip: IpAddr,
    icmp: Option<ConnectivityStatus>,
    http: Option<ConnectivityStatus>,
) -> PathStatus {
    PathStatus {
        ip,
        icmp,
        http,
        off: Vec::new(),
        path_mtu: None,
    }
}

/// Key of the ICMP row of node `last`'s own address.
pub(super) fn key(last: u8) -> RttKey {
    RttKey {
        peer: IpAddr::from([10, 0, 0, last]).into(),
        path: Path::Host as u8,
        protocol: PROTOCOL_ICMP,
        pad: 0,
    }
}

/// A report in which node 1 answers, node 2 does not answer HTTP, and nothing is known about node 3.
pub(super) fn report() -> HealthStatus {
    let node = |last: u8, icmp, http| NodeStatus {
        name: format!("default/n{last}"),
        host: AddressGroupStatus {
            primary_address: path(IpAddr::from([10, 0, 0, last]), icmp, http),
            secondary_addresses: Vec::new(),
        },
        health_endpoint: None,
        hosts_only: false,
        diagnosis: None,
    };
    let mut failing = node(2, result(""), result("Connection refused"));
    failing.diagnosis = Some(Diagnosis {
        cause: "agent-down".to_owned(),
        message: "ICMP answers, HTTP does not".to_owned(),
        evidence: Vec::new(),
    });
    HealthStatus {
        probe_interval: "10s".to_owned(),
        local: SelfStatus {
            name: "default/n1".to_owned(),
            diagnosis: None,
            public_mesh_key: false,
            hosts_only_reason: None,
            full_maps: Vec::new(),
            policy_lag: None,
            problems: Vec::new(),
        },
        nodes: vec![
            node(1, result(""), result("")),
            failing,
            node(3, None, None),
        ],
        ..HealthStatus::default()
    }
}

/// The summary of a report with all its nodes.
pub(super) fn summary(report: &HealthStatus, per_target: bool) -> Summary {
    let mut summary = Summary::new(report, per_target);
    report.nodes.iter().for_each(|node| summary.add(node));
    summary
}

/// Two endpoints, one of which was regenerated twice.
pub(super) fn endpoints() -> health_endpoint::manager::Counts {
    let mut durations = [0; DURATION_BOUNDS.len() + 1];
    durations[1] = 3;
    health_endpoint::manager::Counts {
        states: [(State::Ready, 1), (State::Regenerating, 1)].into(),
        succeeded: 2,
        failed: 1,
        duration: Duration::from_millis(9),
        durations,
    }
}
