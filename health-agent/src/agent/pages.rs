//! The HTTP pages for monitoring.

use std::sync::Arc;

use anyhow::Context as _;
use health_metrics::{Exporter, Format};
use health_model::settings::Location;
use health_server::page_server::{self, Answer, Page, PageServer};
use health_settings::{ApiSettings, Settings};
use hyper::{HeaderMap, StatusCode};

use super::source::AgentSource;

/// Serves all pages. Must be called in a tokio runtime.
pub(super) fn serve(
    config: &Settings,
    source: &Arc<AgentSource>,
    exporter: &Arc<Exporter<AgentSource, Location>>,
) -> anyhow::Result<[PageServer; 2]> {
    let ApiSettings {
        healthz_address,
        metrics_address,
        ..
    } = &config.api;
    let healthz = page_server::bind("--healthz-address", healthz_address)?;
    let scrapes = page_server::bind("--metrics-address", metrics_address)?;
    Ok([
        PageServer::start(healthz, health(source))
            .context("cannot serve the pages of --healthz-address")?,
        PageServer::start(scrapes, [metrics(exporter.clone())])
            .context("cannot serve GET /metrics")?,
    ])
}

/// The pages about the agent itself.
fn health(source: &Arc<AgentSource>) -> [Page; 3] {
    [healthz, livez, readyz].map(|page| page(source.clone()))
}

/// `GET /healthz`: whether this agent is healthy.
fn healthz(source: Arc<AgentSource>) -> Page {
    Page {
        path: "/healthz",
        answer: Box::new(move |_| source.liveness().answer()),
    }
}

/// `GET /livez`: whether the agent answers and none of its parts hangs.
fn livez(source: Arc<AgentSource>) -> Page {
    Page {
        path: "/livez",
        answer: Box::new(move |_| source.hangs().answer()),
    }
}

/// `GET /readyz`: whether the agent does all its work, as `ok` or the reason why not.
fn readyz(source: Arc<AgentSource>) -> Page {
    let answer = move |_: &HeaderMap| match source.unready() {
        None => Answer::of_text(StatusCode::OK, "text/plain", "ok".to_owned()),
        Some(reason) => Answer::of_text(StatusCode::SERVICE_UNAVAILABLE, "text/plain", reason),
    };
    Page {
        path: "/readyz",
        answer: Box::new(answer),
    }
}

/// `GET /metrics`: the agent's counters and measurements.
fn metrics(exporter: Arc<Exporter<AgentSource, Location>>) -> Page {
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
