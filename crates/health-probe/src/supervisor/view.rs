//! Probes as the API shows them.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use health_model::api::{
    ContainerProbe, ContainerProbeSummary, DelayBucket, ProbeRun, ProbeVerdict,
};
use jiff::Timestamp;
use tokio::time::Instant;

use crate::prober::{DURATION_BOUNDS, Prober};
use crate::worker::{Counted, ProbeResult, WorkerView};
use health_model::duration::duration_text;

/// How far the wall clock must deviate from the known value to count as set.
const STEP: Duration = Duration::from_millis(100);

/// The prober's start time on the wall clock. Cached so that the same run always shows the same time, unless the clock
/// was set meanwhile.
#[derive(Debug, Default)]
pub(super) struct Beginning(Mutex<Option<Timestamp>>);

impl Beginning {
    fn wall(&self, began: Instant) -> Timestamp {
        let now = Timestamp::now();
        let wall = now.checked_sub(began.elapsed()).unwrap_or(now);
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match *known {
            Some(known) if known.duration_since(wall).unsigned_abs() < STEP => known,
            _ => *known.insert(wall),
        }
    }
}

/// All probes, by pod, container and type.
pub(super) fn probes(prober: &Prober, beginning: &Beginning) -> Vec<ContainerProbe> {
    let mut wall = None;
    let mut probes = Vec::new();
    prober.each_worker(|view, began| {
        let wall = *wall.get_or_insert_with(|| beginning.wall(began));
        let at = |since_began: Duration| wall.checked_add(since_began).unwrap_or(wall);
        probes.push((
            (view.pod.clone(), view.container.clone(), view.kind),
            show(&view, at, began.elapsed()),
        ));
    });
    probes.sort_by(|((pod, container, kind), _), ((other, beside, type_), _)| {
        let key = (&pod.namespace, &pod.name, &pod.uid, container, kind);
        key.cmp(&(&other.namespace, &other.name, &other.uid, beside, type_))
    });
    probes.into_iter().map(|(_, shown)| shown).collect()
}

fn show(
    view: &WorkerView<'_>,
    at: impl Fn(Duration) -> Timestamp,
    now: Duration,
) -> ContainerProbe {
    let WorkerView { pod, probe, .. } = view;
    let overdue = view.overdue(now);
    // Short delays occur for every probe now and then, and are not shown.
    let delay = view.delay.filter(|_| overdue.is_some());
    let waiting = view.waiting.map(|why| why.text());
    let container = pod.container(view.container);
    let target = container.map(|container| probe.target(pod, container));
    ContainerProbe {
        pod: format!("{}/{}", pod.namespace, pod.name),
        pod_uid: pod.shown_uid().to_owned(),
        container: view.container.to_string(),
        container_id: view.container_id.map(|id| id.to_string()),
        kind: view.kind.name().to_owned(),
        target: match target {
            Some(Ok(target)) => target.action.to_string(),
            _ => probe.handler.name().to_owned(),
        },
        result: view.result.map(verdict),
        last: view.last.map(verdict),
        run: view.run,
        threshold: view.threshold,
        on_hold: view.on_hold,
        waiting: waiting.or(delay.map(|why| why.text())).map(str::to_owned),
        in_flight: view.in_flight,
        period_ns: nanoseconds(probe.period),
        timeout_ns: nanoseconds(probe.timeout),
        next: view.next.map(&at),
        overdue_ns: overdue.map(nanoseconds),
        last_run: view.last_run.map(|run| ProbeRun {
            at: at(run.at),
            counted: run.counted.name().to_owned(),
            message: run.message.clone(),
        }),
    }
}

/// Counts the probes by state.
pub(super) fn summary(prober: &Prober) -> ContainerProbeSummary {
    let mut summary = ContainerProbeSummary {
        enabled: true,
        ..ContainerProbeSummary::default()
    };
    prober.each_worker(|view, began| {
        let errored = |counted| matches!(counted, Counted::Errored | Counted::NotSent);
        summary.probes += 1;
        summary.failing += u64::from(view.result == Some(ProbeResult::Failure));
        summary.errored += u64::from(view.last_run.is_some_and(|run| errored(run.counted)));
        summary.overdue += u64::from(view.overdue(began.elapsed()).is_some());
    });
    prober.look_at_statistics(|statistics| {
        let runs = Counted::ALL.iter().zip(statistics.totals());
        summary.runs = runs
            .map(|(counted, count)| (counted.name().to_owned(), count))
            .collect();
        let bounds = DURATION_BOUNDS
            .iter()
            .map(|bound| Some(nanoseconds(Duration::from_secs_f64(*bound))));
        let delays = bounds.chain([None]).zip(statistics.delays.buckets);
        summary.start_delays = delays
            .map(|(at_most_ns, count)| DelayBucket { at_most_ns, count })
            .collect();
    });
    summary
}

/// Probes whose results are too old to count as current.
pub(super) struct Overdue {
    /// The number of overdue probes.
    pub(super) count: u64,
    /// The probe that has been overdue for longest: for how long, which probe, and why, as far as this agent is the
    /// cause.
    longest: (Duration, String),
}

impl Overdue {
    /// Returns the overdue probes, if any.
    pub(super) fn of(prober: &Prober) -> Option<Self> {
        let mut found: Option<Self> = None;
        prober.each_worker(|view, began| {
            let Some(age) = view.overdue(began.elapsed()) else {
                return;
            };
            let known = found.get_or_insert_with(|| Self {
                count: 0,
                longest: (Duration::ZERO, String::new()),
            });
            known.count += 1;
            if age > known.longest.0 {
                let why = match view.delay {
                    Some(delay) => delay.text(),
                    None if view.in_flight => "its run is in progress",
                    None => "its runs have no result",
                };
                let WorkerView {
                    pod,
                    container,
                    kind,
                    ..
                } = view;
                let (namespace, name) = (&pod.namespace, &pod.name);
                let probe = format!("{namespace}/{name} {container} {kind}");
                known.longest = (age, format!("{probe}: {why}"));
            }
        });
        found
    }
}

impl fmt::Display for Overdue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            count,
            longest: (age, longest),
        } = self;
        let age = duration_text(Duration::from_secs(age.as_secs()));
        let probes = if *count == 1 {
            "probe is"
        } else {
            "probes are"
        };
        write!(
            f,
            "{count} {probes} overdue; no news for {age} from {longest}"
        )
    }
}

fn verdict(result: ProbeResult) -> ProbeVerdict {
    match result {
        ProbeResult::Success => ProbeVerdict::Success,
        ProbeResult::Failure => ProbeVerdict::Failure,
        ProbeResult::Unknown => ProbeVerdict::Unknown,
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
