//! Masqueraded connections that are opened, closed and opened again at the highest rate, with collection running all
//! the time.

use crate::bench::{Figure, Target};
use crate::conntrack::churn::churn;

const CONNECTIONS: u32 = 1_000_000;

/// How many entries of live connections the collector removed, and at what rate it was tried.
pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let churned = churn(CONNECTIONS)?;
    let seconds = churned.took.as_secs_f64();
    let figure = |what: &str, unit, ours, target| Figure {
        name: format!("{CONNECTIONS} connections opened and closed: {what}"),
        unit,
        ours,
        other: None,
        target,
    };
    Ok(vec![
        figure("rate", "1/s", churned.opened as f64 / seconds, None),
        figure("segments", "1/s", churned.segments as f64 / seconds, None),
        figure(
            "opened again before they were forgotten",
            "",
            churned.reopened as f64,
            None,
        ),
        figure(
            "largest part of the table that was taken",
            "%",
            churned.fullest_percent as f64,
            None,
        ),
        figure("collections", "", churned.collections as f64, None),
        figure("entries collected", "", churned.removed as f64, None),
        figure(
            "looks at entries that must be there",
            "",
            churned.looks as f64,
            None,
        ),
        figure(
            "opened with another source port than their own",
            "",
            churned.translated as f64,
            None,
        ),
        figure(
            "segments whose source port changed, or that did not come back",
            "",
            churned.moved as f64,
            Some(Target::AtMost(0.0)),
        ),
        figure(
            "entries missing, or short of packets",
            "",
            churned.wrong as f64,
            Some(Target::AtMost(0.0)),
        ),
    ])
}
