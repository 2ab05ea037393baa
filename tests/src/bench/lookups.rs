//! The floor for iterating over a whole map: the kernel's batched lookups and nothing else.

use std::time::{Duration, Instant};

use health_datapath::dump::{Batch, Pinned};

/// Measures how long one thread takes to look up all entries of a pinned map.
pub(super) fn look_up_all(pinned: &Pinned, map: &str) -> anyhow::Result<Duration> {
    let rows = pinned.map(map)?.rows(|_, _| None::<()>)?;
    let mut batch = Batch::default();
    let start = Instant::now();
    while rows.next(&mut batch)?.is_some() {}
    Ok(start.elapsed())
}
