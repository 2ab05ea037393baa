use super::*;
use crate::runtime::testing::Stage;

/// One container, which is restarted whenever it exits.
const APP: &str = "containers: [{name: app}]";

/// Converts pairs to owned strings.
fn owned(changes: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = |(method, subject): &(&str, &str)| ((*method).to_owned(), (*subject).to_owned());
    changes.iter().map(owned).collect()
}

/// Checks the number of seconds between successive calls.
fn assert_waits(calls: &[Call], expected: &[u64]) {
    let waits = calls
        .windows(2)
        .map(|pair| (pair[1].at - pair[0].at).as_secs());
    let waits: Vec<_> = waits.collect();
    // The supervisor first has to see that the container exited.
    let is_so = |(wait, least): (&u64, &u64)| (*least..least + 5).contains(wait);
    let are_so = waits.len() == expected.len() && waits.iter().zip(expected).all(is_so);
    assert!(are_so, "{waits:?} s, not {expected:?} s");
}

#[tokio::test(start_paused = true)]
async fn a_container_whose_start_fails_waits_longer_each_time() {
    let runtime = FakeRuntime::start();
    runtime.add_pod("web");
    runtime.add_container("web", "app", 0, Stage::Ended(1));
    for failing in ["web.app.1", "web.app.2", "web.app.3"] {
        runtime.break_calls("StartContainer", failing, Fault::Refused);
    }
    let stand = Stand::start(runtime, Restarts::Own, &[("web", APP)]);
    let running = stand.wait_state("web", "app", "running").await;
    assert_eq!(running.id.as_deref(), Some("web.app.4"));
    assert_eq!(running.restarts, 1);
    assert_eq!(running.restart_at, None);
    let tries = stand.tries("StartContainer");
    let subjects: Vec<_> = tries.iter().map(|call| &*call.subject).collect();
    assert_eq!(
        subjects,
        ["web.app.1", "web.app.2", "web.app.3", "web.app.4"]
    );
    assert_waits(&tries, &[10, 20, 40]);
    let failed = stand.events("web", "Failed");
    assert_eq!(failed.len(), 3, "{failed:?}");
    let start = "cannot restart container app: the runtime at ";
    assert!(failed[0].message.starts_with(start), "{failed:?}");
    let waits = stand.events("web", "BackOff");
    assert_eq!(waits.iter().map(|event| event.count).sum::<u64>(), 3);
    assert_eq!(stand.events("web", "Started").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_container_that_was_made_and_never_started_is_started() {
    let runtime = FakeRuntime::start();
    for pod in ["web", "new"] {
        runtime.add_pod(pod);
    }
    runtime.add_container("web", "app", 0, Stage::Ended(1));
    runtime.add_container("web", "app", 1, Stage::Made);
    // The creator of this pod is still creating it.
    runtime.add_container("new", "app", 0, Stage::Made);
    let stand = Stand::start(runtime, Restarts::Own, &[("web", APP), ("new", APP)]);
    let running = stand.wait_state("web", "app", "running").await;
    assert_eq!(running.id.as_deref(), Some("web.app.1"));
    stand.pass(60).await;
    let expected = owned(&[
        ("StartContainer", "web.app.1"),
        ("RemoveContainer", "web.app.0"),
    ]);
    assert_eq!(stand.changes(), expected);
}

/// An app that finishes, and a sidecar.
const JOB: &str = "containers: [{name: app}], initContainers: [{name: log, restartPolicy: Always}]";

#[tokio::test(start_paused = true)]
async fn sidecars_of_a_finished_pod_are_not_started_again() {
    let runtime = FakeRuntime::start();
    let (never, on_failure) = (
        format!("restartPolicy: Never, {JOB}"),
        format!("restartPolicy: OnFailure, {JOB}"),
    );
    let specs = [
        ("done", &*on_failure),
        ("failed", &*never),
        ("finishing", &*on_failure),
        ("busy", &*on_failure),
    ];
    for (pod, app) in [
        ("done", Stage::Ended(0)),
        ("failed", Stage::Ended(1)),
        ("finishing", Stage::Running),
        ("busy", Stage::Running),
    ] {
        runtime.add_pod(pod);
        runtime.add_container(pod, "app", 0, app);
        runtime.add_container(pod, "log", 0, Stage::Ended(1));
        // From now on restarts fail and wait, so that the pod can be seen to have finished meanwhile.
        runtime.break_calls("StartContainer", &format!("{pod}.log.1"), Fault::Refused);
    }
    let stand = Stand::start(runtime, Restarts::Own, &specs);
    let waits = |stand: &Stand| stand.container("finishing", "log")?.restart_at;
    stand.wait("a wait", waits).await;
    stand.runtime.set_stage("finishing.app.0", Stage::Ended(0));
    stand.wait_call("StartContainer", "busy.log.2").await;
    stand.pass(10).await;
    let mut started = stand.changes();
    started.retain(|(method, _)| method == "StartContainer");
    started.sort();
    let expected = owned(&[
        ("StartContainer", "busy.log.1"),
        ("StartContainer", "busy.log.2"),
        ("StartContainer", "finishing.log.1"),
    ]);
    assert_eq!(started, expected);
    assert_eq!(waits(&stand), None, "nothing is to be waited for");
}

#[tokio::test(start_paused = true)]
async fn containers_of_a_pod_that_is_gone_are_not_started_again() {
    let runtime = FakeRuntime::start();
    for pod in ["removed", "ended", "stays"] {
        runtime.add_pod(pod);
        runtime.add_container(pod, "app", 0, Stage::Ended(1));
        // From now on restarts fail and wait.
        runtime.break_calls("StartContainer", &format!("{pod}.app.1"), Fault::Refused);
    }
    let specs = [("removed", APP), ("ended", APP), ("stays", APP)];
    let stand = Stand::start(runtime, Restarts::Own, &specs);
    let waits = |stand: &Stand, pod| stand.container(pod, "app")?.restart_at;
    for (pod, _) in specs {
        stand.wait("a wait", |stand| waits(stand, pod)).await;
    }
    stand.set_pods(&specs[1..]);
    stand.runtime.end_pod("ended");
    stand.wait_state("stays", "app", "running").await;
    stand.pass(60).await;
    let mut made = stand.changes();
    made.retain(|(method, _)| method == "CreateContainer");
    made.sort();
    let expected = owned(&[
        ("CreateContainer", "ended.app.1"),
        ("CreateContainer", "removed.app.1"),
        ("CreateContainer", "stays.app.1"),
        ("CreateContainer", "stays.app.2"),
    ]);
    assert_eq!(made, expected);
    assert_eq!(waits(&stand, "ended"), None, "nothing is to be waited for");
    let failed = stand.events("ended", "Failed");
    assert_eq!(
        failed.len(),
        1,
        "only the first start was tried: {failed:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_container_that_cannot_be_made_again_waits_longer_each_time() {
    let runtime = FakeRuntime::start();
    runtime.add_pod("web");
    runtime.add_container("web", "app", 0, Stage::Ended(1));
    runtime.break_calls("CreateContainer", "web.app.1", Fault::Refused);
    let stand = Stand::start(runtime, Restarts::Own, &[("web", APP)]);
    let is_tried = |stand: &Stand| {
        let tries = stand.tries("CreateContainer");
        (tries.len() == 7).then_some(tries)
    };
    let tries = stand.wait("seven tries", is_tried).await;
    assert_waits(&tries, &[10, 20, 40, 80, 160, 300]);
    stand.runtime.mend_calls("CreateContainer", "web.app.1");
    stand.wait_state("web", "app", "running").await;
}
