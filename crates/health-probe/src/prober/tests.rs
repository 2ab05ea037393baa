//! Tests of the prober against test servers.

use std::net::SocketAddr;
use std::thread;

use tokio::net::TcpListener;
use tokio::time::timeout;

use super::*;
use crate::spec::{self, ProbeType};
use crate::worker::{ContainerState, ContainerStatus, Limits, Phase, ProbeResult};

/// Long enough for every event that the tests await.
const LONG: Duration = Duration::from_secs(60);

struct NoContainers;

impl Containers for NoContainers {
    fn netns(&self, _: &PodSpec) -> Option<Arc<NetNs>> {
        None
    }

    fn execution(&self, _: &PodSpec, _: &str) -> Option<Execution> {
        None
    }
}

/// A pod whose container is probed every 20 ms by a handler such as `tcpSocket`.
fn pod(kind: ProbeType, handler: &str, port: u16, timeout: &str) -> Arc<PodSpec> {
    let field = kind.field();
    let text = format!(
        r#"{{"apiVersion": "v1", "kind": "Pod",
            "metadata": {{"name": "web", "annotations": {{
                "probe.health-agent.io/app.{kind}.period": "20ms",
                "probe.health-agent.io/app.{kind}.timeout": "{timeout}"}}}},
            "spec": {{"containers": [{{"name": "app",
                "{field}": {{"{handler}": {{"port": {port}}}, "failureThreshold": 2}}}}]}},
            "status": {{"podIP": "127.0.0.1"}}}}"#
    );
    let read = spec::read(&text);
    assert!(read.errors.is_empty(), "{:?}", read.errors);
    Arc::new(read.pods.into_iter().next().expect("a pod"))
}

fn running() -> PodStatus {
    PodStatus {
        phase: Phase::Running,
        containers: vec![ContainerStatus {
            name: "app".into(),
            id: Some("c1".into()),
            state: ContainerState::Running {
                started_at: Some(Timestamp::now()),
            },
            ready: false,
            started: None,
        }],
        ..PodStatus::default()
    }
}

fn start() -> (Prober, NewsReceiver) {
    Prober::start(ProberOptions {
        manager: ManagerOptions {
            limits: Limits {
                per_second: 10_000,
                concurrent: 100,
                pod_per_second: 1000,
            },
            agent_start: Timestamp::now(),
            snapshot: None,
        },
        containers: Arc::new(NoContainers),
        certificates: PathBuf::new(),
    })
}

/// Waits for the next result.
async fn result(news: &mut NewsReceiver) -> (ProbeResult, Option<Kill>) {
    let found = async {
        loop {
            if let Some(News::Result(update, kill)) = news.recv().await {
                return (update.result, kill);
            }
        }
    };
    timeout(LONG, found).await.expect("a result")
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[tokio::test]
async fn readiness_follows_a_server_that_comes_and_goes() {
    let (listener, address) = listen().await;
    let (prober, mut news) = start();
    let pod = pod(ProbeType::Readiness, "tcpSocket", address.port(), "1000ms");
    prober.add_pod(pod.clone());
    prober.set_status(&pod.uid, running());
    // The container is not ready until it has been probed.
    assert_eq!(result(&mut news).await, (ProbeResult::Failure, None));
    assert_eq!(result(&mut news).await, (ProbeResult::Success, None));
    assert!(prober.status(&pod.uid).unwrap().containers[0].ready);
    drop(listener);
    assert_eq!(result(&mut news).await, (ProbeResult::Failure, None));
    assert!(!prober.status(&pod.uid).unwrap().containers[0].ready);
    let stats = prober.statistics();
    let of_probe = stats.probes.values().next().unwrap();
    assert!(
        of_probe.runs[0] >= 1 && of_probe.runs[1] >= 2,
        "{of_probe:?}"
    );
}

#[tokio::test]
async fn a_liveness_failure_has_the_container_killed() {
    let (listener, address) = listen().await;
    let (prober, mut news) = start();
    let pod = pod(ProbeType::Liveness, "tcpSocket", address.port(), "1000ms");
    prober.add_pod(pod.clone());
    prober.set_status(&pod.uid, running());
    assert_eq!(result(&mut news).await, (ProbeResult::Success, None));
    drop(listener);
    let (failed, kill) = result(&mut news).await;
    assert_eq!(failed, ProbeResult::Failure);
    let kill = kill.expect("a kill");
    assert_eq!((&*kill.container_id, kill.restart), ("c1", true));
    assert_eq!(prober.kills(), [kill]);
    prober.remove_pod(&pod.uid);
    assert_eq!(prober.kills(), []);
    assert!(prober.statistics().probes.is_empty());
}

#[tokio::test(flavor = "current_thread")]
async fn a_probe_that_nobody_could_watch_is_no_failure() {
    // The kernel accepts the connection, but no response comes; the timeout passes long before anyone checks.
    let (_listener, address) = listen().await;
    let (prober, mut news) = start();
    let pod = pod(ProbeType::Readiness, "httpGet", address.port(), "10ms");
    prober.add_pod(pod.clone());
    prober.set_status(&pod.uid, running());
    assert_eq!(result(&mut news).await.0, ProbeResult::Failure);
    let not_sent = |prober: &Prober| {
        let stats = prober.statistics();
        stats.probes.values().map(|one| one.runs[3]).sum::<u64>()
    };
    let waited = timeout(LONG, async {
        while not_sent(&prober) == 0 {
            // The prober has no other thread.
            tokio::task::yield_now().await;
            thread::sleep(Duration::from_millis(150));
        }
    });
    waited.await.expect("a run that was not watched");
}
