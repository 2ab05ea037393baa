//! `health-agent config`: the settings that the agent runs with.

use std::path::Path;

use clap::Args;

use super::output::{OutputArgs, comma_separated, table};
use crate::api::client::Client;
use crate::config::{Config, duration_text};

const EXAMPLES: &str = "\
Examples:
  health-agent config
  health-agent config -o json | jq '.\"probe-interval-ns\"'";

/// Flags of `config`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ConfigArgs {
    #[command(flatten)]
    output: OutputArgs,
}

impl ConfigArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let config: Config = client.get("/v1/config").await?;
        self.output.output.print_object(&config, config_table)
    }
}

/// A setting a line, named by its flag.
fn config_table(config: &Config) -> String {
    let location = &config.location;
    let masquerade = &config.masquerade;
    let timeouts = &config.conntrack_timeouts;
    let rows = [
        ("instance", location.instance.clone()),
        ("runtime-dir", location.runtime_dir.display().to_string()),
        ("state-dir", location.state_dir.display().to_string()),
        ("bpf-root", location.bpf_root.display().to_string()),
        ("node-name", config.node_name.clone()),
        ("cluster-name", config.cluster_name.clone()),
        ("registry", config.registry.to_string()),
        ("remote-cluster", comma_separated(&config.remote_clusters)),
        ("identity-store", config.identity_store.to_string()),
        ("node-address", comma_separated(&config.node_addresses)),
        ("pod-cidr", comma_separated(&config.pod_cidrs)),
        ("device", comma_separated(&config.devices)),
        ("health-port", config.health_port.to_string()),
        ("probe-interval", duration_text(config.probe_interval)),
        ("probe", comma_separated(&config.probes)),
        ("probe-rate", config.probe_rate.to_string()),
        ("probe-timeout", duration_text(config.probe_timeout)),
        ("path-mtu-interval", config.path_mtu_interval.to_string()),
        ("loss-threshold", config.loss_threshold.to_string()),
        (
            "passive-rtt",
            if config.passive_rtt { "on" } else { "off" }.to_owned(),
        ),
        ("passive-relief", config.passive_relief.to_string()),
        (
            "conntrack-gc-interval",
            config.conntrack_gc_interval.to_string(),
        ),
        (
            "conntrack-gc-max-interval",
            duration_text(config.conntrack_gc_max_interval),
        ),
        ("conntrack-timeout-tcp-syn", timeouts.tcp_syn.to_string()),
        (
            "conntrack-timeout-tcp-established",
            timeouts.tcp_established.to_string(),
        ),
        (
            "conntrack-timeout-tcp-close",
            timeouts.tcp_close.to_string(),
        ),
        ("conntrack-timeout-udp", timeouts.udp.to_string()),
        ("conntrack-timeout-icmp", timeouts.icmp.to_string()),
        ("conntrack-timeout-sctp", timeouts.sctp.to_string()),
        ("conntrack-timeout-any", timeouts.any.to_string()),
        ("conntrack-timeout-fragment", timeouts.fragment.to_string()),
        (
            "conntrack-max-entries",
            config.conntrack_max_entries.to_string(),
        ),
        ("nat-max-entries", config.nat_max_entries.to_string()),
        (
            "native-routing-cidr",
            comma_separated(&masquerade.native_routing_cidrs),
        ),
        (
            "masquerade-exclude",
            comma_separated(&masquerade.masquerade_excludes),
        ),
        ("masquerade-ports", masquerade.masquerade_ports.to_string()),
        ("gateway-cidr", comma_separated(&masquerade.gateway_cidrs)),
        (
            "probe-key-file",
            comma_separated(config.probe_key_file.as_deref().map(Path::display).as_ref()),
        ),
        ("one-way", config.one_way.to_string()),
        (
            "socket-group",
            comma_separated(config.socket_group.as_ref()),
        ),
        ("metrics-address", config.metrics_address.to_string()),
        ("metrics-per-target", config.metrics_per_target.to_string()),
        ("healthz-address", config.healthz_address.to_string()),
    ];
    table(
        ["SETTING", "VALUE"],
        rows.map(|(name, value)| [name.to_owned(), value]),
    )
}
