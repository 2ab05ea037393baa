//! An endpoint's log of recent events. The oldest lines are dropped first, but the latest problem is always kept.

use std::collections::VecDeque;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::lifecycle::State;

/// Maximum number of entries in a log.
pub(crate) const LOG_ENTRIES: usize = 256;

/// The status of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(rename = "LogStatus")
)]
pub enum Status {
    /// Success.
    #[serde(rename = "OK")]
    Ok,
    /// The operation was refused or postponed.
    Warning,
    /// The operation failed.
    Failure,
}

impl Status {
    /// Returns the status's name for listings.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warning => "Warning",
            Self::Failure => "Failure",
        }
    }
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct LogEntry {
    /// Time of the event.
    pub timestamp: Timestamp,
    /// Status of the event.
    pub status: Status,
    /// The endpoint's state after the event.
    pub state: State,
    /// What happened.
    pub message: String,
}

/// The last [`LOG_ENTRIES`] lines, always including the latest that is not [`Status::Ok`].
#[derive(Clone, Debug, Default)]
pub struct Log(VecDeque<LogEntry>);

impl Log {
    /// Adds a line.
    pub fn add(&mut self, entry: LogEntry) {
        if self.0.len() == LOG_ENTRIES {
            let is_problem = |entry: &LogEntry| entry.status != Status::Ok;
            let last_problem = self.0.iter().rposition(is_problem);
            let is_kept = last_problem == Some(0) && !is_problem(&entry);
            self.0.remove(usize::from(is_kept));
        }
        self.0.push_back(entry);
    }

    /// Returns all lines, oldest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &LogEntry> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(n: usize, status: Status) -> LogEntry {
        LogEntry {
            timestamp: Timestamp::UNIX_EPOCH,
            status,
            state: State::Ready,
            message: n.to_string(),
        }
    }

    fn kept(log: &Log) -> Vec<usize> {
        let messages = log.iter().map(|entry| entry.message.parse());
        messages.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn the_last_entries_are_kept_in_order() {
        let mut log = Log::default();
        for n in 0..LOG_ENTRIES + 3 {
            log.add(entry(n, Status::Ok));
        }
        assert_eq!(kept(&log), Vec::from_iter(3..LOG_ENTRIES + 3));
    }

    #[test]
    fn what_went_wrong_last_is_kept_however_much_goes_well_since() {
        let mut log = Log::default();
        log.add(entry(0, Status::Failure));
        log.add(entry(1, Status::Warning));
        for n in 2..LOG_ENTRIES * 2 {
            log.add(entry(n, Status::Ok));
        }
        let mut expected = vec![1];
        expected.extend(LOG_ENTRIES + 1..LOG_ENTRIES * 2);
        assert_eq!(kept(&log), expected);

        log.add(entry(LOG_ENTRIES * 2, Status::Failure));
        let expected = Vec::from_iter(LOG_ENTRIES + 1..=LOG_ENTRIES * 2);
        assert_eq!(kept(&log), expected);
    }
}
