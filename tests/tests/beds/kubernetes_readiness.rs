//! Readiness that is faster than the API's: probes of the node take a backend of an annotated service out at once.

use anyhow::{Context as _, ensure};
use health_model::api::ProbedPod;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::apiserver::{ApiServer, Kind};
use tests::served::{Backend, PORT};
use tests::{Bed, Member, Node, PATIENCE, wait_for};

use crate::services::wait_answered_by;

const CLUSTER_IP: &str = "10.96.7.1";
const BOTH: [&str; 2] = ["web-1", "web-2"];

/// A node that serves and probes two backends from an API server.
struct Stand {
    backends: Vec<Backend>,
    client: Member,
    server: ApiServer,
    bed: Bed,
    _folder: TempDir,
}

impl Stand {
    fn start(is_annotated: bool) -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).without_agents().start()?;
        let node = bed.node(1);
        let server = ApiServer::start_on(node)?;
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig)?;
        server.put(service(is_annotated));
        let kubeconfig = kubeconfig.display();
        node.start_agent_with(&format!(
            "--pods-from-kubernetes={kubeconfig} --services-from-kubernetes={kubeconfig}"
        ))?;
        bed.wait_all_reachable(PATIENCE)?;
        let backends = BOTH.map(|name| Backend::start(node, name, ""));
        let backends: Vec<_> = backends.into_iter().collect::<anyhow::Result<_>>()?;
        let client = Member::on(node, "client", "")?;
        let stand = Self {
            backends,
            client,
            server,
            bed,
            _folder: folder,
        };
        for backend in &stand.backends {
            stand.server.put(pod(stand.node(), backend));
        }
        stand.put_slice(true)?;
        for name in BOTH {
            stand.wait_probed(name, true)?;
        }
        Ok(stand)
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// Writes the slice, which says that `web-2` is ready, and whether `web-1` is.
    fn put_slice(&self, is_ready: bool) -> anyhow::Result<()> {
        let endpoints: anyhow::Result<Vec<Value>> = self
            .backends
            .iter()
            .map(|backend| {
                Ok(json!({
                    "addresses": [backend.member.ipv4()?], "nodeName": backend.node,
                    "conditions": { "ready": is_ready || backend.name == BOTH[1] },
                }))
            })
            .collect();
        self.server.put(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "namespace": "default", "name": "web-1",
                "labels": { "kubernetes.io/service-name": "web" },
            },
            "addressType": "IPv4", "ports": [{ "name": "", "port": PORT }],
            "endpoints": endpoints?,
        }));
        Ok(())
    }

    /// Waits until the node's own probes find a pod ready, or not ready.
    fn wait_probed(&self, name: &str, is_ready: bool) -> anyhow::Result<()> {
        wait_for("the result of the probes", PATIENCE, || {
            let reported = self.node().cli(&format!("probe get {name} -o json"))?;
            if reported.code != Some(0) {
                return Ok(None);
            }
            let mut details: Value = serde_json::from_str(&reported.stdout)?;
            let pod: ProbedPod = serde_json::from_value(details["pod"].take())?;
            Ok((pod.ready == is_ready).then_some(()))
        })
        .with_context(|| format!("{name} ready: {is_ready}"))
    }

    /// Makes `web-1` ready or not, and waits until the node's own probes have seen it.
    fn set_ready(&self, is_ready: bool) -> anyhow::Result<()> {
        self.backends[0].set_ready(is_ready)?;
        self.wait_probed(BOTH[0], is_ready)
    }

    /// Waits until exactly these backends answer new connections to the service.
    fn wait_answered_by(&self, names: &[&str]) -> anyhow::Result<()> {
        let target = format!("{CLUSTER_IP}:80").parse()?;
        wait_answered_by(&self.client.name, target, names).map(drop)
    }

    /// Checks that requests are answered by exactly these backends at once, without waiting.
    fn is_answered_by(&self, names: &[&str]) -> anyhow::Result<()> {
        let listed = self.node().listing("service get web")?;
        let backends = listed["service"]["ports"][0]["backends"]
            .as_array()
            .cloned();
        let backends = backends.with_context(|| format!("no backends: {listed}"))?;
        let ready = backends.iter().filter(|backend| backend["ready"] == true);
        ensure!(ready.count() == names.len(), "{listed}");
        self.wait_answered_by(names)
    }
}

fn service(is_annotated: bool) -> Value {
    let mut service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": "default", "name": "web" },
        "spec": { "clusterIP": CLUSTER_IP, "ports": [{ "port": 80 }] },
    });
    if is_annotated {
        let annotation = json!({ "service.health-agent.io/local-readiness": "true" });
        service["metadata"]["annotations"] = annotation;
    }
    service
}

/// The pod of a backend, as the API has it.
fn pod(node: &Node, backend: &Backend) -> Value {
    let mut pod = backend.pod();
    pod["metadata"]["namespace"] = "default".into();
    pod["spec"]["nodeName"] = node.name().into();
    pod["status"]["phase"] = "Running".into();
    pod["status"]["containerStatuses"] = json!([{
        "name": "web", "containerID": format!("test://{}", backend.name), "ready": true,
        "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
    }]);
    pod
}

#[test]
#[ignore = "needs root"]
fn a_backend_that_fails_its_probe_leaves_an_annotated_service_before_the_api_says_so()
-> anyhow::Result<()> {
    let stand = Stand::start(true)?;
    stand.wait_answered_by(&BOTH)?;
    stand.set_ready(false)?;
    stand.wait_answered_by(&BOTH[1..])?;
    let slices = stand.server.list_of(Kind::EndpointSlice);
    let said = &slices[0]["endpoints"][0]["conditions"]["ready"];
    assert_eq!(*said, true, "{slices:?}");
    stand.set_ready(true)?;
    stand.wait_answered_by(&BOTH)?;

    // Probes bring no backend in that the API calls unready.
    stand.put_slice(false)?;
    stand.wait_answered_by(&BOTH[1..])?;
    stand.set_ready(false)?;
    stand.set_ready(true)?;
    stand.is_answered_by(&BOTH[1..])?;
    stand.put_slice(true)?;
    stand.wait_answered_by(&BOTH)
}

#[test]
#[ignore = "needs root"]
fn probes_do_not_count_for_services_of_the_api_until_an_annotation_says_so() -> anyhow::Result<()> {
    let stand = Stand::start(false)?;
    stand.wait_answered_by(&BOTH)?;
    stand.set_ready(false)?;
    stand.is_answered_by(&BOTH)?;
    stand.server.put(service(true));
    stand.wait_answered_by(&BOTH[1..])?;
    stand.server.put(service(false));
    stand.wait_answered_by(&BOTH)
}
