//! Container probes of pods that an API server has assigned to the agent's node.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use health_model::api::{ContainerEvent, ProbedContainer, ProbedPod};
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::apiserver::{ApiServer, Behaviour};
use tests::containerd::{Container, Containerd};
use tests::{Bed, Node, PATIENCE, wait_for};

/// The type of a probe that passes as long as the container runs.
const PASSES: &str = "readinessProbe";

/// An agent, a containerd on its node, an API server, and a folder of manifests.
struct Stand {
    containerd: Containerd,
    server: ApiServer,
    bed: Bed,
    folder: TempDir,
}

impl Stand {
    /// Starts everything except the agent.
    fn start() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).without_agents().start()?;
        let containerd = Containerd::start_on(bed.node(1), None)?;
        let server = ApiServer::start_on(bed.node(1))?;
        let folder = tempfile::tempdir()?;
        fs::create_dir(folder.path().join("pods"))?;
        server.write_kubeconfig(&folder.path().join("kubeconfig"))?;
        Ok(Self {
            containerd,
            server,
            bed,
            folder,
        })
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    fn manifests(&self) -> PathBuf {
        self.folder.path().join("pods")
    }

    fn start_agent_with(&self, flags: &str) -> anyhow::Result<()> {
        let socket = self.containerd.socket().display();
        self.start_agent_without_runtime(&format!("--runtime-endpoint unix://{socket} {flags}"))
    }

    fn start_agent_without_runtime(&self, flags: &str) -> anyhow::Result<()> {
        self.node().start_agent_with(&format!(
            "--pods-from-kubernetes={} {flags}",
            self.folder.path().join("kubeconfig").display()
        ))
    }

    fn start_agent(&self) -> anyhow::Result<()> {
        self.start_agent_with("")
    }

    /// Runs a container that does not exit.
    fn run(&mut self, name: &str) -> anyhow::Result<Container> {
        let script = "touch /tmp/alive; sleep 1000000";
        self.containerd
            .run(name, &["/bin/sh", "-c", script], None, &[])
    }

    /// A pod of this node as an API object. Its only container has a probe of this type.
    fn object(&self, name: &str, probe: &str) -> Value {
        let mut object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": "default", "name": name, "uid": format!("uid-{name}"),
                "managedFields": [{ "manager": "kubelet", "operation": "Update" }],
            },
            "spec": {
                "nodeName": self.node().name(), "terminationGracePeriodSeconds": 1,
                "containers": [{ "name": name, "image": "busybox" }],
            },
            "status": { "phase": "Running" },
        });
        object["spec"]["containers"][0][probe] = json!({
            "exec": { "command": ["test", "-e", "/tmp/alive"] },
            "periodSeconds": 1, "timeoutSeconds": 60, "failureThreshold": 1,
        });
        object
    }

    /// The agent's report on the pod with this name, or `None` if it knows no such pod.
    fn pod(&self, name: &str) -> anyhow::Result<Option<ProbedPod>> {
        let reported = self.node().cli(&format!("probe get {name} -o json"))?;
        if reported.code != Some(0) {
            return Ok(None);
        }
        let mut details: Value = serde_json::from_str(&reported.stdout)?;
        Ok(Some(serde_json::from_value(details["pod"].take())?))
    }

    /// Waits until a pod's only container meets a condition.
    fn wait(
        &self,
        what: &str,
        name: &str,
        is_so: impl Fn(&ProbedContainer) -> bool,
    ) -> anyhow::Result<ProbedContainer> {
        wait_for(what, PATIENCE, || {
            let pod = self.pod(name)?;
            let container = pod.and_then(|pod| pod.containers.into_iter().next());
            Ok(container.filter(|container| is_so(container)))
        })
        .with_context(|| format!("{:?}\n{:?}", self.problems(), self.events()))
    }

    fn wait_ready(&self, name: &str) -> anyhow::Result<ProbedContainer> {
        self.wait(&format!("{name} to be ready"), name, |one| one.ready)
    }

    fn wait_gone(&self, name: &str) -> anyhow::Result<()> {
        wait_for(&format!("{name} to be gone"), PATIENCE, || {
            Ok(self.pod(name)?.is_none().then_some(()))
        })
    }

    /// Problems that keep pods from being probed, as `SUBJECT: PROBLEM`.
    fn problems(&self) -> anyhow::Result<Vec<String>> {
        let listed = self.node().cli("probe list")?;
        let lines = listed.stderr.lines();
        Ok(lines
            .filter_map(|line| Some(line.strip_prefix("warning: ")?.to_owned()))
            .collect())
    }

    fn wait_problem(&self, subject: &str, part: &str) -> anyhow::Result<String> {
        let what = format!("the problem {subject}: {part}");
        let subject = format!("{subject}: ");
        wait_for(&what, PATIENCE, || {
            let mut problems = self.problems()?.into_iter();
            Ok(problems.find(|one| one.starts_with(&subject) && one.contains(part)))
        })
    }

    fn wait_no_problem(&self) -> anyhow::Result<()> {
        wait_for("all problems to be over", PATIENCE, || {
            Ok(self.problems()?.is_empty().then_some(()))
        })
    }

    fn events(&self) -> anyhow::Result<Vec<ContainerEvent>> {
        Ok(serde_json::from_value(
            self.node().listing("probe events")?,
        )?)
    }
}

#[test]
#[ignore = "needs root"]
fn pods_of_this_node_are_probed_and_those_of_others_are_not() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    for name in ["first", "later", "elsewhere"] {
        stand.run(name)?;
    }
    let mut elsewhere = stand.object("elsewhere", PASSES);
    elsewhere["spec"]["nodeName"] = "another".into();
    let mut unscheduled = stand.object("unscheduled", PASSES);
    unscheduled["spec"]
        .as_object_mut()
        .context("an object")?
        .remove("nodeName");
    for object in [stand.object("first", PASSES), elsewhere, unscheduled] {
        stand.server.put(object);
    }
    stand.start_agent()?;
    stand.wait_ready("first")?;
    let pod = stand.pod("first")?.context("a pod")?;
    assert_eq!(
        (pod.pod.as_str(), pod.uid.as_str(), pod.source.as_str()),
        ("default/first", "uid-first", "kubernetes")
    );
    // The agent follows additions, updates and deletions.
    stand.server.put(stand.object("later", PASSES));
    stand.wait_ready("later")?;
    for name in ["elsewhere", "unscheduled"] {
        assert_eq!(stand.pod(name)?, None);
    }
    let mut deleted = stand.object("first", "livenessProbe");
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    stand.server.put(deleted);
    wait_for("the liveness probe to end with its pod", PATIENCE, || {
        let listed = stand.node().listing("probe list --pod first")?;
        Ok(listed.as_array().is_some_and(Vec::is_empty).then_some(()))
    })?;
    stand.server.delete_pod("default/first");
    stand.wait_gone("first")?;
    // A failed pod is not running, even if the runtime still has its container.
    let mut failed = stand.object("later", PASSES);
    failed["status"] = json!({ "phase": "Failed", "reason": "Evicted" });
    stand.server.put(failed);
    wait_for("its end to be known", PATIENCE, || {
        let pod = stand.pod("later")?;
        Ok(pod.filter(|pod| pod.phase.as_deref() == Some("Failed") && !pod.ready))
    })?;
    let requests = stand.server.requests();
    let selector = format!("fieldSelector=spec.nodeName%3D{}", stand.node().name());
    let mut of_pods = requests.iter().filter(|one| one.contains("/pods?"));
    assert!(of_pods.all(|one| one.contains(&selector)), "{requests:?}");
    assert!(stand.problems()?.is_empty(), "{:?}", stand.problems()?);
    Ok(())
}

/// The events of the API server with this reason, as message, type, part of the pod and count.
fn events_of_pods(server: &ApiServer, reason: &str) -> Vec<(String, String, String, u64)> {
    let events = server.events().into_iter();
    let events = events.filter(|event| event["reason"] == reason);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    events
        .map(|event| {
            (
                text(&event["message"]),
                text(&event["type"]),
                text(&event["involvedObject"]["fieldPath"]),
                event["count"].as_u64().unwrap_or_default(),
            )
        })
        .collect()
}

#[test]
#[ignore = "needs root"]
fn a_container_that_is_no_longer_ready_has_an_event_of_its_pod_that_counts() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let id = stand.run("web")?.id;
    stand.server.put(stand.object("web", PASSES));
    stand.start_agent()?;
    for count in 1..=2 {
        stand.wait_ready("web")?;
        stand.containerd.exec(&id, &["rm", "/tmp/alive"])?;
        let event = wait_for("the event", PATIENCE, || {
            let events = events_of_pods(&stand.server, "Unhealthy");
            Ok(events.into_iter().find(|event| event.3 == count))
        })?;
        ensure!(event.0.starts_with("Readiness probe failed: "), "{event:?}");
        assert_eq!(
            (event.1.as_str(), event.2.as_str()),
            ("Warning", "spec.containers{web}")
        );
        stand.containerd.exec(&id, &["touch", "/tmp/alive"])?;
    }
    let events = stand.server.events();
    let pod = &events[0]["involvedObject"];
    assert_eq!(
        (&pod["kind"], &pod["name"], &pod["uid"]),
        (&json!("Pod"), &json!("web"), &json!("uid-web"))
    );
    assert_eq!(events[0]["metadata"]["namespace"], "default");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_container_that_the_agent_kills_has_the_kubelets_events() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let id = stand.run("web")?.id;
    let own_id = stand.run("own")?.id;
    stand.server.put(stand.object("web", "livenessProbe"));
    // A pod from a manifest is none of the cluster.
    let own = stand.object("own", "livenessProbe");
    fs::write(stand.manifests().join("own.json"), own.to_string())?;
    let manifests = stand.manifests();
    stand.start_agent_with(&format!(
        "--kubelet-pod-restarts --pod-manifests {}",
        manifests.display()
    ))?;
    stand.wait_ready("web")?;
    stand.wait_ready("own")?;
    stand.containerd.exec(&own_id, &["rm", "/tmp/alive"])?;
    stand.containerd.exec(&id, &["rm", "/tmp/alive"])?;
    let killing = wait_for("the event", PATIENCE, || {
        Ok(events_of_pods(&stand.server, "Killing").pop())
    })?;
    let message = "Container web failed liveness probe, will be restarted";
    let expected = (
        message.to_owned(),
        "Normal".to_owned(),
        "spec.containers{web}".to_owned(),
        1,
    );
    assert_eq!(killing, expected);
    let unhealthy = events_of_pods(&stand.server, "Unhealthy")
        .pop()
        .context("no reason")?;
    ensure!(
        unhealthy.0.starts_with("Liveness probe failed: "),
        "{unhealthy:?}"
    );
    stand.wait("the restart", "web", |one| one.restarts > 0)?;
    let events = stand.server.events();
    ensure!(
        events
            .iter()
            .all(|event| event["involvedObject"]["name"] == "web"),
        "{events:?}"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn pods_stay_while_the_api_server_is_away() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let id = stand.run("stays")?.id;
    stand.run("goes")?;
    for name in ["stays", "goes"] {
        stand.server.put(stand.object(name, PASSES));
    }
    stand.start_agent()?;
    stand.wait_ready("stays")?;
    stand.wait_ready("goes")?;
    stand.wait_no_problem()?;

    stand.server.stop();
    let problem = stand.wait_problem("kubernetes", "Connection refused")?;
    assert!(
        problem.starts_with("kubernetes: using the pods as of 20"),
        "{problem:?}"
    );
    // The pods are still probed, so the agent sees changes.
    stand.containerd.exec(&id, &["rm", "/tmp/alive"])?;
    stand.wait("its failure to be seen", "stays", |one| !one.ready)?;
    stand.containerd.exec(&id, &["touch", "/tmp/alive"])?;
    stand.wait_ready("stays")?;
    stand.wait_ready("goes")?;

    stand.server.delete_pod("default/goes");
    stand.server.compact();
    stand.server.behave(Behaviour::Forbidden);
    stand.server.resume()?;
    stand.wait_problem("kubernetes", "pods is forbidden")?;
    stand.wait_ready("goes")?;
    stand.server.behave(Behaviour::Serve);
    stand.wait_gone("goes")?;
    stand.wait_ready("stays")?;
    stand.wait_no_problem()?;
    let reported =
        |words: &[&str]| -> anyhow::Result<usize> { Ok(stand.node().logged(words)?.len()) };
    assert_eq!(reported(&["Kubernetes pods are not up to date"])?, 1);
    assert_eq!(
        reported(&["Kubernetes pods are up to date"])?,
        2,
        "at first, and again"
    );

    // An agent that starts while the server is down knows no pods, but keeps their saved state.
    stand.server.stop();
    stand.node().kill_agent(nix::sys::signal::Signal::SIGTERM)?;
    stand.start_agent()?;
    stand.wait_problem("kubernetes", "Connection refused")?;
    assert_eq!(stand.pod("stays")?, None);
    stand.server.resume()?;
    let pod = wait_for("the pod to be known", PATIENCE, || stand.pod("stays"))?;
    assert!(pod.ready, "{pod:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_pod_with_an_error_is_named_and_the_others_go_on() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let id = stand.run("well")?.id;
    stand.run("changed")?;
    let annotated = |name: &str, value: &str| {
        let mut object = stand.object(name, PASSES);
        let key = format!("probe.health-agent.io/{name}.readiness.period");
        object["metadata"]["annotations"] = json!({ key: value });
        object
    };
    stand.server.put(stand.object("well", PASSES));
    stand.server.put(annotated("changed", "1s"));
    stand.server.put(annotated("bad", "fast"));
    let good = annotated("changed", "2s");
    let bad = annotated("changed", "slow");
    stand.start_agent()?;
    stand.wait_ready("well")?;
    stand.wait_ready("changed")?;
    stand.wait_problem("kubernetes: default/bad", "Invalid value: \"fast\"")?;
    assert_eq!(stand.pod("bad")?, None);

    stand.server.put(bad);
    stand.wait_problem("kubernetes: default/changed", "Invalid value: \"slow\"")?;
    assert!(stand.wait_ready("changed")?.ready, "it stays as it was");
    stand.containerd.exec(&id, &["rm", "/tmp/alive"])?;
    stand.wait("another one to go on", "well", |one| !one.ready)?;

    stand.server.put(good);
    stand.server.delete_pod("default/bad");
    stand.wait_no_problem()?;
    let period = wait_for("what was corrected", PATIENCE, || {
        let listed = stand.node().listing("probe list --pod changed")?;
        let period = listed[0]["period-ns"].as_u64();
        Ok(period.filter(|&period| period == 2_000_000_000))
    })?;
    assert_eq!(period, 2_000_000_000);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_pod_that_two_sources_have_is_probed_once() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    for name in ["static-n1", "copied"] {
        stand.run(name)?;
    }
    // A static pod: the API has only its mirror under another UID, while the runtime has the UID in the mirror's
    // annotation.
    let mut mirror = stand.object("static-n1", PASSES);
    mirror["metadata"]["annotations"] = json!({ "kubernetes.io/config.mirror": "uid-static-n1" });
    mirror["metadata"]["uid"] = "of-the-mirror".into();
    let mut of_static = stand.object("static-n1", PASSES);
    of_static["metadata"]["uid"] = Value::Null;
    let copied = stand.object("copied", PASSES);
    // Two pods that only claim to be mirrors of these pods, and sort first by name.
    let claims = |name: &str, uid: &str| {
        let mut claims = stand.object(name, PASSES);
        claims["metadata"]["annotations"] = json!({ "kubernetes.io/config.mirror": uid });
        claims
    };
    let claims = [
        claims("a-claim", "uid-copied"),
        claims("b-claim", "uid-static-n1"),
    ];
    for object in [&mirror, &copied].into_iter().chain(&claims) {
        stand.server.put(object.clone());
    }
    let write = |name: &str, object: &Value| {
        fs::write(
            stand.manifests().join(format!("{name}.json")),
            object.to_string(),
        )
    };
    write("static", &of_static)?;
    stand.start_agent_with(&format!("--pod-manifests {}", stand.manifests().display()))?;
    stand.wait_ready("static-n1")?;
    stand.wait_ready("copied")?;
    write("copied", &copied)?;
    let used = format!(
        "also used in {}",
        stand.manifests().join("copied.json").display()
    );
    stand.wait_problem("kubernetes: default/copied", &used)?;
    stand.wait_ready("copied")?;
    for name in ["static-n1", "copied"] {
        let probes = stand.node().listing(&format!("probe list --pod {name}"))?;
        assert_eq!(probes.as_array().map(Vec::len), Some(1), "{probes:#}");
    }
    for name in ["static-n1", "copied"] {
        let pod = stand.pod(name)?.context(name)?;
        assert!(pod.source.ends_with(".json"), "the folder's wins: {pod:?}");
    }
    assert_eq!(stand.problems()?.len(), 1, "{:?}", stand.problems()?);
    // Without the folder's pod, the API's pod is probed: the runtime knows the mirrored pod by the UID in the
    // annotation.
    for name in ["static", "copied"] {
        fs::remove_file(stand.manifests().join(format!("{name}.json")))?;
    }
    for name in ["static-n1", "copied"] {
        wait_for("the API's to be probed", PATIENCE, || {
            let pod = stand.pod(name)?;
            Ok(pod.filter(|pod| pod.source == "kubernetes" && pod.ready))
        })?;
    }
    // The two claims are separate pods without containers in the runtime.
    for name in ["a-claim", "b-claim"] {
        let claim = stand.pod(name)?.context(name)?;
        assert!(
            !claim.ready && claim.containers[0].id.is_none(),
            "{claim:?}"
        );
    }
    stand.wait_no_problem()?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_failing_pod_of_kubernetes_is_not_restarted() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let failing = stand.run("failing")?.id;
    let ended = stand.run("ended")?;
    let own = stand.run("own")?.id;
    for name in ["failing", "ended"] {
        stand.server.put(stand.object(name, "livenessProbe"));
    }
    let manifest = stand.object("own", "livenessProbe").to_string();
    fs::write(stand.manifests().join("own.json"), manifest)?;
    let folder = format!("--pod-manifests {}", stand.manifests().display());
    stand.start_agent_with(&folder)?;
    for name in ["failing", "ended", "own"] {
        stand.wait_ready(name)?;
    }
    stand.containerd.stop(&ended)?;
    for id in [&failing, &own] {
        stand.containerd.exec(id, &["rm", "/tmp/alive"])?;
    }
    let event = wait_for("what is left to the kubelet", PATIENCE, || {
        let mut events = stand.events()?.into_iter();
        Ok(events.find(|event| event.reason == "NotKilled"))
    })?;
    assert_eq!(
        (
            event.container.as_str(),
            event.kind.as_str(),
            event.message.as_str()
        ),
        (
            "failing",
            "Normal",
            "Container failing failed liveness probe; not killed: its restart is left to the kubelet"
        )
    );
    // Meanwhile, a pod from the folder is restarted as usual.
    stand.wait("another one to be started again", "own", |one| {
        one.restarts == 1 && one.id.as_deref() != Some(&*own)
    })?;
    let kept = stand.wait("it to be known", "failing", |one| one.id.is_some())?;
    assert_eq!(
        (kept.id.as_deref(), kept.state.as_str(), kept.restarts),
        (Some(&*failing), "running", 0)
    );
    let left = stand.wait("its end to be seen", "ended", |one| {
        one.state == "terminated"
    })?;
    assert_eq!(
        (left.id.as_deref(), left.restart_at),
        (Some(&*ended.id), None)
    );

    // With this flag, the agent does restart them.
    stand.node().kill_agent(nix::sys::signal::Signal::SIGTERM)?;
    stand.start_agent_with(&format!("{folder} --kubelet-pod-restarts true"))?;
    for (name, id) in [("failing", &failing), ("ended", &ended.id)] {
        stand.wait("it to be started again", name, |one| {
            one.restarts == 1 && one.id.as_deref() != Some(id.as_str())
        })?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn without_a_runtime_the_api_says_how_the_containers_do() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    // A host network pod has the node's address, on which the agent itself listens.
    let object = |name: &str, phase: &str, state: Value| {
        let mut object = stand.object(name, PASSES);
        object["spec"]["hostNetwork"] = true.into();
        object["spec"]["containers"] = json!([{
            "name": name,
            "readinessProbe": { "tcpSocket": { "port": 4240 }, "periodSeconds": 1, "timeoutSeconds": 60 },
        }]);
        object["status"] = json!({
            "phase": phase, "podIP": stand.node().ipv4(), "hostIP": stand.node().ipv4(),
            "containerStatuses": [{
                "name": name, "containerID": format!("test://{name}"), "ready": false, "state": state,
            }],
        });
        object
    };
    let running = || json!({ "running": { "startedAt": "2026-01-01T00:00:00Z" } });
    let ended = || json!({ "terminated": { "exitCode": 1 } });
    stand.server.put(object("serves", "Running", running()));
    stand.server.put(object("waits", "Pending", json!({})));
    stand.server.put(object("failed", "Failed", ended()));
    stand.start_agent_without_runtime("")?;
    let serves = stand.wait_ready("serves")?;
    assert_eq!(serves.id.as_deref(), Some("test://serves"));
    let pod = stand.pod("serves")?.context("a pod")?;
    assert_eq!(pod.ips, [stand.node().ipv4()]);
    stand.server.put(object("waits", "Running", running()));
    stand.wait_ready("waits")?;
    for (name, phase) in [("failed", "Failed"), ("waits", "Running")] {
        let pod = stand.pod(name)?.context(name)?;
        assert_eq!(
            (pod.phase.as_deref(), pod.ready),
            (Some(phase), name == "waits")
        );
    }
    stand.server.put(object("serves", "Running", ended()));
    stand.wait("its end to be reported", "serves", |one| {
        !one.ready && one.state == "terminated" && one.exit_code == Some(1)
    })?;
    Ok(())
}
