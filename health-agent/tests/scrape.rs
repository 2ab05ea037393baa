//! Concurrent scrapes.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use std::{io, thread};

use common::{Agent, Fixture};
use health_agent::api::source::Source as _;
use health_agent::metrics::{Exporter, Format};
use health_model::settings::Location;

/// A scraper that does not read until another scrape has finished.
struct Slow {
    exporter: Arc<Exporter<Fixture, Location>>,
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
    let mut source = None;
    let _agent = Agent::start(|fixture| source = Some(fixture.clone()));
    let source = Arc::new(source.unwrap());
    let exporter = Arc::new(Exporter::new(source.clone(), source.settings().location));
    let mut slow = Slow {
        exporter: exporter.clone(),
        others: 0,
    };
    exporter.scrape(Format::OpenMetrics, &mut slow).unwrap();
    assert_eq!(slow.others, 1);
}
