//! Draws a row's histogram in characters.

use std::fmt::Write;

use health_api::rtt::RttEntry;
use health_common::rtt::{HISTOGRAM_BUCKETS, bucket_bounds};
use health_model::duration::short_duration;

/// Width of a time on the axis, in columns.
const TIME: usize = 9;
/// Minimum width of the bar with the largest count.
const MIN_BAR: usize = 10;
/// Number of lines around the bars: title, statistics, end of the axis, and an empty line.
const FRAME: usize = 5;
/// Minimum and maximum number of bars.
const BARS: std::ops::RangeInclusive<usize> = 16..=40;
/// Partial blocks, in steps of an eighth of a character's width.
const EIGHTHS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// Draws the histogram of `entry` for a terminal of this many columns and rows. Each bar covers one bucket, or two,
/// four, eight or sixteen neighbouring ones if there is no space for more bars. Since bucket widths double with each
/// power of two, the axis is logarithmic.
pub(super) fn plot(entry: &RttEntry, (columns, rows): (u16, u16)) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_plot(&mut text, entry, columns.into(), rows.into());
    text
}

fn write_plot(
    text: &mut String,
    entry: &RttEntry,
    columns: usize,
    rows: usize,
) -> std::fmt::Result {
    let figures = &entry.figures;
    write!(text, "{}", entry.path)?;
    if let Some(node) = entry.node {
        write!(text, " of {node}")?;
    }
    writeln!(text, ": {figures}")?;
    let buckets = &figures.histogram_ns;
    let most = rows.saturating_sub(FRAME).clamp(*BARS.start(), *BARS.end());
    let bars = bars(buckets.buckets(), most);
    let total: u64 = bars.iter().map(|bar| bar.count).sum();
    if total < figures.samples {
        writeln!(
            text,
            "  counts cover {total} of the round trips: all counts are halved when one reaches its maximum"
        )?;
    }
    let (Some(first), Some(last)) = (bars.first(), bars.last()) else {
        let none = if total == figures.samples {
            "  no round trips\n"
        } else {
            ""
        };
        return writeln!(text, "{none}");
    };
    let marks = [
        ("p50", figures.p50_ns),
        ("p90", figures.p90_ns),
        ("p99", figures.p99_ns),
    ];
    let largest = bars.iter().map(|bar| bar.count).max().unwrap_or(1);
    let digits = largest.to_string().len();
    // A bar is followed by a count and, in the worst case, all marks.
    let around = TIME + 2 + 1 + digits + " ◂ p50 p90 p99".chars().count();
    let room = columns.saturating_sub(around).max(MIN_BAR);
    for bar in &bars {
        let time = short_duration(bar.low_ns);
        let length = (bar.count * room as u64 * 8).div_ceil(largest) as usize;
        write!(text, "{time:>TIME$} ┤{} {}", blocks(length), bar.count)?;
        let marked: Vec<&str> = marks
            .iter()
            .filter(|(_, ns)| ns.is_some_and(|ns| bar.has(ns, first, last)))
            .map(|(name, _)| *name)
            .collect();
        if !marked.is_empty() {
            write!(text, " ◂ {}", marked.join(" "))?;
        }
        writeln!(text)?;
    }
    match last.high_ns {
        Some(ns) => writeln!(text, "{:>TIME$} ┘\n", short_duration(ns)),
        None => writeln!(text, "{:>TIME$} ┘\n", "longer"),
    }
}

/// Neighbouring buckets in one bar.
struct Bar {
    low_ns: u64,
    /// `None` for the last bucket, which has no upper bound.
    high_ns: Option<u64>,
    count: u64,
}

impl Bar {
    /// Whether this bar holds a value. The `first` and `last` bars also hold the values beyond them.
    fn has(&self, ns: u64, first: &Self, last: &Self) -> bool {
        let low = if std::ptr::eq(self, first) {
            0
        } else {
            self.low_ns
        };
        let high = if std::ptr::eq(self, last) {
            None
        } else {
            self.high_ns
        };
        low <= ns && high.is_none_or(|high| ns < high)
    }
}

/// Groups buckets into at most `most` bars, from the first nonempty bucket to the last, including those between.
fn bars(buckets: impl Iterator<Item = (usize, u16)>, most: usize) -> Vec<Bar> {
    let buckets: Vec<(usize, u16)> = buckets.collect();
    let (Some(&(first, _)), Some(&(last, _))) = (buckets.first(), buckets.last()) else {
        return Vec::new();
    };
    let mut width = 1;
    while width < 16 && group(last, width) - group(first, width) >= most {
        width *= 2;
    }
    let mut bars: Vec<Bar> = (group(first, width)..=group(last, width))
        .map(|group| {
            let (begin, end) = buckets_of(group, width);
            let (_, high_ns) = bucket_bounds(end - 1);
            Bar {
                low_ns: bucket_bounds(begin).0,
                high_ns: (high_ns < u64::MAX).then_some(high_ns),
                count: 0,
            }
        })
        .collect();
    for (index, count) in buckets {
        bars[group(index, width) - group(first, width)].count += u64::from(count);
    }
    bars
}

/// The index of the bar that holds a bucket. The first and the last bucket, which have no width, have their own bars.
fn group(bucket: usize, width: usize) -> usize {
    match bucket.checked_sub(1) {
        None => 0,
        Some(index) => 1 + index / width,
    }
}

/// The range of buckets in a bar.
fn buckets_of(group: usize, width: usize) -> (usize, usize) {
    match group {
        0 => (0, 1),
        group => {
            let begin = 1 + (group - 1) * width;
            (begin, (begin + width).min(HISTOGRAM_BUCKETS))
        }
    }
}

/// Draws a bar that is this many eighths of a character wide.
fn blocks(eighths: usize) -> String {
    let mut bar = "█".repeat(eighths / 8);
    bar.extend((eighths % 8).checked_sub(1).map(|rest| EIGHTHS[rest]));
    bar
}

#[cfg(test)]
mod tests {
    use health_common::probe::Path;
    use health_common::rtt::{PROTOCOL_ICMP, RttRow, SOURCE_KERNEL, bucket};

    use super::super::select::tests::key;
    use super::*;
    use health_api::rtt::{RttFigures, RttPath};

    fn drawn(row: &RttRow, size: (u16, u16)) -> String {
        let entry = RttEntry {
            node: Some("default/hnode2"),
            path: RttPath::from(&key("172.30.0.2", Path::Host, PROTOCOL_ICMP)),
            figures: RttFigures::new(row.into(), None),
        };
        plot(&entry, size)
    }

    fn row(all: &[(u64, u32)]) -> RttRow {
        let mut row = RttRow::EMPTY;
        for &(ns, times) in all {
            (0..times).for_each(|_| row.record(ns, 0, 0, SOURCE_KERNEL));
        }
        row
    }

    #[test]
    fn bars_are_as_long_as_their_counts_and_percentiles_are_marked() {
        let row = row(&[(17_000, 40), (19_000, 80), (25_000, 1)]);
        assert_eq!(
            drawn(&row, (50, 24)),
            "\
172.30.0.2 host ICMP of default/hnode2: samples=121 lost=0 min=17µs mean=18.4µs p50=19.5µs p90=19.5µs p99=19.5µs max=25µs jitter=375ns
   16.4µs ┤███████████ 40
   18.4µs ┤██████████████████████ 80 ◂ p50 p90 p99
   20.5µs ┤ 0
   22.5µs ┤ 0
   24.6µs ┤▍ 1
   26.6µs ┘

"
        );
    }

    #[test]
    fn a_wide_distribution_fits_on_the_terminal_and_no_count_is_left_out() {
        let row = row(&[(500, 3), (50_000, 5), (4_000_000, 7), (80_000_000_000, 2)]);
        let text = drawn(&row, (80, 24));
        let bars: Vec<&str> = text.lines().filter(|line| line.contains('┤')).collect();
        assert!(bars.len() <= 20, "{text}");
        let counts = bars.iter().filter_map(|bar| {
            let (_, behind) = bar.split_once('┤')?;
            let mut words = behind.split(' ');
            words.next();
            words.next()?.parse::<u32>().ok()
        });
        assert_eq!(counts.sum::<u32>(), 17, "{text}");
        assert!(text.contains("   longer ┘"), "{text}");
        let widest = text.lines().skip(1).map(|line| line.chars().count()).max();
        assert!(widest <= Some(80), "{text}");
    }

    #[test]
    fn halved_counts_and_no_counts_are_reported() {
        let halved = row(&[(20_000, 70_000)]);
        assert!(halved.histogram[bucket(20_000)] < 65_535);
        let text = drawn(&halved, (80, 24));
        assert!(text.contains("are halved"), "{text}");
        let none = drawn(&RttRow::EMPTY, (80, 24));
        assert!(
            none.ends_with(": samples=0 lost=0\n  no round trips\n\n"),
            "{none}"
        );
    }

    #[test]
    fn every_bucket_is_in_the_bar_that_is_drawn_for_it() {
        for width in [1, 2, 4, 8, 16] {
            for index in 0..HISTOGRAM_BUCKETS {
                let (begin, end) = buckets_of(group(index, width), width);
                assert!((begin..end).contains(&index), "{index} in {width}");
            }
        }
    }
}
