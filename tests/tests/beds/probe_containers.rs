//! Containers under containerd that an agent probes: readiness, kills, restarts and events, with the agent killed in
//! between.

mod lives;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use health_model::api::{ContainerEvent, ProbedContainer, ProbedPod};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tests::containerd::{Container, Containerd};
use tests::{Bed, Node, PATIENCE, wait_for};

/// An agent, a containerd on its node, and a folder of manifests.
struct Stand {
    containerd: Containerd,
    bed: Bed,
    manifests: TempDir,
}

impl Stand {
    /// Starts everything except the agent, whose flags need the containerd on its node.
    fn start() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).without_agents().start()?;
        let containerd = Containerd::start_on(bed.node(1), None)?;
        Ok(Self {
            containerd,
            bed,
            manifests: tempfile::tempdir()?,
        })
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    fn start_agent(&self) -> anyhow::Result<()> {
        self.start_agent_with("")
    }

    fn start_agent_with(&self, flags: &str) -> anyhow::Result<()> {
        self.node().start_agent_with(&format!(
            "--pod-manifests {} --runtime-endpoint unix://{} {flags}",
            self.manifests.path().display(),
            self.containerd.socket().display()
        ))
    }

    /// Runs a script in a container, and probes the container.
    fn run(&mut self, name: &str, script: &str, probes: &str) -> anyhow::Result<Container> {
        let container = self
            .containerd
            .run(name, &["/bin/sh", "-c", script], None, &[])?;
        self.probe(name, probes)?;
        Ok(container)
    }

    /// Makes the agent probe a container.
    fn probe(&self, name: &str, probes: &str) -> anyhow::Result<()> {
        let manifest = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, uid: uid-{name}}}\n\
             spec:\n  terminationGracePeriodSeconds: 1\n  containers:\n  - name: {name}\n{probes}"
        );
        fs::write(self.manifest(name), manifest)?;
        Ok(())
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.manifests.path().join(format!("{name}.yaml"))
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
        .with_context(|| format!("{:?}", self.events(name)))
    }

    /// Waits until the state of these containers is saved, and until these pods are ready.
    fn wait_saved<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a str>,
        ready: impl IntoIterator<Item = &'a str>,
    ) -> anyhow::Result<()> {
        let ids: Vec<&str> = ids.into_iter().collect();
        let uids: Vec<Value> = ready
            .into_iter()
            .map(|name| format!("uid-{name}").into())
            .collect();
        let state = self.node().runtime_dir().join("state/probes.json");
        wait_for("what is known to be written down", PATIENCE, || {
            let text = fs::read_to_string(&state).unwrap_or_default();
            let saved: Value = serde_json::from_str(&text).unwrap_or_default();
            let ready = saved["ready"].as_array();
            let are_ready = ready.is_some_and(|ready| uids.iter().all(|uid| ready.contains(uid)));
            Ok((are_ready && ids.iter().all(|id| text.contains(id))).then_some(()))
        })
    }

    fn events(&self, name: &str) -> anyhow::Result<Vec<ContainerEvent>> {
        let listed = self.node().listing("probe events")?;
        let mut events: Vec<ContainerEvent> = serde_json::from_value(listed)?;
        events.retain(|event| event.container == name);
        Ok(events)
    }
}

#[test]
#[ignore = "needs root"]
fn a_container_that_fails_its_liveness_probe_is_ended_and_started_again() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let first = stand.run(
        "hangs",
        "touch /tmp/alive; sleep 1000000",
        "    livenessProbe: {exec: {command: [test, -e, /tmp/alive]}, periodSeconds: 1, timeoutSeconds: 60, failureThreshold: 2}\n",
    )?;
    let first = first.id;
    stand.start_agent()?;
    let running = stand.wait("it to run", "hangs", |one| one.ready)?;
    assert_eq!(running.id.as_deref(), Some(&*first));

    stand.containerd.exec(&first, &["rm", "/tmp/alive"])?;
    let again = stand.wait("it to be started again", "hangs", |one| {
        one.ready && one.restarts == 1 && one.id.as_deref() != Some(&*first)
    })?;
    assert_eq!(again.state, "running");
    let reasons: Vec<_> = stand.events("hangs")?;
    let reported: Vec<_> = reasons
        .iter()
        .map(|event| (event.reason.as_str(), event.message.as_str()))
        .collect();
    let failed = "Liveness probe failed: exit code 1";
    let killing = "Container hangs failed liveness probe, will be restarted";
    assert!(
        reported
            .iter()
            .any(|(reason, text)| *reason == "Unhealthy" && text.starts_with(failed)),
        "{reported:?}"
    );
    assert!(reported.contains(&("Killing", killing)), "{reported:?}");
    assert!(
        reported.contains(&("Started", "Started container hangs")),
        "{reported:?}"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_container_that_ends_is_started_again_and_waits_the_next_time() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    stand.run(
        "ends",
        "sleep 1; exit 3",
        "    readinessProbe: {exec: {command: [test, -e, /]}, periodSeconds: 1, timeoutSeconds: 60}\n",
    )?;
    stand.start_agent()?;
    let waiting = stand.wait("its second restart to wait", "ends", |one| {
        one.restarts == 1 && one.restart_at.is_some() && one.state == "terminated"
    })?;
    assert_eq!(waiting.exit_code, Some(3));
    assert!(!waiting.ready);
    let events = stand.events("ends")?;
    assert!(
        events.iter().any(|event| event.reason == "BackOff"),
        "{events:?}"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_agent_that_is_killed_loses_no_readiness_and_restarts_nothing() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let first = stand.run(
        "serves",
        "touch /tmp/ready; sleep 1000000",
        "    readinessProbe: {exec: {command: [test, -e, /tmp/ready]}, periodSeconds: 1, timeoutSeconds: 60}\n    \
         livenessProbe: {exec: {command: [test, -e, /]}, periodSeconds: 1, timeoutSeconds: 60}\n",
    )?;
    stand.start_agent()?;
    let id = first.id;
    stand.wait("it to be ready", "serves", |one| one.ready)?;
    stand.wait_saved([id.as_str()], ["serves"])?;
    for _ in 0..3 {
        stand.node().kill_agent(Signal::SIGKILL)?;
        stand.start_agent()?;
        // The pod is ready in the first report that contains it.
        let pod = wait_for("the pod to be known", PATIENCE, || stand.pod("serves"))?;
        assert!(pod.ready, "{pod:?}");
        let container = stand.wait("its container to be known", "serves", |one| {
            one.id.is_some()
        })?;
        assert_eq!(container.id.as_deref(), Some(&*id));
        assert!(container.ready, "{container:?}");
    }
    assert_eq!(stand.events("serves")?, []);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_bad_manifest_and_a_container_that_goes_leave_the_others_probed() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let probe = "    readinessProbe: {exec: {command: [test, -e, /]}, periodSeconds: 1, timeoutSeconds: 60}\n";
    stand.run("stays", "sleep 1000000", probe)?;
    let gone = stand.run("goes", "sleep 1000000", probe)?.id;
    fs::write(
        stand.manifest("bad"),
        "kind: Pod\napiVersion: v1\nmetadata: {name: bad}\nspec: {containers: [{name: app, livenessProbe: {tcpSocket: {port: 0}}}]}\n",
    )?;
    stand.start_agent()?;
    for name in ["stays", "goes"] {
        stand.wait("it to be ready", name, |one| one.ready)?;
    }
    let listed = stand.node().cli("probe list")?;
    let field = "pod default/bad, container app: spec.containers[0].livenessProbe.tcpSocket.port: Invalid value: 0";
    assert!(listed.stderr.contains(field), "{}", listed.stderr);

    stand.containerd.remove(&gone)?;
    stand.wait("its end to be seen", "goes", |one| {
        !one.ready && one.id.is_none()
    })?;
    assert!(stand.wait("the other", "stays", |one| one.ready)?.ready);

    stand.containerd.hang()?;
    wait_for("the runtime's silence to be reported", PATIENCE, || {
        let listed = stand.node().cli("probe list")?;
        let socket = stand.containerd.socket().display().to_string();
        Ok(listed.stderr.contains(&format!("{socket}: ")).then_some(()))
    })?;
    let still = stand.wait("what is known to stay", "stays", |one| one.id.is_some())?;
    assert!(
        still.ready,
        "what is not known is not 'not ready': {still:?}"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn containers_that_were_being_killed_are_started_again_by_the_next_agent() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let [before, after] = ["ends-before", "ends-after"];
    let mut containers = HashMap::new();
    for name in [before, after] {
        // The container exits successfully, so its restart policy alone would not restart it.
        let container = stand.run(
            name,
            "trap 'until test -e /tmp/end; do sleep 0.1; done; exit 0' TERM; touch /tmp/alive; while :; do sleep 0.1; done",
            "    livenessProbe: {exec: {command: [test, -e, /tmp/alive]}, periodSeconds: 1, timeoutSeconds: 60, \
             failureThreshold: 1, terminationGracePeriodSeconds: 1000}\n  restartPolicy: OnFailure\n",
        )?;
        containers.insert(name, container);
    }
    stand.start_agent()?;
    for (name, container) in &containers {
        stand.wait("it to run", name, |one| one.ready)?;
        stand
            .containerd
            .exec(&container.id, &["rm", "/tmp/alive"])?;
    }
    let state = stand.node().runtime_dir().join("state/probes.json");
    wait_for("their ends to be decided", PATIENCE, || {
        let text = fs::read_to_string(&state)?;
        Ok((text.matches("\"on_hold\":true").count() == containers.len()).then_some(()))
    })?;
    wait_for("the runtime to have been notified", PATIENCE, || {
        let is_reported = |name: &str| {
            let mut events = stand.events(name)?.into_iter();
            anyhow::Ok(events.any(|event| event.reason == "Killing"))
        };
        Ok((is_reported(before)? && is_reported(after)?).then_some(()))
    })?;
    stand.node().kill_agent(Signal::SIGKILL)?;
    stand
        .containerd
        .exec(&containers[before].id, &["touch", "/tmp/end"])?;
    wait_for("the first to end", PATIENCE, || {
        let process = format!("/proc/{}", containers[before].pid);
        Ok((!Path::new(&process).exists()).then_some(()))
    })?;
    stand.start_agent()?;
    stand.wait("the second to be seen", after, |one| one.id.is_some())?;
    stand
        .containerd
        .exec(&containers[after].id, &["touch", "/tmp/end"])?;
    for (name, container) in &containers {
        stand.wait("it to be started again", name, |one| {
            let is_another = one.id.is_some() && one.id.as_deref() != Some(&*container.id);
            is_another && one.state == "running" && one.restarts == 1
        })?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_manifest_does_not_get_at_the_containers_of_a_pod_of_another_name() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let sleep = ["/bin/sh", "-c", "sleep 1000000"];
    let victim = stand.containerd.run("victim", &sleep, None, &[])?;
    let probe = "    livenessProbe: {exec: {command: [touch, /tmp/found]}, periodSeconds: 1}\n";
    stand.probe("evil", probe)?;
    let path = stand.manifest("evil");
    let manifest = fs::read_to_string(&path)?.replace("uid-evil", "uid-victim");
    fs::write(&path, manifest.replace("name: evil\n", "name: victim\n"))?;
    let witness = stand.run("witness", "sleep 1000000", probe)?;
    stand.start_agent()?;
    let is_found = ["test", "-e", "/tmp/found"];
    wait_for("another one to be probed", PATIENCE, || {
        Ok(stand.containerd.exec(&witness.id, &is_found).ok())
    })?;
    let evil = stand.wait("what is known of it", "evil", |one| one.state == "waiting")?;
    assert_eq!(evil.id, None);
    let found = stand.containerd.exec(&victim.id, &is_found);
    assert!(found.is_err(), "a command ran in the victim");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_agent_that_must_not_restart_containers_only_says_what_should_be() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let first = stand.run(
        "spared",
        "sleep 1000000",
        "    livenessProbe: {exec: {command: [test, -e, /none]}, periodSeconds: 1, timeoutSeconds: 60, failureThreshold: 1}\n",
    )?;
    stand.start_agent_with("--container-restarts false")?;
    let reported = wait_for("its failure to be reported", PATIENCE, || {
        let mut events = stand.events("spared")?.into_iter();
        Ok(events.find(|event| event.reason == "NotKilled"))
    })?;
    let why = "Container spared failed liveness probe; not killed: --container-restarts is off";
    assert_eq!(reported.message, why);
    // The agent polls the runtime several times before a second container is ready.
    let probe = "    readinessProbe: {exec: {command: [test, -e, /]}, periodSeconds: 1, timeoutSeconds: 60}\n";
    stand.run("witness", "sleep 1000000", probe)?;
    stand.wait("another one to be ready", "witness", |one| one.ready)?;
    let spared = stand.wait("it to be known", "spared", |one| one.id.is_some())?;
    assert_eq!(
        (spared.id.as_deref(), spared.state.as_str()),
        (Some(&*first.id), "running")
    );
    let events = stand.events("spared")?;
    let is_done = |event: &ContainerEvent| ["Killing", "Started"].contains(&&*event.reason);
    assert!(!events.iter().any(is_done), "{events:?}");
    Ok(())
}
