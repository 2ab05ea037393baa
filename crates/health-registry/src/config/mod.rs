//! The settings of one agent: validated once, then read-only.

#[macro_use]
mod text;

mod check;
mod conntrack;
mod containers;
mod external_ips;
mod listen;
mod masquerade;
mod probing;
mod registry;
mod seconds;
mod service_maps;
mod service_proxy;
mod service_sources;
mod services;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use health_model::ipam::AddressRange;
use health_model::policy::PolicyMode;
use health_model::settings::{AttachMode, Location};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

pub use self::conntrack::{ConntrackTimeouts, GcInterval, GcIntervalError, Lifetime};
pub use self::containers::{ApiAccess, ApiAccessError, ContainerProbing};
pub use self::external_ips::{ExternalIpSetting, ExternalIpSettingError};
pub use self::listen::{ListenAddress, ListenAddressError};
pub use self::masquerade::{
    MasqueradeError, MasqueradePorts, MasqueradePortsError, MasqueradeSettings,
};
pub use self::probing::{Interval, IntervalError, ProbeChoice, ProbeChoiceError, ProbeIntervals};
pub use self::registry::{RegistrySpec, RegistrySpecError, RemoteCluster, RemoteClusterError};
pub use self::seconds::{Seconds, SecondsError};
pub use self::service_maps::ServiceMapSettings;
pub use self::service_proxy::{IdleTimeout, IpvsSettings, ServiceProxyMode};
pub use self::service_sources::{EtcdAccess, EtcdAccessError, ServiceSources};
pub use self::services::{FORWARDING_NEEDS_KEY, ServiceSettings};

/// All settings of `health-agent run`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Config {
    /// Where the agent keeps its files.
    #[serde(flatten)]
    pub location: Location,
    /// This node's name in the registry.
    pub node_name: String,
    /// Name of this node's cluster.
    pub cluster_name: String,
    /// Source of the nodes of this cluster.
    pub registry: RegistrySpec,
    /// Other clusters to probe.
    pub remote_clusters: Vec<RemoteCluster>,
    /// Where the identities of this cluster are stored: a file or etcd.
    pub identity_store: RegistrySpec,
    /// This node's addresses, for registries in which nodes register themselves. Empty: the addresses of the uplinks.
    pub node_addresses: Vec<IpAddr>,
    /// Prefixes of this node's endpoints, for registries in which nodes register themselves.
    pub pod_cidrs: Vec<IpNet>,
    /// Addresses in the pod CIDRs that no endpoint gets.
    pub ipam_excludes: Vec<AddressRange>,
    /// When policy is enforced.
    pub policy_mode: PolicyMode,
    /// Whether the local host may reach its endpoints unless a rule denies it.
    pub policy_allow_localhost: bool,
    /// Whether endpoints may request addresses by DHCPv6, whatever their policy.
    pub policy_allow_dhcpv6: bool,
    /// How long a released address is not reused.
    #[serde(
        rename = "ipam-cooling-time-ns",
        with = "health_model::duration::nanoseconds"
    )]
    pub ipam_cooling_time: Duration,
    /// Uplinks, by interface name. Empty: the interfaces that carry the node's addresses.
    pub devices: Vec<String>,
    /// What keeps the programs attached to their devices.
    pub attach_mode: AttachMode,
    /// TCP port of the `/hello` responders, on this node and on all peers.
    pub health_port: u16,
    /// Time between two probes of one address and protocol.
    #[serde(
        rename = "probe-interval-ns",
        with = "health_model::duration::nanoseconds"
    )]
    pub probe_interval: Duration,
    /// Targets that are probed at another interval, or not at all.
    pub probes: Vec<ProbeChoice>,
    /// Maximum probes per second, over all targets.
    pub probe_rate: u32,
    /// How long a probe waits for its answer.
    #[serde(
        rename = "probe-timeout-ns",
        with = "health_model::duration::nanoseconds"
    )]
    pub probe_timeout: Duration,
    /// Time between two checks of the path MTU to an address.
    pub path_mtu_interval: Interval,
    /// Percentage of lost probes at which a target counts as degraded.
    pub loss_threshold: u8,
    /// Whether this node has a health endpoint, and probes the health endpoints of other nodes.
    pub endpoint_health: bool,
    /// Whether to measure round trips of TCP connections to nodes and health endpoints.
    pub passive_rtt: bool,
    /// How many times less often an address is probed by ICMP while such a connection shows that it answers; 1 means no
    /// less often.
    pub passive_relief: u8,
    /// Time between two conntrack garbage collections.
    pub conntrack_gc_interval: GcInterval,
    /// Longest such time, if it adapts to how many entries expire.
    #[serde(
        rename = "conntrack-gc-max-interval-ns",
        with = "health_model::duration::nanoseconds"
    )]
    pub conntrack_gc_max_interval: Duration,
    /// Whose packets are masqueraded with this node's address.
    #[serde(flatten)]
    pub masquerade: MasqueradeSettings,
    /// How long conntrack entries live.
    #[serde(flatten)]
    pub conntrack_timeouts: ConntrackTimeouts,
    /// Maximum TCP conntrack entries per IP version.
    pub conntrack_max_entries: u32,
    /// Maximum conntrack entries of other protocols per IP version.
    pub conntrack_any_max_entries: u32,
    /// Maximum TCP NAT entries per IP version; a translation takes two.
    pub nat_max_entries: u32,
    /// Maximum NAT entries of other protocols per IP version.
    pub nat_any_max_entries: u32,
    /// File with the key by which the agents of the mesh authenticate each other and each other's probes. Without it,
    /// they use a well-known key.
    pub mesh_key_file: Option<PathBuf>,
    /// Whether to measure one-way delays, which requires synchronized clocks.
    pub one_way: bool,
    /// Container probes.
    #[serde(flatten)]
    pub container_probing: ContainerProbing,
    /// Services.
    #[serde(flatten)]
    pub services: ServiceSettings,
    /// Group that may use the API socket; without one, the agent's group.
    pub socket_group: Option<String>,
    /// Where `GET /metrics` is served.
    pub metrics_address: ListenAddress,
    /// Whether metrics have a series for every target, not only for failing ones.
    pub metrics_per_target: bool,
    /// Where `GET /healthz` is served.
    pub healthz_address: ListenAddress,
}

impl Config {
    /// How often to probe each kind of target.
    pub fn probe_intervals(&self) -> ProbeIntervals {
        ProbeIntervals::new(self.probe_interval, &self.probes)
    }
}

#[cfg(test)]
mod tests {
    use health_model::settings::ServiceForwarding;

    use super::check::MAX_GC_INTERVAL;
    use super::*;

    fn config() -> Config {
        Config {
            location: Location {
                instance: "default".into(),
                runtime_dir: "/run/health-agent".into(),
                state_dir: "/var/lib/health-agent".into(),
                bpf_root: "/sys/fs/bpf".into(),
            },
            node_name: "hnode1".into(),
            cluster_name: "default".into(),
            registry: RegistrySpec::File("/etc/health-agent/nodes.yaml".into()),
            remote_clusters: Vec::new(),
            identity_store: RegistrySpec::File("/var/lib/health-agent/identities.json".into()),
            node_addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            policy_mode: PolicyMode::Default,
            policy_allow_localhost: true,
            policy_allow_dhcpv6: false,
            ipam_excludes: Vec::new(),
            ipam_cooling_time: Duration::from_secs(60),
            devices: vec!["eth0".into(), "eth1".into()],
            attach_mode: AttachMode::Auto,
            health_port: 4240,
            probe_interval: Duration::from_secs(10),
            probes: Vec::new(),
            probe_rate: 1000,
            probe_timeout: Duration::from_secs(1),
            path_mtu_interval: Interval(Some(Duration::from_secs(600))),
            loss_threshold: 5,
            endpoint_health: true,
            passive_rtt: true,
            passive_relief: 1,
            conntrack_gc_interval: GcInterval::Adaptive,
            conntrack_gc_max_interval: MAX_GC_INTERVAL,
            masquerade: MasqueradeSettings {
                native_routing_cidrs: Vec::new(),
                masquerade_excludes: Vec::new(),
                masquerade_ports: "32768-65535".parse().expect("ports"),
                gateway_cidrs: Vec::new(),
            },
            conntrack_timeouts: ConntrackTimeouts::default(),
            conntrack_max_entries: 65_536,
            conntrack_any_max_entries: 32_768,
            nat_max_entries: 65_536,
            nat_any_max_entries: 32_768,
            mesh_key_file: None,
            one_way: false,
            container_probing: ContainerProbing::default(),
            services: ServiceSettings::default(),
            socket_group: None,
            metrics_per_target: false,
            metrics_address: "127.0.0.1:9962".parse().expect("an address"),
            healthz_address: ListenAddress::Localhost(9879),
        }
    }

    fn cidrs(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().expect(text)).collect()
    }

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(config().validated(), Ok(config()));
    }

    #[test]
    fn backends_answer_clients_themselves_where_the_mesh_has_a_key() {
        let mut config = config();
        config.mesh_key_file = Some("/key".into());
        for forwarding in [ServiceForwarding::Dsr, ServiceForwarding::Hybrid] {
            config.services.service_forwarding = forwarding;
            assert_eq!(config.clone().validated(), Ok(config.clone()));
            assert!(config.services.check_forwarding_key(true).is_err());
            assert_eq!(config.services.check_forwarding_key(false), Ok(()));
        }
    }

    #[test]
    fn what_cannot_be_used_is_named_by_flag_and_value() {
        type Change = fn(&mut Config);
        let cases: [(&str, &str, Change); 72] = [
            ("--pod-manifests", "pods", |c| {
                c.container_probing.pod_manifests = Some("pods".into());
            }),
            ("--service-manifests", "services", |c| {
                c.services.service_manifests = Some("services".into());
            }),
            ("--service-node-zone", "", |c| {
                c.services.service_node_zone = Some(String::new());
            }),
            ("--service-node-zone", "a/b", |c| {
                c.services.service_node_zone = Some("a/b".into());
            }),
            ("--service-forwarding", "dsr", |c| {
                c.services.service_forwarding = ServiceForwarding::Dsr;
            }),
            ("--service-forwarding", "hybrid", |c| {
                c.mesh_key_file = Some("/key".into());
                c.services.service_proxy_mode = ServiceProxyMode::Ipvs;
                c.services.service_forwarding = ServiceForwarding::Hybrid;
            }),
            ("--service-sync-min", "10.001s", |c| {
                c.services.service_sync_min = Duration::from_millis(10_001);
            }),
            ("--service-sync-max", "1s", |c| {
                c.services.service_sync_min = Duration::from_secs(2);
                c.services.service_sync_max = Duration::from_secs(1);
            }),
            ("--service-node-port-cidr", "10.1.2.3/8", |c| {
                c.services.service_node_port_cidrs = cidrs(&["10.1.2.3/8"]);
            }),
            ("--ipvs-scheduler", "", |c| {
                c.services.ipvs.ipvs_scheduler.clear();
            }),
            ("--ipvs-scheduler", "round robin", |c| {
                c.services.ipvs.ipvs_scheduler = "round robin".into();
            }),
            ("--ipvs-exclude-cidr", "fd00::1/64", |c| {
                c.services.ipvs.ipvs_exclude_cidrs = cidrs(&["fd00::1/64"]);
            }),
            ("--ipvs-masquerade-bit", "32", |c| {
                c.services.ipvs.ipvs_masquerade_bit = 32;
            }),
            ("--ipvs-drain-interval", "99ms", |c| {
                c.services.ipvs.ipvs_drain_interval = Duration::from_millis(99);
            }),
            ("--service-health-listen", "0.0.0.0:0", |c| {
                c.services.service_manifests = Some("/services".into());
                c.services.service_health_listen = "0.0.0.0:0".parse().expect("an address");
            }),
            ("--service-backend-max-entries", "1023", |c| {
                c.services.maps.service_backend_max_entries = 1023;
            }),
            ("--service-flow-any-max-entries", "16777217", |c| {
                c.services.maps.service_flow_any_max_entries = 16_777_217;
            }),
            ("--service-socket-max-entries", "1023", |c| {
                c.services.maps.service_socket_max_entries = 1023;
            }),
            ("--service-maglev-tables", "0", |c| {
                c.services.maps.service_maglev_tables = 0;
            }),
            ("--service-metrics-listen", "127.0.0.1:9962", |c| {
                c.services.service_manifests = Some("/services".into());
                c.services.service_metrics_listen = c.metrics_address;
            }),
            ("--container-probe-rate", "0", |c| {
                c.container_probing.container_probe_rate = 0;
            }),
            ("--container-probe-concurrency", "100001", |c| {
                c.container_probing.container_probe_concurrency = 100_001;
            }),
            ("--container-probe-pod-rate", "0", |c| {
                c.container_probing.container_probe_pod_rate = 0;
            }),
            ("--services-from-etcd", "default", |c| {
                c.services.sources.services_from_etcd = Some(EtcdAccess::Default);
            }),
            ("--service-proxy-name", "-own", |c| {
                c.services.sources.service_proxy_name = Some("-own".into());
            }),
            ("--instance", "", |c| c.location.instance.clear()),
            ("--instance", "Node", |c| {
                c.location.instance = "Node".into()
            }),
            ("--instance", "../x", |c| {
                c.location.instance = "../x".into()
            }),
            ("--instance", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", |c| {
                c.location.instance = "a".repeat(33);
            }),
            ("--runtime-dir", "run", |c| {
                c.location.runtime_dir = "run".into();
            }),
            ("--state-dir", "", |c| c.location.state_dir = "".into()),
            ("--bpf-root", "./bpf", |c| {
                c.location.bpf_root = "./bpf".into();
            }),
            ("--node-name", "", |c| c.node_name.clear()),
            ("--node-name", "a/b", |c| c.node_name = "a/b".into()),
            ("--node-name", "a\\nb", |c| c.node_name = "a\nb".into()),
            ("--cluster-name", "a b", |c| c.cluster_name = "a b".into()),
            ("--remote-cluster", "default=kubernetes", |c| {
                c.remote_clusters = vec!["default=kubernetes".parse().expect("a registry")];
            }),
            ("--remote-cluster", "a b", |c| {
                c.remote_clusters = vec!["a b=kubernetes".parse().expect("a registry")];
            }),
            ("--identity-store", "kubernetes", |c| {
                c.identity_store = RegistrySpec::Kubernetes(None);
            }),
            ("--node-address", "127.0.0.1", |c| {
                c.node_addresses = vec!["127.0.0.1".parse().expect("an address")];
            }),
            ("--pod-cidr", "10.244.1.1/24", |c| {
                c.pod_cidrs = vec!["10.244.1.1/24".parse().expect("a prefix")];
            }),
            ("--device", "", |c| c.devices = vec!["".into()]),
            ("--device", "interface-number-1", |c| {
                c.devices = vec!["interface-number-1".into()];
            }),
            ("--device", "a/b", |c| c.devices = vec!["a/b".into()]),
            ("--device", "eth0", |c| {
                c.devices = vec!["eth0".into(), "eth1".into(), "eth0".into()];
            }),
            ("--health-port", "0", |c| c.health_port = 0),
            ("--probe-interval", "99ms", |c| {
                c.probe_interval = Duration::from_millis(99);
            }),
            ("--probe-interval", "1h0m1s", |c| {
                c.probe_interval = Duration::from_secs(3601);
            }),
            ("--probe", "http=99ms", |c| {
                c.probes = vec!["http=99ms".parse().expect("a choice")];
            }),
            ("--probe-rate", "0", |c| c.probe_rate = 0),
            ("--path-mtu-interval", "999ms", |c| {
                c.path_mtu_interval = Interval(Some(Duration::from_millis(999)));
            }),
            ("--loss-threshold", "101", |c| c.loss_threshold = 101),
            ("--passive-relief", "6", |c| c.passive_relief = 6),
            ("--passive-relief", "2", |c| {
                c.passive_rtt = false;
                c.passive_relief = 2;
            }),
            ("--conntrack-gc-interval", "12h0m1s", |c| {
                c.conntrack_gc_interval = GcInterval::Fixed(Duration::from_secs(43_201));
            }),
            ("--conntrack-gc-max-interval", "9s", |c| {
                c.conntrack_gc_max_interval = Duration::from_secs(9);
            }),
            ("--native-routing-cidr", "10.1.2.3/8", |c| {
                c.masquerade.native_routing_cidrs = cidrs(&["10.1.2.3/8"]);
            }),
            ("--native-routing-cidr", "10.16.0.0/16", |c| {
                c.masquerade.native_routing_cidrs = (0..17)
                    .map(|i| format!("10.{i}.0.0/16").parse().expect("a prefix"))
                    .collect();
            }),
            ("--masquerade-exclude", "fd00::/8", |c| {
                c.masquerade.native_routing_cidrs = cidrs(&["10.0.0.0/8"]);
                c.masquerade.masquerade_excludes = cidrs(&["fd00::/8"]);
            }),
            ("--masquerade-exclude", "192.168.15.0/24", |c| {
                c.masquerade.native_routing_cidrs = cidrs(&["10.0.0.0/8", "fd00::/8"]);
                c.masquerade.masquerade_excludes = (0..16)
                    .map(|i| format!("192.168.{i}.0/24").parse().expect("a prefix"))
                    .collect();
            }),
            ("--gateway-cidr", "192.168.0.0/16", |c| {
                c.masquerade.gateway_cidrs = cidrs(&["192.168.0.0/16"]);
            }),
            ("--gateway-cidr", "192.168.8.0/24", |c| {
                c.masquerade.native_routing_cidrs = cidrs(&["10.0.0.0/8"]);
                c.masquerade.gateway_cidrs = (0..9)
                    .map(|i| format!("192.168.{i}.0/24").parse().expect("a prefix"))
                    .collect();
            }),
            ("--conntrack-max-entries", "1023", |c| {
                c.conntrack_max_entries = 1023;
            }),
            ("--conntrack-any-max-entries", "0", |c| {
                c.conntrack_any_max_entries = 0;
            }),
            ("--nat-max-entries", "16777217", |c| {
                c.nat_max_entries = 16_777_217;
            }),
            ("--nat-any-max-entries", "1023", |c| {
                c.nat_any_max_entries = 1023;
            }),
            ("--probe-timeout", "1s", |c| {
                c.probes = vec!["icmp=500ms".parse().expect("a choice")];
            }),
            ("--probe-timeout", "0s", |c| {
                c.probe_timeout = Duration::ZERO;
            }),
            ("--probe-timeout", "11s", |c| {
                c.probe_timeout = Duration::from_secs(11);
            }),
            ("--metrics-address", "localhost:0", |c| {
                c.metrics_address = ListenAddress::Localhost(0);
            }),
            ("--healthz-address", "localhost:0", |c| {
                c.healthz_address = ListenAddress::Localhost(0);
            }),
            ("--healthz-address", "127.0.0.1:9962", |c| {
                c.healthz_address = c.metrics_address;
            }),
        ];
        for (flag, value, change) in cases {
            let mut bad = config();
            change(&mut bad);
            let error = bad.validated().expect_err(value);
            assert_eq!((error.flag, error.value.as_str()), (flag, value));
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("{flag} '{value}': "))
            );
        }
    }

    #[test]
    fn without_services_nobody_listens_for_them() {
        let mut none = config();
        none.services.service_metrics_listen = none.metrics_address;
        assert_eq!(none.clone().validated(), Ok(none));
    }

    #[test]
    fn a_socket_must_fit_into_its_address() {
        let mut fits = config();
        fits.location.runtime_dir = format!("/{}", "r".repeat(94)).into();
        assert_eq!(fits.location.socket().as_os_str().len(), 107);
        assert!(fits.clone().validated().is_ok());
        fits.location.runtime_dir = format!("/{}", "r".repeat(95)).into();
        let error = fits.validated().expect_err("one byte too long");
        assert_eq!(error.flag, "--runtime-dir");
        assert!(error.reason.contains("1 bytes too long"), "{error}");
    }

    #[test]
    fn a_configuration_survives_json() {
        let json = serde_json::to_string(&config()).expect("plain data");
        assert!(json.contains(r#""instance":"default""#), "{json}");
        assert!(
            json.contains(r#""probe-interval-ns":10000000000"#),
            "{json}"
        );
        let back: Config = serde_json::from_str(&json).expect("what was just written");
        assert_eq!(back, config());
    }
}
