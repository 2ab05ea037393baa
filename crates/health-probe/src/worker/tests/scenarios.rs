//! The kubelet's scenarios for a worker (W), for judging a result (P) and for the cache (R).

use super::*;

/// A worker and its inputs.
struct Solo {
    worker: Worker,
    status: Option<PodStatus>,
    policy: RestartPolicy,
    now: Duration,
    news: Vec<(Arc<str>, ProbeResult)>,
}

impl Solo {
    fn new(kind: ProbeType, probe: Probe) -> Self {
        let mut status = status(vec![running("app", "id-1")]);
        // Lets the worker past the startup gate, for types that have one.
        status.containers[0].started = Some(kind != Startup);
        Self {
            worker: Worker::new(kind, Role::Regular, Arc::new(probe), None),
            status: Some(status),
            policy: RestartPolicy::Always,
            now: Duration::ZERO,
            news: Vec::new(),
        }
    }

    fn container(&mut self) -> &mut ContainerStatus {
        &mut self.status.as_mut().unwrap().containers[0]
    }

    fn decide(&mut self) -> Decision {
        let situation = Situation {
            status: self.status.as_ref(),
            container: "app",
            restart_policy: self.policy,
            now: self.now,
            wall: agent_start() + jiff::SignedDuration::try_from(self.now).unwrap(),
            agent_start: agent_start(),
        };
        self.worker.decide(&situation, &mut self.news)
    }

    /// Decides and, if that starts a run, finishes it with `report`. Returns the decision.
    fn tick(&mut self, report: &Report) -> Decision {
        let decision = self.decide();
        if decision == Decision::Run {
            while let Conclusion::Again { .. } = self.worker.conclude(report, &mut self.news) {}
        }
        self.now += secs(10);
        decision
    }

    /// Like [`Self::tick`], but returns the cached result and the count afterwards.
    fn runs_to(&mut self, report: &Report) -> (ProbeResult, u32) {
        assert_eq!(self.tick(report), Decision::Run);
        (self.result().unwrap(), self.worker.run().1)
    }

    fn result(&self) -> Option<ProbeResult> {
        self.worker.result()
    }
}

fn all() -> [Solo; 3] {
    ProbeType::ALL.map(|kind| Solo::new(kind, probe()))
}

#[test]
fn w1_without_a_status_nothing_is_done() {
    for mut solo in all() {
        solo.status = None;
        assert_eq!(solo.tick(&success()), Decision::Wait(Waiting::NoStatus));
        assert_eq!(solo.result(), None);
    }
}

#[test]
fn w2_a_pod_that_has_ended_ends_its_workers() {
    for phase in [Phase::Failed, Phase::Succeeded] {
        for mut solo in all() {
            solo.status.as_mut().unwrap().phase = phase;
            assert_eq!(solo.tick(&success()), Decision::Exit(Exit::PodEnded));
            assert_eq!(solo.result(), None);
        }
    }
}

#[test]
fn w3_a_pod_that_is_deleted_is_not_disturbed_but_its_readiness_is_reported() {
    for mut solo in all() {
        solo.status.as_mut().unwrap().deleting = true;
        let expected = match solo.worker.kind() {
            Readiness => Decision::Run,
            Liveness | Startup => Decision::Exit(Exit::PodDeleting),
        };
        assert_eq!(solo.tick(&success()), expected);
        assert_eq!(solo.result(), Some(Success));
    }
}

#[test]
fn w4_a_status_of_another_container_is_none() {
    for mut solo in all() {
        solo.container().name = "other".into();
        assert_eq!(solo.tick(&success()), Decision::Wait(Waiting::NoContainer));
        assert_eq!(solo.result(), None);
        solo.container().name = "app".into();
        for id in [None, Some("".into())] {
            solo.container().id = id;
            assert_eq!(solo.tick(&success()), Decision::Wait(Waiting::NoContainer));
        }
        assert_eq!(solo.result(), None);
    }
}

#[test]
fn w5_a_container_that_waits_has_failed_at_once() {
    for mut solo in all() {
        solo.container().state = ContainerState::Waiting;
        assert_eq!(solo.tick(&success()), Decision::Wait(Waiting::NotRunning));
        assert_eq!(solo.result(), Some(Failure));
    }
}

#[test]
fn w6_a_container_that_has_ended_for_good_ends_its_workers() {
    for (policy, role, exit_code, expected) in [
        (
            RestartPolicy::Never,
            Role::Regular,
            0,
            Decision::Exit(Exit::ContainerEnded),
        ),
        (
            RestartPolicy::Never,
            Role::Regular,
            1,
            Decision::Exit(Exit::ContainerEnded),
        ),
        (
            RestartPolicy::Never,
            Role::Sidecar,
            0,
            Decision::Wait(Waiting::NotRunning),
        ),
        (
            RestartPolicy::OnFailure,
            Role::Regular,
            0,
            Decision::Wait(Waiting::NotRunning),
        ),
        (
            RestartPolicy::Always,
            Role::Regular,
            1,
            Decision::Wait(Waiting::NotRunning),
        ),
    ] {
        for kind in ProbeType::ALL {
            let mut solo = Solo::new(kind, probe());
            solo.worker = Worker::new(kind, role, Arc::new(probe()), None);
            solo.policy = policy;
            solo.container().state = ContainerState::Terminated { exit_code };
            assert_eq!(solo.tick(&success()), expected);
            assert_eq!(solo.result(), Some(Failure));
        }
    }
}

#[test]
fn w7_a_container_that_is_well_is_so() {
    for mut solo in all() {
        assert_eq!(solo.tick(&success()), Decision::Run);
        assert_eq!(solo.result(), Some(Success));
    }
}

#[test]
fn w8_a_negative_initial_delay_is_none() {
    for kind in ProbeType::ALL {
        let initial_delay_seconds = -100;
        let mut solo = Solo::new(
            kind,
            Probe {
                initial_delay_seconds,
                ..probe()
            },
        );
        assert_eq!(solo.tick(&success()), Decision::Run);
        assert_eq!(solo.result(), Some(Success));
    }
}

fn delayed(kind: ProbeType) -> Solo {
    let initial_delay_seconds = 10;
    let mut solo = Solo::new(
        kind,
        Probe {
            initial_delay_seconds,
            ..probe()
        },
    );
    solo.now = secs(100);
    solo
}

#[test]
fn w9_an_initial_delay_is_waited_for_from_the_start_of_the_container() {
    for (kind, result) in [
        (Liveness, Success),
        (Readiness, Failure),
        (Startup, Unknown),
    ] {
        let mut solo = delayed(kind);
        let started_at = agent_start() + jiff::SignedDuration::from_secs(100);
        solo.container().state = ContainerState::Running {
            started_at: Some(started_at),
        };
        for now in [millis(100_000), millis(109_999)] {
            solo.now = now;
            let decision = solo.tick(&failure());
            assert_eq!(decision, Decision::Wait(Waiting::InitialDelay));
            assert_eq!(solo.result(), Some(result));
        }
        solo.now = millis(110_000);
        assert_eq!(solo.tick(&success()), Decision::Run);
    }
}

#[test]
fn w10_an_initial_delay_that_is_over_is_none() {
    for kind in ProbeType::ALL {
        let mut solo = delayed(kind);
        assert_eq!(solo.tick(&success()), Decision::Run);
        assert_eq!(solo.result(), Some(Success));
    }
}

#[test]
fn w11_readiness_fails_at_its_third_failure_and_recovers_at_once() {
    let mut solo = Solo::new(Readiness, thresholds(1, 3));
    for _ in 0..2 {
        for run in 1..=3 {
            assert_eq!(solo.runs_to(&success()), (Success, run));
        }
        assert_eq!(solo.runs_to(&failure()), (Success, 1));
        assert_eq!(solo.runs_to(&failure()), (Success, 2));
        assert_eq!(solo.runs_to(&failure()), (Failure, 3));
        assert_eq!(solo.runs_to(&failure()), (Failure, 4));
    }
}

#[test]
fn w12_readiness_recovers_at_its_third_success_and_fails_at_once() {
    let mut solo = Solo::new(Readiness, thresholds(3, 1));
    for _ in 0..2 {
        assert_eq!(solo.runs_to(&success()), (Failure, 1));
        assert_eq!(solo.runs_to(&success()), (Failure, 2));
        assert_eq!(solo.runs_to(&success()), (Success, 3));
        assert_eq!(solo.runs_to(&success()), (Success, 4));
        assert_eq!(solo.runs_to(&failure()), (Failure, 1));
    }
}

#[test]
fn w13_startup_that_succeeds_is_on_hold() {
    let mut solo = Solo::new(Startup, thresholds(1, 3));
    assert_eq!(solo.runs_to(&success()), (Success, 0));
    assert!(solo.worker.is_on_hold());
    assert_eq!(solo.tick(&failure()), Decision::Wait(Waiting::OnHold));
    assert_eq!(solo.result(), Some(Success));
}

#[test]
fn w14_startup_that_fails_for_long_enough_is_on_hold() {
    let mut solo = Solo::new(Startup, thresholds(1, 3));
    assert_eq!(solo.runs_to(&failure()), (Unknown, 1));
    assert_eq!(solo.runs_to(&failure()), (Unknown, 2));
    assert_eq!(solo.runs_to(&failure()), (Failure, 0));
    assert!(solo.worker.is_on_hold());
}

#[test]
fn w15_a_worker_that_is_stopped_often_goes_once() {
    for is_in_flight in [false, true] {
        let mut bed = Bed::new();
        let app = container("app", Role::Regular, &[(Liveness, probe())]);
        bed.add(pod("a", vec![app]));
        bed.set_status("a", status(vec![running("app", "id-1")]));
        let start = bed.poll().unwrap();
        if !is_in_flight {
            bed.finish(start.worker, success());
        }
        for _ in 0..10 {
            bed.manager.remove_pod("a");
        }
        assert_eq!(bed.workers("a"), []);
        assert_eq!(bed.manager.in_flight(), usize::from(is_in_flight));
        bed.manager.take_updates();
        assert_eq!(bed.finish(start.worker, failure()), Finished::Dropped);
        assert_eq!(bed.manager.in_flight(), 0);
        assert_eq!(bed.manager.take_updates(), []);
        assert_eq!(bed.manager.next_wake(), None);
        assert!(bed.manager.snapshot(bed.now).workers.is_empty());
    }
}

#[test]
fn w16_a_failure_holds_until_there_is_a_new_container() {
    for kind in [Liveness, Startup] {
        let mut solo = Solo::new(kind, thresholds(1, 1));
        assert_eq!(solo.runs_to(&failure()), (Failure, 0));
        for _ in 0..3 {
            assert_eq!(solo.tick(&success()), Decision::Wait(Waiting::OnHold));
            assert_eq!(solo.result(), Some(Failure));
        }
        solo.container().id = Some("id-2".into());
        let (result, _) = solo.runs_to(&success());
        assert_eq!(result, Success);
        assert_eq!(solo.worker.is_on_hold(), kind == Startup);
        assert_eq!(solo.worker.container_id().map(|id| &**id), Some("id-2"));
    }
}

#[test]
fn w17_liveness_counts_failures_anew_after_a_success() {
    let mut solo = Solo::new(Liveness, thresholds(1, 3));
    assert_eq!(solo.runs_to(&success()), (Success, 1));
    assert_eq!(solo.runs_to(&failure()), (Success, 1));
    assert_eq!(solo.runs_to(&failure()), (Success, 2));
    assert_eq!(solo.runs_to(&failure()), (Failure, 0));
    assert!(solo.worker.is_on_hold());
}

#[test]
fn w18_startup_fails_at_its_third_failure() {
    let mut solo = Solo::new(Startup, thresholds(1, 3));
    solo.container().started = None;
    assert_eq!(solo.runs_to(&failure()), (Unknown, 1));
    assert_eq!(solo.runs_to(&failure()), (Unknown, 2));
    assert_eq!(solo.runs_to(&failure()), (Failure, 0));
}

#[test]
fn w19_liveness_waits_for_the_start() {
    for started in [None, Some(false)] {
        for (kind, initial) in [(Liveness, Success), (Readiness, Failure)] {
            let mut solo = Solo::new(kind, thresholds(1, 1));
            solo.container().started = started;
            let waits = Decision::Wait(Waiting::NotStarted);
            assert_eq!(solo.tick(&failure()), waits);
            assert_eq!(solo.tick(&success()), waits);
            assert_eq!(solo.result(), Some(initial));
            solo.container().started = Some(true);
            let (result, _) = solo.runs_to(&failure());
            assert_eq!(result, Failure);
        }
    }
}

#[test]
fn w20_startup_is_done_once_the_container_has_started() {
    let mut solo = Solo::new(Startup, thresholds(1, 2));
    assert_eq!(solo.runs_to(&failure()), (Unknown, 1));
    assert_eq!(solo.runs_to(&success()), (Success, 0));
    solo.container().started = Some(true);
    for _ in 0..3 {
        assert_eq!(solo.tick(&failure()), Decision::Wait(Waiting::OnHold));
        assert_eq!(solo.result(), Some(Success));
    }
    // The gate by itself also holds the worker back.
    let mut solo = Solo::new(Startup, thresholds(1, 2));
    solo.container().started = Some(true);
    assert_eq!(solo.tick(&failure()), Decision::Wait(Waiting::Started));
}

#[test]
fn counts_begin_anew_with_each_container() {
    let mut solo = Solo::new(Liveness, thresholds(1, 3));
    solo.runs_to(&failure());
    assert_eq!(solo.runs_to(&failure()), (Success, 2));
    // The container exited by itself.
    solo.container().id = Some("id-2".into());
    assert_eq!(solo.runs_to(&failure()), (Success, 1));
}

#[test]
fn a_step_of_the_clock_neither_ends_nor_prolongs_an_initial_delay() {
    for step in [-3600, 3600] {
        let mut solo = delayed(Readiness);
        solo.now = Duration::ZERO;
        assert_eq!(solo.decide(), Decision::Wait(Waiting::InitialDelay));
        for (now, decision) in [
            (9, Decision::Wait(Waiting::InitialDelay)),
            (10, Decision::Run),
        ] {
            let situation = Situation {
                status: solo.status.as_ref(),
                container: "app",
                restart_policy: RestartPolicy::Always,
                now: secs(now),
                wall: agent_start() + jiff::SignedDuration::from_secs(step),
                agent_start: agent_start(),
            };
            assert_eq!(solo.worker.decide(&situation, &mut solo.news), decision);
        }
    }
}

#[test]
fn an_error_is_tried_three_times_and_concludes_nothing() {
    let mut solo = Solo::new(Liveness, thresholds(1, 1));
    assert_eq!(solo.decide(), Decision::Run);
    let errored = Report::Outcome(error());
    let mut attempts = Vec::new();
    let judgement = loop {
        match solo.worker.conclude(&errored, &mut solo.news) {
            Conclusion::Again { attempt } => attempts.push(attempt),
            Conclusion::Done(judgement) => break judgement,
        }
    };
    assert_eq!(attempts, [2, 3]);
    assert_eq!(judgement.counted, Counted::Errored);
    assert_eq!(judgement.result, None);
    assert_eq!(solo.result(), Some(Success));
    assert_eq!(solo.worker.run(), (None, 0));
    // The next run has three attempts again, and a failure without an error is conclusive.
    assert_eq!(solo.decide(), Decision::Run);
    let again = solo.worker.conclude(&errored, &mut solo.news);
    assert_eq!(again, Conclusion::Again { attempt: 2 });
    let done = solo.worker.conclude(&failure(), &mut solo.news);
    assert!(matches!(done, Conclusion::Done(_)));
    assert_eq!(solo.result(), Some(Failure));
}

#[test]
fn a_run_that_was_not_sent_is_no_failure() {
    let mut solo = Solo::new(Liveness, thresholds(1, 1));
    for _ in 0..5 {
        assert_eq!(solo.tick(&Report::NotSent), Decision::Run);
    }
    assert_eq!(solo.result(), Some(Success));
    assert_eq!(solo.worker.run(), (None, 0));
}

#[test]
fn p3_no_probe_is_well_and_no_target_is_an_error() {
    // A container without probes has no worker, and is ready.
    let mut bed = Bed::new();
    bed.add(pod("a", vec![container("app", Role::Regular, &[])]));
    bed.set_status("a", status(vec![running("app", "id-1")]));
    assert_eq!(bed.reported("a"), (Some(true), true));
    // A probe of a pod without an address ends in an error, and no conclusion is drawn.
    let nowhere = PodSpec {
        ips: Vec::new(),
        ..pod("a", vec![container("app", Role::Regular, &[])])
    };
    let probe = probe();
    let target = probe.target(&nowhere, &nowhere.containers[0]);
    let judgement = judge(Readiness, &Outcome::from(target.unwrap_err()));
    assert_eq!(judgement.result, None);
    let event = judgement.event.unwrap();
    assert_eq!(
        event.message,
        "Readiness probe errored and resulted in unknown state: the pod has no address yet"
    );
}

#[test]
fn p4_results_without_an_error_are_success_or_failure() {
    for (raw, result, counted) in [
        (RawResult::Failure, Failure, Counted::Failed),
        (RawResult::Success, Success, Counted::Successful),
        (RawResult::Warning, Success, Counted::Successful),
        (RawResult::Unknown, Failure, Counted::Failed),
    ] {
        for kind in ProbeType::ALL {
            let judgement = judge(kind, &outcome(raw));
            assert_eq!(judgement.result, Some(result));
            assert_eq!(judgement.counted, counted);
        }
    }
}

#[test]
fn p5_an_error_concludes_nothing_and_no_other_type_exists() {
    for result in [RawResult::Unknown, RawResult::Failure, RawResult::Success] {
        let errored = Outcome { result, ..error() };
        let judgement = judge(Startup, &errored);
        assert_eq!(judgement.result, None);
        assert_eq!(judgement.counted, Counted::Errored);
    }
    assert!("bogus".parse::<ProbeType>().is_err());
    assert!("".parse::<ProbeType>().is_err());
}

#[test]
fn p8_events_say_which_probe_came_to_what() {
    for (kind, title) in [
        (Startup, "Startup"),
        (Readiness, "Readiness"),
        (Liveness, "Liveness"),
    ] {
        let event = |outcome| judge(kind, &outcome).event;
        let reported = |reason, message: String| Some(Event { reason, message });
        assert_eq!(
            event(outcome(RawResult::Warning)),
            reported("ProbeWarning", format!("{title} probe warning: a message"))
        );
        assert_eq!(
            event(outcome(RawResult::Failure)),
            reported("Unhealthy", format!("{title} probe failed: a message"))
        );
        let errored = format!("{title} probe errored and resulted in unknown state: a message");
        assert_eq!(event(error()), reported("Unhealthy", errored));
        assert_eq!(event(outcome(RawResult::Success)), None);
        assert_eq!(event(outcome(RawResult::Unknown)), None);
    }
}

#[test]
fn r1_only_new_and_changed_results_are_reported() {
    let mut cache = Cache::default();
    let (one, two): (Arc<str>, Arc<str>) = ("id-1".into(), "id-2".into());
    assert!(cache.set(&one, Success));
    assert!(!cache.set(&one, Success));
    assert!(cache.set(&one, Failure));
    assert!(cache.set(&two, Failure));
    assert_eq!(
        (cache.get("id-1"), cache.get("id-2")),
        (None, Some(Failure))
    );
    cache.remove();
    assert_eq!(cache.get("id-2"), None);
    assert!(cache.set(&two, Failure));
    // The same applies to a worker.
    let mut solo = Solo::new(Readiness, thresholds(1, 1));
    for report in [success(), success(), failure(), failure()] {
        solo.tick(&report);
    }
    let results: Vec<_> = solo.news.iter().map(|(_, result)| *result).collect();
    assert_eq!(results, [Failure, Success, Failure]);
}
