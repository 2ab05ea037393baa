//! Probes of a container whose port has no listener.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use health_model::api::PodProblem;
use health_probe::source::{Keeper, PodSet, SourcedPod};
use health_probe::spec::{self, PodSpec};
use health_probe::supervisor::{NoEndpoints, NoPodEvents, Restarts, Supervisor, SupervisorOptions};
use health_probe::worker::Limits;
use tokio::sync::watch;

/// Both probes fail at once, and the liveness probe then goes on hold.
const MANIFEST: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: u-1}
spec:
  containers:
  - name: app
    readinessProbe: {tcpSocket: {port: 1}, failureThreshold: 1}
    livenessProbe: {tcpSocket: {port: 1}, failureThreshold: 1}
status:
  phase: Running
  podIP: 127.0.0.1
  containerStatuses:
  - {name: app, containerID: 'test://3f2a', ready: false, state: {running: {}}}
";

/// The pod of the manifest, and an unusable one.
pub(super) fn pods() -> watch::Sender<Arc<PodSet>> {
    let manifest = spec::read(MANIFEST);
    let sourced = |pod: PodSpec| SourcedPod {
        status: manifest.statuses.get(&pod.uid).cloned(),
        spec: Arc::new(pod),
        source: "pods/web.yaml".into(),
        keeper: Keeper::Agent,
    };
    let pods = manifest.pods.clone().into_iter().map(sourced).collect();
    watch::Sender::new(Arc::new(PodSet { pods, ..no_pods() }))
}

/// No pods, but a problem.
pub(super) fn no_pods() -> PodSet {
    PodSet {
        pods: Vec::new(),
        problems: vec![PodProblem {
            subject: "pods/db.yaml".into(),
            problem: "pod shop/db: \u{1b}[1m".into(),
        }],
        is_complete: true,
    }
}

/// Starts a supervisor, and waits until the pod's probes have failed and an event has reported the consequence.
pub(super) async fn supervisor(state_dir: &Path, pods: watch::Receiver<Arc<PodSet>>) -> Supervisor {
    let supervisor = Supervisor::start(SupervisorOptions {
        pods,
        runtime: None,
        restarts: Restarts::Own,
        endpoints: Arc::new(NoEndpoints),
        pod_events: Arc::new(NoPodEvents),
        node_addresses: vec![IpAddr::from([127, 0, 0, 1])],
        limits: Limits {
            per_second: 1000,
            concurrent: 10,
            pod_per_second: 1000,
        },
        certificates: state_dir.join("certificates"),
        state_file: state_dir.join("probes.json"),
    })
    .unwrap();
    let mut changes = supervisor.changes();
    let is_over = || {
        let probes = supervisor.probes();
        let events = supervisor.events_since(0);
        probes.len() == 2
            && probes.iter().all(|probe| probe.last_run.is_some())
            && probes.iter().any(|probe| probe.on_hold)
            && events.iter().any(|event| event.reason == "NotKilled")
    };
    while !is_over() {
        changes.changed().await.unwrap();
    }
    supervisor
}
