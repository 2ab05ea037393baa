//! The HTTP pages of kube-proxy: health for load balancers and supervisors, and metrics
//! (`pkg/proxy/healthcheck/proxy_health.go` and `cmd/kube-proxy/app/server.go` of Kubernetes).

use std::sync::Arc;

use health_metrics::Format;
use health_metrics::services::ServiceMetrics;
use health_service::health_check::HealthAnswer;
use health_service::services::Handle;
use hyper::header::{HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::{HeaderMap, StatusCode};
use serde::Serialize;

use crate::page_server::{Answer, Page};

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

/// `/metrics`, `/proxyMode`, and `/healthz`, which only shows that the server responds.
pub fn metrics(handle: &Handle, metrics: &Arc<ServiceMetrics>) -> [Page; 3] {
    let (handle, metrics) = (handle.clone(), metrics.clone());
    let mode = metrics.mode().name();
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
        plain("/proxyMode", mode),
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

/// A JSON response that browsers must not sniff for other types.
pub(super) fn json(
    code: u16,
    body: &impl Serialize,
    header: Option<(HeaderName, HeaderValue)>,
) -> Answer {
    let written = serde_json::to_string(body);
    let answer = match (written, StatusCode::from_u16(code)) {
        (Ok(body), Ok(status)) => Answer::of_text(status, "application/json", body),
        // Neither happens: the body is plain data, and the code is an HTTP status.
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use health_service::health_check::NodeStanding;
    use health_settings::ServiceProxyMode;
    use serde_json::Value;

    use super::super::testing::{Bed, get};
    use super::*;
    use crate::page_server::PageServer;

    fn serve(pages: impl IntoIterator<Item = Page>) -> (PageServer, std::net::SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        (PageServer::start(vec![listener], pages).unwrap(), address)
    }

    #[tokio::test]
    async fn load_balancers_and_supervisors_learn_how_services_do() {
        let mut bed = Bed::start(&[true, false]);
        bed.until(|view| view.is_synced && view.failure.is_none())
            .await;
        let metrics = Arc::new(ServiceMetrics::new(ServiceProxyMode::Ebpf));
        let (_server, address) = serve(health(&bed.handle, &metrics));
        bed.until_healthy(true).await;
        let (code, headers, body) = get(address, "/healthz").await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(code, 200, "{body}");
        assert_eq!(headers["content-type"], "application/json");
        assert_eq!(headers["x-content-type-options"], "nosniff");
        assert_eq!(body["nodeEligible"], true);
        assert_eq!(body["status"]["IPv6"]["healthy"], true);
        assert_eq!(body["lastUpdated"], body["currentTime"]);
        let (code, _, body) = get(address, "/livez").await;
        assert!(code == 200 && !body.contains("nodeEligible"), "{body}");

        // A node that is about to be deleted gets no new traffic, but is healthy.
        bed.handle.node(NodeStanding {
            is_deleting: true,
            taints: &[],
        });
        assert_eq!(get(address, "/healthz").await.0, 503);
        assert_eq!(get(address, "/livez").await.0, 200);
        // State that cannot be applied makes the service proxy unhealthy.
        bed.change();
        bed.until_healthy(false).await;
        let (code, _, body) = get(address, "/livez").await;
        assert!(code == 503 && body.contains("\"healthy\":false"), "{body}");
        assert_eq!(get(address, "/metrics").await.0, 404);
    }

    #[tokio::test]
    async fn metrics_and_the_mode_are_reported() {
        let mut bed = Bed::start(&[true]);
        bed.until(|view| view.is_synced).await;
        let counts = Arc::new(ServiceMetrics::new(ServiceProxyMode::Ipvs));
        counts.note_livez(200);
        let (_server, address) = serve(metrics(&bed.handle, &counts));
        let (code, headers, text) = get(address, "/metrics").await;
        assert_eq!(code, 200);
        assert_eq!(headers["content-type"], Format::Classic.content_type());
        let line = "kubeproxy_proxy_livez_total{code=\"200\"} 1\n";
        assert!(text.contains(line), "{text}");
        let line = "kubeproxy_sync_proxy_rules_ipvs_sync_failures_total 0\n";
        assert!(text.contains(line), "{text}");
        for (path, answer) in [("/healthz", "ok"), ("/proxyMode", "ipvs")] {
            let (code, headers, text) = get(address, path).await;
            assert_eq!((code, &*text), (200, answer), "{path}");
            assert_eq!(headers["content-type"], "text/plain; charset=utf-8");
        }
    }
}
