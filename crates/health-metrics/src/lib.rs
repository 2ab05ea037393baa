//! Prometheus metrics, built for each scrape from the state of the agent and its maps. Other crates serve them.
//!
//! Metrics that Cilium also exports have Cilium's names and labels, with `health_agent_` instead of `cilium_`: a host
//! may run both, and the series of two exporters with the same names would be added up. The same holds for the
//! kubelet's metrics.

#![forbid(unsafe_code)]

mod collections;
mod containers;
mod endpoints;
mod events;
mod figures;
mod format;
mod histogram;
mod recent;
mod render;
#[cfg(test)]
mod samples;
pub mod services;
mod summaries;
mod summary;
mod totals;
mod write;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use health_common::rtt::{RttKey, RttRow};
use health_datapath::dump::{DumpError, MetricRow, Pinned};
use health_model::settings::Location;
use jiff::Timestamp;
use tracing::debug;

pub use self::containers::Sample;
pub use self::figures::{Figures, ReloadCounts, Source};
pub use self::format::Format;
use self::histogram::Histogram;
use self::recent::TotalsHistory;
use self::render::Snapshot;
use self::summary::Summary;
use self::totals::{Class, Totals};

/// The maps that metrics are built from.
pub trait Maps: Send + Sync + 'static {
    /// Calls `each` with the rows of round-trip times one by one, because all rows together are large.
    fn rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow)) -> Result<(), DumpError>;
    /// Packet counters.
    fn counters(&self) -> Result<Vec<MetricRow>, DumpError>;
}

impl Maps for Location {
    fn rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow)) -> Result<(), DumpError> {
        Pinned::open(self)?.each_rtt(each)
    }

    fn counters(&self) -> Result<Vec<MetricRow>, DumpError> {
        Pinned::open(self)?.metrics()
    }
}

/// Answers scrapes.
pub struct Exporter<S, M> {
    source: Arc<S>,
    maps: M,
    counted: Mutex<Option<CountedSinceStart>>,
}

/// Counts since the agent started.
struct CountedSinceStart {
    totals: Totals,
    /// Snapshots of the round-trip totals, taken at intervals.
    recent: TotalsHistory<BTreeMap<Class, Histogram>>,
}

impl<S: Source, M: Maps> Exporter<S, M> {
    /// Exports the data of `source`. Does not read the maps until they are [there](Self::maps_are_there).
    pub fn new(source: Arc<S>, maps: M) -> Self {
        Self {
            source,
            maps,
            counted: Mutex::default(),
        }
    }

    /// Starts exporting the maps. Must be called before the first probe, because existing row contents were counted by
    /// previous agents, and counters start at zero in each process.
    pub fn maps_are_there(&self) -> Result<(), DumpError> {
        let counted = CountedSinceStart {
            totals: Totals::starting_from(&self.maps)?,
            recent: TotalsHistory::new(Instant::now(), BTreeMap::new()),
        };
        *self.counted.lock().unwrap_or_else(PoisonError::into_inner) = Some(counted);
        Ok(())
    }

    /// Writes all metrics. Takes as long as `out` takes to accept them. The maps are read first, by one scrape at a
    /// time. Text is never held in memory as a whole, even with very many nodes; protobuf messages are.
    pub fn scrape(&self, format: Format, out: &mut dyn io::Write) -> io::Result<()> {
        let snapshot = self.snapshot();
        let written = render::write(snapshot, format, out);
        // Scrapers may disconnect for reasons of their own.
        if let Err(error) = &written {
            debug!(%error, "cannot write the metrics");
        }
        written
    }

    fn snapshot(&self) -> Snapshot {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let figures = self.source.figures();
        let mut summary = Summary::new(&figures.report, figures.per_target);
        self.source.each_node(&mut |node| summary.add(node));
        let mut maps_readable = false;
        let mut counters = Vec::new();
        let mut probes = Vec::new();
        let mut before = BTreeMap::new();
        if let Some(CountedSinceStart { totals, recent }) = &mut *counted {
            let read = totals
                .read(&self.maps, &mut summary)
                .and_then(|()| self.maps.counters());
            match read {
                Ok(read) => {
                    maps_readable = true;
                    counters = read;
                }
                Err(error) => debug!(%error, "cannot read the maps; the metrics leave them out"),
            }
            let by_class = || totals.by_class();
            probes = by_class()
                .map(|(class, probes)| (class, probes.clone()))
                .collect();
            let now = by_class().map(|(class, probes)| (class, probes.histogram.clone()));
            before = recent.mark(Instant::now(), &now.collect()).clone();
        }
        Snapshot {
            figures,
            summary,
            now: Timestamp::now(),
            maps_readable,
            counters,
            probes,
            before,
        }
    }
}
