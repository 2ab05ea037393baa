//! Entries of `HEALTH_CALLS` and `HEALTH_IP_CALLS`, readable: the programs that others go on with.

use std::fmt;

use health_datapath::layout;
use serde::Serialize;

use super::entry::Entry;

/// Entries of `HEALTH_CALLS` as they are shown, of indexes and ids of programs.
pub(super) fn entries(rows: Vec<(u32, u32)>) -> Vec<Entry<u32, Call>> {
    named(rows, &layout::CALLED)
}

/// The same of `HEALTH_IP_CALLS`.
pub(super) fn ip_entries(rows: Vec<(u32, u32)>) -> Vec<Entry<u32, Call>> {
    named(rows, &layout::IP_CALLED)
}

fn named(rows: Vec<(u32, u32)>, called: &[(u32, &'static str)]) -> Vec<Entry<u32, Call>> {
    let entry = |(key, id)| Entry {
        key,
        value: Call {
            program: called
                .iter()
                .find_map(|&(index, name)| (index == key).then_some(name)),
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
