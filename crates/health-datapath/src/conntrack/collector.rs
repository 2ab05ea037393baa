//! The task that collects on schedule, and at once when a map is nearly full.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use health_model::activity::{self, Activity, Problem, Reporter};
use health_model::api::FullMap;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::{debug, error, info, warn};

use super::{Cause, Counts, Family, Fill, Pace, Schedule, Tables};

/// Time between two checks of the maps' fill levels.
const LOOK: Duration = Duration::from_secs(2);

/// The counts of all collections so far. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct SharedCounts(Arc<Mutex<Counts>>);

impl SharedCounts {
    /// The current counts.
    pub fn counts(&self) -> Counts {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // Plain counts: a panic leaves none of them invalid.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Collects until it is dropped.
pub struct Collector {
    task: JoinHandle<()>,
    counts: SharedCounts,
    pressed: watch::Receiver<Vec<FullMap>>,
    activity: Activity,
}

impl Collector {
    /// Starts collecting.
    pub fn start(tables: impl Tables, pace: Pace) -> Self {
        let counts = SharedCounts::default();
        let (pressed, receiver) = watch::channel(Vec::new());
        let started = Instant::now();
        let (reporter, activity) = activity::channel();
        let work = Work {
            tables: Arc::new(tables),
            schedule: Schedule::new(pace, Duration::ZERO),
            started,
            counts: counts.clone(),
            pressed,
            reporter,
            failures: Failures::default(),
        };
        Self {
            task: tokio::spawn(work.run()),
            counts,
            pressed: receiver,
            activity,
        }
    }

    /// Returns the collector's activity: it checks every 2 s, and a failed collection is reported until the next one.
    pub fn activity(&self) -> Activity {
        self.activity.clone()
    }

    /// The counts of collections, shared and kept up to date.
    pub fn shared_counts(&self) -> SharedCounts {
        self.counts.clone()
    }

    /// The nearly full maps, with updates.
    pub fn pressed(&self) -> watch::Receiver<Vec<FullMap>> {
        self.pressed.clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Work<T> {
    tables: Arc<T>,
    schedule: Schedule,
    started: Instant,
    counts: SharedCounts,
    pressed: watch::Sender<Vec<FullMap>>,
    reporter: Reporter,
    failures: Failures,
}

/// The last failures, so that each is logged once.
#[derive(Default)]
struct Failures {
    /// In the last collection.
    collection: Option<String>,
    /// In the last check.
    look: Option<String>,
}

impl<T: Tables> Work<T> {
    async fn run(mut self) {
        self.counts.lock().interval = self.schedule.interval();
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = sleep_until(self.started + self.schedule.due()) => {
                    self.collect(Cause::Interval).await;
                }
                _ = looks.tick() => {
                    self.look().await;
                    let is_pressed = !self.pressed.borrow().is_empty();
                    if is_pressed && self.schedule.may_hurry(self.started.elapsed()) {
                        self.collect(Cause::Pressure).await;
                    }
                }
            }
        }
    }

    /// Collects both families, one after the other.
    async fn collect(&mut self, cause: Cause) {
        self.reporter.begin();
        let mut removed: f64 = 0.0;
        let mut failure = None;
        for family in Family::ALL {
            let tables = self.tables.clone();
            let begun = Instant::now();
            let result = spawn_blocking(move || tables.collect(family)).await;
            let took = begun.elapsed();
            match result {
                Ok(Ok(collected)) => {
                    debug!(
                        family = family.name(),
                        cause = cause.name(),
                        ?took,
                        removed = collected.flows.removed,
                        refreshed = collected.flows.refreshed,
                        alive = collected.flows.alive,
                        translations_removed = collected.translations.removed,
                        "collected conntrack entries"
                    );
                    removed = removed.max(collected.flows.removed_part());
                    self.counts.lock().note(family, cause, collected, took);
                }
                Ok(Err(error)) => {
                    self.counts.lock().note_failure(family);
                    failure = Some(error.to_string());
                }
                Err(error) => {
                    self.counts.lock().note_failure(family);
                    failure = Some(error.to_string());
                }
            }
        }
        let now = self.started.elapsed();
        match &failure {
            None => self.schedule.collected(now, removed),
            Some(_) => self.schedule.failed(now),
        }
        self.counts.lock().interval = self.schedule.interval();
        note_failure(
            &mut self.failures.collection,
            failure,
            "cannot collect conntrack entries",
        );
        self.look().await;
    }

    /// Checks how full the maps are.
    async fn look(&mut self) {
        self.reporter.begin();
        let tables = self.tables.clone();
        let result = spawn_blocking(move || tables.fills()).await;
        let failure = match result {
            Ok(Ok(fills)) => {
                self.note_fills(fills);
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        note_failure(
            &mut self.failures.look,
            failure,
            "cannot read the fill level of the conntrack maps",
        );
        let Failures { collection, look } = &self.failures;
        let problem = collection.as_ref().or(look.as_ref());
        // A warning only: the operation is retried soon, and restarting the agent would not help.
        self.reporter.end(problem.map(Problem::warning), Some(LOOK));
    }

    fn note_fills(&self, fills: Vec<Fill>) {
        let pressed = fills.iter().filter(|fill| fill.is_pressed());
        let pressed: Vec<FullMap> = pressed.map(Fill::full_map).collect();
        let names = |maps: &[FullMap]| -> BTreeSet<_> {
            maps.iter().map(|full| full.map.clone()).collect()
        };
        let before = names(&self.pressed.borrow());
        let after = names(&pressed);
        for full in pressed.iter().filter(|full| !before.contains(&full.map)) {
            let FullMap {
                map,
                entries,
                capacity,
            } = full;
            warn!(map, entries, capacity, "the map is nearly full");
        }
        for map in before.difference(&after) {
            info!(map, "the map has free space again");
        }
        self.pressed.send_if_modified(|shown| {
            let is_new = *shown != pressed;
            *shown = pressed;
            is_new
        });
        self.counts.lock().fills = fills;
    }
}

fn note_failure(last: &mut Option<String>, failure: Option<String>, what: &'static str) {
    if let Some(cause) = &failure
        && last.as_ref() != Some(cause)
    {
        error!(cause, "{what}");
    }
    *last = failure;
}

#[cfg(test)]
mod tests {
    use std::io;

    use health_model::activity::Severity;

    use super::*;
    use crate::conntrack::{CollectionOutcome, Pass, TableError};

    /// Maps that hold `entries` of 100 and lose half of the IPv4 entries in each collection. IPv6 entries never expire.
    #[derive(Clone, Default)]
    struct Half(Arc<Mutex<State>>);

    #[derive(Default)]
    struct State {
        entries: u64,
        broken: bool,
        collections: Vec<(Instant, Family)>,
    }

    impl Half {
        fn state(&self) -> MutexGuard<'_, State> {
            self.0.lock().unwrap()
        }

        /// Seconds from `start` to each collection of IPv4 entries.
        fn collections_since(&self, start: Instant) -> Vec<u64> {
            let state = self.state();
            let of_ipv4 = state.collections.iter().filter(|(_, f)| *f == Family::Ipv4);
            of_ipv4.map(|(at, _)| (*at - start).as_secs()).collect()
        }
    }

    impl Tables for Half {
        fn collect(&self, family: Family) -> Result<CollectionOutcome, TableError> {
            let mut state = self.state();
            state.collections.push((Instant::now(), family));
            if state.broken {
                return Err(TableError {
                    what: "collect",
                    map: "HEALTH_CT4",
                    source: io::ErrorKind::PermissionDenied.into(),
                });
            }
            let flows = Pass {
                removed: u64::from(family == Family::Ipv4),
                refreshed: 0,
                alive: 1,
            };
            Ok(CollectionOutcome {
                flows,
                ..CollectionOutcome::default()
            })
        }

        fn fills(&self) -> Result<Vec<Fill>, TableError> {
            Ok(vec![Fill {
                map: "HEALTH_CT4",
                entries: self.state().entries,
                capacity: 100,
            }])
        }
    }

    fn adaptive() -> Pace {
        let longest = Duration::from_secs(3_600);
        Pace::Adaptive { longest }
    }

    #[tokio::test(start_paused = true)]
    async fn collections_come_sooner_while_much_expires() {
        let tables = Half::default();
        let start = Instant::now();
        let collector = Collector::start(tables.clone(), adaptive());
        tokio::time::sleep(Duration::from_secs(560)).await;
        // Each collection removed half: 300 s, 150, 75, 38 (rounded).
        assert_eq!(tables.collections_since(start), [300, 450, 525]);
        let counts = collector.shared_counts().counts();
        assert_eq!(counts.interval, Duration::from_secs(38));
        assert_eq!(counts.of(Family::Ipv6).completed, [3, 0]);
        drop(collector);
        tokio::time::sleep(Duration::from_secs(560)).await;
        assert_eq!(tables.state().collections.len(), 6);
    }

    #[tokio::test(start_paused = true)]
    async fn a_map_that_is_nearly_full_is_collected_at_once_and_reported() {
        let tables = Half::default();
        let start = Instant::now();
        let collector = Collector::start(tables.clone(), adaptive());
        let mut pressed = collector.pressed();
        tokio::time::sleep(Duration::from_secs(21)).await;
        assert!(pressed.borrow_and_update().is_empty());
        assert!(tables.collections_since(start).is_empty());

        tables.state().entries = 81;
        tokio::time::timeout(LOOK, pressed.changed())
            .await
            .expect("soon")
            .expect("a collector");
        assert_eq!(pressed.borrow_and_update()[0].entries, 81);
        // While the map stays full, collections are still rate-limited.
        tokio::time::sleep(Duration::from_secs(21)).await;
        assert_eq!(tables.collections_since(start), [22, 32, 42]);
        assert_eq!(
            collector
                .shared_counts()
                .counts()
                .of(Family::Ipv4)
                .completed,
            [0, 3]
        );

        tables.state().entries = 80;
        tokio::time::timeout(LOOK, pressed.changed())
            .await
            .expect("soon")
            .expect("a collector");
        assert!(pressed.borrow_and_update().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_failure_it_is_tried_again_when_it_is_due() {
        let tables = Half::default();
        tables.state().broken = true;
        let start = Instant::now();
        let collector = Collector::start(tables.clone(), Pace::Fixed(Duration::from_secs(3)));
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert_eq!(tables.collections_since(start), [3, 6]);
        let counts = collector.shared_counts().counts();
        assert_eq!(counts.of(Family::Ipv4).failed, 2);
        assert_eq!(counts.of(Family::Ipv4).completed, [0, 0]);
        assert_eq!(counts.fills.len(), 1);
        // Successful checks do not hide the problem; the next collection clears it.
        let problem = || collector.activity().last().problem;
        let reported = problem().expect("a problem");
        assert_eq!(reported.severity, Severity::Warning);
        assert!(reported.reason.contains("HEALTH_CT4"), "{reported:?}");
        tables.state().broken = false;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(problem(), None);
    }
}
