//! An agent's API without an agent: a real server on a socket of its own, over fixed data.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use health_agent::api::server::{self, Source};
use health_agent::api::types::{
    AddressGroupStatus, AgentState, ConnectivityStatus, Endpoint, HealthStatus, NodeEntry,
    NodeList, NodeStatus, PathStatus, RegistryState, RttSource, SelfStatus,
};
use health_agent::config::{Config, ListenAddress, Location, RegistrySpec};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

/// What the server tells. Two nodes; the second one is as `peer` says.
#[derive(Clone)]
pub(crate) struct Fixture {
    /// `Ok`, `Warning` or `Failure`.
    pub(crate) state: &'static str,
    /// Result of ICMP at the peer's node address: `None` is not probed yet, empty is fine.
    pub(crate) peer: Option<&'static str>,
    /// The same, after probing all nodes by request.
    pub(crate) peer_when_probed: Option<&'static str>,
    location: Location,
}

impl Fixture {
    fn report(&self, peer: Option<&str>) -> HealthStatus {
        let result = |status: &str| ConnectivityStatus {
            latency: if status.is_empty() { 21_300 } else { 0 },
            status: status.to_owned(),
            last_probed: "2026-11-21T03:00:00Z".parse().unwrap(),
            rtt_source: status.is_empty().then_some(RttSource::Kernel),
            connect_latency: None,
            consecutive_failures: 0,
            last_change: None,
            degraded: None,
        };
        let group = |ip: &str, icmp: Option<&str>| AddressGroupStatus {
            primary_address: PathStatus {
                ip: ip.parse().unwrap(),
                icmp: icmp.map(result),
                http: Some(result("")),
                off: vec![],
            },
            secondary_addresses: vec![],
        };
        let node = |number: u8, icmp| NodeStatus {
            name: format!("default/hnode{number}"),
            host: group(&format!("172.30.0.{number}"), icmp),
            health_endpoint: Some(group(&format!("10.244.{number}.7"), Some(""))),
            diagnosis: None,
        };
        HealthStatus {
            timestamp: Some("2026-11-21T03:00:00Z".parse().unwrap()),
            probe_interval: "10s".into(),
            configured_interval: None,
            local: SelfStatus {
                name: "default/hnode1".into(),
                diagnosis: None,
            },
            nodes: vec![node(1, Some("")), node(2, peer)],
        }
    }
}

impl Source for Fixture {
    fn status(&self) -> HealthStatus {
        self.report(self.peer)
    }

    async fn probe(&self) -> HealthStatus {
        self.report(self.peer_when_probed)
    }

    fn nodes(&self) -> NodeList {
        NodeList {
            registries: vec![RegistryState {
                registry: "file:/etc/health-agent/nodes.yaml".into(),
                cluster: "default".into(),
                stale: Some("nodes.yaml:3:5: unknown field".into()),
                stale_since: Some("2026-11-21T03:00:00Z".parse().unwrap()),
                rejected: vec![],
            }],
            nodes: vec![NodeEntry {
                name: "default/hnode1".into(),
                local: true,
                addresses: vec!["172.30.0.1".parse().unwrap()],
                pod_cidrs: vec!["10.244.1.0/24".parse().unwrap()],
                health_addresses: vec!["10.244.1.7".parse().unwrap()],
            }],
        }
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        vec![Endpoint {
            id: 1017,
            identity: 4,
            labels: vec!["reserved:health".into()],
            ipv4: Some("10.244.1.7".parse().unwrap()),
            ipv6: None,
            state: "ready".into(),
            interface: "lxc_health".into(),
            ifindex: 5,
            mac: "0a:00:00:00:00:01".into(),
            host_mac: "0a:00:00:00:00:02".into(),
            netns: "/run/netns/health".into(),
            repairs: BTreeMap::from([("device deleted".into(), 1)]),
        }]
    }

    fn config(&self) -> Config {
        Config {
            location: self.location.clone(),
            node_name: "hnode1".into(),
            cluster_name: "default".into(),
            registry: RegistrySpec::File("/etc/health-agent/nodes.yaml".into()),
            remote_clusters: Vec::new(),
            node_addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            devices: vec!["eth0".into()],
            health_port: 4240,
            probe_interval: Duration::from_secs(10),
            probes: Vec::new(),
            probe_rate: 1000,
            probe_timeout: Duration::from_secs(1),
            loss_threshold: 5,
            socket_group: None,
            metrics_per_target: false,
            metrics_address: ListenAddress::Off,
            healthz_address: ListenAddress::Localhost(9879),
        }
    }

    fn state(&self) -> AgentState {
        AgentState {
            state: self.state.into(),
            msg: String::new(),
        }
    }

    fn uptime(&self) -> Duration {
        Duration::from_secs(61)
    }
}

/// Serves a [`Fixture`] until it is dropped.
pub(crate) struct Agent {
    dir: TempDir,
    _runtime: Runtime,
}

impl Agent {
    /// An agent with `change` made to its data; all is reachable without.
    pub(crate) fn start(change: impl FnOnce(&mut Fixture)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut fixture = Fixture {
            state: "Ok",
            peer: Some(""),
            peer_when_probed: Some(""),
            location: Location {
                instance: "default".into(),
                runtime_dir: dir.path().to_owned(),
                state_dir: dir.path().to_owned(),
                bpf_root: dir.path().to_owned(),
            },
        };
        change(&mut fixture);
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let socket = fixture.location.socket();
        let listener = {
            let _inside = runtime.enter();
            server::bind(&socket).unwrap()
        };
        runtime.spawn(server::serve(
            listener,
            Arc::new(fixture),
            std::future::pending(),
        ));
        Self {
            dir,
            _runtime: runtime,
        }
    }

    /// Its runtime, state and bpffs folder in one.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }
}
