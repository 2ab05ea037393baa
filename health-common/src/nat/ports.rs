//! Port selection for translated flows.

/// The range of ports, or ICMP identifiers, for translated flows; host byte order, inclusive at both ends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ports {
    /// The lowest port.
    pub min: u16,
    /// The highest port, at least `min`.
    pub max: u16,
}

crate::map_types!(Ports = 4);

/// Maximum number of ports tried per flow.
pub const TRIES: u32 = 32;

impl Ports {
    /// Whether the port is in the range.
    #[inline(always)]
    pub const fn contains(self, port: u16) -> bool {
        self.min <= port && port <= self.max
    }

    /// Number of ports, 1..=65536.
    #[inline(always)]
    pub const fn count(self) -> u32 {
        self.max.saturating_sub(self.min) as u32 + 1
    }

    /// The ports to try for a flow from `source`, host byte order. `random` must differ for each search.
    #[inline(always)]
    pub const fn search(self, source: u16, random: u32) -> PortSearch {
        let count = self.count();
        let is_kept = self.contains(source);
        PortSearch {
            min: self.min,
            count,
            // The search starts here and wraps around. If the source port is in the range, it takes the last position,
            // which the search skips.
            begin: if is_kept {
                (source - self.min) as u32 + 1
            } else {
                scale(random >> 16, count)
            },
            kept: is_kept as u32,
            random,
        }
    }
}

/// The ports to try for one flow: its own if the flow may keep it, then others. No port is tried twice.
///
/// The range is divided into 32 parts. Each search visits the parts in a different order and tries one port of each, at
/// a different position. So searches for flows that want the same ports diverge immediately, and hit ports in use no
/// more often than random choices would.
#[derive(Clone, Copy, Debug)]
pub struct PortSearch {
    min: u16,
    count: u32,
    begin: u32,
    kept: u32,
    random: u32,
}

impl PortSearch {
    /// The port to try, host byte order, after `tries` other ports were found in use. `None` after [`TRIES`] ports, or
    /// when the range is exhausted.
    #[inline(always)]
    pub const fn candidate(&self, tries: u32) -> Option<u16> {
        if tries >= TRIES {
            return None;
        }
        if tries < self.kept {
            return Some(self.port(self.count - 1));
        }
        let place = tries - self.kept;
        let others = self.count - self.kept;
        if others <= TRIES - self.kept {
            return if place < others {
                Some(self.port(place))
            } else {
                None
            };
        }
        // An odd factor yields a permutation of the 32 parts.
        let part = place
            .wrapping_mul(self.random | 1)
            .wrapping_add(self.random >> 5)
            % TRIES;
        let begin = part * others / TRIES;
        let end = (part + 1) * others / TRIES;
        // The golden ratio in 32 bits: spreads adjacent values (Knuth, The Art of Computer Programming 6.4).
        let spread = (self.random ^ part).wrapping_mul(0x9e37_79b9) >> 16;
        Some(self.port(begin + scale(spread, end - begin)))
    }

    /// The port at a position of the search, 0..count.
    #[inline(always)]
    const fn port(&self, place: u32) -> u16 {
        let around = self.begin + place;
        let index = if around >= self.count {
            around - self.count
        } else {
            around
        };
        self.min.wrapping_add(index as u16)
    }
}

/// Scales a 16-bit number to 0..count.
#[inline(always)]
const fn scale(number: u32, count: u32) -> u32 {
    ((number as u64 * count as u64) >> 16) as u32
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    fn candidates(ports: Ports, source: u16, random: u32) -> Vec<u16> {
        let search = ports.search(source, random);
        (0..u32::MAX).map_while(|i| search.candidate(i)).collect()
    }

    fn ports() -> impl Strategy<Value = Ports> {
        prop_oneof![
            any::<(u16, u16)>(),
            (any::<u16>(), 0_u16..100).prop_map(|(min, more)| (min, min.saturating_add(more))),
        ]
        .prop_map(|(a, b)| Ports {
            min: a.min(b),
            max: a.max(b),
        })
    }

    /// Returns the total numbers of searches and of tries needed to give each of `flows` flows one of `count` ports.
    fn crowd(count: u16, flows: u32, source: impl Fn(u32) -> u16) -> (u32, u32) {
        let ports = Ports {
            min: 1024,
            max: 1023 + count,
        };
        let mut used = BTreeSet::new();
        let (mut searches, mut tries) = (0, 0);
        let mut random = 1_u32;
        for flow in 0..flows {
            loop {
                // Xorshift (Marsaglia, 2003).
                random ^= random << 13;
                random ^= random >> 17;
                random ^= random << 5;
                searches += 1;
                let all = candidates(ports, source(flow), random);
                let free = all.iter().position(|port| !used.contains(port));
                tries += free.map_or(TRIES, |at| at as u32 + 1);
                if let Some(at) = free {
                    used.insert(all[at]);
                    break;
                }
                assert!(searches < 100 * flows, "{} of {flows} found", used.len());
            }
        }
        (searches, tries)
    }

    #[test]
    fn flows_that_all_want_the_same_port_find_others_about_as_fast_as_by_chance() {
        // Half full at the end: a random port is in use one time in four on average.
        let (searches, tries) = crowd(10_000, 5_000, |_| 4000);
        assert_eq!(searches, 5_000);
        assert!(tries < 3 * 5_000, "{tries}");
    }

    #[test]
    fn flows_from_everywhere_find_ports_until_nearly_all_are_in_use() {
        let (searches, tries) = crowd(10_000, 9_000, |flow| 30_000 + flow as u16);
        assert!(searches < 9_000 + 200, "{searches}");
        assert!(tries < 4 * 9_000, "{tries}");
    }

    #[test]
    fn whoever_asks_again_gets_the_last_port() {
        for count in [1, 31, 32, 33, 34, 50, 100, 300] {
            for source in [1, 1024, 1023 + count] {
                crowd(count, u32::from(count), |_| source);
            }
        }
    }

    proptest! {
        #[test]
        fn candidates_are_in_range_and_never_come_twice(ports in ports(), source: u16, random: u32) {
            let all = candidates(ports, source, random);
            prop_assert_eq!(all.len() as u32, ports.count().min(TRIES));
            prop_assert!(all.iter().all(|&port| ports.contains(port)));
            prop_assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
            if ports.contains(source) {
                prop_assert_eq!(all[0], source);
            }
        }

        #[test]
        fn a_range_upside_down_is_its_lowest_port(min: u16, max: u16, source: u16, random: u32) {
            prop_assume!(max < min);
            prop_assert_eq!(candidates(Ports { min, max }, source, random), [min]);
        }

        #[test]
        fn a_scaled_number_is_below_the_count(number in 0_u32..=0xffff, count in 1_u32..=65536) {
            prop_assert!(scale(number, count) < count);
        }
    }
}
