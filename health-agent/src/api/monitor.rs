//! Serves what monitoring asks for over TCP: one page, such as `/metrics` or `/healthz`, on each
//! address.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::errno::Errno;
use socket2::{Domain, Socket, Type};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::config::ListenAddress;

const BACKLOG: i32 = 64;
/// Connections served at a time on one page; more wait in the backlog.
const CONNECTIONS: usize = 16;
/// Time for a request's head to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for a whole exchange, so that a client that does not read frees its place as well.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after the process has run out of file descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Why a page cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody else listens there.
    #[error("cannot listen on {address}: the port is in use; choose another {flag}, or 'off'")]
    InUse {
        /// Where.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
    },
    /// Anything else.
    #[error("cannot listen on {address}, see {flag}: {source}")]
    Other {
        /// Where.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

/// Listens where `flag` says, in the network namespace of the calling thread. An IP version that
/// the host does not have is left out of `localhost`.
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
        ListenAddress::Address(address) => Ok(vec![listen_on(address).map_err(failed(address))?]),
        ListenAddress::Localhost(port) => {
            let mut listeners = Vec::new();
            for address in [
                SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
                SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
            ] {
                match listen_on(address) {
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

/// Whether the host lacks the address or its whole IP version.
fn is_missing(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EADDRNOTAVAIL | Errno::EAFNOSUPPORT))
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    // A predecessor's connections that linger do not keep the port.
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// An answer to `GET`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The body's media type.
    pub content_type: &'static str,
    /// The body.
    pub body: String,
}

/// Makes an answer to a request with these headers; may block.
pub type MakeAnswer = Box<dyn Fn(&HeaderMap) -> Answer + Send + Sync>;

/// A path and what makes its answers.
pub struct Page {
    /// The path.
    pub path: &'static str,
    /// Makes them.
    pub answer: MakeAnswer,
}

/// Serves one page. Dropping it closes the listeners.
#[derive(Debug)]
pub struct Monitor {
    acceptors: JoinSet<()>,
    places: Arc<Semaphore>,
    stop: watch::Sender<bool>,
}

impl Monitor {
    /// Serves `page` on `listeners`. Must be called in a tokio runtime.
    pub fn start(listeners: Vec<TcpListener>, page: Page) -> io::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let page = Arc::new(page);
        let mut acceptors = JoinSet::new();
        for listener in listeners {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let (page, places, stopped) = (page.clone(), places.clone(), stopped.clone());
            acceptors.spawn(accept(listener, page, places, stopped));
        }
        Ok(Self {
            acceptors,
            places,
            stop,
        })
    }

    /// Closes the listeners and waits until the open exchanges have ended.
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        self.acceptors.shutdown().await;
        // Each exchange holds a place and ends by its time-out at the latest.
        let _ = self.places.acquire_many(CONNECTIONS as u32).await;
    }
}

async fn accept(
    listener: tokio::net::TcpListener,
    page: Arc<Page>,
    places: Arc<Semaphore>,
    stop: watch::Receiver<bool>,
) {
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let exchange = serve(stream, page.clone(), stop.clone());
                tokio::spawn(async move {
                    // Errors are the client's own: it went away, or spoke no HTTP.
                    let _ = tokio::time::timeout(EXCHANGE_TIMEOUT, exchange).await;
                    drop(place);
                });
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                warn!(%error, page = page.path, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

async fn serve(
    stream: tokio::net::TcpStream,
    page: Arc<Page>,
    mut stop: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let service = service_fn(|request: Request<Incoming>| {
        let page = page.clone();
        async move { Ok::<_, Infallible>(respond(&request, page).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .max_buf_size(16 << 10);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        served = connection.as_mut() => return served,
        // An error means that the monitor was dropped.
        _ = stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

async fn respond(request: &Request<Incoming>, page: Arc<Page>) -> Response<Full<Bytes>> {
    let plain = |status, body: String| Answer {
        status,
        content_type: "text/plain",
        body,
    };
    let answer = if request.uri().path() != page.path {
        let body = format!("there is only {} here\n", page.path);
        plain(StatusCode::NOT_FOUND, body)
    } else if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let body = format!("{} is there to be read\n", page.path);
        plain(StatusCode::METHOD_NOT_ALLOWED, body)
    } else {
        let headers = request.headers().clone();
        tokio::task::spawn_blocking(move || (page.answer)(&headers))
            .await
            .unwrap_or_else(|error| plain(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
    };
    let mut response = Response::new(Full::from(answer.body));
    *response.status_mut() = answer.status;
    let content_type = HeaderValue::from_static(answer.content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;

    fn started() -> (Monitor, SocketAddr) {
        let any = ListenAddress::Address(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let listeners = bind("--metrics-address", &any).unwrap();
        let address = listeners[0].local_addr().unwrap();
        let answer = |_: &HeaderMap| Answer {
            status: StatusCode::OK,
            content_type: "text/plain",
            body: "fine".to_owned(),
        };
        let page = Page {
            path: "/page",
            answer: Box::new(answer),
        };
        (Monitor::start(listeners, page).unwrap(), address)
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
    async fn the_page_is_served_and_nothing_else() {
        let (monitor, address) = started();
        let response = ask(address, "GET /page").await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
        assert!(response.ends_with("\r\n\r\nfine"), "{response}");
        let response = ask(address, "GET /").await;
        assert!(response.starts_with("HTTP/1.1 404 "), "{response}");
        let response = ask(address, "POST /page").await;
        assert!(response.starts_with("HTTP/1.1 405 "), "{response}");
        monitor.shutdown().await;
        assert!(TcpStream::connect(address).await.is_err());
    }

    #[tokio::test]
    async fn half_a_request_does_not_hold_up_the_end() {
        let (monitor, address) = started();
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /pa").await.unwrap();
        timeout(HEAD_TIMEOUT * 2, monitor.shutdown()).await.unwrap();
    }

    #[tokio::test]
    async fn a_port_in_use_is_told_with_its_flag() {
        let (_monitor, address) = started();
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
