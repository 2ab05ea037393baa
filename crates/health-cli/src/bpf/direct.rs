//! The human-readable `HEALTH_DIRECT` entry, without the keys: they are the mesh's secret.

use std::fmt;

use health_common::service::direct::DirectConfig;
use serde::Serialize;

use super::entry::Entry;

/// Converts entries for display.
pub(super) fn entries(rows: Vec<(u32, DirectConfig)>) -> Vec<Entry<u32, DirectReturn>> {
    let entry = |(key, config): (u32, DirectConfig)| Entry {
        key,
        value: DirectReturn { keys: config.count },
    };
    rows.into_iter().map(entry).collect()
}

/// The keys with which nodes recognise packets that other nodes forward to their backends.
#[derive(Debug, Serialize)]
pub(super) struct DirectReturn {
    /// Number of keys.
    keys: u32,
}

impl fmt::Display for DirectReturn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "keys={}", self.keys)
    }
}
