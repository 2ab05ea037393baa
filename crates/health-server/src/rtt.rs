//! `GET /v1/rtt`: the rows of round-trip times.

use std::io::{self, Write};

use health_api::rtt::{RttEntry, RttFigures, RttPath, names_by_address};
use health_net::clock;

use super::source::Source;

/// Writes the rows of `source` as a JSON array, one row per line, while reading them: all rows together are large.
pub(super) fn write_all(source: &impl Source, out: &mut dyn Write) -> io::Result<()> {
    let names = names_by_address(source.nodes());
    let clock = clock::state().ok();
    let mut separator = "[\n";
    source.each_rtt(&mut |key, row| {
        out.write_all(separator.as_bytes())?;
        separator = ",\n";
        let path = RttPath::from(key);
        let entry = RttEntry {
            node: names.get(&path.peer).map(String::as_str),
            path,
            figures: RttFigures::new(row.into(), clock),
        };
        Ok(serde_json::to_writer(&mut *out, &entry)?)
    })?;
    let end = if separator == "[\n" { "[]\n" } else { "\n]\n" };
    out.write_all(end.as_bytes())
}
