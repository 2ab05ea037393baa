//! Concurrent scrapes.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use std::{io, thread};

use health_common::rtt::{RttKey, RttRow};
use health_datapath::dump::{DumpError, MetricRow};
use health_metrics::{Exporter, Figures, Format, Maps, Source};
use health_model::api::NodeStatus;

/// An agent that knows nothing yet.
struct Starting;

impl Source for Starting {
    fn figures(&self) -> Figures {
        Figures::default()
    }

    fn each_node(&self, _: &mut dyn FnMut(&NodeStatus)) {}
}

impl Maps for Starting {
    fn rtt(&self, _: &mut dyn FnMut(&RttKey, &RttRow)) -> Result<(), DumpError> {
        Ok(())
    }

    fn counters(&self) -> Result<Vec<MetricRow>, DumpError> {
        Ok(Vec::new())
    }
}

/// A scraper that does not read until another scrape has finished.
struct Slow {
    exporter: Arc<Exporter<Starting, Starting>>,
    others: usize,
}

impl io::Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.others == 0 {
            self.others += 1;
            let (ended, end) = channel();
            let exporter = self.exporter.clone();
            thread::spawn(move || {
                let mut text = Vec::new();
                exporter.scrape(Format::Classic, &mut text).unwrap();
                ended.send(text).unwrap();
            });
            let text = end.recv_timeout(Duration::from_secs(120)).unwrap();
            assert!(text.starts_with(b"# HELP "));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_slow_scraper_holds_up_no_other() {
    let exporter = Arc::new(Exporter::new(Arc::new(Starting), Starting));
    let mut slow = Slow {
        exporter: exporter.clone(),
        others: 0,
    };
    exporter.scrape(Format::OpenMetrics, &mut slow).unwrap();
    assert_eq!(slow.others, 1);
}
