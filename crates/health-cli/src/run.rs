//! `health-agent run`: the daemon.

use std::path::PathBuf;

use clap::Args;
use health_settings::{Settings, absolute_path};

const EXAMPLES: &str = "\
Examples:
  health-agent run
  health-agent run --nodes-file /etc/health-agent/nodes.yaml --probe-interval 5s
  health-agent run --registry kubernetes --services-from-kubernetes
  HEALTH_AGENT_LOG_LEVEL=debug health-agent run --config /etc/health-agent/config.yaml";

const MORE_EXAMPLES: &str = "\
Examples:
  health-agent run
  health-agent run --config /etc/health-agent/config.yaml
  health-agent run --node-name hnode1 --nodes-file /etc/health-agent/nodes.yaml
  health-agent run --device eth0,eth1 --probe-interval 5s --probe-timeout 500ms
  health-agent run --registry etcd:http://192.0.2.1:2379 --pod-cidr 10.244.1.0/24
  health-agent run --registry kubernetes --remote-cluster west=etcd:/etc/health-agent/west.yaml
  health-agent run --identity-store file:/var/lib/health-agent/identities.json
  health-agent run --probe http=30s,endpoint-icmp=off --probe-rate 200
  health-agent run --native-routing-cidr 10.0.0.0/8 --masquerade-exclude 192.0.2.0/24
  health-agent run --pod-manifests /etc/health-agent/pods \\
    --runtime-endpoint /run/containerd/containerd.sock
  health-agent run --registry kubernetes --pods-from-kubernetes \\
    --runtime-endpoint /run/containerd/containerd.sock
  health-agent run --service-manifests /etc/health-agent/services --service-node-zone z1
  health-agent run --log-format json --log-level debug
  health-agent run --netns /run/netns/a --instance a --runtime-dir /run/health-agent/a";

/// Flags of `run`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = MORE_EXAMPLES)]
pub struct RunArgs {
    /// Settings file, with the files of config.d beside it [default: /etc/health-agent/config.yaml if it exists]
    #[arg(long, value_name = "FILE", env = "HEALTH_AGENT_CONFIG", value_parser = absolute_path())]
    pub config: Option<PathBuf>,
    /// The settings.
    #[command(flatten)]
    pub settings: Settings,
}
