//! Serves a few pages, such as `/metrics` or `/healthz`, over TCP for monitoring and load balancers.

use std::fmt::Display;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use health_net::listen;
use health_settings::ListenAddress;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use nix::errno::Errno;
use tracing::info;

use super::serve::{Limits, Server, has_body};
use super::streamed;

pub(super) const BACKLOG: i32 = 64;
const LIMITS: Limits = Limits {
    connections: 16,
    head: Duration::from_secs(2),
    patience: Duration::from_secs(10),
};

/// Why a page cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process listens on the address.
    #[error("cannot listen on {address}: the port is in use; choose another {flag}, or 'off'")]
    InUse {
        /// The address.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
    },
    /// Anything else.
    #[error("cannot listen on {address} (see {flag}): {source}")]
    Other {
        /// The address.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Listens on `listen`, the value of `flag`, in the calling thread's network namespace. `localhost` omits an IP version
/// that the host lacks.
pub fn bind(flag: &'static str, listen: &ListenAddress) -> Result<Vec<TcpListener>, BindError> {
    let failed = |address| {
        move |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address, flag },
            _ => BindError::Other {
                address,
                flag,
                source,
            },
        }
    };
    match *listen {
        ListenAddress::Off => Ok(Vec::new()),
        ListenAddress::Address(address) => Ok(vec![
            listen::tcp(address, BACKLOG).map_err(failed(address))?,
        ]),
        ListenAddress::Localhost(port) => {
            let mut listeners = Vec::new();
            for address in [
                SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
                SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
            ] {
                match listen::tcp(address, BACKLOG) {
                    Ok(listener) => listeners.push(listener),
                    Err(error) if is_missing(&error) => {
                        info!(%address, flag, "not served: the host does not have the address");
                    }
                    Err(error) => return Err(failed(address)(error)),
                }
            }
            Ok(listeners)
        }
    }
}

/// Whether the host lacks the address or the whole IP version.
pub(super) fn is_missing(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EADDRNOTAVAIL | Errno::EAFNOSUPPORT))
}

/// Writes a body. May block for as long as the reader is slow.
pub type WriteBody = Box<dyn FnOnce(&mut dyn io::Write) -> io::Result<()> + Send>;

/// A response to `GET`.
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The body's media type.
    pub content_type: &'static str,
    /// Further headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Writes the body.
    pub body: WriteBody,
}

impl Answer {
    /// A response with a complete body.
    pub fn of_text(status: StatusCode, content_type: &'static str, text: String) -> Self {
        Self {
            status,
            content_type,
            headers: Vec::new(),
            body: Box::new(move |out| out.write_all(text.as_bytes())),
        }
    }
}

/// Creates the response to a request with these headers; may block.
pub type MakeAnswer = Box<dyn Fn(&HeaderMap) -> Answer + Send + Sync>;

/// A path and its responses.
pub struct Page {
    /// The path in axum's syntax.
    pub path: &'static str,
    /// Creates the responses.
    pub answer: MakeAnswer,
}

/// Serves pages. Closes the listeners when dropped.
#[derive(Debug)]
pub struct PageServer(Server);

impl PageServer {
    /// Serves `pages` on `listeners`. Must be called in a tokio runtime.
    pub fn start(
        listeners: Vec<TcpListener>,
        pages: impl IntoIterator<Item = Page>,
    ) -> io::Result<Self> {
        let listeners: io::Result<Vec<_>> = listeners
            .into_iter()
            .map(tokio::net::TcpListener::from_std)
            .collect();
        Ok(Self(Server::start(listeners?, &router(pages), LIMITS)))
    }

    /// Closes the listeners and waits for the requests in flight.
    pub async fn shutdown(self) {
        self.0.shutdown().await;
    }
}

fn router(pages: impl IntoIterator<Item = Page>) -> Router {
    let mut router = Router::new();
    let mut paths = Vec::new();
    for page in pages {
        paths.push(page.path);
        let page = Arc::new(page);
        router = router.route(page.path, get(move |headers| respond(headers, page)));
    }
    let paths = paths.join(", ");
    router
        .fallback(async move || {
            let body = format!("no such path; available: {paths}\n");
            (StatusCode::NOT_FOUND, body)
        })
        .method_not_allowed_fallback(async |request: Request| {
            let body = format!("{} accepts only GET and HEAD\n", request.uri().path());
            (StatusCode::METHOD_NOT_ALLOWED, body)
        })
        .layer(middleware::from_fn(refuse_bodies))
}

async fn respond(headers: HeaderMap, page: Arc<Page>) -> Response {
    let failed = |error: &dyn Display| {
        (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
    };
    match tokio::task::spawn_blocking(move || (page.answer)(&headers)).await {
        Ok(answer) => match streamed::body(move |out| (answer.body)(out)).await {
            Ok(body) => {
                let content_type = [(CONTENT_TYPE, answer.content_type)];
                let mut response = (answer.status, content_type, body).into_response();
                response.headers_mut().extend(answer.headers);
                response
            }
            Err(error) => failed(&error),
        },
        Err(error) => failed(&error),
    }
}

async fn refuse_bodies(request: Request, next: Next) -> Response {
    if has_body(&request) {
        return (StatusCode::PAYLOAD_TOO_LARGE, "send no body\n").into_response();
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;

    fn started() -> (PageServer, SocketAddr) {
        let any = ListenAddress::Address(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let listeners = bind("--metrics-address", &any).unwrap();
        let address = listeners[0].local_addr().unwrap();
        let answer =
            |_: &HeaderMap| Answer::of_text(StatusCode::OK, "text/plain", "fine".to_owned());
        let page = |path| Page {
            path,
            answer: Box::new(answer),
        };
        let pages = [page("/page"), page("/other")];
        (PageServer::start(listeners, pages).unwrap(), address)
    }

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("{request} HTTP/1.1\r\nHost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn the_pages_are_served_and_nothing_else() {
        let (server, address) = started();
        let response = ask(address, "GET /page").await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
        assert!(response.ends_with("\r\n\r\nfine"), "{response}");
        let response = ask(address, "GET /other").await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
        let response = ask(address, "GET /").await;
        assert!(response.starts_with("HTTP/1.1 404 "), "{response}");
        assert!(response.contains("available: /page, /other"), "{response}");
        let response = ask(address, "POST /page").await;
        assert!(response.starts_with("HTTP/1.1 405 "), "{response}");
        assert!(
            response.contains("/page accepts only GET and HEAD"),
            "{response}"
        );
        server.shutdown().await;
        assert!(TcpStream::connect(address).await.is_err());
    }

    #[tokio::test]
    async fn half_a_request_does_not_hold_up_the_end() {
        let (server, address) = started();
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /pa").await.unwrap();
        timeout(Duration::from_secs(120), server.shutdown())
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_port_in_use_is_reported_with_its_flag() {
        let (_server, address) = started();
        let error = bind("--metrics-address", &ListenAddress::Address(address))
            .unwrap_err()
            .to_string();
        for text in [&address.to_string(), "in use", "--metrics-address"] {
            assert!(error.contains(text), "{error}");
        }
        assert!(
            bind("--metrics-address", &ListenAddress::Off)
                .unwrap()
                .is_empty()
        );
    }
}
