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
    /// Time between two probes of one address and protocol, 100ms to 1h
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    pub probe_interval: Duration,
    /// Another interval for some targets, or `off`: icmp, http, host, endpoint, or a combination
    /// such as endpoint-http (repeatable, the last match applies)
    #[arg(long = "probe", value_name = "TARGETS=INTERVAL", value_delimiter = ',')]
    pub probes: Vec<ProbeChoice>,
    /// Maximum number of probes per second; with very many targets, intervals grow
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    pub probe_rate: u32,
    /// How long a probe waits for its answer, at most 20s and --probe-interval
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration)]
    pub probe_timeout: Duration,
    /// Time between two checks of the path MTU to an address, 1s to 24h, or off
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    pub path_mtu_interval: Interval,
    /// A target that loses a larger share of its probes, in percent, is degraded
    #[arg(long, value_name = "PERCENT", default_value_t = 5)]
    pub loss_threshold: u8,
    /// Give this node a health endpoint and probe those of others; without it, probe hosts only. A node without pod
    /// CIDRs has none either way
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub endpoint_health: bool,
    /// Measure round trips of existing TCP connections to nodes and health endpoints
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub passive_rtt: bool,
    /// Probe an address by ICMP this many times less often while such a connection shows that it
    /// answers, 1 to 5
    #[arg(long, value_name = "FACTOR", default_value_t = 1)]
    pub passive_relief: u8,
    /// Measure the delay of each direction; the clocks of all nodes must be synchronised
    #[arg(long)]
    pub one_way: bool,
}

impl MeshSettings {
    /// How often to probe each kind of target.
    pub fn probe_intervals(&self) -> ProbeIntervals {
        ProbeIntervals::new(self.probe_interval, &self.probes)
    }
}
