//! `health-agent run`: the daemon.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use health_common::ct::{DEFAULT_ANY_ENTRIES, DEFAULT_ENTRIES};
use health_model::address::{parse_ip, parse_network};
use health_model::duration::parse_duration;
use health_model::ipam::AddressRange;
use health_model::policy::PolicyMode;
use health_model::settings::{AttachMode, Location};
use health_registry::config::{
    Config, ConntrackTimeouts, ContainerProbing, GcInterval, Interval, ListenAddress,
    MasqueradePorts, MasqueradeSettings, ProbeChoice, RegistrySpec, RemoteCluster, ServiceSettings,
};
use health_registry::identity;
use ipnet::IpNet;

use super::absolute_path;
use super::exit::Failure;
use super::logging::LogArgs;

/// The default registry.
const NODES_FILE: &str = "/etc/health-agent/nodes.yaml";

const EXAMPLES: &str = "\
Examples:
  health-agent run
  health-agent run --node-name hnode1 --nodes-file /etc/health-agent/nodes.yaml
  health-agent run --device eth0 --device eth1 --probe-interval 5s --probe-timeout 500ms
  health-agent run --registry etcd:http://192.0.2.1:2379 --pod-cidr 10.244.1.0/24
  health-agent run --registry kubernetes --remote-cluster west=etcd:/etc/health-agent/west.yaml
  health-agent run --identity-store file:/var/lib/health-agent/identities.json
  health-agent run --probe http=30s --probe endpoint-icmp=off --probe-rate 200
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
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// This node's name in the node registry [default: the host name]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Name of this node's cluster
    #[arg(long, value_name = "NAME", default_value = "default")]
    cluster_name: String,
    /// File of the node registry, read again when it changes: short for --registry file:FILE
    /// [default: /etc/health-agent/nodes.yaml]
    #[arg(long, value_name = "FILE", conflicts_with = "registry", value_parser = absolute_path())]
    nodes_file: Option<PathBuf>,
    /// Where the nodes of this cluster come from: file:PATH, etcd:URL[,URL...], etcd:PATH of a
    /// configuration, kubernetes[:PATH of a kubeconfig]
    #[arg(long, value_name = "REGISTRY")]
    registry: Option<RegistrySpec>,
    /// Another cluster to probe, and its registry (repeatable)
    #[arg(long = "remote-cluster", value_name = "NAME=REGISTRY")]
    remote_clusters: Vec<RemoteCluster>,
    /// Where the identities of this cluster are kept, the same on all its nodes: file:PATH,
    /// etcd:URL[,URL...], etcd:PATH of a configuration [default: --registry if that is etcd, else
    /// file:identities.json in --state-dir]
    #[arg(long, value_name = "STORE")]
    identity_store: Option<RegistrySpec>,
    /// Address that this node registers in etcd (repeatable) [default: those of the uplinks]
    #[arg(long = "node-address", value_name = "IP", value_parser = parse_ip)]
    node_addresses: Vec<IpAddr>,
    /// Prefix of this node's endpoints, to register in etcd (repeatable)
    #[arg(long = "pod-cidr", value_name = "CIDR", value_parser = parse_network)]
    pod_cidrs: Vec<IpNet>,
    /// Addresses of the pod CIDRs that are never allocated: a CIDR or FIRST-LAST (repeatable)
    #[arg(long = "ipam-exclude", value_name = "RANGE")]
    ipam_excludes: Vec<AddressRange>,
    /// How long a released address is not reused while others are free, at most 24h
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = parse_duration)]
    ipam_cooling_time: Duration,
    /// When policy is enforced
    #[arg(long, value_enum, value_name = "MODE", default_value_t = PolicyMode::Default)]
    policy_mode: PolicyMode,
    /// Let this host reach its own endpoints unless a rule denies it
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    policy_allow_localhost: bool,
    /// Let endpoints ask for addresses by DHCPv6, whatever their policy
    #[arg(long, value_name = "BOOL", default_value_t = false, action = clap::ArgAction::Set)]
    policy_allow_dhcpv6: bool,
    /// Uplink, by interface name (repeatable) [default: those that carry the node's addresses]
    #[arg(long = "device", value_name = "INTERFACE")]
    devices: Vec<String>,
    /// How programs are attached to devices
    #[arg(
        long,
        env = "HEALTH_AGENT_ATTACH_MODE",
        value_enum,
        value_name = "MODE",
        default_value_t
    )]
    attach_mode: AttachMode,
    /// TCP port of the HTTP responders, the same on all nodes
    #[arg(long, value_name = "PORT", default_value_t = 4240)]
    health_port: u16,
    /// Time between two probes of one address and protocol, 100ms to 1h
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    probe_interval: Duration,
    /// Another interval for some targets, or `off`: icmp, http, host, endpoint, or a combination
    /// such as endpoint-http (repeatable, the last match applies)
    #[arg(long = "probe", value_name = "TARGETS=INTERVAL")]
    probes: Vec<ProbeChoice>,
    /// Maximum number of probes per second; with very many targets, intervals grow
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    probe_rate: u32,
    /// How long a probe waits for its answer, at most 20s and --probe-interval
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration)]
    probe_timeout: Duration,
    /// Time between two checks of the path MTU to an address, 1s to 24h, or off
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    path_mtu_interval: Interval,
    /// A target that loses a larger share of its probes, in percent, is degraded
    #[arg(long, value_name = "PERCENT", default_value_t = 5)]
    loss_threshold: u8,
    /// Give this node a health endpoint and probe those of others; off: probe hosts only. A node without pod CIDRs
    /// has none either way
    #[arg(long, value_name = "on|off", default_value = "on", action = clap::ArgAction::Set,
          value_parser = on_or_off)]
    endpoint_health: bool,
    /// Measure round trips of existing TCP connections to nodes and health endpoints
    #[arg(long, value_name = "on|off", default_value = "on", action = clap::ArgAction::Set,
          value_parser = on_or_off)]
    passive_rtt: bool,
    /// Probe an address by ICMP this many times less often while such a connection shows that it
    /// answers, 1 to 5
    #[arg(long, value_name = "FACTOR", default_value_t = 1)]
    passive_relief: u8,
    /// Time between two collections of conntrack entries, 1s to 12h, or adaptive: by how many expire
    #[arg(long, value_name = "DURATION", default_value = "adaptive")]
    conntrack_gc_interval: GcInterval,
    /// Longest time between two collections while the interval is adaptive, 10s to 12h
    #[arg(long, value_name = "DURATION", default_value = "12h", value_parser = parse_duration)]
    conntrack_gc_max_interval: Duration,
    /// Destinations that endpoints reach without masquerading; enables masquerading to all others for this
    /// IP version (repeatable)
    #[arg(long = "native-routing-cidr", value_name = "CIDR", value_parser = parse_network)]
    native_routing_cidrs: Vec<IpNet>,
    /// More destinations that are reached without masquerading (repeatable)
    #[arg(long = "masquerade-exclude", value_name = "CIDR", value_parser = parse_network)]
    masquerade_excludes: Vec<IpNet>,
    /// Source ports for masqueraded flows, 1024 or higher
    #[arg(long, value_name = "MIN-MAX", default_value = "32768-65535")]
    masquerade_ports: MasqueradePorts,
    /// Sources routed through this host that are masqueraded in addition to its endpoints (repeatable)
    #[arg(long = "gateway-cidr", value_name = "CIDR", value_parser = parse_network)]
    gateway_cidrs: Vec<IpNet>,
    /// How long conntrack entries live.
    #[command(flatten)]
    conntrack_timeouts: ConntrackTimeouts,
    /// Maximum number of conntrack entries of TCP for each IP version, 1024 to 16777216; entries are kept when
    /// it changes [default: 65536; with services as many as --service-flow-max-entries]
    #[arg(long, value_name = "NUMBER")]
    conntrack_max_entries: Option<u32>,
    /// Maximum number of conntrack entries of all other protocols; as above
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ANY_ENTRIES)]
    conntrack_any_max_entries: u32,
    /// Maximum number of NAT entries of TCP for each IP version, two per translation, 1024 to 16777216; as
    /// above
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ENTRIES)]
    nat_max_entries: u32,
    /// Maximum number of NAT entries of all other protocols; as above
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ANY_ENTRIES)]
    nat_any_max_entries: u32,
    /// File with the mesh key, a secret of 16 bytes or more, the same on all nodes: agents prove it to each
    /// other and recognise each other's ICMP probes by it. Another key beside it, in FILE.previous or
    /// FILE.next, is accepted too [default: a public key]
    #[arg(long, value_name = "FILE")]
    mesh_key_file: Option<PathBuf>,
    /// Measure the delay of each direction; the clocks of all nodes must be synchronised
    #[arg(long)]
    one_way: bool,
    /// Container probes.
    #[command(flatten)]
    container_probing: ContainerProbing,
    /// Services.
    #[command(flatten)]
    services: ServiceSettings,
    /// Group that may use the agent's socket [default: the agent's own]
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Where GET /metrics is served: ADDRESS:PORT, localhost:PORT (both IP versions) or off
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9962")]
    metrics_address: ListenAddress,
    /// Show series of every target, not only of failing ones
    #[arg(long)]
    metrics_per_target: bool,
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
        let registry = match (self.registry, self.nodes_file) {
            (Some(registry), _) => registry,
            (None, file) => RegistrySpec::File(file.unwrap_or_else(|| NODES_FILE.into())),
        };
        let identity_store = self.identity_store.unwrap_or_else(|| match &registry {
            RegistrySpec::Etcd(_) | RegistrySpec::EtcdConfig(_) => registry.clone(),
            RegistrySpec::File(_) | RegistrySpec::Kubernetes(_) => {
                RegistrySpec::File(location.state_dir.join(identity::FILE))
            }
        });
        // A flow through a service has entries in both the service maps and the conntrack maps.
        let conntrack_max_entries =
            self.conntrack_max_entries
                .unwrap_or(if self.services.has_services() {
                    self.services.maps.service_flow_max_entries
                } else {
                    DEFAULT_ENTRIES
                });
        let config = Config {
            location,
            node_name,
            cluster_name: self.cluster_name,
            registry,
            identity_store,
            remote_clusters: self.remote_clusters,
            node_addresses: self.node_addresses,
            pod_cidrs: self.pod_cidrs,
            policy_mode: self.policy_mode,
            policy_allow_localhost: self.policy_allow_localhost,
            policy_allow_dhcpv6: self.policy_allow_dhcpv6,
            ipam_excludes: self.ipam_excludes,
            ipam_cooling_time: self.ipam_cooling_time,
            devices: self.devices,
            attach_mode: self.attach_mode,
            health_port: self.health_port,
            probe_interval: self.probe_interval,
            probes: self.probes,
            probe_rate: self.probe_rate,
            probe_timeout: self.probe_timeout,
            path_mtu_interval: self.path_mtu_interval,
            loss_threshold: self.loss_threshold,
            endpoint_health: self.endpoint_health,
            passive_rtt: self.passive_rtt,
            passive_relief: self.passive_relief,
            conntrack_gc_interval: self.conntrack_gc_interval,
            conntrack_gc_max_interval: self.conntrack_gc_max_interval,
            masquerade: MasqueradeSettings {
                native_routing_cidrs: self.native_routing_cidrs,
                masquerade_excludes: self.masquerade_excludes,
                masquerade_ports: self.masquerade_ports,
                gateway_cidrs: self.gateway_cidrs,
            },
            conntrack_timeouts: self.conntrack_timeouts,
            conntrack_max_entries,
            conntrack_any_max_entries: self.conntrack_any_max_entries,
            nat_max_entries: self.nat_max_entries,
            nat_any_max_entries: self.nat_any_max_entries,
            mesh_key_file: self.mesh_key_file,
            one_way: self.one_way,
            container_probing: self.container_probing,
            services: self.services,
            socket_group: self.socket_group,
            metrics_address: self.metrics_address,
            metrics_per_target: self.metrics_per_target,
            healthz_address: self.healthz_address,
        };
        Ok(config.validated()?)
    }
}

fn on_or_off(text: &str) -> Result<bool, &'static str> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected on or off"),
    }
}

fn host_name() -> std::io::Result<String> {
    fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim_end().to_owned())
}
