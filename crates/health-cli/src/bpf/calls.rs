//! Human-readable `HEALTH_CALLS` and `HEALTH_IP_CALLS` entries: tail-called programs.

use std::fmt;

use health_datapath::DatapathProgram;
use serde::Serialize;

use super::entry::Entry;

/// Converts entries of `HEALTH_CALLS`, given as indexes and program ids, for display.
pub(super) fn entries(rows: Vec<(u32, u32)>) -> Vec<Entry<u32, Call>> {
    named(rows, &DatapathProgram::CALLED)
}

/// Like [`entries`], for `HEALTH_IP_CALLS`.
pub(super) fn ip_entries(rows: Vec<(u32, u32)>) -> Vec<Entry<u32, Call>> {
    named(rows, &DatapathProgram::CALLED_FOR_IP)
}

fn named(rows: Vec<(u32, u32)>, called: &[(u32, DatapathProgram)]) -> Vec<Entry<u32, Call>> {
    let entry = |(key, id)| Entry {
        key,
        value: Call {
            program: called
                .iter()
                .find_map(|&(index, program)| (index == key).then_some(program.name())),
            id,
        },
    };
    rows.into_iter().map(entry).collect()
}

/// A tail-called program.
#[derive(Debug, Serialize)]
pub(super) struct Call {
    program: Option<&'static str>,
    /// As in `bpf prog list`.
    id: u32,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} id={}", self.program.unwrap_or("unknown"), self.id)
    }
}
