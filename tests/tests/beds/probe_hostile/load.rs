//! Very many concurrent probes of hostile servers: what they leave behind, and how late they end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use health_probe::Outcome;
use health_probe::mechanism::Deadline;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use tests::hostile::Hostile;
use tests::processes::{Held, Side, forget_peak, memory};
use tests::{PATIENCE, is_long, wait_for};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::cases::{CASES, is_timeout};
use super::{SHORT, hostile, runtime};

/// Upper limit for the growth of the prober's memory, in KiB.
const GROWTH_MAX: u64 = 32 * 1024;
/// How long after its deadline all but one probe in a thousand must have ended.
const LATENESS_MAX: Duration = Duration::from_millis(50);

/// State of a TCP socket, from include/net/tcp_states.h in the kernel tree.
const TIME_WAIT: u8 = 6;

/// The amount of load.
#[derive(Clone, Copy)]
struct Amount {
    probes: usize,
    at_once: usize,
    timeout: Duration,
    /// Time between two probes of the same task.
    period: Duration,
}

/// A warm-up before all measurements, which sets up threads, buffers and tables.
const WARM_UP: Amount = Amount {
    probes: 10 * CASES.len(),
    at_once: 50,
    timeout: SHORT,
    period: SHORT,
};
const SMALL: Amount = Amount {
    probes: 20 * CASES.len(),
    at_once: 50,
    timeout: SHORT,
    period: SHORT,
};
const LARGE: Amount = Amount {
    probes: 100_000,
    at_once: 200,
    timeout: Duration::from_millis(100),
    // A saturated machine delays all probes, whatever the prober does.
    period: Duration::from_millis(300),
};

/// Outcome of a probe.
struct Sample {
    case: usize,
    /// How long after its deadline the probe ended, minus the time for which this thread waited for a CPU; `None` if
    /// the probe ended in time.
    late: Option<Duration>,
    is_timeout: bool,
    /// The outcome if it was unexpected.
    odd: Option<Outcome>,
}

async fn probe_all(hostile: &Arc<Hostile>, amount: Amount) -> anyhow::Result<Vec<Sample>> {
    let next = Arc::new(AtomicUsize::new(0));
    let begin = |task: usize| {
        let (hostile, next) = (hostile.clone(), next.clone());
        // Spreads the deadlines over time, as a prober does.
        let first = Instant::now() + amount.period * task as u32 / amount.at_once as u32;
        tokio::spawn(async move {
            let mut ticks = interval_at(first, amount.period);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut samples = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= amount.probes {
                    return samples;
                }
                ticks.tick().await;
                let index = number % CASES.len();
                let case = &CASES[index];
                let deadline = Deadline::after(amount.timeout);
                let outcome = case.probe(&hostile, deadline).await;
                samples.push(Sample {
                    case: index,
                    late: Instant::now().checked_duration_since(deadline.made_up()),
                    is_timeout: is_timeout(&outcome),
                    odd: (!case.expects(&outcome, false)).then_some(outcome),
                });
            }
        })
    };
    let tasks: Vec<_> = (0..amount.at_once).map(begin).collect();
    let mut samples = Vec::with_capacity(amount.probes);
    for task in tasks {
        samples.extend(task.await?);
    }
    Ok(samples)
}

/// Prints how late probes ended. Returns the lateness that at most one probe in a thousand exceeds.
fn report_lateness(samples: &[Sample]) -> Duration {
    let mut late: Vec<_> = samples.iter().filter_map(|sample| sample.late).collect();
    late.sort_unstable();
    let share = |share: f64| {
        let at = (late.len() as f64 * share) as usize;
        late.get(at).or(late.last()).copied().unwrap_or_default()
    };
    println!(
        "{} probes, {} ended after their deadline, by: p50 {:?}, p99 {:?}, p99.9 {:?}, at most {:?}",
        samples.len(),
        late.len(),
        share(0.5),
        share(0.99),
        share(0.999),
        share(1.0)
    );
    for (index, case) in CASES.iter().enumerate() {
        let of_case = || samples.iter().filter(|sample| sample.case == index);
        println!(
            "  {:?} of {:?}: {} probes, {} timed out, at most {:?} late",
            case.way,
            case.behaviour,
            of_case().count(),
            of_case().filter(|sample| sample.is_timeout).count(),
            of_case()
                .filter_map(|sample| sample.late)
                .max()
                .unwrap_or_default()
        );
    }
    share(0.999)
}

/// CPU time used by this process.
fn processor_time() -> anyhow::Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = usage.user_time() + usage.system_time();
    Ok(Duration::from_micros(time.num_microseconds().try_into()?))
}

/// The long form also checks how late the probes end.
#[test]
#[ignore = "needs root"]
fn probes_of_hostile_servers_leave_nothing_behind() -> anyhow::Result<()> {
    let hostile = Arc::new(hostile()?);
    let servers = hostile.ports();
    let runtime = runtime()?;
    let at_rest = Held::now(&servers)?;
    // Servers need a moment to notice that a client has disconnected.
    let rest = || {
        wait_for("nothing to be left of the probes", PATIENCE, || {
            let held = Held::now(&servers)?;
            anyhow::ensure!(held == at_rest, "{held:?} and not {at_rest:?}");
            Ok(Some(()))
        })
    };
    runtime.block_on(probe_all(&hostile, WARM_UP))?;
    rest()?;
    let (before, _) = memory()?;
    forget_peak()?;

    let amount = if is_long() { LARGE } else { SMALL };
    let (begin, busy_before) = (Instant::now(), processor_time()?);
    let samples = runtime.block_on(probe_all(&hostile, amount))?;
    let (took, busy) = (begin.elapsed(), processor_time()? - busy_before);
    let left = Held::now(&servers)?;
    let (_, peak) = memory()?;

    println!(
        "took {took:?}, {busy:?} of a processor; memory grew by {} KiB",
        peak - before
    );
    println!("right after it: {left:?}; before: {at_rest:?}");
    let lateness = report_lateness(&samples);
    let odd: Vec<_> = samples
        .iter()
        .filter(|sample| sample.odd.is_some())
        .collect();
    let first: Vec<_> = odd.iter().take(5).collect();
    let shown: Vec<_> = first
        .iter()
        .map(|sample| (CASES[sample.case], &sample.odd))
        .collect();
    assert!(
        odd.is_empty(),
        "{} are not as expected: {shown:?}",
        odd.len()
    );
    assert_eq!(samples.len(), amount.probes);
    for (index, case) in CASES.iter().enumerate() {
        let mut of_case = samples.iter().filter(|sample| sample.case == index);
        assert!(
            !case.times_out() || of_case.all(|sample| sample.is_timeout),
            "{case:?}"
        );
    }
    assert!(peak - before < GROWTH_MAX, "{} KiB", peak - before);
    // Sockets leave other states soon, but this one would last a minute per probe.
    assert_eq!(left.sockets.get(&(Side::Client, TIME_WAIT)), None);
    rest()?;
    assert!(!is_long() || lateness < LATENESS_MAX, "{lateness:?} late");
    Ok(())
}
