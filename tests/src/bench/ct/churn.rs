//! Masqueraded connections that are opened, closed and reopened at the highest possible rate, while conntrack entries
//! are collected continuously.

use crate::bench::{Figure, Target};
use crate::conntrack::churn::churn;

const CONNECTIONS: u32 = 1_000_000;

/// Checks whether all segments and entries of live connections were correct, and reports the rates.
pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let churned = churn(CONNECTIONS)?;
    let seconds = churned.took.as_secs_f64();
    let figure = |what: &str, unit, ours, all: Option<u64>| Figure {
        name: format!("{CONNECTIONS} connections opened and closed: {what}"),
        unit,
        ours,
        other: all.map(|all| all as f64),
        target: all.map(|_| Target::Equal),
    };
    Ok(vec![
        figure("rate", "1/s", churned.opened as f64 / seconds, None),
        figure("segments", "1/s", churned.segments as f64 / seconds, None),
        figure(
            "opened again before their entry expired",
            "",
            churned.reopened as f64,
            None,
        ),
        figure(
            "peak use of the table",
            "%",
            churned.fullest_percent as f64,
            None,
        ),
        figure("collections", "", churned.collections as f64, None),
        figure("entries collected", "", churned.removed as f64, None),
        figure(
            "opened with a translated source port",
            "",
            churned.translated as f64,
            None,
        ),
        figure(
            "segments that kept their source port or returned (other: all)",
            "",
            churned.segments as f64 - churned.moved as f64,
            Some(churned.segments),
        ),
        figure(
            "entries with all their packets (other: checks of entries)",
            "",
            churned.looks as f64 - churned.wrong as f64,
            Some(churned.looks),
        ),
    ])
}
