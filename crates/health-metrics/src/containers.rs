//! Metrics of container probes. Metrics that the kubelet also exports use its names and labels, except that durations
//! also have the pod's UID, because a pod and its replacement may have the same name.

use std::fmt;
use std::sync::Arc;

use health_model::api::ContainerProbeSummary;
use health_probe::prober::{DURATION_BOUNDS, Histogram, Stats};
use health_probe::spec::PodSpec;
use health_probe::supervisor::Supervisor;
use health_probe::worker::Counted;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::render::{Label, counter, family, gauge};

/// The data of one scrape. A pod's series disappear with the pod.
#[derive(Debug)]
pub struct Sample {
    pub(super) statistics: Stats,
    pub(super) restarts: Vec<(Arc<PodSpec>, Arc<str>, u64)>,
    pub(super) summary: ContainerProbeSummary,
}

impl From<&Supervisor> for Sample {
    fn from(supervisor: &Supervisor) -> Self {
        Self {
            statistics: supervisor.statistics(),
            restarts: supervisor.restarts(),
            summary: supervisor.summary(),
        }
    }
}

/// Writes these metrics.
pub(super) fn encode(sample: &Sample, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    encode_runs(&sample.statistics, encoder)?;
    encode_durations(&sample.statistics, encoder)?;
    let help = "Start delay of container probe runs";
    let mut delays = family(
        encoder,
        "prober_start_delay_seconds",
        help,
        MetricType::Histogram,
    )?;
    encode_histogram(&sample.statistics.delays, &mut delays)?;
    let help = "Restarts of a container by this agent";
    let mut restarts = family(encoder, "container_restarts", help, MetricType::Counter)?;
    for (pod, container, count) in &sample.restarts {
        counter(&mut restarts, &of_container(pod, container), *count)?;
    }
    let ContainerProbeSummary {
        pods,
        ready_pods,
        probes,
        failing,
        errored,
        overdue,
        problems,
        ..
    } = &sample.summary;
    for (name, help, value) in [
        ("probed_pods", "Pods whose containers are probed", *pods),
        (
            "ready_pods",
            "Probed pods whose containers are all ready",
            *ready_pods,
        ),
        ("container_probes", "Container probes", *probes),
        (
            "failing_container_probes",
            "Container probes whose result is a failure",
            *failing,
        ),
        (
            "errored_container_probes",
            "Container probes whose last run was inconclusive or not sent in time",
            *errored,
        ),
        (
            "overdue_container_probes",
            "Container probes whose result is overdue",
            *overdue,
        ),
        (
            "pod_problems",
            "Reasons why pods are not probed; `probe list` shows them",
            problems.len() as u64,
        ),
    ] {
        gauge(encoder, name, help, &value)?;
    }
    Ok(())
}

fn encode_runs(statistics: &Stats, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Container probe runs by result";
    let mut runs = family(encoder, "prober_probe", help, MetricType::Counter)?;
    for ((_, container, kind), stats) in statistics.by_name() {
        for (counted, count) in Counted::ALL.iter().zip(stats.runs) {
            let [namespace, pod, uid, container] = of_container(&stats.pod, container);
            let labels = [
                ("probe_type", kind.title()),
                ("result", counted.name()),
                container,
                pod,
                namespace,
                uid,
            ];
            counter(&mut runs, &labels, count)?;
        }
    }
    Ok(())
}

fn encode_durations(statistics: &Stats, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Duration of the container probe runs that were sent";
    let mut durations = family(
        encoder,
        "prober_probe_duration_seconds",
        help,
        MetricType::Histogram,
    )?;
    for ((_, container, kind), stats) in statistics.by_name() {
        let [namespace, pod, uid, container] = of_container(&stats.pod, container);
        let labels = [("probe_type", kind.title()), container, pod, namespace, uid];
        encode_histogram(&stats.durations, &mut durations.encode_family(&labels)?)?;
    }
    Ok(())
}

fn of_container<'a>(pod: &'a PodSpec, container: &'a str) -> [Label<'a>; 4] {
    [
        ("namespace", &pod.namespace),
        ("pod", &pod.name),
        ("pod_uid", pod.shown_uid()),
        ("container", container),
    ]
}

fn encode_histogram(histogram: &Histogram, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
    let bounds = DURATION_BOUNDS.into_iter().chain([f64::INFINITY]);
    let buckets: Vec<(f64, u64)> = bounds.zip(histogram.buckets).collect();
    encoder.encode_histogram::<NoLabelSet>(
        histogram.sum.as_secs_f64(),
        histogram.buckets.iter().sum(),
        &buckets,
        None,
    )
}
