//! How soon faults and recoveries of peers are reported, how they are diagnosed, and which reports are false: on a bed
//! of real agents, one of which is observed from outside.
//!
//! The time of a failure runs from the first lost probe, as captured on the observer's uplink, until the observer's
//! status shows the target as unreachable. The time of a recovery runs from the first reply until the status shows the
//! target as reachable. Of the targets that a fault breaks, the slowest counts. The time of a diagnosis runs from the
//! first lost probe of any of these targets.

mod calm;
mod capture;
mod fault;
mod watch;

use std::thread;
use std::time::Duration;

use anyhow::Context as _;

use self::calm::Falsehoods;
use self::capture::Capture;
use self::fault::Fault;
use self::watch::{Place, Story, Watch, clock};
use super::requests::quantile;
use super::{Figure, Options, Report, Target};
use crate::process::print_line;
use crate::{Bed, Node, wait_for};

/// The first node observes; faults happen to the next ones, in parallel. The other nodes stay healthy: an agent that
/// loses most of its peers blames itself.
const NODES: u8 = 8;
const VICTIMS: usize = 4;
/// Time between two probes of a target. Short, so that many faults take little time. Measurements start at a lost
/// probe, so they do not depend on this interval.
const PROBE_INTERVAL_S: u32 = 1;
/// Pause between requests for the observer's status. Each figure includes one pause.
const PAUSE: Duration = Duration::from_millis(10);

const FAULTS: u32 = 50;
const LOSS_MINUTES: u32 = 10;
const LOSS_PERCENT: u32 = 2;
const LOAD_TIME: Duration = Duration::from_secs(120);

/// How long to wait for a report before it counts as missing.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for the bed to become healthy.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(40);
/// How long a fault continues after its diagnosis, which must not change during that time.
const HOLD: Duration = Duration::from_millis(1500);
/// Faults start at multiples of this fraction of the probe interval: multiples of the golden ratio are evenly
/// distributed.
const PHASE_STEP: f64 = 0.618_034;

/// Timeout of a probe. This benchmark sets the default explicitly.
const PROBE_TIMEOUT_MS: f64 = 1000.0;
/// The part of the timeout within which an agent confirms a failure, and the pause before it confirms a recovery, if
/// the agent adds no delay itself.
const CONFIRMATION_MS: f64 = PROBE_TIMEOUT_MS * 0.9;
const RECOVERY_PAUSE_MS: f64 = 100.0;
/// Limits of an agent's times relative to these.
const CONFIRMATION_RATIO: f64 = 1.11;
const RECOVERY_RATIO: f64 = 2.0;

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    let named: Vec<Fault> = options
        .kinds
        .iter()
        .map(|name| Fault::by_name(name))
        .collect::<anyhow::Result<_>>()?;
    let kinds = match named.as_slice() {
        [] => &Fault::ALL[..],
        named => named,
    };
    let faults = options.faults.unwrap_or(FAULTS);
    let minutes = options.minutes.unwrap_or(LOSS_MINUTES);
    let bed = Bed::builder()
        .nodes(NODES)
        .agent_args(&format!(
            "--probe-interval {PROBE_INTERVAL_S}s --probe-timeout {PROBE_TIMEOUT_MS}ms"
        ))
        .start()?;
    bed.wait_all_reachable(RECOVERY_PATIENCE)?;
    let mut figures = vec![figure(
        "probe interval of a target in this run",
        "s",
        f64::from(PROBE_INTERVAL_S),
        None,
        None,
    )];
    let mut add = |figure: Figure| {
        print_line(format_args!(
            "  {}: {:.2} {}",
            figure.name, figure.ours, figure.unit
        ));
        figures.push(figure);
    };

    let capture = Capture::start(bed.node(1))?;
    let watch = Watch::start(bed.node(1), PAUSE);
    let mut false_verdicts = Falsehoods::default();
    for &fault in kinds {
        print_line(format_args!("{}, {faults} times", fault.name()));
        let observer = Observer {
            capture: &capture,
            watch: &watch,
        };
        let outcomes = observer.measure(&bed, fault, faults)?;
        for figure in figures_of(fault, &outcomes)? {
            add(figure);
        }
    }
    let victims: Vec<String> = victims(&bed).map(Node::full_name).collect();
    for (node, story) in watch.finish()? {
        if !victims.contains(&node) {
            false_verdicts.count(&story);
        }
    }
    drop(capture);
    for figure in falsehoods("of peers without a fault", &false_verdicts) {
        add(figure);
    }

    if !named.is_empty() {
        return Report::new(figures, faults);
    }
    if minutes > 0 {
        print_line(format_args!("{LOSS_PERCENT} % of all packets lost"));
        bed.wait_all_reachable(RECOVERY_PATIENCE)?;
        let time = Duration::from_secs(60) * minutes;
        let found = calm::under_loss(&bed, LOSS_PERCENT, time)?;
        let when = format!("in {minutes} min of {LOSS_PERCENT} % loss at all {NODES} nodes");
        for figure in falsehoods(&when, &found) {
            add(figure);
        }
    }
    print_line("all CPUs busy");
    bed.wait_all_reachable(RECOVERY_PATIENCE)?;
    let found = calm::under_load(&bed, LOAD_TIME)?;
    let when = format!("in {} s with all CPUs busy", LOAD_TIME.as_secs());
    for figure in falsehoods(&when, &found) {
        add(figure);
    }
    Report::new(figures, faults)
}

fn victims(bed: &Bed) -> impl Iterator<Item = &Node> {
    bed.nodes().iter().skip(1).take(VICTIMS)
}

/// Results of a single fault.
#[derive(Debug)]
struct Outcome {
    /// Time from the first lost probe to the report, for the slowest target.
    confirmed: Duration,
    /// Time from the first lost probe of any target to the correct diagnosis.
    diagnosed: Duration,
    /// Time from the first answered probe to the report, for the slowest target.
    recovered: Duration,
    /// Wrong diagnoses shown between the first report of a failure and the end of the fault.
    wrong: Vec<String>,
    /// Number of targets that the fault does not affect.
    spared: u32,
    /// Number of unaffected targets that were reported as unreachable.
    accused: u32,
}

/// The observed agent.
#[derive(Clone, Copy)]
struct Observer<'a> {
    capture: &'a Capture,
    watch: &'a Watch,
}

impl Observer<'_> {
    /// Causes a fault at least this many times in total, at several peers in parallel.
    fn measure(self, bed: &Bed, fault: Fault, times: u32) -> anyhow::Result<Vec<Outcome>> {
        let each = times.div_ceil(VICTIMS as u32);
        thread::scope(|scope| {
            let workers: Vec<_> = victims(bed)
                .enumerate()
                .map(|(victim, node)| {
                    scope.spawn(move || {
                        (0..each)
                            .map(|round| self.once(node, fault, round, victim))
                            .collect::<anyhow::Result<Vec<_>>>()
                    })
                })
                .collect();
            let mut all = Vec::new();
            for worker in workers {
                let outcomes = worker
                    .join()
                    .map_err(|_| anyhow::anyhow!("a fault thread panicked"))?;
                all.extend(outcomes?);
            }
            Ok(all)
        })
    }

    fn once(self, node: &Node, fault: Fault, round: u32, victim: usize) -> anyhow::Result<Outcome> {
        let name = node.full_name();
        let story = || self.watch.story(&name);
        wait_for("the peer to be reachable", RECOVERY_PATIENCE, || {
            Ok(story().is_well().then_some(()))
        })?;
        let phase = PHASE_STEP * (f64::from(round) + victim as f64 / VICTIMS as f64);
        thread::sleep(Duration::from_secs(PROBE_INTERVAL_S.into()).mul_f64(phase.fract()));

        let places: Vec<Place> = story().verdicts.keys().copied().collect();
        let broken = |place: &&Place| fault.breaks(place.path, place.protocol);
        let begun = clock();
        fault.make(node, round)?;
        let reports = wait_for("the fault to be reported", PATIENCE, || {
            let story = story();
            let all: Option<Vec<_>> = places
                .iter()
                .filter(broken)
                .map(|place| Some((*place, changed(&story, place, begun, false)?)))
                .collect();
            Ok(all)
        })
        .with_context(|| format!("{} at {name}", fault.name()))?;
        // If the diagnosis is not found in time, the figures show that.
        let _ = wait_for("the diagnosis", PATIENCE, || {
            Ok((story().cause() == Some(fault.cause())).then_some(()))
        });
        thread::sleep(HOLD);
        let ended = clock();
        let during = story();
        fault.undo(node)?;
        wait_for("the peer to recover", RECOVERY_PATIENCE, || {
            Ok(story().is_well().then_some(()))
        })
        .with_context(|| format!("after {} at {name}", fault.name()))?;
        let after = story();

        let mut outcome = Outcome {
            confirmed: Duration::ZERO,
            diagnosed: Duration::ZERO,
            recovered: Duration::ZERO,
            wrong: Vec::new(),
            spared: 0,
            accused: 0,
        };
        let mut first_lost = ended;
        let mut first_reported = ended;
        for (place, reported) in reports {
            let target = (place.address, place.protocol);
            let lost = self.capture.first_lost(target, reported);
            let lost = lost.with_context(|| format!("no lost probe of {target:?} was captured"))?;
            first_lost = first_lost.min(lost);
            first_reported = first_reported.min(reported);
            outcome.confirmed = outcome.confirmed.max(reported.saturating_sub(lost));

            let again = changed(&after, &place, ended, true);
            let again = again.with_context(|| format!("{target:?} did not recover"))?;
            let answered = self.capture.first_answer(target, reported);
            let answered =
                answered.with_context(|| format!("no answer of {target:?} was captured"))?;
            outcome.recovered = outcome.recovered.max(again.saturating_sub(answered));
        }
        let mut diagnosed = None;
        for report in &during.diagnoses {
            match report.value.as_deref() {
                Some(cause) if cause == fault.cause() => {
                    diagnosed = diagnosed.or((report.at >= begun).then_some(report.at));
                }
                Some(cause) if report.at >= first_reported => outcome.wrong.push(cause.to_owned()),
                _ => {}
            }
        }
        outcome.diagnosed = diagnosed.unwrap_or(ended).saturating_sub(first_lost);
        if diagnosed.is_none() && outcome.wrong.is_empty() {
            outcome.wrong.push("none".to_owned());
        }
        let failed = |place: &&Place| changed(&after, place, begun, false).is_some();
        let spared = || places.iter().filter(|place| !broken(place));
        outcome.spared = spared().count() as u32;
        outcome.accused = spared().filter(failed).count() as u32;
        if !outcome.wrong.is_empty() || outcome.accused > 0 {
            print_line(format_args!(
                "  {} at {name}: {outcome:?}; diagnoses since the first failure: {:?}",
                fault.name(),
                during
                    .diagnoses
                    .iter()
                    .filter(|report| report.at >= begun)
                    .map(|report| (report.at.saturating_sub(first_lost), &report.value))
                    .collect::<Vec<_>>()
            ));
        }
        Ok(outcome)
    }
}

/// When, after `since`, a target was first reported as reachable (`answers`) or unreachable.
fn changed(story: &Story, place: &Place, since: Duration, answers: bool) -> Option<Duration> {
    let reports = story.verdicts.get(place)?;
    let change = |report: &&watch::TimedReport<watch::Verdict>| {
        report.at >= since && report.value.is_ok() == answers
    };
    reports.iter().find(change).map(|report| report.at)
}

fn figures_of(fault: Fault, outcomes: &[Outcome]) -> anyhow::Result<Vec<Figure>> {
    let count = outcomes.len();
    let mut figures = Vec::new();
    /// Name, time, and optionally the agent's timer with the limit of the ratio to it.
    type Measured = (&'static str, fn(&Outcome) -> Duration, Option<(f64, f64)>);
    let measured: [Measured; 3] = [
        (
            "confirmed after the first lost probe (other: the agent's timer)",
            |o| o.confirmed,
            Some((CONFIRMATION_MS, CONFIRMATION_RATIO)),
        ),
        (
            "diagnosed after the first lost probe",
            |o| o.diagnosed,
            None,
        ),
        (
            "recovery confirmed after the first answer (other: the agent's timer)",
            |o| o.recovered,
            Some((RECOVERY_PAUSE_MS, RECOVERY_RATIO)),
        ),
    ];
    for (what, time, timer) in measured {
        let mut times: Vec<Duration> = outcomes.iter().map(time).collect();
        times.sort_unstable();
        for (name, part, has_limit) in [
            ("p50", 0.5, false),
            ("p99", 0.99, true),
            ("max", 1.0, false),
        ] {
            let millis = quantile(&times, part)?.as_secs_f64() * 1e3;
            let name = format!("{} ({count}): {what}, {name}", fault.name());
            let (timer, limit) = timer.unzip();
            let target = limit.filter(|_| has_limit).map(Target::RatioAtMost);
            figures.push(figure(&name, "ms", millis, timer, target));
        }
    }
    let sum = |number: fn(&Outcome) -> u32| outcomes.iter().map(number).sum::<u32>();
    let (spared, accused) = (sum(|o| o.spared), sum(|o| o.accused));
    let wrong = sum(|o| u32::from(!o.wrong.is_empty()));
    let faults = outcomes.len() as f64;
    for (what, number, all) in [
        (
            format!("{} all the time (other: faults)", fault.cause()),
            faults - f64::from(wrong),
            faults,
        ),
        (
            "unaffected targets that were never unreachable (other: all)".to_owned(),
            f64::from(spared - accused),
            spared.into(),
        ),
    ] {
        let name = format!("{} ({count}): {what}", fault.name());
        figures.push(figure(&name, "", number, Some(all), Some(Target::Equal)));
    }
    Ok(figures)
}

fn falsehoods(when: &str, found: &Falsehoods) -> [Figure; 2] {
    [
        ("targets reported unreachable", &found.verdicts),
        ("diagnoses", &found.diagnoses),
    ]
    .map(|(what, counts)| {
        for (text, count) in counts {
            print_line(format_args!("  {what} {when}: {count} x {text}"));
        }
        let number: u32 = counts.values().sum();
        let name = format!("{what} {when} (other: faults)");
        figure(&name, "", number.into(), Some(0.0), Some(Target::Equal))
    })
}

fn figure(
    name: &str,
    unit: &'static str,
    ours: f64,
    other: Option<f64>,
    target: Option<Target>,
) -> Figure {
    Figure {
        name: name.to_owned(),
        unit,
        ours,
        other,
        target,
    }
}
