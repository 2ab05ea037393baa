//! An endpoint's log: what became of it lately, the oldest forgotten first.

use std::collections::VecDeque;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::lifecycle::State;

/// Entries that are kept.
pub const LOG_ENTRIES: usize = 256;

/// How well something went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// As it should.
    #[serde(rename = "OK")]
    Ok,
    /// Refused, or put off.
    Warning,
    /// It failed.
    Failure,
}

impl Status {
    /// As listings show it.
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
#[serde(rename_all = "kebab-case")]
pub struct LogEntry {
    /// When.
    pub timestamp: Timestamp,
    /// How well it went.
    pub status: Status,
    /// The endpoint's state from then on.
    pub state: State,
    /// What happened.
    pub message: String,
}

/// The last [`LOG_ENTRIES`] lines.
#[derive(Clone, Debug, Default)]
pub struct Log(VecDeque<LogEntry>);

impl Log {
    /// Adds a line.
    pub fn add(&mut self, entry: LogEntry) {
        if self.0.len() == LOG_ENTRIES {
            self.0.pop_front();
        }
        self.0.push_back(entry);
    }

    /// All lines, the oldest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &LogEntry> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_entries_are_kept_in_order() {
        let mut log = Log::default();
        for n in 0..LOG_ENTRIES + 3 {
            log.add(LogEntry {
                timestamp: Timestamp::UNIX_EPOCH,
                status: Status::Ok,
                state: State::Ready,
                message: n.to_string(),
            });
        }
        let kept: Vec<_> = log.iter().map(|entry| entry.message.clone()).collect();
        let expected: Vec<_> = (3..LOG_ENTRIES + 3).map(|n| n.to_string()).collect();
        assert_eq!(kept, expected);
    }
}
