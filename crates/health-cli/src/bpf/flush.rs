//! Output of the flush commands.

use health_datapath::dump::FlushedMap;

use crate::output;

/// Prints one line per map.
pub(super) fn print(flushed: &[FlushedMap]) -> anyhow::Result<()> {
    output::print(|out| {
        flushed.iter().try_for_each(|FlushedMap { pin, entries }| {
            let noun = if *entries == 1 { "entry" } else { "entries" };
            writeln!(out, "Flushed {entries} {noun} from {}", pin.display())
        })
    })
}
