//! Kills, restarts and their back-off.

use super::super::restart::{Backoffs, decide, restarts};
use super::*;

fn update(kind: ProbeType, result: ProbeResult) -> ResultUpdate {
    ResultUpdate {
        pod_uid: "a".into(),
        container: "app".into(),
        kind,
        container_id: "id-1".into(),
        result,
    }
}

fn with_policy(restart_policy: RestartPolicy, role: Role) -> PodSpec {
    let graceful = Probe {
        termination_grace: Some(secs(5)),
        ..probe()
    };
    let probes = [
        (Startup, graceful),
        (Liveness, probe()),
        (Readiness, probe()),
    ];
    PodSpec {
        restart_policy,
        ..pod("a", vec![container("app", role, &probes)])
    }
}

#[test]
fn a_failure_of_liveness_or_startup_kills_with_the_grace_of_probe_or_pod() {
    for (policy, role, restart) in [
        (RestartPolicy::Always, Role::Regular, true),
        (RestartPolicy::OnFailure, Role::Regular, true),
        (RestartPolicy::Never, Role::Regular, false),
        (RestartPolicy::Never, Role::Sidecar, true),
    ] {
        let pod = with_policy(policy, role);
        let startup = decide(&pod, &update(Startup, Failure)).unwrap();
        assert_eq!((startup.grace, startup.restart), (secs(5), restart));
        let liveness = decide(&pod, &update(Liveness, Failure)).unwrap();
        assert_eq!((liveness.grace, liveness.restart), (secs(30), restart));
        for (kind, result) in [
            (Liveness, Success),
            (Startup, Success),
            (Startup, Unknown),
            (Readiness, Failure),
        ] {
            assert_eq!(decide(&pod, &update(kind, result)), None);
        }
    }
    let kill = decide(
        &with_policy(RestartPolicy::Always, Role::Regular),
        &update(Liveness, Failure),
    );
    assert_eq!(
        kill.unwrap().message(),
        "Container app failed liveness probe, will be restarted"
    );
}

#[test]
fn the_manager_has_only_running_containers_killed_until_they_are_gone() {
    let mut bed = Bed::new();
    let app = container("app", Role::Regular, &[(Liveness, thresholds(1, 1))]);
    bed.add(pod("a", vec![app]));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed.run_until(secs(1), |_| failure());
    let updates = bed.manager.take_updates();
    let kills: Vec<_> = updates
        .iter()
        .filter_map(|one| bed.manager.kill(one))
        .collect();
    assert_eq!(kills.len(), 1);
    assert_eq!(bed.manager.kills(), kills);
    let mut gone = running("app", "id-1");
    gone.state = ContainerState::Terminated { exit_code: 137 };
    bed.set_status("a", status(vec![gone.clone()]));
    assert_eq!(bed.manager.kills(), []);
    bed.set_status("a", status(vec![running("app", "id-2")]));
    assert_eq!(bed.manager.kills(), [], "of the container before");
    assert_eq!(bed.manager.kill(&updates[1]), None);
    // A failure does not kill a container that exited by itself.
    bed.run_until(secs(11), |_| success());
    gone.id = Some("id-2".into());
    bed.manager.take_updates();
    bed.set_status("a", status(vec![gone]));
    bed.run_until(secs(21), |_| success());
    let updates = bed.manager.take_updates();
    assert_eq!(updates.last().unwrap().result, Failure);
    assert!(updates.iter().all(|one| bed.manager.kill(one).is_none()));
}

#[test]
fn an_ended_container_is_restarted_as_the_policy_says() {
    use RestartPolicy::{Always, Never, OnFailure};
    for (policy, role, after_success, after_failure) in [
        (Always, Role::Regular, true, true),
        (OnFailure, Role::Regular, false, true),
        (Never, Role::Regular, false, false),
        (Never, Role::Sidecar, true, true),
        (Always, Role::Init, false, true),
        (OnFailure, Role::Init, false, true),
        (Never, Role::Init, false, false),
    ] {
        let pod = with_policy(policy, role);
        assert_eq!(
            restarts(&pod, role, 0),
            after_success,
            "{policy:?} {role:?}"
        );
        assert_eq!(
            restarts(&pod, role, 1),
            after_failure,
            "{policy:?} {role:?}"
        );
    }
}

#[test]
fn restarts_wait_twice_as_long_each_time_until_the_container_holds_out() {
    let (uid, app): (Arc<str>, Arc<str>) = ("a".into(), "app".into());
    let mut backoffs = Backoffs::default();
    let mut now = secs(1000);
    let mut waits = Vec::new();
    for _ in 0..8 {
        let ended = now;
        let ready = backoffs.ready(&uid, &app, ended);
        waits.push((ready - ended).as_secs());
        now = ready;
        backoffs.restarted(&uid, &app, ended, now);
        now += secs(3);
    }
    assert_eq!(waits, [0, 10, 20, 40, 80, 160, 300, 300]);
    let restarted = now - secs(3);
    assert_eq!(
        backoffs.ready(&uid, &app, restarted + secs(600)),
        restarted + secs(900)
    );
    let late = restarted + millis(600_001);
    assert_eq!(backoffs.ready(&uid, &app, late), late);
    backoffs.restarted(&uid, &app, late, late);
    assert_eq!(backoffs.ready(&uid, &app, late), late + secs(10));
    // Only this container of this pod is affected.
    assert_eq!(backoffs.ready(&uid, "other", late), late);
}

#[test]
fn a_pod_that_comes_back_soon_waits_on() {
    let (uid, app): (Arc<str>, Arc<str>) = ("a".into(), "app".into());
    let mut backoffs = Backoffs::default();
    backoffs.restarted(&uid, &app, secs(10), secs(10));
    backoffs.count(&uid, &app);
    for now in [11, 300, 610] {
        backoffs.forget_gone(secs(now), |_| false);
        assert_eq!(backoffs.ready(&uid, &app, secs(12)), secs(22));
        assert_eq!(backoffs.restarts(&uid)[&app], 1);
    }
    backoffs.forget_gone(secs(611), |uid| uid == "a");
    assert_eq!(backoffs.restarts(&uid)[&app], 1, "it is there");
    backoffs.forget_gone(secs(611), |_| false);
    assert_eq!(backoffs.ready(&uid, &app, secs(12)), secs(12));
    assert!(backoffs.restarts(&uid).is_empty());
}

#[test]
fn however_many_pods_go_only_so_many_are_remembered() {
    let mut backoffs = Backoffs::default();
    let app = "app".into();
    for number in 0..3000 {
        let uid: Arc<str> = format!("{number:04}").into();
        backoffs.restarted(&uid, &app, secs(0), millis(number));
    }
    backoffs.forget_gone(secs(3), |uid| uid == "0000");
    let saved = backoffs.save(secs(3));
    let mut uids: Vec<_> = saved.iter().map(|one| &*one.pod_uid).collect();
    uids.sort_unstable();
    assert_eq!((uids.len(), uids[0], uids[1]), (1001, "0000", "2000"));
}

#[test]
fn back_off_survives_a_restart_of_the_agent() {
    let (uid, app): (Arc<str>, Arc<str>) = ("a".into(), "app".into());
    let mut backoffs = Backoffs::default();
    for _ in 0..3 {
        backoffs.restarted(&uid, &app, secs(50), secs(60));
        backoffs.count(&uid, &app);
    }
    let saved = backoffs.save(secs(100));
    let text = serde_json::to_string(&saved).unwrap();
    let mut snapshot = Snapshot {
        backoffs: serde_json::from_str(&text).unwrap(),
        ..Snapshot::default()
    };
    // The restart was 40 s before the agent stopped, which was 20 s before the new agent started.
    snapshot.age(secs(20));
    let restored = Backoffs::restore(snapshot.backoffs);
    assert_eq!(restored.ready(&uid, &app, secs(5)), secs(45));
    assert_eq!(restored.ready(&uid, &app, secs(540)), secs(580));
    assert_eq!(restored.ready(&uid, &app, secs(541)), secs(541));
    assert_eq!(restored.save(secs(7))[0].age, secs(67));
    assert_eq!(restored.restarts(&uid)[&app], 3);
}
