//! The tail of round-trip times while other work at normal priority keeps all CPUs busy.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::line::{FAR, Line};
use super::micros;
use super::prober::{Answer, Prober};
use crate::bench::requests::quantile;
use crate::bench::{Figure, Target};
use crate::process::print_line;

/// Number of rounds, each first with idle and then with busy CPUs.
const ROUNDS: u32 = 5;
/// Probes per round.
const PROBES: usize = 2_000;
const GAP: Duration = Duration::from_millis(1);
const TAIL_RATIO: f64 = 2.0;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let line = Line::direct()?;
    let mut prober = Prober::new(&line)?;
    // Warms up: resolves hardware addresses, creates rows, loads code.
    prober.probe_all(&[FAR; 1_000], GAP)?;
    let (mut idle, mut busy) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        idle.extend(prober.probe_all(&[FAR; PROBES], GAP)?);
        let burners = Burners::start()?;
        busy.extend(prober.probe_all(&[FAR; PROBES], GAP)?);
        drop(burners);
    }
    let mut figures = Vec::new();
    type Time = fn(&Answer) -> Duration;
    let sides: [(&str, Time, Option<Target>); 2] = [
        (
            "the kernel's programs",
            |answer| answer.kernel,
            Some(Target::RatioAtMost(TAIL_RATIO)),
        ),
        (
            "the same probes timed in user space",
            |answer| answer.user,
            None,
        ),
    ];
    for (side, time, target) in sides {
        let sorted = |answers: &[Answer]| {
            let mut times: Vec<Duration> = answers.iter().map(time).collect();
            times.sort_unstable();
            times
        };
        let (idle, busy) = (sorted(&idle), sorted(&busy));
        for (name, part, target) in [("p99", 0.99, target), ("p50", 0.5, None)] {
            figures.push(Figure {
                name: format!("CPUs busy, {side}: round trip, {name} (other: CPUs idle)"),
                unit: "us",
                ours: micros(quantile(&busy, part)?),
                other: Some(micros(quantile(&idle, part)?)),
                target,
            });
        }
    }
    Ok(figures)
}

/// A spinning thread on each CPU. The threads stop on drop.
struct Burners {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Burners {
    fn start() -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut burners = Self {
            stop,
            threads: Vec::new(),
        };
        let allowed = sched_getaffinity(Pid::from_raw(0))?;
        for cpu in 0..CpuSet::count() {
            if !allowed.is_set(cpu)? {
                continue;
            }
            let mut alone = CpuSet::new();
            alone.set(cpu)?;
            let stop = burners.stop.clone();
            burners.threads.push(thread::spawn(move || {
                if let Err(errno) = sched_setaffinity(Pid::from_raw(0), &alone) {
                    print_line(format_args!("bench: cannot keep a CPU busy: {errno}"));
                }
                while !stop.load(Ordering::Relaxed) {
                    spin_loop();
                }
            }));
        }
        Ok(burners)
    }
}

impl Drop for Burners {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                print_line("bench: a thread that kept a CPU busy panicked");
            }
        }
    }
}
