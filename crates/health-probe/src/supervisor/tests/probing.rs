use super::*;
use crate::runtime::testing::{IsolatedProcess, Stage};

/// A container whose command runs every second, and may fail once.
const CHECKED: &str = "containers: [{name: app, livenessProbe: {exec: {command: [check]}, \
    periodSeconds: 1, timeoutSeconds: 5, failureThreshold: 2}}]";

#[tokio::test(start_paused = true)]
async fn a_container_whose_status_cannot_be_had_leaves_the_others_known() {
    for fault in [Fault::Refused, Fault::Rubbish, Fault::Hangs] {
        let runtime = FakeRuntime::start();
        for (pod, name) in [("web", "bad"), ("web", "good"), ("other", "app")] {
            runtime.add_pod(pod);
            runtime.add_container(pod, name, 0, Stage::Running);
        }
        runtime.break_calls("ContainerStatus", "web.bad.0", fault);
        let specs = [
            ("web", "containers: [{name: bad}, {name: good}]"),
            ("other", "containers: [{name: app}]"),
        ];
        let stand = Stand::start(runtime, Restarts::Own, &specs);
        for (pod, name) in [("web", "good"), ("other", "app")] {
            stand.wait_state(pod, name, "running").await;
            stand
                .runtime
                .set_stage(&format!("{pod}.{name}.0"), Stage::Ended(1));
            let next = format!("{pod}.{name}.1");
            stand.wait_call("StartContainer", &next).await;
        }
        let bad = stand.container("web", "bad").unwrap();
        assert_eq!((&*bad.state, bad.id), ("waiting", None));
        let problems = stand.supervisor.problems();
        assert_eq!(problems.len(), 1, "{problems:?}");
        let problem = &problems[0].problem;
        assert!(
            problem.contains("ContainerStatus of web.bad.0: "),
            "{problem}"
        );
        stand.runtime.mend_calls("ContainerStatus", "web.bad.0");
        stand.wait_state("web", "bad", "running").await;
        let is_well = |stand: &Stand| stand.supervisor.problems().is_empty().then_some(());
        stand.wait("no problem", is_well).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_is_no_failure_of_the_container() {
    let process = IsolatedProcess::start();
    let runtime = FakeRuntime::start();
    runtime.add_pod("web");
    runtime.add_container("web", "app", 0, Stage::Running);
    runtime.set_pid("web.app.0", process.pid());
    runtime.break_calls("ExecSync", "web.app.0", Fault::Hangs);
    let stand = Stand::start(runtime, Restarts::Own, &[("web", CHECKED)]);
    let reported = |stand: &Stand| {
        let events = stand.events("web", "Unhealthy");
        events.into_iter().find(|event| event.count >= 5)
    };
    let reported = stand.wait("five runs", reported).await;
    let start = "Liveness probe errored and resulted in unknown state: ";
    assert!(reported.message.starts_with(start), "{reported:?}");
    assert!(
        reported
            .message
            .ends_with("did not start the command within 5s"),
        "{reported:?}"
    );
    assert_eq!(stand.changes(), []);
    // As soon as responses come, they count.
    stand.runtime.set_command_exit_code("web.app.0", 1);
    stand.runtime.mend_calls("ExecSync", "web.app.0");
    stand.wait_call("StopContainer", "web.app.0").await;
}

#[tokio::test(start_paused = true)]
async fn without_container_restarts_nothing_is_ended_or_started() {
    for restarts in [Restarts::None, Restarts::Own] {
        let runtime = FakeRuntime::start();
        runtime.add_pod("web");
        runtime.add_container("web", "app", 0, Stage::Running);
        runtime.set_command_exit_code("web.app.0", 1);
        runtime.add_pod("other");
        runtime.add_container("other", "app", 0, Stage::Ended(1));
        let specs = [("web", CHECKED), ("other", "containers: [{name: app}]")];
        let stand = Stand::start(runtime, restarts, &specs);
        if restarts == Restarts::Own {
            // If restarts were on, both calls would happen.
            stand.wait_call("StopContainer", "web.app.0").await;
            stand.wait_call("StartContainer", "web.app.1").await;
            stand.wait_call("StartContainer", "other.app.1").await;
            continue;
        }
        let reported = |stand: &Stand| stand.events("web", "NotKilled").pop();
        let reported = stand.wait("an event", reported).await;
        assert_eq!(
            reported.message,
            "Container app failed liveness probe; not killed: --container-restarts is off"
        );
        stand.pass(60).await;
        assert_eq!(stand.changes(), []);
        assert_eq!(stand.events("web", "NotKilled"), [reported]);
        assert_eq!(stand.events("web", "Killing"), []);
    }
}
