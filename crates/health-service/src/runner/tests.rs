use std::sync::{Arc, Mutex};

use tokio::time::{Instant, sleep};

use super::*;

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

fn intervals(min: u64, retry: u64, max: u64) -> Intervals {
    Intervals {
        min: ms(min * 1000),
        retry: ms(retry * 1000),
        max: ms(max * 1000),
    }
}

/// A runner whose last run ended at 0 and took no time.
fn after_a_run(min: u64, retry: u64, max: u64, is_success: bool) -> Runner {
    let mut runner = Runner::new(intervals(min, retry, max), Duration::ZERO).unwrap();
    runner.trigger().unwrap();
    assert!(runner.poll(Duration::ZERO));
    runner.finished(Duration::ZERO, is_success);
    runner
}

/// Returns when the runner runs if polled every millisecond from `from` to `to`.
fn runs(runner: &mut Runner, from: u64, to: u64) -> Vec<u64> {
    let mut runs = Vec::new();
    for now in from..=to {
        if runner.poll(ms(now)) {
            runner.finished(ms(now), true);
            runs.push(now);
        }
    }
    runs
}

#[test]
fn a_longest_interval_below_the_shortest_is_an_error() {
    let error = Runner::new(intervals(2, 1, 1), Duration::ZERO).unwrap_err();
    let (min, max) = (ms(2000), ms(1000));
    assert_eq!(error, RunnerError::MaxBelowMin { min, max });
    assert!(Runner::new(intervals(1, 5, 1), Duration::ZERO).is_ok());
}

#[test]
fn the_first_run_is_when_it_is_asked_for_or_after_the_longest_interval() {
    let mut runner = Runner::new(intervals(1, 5, 10), ms(0)).unwrap();
    assert_eq!(runner.next_wake(), Some(ms(10_000)));
    assert_eq!(runs(&mut runner, 0, 10_000), [10_000]);
    let mut runner = Runner::new(intervals(1, 5, 10), ms(0)).unwrap();
    assert!(!runner.poll(ms(0)));
    runner.trigger().unwrap();
    assert!(runner.poll(ms(0)));
}

#[test]
fn runs_that_are_asked_for_during_the_cooldown_are_one_run_at_its_end() {
    let mut runner = after_a_run(1, 5, 10, true);
    for now in [1, 500, 999] {
        runner.trigger().unwrap();
        assert!(!runner.poll(ms(now)));
        assert_eq!(runner.next_wake(), Some(ms(1000)));
    }
    assert_eq!(runs(&mut runner, 999, 10_999), [1000]);
    assert_eq!(runs(&mut runner, 11_000, 11_000), [11_000]);
}

#[test]
fn a_run_that_failed_is_made_again_after_the_retry_interval_and_not_at_the_end_of_the_cooldown() {
    let mut runner = after_a_run(1, 5, 10, false);
    assert_eq!(runs(&mut runner, 1, 14_999), [5000]);
    assert_eq!(runs(&mut runner, 15_000, 15_000), [15_000]);
}

#[test]
fn a_run_that_succeeds_cancels_the_retry() {
    let mut runner = after_a_run(1, 5, 10, false);
    assert!(runs(&mut runner, 1, 1999).is_empty());
    runner.trigger().unwrap();
    // This run is at +2 s, so the next is at +12 s, and there is none at +5 s.
    assert_eq!(runs(&mut runner, 2000, 12_000), [2000, 12_000]);
}

#[test]
fn a_run_that_is_asked_for_after_a_failure_waits_for_the_cooldown_and_cancels_the_retry() {
    let mut runner = after_a_run(1, 5, 10, false);
    assert!(!runner.poll(ms(100)));
    runner.trigger().unwrap();
    assert_eq!(runs(&mut runner, 100, 1000), [1000]);
    // Times count from that run: there is none at +5 s or +9 s, but one at +10 s.
    assert!(runs(&mut runner, 1001, 10_999).is_empty());
    assert_eq!(runs(&mut runner, 11_000, 11_000), [11_000]);
}

#[test]
fn a_retry_interval_below_the_shortest_waits_for_that() {
    let mut runner = after_a_run(5, 1, 10, false);
    assert!(runs(&mut runner, 1, 4999).is_empty());
    assert_eq!(runs(&mut runner, 5000, 5000), [5000]);
}

#[test]
fn a_retry_interval_above_the_longest_is_that() {
    let mut runner = after_a_run(1, 60, 10, false);
    assert_eq!(runs(&mut runner, 1, 10_000), [10_000]);
}

#[test]
fn intervals_begin_at_the_end_of_a_run_and_one_asked_for_during_it_is_another() {
    let mut runner = Runner::new(intervals(1, 5, 10), ms(0)).unwrap();
    runner.trigger().unwrap();
    assert!(runner.poll(ms(0)));
    runner.trigger().unwrap();
    assert_eq!(runner.next_wake(), None);
    assert!(!runner.poll(ms(2999)));
    runner.finished(ms(3000), true);
    assert_eq!(runs(&mut runner, 3000, 13_999), [4000]);
    assert_eq!(runs(&mut runner, 14_000, 14_000), [14_000]);
}

#[test]
fn a_runner_that_has_stopped_runs_no_more_and_cannot_be_asked_to() {
    let mut runner = after_a_run(1, 5, 10, true);
    runner.trigger().unwrap();
    runner.stop();
    assert_eq!(runner.trigger(), Err(RunnerError::Stopped));
    assert!(!runner.poll(ms(100_000)));
    runner.finished(ms(100_000), true);
    assert_eq!(runner.next_wake(), None);
}

/// Runs that end as scripted (`None`: with a panic); all later runs succeed.
struct Scripted {
    start: Instant,
    results: std::vec::IntoIter<Option<bool>>,
    /// The times of the runs, in ms.
    runs: Arc<Mutex<Vec<u64>>>,
}

impl Job for Scripted {
    type Error = &'static str;

    async fn run(&mut self) -> Result<(), &'static str> {
        let at = self.start.elapsed().as_millis() as u64;
        self.runs.lock().unwrap().push(at);
        match self.results.next().unwrap_or(Some(true)) {
            Some(true) => Ok(()),
            Some(false) => Err("no"),
            None => panic!("a run that panics"),
        }
    }
}

/// Returns the times at which a driver ran, in ms.
async fn driven(results: Vec<Option<bool>>, triggers: &[u64], until: u64) -> Vec<u64> {
    let (driver, trigger) = Driver::new(intervals(1, 5, 10)).unwrap();
    let start = Instant::now();
    let runs = Arc::default();
    let asking = async {
        for at in triggers {
            tokio::time::sleep_until(start + ms(*at)).await;
            trigger.trigger().unwrap();
        }
        std::future::pending::<()>().await;
    };
    let job = Scripted {
        start,
        results: results.into_iter(),
        runs: Arc::clone(&runs),
    };
    tokio::select! {
        () = driver.drive(job, sleep(ms(until))) => {}
        () = asking => {}
    }
    assert_eq!(trigger.trigger(), Err(RunnerError::Stopped));
    runs.lock().unwrap().clone()
}

#[tokio::test(start_paused = true)]
async fn a_driver_runs_when_asked_and_at_least_once_in_the_longest_interval() {
    assert_eq!(driven(vec![], &[], 25_000).await, [10_000, 20_000]);
    let asked = [0, 300, 301, 5000];
    assert_eq!(driven(vec![], &asked, 14_000).await, [0, 1000, 5000]);
}

#[tokio::test(start_paused = true)]
async fn a_driver_makes_a_run_again_that_failed_or_panicked() {
    let failing = vec![Some(false), None, Some(false), Some(true)];
    assert_eq!(
        driven(failing, &[0], 26_000).await,
        [0, 5000, 10_000, 15_000, 25_000]
    );
}
