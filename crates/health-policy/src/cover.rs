//! Finds the smallest set of prefixes that gives every port its verdict when the longest matching prefix decides.
//!
//! This is the classic algorithm for minimizing a routing table. From the leaves up, it computes the cost of each part
//! of the port space for each verdict that the part may inherit from above. Then it picks the cheapest choice from the
//! root down.

use super::resolve::Verdict;

/// The verdict that a range of ports must get. The ranges of one protocol start at port 0 and leave no gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WantedRange {
    /// First port; the range ends where the next one starts.
    pub(super) first: u16,
    pub(super) verdict: Verdict,
    /// Whether having no entry at all is also correct.
    pub(super) is_default: bool,
}

/// Ports that share their first bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortPrefix {
    /// The lowest of the ports.
    pub(super) port: u16,
    /// How many leading bits the ports share, 0 to 16.
    pub(super) bits: u32,
    pub(super) verdict: Verdict,
}

/// All that ports can inherit from a shorter prefix: nothing, or a verdict.
const INHERITED: [Option<Verdict>; 4] = [
    None,
    Some(Verdict::Allow),
    Some(Verdict::Deny),
    Some(Verdict::None),
];

const fn slot(inherited: Option<Verdict>) -> usize {
    match inherited {
        None => 0,
        Some(Verdict::Allow) => 1,
        Some(Verdict::Deny) => 2,
        Some(Verdict::None) => 3,
    }
}

/// Number of entries and, as a tie-breaker, number of entries without a verdict. Fewer is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost {
    entries: u32,
    of_no_verdict: u32,
}

impl Cost {
    /// Cost of an impossible choice. It can be added up without overflow.
    const IMPOSSIBLE: Self = Self {
        entries: 1 << 24,
        of_no_verdict: 0,
    };

    fn plus(self, other: Self) -> Self {
        Self {
            entries: self.entries.saturating_add(other.entries),
            of_no_verdict: self.of_no_verdict.saturating_add(other.of_no_verdict),
        }
    }

    fn plus_entry(self, verdict: Verdict) -> Self {
        self.plus(Self {
            entries: 1,
            of_no_verdict: u32::from(verdict == Verdict::None),
        })
    }
}

/// The cheapest way to cover a part of the port space, for each verdict that the part may inherit.
#[derive(Clone, Debug)]
pub(super) struct Choices {
    cost: [Cost; 4],
    /// The entry to set for the whole part.
    entry: [Option<Verdict>; 4],
}

impl Choices {
    /// Computes the choices from the costs of the parts below, for each verdict that those parts inherit.
    fn over(below: [Cost; 4]) -> Self {
        let mut choices = Self {
            cost: below,
            entry: [None; 4],
        };
        for verdict in INHERITED.into_iter().flatten() {
            let cost = below[slot(Some(verdict))].plus_entry(verdict);
            for inherited in 0..INHERITED.len() {
                if cost < choices.cost[inherited] {
                    choices.cost[inherited] = cost;
                    choices.entry[inherited] = Some(verdict);
                }
            }
        }
        choices
    }

    /// Returns the costs of a part with the same `wanted` verdict everywhere. Also applies to the protocols that no
    /// rule names.
    fn below_of(wanted: WantedRange) -> [Cost; 4] {
        INHERITED.map(|inherited| {
            let does = match inherited {
                None => wanted.is_default,
                Some(verdict) => verdict == wanted.verdict,
            };
            if does {
                Cost::default()
            } else {
                Cost::IMPOSSIBLE
            }
        })
    }
}

/// A cover of the ports of one protocol.
#[derive(Clone, Debug)]
pub(super) struct Cover {
    choices: Choices,
    halves: Option<Box<[Cover; 2]>>,
}

impl Cover {
    /// Covers all ports.
    pub(super) fn new(wanted: &[WantedRange]) -> Self {
        Self::of_part(wanted, 0, 16)
    }

    /// Covers the ports that start at `first` and differ only in their last `bits` bits. The first of the `wanted`
    /// ranges may start before these ports, but must not start after `first`.
    fn of_part(wanted: &[WantedRange], first: u16, bits: u32) -> Self {
        if let [only] = wanted {
            return Self {
                choices: Choices::over(Choices::below_of(*only)),
                halves: None,
            };
        }
        let half = bits - 1;
        let middle = first + (1 << half);
        let begins_after = wanted.partition_point(|range| range.first < middle);
        let begins_by = wanted.partition_point(|range| range.first <= middle);
        let halves = [
            Self::of_part(&wanted[..begins_after], first, half),
            Self::of_part(&wanted[begins_by - 1..], middle, half),
        ];
        let below =
            std::array::from_fn(|i| halves[0].choices.cost[i].plus(halves[1].choices.cost[i]));
        Self {
            choices: Choices::over(below),
            halves: Some(Box::new(halves)),
        }
    }

    /// Returns the prefixes to set if the ports inherit `inherited`, shortest first in each part.
    pub(super) fn prefixes(&self, inherited: Option<Verdict>) -> Vec<PortPrefix> {
        let mut prefixes = Vec::new();
        self.collect(inherited, 0, 0, &mut prefixes);
        prefixes
    }

    fn collect(
        &self,
        inherited: Option<Verdict>,
        port: u16,
        bits: u32,
        prefixes: &mut Vec<PortPrefix>,
    ) {
        let entry = self.choices.entry[slot(inherited)];
        if let Some(verdict) = entry {
            prefixes.push(PortPrefix {
                port,
                bits,
                verdict,
            });
        }
        if let Some(halves) = &self.halves {
            let inherited = entry.or(inherited);
            let [low, high] = &**halves;
            low.collect(inherited, port, bits + 1, prefixes);
            high.collect(inherited, port | 1 << (15 - bits), bits + 1, prefixes);
        }
    }
}

/// Returns the entry for all protocols, if having one saves entries. `covers` are the covers of the protocols that
/// rules name, and `others` is the verdict required on all other protocols.
pub(super) fn entry_for_all<'a>(
    others: WantedRange,
    covers: impl IntoIterator<Item = &'a Cover>,
) -> Option<Verdict> {
    let below = covers
        .into_iter()
        .fold(Choices::below_of(others), |sum, cover| {
            std::array::from_fn(|i| sum[i].plus(cover.choices.cost[i]))
        });
    Choices::over(below).entry[slot(None)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(ranges: &[(u16, Verdict)]) -> Vec<WantedRange> {
        let range = |&(first, verdict)| WantedRange {
            first,
            verdict,
            is_default: verdict == Verdict::None,
        };
        ranges.iter().map(range).collect()
    }

    fn cover(ranges: &[(u16, Verdict)]) -> Vec<(u16, u32, Verdict)> {
        let prefixes = Cover::new(&wanted(ranges)).prefixes(None);
        prefixes
            .iter()
            .map(|prefix| (prefix.port, prefix.bits, prefix.verdict))
            .collect()
    }

    use Verdict::{Allow, Deny, None as Nothing};

    #[test]
    fn a_range_takes_as_few_prefixes_as_it_can() {
        assert_eq!(cover(&[(0, Nothing)]), []);
        assert_eq!(cover(&[(0, Allow)]), [(0, 0, Allow)]);
        assert_eq!(
            cover(&[(0, Nothing), (80, Allow), (81, Nothing)]),
            [(80, 16, Allow)]
        );
        assert_eq!(
            cover(&[(0, Nothing), (1024, Allow)]),
            [(0, 0, Allow), (0, 6, Nothing)]
        );
        assert_eq!(
            cover(&[(0, Nothing), (8, Allow), (12, Nothing)]),
            [(8, 14, Allow)]
        );
    }

    #[test]
    fn a_hole_is_one_longer_prefix() {
        assert_eq!(
            cover(&[(0, Allow), (443, Deny), (444, Allow)]),
            [(0, 0, Allow), (443, 16, Deny)]
        );
        assert_eq!(
            cover(&[(0, Allow), (443, Nothing), (444, Allow)]),
            [(0, 0, Allow), (443, 16, Nothing)]
        );
    }

    #[test]
    fn one_entry_for_all_protocols_serves_those_that_are_alike() {
        let tcp = Cover::new(&wanted(&[(0, Allow), (22, Deny), (23, Allow)]));
        let others = wanted(&[(0, Allow)])[0];
        assert_eq!(entry_for_all(others, [&tcp]), Some(Allow));
        assert_eq!(tcp.prefixes(Some(Allow)).len(), 1);
        let others = wanted(&[(0, Nothing)])[0];
        assert_eq!(entry_for_all(others, [&tcp]), None);
    }
}
