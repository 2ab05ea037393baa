//! An agent's API without the agent: a real server on its own socket that serves fixed data.

mod containers;
mod endpoints;
mod services;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use health_common::events::{EVENT_CT_CLOSED, EVENT_DROP, Event, MonitorFilter};
use health_common::metrics::Reason;
use health_common::probe::Path as RttPath;
use health_common::rtt::{self, RttKey, RttRow};
use health_datapath::events::{Hub, Ring, SubscribeError, Subscription, Switch, relay};
use health_endpoint::manager::Manager;
use health_model::activity;
use health_model::api::{
    AddressGroupStatus, AgentProblem, AgentReport, AgentState, ConnectivityStatus,
    ControllerStatus, Diagnosis, Endpoint, EndpointSettings, Enforcement, FullMap, HealthStatus,
    HistoryWindow, IdentityEntry, LargerPackets, NodeEntry, NodeList, NodeStatus, PathKind,
    PathMtuEntry, PathMtuStatus, PathStatus, PolicyLag, ProbeEvent, ProgramStatus, Protocol,
    RegistryState, RejectedEntry, RttSource, SelfStatus, TargetHistory,
};
use health_model::events::EventFilter;
use health_model::settings::Location;
use health_probe::source::PodSet;
use health_probe::supervisor::Supervisor;
use health_server::server::{self, Entrances, Remote};
use health_server::services::ServiceCatalog;
use health_server::socket;
use health_server::source::Source;
use health_settings::{Origin, SettingValue, Settings};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};

/// The server's data: two nodes, the second of which is in the state given by `peer`.
#[derive(Clone)]
pub(crate) struct Fixture {
    /// `Ok`, `Warning` or `Failure`.
    pub(crate) state: &'static str,
    /// ICMP result at the peer's node address: `None` if not probed yet, empty for success.
    pub(crate) peer: Option<&'static str>,
    /// The same result after all nodes were probed on request.
    pub(crate) peer_when_probed: Option<&'static str>,
    /// Number of nodes in the registry.
    pub(crate) registered: u8,
    /// Whether the report contains everything that a report can: diagnoses, disabled protocols, a degraded path, and an
    /// interval that the probe rate does not allow.
    pub(crate) is_troubled: bool,
    /// Whether the agent probes the containers of [`containers::MANIFEST`].
    pub(crate) probes_containers: bool,
    /// Whether the agent serves the services of [`services::MANIFEST`].
    pub(crate) serves_services: bool,
    location: Location,
    manager: Option<Manager>,
    containers: Option<Supervisor>,
    services: Option<ServiceCatalog>,
}

impl Fixture {
    fn report(&self, peer: Option<&str>) -> HealthStatus {
        let result = |status: &str| ConnectivityStatus {
            latency: if status.is_empty() { 21_300 } else { 0 },
            status: status.to_owned(),
            last_probed: "2026-11-21T03:00:00Z".parse().unwrap(),
            rtt_source: status.is_empty().then_some(RttSource::Kernel),
            connect_latency: None,
            total_latency: None,
            consecutive_failures: u32::from(!status.is_empty()) * 3,
            last_change: self
                .is_troubled
                .then(|| "2026-11-21T02:00:00Z".parse().unwrap()),
            degraded: (self.is_troubled && status.is_empty()).then(|| "loss 7%".to_owned()),
        };
        let diagnosis = |cause: &str| {
            self.is_troubled.then(|| Diagnosis {
                cause: cause.into(),
                message: "something is wrong".into(),
                evidence: vec!["ICMP answers, HTTP is refused".into()],
            })
        };
        let group = |ip: &str, icmp: Option<&str>| AddressGroupStatus {
            primary_address: PathStatus {
                ip: ip.parse().unwrap(),
                icmp: icmp.map(result),
                http: Some(result("")),
                off: vec![],
                path_mtu: self.is_troubled.then(|| Box::new(path_mtu())),
            },
            secondary_addresses: if self.is_troubled {
                vec![PathStatus {
                    ip: "fd00::1".parse().unwrap(),
                    icmp: Some(result("")),
                    http: None,
                    off: vec![Protocol::Http],
                    path_mtu: None,
                }]
            } else {
                vec![]
            },
        };
        let node = |number: u8, icmp| NodeStatus {
            name: format!("default/hnode{number}"),
            host: group(&format!("172.30.0.{number}"), icmp),
            health_endpoint: Some(group(&format!("10.244.{number}.7"), Some(""))),
            hosts_only: self.is_troubled,
            diagnosis: diagnosis("agent-down"),
        };
        HealthStatus {
            timestamp: Some("2026-11-21T03:00:00Z".parse().unwrap()),
            probe_interval: "10s".into(),
            configured_interval: self.is_troubled.then(|| "5s".into()),
            local: SelfStatus {
                name: "default/hnode1".into(),
                diagnosis: diagnosis("isolated"),
                public_mesh_key: self.is_troubled,
                hosts_only_reason: self.is_troubled.then(|| "this node has no pod CIDR".into()),
                full_maps: self.is_troubled.then(full_map).into_iter().collect(),
                policy_lag: self.is_troubled.then(policy_lag),
                problems: self.is_troubled.then(agent_problem).into_iter().collect(),
            },
            nodes: vec![node(1, Some("")), node(2, peer)],
        }
    }
}

fn agent_problem() -> AgentProblem {
    AgentProblem {
        check: "registry".into(),
        is_failure: false,
        message: "file:nodes.yaml is stale".into(),
    }
}

fn policy_lag() -> PolicyLag {
    PolicyLag {
        endpoints: 2,
        reason: "there is no room".into(),
    }
}

fn full_map() -> FullMap {
    FullMap {
        map: "HEALTH_CT4".into(),
        entries: 60_000,
        capacity: 65_536,
    }
}

fn path_mtu() -> PathMtuStatus {
    PathMtuStatus {
        mtu: 1400,
        local_mtu: 1500,
        device: "eth0".into(),
        larger: LargerPackets::Rejected,
        rejected_by: Some("172.30.0.254".parse().unwrap()),
        last_probed: "2026-11-21T03:00:00Z".parse().unwrap(),
    }
}

impl Source for Fixture {
    fn status(&self) -> HealthStatus {
        self.report(self.peer)
    }

    async fn probe(&self) -> HealthStatus {
        self.report(self.peer_when_probed)
    }

    fn probe_events(&self) -> mpsc::Receiver<ProbeEvent> {
        let (events, receiver) = mpsc::channel(3);
        let report = self.report(self.peer_when_probed);
        let node = ProbeEvent::Node(Box::new(report.nodes[0].clone()));
        let progress = ProbeEvent::Progress { done: 4, total: 8 };
        for event in [node, progress, ProbeEvent::Done(Box::new(report))] {
            events.try_send(event).unwrap();
        }
        receiver
    }

    fn history(&self, node: Option<&str>) -> Vec<TargetHistory> {
        let history = TargetHistory {
            node: "default/hnode1".into(),
            ip: "172.30.0.1".parse().unwrap(),
            path: PathKind::Host,
            protocol: Protocol::Icmp,
            windows: vec![HistoryWindow {
                length_ns: 60_000_000_000,
                covered_ns: 20_000_000_000,
                probes: 2,
                lost: 1,
                p50_ns: Some(21_300),
                p90_ns: Some(21_300),
                p99_ns: Some(21_300),
                max_ns: Some(21_300),
                jitter_ns: None,
            }],
            last_results_ns: vec![None, Some(21_300)],
        };
        [history]
            .into_iter()
            .filter(|history| node.is_none_or(|node| node == history.node))
            .collect()
    }

    fn each_rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow) -> io::Result<()>) -> io::Result<()> {
        let Some(peer) = self.peer else {
            return Err(io::Error::other("no maps are pinned"));
        };
        let key = |ip: &str, path: RttPath, protocol| RttKey {
            peer: ip.parse::<IpAddr>().unwrap().into(),
            path: path as u8,
            protocol,
            pad: 0,
        };
        let mut row = RttRow::EMPTY;
        if peer.is_empty() {
            let reply = rtt::Reply {
                rtt_ns: 21_300,
                remote_ns: 5_000,
                forward_ns: -7,
                back_ns: 16_307,
            };
            assert!(row.record_reply(rtt::bucket(reply.rtt_ns), &reply, 1, 1, rtt::SOURCE_KERNEL));
            row.record(100_000_000_000, 2, 2, rtt::SOURCE_SOCKET);
        }
        each(&key("172.30.0.1", RttPath::Host, rtt::PROTOCOL_ICMP), &row)?;
        each(&key("fd00::9", RttPath::Endpoint, rtt::PROTOCOL_TCP), &row)
    }

    fn path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        let entry = |number: u8| PathMtuEntry {
            node: format!("default/hnode{number}"),
            ip: format!("172.30.0.{number}").parse().unwrap(),
            probing: false,
            path_mtu: self.is_troubled.then(path_mtu),
        };
        let entries = (2..=self.registered).map(entry);
        entries
            .filter(|entry| node.is_none_or(|node| node == entry.node))
            .collect()
    }

    async fn probe_path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        self.path_mtus(node)
    }

    fn nodes(&self) -> NodeList {
        NodeList {
            registries: vec![RegistryState {
                registry: "file:/etc/health-agent/nodes.yaml".into(),
                cluster: "default".into(),
                last_read: "2026-11-21T03:00:00Z".parse().unwrap(),
                stale: Some("nodes.yaml:3:5: unknown field".into()),
                stale_since: Some("2026-11-21T03:00:00Z".parse().unwrap()),
                rejected: if self.is_troubled {
                    vec![RejectedEntry {
                        key: "a/b".into(),
                        reason: "has a slash".into(),
                    }]
                } else {
                    vec![]
                },
            }],
            nodes: (1..=self.registered)
                .map(|number| NodeEntry {
                    name: format!("default/hnode{number}"),
                    local: number == 1,
                    addresses: vec![format!("172.30.0.{number}").parse().unwrap()],
                    pod_cidrs: vec![format!("10.244.{number}.0/24").parse().unwrap()],
                    health_addresses: vec![format!("10.244.{number}.7").parse().unwrap()],
                    not_probed: Vec::new(),
                })
                .collect(),
        }
    }

    fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        vec![Arc::new(Endpoint {
            id: 1017,
            name: None,
            pod: None,
            container_id: None,
            network: None,
            identity: 4,
            labels: vec!["reserved:health".into()],
            policy_ingress: Enforcement::Disabled,
            policy_egress: Enforcement::Disabled,
            settings: EndpointSettings::default(),
            ipv4: Some("10.244.1.7".parse().unwrap()),
            ipv6: None,
            ready: None,
            gateway4: Some("10.244.1.1".parse().unwrap()),
            gateway6: None,
            state: "ready".into(),
            reason: None,
            interface: "lxc_health".into(),
            ifindex: 5,
            inner_interface: "health0".into(),
            mac: "0a:00:00:00:00:01".into(),
            host_mac: "0a:00:00:00:00:02".into(),
            netns: "/run/netns/health".into(),
            repairs: BTreeMap::from([("device deleted".into(), 1)]),
        })]
    }

    fn manager(&self) -> Option<&Manager> {
        self.manager.as_ref()
    }

    fn containers(&self) -> Option<&Supervisor> {
        self.containers.as_ref()
    }

    fn services(&self) -> Option<&ServiceCatalog> {
        self.services.as_ref()
    }

    fn identities(&self) -> Vec<IdentityEntry> {
        vec![
            IdentityEntry {
                id: 4,
                labels: vec!["reserved:health".into()],
                references: None,
            },
            IdentityEntry {
                id: 1017,
                labels: vec!["k8s:app=dns".into(), "k8s:tier=infra".into()],
                references: Some(vec!["hnode1".into(), "hnode2".into()]),
            },
        ]
    }

    fn monitor(&self, filter: EventFilter) -> Option<Result<Subscription, SubscribeError>> {
        let hub = Arc::new(Hub::new(NoPrograms).unwrap());
        let subscription = hub.subscribe(filter);
        let (reporter, _) = activity::channel();
        tokio::spawn(relay(CannedRing::new(hub.clone()), hub, reporter));
        Some(subscription)
    }

    fn settings(&self) -> Settings {
        let setting = |group: &str, name: &str, value: Value, origin| SettingValue {
            group: group.to_owned(),
            name: name.to_owned(),
            value,
            origin,
        };
        let file = Origin::File {
            path: "/etc/health-agent/config.yaml".into(),
            line: 3,
            column: 5,
        };
        let variable = "HEALTH_AGENT_ONE_WAY".to_owned();
        let mut settings = Settings {
            location: self.location.clone(),
            values: [
                setting(
                    "node",
                    "device",
                    json!(["eth0", "eth1"]),
                    Origin::CommandLine,
                ),
                setting("node", "mesh-key-file", Value::Null, Origin::Default),
                setting("mesh", "probe-interval", json!("10s"), file),
                setting("mesh", "probe-rate", json!(1000), Origin::Default),
                setting(
                    "mesh",
                    "one-way",
                    json!(true),
                    Origin::Environment { variable },
                ),
            ]
            .into(),
            ..Settings::default()
        };
        settings.node.node_name = "hnode1".to_owned();
        settings
    }

    fn agent(&self) -> AgentReport {
        let time = |text: &str| text.parse().ok();
        AgentReport {
            state: self.state(),
            starting: None,
            version: "0.1.0".into(),
            uptime: "1m1s".into(),
            kernel: "6.12.0".into(),
            registries: self.nodes().registries,
            programs: vec![ProgramStatus {
                name: "to_netdev".into(),
                attached: vec!["eth0/egress".into()],
            }],
            programs_error: None,
            controllers: vec![ControllerStatus {
                name: "routes".into(),
                interval: Some("2s".into()),
                successes: 7,
                failures: 1,
                consecutive_failures: 0,
                last_success: time("2026-11-21T03:00:00Z"),
                last_failure: time("2026-11-21T02:00:00Z"),
                last_error: Some("no such device".into()),
            }],
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

/// Stands in for programs, without any events to switch on or off.
struct NoPrograms;

impl Switch for NoPrograms {
    fn set(&self, _: &MonitorFilter) -> io::Result<()> {
        Ok(())
    }
}

/// A ring with a drop, a closed connection and three lost events, whose agent then stops.
struct CannedRing {
    hub: Arc<Hub>,
    events: Vec<Event>,
}

impl CannedRing {
    fn new(hub: Arc<Hub>) -> Self {
        let event = |kind, protocol, endpoint| Event {
            source: IpAddr::from([10, 9, 9, 9]).into(),
            destination: IpAddr::from([172, 30, 0, 2]).into(),
            ifindex: 1,
            kind,
            protocol,
            endpoint,
            ..Event::default()
        };
        let dropped = Event {
            reason: Reason::InvalidSource as u8,
            ..event(EVENT_DROP, 17, 0)
        };
        Self {
            hub,
            events: vec![dropped, event(EVENT_CT_CLOSED, 6, 1017)],
        }
    }
}

impl Ring for CannedRing {
    async fn ready(&mut self) -> io::Result<()> {
        if self.events.is_empty() {
            self.hub.close();
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    fn take(&mut self, each: impl FnMut(&Event)) -> bool {
        std::mem::take(&mut self.events).iter().for_each(each);
        false
    }

    fn lost(&self) -> io::Result<u64> {
        Ok(if self.events.is_empty() { 3 } else { 0 })
    }
}

/// Serves a [`Fixture`] until it is dropped.
pub(crate) struct Agent {
    dir: TempDir,
    pods: watch::Sender<Arc<PodSet>>,
    _services: Option<services::Served>,
    _runtime: Runtime,
}

impl Agent {
    /// Starts an agent whose data `change` modifies. Without modifications, everything is reachable.
    pub(crate) fn start(change: impl FnOnce(&mut Fixture)) -> Self {
        Self::start_with(change, |_| (None, None))
    }

    /// Like [`start`](Self::start), with further entrances, which `open` opens in a runtime for an agent there.
    pub(crate) fn start_with(
        change: impl FnOnce(&mut Fixture),
        open: impl FnOnce(&Location) -> (Option<UnixListener>, Option<Remote>),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut fixture = Fixture {
            state: "Ok",
            peer: Some(""),
            peer_when_probed: Some(""),
            registered: 1,
            is_troubled: false,
            probes_containers: false,
            serves_services: false,
            location: Location {
                instance: "default".into(),
                runtime_dir: dir.path().to_owned(),
                state_dir: dir.path().to_owned(),
                bpf_root: dir.path().to_owned(),
            },
            manager: None,
            containers: None,
            services: None,
        };
        change(&mut fixture);
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        fixture.manager = Some(runtime.block_on(endpoints::manager(dir.path())));
        let pods = containers::pods();
        if fixture.probes_containers {
            let supervisor = containers::supervisor(dir.path(), pods.subscribe());
            fixture.containers = Some(runtime.block_on(supervisor));
        }
        let services = fixture
            .serves_services
            .then(|| runtime.block_on(services::served(dir.path())));
        fixture.services = services.as_ref().map(|served| served.catalog.clone());
        let entrances = {
            let _inside = runtime.enter();
            let (read_only_socket, remote) = open(&fixture.location);
            Entrances {
                socket: socket::bind(&fixture.location.socket(), None).unwrap(),
                read_only_socket,
                remote,
            }
        };
        runtime.spawn(server::serve(
            entrances,
            Arc::new(fixture),
            std::future::pending(),
        ));
        Self {
            dir,
            pods,
            _services: services,
            _runtime: runtime,
        }
    }

    /// Removes the pods whose containers the agent probes.
    pub(crate) fn remove_pods(&self) {
        self.pods.send_replace(Arc::new(containers::no_pods()));
    }

    /// The agent's folder for runtime files, state and bpffs pins.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }
}
