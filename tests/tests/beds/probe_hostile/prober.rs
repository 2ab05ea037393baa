//! The prober with containers whose servers misbehave.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use health_net::netns::NetNs;
use health_probe::prober::{Containers, Execution, Prober, ProberOptions};
use health_probe::spec::{self, PodSpec, ProbeType};
use health_probe::worker::{
    ContainerState, ContainerStatus, Limits, ManagerOptions, Phase, PodStatus,
};
use jiff::Timestamp;
use tests::hostile::Hostile;
use tests::processes::Held;
use tests::{PATIENCE, wait_for};

use super::cases::{CASES, Case, Expected, Way};
use super::{SHORT, hostile, runtime};

/// Number of runs that each probe needs.
const RUNS: u64 = 3;

struct NoContainers;

impl Containers for NoContainers {
    fn netns(&self, _: &PodSpec) -> Option<Arc<NetNs>> {
        None
    }

    fn execution(&self, _: &PodSpec, _: &str) -> Option<Execution> {
        None
    }
}

/// A pod whose readiness and liveness probe use this case. A probe that ends on its own gets as much time as it needs.
fn pod(index: usize, case: &Case, hostile: &Hostile) -> anyhow::Result<Arc<PodSpec>> {
    let port = case.port(hostile);
    let handler = match case.way {
        Way::Tcp => format!(r#""tcpSocket": {{"port": {port}}}"#),
        Way::Http => format!(r#""httpGet": {{"port": {port}}}"#),
        Way::Https => format!(r#""httpGet": {{"port": {port}, "scheme": "HTTPS"}}"#),
        Way::Grpc | Way::GrpcTls => format!(r#""grpc": {{"port": {port}}}"#),
    };
    let timeout = if case.times_out() { SHORT } else { PATIENCE };
    let annotations = ["readiness", "liveness"].map(|kind| {
        let prefix = format!("probe.health-agent.io/app.{kind}");
        let mode = match case.way {
            Way::GrpcTls => format!(r#", "{prefix}.mode": "TLS""#),
            _ => String::new(),
        };
        let timeout = timeout.as_millis();
        format!(r#""{prefix}.period": "100ms", "{prefix}.timeout": "{timeout}ms"{mode}"#)
    });
    let text = format!(
        r#"{{"apiVersion": "v1", "kind": "Pod",
            "metadata": {{"name": "p{index}", "annotations": {{{}}}}},
            "spec": {{"containers": [{{"name": "app", "readinessProbe": {{{handler}}},
                "livenessProbe": {{{handler}, "failureThreshold": 2}}}}]}},
            "status": {{"podIP": "127.0.0.1"}}}}"#,
        annotations.join(", ")
    );
    let read = spec::read(&text);
    anyhow::ensure!(read.errors.is_empty(), "{:?}", read.errors);
    let pod = read.pods.into_iter().next();
    Ok(Arc::new(anyhow::Context::context(pod, "no pod")?))
}

fn running(index: usize) -> PodStatus {
    PodStatus {
        phase: Phase::Running,
        containers: vec![ContainerStatus {
            name: "app".into(),
            id: Some(format!("c{index}").into()),
            state: ContainerState::Running {
                started_at: Some(Timestamp::now()),
            },
            ready: false,
            started: None,
        }],
        ..PodStatus::default()
    }
}

/// Number of successes, failures and errors of a pod's readiness probe.
fn runs(prober: &Prober, pod: &PodSpec) -> [u64; 3] {
    let stats = prober.statistics();
    let key = (pod.uid.clone(), Arc::from("app"), ProbeType::Readiness);
    let [successful, failed, errored, _] = stats
        .probes
        .get(&key)
        .map(|stats| stats.runs)
        .unwrap_or_default();
    [successful, failed, errored]
}

#[test]
#[ignore = "needs root"]
fn containers_of_hostile_servers_are_killed_unless_nothing_is_known_of_them() -> anyhow::Result<()>
{
    let hostile = hostile()?;
    let servers = hostile.ports();
    let runtime = runtime()?;
    let before = Held::now(&servers)?;
    let _entered = runtime.enter();
    let (prober, _news) = Prober::start(ProberOptions {
        manager: ManagerOptions {
            limits: Limits {
                per_second: 10_000,
                // There is a slot for every probe, so that slow ones do not delay others.
                concurrent: 10_000,
                pod_per_second: 1000,
            },
            agent_start: Timestamp::now(),
            snapshot: None,
        },
        containers: Arc::new(NoContainers),
        certificates: PathBuf::new(),
    });
    // Manifests do not allow port 0.
    let cases = CASES.iter().enumerate();
    let cases = cases.filter(|(_, case)| case.behaviour.is_some());
    let mut pods = Vec::new();
    let mut ill = BTreeSet::new();
    for (index, case) in cases {
        let pod = pod(index, case, &hostile)?;
        prober.add_pod(pod.clone());
        prober.set_status(&pod.uid, running(index));
        if case.is_ill() == Some(true) {
            ill.insert(pod.uid.clone());
        }
        pods.push((pod, case));
    }
    wait_for("all probes to have run", PATIENCE, || {
        for (pod, case) in &pods {
            let [successful, failed, errored] = runs(&prober, pod);
            let enough = match case.expected {
                Expected::Succeeds => successful,
                Expected::Fails(_) | Expected::TimesOut(_) => failed,
                Expected::Errs(_) => errored,
                Expected::SucceedsOrFails => successful + failed,
            };
            let all = successful + failed + errored;
            anyhow::ensure!(enough >= RUNS, "{case:?}: {enough} of {all}");
        }
        Ok(Some(()))
    })?;
    let uncertain = |uid: &Arc<str>| {
        let known = pods.iter().find(|(pod, _)| pod.uid == *uid);
        known.is_some_and(|(_, case)| case.is_ill().is_none())
    };
    let killed = || -> BTreeSet<Arc<str>> {
        let kills = prober.kills().into_iter().map(|kill| kill.pod_uid);
        kills.filter(|uid| !uncertain(uid)).collect()
    };
    wait_for("all that are ill to be killed", PATIENCE, || {
        Ok((killed().len() >= ill.len()).then_some(()))
    })?;
    assert_eq!(killed(), ill);
    for (pod, case) in &pods {
        let [successful, failed, errored] = runs(&prober, pod);
        let others = match case.expected {
            Expected::Succeeds => failed + errored,
            Expected::Fails(_) | Expected::TimesOut(_) => successful + errored,
            Expected::Errs(_) => successful + failed,
            Expected::SucceedsOrFails => errored,
        };
        assert_eq!(others, 0, "{case:?}");
    }
    for (pod, _) in &pods {
        prober.remove_pod(&pod.uid);
    }
    wait_for("nothing to be left of the probes", PATIENCE, || {
        let held = Held::now(&servers)?;
        anyhow::ensure!(held == before, "{held:?} and not {before:?}");
        Ok(Some(()))
    })?;
    Ok(())
}
