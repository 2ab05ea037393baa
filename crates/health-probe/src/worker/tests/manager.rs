//! The kubelet's scenarios for the manager (M).

use std::collections::HashSet;

use super::*;

fn probed(name: &str) -> ContainerSpec {
    let probes = ProbeType::ALL.map(|kind| (kind, probe()));
    container(name, Role::Regular, &probes)
}

fn named(workers: &[(&str, ProbeType)]) -> Vec<(String, ProbeType)> {
    let mut named: Vec<_> = workers
        .iter()
        .map(|(name, kind)| ((*name).to_owned(), *kind))
        .collect();
    named.sort();
    named
}

#[test]
fn m1_each_probe_of_a_pod_has_a_worker_as_long_as_the_pod_is_there() {
    let mut bed = Bed::new();
    bed.add(pod("plain", vec![container("app", Role::Regular, &[])]));
    assert_eq!(bed.manager.workers(), 0);
    let some = container("some", Role::Regular, &[(Readiness, probe())]);
    bed.add(pod("probed", vec![probed("all"), some]));
    let all = named(&[
        ("all", Startup),
        ("all", Readiness),
        ("all", Liveness),
        ("some", Readiness),
    ]);
    assert_eq!(bed.workers("probed"), all);
    bed.manager.remove_pod("plain");
    assert_eq!(bed.workers("probed"), all);
    bed.manager.remove_pod("probed");
    assert_eq!(bed.manager.workers(), 0);
    assert_eq!(bed.manager.next_wake(), None);
    bed.manager.remove_pod("probed");
}

#[test]
fn m2_init_containers_that_are_restarted_have_workers() {
    let mut bed = Bed::new();
    let init = container("init", Role::Init, &[]);
    let sidecar = ContainerSpec {
        role: Role::Sidecar,
        ..probed("sidecar")
    };
    bed.add(pod(
        "a",
        vec![container("app", Role::Regular, &[]), init, sidecar],
    ));
    let all = ProbeType::ALL.map(|kind| ("sidecar", kind));
    assert_eq!(bed.workers("a"), named(&all));
    bed.manager.remove_pod("a");
    assert_eq!(bed.manager.workers(), 0);
}

#[test]
fn m3_cleanup_leaves_the_pods_that_are_desired() {
    let mut bed = Bed::new();
    bed.add(pod("kept", vec![probed("app")]));
    bed.add(pod("gone", vec![probed("app")]));
    bed.manager.cleanup_pods(bed.now, |uid| uid == "kept");
    assert_eq!(bed.workers("kept").len(), 3);
    assert_eq!(bed.workers("gone").len(), 0);
    assert!(bed.manager.status("gone").is_none());
}

#[test]
fn m4_a_hundred_pods_are_cleaned_up_again_and_again() {
    let mut bed = Bed::new();
    for number in 0..100 {
        let uid = number.to_string();
        bed.add(pod(&uid, vec![probed("app")]));
        bed.set_status(&uid, status(vec![running("app", &uid)]));
    }
    let starts: Vec<_> = std::iter::from_fn(|| bed.poll()).collect();
    assert_eq!(starts.len(), 100, "each pod's startup");
    for _ in 0..10 {
        bed.manager.cleanup_pods(bed.now, |_| false);
    }
    assert_eq!(bed.manager.workers(), 0);
    assert_eq!(bed.manager.in_flight(), 100);
    for start in starts {
        assert_eq!(bed.finish(start.worker, failure()), Finished::Dropped);
    }
    assert_eq!(bed.manager.in_flight(), 0);
    assert_eq!(bed.manager.next_wake(), None);
}

#[test]
fn m5_containers_are_ready_as_their_results_say() {
    let late = Probe {
        initial_delay_seconds: 1000,
        ..probe()
    };
    let regular = |name, probes: &[_]| container(name, Role::Regular, probes);
    let containers = vec![
        regular("unprobed", &[]),
        regular("ready", &[(Readiness, probe())]),
        regular("pending", &[(Readiness, late.clone())]),
        regular("unready", &[(Readiness, thresholds(1, 1))]),
        regular("starting", &[(Startup, late), (Readiness, probe())]),
        regular("started", &[(Startup, probe())]),
        regular("terminated", &[(Readiness, probe())]),
    ];
    let names: Vec<_> = containers.iter().map(|one| one.name.clone()).collect();
    let mut reported = status(names.iter().map(|name| running(name, name)).collect());
    let mut bed = Bed::new();
    bed.add(pod("a", containers));
    bed.set_status("a", reported.clone());
    bed.run_until(secs(1), |start| match &*start.container {
        "unready" => failure(),
        _ => success(),
    });
    let ready = |bed: &Bed| -> Vec<_> {
        let status = bed.manager.status("a").unwrap();
        status.containers.iter().map(|one| one.ready).collect()
    };
    let expected = [true, true, false, false, false, true, true];
    assert_eq!(ready(&bed), expected);
    // The success of its probe is still known.
    reported.containers[6].state = ContainerState::Terminated { exit_code: 0 };
    bed.set_status("a", reported);
    let expected = [true, true, false, false, false, true, false];
    assert_eq!(ready(&bed), expected);
    let status = bed.manager.status("a").unwrap();
    let started: Vec<_> = status.containers.iter().map(|one| one.started).collect();
    let expected = [true, true, true, true, false, true, false].map(Some);
    assert_eq!(started, expected);
}

#[test]
fn m6_init_containers_are_ready_when_they_have_ended_or_when_they_run() {
    for (role, expected) in [
        (Role::Init, [(false, false), (true, false), (false, true)]),
        (
            Role::Sidecar,
            [(false, false), (true, true), (false, false)],
        ),
    ] {
        let states = [
            ContainerState::Waiting,
            running("init", "id").state,
            ContainerState::Terminated { exit_code: 0 },
        ];
        for (state, (started, ready)) in states.into_iter().zip(expected) {
            let mut bed = Bed::new();
            bed.add(pod("a", vec![container("init", role, &[])]));
            let mut init = running("init", "id");
            init.state = state;
            bed.set_status(
                "a",
                PodStatus {
                    init_containers: vec![init],
                    ..status(Vec::new())
                },
            );
            assert_eq!(
                bed.reported("a"),
                (Some(started), ready),
                "{role:?} {state:?}"
            );
        }
    }
    let mut bed = Bed::new();
    bed.add(pod("a", vec![container("init", Role::Init, &[])]));
    let mut init = running("init", "id");
    init.state = ContainerState::Terminated { exit_code: 1 };
    bed.set_status("a", status(vec![init]));
    assert_eq!(bed.reported("a"), (Some(false), false));
}

#[test]
fn m7_the_status_follows_readiness_and_startup() {
    let mut bed = Bed::new();
    let app = container("app", Role::Regular, &[(Readiness, thresholds(1, 1))]);
    bed.add(pod("a", vec![app]));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    assert_eq!(bed.reported("a"), (Some(true), false));
    bed.manager.take_status_changes();
    for (end, report, ready) in [
        (9, success(), true),
        (19, failure(), false),
        (29, success(), true),
    ] {
        bed.run_until(secs(end), |_| report.clone());
        assert_eq!(bed.reported("a"), (Some(true), ready));
        assert_eq!(bed.manager.take_status_changes(), ["a".into()]);
        bed.run_until(secs(end), |_| report.clone());
        assert_eq!(bed.manager.take_status_changes(), []);
    }

    let mut bed = Bed::new();
    let probes = [
        (Startup, probe()),
        (Readiness, probe()),
        (Liveness, probe()),
    ];
    bed.add(pod("a", vec![container("app", Role::Regular, &probes)]));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    let runs = bed.run_until(secs(19), |_| failure());
    assert_eq!(runs.len(), 2);
    assert_eq!(bed.reported("a"), (Some(false), false));
    let runs = bed.run_until(secs(20), |_| success());
    let kinds: HashSet<_> = runs.iter().map(|(_, _, kind)| *kind).collect();
    assert_eq!(bed.reported("a"), (Some(true), true));
    assert!(kinds.contains(&Startup) && kinds.contains(&Readiness));
    // A restart starts from scratch.
    bed.set_status("a", status(vec![running("app", "id-2")]));
    assert_eq!(bed.reported("a"), (Some(false), false));
    bed.run_until(secs(60), |_| success());
    assert_eq!(bed.reported("a"), (Some(true), true));
}

#[test]
fn m8_a_pod_that_is_added_again_is_brought_in_line() {
    let mut bed = Bed::new();
    bed.add(pod("a", vec![probed("one")]));
    bed.set_status(
        "a",
        status(vec![running("one", "id-1"), running("two", "id-2")]),
    );
    bed.run_until(secs(1), |_| success());
    bed.add(pod("a", vec![probed("one"), probed("two")]));
    let of = |names: &[&'static str]| {
        let all = names
            .iter()
            .flat_map(|name| ProbeType::ALL.map(|kind| (*name, kind)));
        named(&all.collect::<Vec<_>>())
    };
    assert_eq!(bed.workers("a"), of(&["one", "two"]));
    let known = |bed: &Bed| {
        let views: Vec<_> = bed.manager.list().collect();
        let results = views.iter().filter_map(|view| view.result);
        results.collect::<Vec<_>>().len()
    };
    assert_eq!(known(&bed), 3, "what was known stays");
    bed.run_until(secs(30), |_| success());
    assert_eq!(known(&bed), 6);
    bed.add(pod("a", vec![probed("two")]));
    assert_eq!(bed.workers("a"), of(&["two"]));
    // Removing and adding a single probe works too.
    let fewer = ContainerSpec {
        liveness: None,
        ..probed("two")
    };
    bed.add(pod("a", vec![fewer]));
    assert_eq!(
        bed.workers("a"),
        named(&[("two", Startup), ("two", Readiness)])
    );
}

#[test]
fn a_listing_reports_what_each_worker_is_at() {
    let mut bed = Bed::new();
    let probes = [(Startup, thresholds(1, 3)), (Liveness, probe())];
    bed.add(pod("a", vec![container("app", Role::Regular, &probes)]));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed.run_until(secs(12), |_| failure());
    let views: Vec<_> = bed.manager.list().collect();
    assert_eq!(views.len(), 2);
    let (startup, liveness) = (&views[0], &views[1]);
    assert_eq!((startup.kind, startup.result), (Startup, Some(Unknown)));
    assert_eq!((startup.run, startup.threshold), (2, 3));
    assert_eq!((startup.next, startup.waiting), (Some(secs(20)), None));
    let last = startup.last_run.unwrap();
    assert_eq!((last.at, last.counted), (secs(10), Counted::Failed));
    assert_eq!(last.message, "a message");
    assert_eq!(liveness.result, Some(Success));
    assert_eq!(liveness.waiting, Some(Waiting::NotStarted));
    assert_eq!(liveness.last_run, None);
    bed.run_until(secs(22), |_| failure());
    let startup = bed.manager.list().next().unwrap();
    assert!(startup.on_hold);
    bed.now = secs(30);
    assert_eq!(bed.poll(), None);
    let startup = bed.manager.list().next().unwrap();
    assert_eq!(startup.waiting, Some(Waiting::OnHold));
}
