//! Metrics of the agent itself and its registries.

use std::fmt;

use health_model::api::RegistryState;
use jiff::Timestamp;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::{Snapshot, counter, family, gauge};
use crate::figures::ReloadCounts;

impl Snapshot {
    pub(super) fn encode_agent(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        encoder
            .encode_descriptor("build", "The agent's version", None, MetricType::Info)?
            .encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
        gauge(
            encoder,
            "uptime_seconds",
            "Time since the agent started",
            &self.figures.uptime.as_secs_f64(),
        )?;
        gauge(
            encoder,
            "healthy",
            "1 if the agent passes its own checks, else 0",
            &u64::from(self.figures.healthy),
        )?;
        gauge(
            encoder,
            "datapath_maps_readable",
            "1 if this scrape could read the maps, else 0",
            &u64::from(self.maps_readable),
        )?;
        let mut repairs = family(
            encoder,
            "repairs",
            "Repairs of the health endpoint and the datapath",
            MetricType::Counter,
        )?;
        for (cause, count) in &self.figures.repairs {
            counter(&mut repairs, &[("cause", cause)], *count)?;
        }
        let mut reloads = family(
            encoder,
            "settings_reloads",
            "Reloads of the settings",
            MetricType::Counter,
        )?;
        let ReloadCounts { succeeded, failed } = self.figures.reloads;
        for (result, count) in [("success", succeeded), ("failure", failed)] {
            counter(&mut reloads, &[("result", result)], count)?;
        }
        let interval = self
            .summary
            .interval
            .unwrap_or(self.figures.configured_interval);
        gauge(
            encoder,
            "probe_interval_seconds",
            "Time between two probes of a target",
            &interval.as_secs_f64(),
        )?;
        gauge(
            encoder,
            "configured_probe_interval_seconds",
            "Configured time between two probes of a target",
            &self.figures.configured_interval.as_secs_f64(),
        )?;
        gauge(
            encoder,
            "probe_rate_limit",
            "Maximum number of probes per second",
            &u64::from(self.figures.probe_rate),
        )
    }

    pub(super) fn encode_controllers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let controllers = &self.figures.controllers;
        let mut runs = family(
            encoder,
            "controllers_group_runs",
            "Runs of the agent's controllers",
            MetricType::Counter,
        )?;
        for one in controllers {
            for (status, count) in [("success", one.successes), ("failure", one.failures)] {
                let labels = [("group_name", one.name.as_str()), ("status", status)];
                counter(&mut runs, &labels, count)?;
            }
        }
        let mut failures = family(
            encoder,
            "controllers_consecutive_failures",
            "Failed runs of the controller since its last success",
            MetricType::Gauge,
        )?;
        for one in controllers {
            failures
                .encode_family(&[("group_name", one.name.as_str())])?
                .encode_gauge(&one.consecutive_failures)?;
        }
        let failing = controllers
            .iter()
            .filter(|one| one.consecutive_failures > 0);
        gauge(
            encoder,
            "controllers_failing",
            "Controllers whose last run failed",
            &(failing.count() as u64),
        )
    }

    pub(super) fn encode_registries(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Value = fn(&RegistryState, Timestamp) -> f64;
        let families: [(&'static str, &str, Value); 3] = [
            (
                "registry_stale",
                "1 if the registry cannot be read and its last good nodes are used, else 0",
                |registry, _| f64::from(u8::from(registry.stale.is_some())),
            ),
            (
                "registry_age_seconds",
                "Time since the registry's nodes were known to be up to date",
                |registry, now| {
                    let age = now.duration_since(registry.last_read);
                    age.as_secs_f64().max(0.0)
                },
            ),
            (
                "registry_rejected_entries",
                "Entries of the registry that cannot be used",
                |registry, _| registry.rejected.len() as f64,
            ),
        ];
        for (name, help, value) in families {
            let mut family = family(encoder, name, help, MetricType::Gauge)?;
            for registry in &self.figures.registries {
                let labels = [
                    ("registry", registry.registry.as_str()),
                    ("cluster", registry.cluster.as_str()),
                ];
                family
                    .encode_family(&labels)?
                    .encode_gauge(&value(registry, self.now))?;
            }
        }
        let help = "Known nodes, including this one";
        let mut nodes = family(encoder, "registry_nodes", help, MetricType::Gauge)?;
        for (cluster, count) in &self.summary.nodes {
            nodes
                .encode_family(&[("cluster", cluster.as_str())])?
                .encode_gauge(count)?;
        }
        Ok(())
    }
}
