//! How much capacity the probes of one tenant can take from others, with a real agent.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use anyhow::Context as _;
use health_model::api::ContainerProbeSummary;
use jiff::Timestamp;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::{Bed, Node, PATIENCE, wait_for};

/// Ports of a server that never answers, and of one that accepts all connections.
const MUTE_PORT: u16 = 8080;
const OPEN_PORT: u16 = 8081;

/// An agent that probes its own node's pods from a folder of manifests.
struct Stand {
    bed: Bed,
    manifests: TempDir,
    _mute: TcpListener,
}

impl Stand {
    fn start() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).without_agents().start()?;
        let listen = |port| {
            let listener = bed
                .node(1)
                .run_in(|| TcpListener::bind(("127.0.0.1", port)))?;
            listener.with_context(|| format!("port {port}"))
        };
        // The kernel completes connections to the mute server, but nothing accepts them.
        let open = listen(OPEN_PORT)?;
        thread::spawn(move || open.incoming().for_each(drop));
        Ok(Self {
            _mute: listen(MUTE_PORT)?,
            manifests: tempfile::tempdir()?,
            bed,
        })
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// Makes the agent probe pods with this many containers, each with a readiness and a liveness probe.
    fn probe(
        &self,
        namespace: &str,
        pods: &[String],
        containers: u32,
        probe: &Value,
    ) -> anyhow::Result<()> {
        let names: Vec<String> = (0..containers).map(|number| format!("c{number}")).collect();
        // Containers that started before the agent have no initial result.
        let started = Timestamp::now().to_string();
        let container =
            |name: &String| json!({"name": name, "readinessProbe": probe, "livenessProbe": probe});
        let status = |name: &String| {
            json!({
                "name": name, "containerID": format!("id-{name}"),
                "state": {"running": {"startedAt": started}},
            })
        };
        let pod = |name: &String| {
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"namespace": namespace, "name": name},
                "spec": {"containers": names.iter().map(container).collect::<Vec<_>>()},
                "status": {
                    "phase": "Running", "podIP": "127.0.0.1",
                    "containerStatuses": names.iter().map(status).collect::<Vec<_>>(),
                },
            })
        };
        let items: Vec<Value> = pods.iter().map(pod).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
        let path = self.manifests.path().join(format!("{}.json", pods[0]));
        fs::write(path, list.to_string())?;
        Ok(())
    }

    fn probes(&self) -> anyhow::Result<Vec<Value>> {
        let listed = self.node().listing("probe list")?;
        Ok(listed.as_array().context("a list")?.clone())
    }

    fn wait_ready(&self, pod: &str) -> anyhow::Result<()> {
        wait_for("the pod to be ready", PATIENCE, || {
            let shown = self.node().cli(&format!("probe get {pod} -o json"))?;
            let details: Value = serde_json::from_str(&shown.stdout)?;
            Ok((details["pod"]["ready"] == true).then_some(()))
        })
        .with_context(|| pod.to_owned())
    }

    /// The agent's summary.
    fn summary(&self) -> anyhow::Result<ContainerProbeSummary> {
        let mut stream = UnixStream::connect(self.node().socket())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /v1/probes/summary HTTP/1.0\r\nHost: agent\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP")?;
        Ok(serde_json::from_str(body)?)
    }

    fn status(&self) -> anyhow::Result<String> {
        Ok(self.node().cli("status --verbose")?.stdout)
    }
}

/// Whether a probe belongs to the tenant's slow pods.
fn is_slow(probe: &Value) -> bool {
    let pod = probe["pod"].as_str().unwrap_or_default();
    pod.starts_with("tenant/slow-")
}

#[test]
#[ignore = "needs root"]
fn slow_probes_of_one_tenant_leave_places_to_others_and_are_shown_as_overdue() -> anyhow::Result<()>
{
    let stand = Stand::start()?;
    let slow: Vec<String> = (0..9).map(|number| format!("slow-{number}")).collect();
    let hour = json!({"httpGet": {"port": MUTE_PORT}, "timeoutSeconds": 3600, "periodSeconds": 1});
    stand.probe("tenant", &slow, 60, &hour)?;
    stand.node().start_agent_with(&format!(
        "--pod-manifests {}",
        stand.manifests.path().display()
    ))?;
    let in_flight = |probes: &[Value]| {
        let running = probes.iter().filter(|probe| probe["in-flight"] == true);
        running.count()
    };
    wait_for("the tenant to hold all that it gets", PATIENCE, || {
        Ok((in_flight(&stand.probes()?) >= 450).then_some(()))
    })?;
    // These pods come later, and are probed at once.
    let open = json!({"tcpSocket": {"port": OPEN_PORT}, "timeoutSeconds": 60, "periodSeconds": 1});
    for (namespace, pod) in [("shop", "web"), ("tenant", "neighbour"), ("other", "new")] {
        stand.probe(namespace, &[pod.to_owned()], 1, &open)?;
        stand.wait_ready(&format!("{namespace}/{pod}"))?;
    }
    let probes = stand.probes()?;
    assert!(in_flight(&probes) <= 500 + 6, "{}", in_flight(&probes));
    // All probes without a slot are overdue. Those with a slot are not, because their timeout is one hour.
    let overdue = wait_for("the slow ones to be overdue", PATIENCE, || {
        let probes = stand.probes()?;
        let slow = probes.iter().filter(|probe| is_slow(probe));
        let (overdue, others): (Vec<_>, Vec<_>) =
            slow.partition(|probe| !probe["overdue-ns"].is_null());
        let are_all = others.iter().all(|probe| probe["in-flight"] == true);
        Ok(are_all.then(|| overdue.into_iter().cloned().collect::<Vec<_>>()))
    })?;
    assert!(overdue.len() >= 1080 - 506, "{}", overdue.len());
    assert!(overdue.iter().all(|probe| probe["in-flight"] == false));
    let share = "due, but its pod and namespace use their full share of slots";
    assert!(overdue.iter().any(|probe| probe["waiting"] == share));
    // A liveness probe counts as successful until it has a result.
    let liveness = overdue.iter().find(|probe| probe["type"] == "liveness");
    let pod = liveness.and_then(|probe| probe["pod"].as_str());
    let pod = pod.context("no overdue liveness probe")?;
    let shown = stand
        .node()
        .cli(&format!("probe list --pod {pod}"))?
        .success()?;
    assert!(shown.contains("was success"), "{shown}");
    wait_for("status to show it", PATIENCE, || {
        let status = stand.status()?;
        let is_shown = status.contains(" overdue\n") && status.contains("container-probes: ");
        Ok(is_shown.then_some(()))
    })
    .with_context(|| stand.status().unwrap_or_default())
}

#[test]
#[ignore = "needs root"]
fn a_pod_of_fast_probes_has_no_more_than_its_rate() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let often = json!({"tcpSocket": {"port": OPEN_PORT}});
    stand.probe("tenant", &["fast".to_owned()], 200, &often)?;
    let path = stand.manifests.path().join("fast.json");
    let mut list: Value = serde_json::from_str(&fs::read_to_string(&path)?)?;
    let mut annotations = serde_json::Map::new();
    for number in 0..200 {
        for kind in ["readiness", "liveness"] {
            let name = format!("probe.health-agent.io/c{number}.{kind}.period");
            annotations.insert(name, "10ms".into());
        }
    }
    list["items"][0]["metadata"]["annotations"] = annotations.into();
    fs::write(&path, list.to_string())?;
    let flags = format!("--pod-manifests {}", stand.manifests.path().display());
    stand.node().start_agent_with(&flags)?;
    stand.wait_ready("tenant/fast")?;
    // 40,000 probes per second are due, so the limit of 100 per second determines how many are sent.
    let runs = || -> anyhow::Result<u64> { Ok(stand.summary()?.runs.values().sum()) };
    let (start, first) = (Instant::now(), runs()?);
    let last = wait_for("some seconds of probes", PATIENCE, || {
        let now = runs()?;
        Ok((now - first >= 500).then_some(now))
    })?;
    // Includes the burst of one second and the runs in flight at the start.
    let most = 100.0 * (start.elapsed().as_secs_f64() + 2.0);
    assert!((last - first) as f64 <= most, "{first} {last} of {most}");
    Ok(())
}
