//! Entries of `HEALTH_CALLS`, readable: the programs that others go on with.

use std::fmt;

use health_common::calls::{CALL_MASQUERADE, CALL_UNMASQUERADE};
use serde::Serialize;

use super::entry::Entry;

/// Entries as they are shown, of indexes and ids of programs.
pub(super) fn entries(rows: Vec<(u32, u32)>) -> Vec<Entry<u32, Call>> {
    let entry = |(key, id)| Entry {
        key,
        value: Call {
            program: match key {
                CALL_MASQUERADE => Some("masquerade"),
                CALL_UNMASQUERADE => Some("unmasquerade"),
                _ => None,
            },
            id,
        },
    };
    rows.into_iter().map(entry).collect()
}

/// A program.
#[derive(Debug, Serialize)]
pub(super) struct Call {
    program: Option<&'static str>,
    /// As `bpf prog list` shows it.
    id: u32,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} id={}", self.program.unwrap_or("unknown"), self.id)
    }
}
