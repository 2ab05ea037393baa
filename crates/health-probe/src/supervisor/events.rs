//! What happened to containers: kept, counted, and told in the log.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use health_model::api::ContainerEvent;
use jiff::Timestamp;
use tracing::{info, warn};

use crate::spec::PodSpec;

/// Most events that are kept.
const KEPT: usize = 1000;

/// Whether an event is bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// It is as it should be.
    Normal,
    /// It is not.
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

/// What makes two events one that happened twice.
type Key = (Arc<str>, Arc<str>, &'static str, String);

/// The last events. One that happens again is counted, and is the newest then.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    number: u64,
    events: BTreeMap<u64, (Key, ContainerEvent)>,
    known: HashMap<Key, u64>,
}

impl EventLog {
    /// Takes note of an event.
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
        let before = self.known.get(&key).and_then(|old| self.events.remove(old));
        let event = match before {
            Some((_, event)) => ContainerEvent {
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
                tell(&event, level);
                event
            }
        };
        self.known.insert(key.clone(), number);
        self.events.insert(number, (key, event));
        if self.events.len() > KEPT
            && let Some((_, (key, _))) = self.events.pop_first()
        {
            self.known.remove(&key);
        }
    }

    /// Those with a larger number, the oldest first.
    pub(super) fn since(&self, number: u64) -> Vec<ContainerEvent> {
        let later = self.events.range(number.saturating_add(1)..);
        later.map(|(_, (_, event))| event.clone()).collect()
    }
}

/// Logs an event when it happens first: one that repeats would fill the log.
fn tell(event: &ContainerEvent, level: Level) {
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
        let text =
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: c}]}";
        let pod = spec::read(text).pods.remove(0);
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
    fn what_happens_again_is_counted_and_told_anew() {
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
}
