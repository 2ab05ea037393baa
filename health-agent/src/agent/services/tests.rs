use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use health_metrics::services::ServiceMetrics;
use health_model::activity;
use health_probe::source::Folder as Pods;
use health_probe::supervisor::{NoEndpoints, NoPodEvents, Restarts, Supervisor, SupervisorOptions};
use health_probe::worker::Limits;
use health_registry::nodes::Standing;
use health_server::services::ServiceCatalog;
use health_server::services::listeners::HealthChecks;
use health_service::choice::Topology;
use health_service::forwarding::Forwarding;
use health_service::services::{NodeFacts, Provider, Work};
use health_service::state::{Changes, State};
use health_settings::{ServiceProxyMode, ServiceSettings};
use tokio::sync::watch;
use tokio::time::timeout;

use super::instrumented::InstrumentedProvider;
use super::proxy::{Proxy, ProxyOptions};
use super::proxy_parts::Ports;
use super::readiness::PodReadiness;
use super::sources::Sources;
use super::standing;

/// Timeout for steps that normally take a moment.
const PATIENCE: Duration = Duration::from_secs(120);

/// A pod at this address, which is ready while a listener exists at `host`.
fn pod(ip: IpAddr, host: SocketAddr) -> String {
    let port = host.port();
    let host = host.ip();
    format!(
        "\
apiVersion: v1
kind: Pod
metadata:
  {{name: web, namespace: shop, annotations: {{probe.health-agent.io/app.readiness.period: 50ms}}}}
spec: {{containers: [{{name: app, readinessProbe: {{tcpSocket: {{host: {host}, port: {port}}}, failureThreshold: 1}}}}]}}
status:
  phase: Running
  podIP: {ip}
  containerStatuses: [{{name: app, containerID: 'test://1', state: {{running: {{}}}}}}]
"
    )
}

/// A service with two endpoints on this node, one of which is the pod's.
fn service(ip: IpAddr) -> String {
    format!(
        "\
apiVersion: v1
kind: Service
metadata: {{namespace: shop, name: web}}
spec: {{clusterIP: 10.96.0.1, ports: [{{port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: shop, name: web-1, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
ports: [{{port: 8080}}]
endpoints:
- {{addresses: [10.1.0.1], nodeName: here}}
- {{addresses: [{ip}], nodeName: here}}
"
    )
}

fn supervisor(pods: &Pods, state: &Path) -> Supervisor {
    let options = SupervisorOptions {
        pods: pods.pods(),
        runtime: None,
        restarts: Restarts::None,
        endpoints: Arc::new(NoEndpoints),
        pod_events: Arc::new(NoPodEvents),
        node_addresses: vec![Ipv4Addr::new(172, 30, 0, 1).into()],
        limits: Limits {
            per_second: 1000,
            concurrent: 10,
            pod_per_second: 1000,
        },
        certificates: state.to_owned(),
        state_file: state.join("probes.json"),
    };
    Supervisor::start(options).unwrap()
}

/// Serves services from a folder, on a node whose pods are probed.
fn served(services: &Path, pods: Option<PodReadiness>) -> Proxy {
    let settings = ServiceSettings {
        // No syncs except on request.
        service_sync_max: Duration::from_secs(3600),
        ..ServiceSettings::default()
    };
    let topology = Topology {
        node: "here".into(),
        zone: None,
    };
    let ports = Ports {
        health: Vec::new(),
        metrics: Vec::new(),
        state_dir: services.join(".state"),
    };
    let options = ProxyOptions {
        settings: &settings,
        forwarding: Forwarding::default(),
        node: NodeFacts {
            topology: watch::channel(topology).1,
            reserved: watch::channel(Arc::default()).1,
        },
        sources: Sources::of_folder(services),
        ports,
        syncs: activity::channel().0,
        pods,
    };
    Proxy::start(options, Moody(always())).unwrap()
}

/// The backends that get new flows, and those with a probe result.
fn backends(catalog: &ServiceCatalog) -> (Vec<IpAddr>, Vec<(IpAddr, bool)>) {
    let services = catalog.services(|_| true);
    let ports = services.iter().flat_map(|service| &service.ports);
    let all: Vec<_> = ports.flat_map(|port| &port.backends).collect();
    let used = all.iter().filter(|one| one.in_cluster_list);
    let probed = all
        .iter()
        .filter_map(|one| Some((one.address.ip(), one.probed?)));
    (used.map(|one| one.address.ip()).collect(), probed.collect())
}

#[tokio::test]
async fn a_container_that_is_not_ready_leaves_the_backends_and_comes_back() {
    let [.., first, second] = std::process::id().to_be_bytes();
    let listener = TcpListener::bind((Ipv4Addr::new(127, 84, first, second), 0)).unwrap();
    let host = listener.local_addr().unwrap();
    let ip = IpAddr::from([10, 1, 0, 2]);
    let dir = tempfile::tempdir().unwrap();
    let [pods_dir, services_dir] = ["pods", "services"].map(|name| dir.path().join(name));
    for (folder, text) in [(&pods_dir, pod(ip, host)), (&services_dir, service(ip))] {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("web.yaml"), text).unwrap();
    }
    let pods = Pods::watch(&pods_dir);
    let probes = supervisor(&pods, dir.path());
    let readiness = PodReadiness::follow(probes.clone(), Vec::new());
    let served = served(&services_dir, Some(readiness));
    let other = IpAddr::from([10, 1, 0, 1]);
    let mut view = served.catalog.handle.view();
    let mut until = async |used: Vec<IpAddr>, ready: bool| {
        let followed = async {
            while backends(&served.catalog) != (used.clone(), vec![(ip, ready)]) {
                // Readiness is known a moment before the view shows it.
                let _ = timeout(Duration::from_millis(10), view.changed()).await;
            }
        };
        timeout(PATIENCE, followed).await.expect("the backends");
    };
    until(vec![other, ip], true).await;
    drop(listener);
    until(vec![other], false).await;
    let _listener = TcpListener::bind(host).unwrap();
    until(vec![other, ip], true).await;
    probes.shutdown().await;
    served.stop().await;
}

#[tokio::test]
async fn a_pod_with_an_address_of_the_node_says_nothing_of_its_neighbours_there() {
    let dir = tempfile::tempdir().unwrap();
    let ip = IpAddr::from([172, 30, 0, 2]);
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    std::fs::write(dir.path().join("web.yaml"), pod(ip, nobody)).unwrap();
    let pods = Pods::watch(dir.path());
    let probes = supervisor(&pods, dir.path());
    let of_all = PodReadiness::follow(probes.clone(), Vec::new());
    let is_unready = |readiness: &Arc<_>| **readiness == [(ip, false)].into();
    of_all.readiness().wait_for(is_unready).await.unwrap();
    let shared = PodReadiness::follow(probes.clone(), vec![ip]);
    // The follower has read the supervisor's state by then.
    let mut changes = probes.changes();
    changes.changed().await.unwrap();
    tokio::task::yield_now().await;
    assert!(shared.readiness().borrow().is_empty());
    probes.shutdown().await;
}

#[tokio::test]
async fn without_services_that_can_be_read_the_agent_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let served = served(&dir.path().join("none"), None);
    let mut view = served.catalog.handle.view();
    view.wait_for(|view| !view.problems.is_empty())
        .await
        .unwrap();
    let summary = served
        .catalog
        .summary(health_settings::ServiceProxyMode::Ebpf);
    assert!(summary.enabled && !summary.synced, "{summary:?}");
    let (is_failure, problem) = served.catalog.problem().unwrap();
    assert!(
        !is_failure && problem.starts_with("the services have not been read yet: "),
        "{problem}"
    );
    assert!(problem.contains("none"), "{problem}");
}

/// A provider that fails until it is switched on.
struct Moody(watch::Receiver<bool>);

impl Provider for Moody {
    type Error = &'static str;

    async fn sync(&mut self, _: Work<'_>) -> Result<(), &'static str> {
        self.0.borrow().then_some(()).ok_or("no room")
    }
}

/// The mood of a provider that always works.
fn always() -> watch::Receiver<bool> {
    watch::channel(true).1
}

#[tokio::test]
async fn load_balancers_are_notified_of_what_is_in_force_and_no_more() {
    let (works, mood) = watch::channel(false);
    let (sender, mut checks) = watch::channel(Arc::<HealthChecks>::default());
    let metrics = Arc::new(ServiceMetrics::new(ServiceProxyMode::Ebpf));
    let mut provider =
        InstrumentedProvider::new(Moody(mood), metrics, sender, activity::channel().0);
    let (state, changes) = (
        State::new(Topology {
            node: "here".into(),
            zone: None,
        }),
        Changes::default(),
    );
    let work = Work {
        state: &state,
        changes: &changes,
        is_full: true,
    };
    assert_eq!(provider.sync(work).await, Err("no room"));
    assert!(!checks.has_changed().unwrap());
    works.send_replace(true);
    assert_eq!(provider.sync(work).await, Ok(()));
    // Notified even without changes, so that a listener that failed to open retries.
    assert!(checks.has_changed().unwrap());
    checks.mark_unchanged();
    assert_eq!(provider.sync(work).await, Ok(()));
    assert!(checks.has_changed().unwrap());
}

#[tokio::test]
async fn load_balancers_are_notified_when_the_cluster_is_about_to_remove_this_node() {
    let dir = tempfile::tempdir().unwrap();
    let served = served(dir.path(), None);
    let handle = served.catalog.handle.clone();
    let (cluster, standing) = watch::channel(Standing::Unknown);
    let following = tokio::spawn(standing::follow(standing, handle.clone()));
    let known = |is_deleting, taints: &[&str]| Standing::Known {
        is_deleting,
        taints: taints.iter().map(|&key| key.to_owned()).collect(),
        zone: None,
    };
    let doomed = "ToBeDeletedByClusterAutoscaler";
    for (standing, is_eligible) in [
        (known(false, &["node.kubernetes.io/unschedulable"]), true),
        (known(false, &[doomed]), false),
        (Standing::Unknown, true),
        (known(false, &[]), true),
        (known(true, &[]), false),
    ] {
        cluster.send_replace(standing.clone());
        let reported = async {
            while handle.healthz().node_eligible != Some(is_eligible) {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, reported)
            .await
            .expect("the node's standing");
        assert!(handle.livez().healthy, "{standing:?}");
    }
    // A registry that has ended reports nothing more.
    drop(cluster);
    following.await.unwrap();
    assert_eq!(handle.healthz().node_eligible, Some(false));
    served.stop().await;
}

#[tokio::test]
async fn the_zone_is_the_one_that_the_cluster_says() {
    let (cluster, standing) = watch::channel(Standing::Unknown);
    let (place, mut topology) = watch::channel(Topology {
        node: "here".into(),
        zone: None,
    });
    let following = tokio::spawn(standing::follow_zone(standing, place));
    for zone in [Some("z1"), None, Some("z2")] {
        cluster.send_replace(Standing::Known {
            is_deleting: false,
            taints: Vec::new(),
            zone: zone.map(str::to_owned),
        });
        let reported = topology.wait_for(|topology| topology.zone.as_deref() == zone);
        timeout(PATIENCE, reported)
            .await
            .expect("the zone")
            .unwrap();
    }
    // A node whose object is gone stays in its zone.
    cluster.send_replace(Standing::Unknown);
    drop(cluster);
    following.await.unwrap();
    assert_eq!(topology.borrow().zone.as_deref(), Some("z2"));
}
