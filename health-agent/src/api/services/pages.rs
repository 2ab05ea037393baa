//! The pages of kube-proxy: how services do, for load balancers and supervisors, and its metrics
//! (`pkg/proxy/healthcheck/proxy_health.go` and `cmd/kube-proxy/app/server.go` of Kubernetes).

use std::sync::Arc;

use health_service::health_check::HealthAnswer;
use health_service::services::Handle;
use hyper::header::{HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::{HeaderMap, StatusCode};
use serde::Serialize;

use crate::api::monitor::{Answer, Page};
use crate::metrics::Format;
use crate::metrics::services::ServiceMetrics;

/// What `/proxyMode` says.
const MODE: &str = "ebpf";

/// `/healthz` and `/livez`.
pub fn health(handle: &Handle, metrics: &Arc<ServiceMetrics>) -> [Page; 2] {
    let page = |path, ask: fn(&Handle) -> HealthAnswer, note: fn(&ServiceMetrics, u16)| {
        let (handle, metrics) = (handle.clone(), metrics.clone());
        Page {
            path,
            answer: Box::new(move |_| {
                let answer = ask(&handle);
                note(&metrics, answer.code());
                json(answer.code(), &answer, None)
            }),
        }
    };
    [
        page("/healthz", Handle::healthz, ServiceMetrics::note_healthz),
        page("/livez", Handle::livez, ServiceMetrics::note_livez),
    ]
}

/// `/metrics`, `/healthz`, which only says that somebody answers, and `/proxyMode`.
pub fn metrics(handle: &Handle, metrics: &Arc<ServiceMetrics>) -> [Page; 3] {
    let (handle, metrics) = (handle.clone(), metrics.clone());
    let scrape = move |headers: &HeaderMap| {
        let format = Format::accepted(headers);
        let (changes, metrics) = (handle.changes(), metrics.clone());
        Answer {
            status: StatusCode::OK,
            content_type: format.content_type(),
            headers: Vec::new(),
            body: Box::new(move |out| metrics.scrape(changes, format, out)),
        }
    };
    [
        Page {
            path: "/metrics",
            answer: Box::new(scrape),
        },
        plain("/healthz", "ok"),
        plain("/proxyMode", MODE),
    ]
}

fn plain(path: &'static str, text: &'static str) -> Page {
    let answer = |_: &HeaderMap| {
        let media_type = "text/plain; charset=utf-8";
        Answer::of_text(StatusCode::OK, media_type, text.to_owned())
    };
    Page {
        path,
        answer: Box::new(answer),
    }
}

/// An answer in JSON that browsers take for nothing else.
pub(super) fn json(
    code: u16,
    body: &impl Serialize,
    header: Option<(HeaderName, HeaderValue)>,
) -> Answer {
    let written = serde_json::to_string(body);
    let answer = match (written, StatusCode::from_u16(code)) {
        (Ok(body), Ok(status)) => Answer::of_text(status, "application/json", body),
        // Neither can be: they are plain data and statuses of HTTP.
        (Err(error), _) => failed(&error),
        (_, Err(error)) => failed(&error),
    };
    let no_sniffing = (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let headers = [no_sniffing].into_iter().chain(header).collect();
    Answer { headers, ..answer }
}

fn failed(error: &dyn std::error::Error) -> Answer {
    let status = StatusCode::INTERNAL_SERVER_ERROR;
    Answer::of_text(status, "text/plain", error.to_string())
}
