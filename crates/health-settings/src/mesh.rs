//! How the nodes of the mesh are probed.

use std::time::Duration;

use clap::Args;
use health_model::duration::parse_duration;

use super::form::{Common, Live};
use super::probing::{Interval, ProbeChoice, ProbeIntervals};
use super::range::within;

/// Bounds of the time between two probes of a target.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);
const LONGEST_INTERVAL: Duration = Duration::from_hours(1);

/// Probes of the mesh.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Mesh")]
pub struct MeshSettings {
    /// TCP port of the HTTP responders, the same on all nodes
    #[arg(long, value_name = "PORT", default_value_t = 4240, add = within::<u16>(1, 65535))]
    pub health_port: u16,
    /// Time between two probes of the same address and protocol
    #[arg(
        long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration,
        add = within::<Duration>(SHORTEST_INTERVAL, LONGEST_INTERVAL), add = Common, add = Live
    )]
    pub probe_interval: Duration,
    /// Different interval for some targets, or off: icmp, http, host, endpoint, or a combination such as endpoint-http
    /// (repeatable or comma-separated; the last match applies)
    #[arg(
        long = "probe", value_name = "TARGETS=INTERVAL", value_delimiter = ',',
        add = within::<ProbeChoice>(SHORTEST_INTERVAL, LONGEST_INTERVAL), add = Common, add = Live
    )]
    pub probes: Vec<ProbeChoice>,
    /// Maximum number of probes per second; intervals grow if there are too many targets
    #[arg(
        long, value_name = "NUMBER", default_value_t = 1000,
        add = within::<u32>(1, 1_000_000).of("probes per second"), add = Common, add = Live
    )]
    pub probe_rate: u32,
    /// How long a probe waits for its answer; at most the shortest interval of --probe-interval and --probe
    // The maximum is well below the time for which a client waits for the response to `PUT /v1beta/status/probe`.
    #[arg(
        long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration,
        add = within::<Duration>(Duration::from_millis(1), Duration::from_secs(20)), add = Live
    )]
    pub probe_timeout: Duration,
    /// Time between two checks of the path MTU to an address, or off
    #[arg(
        long, value_name = "DURATION", default_value = "10m",
        add = within::<Interval>(Duration::from_secs(1), Duration::from_hours(24)), add = Live
    )]
    pub path_mtu_interval: Interval,
    /// Share of lost probes in percent above which a target is degraded
    #[arg(
        long, value_name = "PERCENT", default_value_t = 5,
        add = within::<u8>(1, 100).of("percent"), add = Live
    )]
    pub loss_threshold: u8,
    /// Give this node a health endpoint and probe those of other nodes; if false, probe hosts only. A node without pod
    /// CIDRs never has a health endpoint
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, add = Common)]
    pub endpoint_health: bool,
    /// Measure round trips of existing TCP connections to nodes and health endpoints
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub passive_rtt: bool,
    /// Send this many times fewer ICMP probes to an address whose TCP traffic (--passive-rtt) shows that it answers; 1
    /// changes nothing
    // With 5, the remaining probes still distinguish an outage from loss within minutes.
    #[arg(
        long, value_name = "FACTOR", default_value_t = 1,
        add = within::<u8>(1, 5), add = Live
    )]
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
