//! `health-agent config`: the agent's settings, and the kernel's features.

use std::path::Path;

use clap::Args;
use health_datapath::kernel::{UnmetRequirement, choose};
use health_datapath::probe::{Need, Report};
use health_model::duration::duration_text;
use health_model::settings::{AttachMode, Location};
use health_registry::config::Config;
use nix::unistd::Uid;

use super::output::{OutputArgs, comma_separated, table};
use crate::api::client::Client;

const EXAMPLES: &str = "\
Examples:
  health-agent config
  health-agent config -o json | jq '.\"probe-interval-ns\"'
  health-agent config --probe-kernel";

/// Flags of `config`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ConfigArgs {
    /// Test as root which features of an agent the kernel supports; needs no agent
    #[arg(long)]
    probe_kernel: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl ConfigArgs {
    pub(super) async fn execute(self, client: &Client, location: &Location) -> anyhow::Result<()> {
        if self.probe_kernel {
            anyhow::ensure!(Uid::effective().is_root(), UnmetRequirement::NotRoot);
            let report = Report::of_this_kernel(&location.bpf_root);
            self.output.output.print_object(&report, report_table)?;
            // Scripts check whether an agent would start.
            choose(&report, &location.bpf_root, AttachMode::Auto)?;
            return Ok(());
        }
        let config: Config = client.get("/v1/config").await?;
        self.output.output.print_object(&config, config_table)
    }
}

/// One feature per line.
fn report_table(report: &Report) -> String {
    let rows = report.features.iter().map(|feature| {
        let need = match feature.need {
            Need::Required => "required",
            Need::OneOfTwo => "one of two",
            Need::Optional => "optional",
        };
        let available = if feature.available { "yes" } else { "no" };
        [feature.name, available, need, feature.without]
    });
    let features = table(["FEATURE", "AVAILABLE", "NEED", "WITHOUT IT"], rows);
    format!("kernel {}\n\n{features}", report.kernel)
}

fn on_or_off(is_on: bool) -> String {
    if is_on { "on" } else { "off" }.to_owned()
}

/// One setting per line, named by its flag.
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
        ("policy-mode", config.policy_mode.to_string()),
        (
            "policy-allow-localhost",
            config.policy_allow_localhost.to_string(),
        ),
        (
            "policy-allow-dhcpv6",
            config.policy_allow_dhcpv6.to_string(),
        ),
        ("ipam-exclude", comma_separated(&config.ipam_excludes)),
        ("ipam-cooling-time", duration_text(config.ipam_cooling_time)),
        ("device", comma_separated(&config.devices)),
        ("attach-mode", config.attach_mode.to_string()),
        ("health-port", config.health_port.to_string()),
        ("probe-interval", duration_text(config.probe_interval)),
        ("probe", comma_separated(&config.probes)),
        ("probe-rate", config.probe_rate.to_string()),
        ("probe-timeout", duration_text(config.probe_timeout)),
        ("path-mtu-interval", config.path_mtu_interval.to_string()),
        ("loss-threshold", config.loss_threshold.to_string()),
        ("endpoint-health", on_or_off(config.endpoint_health)),
        ("passive-rtt", on_or_off(config.passive_rtt)),
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
        (
            "conntrack-any-max-entries",
            config.conntrack_any_max_entries.to_string(),
        ),
        ("nat-max-entries", config.nat_max_entries.to_string()),
        (
            "nat-any-max-entries",
            config.nat_any_max_entries.to_string(),
        ),
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
            "mesh-key-file",
            comma_separated(config.mesh_key_file.as_deref().map(Path::display).as_ref()),
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
