//! Prometheus metrics, built anew for each scrape from what the agent and its maps know.
//!
//! Metrics that Cilium has too carry Cilium's names and labels, with `health_agent_` in place of
//! `cilium_`: a host may run both, and two exporters with the same names would be added up.

mod render;
mod totals;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use health_common::rtt::{RttKey, RttRow};
use tracing::{debug, warn};

use self::render::Snapshot;
use self::totals::Totals;
use crate::api::server::Source;
use crate::config::Location;
use crate::datapath::dump::{DumpError, MetricRow, Pinned};

/// Media type of [`Exporter::scrape`]'s text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The maps that metrics are made of.
pub trait Maps: Send + Sync + 'static {
    /// Rows of round-trip times.
    fn rtt(&self) -> Result<Vec<(RttKey, RttRow)>, DumpError>;
    /// Packet counters.
    fn counters(&self) -> Result<Vec<MetricRow>, DumpError>;
}

impl Maps for Location {
    fn rtt(&self) -> Result<Vec<(RttKey, RttRow)>, DumpError> {
        Pinned::open(self)?.rtt()
    }

    fn counters(&self) -> Result<Vec<MetricRow>, DumpError> {
        Pinned::open(self)?.metrics()
    }
}

/// Answers scrapes.
pub struct Exporter<S, M> {
    source: Arc<S>,
    maps: M,
    totals: OnceLock<Mutex<Totals>>,
}

impl<S: Source, M: Maps> Exporter<S, M> {
    /// Shows what `source` knows; the maps are left alone until they are
    /// [there](Self::maps_are_there).
    pub fn new(source: Arc<S>, maps: M) -> Self {
        Self {
            source,
            maps,
            totals: OnceLock::new(),
        }
    }

    /// Begins to show the maps. To be called before the first probe: what the rows hold by then was
    /// counted by former agents, and counters start with a process.
    pub fn maps_are_there(&self) -> Result<(), DumpError> {
        let totals = Totals::starting_from(&self.maps.rtt()?);
        self.totals.get_or_init(|| Mutex::new(totals));
        Ok(())
    }

    /// All metrics in OpenMetrics' text format. Blocks for as long as the maps are read.
    pub fn scrape(&self) -> Result<String, std::fmt::Error> {
        let report = self.source.status();
        let mut maps_readable = false;
        let mut counters = Vec::new();
        let mut probes = Vec::new();
        if let Some(totals) = self.totals.get() {
            // Held while the rows are read: of two scrapes at a time, the older rows come first.
            let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
            match self.maps.rtt().and_then(|rows| {
                counters = self.maps.counters()?;
                Ok(rows)
            }) {
                Ok(rows) => {
                    maps_readable = true;
                    totals.add(&rows, &report);
                }
                Err(error) => debug!(%error, "metrics without the maps"),
            }
            probes = totals.by_class().collect();
        }
        let repairs = self
            .source
            .endpoints()
            .into_iter()
            .flat_map(|endpoint| endpoint.repairs)
            .collect();
        let text = render::text(Snapshot {
            report,
            repairs,
            uptime: self.source.uptime(),
            maps_readable,
            counters,
            probes,
        });
        if let Err(error) = &text {
            warn!(%error, "metrics cannot be written down");
        }
        text
    }
}
