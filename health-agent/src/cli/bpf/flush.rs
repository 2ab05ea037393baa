//! What flushing prints.

use health_datapath::dump::Flushed;

use crate::cli::output;

/// A line for each map.
pub(super) fn print(flushed: &[Flushed]) -> anyhow::Result<()> {
    output::print(|out| {
        flushed.iter().try_for_each(|Flushed { pin, entries }| {
            let noun = if *entries == 1 { "entry" } else { "entries" };
            writeln!(out, "Flushed {entries} {noun} from {}", pin.display())
        })
    })
}
