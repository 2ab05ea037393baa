//! Tests of how much one pod or namespace can take from the others.

use std::collections::HashMap;

use super::*;

const LIMITS: Limits = Limits {
    per_second: 20_000,
    concurrent: 1000,
    pod_per_second: 100,
};

/// Adds a pod in a namespace with this many containers, each with two of these probes.
fn add(bed: &mut Bed, namespace: &str, uid: &str, containers: usize, probe: &Probe) {
    let names: Vec<_> = (0..containers).map(|number| format!("c{number}")).collect();
    let kinds = [Readiness, Liveness].map(|kind| (kind, probe.clone()));
    let specs = names.iter();
    bed.add(PodSpec {
        namespace: namespace.to_owned(),
        ..pod(
            uid,
            specs
                .map(|name| container(name, Role::Regular, &kinds))
                .collect(),
        )
    });
    let states = names
        .iter()
        .map(|name| running(name, &format!("{uid}-{name}")));
    bed.set_status(uid, status(states.collect()));
}

fn slow() -> Probe {
    Probe {
        timeout: secs(3600),
        ..probe()
    }
}

/// Makes runs up to `end`; runs of pods whose UID starts with `slow` never end. Returns how often each pod was probed,
/// and the longest delay of the other pods.
fn run(bed: &mut Bed, end: Duration) -> (HashMap<String, u32>, Duration) {
    let (mut count, mut latest) = (HashMap::<String, u32>::new(), Duration::ZERO);
    loop {
        while let Some(start) = bed.poll() {
            *count.entry(start.pod.uid.to_string()).or_default() += 1;
            if !start.pod.uid.starts_with("slow") {
                latest = latest.max(bed.now - start.due);
                bed.finish(start.worker, success());
            }
        }
        match bed.manager.next_wake().filter(|at| *at <= end) {
            Some(at) => {
                assert!(at > bed.now, "it would turn without an end");
                bed.now = at;
            }
            None => break,
        }
    }
    bed.now = end;
    (count, latest)
}

#[test]
fn slow_probes_of_one_namespace_leave_places_to_others_and_to_new_pods_of_their_own() {
    let mut bed = Bed::with(LIMITS);
    for number in 0..9 {
        add(&mut bed, "tenant", &format!("slow-{number}"), 60, &slow());
    }
    add(&mut bed, "shop", "web", 1, &probe());
    run(&mut bed, secs(60));
    let held = bed.manager.in_flight();
    assert!(held <= 500, "{held}");
    // All other pods continue as if they were alone, and so do pods that are added now.
    add(&mut bed, "shop", "new", 1, &probe());
    add(&mut bed, "tenant", "neighbour", 1, &probe());
    let (count, latest) = run(&mut bed, secs(3660));
    for uid in ["web", "new", "neighbour"] {
        assert!(count[uid] >= 2 * 360, "{uid}: {count:?}");
        let containers = &bed.manager.status(uid).unwrap().containers;
        assert!(containers[0].ready, "{uid}");
    }
    assert!(latest < millis(20), "{latest:?}");
    assert_eq!(bed.manager.in_flight(), held);
}

#[test]
fn many_namespaces_of_slow_probes_leave_places_too() {
    let mut bed = Bed::with(LIMITS);
    for number in 0..30 {
        let namespace = format!("tenant-{number}");
        add(&mut bed, &namespace, &format!("slow-{number}"), 60, &slow());
    }
    run(&mut bed, secs(60));
    let held = bed.manager.in_flight();
    assert!(held < 1000, "{held}");
    add(&mut bed, "shop", "web", 1, &probe());
    let (count, latest) = run(&mut bed, secs(120));
    assert!(count["web"] >= 2 * 6, "{count:?}");
    assert!(latest < millis(20), "{latest:?}");
}

#[test]
fn one_pod_holds_a_third_of_the_places_and_one_namespace_half_of_them() {
    let mut bed = Bed::with(Limits {
        concurrent: 100,
        ..LIMITS
    });
    add(&mut bed, "tenant", "slow-0", 100, &slow());
    run(&mut bed, secs(60));
    assert_eq!(bed.manager.in_flight(), 34);
    for number in 1..40 {
        add(&mut bed, "tenant", &format!("slow-{number}"), 2, &slow());
    }
    run(&mut bed, secs(120));
    assert_eq!(bed.manager.in_flight(), 50);
    // Slots of finished runs become available to later runs.
    bed.manager.remove_pod("slow-0");
    let views = bed.manager.list().filter(|view| view.in_flight).count();
    assert!(views < 50);
}

#[test]
fn a_pod_of_fast_probes_has_its_rate_and_no_more() {
    let fast = Probe {
        period: millis(10),
        ..probe()
    };
    let mut bed = Bed::with(LIMITS);
    add(&mut bed, "tenant", "fast", 200, &fast);
    add(&mut bed, "shop", "web", 1, &probe());
    // Uses up the rate that the pod may have saved.
    run(&mut bed, secs(5));
    let (count, latest) = run(&mut bed, secs(65));
    let fast = count["fast"];
    assert!((5990..=6010).contains(&fast), "{fast}");
    assert!((11..=13).contains(&count["web"]), "{count:?}");
    // Each probe of the pod gets its turn, and is shown as late.
    let now = bed.now;
    let late = bed.manager.list().filter(|view| &*view.pod.uid == "fast");
    let late: Vec<_> = late.filter_map(|view| view.overdue(now)).collect();
    assert!(late.len() > 100, "{}", late.len());
    assert!(late.iter().all(|age| *age <= millis(4_200)), "{late:?}");
    assert!(latest <= millis(4_200), "{latest:?}");
    let mut views = bed.manager.list();
    assert!(views.any(|view| view.delay == Some(Delay::PodRate)));
}

#[test]
fn a_pod_within_its_rate_is_not_held_up() {
    let fast = Probe {
        period: millis(25),
        ..probe()
    };
    let mut bed = Bed::with(LIMITS);
    add(&mut bed, "shop", "web", 1, &fast);
    let (count, latest) = run(&mut bed, secs(10));
    assert!((800..=802).contains(&count["web"]), "{count:?}");
    assert!(latest < millis(2), "{latest:?}");
}

#[test]
fn namespaces_take_turns_where_the_rate_of_the_node_is_used_up() {
    let mut bed = Bed::with(Limits {
        per_second: 100,
        ..LIMITS
    });
    let fast = Probe {
        period: millis(100),
        ..probe()
    };
    for number in 0..100 {
        add(&mut bed, "many", &format!("many-{number}"), 1, &fast);
    }
    add(&mut bed, "shop", "web", 1, &fast);
    run(&mut bed, secs(5));
    let (count, _) = run(&mut bed, secs(65));
    assert!(count["web"] >= 2 * 590, "{}", count["web"]);
}

#[test]
fn a_result_is_overdue_after_three_periods_without_news_while_it_is_to_be_probed() {
    let mut bed = Bed::with(LIMITS);
    add(&mut bed, "shop", "web", 1, &probe());
    run(&mut bed, secs(1));
    let overdue = |bed: &Bed| -> Vec<Duration> {
        let views = bed.manager.list();
        views.filter_map(|view| view.overdue(bed.now)).collect()
    };
    // The next runs never end, and the last result stands.
    bed.now = secs(11);
    let starts: Vec<_> = std::iter::from_fn(|| bed.poll()).collect();
    assert_eq!(starts.len(), 2);
    bed.now = secs(30);
    assert!(overdue(&bed).is_empty());
    bed.now = secs(30) + millis(1);
    assert_eq!(overdue(&bed), [bed.now, bed.now]);
    let view = bed.manager.list().next().unwrap();
    assert_eq!(view.result, Some(Success));
    assert!(bed.manager.status("web").unwrap().containers[0].ready);
    // An error provides no information, a failure does.
    for (start, attempts) in starts.iter().zip([3, 1]) {
        for _ in 0..attempts {
            let report = if attempts > 1 {
                Report::Outcome(error())
            } else {
                failure()
            };
            bed.finish(start.worker, report);
        }
    }
    assert_eq!(overdue(&bed), [bed.now]);
    // A container that should not be probed is not overdue.
    let mut waiting = running("c0", "web-c0");
    waiting.state = ContainerState::Waiting;
    bed.set_status("web", status(vec![waiting]));
    run(&mut bed, secs(100));
    assert!(overdue(&bed).is_empty());
}

#[test]
fn a_probe_whose_runs_take_longer_than_three_periods_is_not_overdue_before_its_timeout() {
    let mut bed = Bed::with(LIMITS);
    let patient = Probe {
        timeout: secs(60),
        ..probe()
    };
    add(&mut bed, "shop", "web", 1, &patient);
    let overdue = |bed: &Bed| -> Vec<Duration> {
        let views = bed.manager.list();
        views.filter_map(|view| view.overdue(bed.now)).collect()
    };
    // Starts both probes as soon as they may start.
    let begin = |bed: &mut Bed| {
        let mut starts = Vec::new();
        while starts.len() < 2 {
            match bed.poll() {
                Some(start) => starts.push(start),
                None => bed.now = bed.manager.next_wake().unwrap(),
            }
        }
        starts
    };
    for _ in 0..3 {
        let starts = begin(&mut bed);
        // The target responds, but slowly.
        bed.now += secs(55);
        assert!(overdue(&bed).is_empty());
        for start in &starts {
            bed.finish(start.worker, success());
        }
        assert!(overdue(&bed).is_empty());
    }
    // A result is due at the end of the timeout, and overdue a period later.
    begin(&mut bed);
    bed.now += secs(60 + 10);
    assert!(overdue(&bed).len() < 2, "the last one to begin is not");
    bed.now += millis(1);
    assert_eq!(overdue(&bed).len(), 2);
}

#[test]
fn a_probe_that_cannot_begin_is_overdue_after_three_periods_whatever_its_timeout() {
    let mut bed = Bed::with(Limits {
        concurrent: 3,
        ..LIMITS
    });
    add(&mut bed, "tenant", "slow-0", 1, &slow());
    let ran = std::iter::from_fn(|| bed.poll()).count();
    assert_eq!(ran, 1, "the other one has no place");
    bed.now += secs(31);
    let views = bed.manager.list();
    let overdue: Vec<_> = views
        .filter(|view| view.overdue(bed.now).is_some())
        .collect();
    assert_eq!(overdue.len(), 1);
    assert!(!overdue[0].in_flight);
}
