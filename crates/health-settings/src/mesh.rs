//! How the nodes of the mesh are probed.

use std::time::Duration;

use clap::Args;
use health_model::duration::parse_duration;

use super::probing::{Interval, ProbeChoice, ProbeIntervals};

/// Probes of the mesh.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Mesh")]
pub struct MeshSettings {
    /// TCP port of the HTTP responders, the same on all nodes
    #[arg(long, value_name = "PORT", default_value_t = 4240)]
    pub health_port: u16,
    /// Time between two probes of the same address and protocol, 100ms to 1h
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    pub probe_interval: Duration,
    /// Different interval for some targets, or off: icmp, http, host, endpoint, or a combination such as endpoint-http
    /// (repeatable or comma-separated; the last match applies)
    #[arg(long = "probe", value_name = "TARGETS=INTERVAL", value_delimiter = ',')]
    pub probes: Vec<ProbeChoice>,
    /// Maximum number of probes per second, 1 to 1000000; intervals grow if there are too many targets
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    pub probe_rate: u32,
    /// How long a probe waits for its answer, 1ms to 20s, and at most the shortest interval of --probe-interval and --probe
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration)]
    pub probe_timeout: Duration,
    /// Time between two checks of the path MTU to an address, 1s to 24h, or off
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    pub path_mtu_interval: Interval,
    /// Share of lost probes in percent, 1 to 100, above which a target is degraded
    #[arg(long, value_name = "PERCENT", default_value_t = 5)]
    pub loss_threshold: u8,
    /// Give this node a health endpoint and probe those of other nodes; if false, probe hosts only. A node without pod
    /// CIDRs never has a health endpoint
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub endpoint_health: bool,
    /// Measure round trips of existing TCP connections to nodes and health endpoints
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub passive_rtt: bool,
    /// Send this many times fewer ICMP probes, 1 to 5, to an address whose TCP traffic (--passive-rtt) shows that it
    /// answers; 1 changes nothing
    #[arg(long, value_name = "FACTOR", default_value_t = 1)]
    pub passive_relief: u8,
    /// Measure the delay of each direction separately; the clocks of all nodes must be synchronised
    #[arg(long)]
    pub one_way: bool,
}

impl MeshSettings {
    /// How often to probe each kind of target.
    pub fn probe_intervals(&self) -> ProbeIntervals {
        ProbeIntervals::new(self.probe_interval, &self.probes)
    }
}
