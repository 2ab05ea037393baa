//! The table of round-trip times.

use health_api::rtt::{RttEntry, percent, signed};
use health_model::duration::short_duration;

use crate::output::{NONE, table};

/// The columns to show.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    /// Whether to show node names.
    pub(super) names: bool,
    /// Whether to show all columns.
    pub(super) wide: bool,
    /// Whether counts are those since the previous update.
    pub(super) delta: bool,
}

impl Columns {
    /// Formats `entries` as a table.
    pub(super) fn table<'a>(self, entries: impl Iterator<Item = RttEntry<'a>>) -> String {
        let rows = entries.map(|entry| self.cells(&entry));
        let mut header = vec!["PEER"];
        header.extend(self.names.then_some("NODE"));
        header.extend(["PATH", "PROTOCOL", "SOURCE", "SAMPLES"]);
        header.extend(self.delta.then_some("LOST"));
        header.extend([
            "LOSS", "LAST", "MIN", "P50", "P90", "P99", "MAX", "JITTER", "NETWORK",
        ]);
        if self.wide {
            header.extend((!self.delta).then_some("LOST"));
            header.extend(["LATE", "DUPLICATES", "MEAN", "SMOOTHED"]);
            header.extend(["REMOTE LAST", "REMOTE MEAN", "REMOTE MAX"]);
            header.extend(["FORWARD", "BACK", "CLOCK ERROR"]);
        }
        table(header, rows)
    }

    fn cells(self, entry: &RttEntry) -> Vec<String> {
        let RttEntry {
            node,
            path,
            figures,
        } = entry;
        let mut cells = vec![path.peer.to_string()];
        cells.extend(self.names.then(|| node.unwrap_or(NONE).to_owned()));
        cells.extend([
            path.path.to_owned(),
            path.protocol.to_owned(),
            figures.source.unwrap_or(NONE).to_owned(),
            self.count(figures.samples),
        ]);
        cells.extend(self.delta.then(|| self.count(figures.lost)));
        cells.extend([
            known(figures.loss_ratio, percent),
            known(figures.last_ns, short_duration),
            known(figures.min_ns, short_duration),
            known(figures.p50_ns, short_duration),
            known(figures.p90_ns, short_duration),
            known(figures.p99_ns, short_duration),
            known(figures.max_ns, short_duration),
            known(figures.jitter_ns, short_duration),
            known(figures.network_share, percent),
        ]);
        if self.wide {
            cells.extend((!self.delta).then(|| self.count(figures.lost)));
            cells.extend([
                self.count(figures.late),
                self.count(figures.duplicates),
                known(figures.mean_ns, short_duration),
                known(figures.smoothed_ns, short_duration),
                known(figures.remote_last_ns, short_duration),
                known(figures.remote_mean_ns, short_duration),
                known(figures.remote_max_ns, short_duration),
                known(figures.forward_smoothed_ns, signed),
                known(figures.back_smoothed_ns, signed),
                figures.clock().unwrap_or_else(|| NONE.to_owned()),
            ]);
        }
        cells
    }

    fn count(self, count: u64) -> String {
        if self.delta {
            format!("+{count}")
        } else {
            count.to_string()
        }
    }
}

fn known<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| NONE.to_owned(), text)
}

#[cfg(test)]
mod tests {
    use health_common::probe::Path;
    use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, Reply, RttRow, SOURCE_KERNEL, bucket};
    use health_net::clock::ClockState;

    use super::super::select::tests::{key, names};
    use super::*;
    use health_api::rtt::{RttFigures, RttPath};

    const CLOCK: ClockState = ClockState {
        synchronised: true,
        max_error_us: 250,
        estimated_error_us: 12,
        tai_offset_s: 37,
    };

    fn shown(columns: Columns, clock: ClockState) -> String {
        let mut measured = RttRow::EMPTY;
        measured.record(20_000, 1, 1, SOURCE_KERNEL);
        let reply = Reply {
            rtt_ns: 22_000,
            remote_ns: 5_500,
            forward_ns: 9_000,
            back_ns: -1_200,
        };
        assert!(measured.record_reply(bucket(reply.rtt_ns), &reply, 2, 2, SOURCE_KERNEL));
        measured.lost = 1;
        measured.duplicates = 4;
        let mut silent = RttRow::EMPTY;
        silent.lost = 3;
        let names = names();
        let rows = [
            (key("172.30.0.2", Path::Host, PROTOCOL_ICMP), measured),
            (key("172.30.0.10", Path::Host, PROTOCOL_HTTP), silent),
        ];
        columns.table(rows.iter().map(|(key, row)| RttEntry {
            node: names.of(key.peer.to_ip()),
            path: RttPath::from(key),
            figures: RttFigures::new(row.into(), Some(clock)),
        }))
    }

    #[test]
    fn what_is_not_known_is_marked() {
        let columns = Columns {
            names: true,
            wide: false,
            delta: false,
        };
        assert_eq!(
            shown(columns, CLOCK),
            "\
PEER          NODE             PATH   PROTOCOL   SOURCE   SAMPLES   LOSS    LAST   MIN    P50    P90      P99      MAX    JITTER   NETWORK
172.30.0.2    default/hnode2   host   ICMP       kernel   2         33.3%   22µs   20µs   20µs   21.5µs   21.5µs   22µs   125ns    75%
172.30.0.10   -                host   HTTP       -        0         100%    -      -      -      -        -        -      -        -
"
        );
    }

    #[test]
    fn differences_are_marked_as_such_and_report_how_many_were_lost() {
        let columns = Columns {
            names: false,
            wide: false,
            delta: true,
        };
        let words =
            |line: &str| -> Vec<String> { line.split_whitespace().map(str::to_owned).collect() };
        let text = shown(columns, CLOCK);
        let mut lines = text.lines().map(words);
        let header = lines.next().unwrap();
        assert_eq!(header[4..7], ["SAMPLES", "LOST", "LOSS"]);
        assert_eq!(lines.next().unwrap()[4..7], ["+2", "+1", "33.3%"]);
        assert_eq!(lines.next().unwrap()[4..8], ["+0", "+3", "100%", "-"]);
        let wide = shown(
            Columns {
                wide: true,
                ..columns
            },
            CLOCK,
        );
        assert_eq!(wide.matches("LOST").count(), 1, "{wide}");
        assert!(wide.contains("   +4 "), "{wide}");
    }

    #[test]
    fn wide_shows_what_delays_of_one_direction_are_worth() {
        let columns = Columns {
            names: false,
            wide: true,
            delta: false,
        };
        let text = shown(columns, CLOCK);
        let line = text.lines().nth(1).unwrap();
        let tail = "1      0      4            21µs   20.3µs     5.5µs         5.5µs         5.5µs        \
                    9µs       -1.2µs   ±12µs, at most 250µs";
        assert!(line.ends_with(tail), "{text}");
        let unsynchronised = ClockState {
            synchronised: false,
            ..CLOCK
        };
        assert!(shown(columns, unsynchronised).contains("   unsynchronised"));
    }
}
