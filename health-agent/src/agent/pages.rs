//! The HTTP pages for monitoring.

use std::sync::Arc;

use health_metrics::{Exporter, Format};
use health_model::settings::Location;
use health_server::page_server::{Answer, Page};
use hyper::{HeaderMap, StatusCode};

use super::source::AgentSource;

/// `GET /healthz`: whether this agent is healthy.
pub(super) fn healthz(source: Arc<AgentSource>) -> Page {
    Page {
        path: "/healthz",
        answer: Box::new(move |_| source.liveness().answer()),
    }
}

/// `GET /metrics`: the agent's counters and measurements.
pub(super) fn metrics(exporter: Arc<Exporter<AgentSource, Location>>) -> Page {
    let answer = move |headers: &HeaderMap| {
        let format = Format::accepted(headers);
        let exporter = exporter.clone();
        Answer {
            status: StatusCode::OK,
            content_type: format.content_type(),
            headers: Vec::new(),
            body: Box::new(move |out| exporter.scrape(format, out)),
        }
    };
    Page {
        path: "/metrics",
        answer: Box::new(answer),
    }
}
