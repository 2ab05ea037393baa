//! Keeps, counts and logs container events.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use health_model::api::ContainerEvent;
use health_model::pace::Budget;
use jiff::Timestamp;
use tracing::{info, warn};

use crate::spec::PodSpec;

/// Maximum number of events kept. Beyond it, the oldest event is dropped of the pod with the most events within the
/// namespace with the most events, so that pods with many events take no space from other pods.
const KEPT: usize = 1000;
/// Maximum number of log lines per second and pod; up to a minute's unused lines are carried over.
const LINES_PER_SECOND: u32 = 1;
const LINES_ADVANCE: Duration = Duration::from_secs(60);

/// Whether an event is a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Everything is fine.
    Normal,
    /// Something is wrong.
    Warning,
}

impl Level {
    const fn text(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Identifies an event: an event whose key is equal to an earlier one's is a repetition.
type Key = (Arc<str>, Arc<str>, &'static str, String);

/// The latest events. An event that is repeated is counted, and becomes the newest.
#[derive(Debug)]
pub(super) struct EventLog {
    began: Instant,
    number: u64,
    events: BTreeMap<u64, Kept>,
    known: HashMap<Key, u64>,
    namespaces: HashMap<String, Namespace>,
}

#[derive(Debug)]
struct Kept {
    key: Key,
    namespace: String,
    event: ContainerEvent,
}

/// The events of a namespace.
#[derive(Debug, Default)]
struct Namespace {
    count: usize,
    pods: HashMap<Arc<str>, OfPod>,
}

/// The sequence numbers of a pod's events, and the pod's budget of log lines.
#[derive(Debug)]
struct OfPod {
    numbers: BTreeSet<u64>,
    lines: Budget,
}

impl Default for EventLog {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            number: 0,
            events: BTreeMap::new(),
            known: HashMap::new(),
            namespaces: HashMap::new(),
        }
    }
}

impl EventLog {
    /// Records an event.
    pub(super) fn note(
        &mut self,
        pod: &PodSpec,
        container: &Arc<str>,
        level: Level,
        reason: &'static str,
        message: String,
    ) {
        let now = Timestamp::now();
        self.number += 1;
        let number = self.number;
        let key = (pod.uid.clone(), container.clone(), reason, message);
        let before = self.known.get(&key).copied();
        let before = before.and_then(|old| self.remove(old, false));
        let since = self.began.elapsed();
        let namespace = self.namespaces.entry(pod.namespace.clone()).or_default();
        namespace.count += 1;
        let of_pod = namespace.pods.entry(pod.uid.clone());
        let of_pod = of_pod.or_insert_with(|| OfPod {
            numbers: BTreeSet::new(),
            lines: Budget::with_advance(LINES_PER_SECOND, LINES_ADVANCE),
        });
        of_pod.numbers.insert(number);
        let event = match before {
            Some(event) => ContainerEvent {
                number,
                last: now,
                count: event.count + 1,
                ..event
            },
            None => {
                let event = ContainerEvent {
                    number,
                    first: now,
                    last: now,
                    count: 1,
                    kind: level.text().to_owned(),
                    reason: reason.to_owned(),
                    pod: format!("{}/{}", pod.namespace, pod.name),
                    container: container.to_string(),
                    message: key.3.clone(),
                };
                if of_pod.lines.allows(since) {
                    of_pod.lines.take(since);
                    report(&event, level);
                }
                event
            }
        };
        self.known.insert(key.clone(), number);
        let kept = Kept {
            key,
            namespace: pod.namespace.clone(),
            event,
        };
        self.events.insert(number, kept);
        if self.events.len() > KEPT
            && let Some(first) = self.first_of_largest()
        {
            self.remove(first, true);
        }
    }

    /// The oldest event of the pod with the most events in the namespace with the most events; in a tie, the oldest
    /// event of all.
    fn first_of_largest(&self) -> Option<u64> {
        let first = |pod: &OfPod| pod.numbers.first().copied();
        let largest = self.namespaces.values().max_by_key(|one| {
            let oldest = one.pods.values().filter_map(first).min();
            (one.count, Reverse(oldest))
        })?;
        let pods = largest.pods.values();
        let pod = pods.max_by_key(|pod| (pod.numbers.len(), Reverse(first(pod))))?;
        first(pod)
    }

    /// Removes an event. If `is_final`, also removes the pod if it has no other event.
    fn remove(&mut self, number: u64, is_final: bool) -> Option<ContainerEvent> {
        let Kept {
            key,
            namespace,
            event,
        } = self.events.remove(&number)?;
        self.known.remove(&key);
        let of_namespace = self.namespaces.get_mut(&namespace)?;
        of_namespace.count -= 1;
        if let Some(pod) = of_namespace.pods.get_mut(&key.0) {
            pod.numbers.remove(&number);
            if pod.numbers.is_empty() && is_final {
                of_namespace.pods.remove(&key.0);
            }
        }
        if of_namespace.pods.is_empty() {
            self.namespaces.remove(&namespace);
        }
        Some(event)
    }

    /// Returns the events with a larger sequence number, oldest first.
    pub(super) fn since(&self, number: u64) -> Vec<ContainerEvent> {
        let later = self.events.range(number.saturating_add(1)..);
        later.map(|(_, kept)| kept.event.clone()).collect()
    }
}

/// Logs an event only when it first happens: repetitions would fill the log.
fn report(event: &ContainerEvent, level: Level) {
    let ContainerEvent {
        pod,
        container,
        reason,
        message,
        ..
    } = event;
    match level {
        Level::Normal => info!(pod, container, reason, message, "container event"),
        Level::Warning => warn!(pod, container, reason, message, "container event"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;

    fn note(log: &mut EventLog, message: &str) {
        note_of(log, "shop", "a", message);
    }

    fn note_of(log: &mut EventLog, namespace: &str, pod: &str, message: &str) {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {pod}, namespace: {namespace}}}\nspec: {{containers: [{{name: c}}]}}"
        );
        let pod = spec::read(&text).pods.remove(0);
        let container = Arc::from("c");
        log.note(
            &pod,
            &container,
            Level::Warning,
            "Unhealthy",
            message.to_owned(),
        );
    }

    #[test]
    fn what_happens_again_is_counted_and_reported_again() {
        let mut log = EventLog::default();
        for message in ["x", "y", "x"] {
            note(&mut log, message);
        }
        let seen = log.since(0);
        let seen: Vec<_> = seen
            .iter()
            .map(|event| (&*event.message, event.count, event.number))
            .collect();
        assert_eq!(seen, [("y", 1, 2), ("x", 2, 3)]);
        assert_eq!(log.since(2).len(), 1);
        assert_eq!(log.since(u64::MAX), []);
    }

    #[test]
    fn only_so_many_are_kept_whatever_their_messages() {
        let mut log = EventLog::default();
        for i in 0..3 * KEPT {
            note(&mut log, &i.to_string());
        }
        let kept = log.since(0);
        assert_eq!((kept.len(), log.known.len()), (KEPT, KEPT));
        assert_eq!(kept[0].message, (2 * KEPT).to_string());
    }

    #[test]
    fn whoever_makes_many_takes_no_room_from_others() {
        let mut log = EventLog::default();
        for i in 0..10 {
            note_of(&mut log, "shop", "web", &i.to_string());
            note_of(&mut log, "tenant", "neighbour", &i.to_string());
        }
        for i in 0..3 * KEPT {
            note_of(
                &mut log,
                "tenant",
                &format!("loud-{}", i % 9),
                &i.to_string(),
            );
        }
        let kept = log.since(0);
        assert_eq!((kept.len(), log.known.len()), (KEPT, KEPT));
        let of = |pod: &str| kept.iter().filter(|event| event.pod == pod).count();
        assert_eq!((of("shop/web"), of("tenant/neighbour")), (10, 10));
        let counted: usize = log.namespaces.values().map(|one| one.count).sum();
        assert_eq!(counted, KEPT);
    }

    #[test]
    fn what_is_gone_leaves_nothing() {
        let mut log = EventLog::default();
        note_of(&mut log, "shop", "web", "x");
        for pod in 0..2 * KEPT {
            note_of(&mut log, &format!("n{pod}"), "a", "x");
        }
        assert_eq!(log.events.len(), KEPT);
        assert_eq!(log.namespaces.len(), KEPT);
        assert_eq!(log.since(0)[0].pod, format!("n{KEPT}/a"));
    }
}
