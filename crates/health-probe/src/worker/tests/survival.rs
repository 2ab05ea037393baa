//! Tests of how a restart of the agent affects its state.

use super::*;

fn limits() -> Limits {
    Limits {
        per_second: 1_000_000,
        concurrent: 1_000_000,
        pod_per_second: 1_000_000,
    }
}

/// Returns the next agent, with the state that this one saves.
fn next(bed: &Bed) -> Bed {
    let text = serde_json::to_string(&bed.manager.snapshot(bed.now)).unwrap();
    Bed::after(limits(), Some(serde_json::from_str(&text).unwrap()))
}

/// A container that started this long before the agent.
fn older(id: &str, age: u64) -> ContainerStatus {
    let mut container = running("app", id);
    container.state = ContainerState::Running {
        started_at: Some(agent_start() - jiff::SignedDuration::try_from(secs(age)).unwrap()),
    };
    container
}

fn app(kind: ProbeType) -> PodSpec {
    let probe = thresholds(1, 3);
    pod("a", vec![container("app", Role::Regular, &[(kind, probe)])])
}

fn results(bed: &mut Bed) -> Vec<ProbeResult> {
    let updates = bed.manager.take_updates();
    updates.into_iter().map(|update| update.result).collect()
}

#[test]
fn what_was_ready_is_ready_after_a_restart_of_the_agent() {
    let mut bed = Bed::new();
    bed.add(app(Readiness));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed.run_until(secs(5), |_| success());
    bed.run_until(secs(25), |_| failure());
    assert_eq!(bed.reported("a"), (Some(true), true));
    let mut bed = next(&bed);
    bed.add(app(Readiness));
    // Too young for the rule about containers that survived.
    bed.set_status("a", status(vec![older("id-1", 5)]));
    assert_eq!(bed.reported("a"), (Some(true), true));
    // A second restart before any probe loses no state.
    let mut bed = next(&bed);
    assert_eq!(
        next(&bed).manager.snapshot(Duration::ZERO),
        bed.manager.snapshot(bed.now)
    );
    bed.add(app(Readiness));
    bed.set_status("a", status(vec![older("id-1", 5)]));
    let mut ready = Vec::new();
    while ready.len() < 2 {
        bed.now = bed.now.max(bed.manager.next_wake().unwrap());
        if let Some(start) = bed.poll() {
            let (_, before) = bed.reported("a");
            bed.finish(start.worker, failure());
            ready.push((before, bed.reported("a").1));
        }
    }
    // Two failures were counted before; this is the third.
    assert_eq!(ready[0], (true, false));
    assert_eq!(results(&mut bed), [Success, Failure]);
}

#[test]
fn a_failure_that_nobody_acted_on_is_reported_again() {
    for kind in [Liveness, Startup] {
        let mut bed = Bed::new();
        bed.add(app(kind));
        bed.set_status("a", status(vec![running("app", "id-1")]));
        bed.run_until(secs(25), |_| failure());
        let kills = bed.manager.kills();
        assert_eq!(kills.len(), 1);
        let mut bed = next(&bed);
        bed.add(app(kind));
        bed.set_status("a", status(vec![older("id-1", 30)]));
        let runs = bed.run_until(secs(60), |_| success());
        assert_eq!(runs.len(), 0, "it is on hold");
        assert_eq!(results(&mut bed), [Failure]);
        assert_eq!(bed.manager.kills(), kills);
    }
}

#[test]
fn a_container_that_ended_between_two_agents_was_still_to_be_killed() {
    for kind in [Liveness, Startup] {
        let mut bed = Bed::new();
        bed.add(app(kind));
        bed.set_status("a", status(vec![running("app", "id-1")]));
        bed.run_until(secs(25), |_| failure());
        let kill = bed.manager.condemned("a", "id-1");
        assert!(kill.is_some());
        let mut bed = next(&bed);
        bed.add(app(kind));
        // Both before a worker has seen the container and afterwards.
        assert_eq!(bed.manager.condemned("a", "id-1"), kill);
        assert_eq!(bed.manager.condemned("a", "id-2"), None);
        let mut ended = running("app", "id-1");
        ended.state = ContainerState::Terminated { exit_code: 0 };
        bed.set_status("a", status(vec![ended]));
        let runs = bed.run_until(secs(60), |_| success());
        assert_eq!(runs.len(), 0, "it is on hold");
        assert_eq!(bed.manager.condemned("a", "id-1"), kill);
    }
    let mut bed = Bed::new();
    bed.add(app(Liveness));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed.run_until(secs(15), |_| failure());
    let mut bed = next(&bed);
    bed.add(app(Liveness));
    assert_eq!(bed.manager.condemned("a", "id-1"), None, "not yet decided");
}

#[test]
fn a_container_that_is_new_is_judged_anew() {
    let mut bed = Bed::new();
    bed.add(app(Readiness));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed.run_until(secs(5), |_| success());
    let mut bed = next(&bed);
    bed.add(app(Readiness));
    bed.set_status("a", status(vec![older("id-2", 3)]));
    assert_eq!(bed.reported("a"), (Some(true), false));
    bed.run_until(secs(10), |_| failure());
    assert_eq!(results(&mut bed), [Failure]);
}

#[test]
fn nothing_known_of_an_old_container_is_not_failure() {
    // Nothing was saved, so the pod's last reported readiness counts.
    for (was_ready, age, ready) in [(true, 11, true), (false, 11, false), (true, 10, false)] {
        let mut bed = Bed::new();
        bed.add(app(Readiness));
        let reported = PodStatus {
            ready: was_ready,
            ..status(vec![older("id-1", age)])
        };
        bed.set_status("a", reported);
        assert_eq!(bed.reported("a"), (Some(true), ready), "{was_ready} {age}");
        let start = bed.poll().unwrap();
        assert_eq!(
            results(&mut bed),
            if age > 10 { vec![] } else { vec![Failure] }
        );
        bed.finish(start.worker, failure());
        assert_eq!(
            bed.reported("a"),
            (Some(true), ready),
            "one failure of three"
        );
        bed.run_until(secs(30), |_| failure());
        assert_eq!(bed.reported("a"), (Some(true), false));
    }
    let mut bed = Bed::new();
    bed.add(app(Liveness));
    bed.set_status("a", status(vec![older("id-1", 11)]));
    assert_eq!(bed.reported("a"), (Some(true), true));
}

#[test]
fn what_was_reported_as_started_has_started() {
    let probes = [(Startup, probe()), (Liveness, probe())];
    let spec = pod("a", vec![container("app", Role::Regular, &probes)]);
    let mut bed = Bed::new();
    bed.add(spec.clone());
    let mut reported = older("id-1", 100);
    reported.started = Some(true);
    bed.set_status("a", status(vec![reported.clone()]));
    assert_eq!(bed.reported("a").0, Some(true));
    let runs = bed.run_until(secs(5), |_| success());
    assert_eq!(runs.len(), 1);
    assert_eq!(runs[0].2, Liveness);
    // But the next container does not inherit it, whatever is reported.
    reported.id = Some("id-2".into());
    bed.set_status("a", status(vec![reported.clone()]));
    assert_eq!(bed.reported("a").0, Some(false));
    // Results take precedence.
    let mut bed = Bed::new();
    bed.add(spec);
    reported.started = None;
    bed.set_status("a", status(vec![reported.clone()]));
    assert_eq!(bed.reported("a").0, Some(false));
    bed.run_until(secs(1), |_| success());
    assert_eq!(bed.reported("a").0, Some(true));
}

#[test]
fn a_sidecar_that_has_started_is_not_started_again() {
    let sidecar = container("app", Role::Sidecar, &[(Startup, probe())]);
    let mut bed = Bed::new();
    bed.add(pod("a", vec![sidecar]));
    let mut reported = older("id-1", 3);
    reported.started = Some(true);
    bed.set_status(
        "a",
        PodStatus {
            init_containers: vec![reported],
            ..status(Vec::new())
        },
    );
    assert_eq!(bed.run_until(secs(20), |_| failure()).len(), 0);
    assert_eq!(results(&mut bed), [Success]);
    assert_eq!(bed.reported("a"), (Some(true), true));
}

#[test]
fn what_was_saved_of_pods_that_are_gone_is_forgotten() {
    let mut bed = Bed::new();
    bed.add(app(Readiness));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed.run_until(secs(5), |_| success());
    let mut bed = next(&bed);
    assert_eq!(bed.manager.snapshot(bed.now).workers.len(), 1);
    bed.manager.cleanup_pods(bed.now, |uid| uid == "a");
    assert_eq!(bed.manager.snapshot(bed.now).workers.len(), 1);
    bed.manager.cleanup_pods(bed.now, |_| false);
    assert_eq!(bed.manager.snapshot(bed.now).workers.len(), 0);
}

#[test]
fn what_holds_of_a_pod_that_comes_back_soon_holds_on() {
    for (away, is_held) in [(secs(1), true), (secs(599), true), (secs(600), false)] {
        let mut bed = Bed::new();
        bed.add(app(Liveness));
        bed.set_status("a", status(vec![running("app", "id-1")]));
        bed.run_until(secs(25), |_| failure());
        let kills = bed.manager.kills();
        assert_eq!(kills.len(), 1);
        bed.manager.retire_pod(bed.now, "a");
        assert_eq!((bed.manager.workers(), bed.manager.kills().len()), (0, 0));
        // The sources have listed all their pods.
        bed.manager.cleanup_pods(bed.now, |_| false);
        bed.now += away;
        bed.add(app(Liveness));
        bed.set_status("a", status(vec![running("app", "id-1")]));
        let until = bed.now + secs(5);
        let runs = bed.run_until(until, |_| success());
        assert_eq!(runs.is_empty(), is_held, "{away:?}");
        assert_eq!(bed.manager.kills(), if is_held { kills } else { vec![] });
    }
}

#[test]
fn a_restart_of_the_agent_does_not_prolong_what_is_kept_of_a_pod_that_went() {
    for (away, is_held) in [(secs(249), true), (secs(250), false)] {
        let mut bed = Bed::new();
        bed.add(app(Liveness));
        bed.set_status("a", status(vec![running("app", "id-1")]));
        bed.run_until(secs(25), |_| failure());
        bed.manager.retire_pod(bed.now, "a");
        bed.now += secs(250);
        let mut snapshot = bed.manager.snapshot(bed.now);
        // No agent runs for a while.
        snapshot.age(secs(100));
        let mut bed = Bed::after(limits(), Some(snapshot));
        bed.manager.cleanup_pods(bed.now, |_| false);
        bed.now += away;
        bed.add(app(Liveness));
        bed.set_status("a", status(vec![running("app", "id-1")]));
        let until = bed.now + secs(5);
        let runs = bed.run_until(until, |_| success());
        assert_eq!(runs.is_empty(), is_held, "{away:?}");
        assert_eq!(bed.manager.kills().len(), usize::from(is_held), "{away:?}");
    }
}

#[test]
fn however_many_pods_go_only_so_many_holds_are_remembered() {
    let mut bed = Bed::new();
    for number in 0..1500 {
        let uid = format!("{number:04}");
        let probed = container("app", Role::Regular, &[(Startup, thresholds(1, 1))]);
        bed.add(pod(&uid, vec![probed]));
        bed.set_status(&uid, status(vec![running("app", &uid)]));
    }
    bed.run_until(secs(1), |_| success());
    for number in 0..1500 {
        bed.manager
            .retire_pod(bed.now + millis(number), &format!("{number:04}"));
    }
    let saved = bed.manager.snapshot(bed.now).workers;
    let mut uids: Vec<_> = saved.iter().map(|one| &*one.pod_uid).collect();
    uids.sort_unstable();
    assert_eq!((uids.len(), uids[0]), (1000, "0500"));
}

#[test]
fn a_container_that_an_earlier_agent_saw_before_it_ran_is_not_killed_for_it() {
    let app = container(
        "app",
        Role::Regular,
        &[(Startup, probe()), (Liveness, probe())],
    );
    let mut bed = Bed::new();
    bed.add(pod("a", vec![app.clone()]));
    let mut created = running("app", "id-1");
    created.state = ContainerState::Waiting;
    bed.set_status("a", status(vec![created]));
    bed.run_until(secs(1), |_| success());
    let reported = bed.manager.take_updates();
    let mut reported = reported.iter().map(|one| (one.kind, one.result));
    assert!(reported.any(|one| one == (Liveness, Failure)));

    let mut bed = next(&bed);
    bed.add(pod("a", vec![app]));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed.run_until(secs(1), |_| failure());
    let reported = bed.manager.take_updates();
    assert!(!reported.is_empty());
    assert!(reported.iter().all(|one| bed.manager.kill(one).is_none()));
    assert_eq!(bed.manager.kills(), []);
}
