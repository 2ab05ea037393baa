//! `health-agent run`: the daemon.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use super::absolute_path;
use super::exit::Failure;
use super::logging::LogArgs;
use crate::config::{Config, ListenAddress, Location, parse_duration};

const EXAMPLES: &str = "\
Examples:
  health-agent run
  health-agent run --node-name hnode1 --nodes-file /etc/health-agent/nodes.yaml
  health-agent run --device eth0 --device eth1 --probe-interval 5s --probe-timeout 500ms
  health-agent run --log-format json --log-level debug
  health-agent run --netns /run/netns/a --instance a --runtime-dir /run/health-agent/a";

/// Flags of `run`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// This node's name in the node registry [default: the host name]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Name of this node's cluster
    #[arg(long, value_name = "NAME", default_value = "default")]
    cluster_name: String,
    /// File of the node registry; read again when it changes
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/health-agent/nodes.yaml",
        value_parser = absolute_path()
    )]
    nodes_file: PathBuf,
    /// Uplink, by interface name; give it once for each [default: those that carry the node's
    /// addresses]
    #[arg(long = "device", value_name = "INTERFACE")]
    devices: Vec<String>,
    /// TCP port of the HTTP responders, the same on all nodes
    #[arg(long, value_name = "PORT", default_value_t = 4240)]
    health_port: u16,
    /// Time between two probes of one address and protocol, 100ms to 1h
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    probe_interval: Duration,
    /// How long a probe waits for its answer, at most 20s and --probe-interval
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration)]
    probe_timeout: Duration,
    /// Where GET /metrics is served: ADDRESS:PORT, localhost:PORT (both IP versions) or off
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9962")]
    metrics_address: ListenAddress,
    /// Where GET /healthz is served: ADDRESS:PORT, localhost:PORT (both IP versions) or off
    #[arg(long, value_name = "ADDRESS", default_value = "localhost:9879")]
    healthz_address: ListenAddress,
    /// The log.
    #[command(flatten)]
    pub logging: LogArgs,
}

impl RunArgs {
    /// The settings of an agent at `location`.
    pub(super) fn config(self, location: Location) -> Result<Config, Failure> {
        let node_name = match self.node_name {
            Some(name) => name,
            None => host_name().context("cannot read the host name; give --node-name")?,
        };
        let config = Config {
            location,
            node_name,
            cluster_name: self.cluster_name,
            nodes_file: self.nodes_file,
            devices: self.devices,
            health_port: self.health_port,
            probe_interval: self.probe_interval,
            probe_timeout: self.probe_timeout,
            metrics_address: self.metrics_address,
            healthz_address: self.healthz_address,
        };
        Ok(config.validated()?)
    }
}

fn host_name() -> std::io::Result<String> {
    fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim_end().to_owned())
}
