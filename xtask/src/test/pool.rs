//! Runs jobs in parallel. Tests on beds wait most of the time, so more tests than CPUs run at the same time.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::events::Outcome;
use super::idle;
use super::job::{Done, Job};
use super::report::Report;
use crate::workspace::Workspace;

/// Default number of parallel jobs per CPU.
const JOBS_A_PROCESSOR: usize = 3;
/// Number of parallel jobs per CPU while CPUs are idle.
const JOBS_AN_IDLE_PROCESSOR: usize = 6;
/// Share of idle CPU time above which another job starts.
const IDLE: f64 = 0.2;

/// Prefixes of the tests that take longest. These tests start first, so that the run does not end waiting for one of
/// them. Used if there are no times from an earlier run.
const LONG: &[&str] = &[
    "chaos::",
    "cni::many_containers_of_podman_come_and_go",
    "conntrack_differential::",
    "endpoint_restart::",
    "endpoint_kills::",
    "programs",
    "health_policy",
    "health_service",
    "health_mesh",
    "echo::killing",
    "policy_traffic::",
    "slow_peer::",
    "conntrack_churn::",
    "attachment::",
    "direction::",
    "masquerade::",
    "services_ipvs::",
    "services::",
];

/// How many jobs run in parallel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Width {
    /// Number of jobs that always run.
    pub(super) steady: usize,
    /// Maximum number of jobs while CPUs are idle.
    pub(super) most: usize,
}

impl Width {
    /// Default numbers for this machine's CPUs.
    pub(super) fn of_machine() -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        Self {
            steady: cpus * JOBS_A_PROCESSOR,
            most: cpus * JOBS_AN_IDLE_PROCESSOR,
        }
    }

    /// Exactly this number of jobs.
    pub(super) fn exactly(jobs: usize) -> Self {
        Self {
            steady: jobs,
            most: jobs,
        }
    }
}

/// Runs all jobs and prints each test's result as it finishes.
pub(crate) fn run(
    workspace: &Workspace,
    environment: &[String],
    mut jobs: Vec<Job>,
    width: Width,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut times = Times::load(workspace);
    jobs.sort_by_key(|job| std::cmp::Reverse(times.expected(&job.name())));
    let total: usize = jobs.iter().map(|job| job.tests.len()).sum();
    let queue = Mutex::new(VecDeque::from(jobs));
    let turn = Mutex::new(());
    let (sender, results) = channel();
    let mut done = 0;
    thread::scope(|scope| {
        for place in 0..width.most {
            let sender = sender.clone();
            let (queue, turn) = (&queue, &turn);
            let next = move || {
                if place >= width.steady {
                    wait_until_idle(turn, queue);
                }
                lock(queue).pop_front()
            };
            scope.spawn(move || {
                while let Some(job) = next() {
                    let result = job.run(workspace, environment);
                    if sender.send((job, result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        for (job, result) in results {
            let Done { ended, busy } =
                result.unwrap_or_else(|error| job.failed(&format!("{error:#}")));
            report.add_busy(job.name(), busy);
            times.note(job.name(), ended.iter().map(|ended| ended.took).sum());
            let whole_program = job.tests.len() > 1;
            for ended in &ended {
                done += 1;
                let name = job.program.name_of(&ended.test);
                let took = ended.took.as_secs_f64();
                match &ended.outcome {
                    Outcome::Failed(said) => {
                        println!("[{done}/{total}] FAILED {name} ({took:.1} s)\n{said}");
                    }
                    Outcome::Passed if whole_program => {}
                    Outcome::Passed => println!("[{done}/{total}] ok {name} ({took:.1} s)"),
                    Outcome::Ignored => println!("[{done}/{total}] skipped {name}"),
                }
                report.add(name, ended);
            }
            if whole_program {
                println!("[{done}/{total}] {} tests of {}", ended.len(), job.name());
            }
        }
        times.save();
        Ok(())
    })
}

/// Waits until CPUs are idle or no job is left. Only one caller waits at a time, so that the next caller sees the load
/// of the job that this caller starts.
fn wait_until_idle(turn: &Mutex<()>, queue: &Mutex<VecDeque<Job>>) {
    let _turn = lock(turn);
    while !lock(queue).is_empty() && idle::measure() < IDLE {}
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Times of jobs in the last run, by name. They are estimates that only affect the order.
struct Times {
    file: PathBuf,
    seconds: BTreeMap<String, f64>,
}

impl Times {
    fn load(workspace: &Workspace) -> Self {
        let file = workspace.root().join("target/test-times.json");
        let seconds = fs::read(&file)
            .ok()
            .and_then(|json| serde_json::from_slice(&json).ok())
            .unwrap_or_default();
        Self { file, seconds }
    }

    fn expected(&self, job: &str) -> Duration {
        let seconds = self.seconds.get(job).copied().unwrap_or_else(|| {
            LONG.iter()
                .position(|long| job.starts_with(long))
                .map_or(0.0, |place| 100.0 - place as f64)
        });
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }

    fn note(&mut self, job: String, took: Duration) {
        self.seconds.insert(job, took.as_secs_f64());
    }

    fn save(&self) {
        if let Ok(json) = serde_json::to_vec(&self.seconds) {
            // Without the file, the next run merely has worse estimates.
            let _ = fs::write(&self.file, json);
        }
    }
}
