//! Tests of when probes are made.

use std::collections::HashMap;

use super::*;

fn app(kind: ProbeType, probe: Probe) -> PodSpec {
    pod("a", vec![container("app", Role::Regular, &[(kind, probe)])])
}

/// A pod with one probe of a running container.
fn bed(kind: ProbeType, probe: Probe) -> Bed {
    let mut bed = Bed::new();
    bed.add(app(kind, probe));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed
}

fn many(bed: &mut Bed, pods: usize, probe: &Probe) {
    for number in 0..pods {
        let uid = number.to_string();
        let app = container("app", Role::Regular, &[(Liveness, probe.clone())]);
        bed.add(PodSpec {
            namespace: uid.clone(),
            ..pod(&uid, vec![app])
        });
        bed.set_status(&uid, status(vec![running("app", &uid)]));
    }
}

fn times(runs: &[(Duration, Arc<str>, ProbeType)]) -> Vec<u64> {
    runs.iter()
        .map(|(at, _, _)| at.as_millis() as u64)
        .collect()
}

#[test]
fn the_first_probe_is_made_at_once_and_then_one_a_period() {
    for kind in [Readiness, Liveness] {
        let mut bed = bed(kind, probe());
        let runs = bed.run_until(secs(35), |_| success());
        assert_eq!(times(&runs), [0, 10_000, 20_000, 30_000]);
    }
    let mut bed = bed(
        Liveness,
        Probe {
            period: millis(50),
            ..probe()
        },
    );
    assert_eq!(bed.run_until(millis(9_999), |_| success()).len(), 200);
}

#[test]
fn a_slow_probe_makes_several_ticks_one() {
    let mut bed = bed(Liveness, probe());
    let start = bed.poll().unwrap();
    bed.now = secs(25);
    assert_eq!(bed.poll(), None, "one at a time");
    bed.finish(start.worker, success());
    let runs = bed.run_until(secs(45), |_| success());
    assert_eq!(times(&runs), [25_000, 30_000, 40_000]);
}

#[test]
fn what_is_not_ready_is_probed_when_its_status_is_reported_and_a_period_later() {
    let mut bed = bed(Readiness, probe());
    bed.run_until(secs(3), |_| failure());
    bed.set_status("a", status(vec![running("app", "id-1")]));
    let runs = bed.run_until(secs(15), |_| failure());
    assert_eq!(times(&runs), [3_000, 13_000]);
    // A run that is under way satisfies the request.
    bed.now = secs(23);
    let start = bed.poll().unwrap();
    bed.set_status("a", status(vec![running("app", "id-1")]));
    bed.finish(start.worker, success());
    assert_eq!(times(&bed.run_until(secs(40), |_| success())), [33_000]);
    // A ready container is not probed immediately.
    bed.set_status("a", status(vec![running("app", "id-1")]));
    assert_eq!(times(&bed.run_until(secs(45), |_| success())), [43_000]);
}

#[test]
fn a_fast_period_holds_until_ready_and_until_started() {
    let fast = Probe {
        period_until_ready: Some(millis(100)),
        failure_threshold: 1,
        ..probe()
    };
    let mut bed = bed(Readiness, fast.clone());
    let mut left = 3;
    let mut answer = |_: &Start| {
        left -= 1;
        if left >= 0 { failure() } else { success() }
    };
    let runs = bed.run_until(secs(15), &mut answer);
    assert_eq!(times(&runs), [0, 100, 200, 300, 10_300]);
    // The container is no longer ready: it is probed again immediately because of its status, and then at the short
    // period.
    let runs = bed.run_until(millis(20_500), |_| failure());
    assert_eq!(times(&runs), [20_300, 20_300, 20_400, 20_500]);

    let slow_start = Probe {
        failure_threshold: 100,
        ..fast
    };
    let probes = [(Startup, slow_start), (Liveness, probe())];
    let mut bed = Bed::new();
    bed.add(pod("a", vec![container("app", Role::Regular, &probes)]));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    let runs = bed.run_until(millis(2_050), |_| failure());
    assert_eq!(runs.len(), 21);
    let runs = bed.run_until(secs(60), |_| success());
    let startups = runs.iter().filter(|(_, _, kind)| *kind == Startup);
    assert_eq!(startups.count(), 1);
}

#[test]
fn a_changed_probe_is_used_from_now_on() {
    let long = Probe {
        period: secs(3600),
        ..probe()
    };
    let mut bed = bed(Liveness, long);
    bed.run_until(secs(5), |_| success());
    bed.add(app(Liveness, probe()));
    let runs = bed.run_until(secs(30), |_| success());
    assert_eq!(times(&runs), [5_000, 15_000, 25_000]);
    bed.add(app(Liveness, probe()));
    assert_eq!(times(&bed.run_until(secs(40), |_| success())), [35_000]);
}

#[test]
fn an_attempt_after_an_error_is_made_at_once() {
    let mut bed = bed(Liveness, probe());
    let mut start = bed.poll().unwrap();
    for attempt in 2..=3 {
        bed.now += millis(700);
        assert_eq!(bed.poll(), None);
        let Finished::Again(again) = bed.finish(start.worker, Report::Outcome(error())) else {
            panic!("no attempt {attempt}");
        };
        assert_eq!((again.attempt, again.due), (attempt, bed.now));
        start = again;
    }
    let Finished::Done(judgement) = bed.finish(start.worker, Report::Outcome(error())) else {
        panic!("more than three attempts");
    };
    assert_eq!(judgement.counted, Counted::Errored);
    assert_eq!(times(&bed.run_until(secs(15), |_| success())), [10_000]);
}

#[test]
fn the_rate_is_kept_and_probes_stay_spread_by_it() {
    let mut bed = Bed::with(Limits {
        per_second: 100,
        concurrent: 1000,
        pod_per_second: 1_000_000,
    });
    many(&mut bed, 500, &probe());
    assert_eq!(bed.manager.queued(), 0);
    let mut late = Vec::new();
    let runs = bed.run_until(millis(9_999), |_| success());
    assert_eq!(runs.len(), 500);
    for second in 0..5 {
        let from = secs(second);
        let within = runs
            .iter()
            .filter(|(at, _, _)| (from..from + secs(1)).contains(at))
            .count();
        assert!((90..=110).contains(&within), "{within} in second {second}");
    }
    // Ticks are as far apart as the first probes were: no probe is delayed any more.
    while let Some(now) = bed.manager.next_wake().filter(|now| *now < secs(20)) {
        bed.now = bed.now.max(now);
        while let Some(start) = bed.poll() {
            late.push(bed.now - start.due);
            bed.finish(start.worker, success());
        }
    }
    assert_eq!(late.len(), 500);
    assert!(late.iter().all(|late| *late <= millis(2)), "{late:?}");
}

#[test]
fn probes_that_begin_together_are_spread_from_their_second_run_on() {
    let fast = Probe {
        period: millis(100),
        ..probe()
    };
    let limits = Limits {
        per_second: 1000,
        concurrent: 1000,
        pod_per_second: 1_000_000,
    };
    let mut bed = Bed::with(limits);
    many(&mut bed, 40, &fast);
    let runs = bed.run_until(millis(239), |_| success());
    let expected: Vec<u64> = [0; 40]
        .into_iter()
        .chain(100..140)
        .chain(200..240)
        .collect();
    assert_eq!(times(&runs), expected);

    // A changed period does not turn one period into two.
    let faster = Probe {
        period: millis(10),
        ..probe()
    };
    let mut bed = Bed::with(limits);
    many(&mut bed, 10, &faster);
    let runs = bed.run_until(millis(19), |_| success());
    let expected: Vec<u64> = [0; 10].into_iter().chain(10..20).collect();
    assert_eq!(times(&runs), expected);
}

#[test]
fn only_so_many_run_at_a_time_and_all_get_their_turn() {
    let mut bed = Bed::with(Limits {
        per_second: 1_000_000,
        concurrent: 5,
        pod_per_second: 1_000_000,
    });
    many(&mut bed, 20, &probe());
    let mut under_way: Vec<Start> = Vec::new();
    let mut count: HashMap<Arc<str>, u32> = HashMap::new();
    // Each run takes 5 s, so 10 runs would fit in a period.
    for step in 0..40 {
        bed.now = secs(step * 5);
        for start in under_way.drain(..) {
            bed.finish(start.worker, success());
        }
        while let Some(start) = bed.poll() {
            *count.entry(start.pod.uid.clone()).or_default() += 1;
            under_way.push(start);
        }
        assert_eq!(under_way.len(), 5);
        assert_eq!(bed.manager.in_flight(), 5);
        assert!(bed.manager.queued() <= 15, "none waits twice");
    }
    assert_eq!(count.len(), 20);
    assert!(
        count.values().all(|count| (9..=11).contains(count)),
        "{count:?}"
    );
}

#[test]
fn a_late_prober_is_distinguished() {
    let mut bed = bed(Liveness, thresholds(1, 1));
    bed.run_until(secs(5), |_| success());
    bed.now = millis(14_300);
    let start = bed.poll().unwrap();
    assert_eq!(bed.now - start.due, millis(4_300));
    let Finished::Done(judgement) = bed.finish(start.worker, Report::NotSent) else {
        panic!("the run is over");
    };
    assert_eq!(
        (judgement.counted, judgement.event),
        (Counted::NotSent, None)
    );
    let view = bed.manager.list().next().unwrap();
    assert_eq!(view.result, Some(Success));
    assert_eq!(view.next, Some(secs(20)));
}

#[test]
fn first_probes_are_delayed_only_after_a_restart_of_the_agent() {
    let slow = Probe {
        period: secs(60),
        ..probe()
    };
    let first = |snapshot: Option<Snapshot>, late: Duration| {
        let limits = Limits {
            per_second: 1_000_000,
            concurrent: 1_000,
            pod_per_second: 1_000_000,
        };
        let mut bed = Bed::after(limits, snapshot);
        bed.now = late;
        many(&mut bed, 200, &slow);
        let runs = bed.run_until(late + secs(59), |_| success());
        runs.into_iter()
            .map(|(at, uid, _)| (uid, at - late))
            .collect::<HashMap<_, _>>()
    };
    let zero = |firsts: HashMap<Arc<str>, Duration>| firsts.values().all(|at| at.is_zero());
    assert!(zero(first(None, Duration::ZERO)));
    let delayed = first(Some(Snapshot::default()), millis(5));
    assert_eq!(delayed.len(), 200);
    assert!(delayed.values().all(|at| *at <= JITTER_MAX));
    let early = delayed.values().filter(|at| **at < JITTER_MAX / 2).count();
    assert!((60..140).contains(&early), "{early}");
    assert_eq!(delayed, first(Some(Snapshot::default()), millis(5)));
    assert!(zero(first(Some(Snapshot::default()), secs(61))));
}
