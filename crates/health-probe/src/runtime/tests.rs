use std::fs;
use std::net::IpAddr;

use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixListener;

use super::*;
use crate::spec;
use crate::worker::{ContainerState, Phase};

fn pod(states: &[(&str, ContainerState)]) -> RuntimePod {
    let container = |(name, state): &(&str, ContainerState)| RuntimeContainer {
        id: format!("id-{name}"),
        name: (*name).to_owned(),
        attempt: 0,
        state: *state,
        pid: None,
        finished_at: None,
    };
    RuntimePod {
        uid: "u".to_owned(),
        namespace: "default".to_owned(),
        name: "a".to_owned(),
        sandbox_id: "s".to_owned(),
        is_ready: true,
        ips: vec![IpAddr::from([10, 0, 0, 1])],
        pid: None,
        containers: states.iter().map(container).collect(),
    }
}

#[test]
fn the_phase_of_a_pod_is_that_of_the_kubelet() {
    const RUNNING: ContainerState = ContainerState::Running { started_at: None };
    const WELL: ContainerState = ContainerState::Terminated { exit_code: 0 };
    const BADLY: ContainerState = ContainerState::Terminated { exit_code: 1 };
    for (policy, first, second, phase) in [
        ("Always", Some(RUNNING), Some(RUNNING), Phase::Running),
        ("Always", Some(RUNNING), None, Phase::Pending),
        ("Always", Some(WELL), Some(BADLY), Phase::Running),
        ("OnFailure", Some(WELL), Some(WELL), Phase::Succeeded),
        ("OnFailure", Some(WELL), Some(BADLY), Phase::Running),
        ("Never", Some(WELL), Some(BADLY), Phase::Failed),
        ("Never", Some(RUNNING), Some(BADLY), Phase::Running),
        ("Never", Some(WELL), Some(WELL), Phase::Succeeded),
    ] {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: a}}\nspec: {{restartPolicy: {policy}, containers: [{{name: app}}, {{name: log}}], initContainers: [{{name: init}}]}}"
        );
        let spec = spec::read(&text).pods.remove(0);
        let states = [("app", first), ("log", second)];
        let states = states
            .into_iter()
            .filter_map(|(name, state)| Some((name, state?)));
        let status = pod(&states.collect::<Vec<_>>()).status(&spec);
        assert_eq!(status.phase, phase, "{policy} {first:?} {second:?}");
        assert_eq!(status.containers[0].id.as_deref(), Some("id-app"));
        assert_eq!(status.containers[1].id.is_some(), second.is_some());
        assert_eq!(status.init_containers[0].state, ContainerState::Waiting);
    }
}

#[tokio::test]
async fn a_runtime_that_is_away_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let error = Runtime::at(&socket)
        .observe(&Observation::default())
        .await
        .unwrap_err();
    assert!(matches!(error.reason(), Reason::Away(_)), "{error}");
    let text = error.to_string();
    let start = format!(
        "the runtime at {}: ListPodSandbox: unreachable: ",
        socket.display()
    );
    assert!(text.starts_with(&start), "{text}");
    assert!(text.contains("No such file"), "{text}");
}

#[tokio::test]
async fn a_runtime_that_answers_rubbish_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // The client may already be gone.
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await;
        }
    });
    let error = Runtime::at(&socket)
        .stop("c1", Duration::ZERO)
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("StopContainer of c1: "), "{text}");
    fs::remove_file(&socket).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_is_given_up_on_when_its_time_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    let error = Runtime::at(&socket)
        .stop("c1", Duration::from_millis(1500))
        .await
        .unwrap_err();
    let waited = Duration::from_millis(11_500);
    assert_eq!(*error.reason(), Reason::TimedOut(waited), "{error}");
}
