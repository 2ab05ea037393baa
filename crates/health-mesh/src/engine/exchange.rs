//! Compares the peers' counts of this agent's echo probes with this side's counts.

use std::time::Duration;

use health_common::arrivals::{Arrivals, WAYS};

use super::Engine;
use crate::direction::{Exchange, OwnCounts};
use crate::http::Hello;
use crate::target::TargetId;

/// This side's counts of the followed ways to a node, indexed by [`health_common::arrivals::way`].
pub(super) type WayCounts = [Option<OwnCounts>; WAYS];

impl Engine {
    /// This side's counts of the ways to a node; `None` if none is followed.
    pub(super) fn way_counts(&self, node: usize) -> Option<Box<WayCounts>> {
        let results = self.shared.results();
        if !results.is_followed(node) {
            return None;
        }
        let counts = std::array::from_fn(|way| self.own_counts(results.way(node, way)));
        Some(Box::new(counts))
    }

    /// This side's counts of the probes to some targets; `None` if they cannot be read.
    pub(super) fn own_counts(
        &self,
        mut targets: impl Iterator<Item = TargetId>,
    ) -> Option<OwnCounts> {
        targets.try_fold(OwnCounts::default(), |counts, id| {
            let key = self.targets.get(id)?.key;
            let row = self.accounts.row(key)?;
            let in_flight = u32::try_from(self.icmp.waiting(&key)).ok()?;
            // The low bits: the counts wrap.
            let surplus = row.late + row.duplicates;
            let returned = (row.samples + surplus) as u32;
            let settled = (row.samples + row.lost) as u32;
            Some(OwnCounts {
                settled: counts.settled.wrapping_add(settled),
                in_flight: counts.in_flight + in_flight,
                returned: counts.returned.wrapping_add(returned),
                surplus: counts.surplus.wrapping_add(surplus as u32),
            })
        })
    }

    /// Compares a node's report about this agent's echo probes with this side's counts. Ways with losses are followed
    /// from now on, and compared from the next exchange on.
    pub(super) fn exchange(
        &self,
        node: usize,
        asked: Duration,
        before: Option<&WayCounts>,
        hello: &Hello,
    ) {
        if hello.headers.malformed {
            self.shared.malformed.add();
        }
        let Some(Arrivals { since_ns, ways }) = hello.headers.arrivals else {
            return;
        };
        let answered = self.now();
        for (way, counts) in ways.into_iter().enumerate() {
            let results = self.shared.results();
            let Some(first) = results.way(node, way).next() else {
                continue;
            };
            let lossy = results.is_lossy(node, way, answered);
            if !lossy && !results.is_followed(node) {
                continue;
            }
            let after = before
                .filter(|_| lossy)
                .and_then(|_| self.own_counts(results.way(node, way)));
            drop(results);
            let before = before.and_then(|before| before[way]);
            let mut results = self.shared.results_mut();
            let followed = results.ways();
            if !lossy {
                followed.forget(first);
                continue;
            }
            followed.follow(first);
            if let (Some(before), Some(after)) = (before, after) {
                let exchange = Exchange {
                    asked,
                    before,
                    answered,
                    after,
                    since_ns,
                    counts,
                };
                followed.exchanged(first, &exchange);
            }
        }
    }
}
