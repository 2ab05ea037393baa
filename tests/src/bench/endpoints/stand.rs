//! A node whose agent has addresses for thousands of endpoints, network namespaces for endpoints, and time
//! measurements.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_net::netns::{self, NetNs};
use serde_json::{Value, json};

use crate::bench::requests::{quantile, send};
use crate::bench::{Figure, Target};
use crate::plugin::Plugin;
use crate::{Bed, Node, PATIENCE, wait_for};

/// Pause between two containers, unless they are created one right after the other. Container runtimes take longer to
/// start one.
const PAUSE: Duration = Duration::from_millis(100);

/// Path of the plugin in Debian's package containernetworking-plugins.
const PTP: &str = "/usr/lib/cni/ptp";

/// Debian's `ptp` plugin with `host-local`, which stores its addresses in `folder`.
pub(super) fn ptp(folder: &Path) -> Plugin {
    Plugin::at(
        Path::new(PTP),
        json!({
            "cniVersion": "1.0.0",
            "name": "bench-ptp",
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.250.0.0/20"}]],
                "dataDir": folder,
            },
        }),
    )
}

pub(super) struct Stand {
    bed: Bed,
}

impl Stand {
    pub(super) fn new() -> anyhow::Result<Self> {
        Self::with_args("")
    }

    /// Starts the node with flags for `health-agent run`, separated by spaces.
    pub(super) fn with_args(args: &str) -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).ipv6(true).without_agents();
        let bed = bed.agent_args(args);
        let bed = bed.start()?;
        let node = bed.node(1);
        let addresses: Vec<String> = node.addresses().iter().map(ToString::to_string).collect();
        bed.write_nodes_file(&format!(
            "nodes:\n- name: {}\n  addresses: {addresses:?}\n  \
             podCIDRs: [\"10.244.0.0/20\", \"fd00:10:244:1::/64\"]\n",
            node.name()
        ))?;
        node.start_agent()?;
        let stand = Self { bed };
        wait_for("the agent to make endpoints", PATIENCE, || {
            let listed = stand.send("GET", "/v1/endpoints", &Value::Null)?;
            let is_ready = |one: &Value| one["state"] == "ready";
            let is_up = listed
                .as_array()
                .is_some_and(|all| all.iter().any(is_ready));
            Ok(is_up.then_some(()))
        })?;
        Ok(stand)
    }

    pub(super) fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// Sends a request to the agent's API and returns the response.
    pub(super) fn send(&self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let answer = send(&self.node().socket(), method, path, &body)?;
        serde_json::from_str(&answer)
            .with_context(|| format!("{method} {path} got no valid answer"))
    }

    /// Creates an endpoint through the API and returns its ID.
    pub(super) fn create(
        &self,
        netns: &Path,
        ifname: &str,
        labels: &[String],
    ) -> anyhow::Result<u64> {
        let body = json!({"netns": netns, "ifname": ifname, "labels": labels});
        let made = self.send("POST", "/v1/endpoints", &body)?;
        made["id"].as_u64().context("the endpoint has no id")
    }
}

/// Network namespaces, which are removed on drop.
pub(super) struct Namespaces(Vec<NetNs>);

impl Namespaces {
    pub(super) fn new(prefix: &str, count: usize) -> anyhow::Result<Self> {
        let mut made = Self(Vec::new());
        for n in 0..count {
            let name = format!("{prefix}{n}");
            // A killed run may have left a namespace of this name.
            netns::remove(&name)?;
            made.0.push(NetNs::create(&name)?);
        }
        Ok(made)
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(NetNs::path)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for netns in &self.0 {
            let name = netns.path().file_name().and_then(|name| name.to_str());
            if let Some(name) = name {
                let _ = netns::remove(name);
            }
        }
    }
}

/// Durations of repeated runs of the same work.
#[derive(Default)]
pub(super) struct Times(Vec<Duration>);

impl Times {
    /// Runs the work and records its duration.
    pub(super) fn take<T>(
        &mut self,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let begun = Instant::now();
        let done = work()?;
        self.0.push(begun.elapsed());
        Ok(done)
    }

    /// Like [`take`](Self::take), but pauses first.
    pub(super) fn take_after_a_pause<T>(
        &mut self,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        thread::sleep(PAUSE);
        self.take(work)
    }

    pub(super) fn median_ms(&self) -> anyhow::Result<f64> {
        self.quantile_ms(0.5)
    }

    fn quantile_ms(&self, part: f64) -> anyhow::Result<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        Ok(quantile(&sorted, part)?.as_secs_f64() * 1e3)
    }

    /// Median and 99th percentile, each compared with that of `other`.
    pub(super) fn figures(
        &self,
        name: &str,
        other: Option<&Self>,
        median_limit: Option<Target>,
    ) -> anyhow::Result<[Figure; 2]> {
        ensure!(
            other.is_none_or(|other| other.0.len() == self.0.len()),
            "the two sides have different numbers of samples"
        );
        let figure = |what: &str, part: f64, target| {
            let other = other.map(|other| other.quantile_ms(part)).transpose()?;
            anyhow::Ok(Figure {
                name: format!("{name}, {what} of {}", self.0.len()),
                unit: "ms",
                ours: self.quantile_ms(part)?,
                other,
                target,
            })
        };
        Ok([
            figure("median", 0.5, median_limit)?,
            figure("99th percentile", 0.99, None)?,
        ])
    }
}
