//! The answering side: `GET /hello` on the node's addresses and inside the health endpoint's namespace.

mod listeners;
mod slots;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use health_datapath::arrival_store::ArrivalStore;
use health_net::listen;
use http_body_util::Empty;
use hyper::body::{Bytes, Incoming};
use hyper::header::HeaderValue;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::watch;

use self::listeners::Acceptor;
pub use self::listeners::ResponderState;
use self::slots::Slots;
use super::counters::HelloRequests;
use super::exchange::{ARRIVALS_HEADER, PROBER_HEADER, arrivals_value, parse_prober};
use super::proof::{self, AUTH_HEADER, Answer, HelloKeys, REASON_CLOCK, REASON_HEADER, Verified};

/// Answer header with the addresses of the node's health endpoint, comma-separated.
pub(crate) const HEALTH_ENDPOINT_HEADER: &str = "health-endpoint";
/// Its value if the node has no health endpoint.
pub(super) const NO_ENDPOINT: &str = "none";

/// Connections that the kernel queues until they are accepted.
const BACKLOG: i32 = 1024;
/// Time limit for a request's head to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for a whole exchange, so that a peer that does not read also frees its slot.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the responder cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The port is already in use.
    #[error(
        "cannot listen on {0} for GET /hello: the port is in use; choose another --health-port on all nodes"
    )]
    InUse(SocketAddr),
    /// This host does not have the address.
    #[error("cannot listen on {0} for GET /hello: no interface on this host has this address")]
    NotLocal(SocketAddr),
    /// Anything else.
    #[error("cannot listen on {address} for GET /hello: {source}")]
    Other {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

/// Listens on `port` of each address, in the network namespace of the calling thread.
pub fn bind(addresses: &[IpAddr], port: u16) -> Result<Vec<TcpListener>, BindError> {
    addresses
        .iter()
        .map(|&ip| {
            let address = SocketAddr::new(ip, port);
            listen::tcp(address, BACKLOG).map_err(|source| match source.kind() {
                io::ErrorKind::AddrInUse => BindError::InUse(address),
                io::ErrorKind::AddrNotAvailable => BindError::NotLocal(address),
                _ => BindError::Other { address, source },
            })
        })
        .collect()
}

/// The identity under which a responder answers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Full name (`cluster/node`) of this node.
    pub node: String,
    /// Keys of the mesh.
    pub keys: Arc<HelloKeys>,
    /// Whether to report that this node has no health endpoint.
    pub hosts_only: bool,
}

/// Answers `GET /hello`; all other requests get 404. Dropping it closes the listeners.
pub struct Responder {
    shared: Shared,
    acceptors: ResponderState,
    stop: watch::Sender<bool>,
}

/// Shared by all connections.
#[derive(Clone)]
struct Shared {
    identity: Arc<Identity>,
    health_endpoint: watch::Receiver<Vec<IpAddr>>,
    arrivals: Arc<dyn ArrivalStore>,
    requests: Arc<HelloRequests>,
    slots: Slots,
    stop: watch::Receiver<bool>,
}

impl Responder {
    /// Answers as `identity` on `listeners`, which may belong to any network namespace. [`HEALTH_ENDPOINT_HEADER`]
    /// carries the addresses in `health_endpoint`, or says that there is no health endpoint. An asker that identifies
    /// itself also gets what `arrivals` knows about its echo probes. Must be called in a tokio runtime.
    pub fn start(
        identity: Identity,
        listeners: Vec<TcpListener>,
        health_endpoint: watch::Receiver<Vec<IpAddr>>,
        arrivals: Arc<dyn ArrivalStore>,
    ) -> io::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let responder = Self {
            shared: Shared {
                identity: Arc::new(identity),
                health_endpoint,
                arrivals,
                requests: Arc::default(),
                slots: Slots::default(),
                stop: stopped,
            },
            acceptors: ResponderState::default(),
            stop,
        };
        responder.replace(listeners)?;
        Ok(responder)
    }

    /// The counters of the requests.
    pub fn requests(&self) -> Arc<HelloRequests> {
        self.shared.requests.clone()
    }

    /// A handle to the responder's state, which follows later changes.
    pub fn state(&self) -> ResponderState {
        self.acceptors.clone()
    }

    /// Switches to other listeners; open connections of the old ones are served to the end.
    pub fn replace(&self, listeners: Vec<TcpListener>) -> io::Result<()> {
        let acceptors = self.accept(listeners)?;
        for old in self.acceptors.replace(acceptors) {
            old.task.abort();
        }
        Ok(())
    }

    /// Also answers on these listeners.
    pub fn add(&self, listeners: Vec<TcpListener>) -> io::Result<()> {
        self.acceptors.add(self.accept(listeners)?);
        Ok(())
    }

    fn accept(&self, listeners: Vec<TcpListener>) -> io::Result<Vec<Acceptor>> {
        let listeners = listeners
            .into_iter()
            .map(|listener| {
                listener.set_nonblocking(true)?;
                tokio::net::TcpListener::from_std(listener)
            })
            .collect::<io::Result<Vec<_>>>()?;
        let start = |listener| Acceptor::start(listener, self.shared.clone());
        Ok(listeners.into_iter().map(start).collect())
    }

    /// Closes the listeners and waits until the open exchanges have ended.
    pub async fn shutdown(self) {
        self.stop.send_replace(true);
        for Acceptor { task, .. } in self.acceptors.replace(Vec::new()) {
            task.abort();
            // The task was aborted, so this returns at once, after which the listener is closed.
            let _ = task.await;
        }
        // Each exchange holds a slot and ends at its time-out at the latest.
        self.shared.slots.all_free().await;
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        for acceptor in self.acceptors.replace(Vec::new()) {
            acceptor.task.abort();
        }
    }
}

async fn serve(stream: tokio::net::TcpStream, shared: Shared) -> hyper::Result<()> {
    let mut stop = shared.stop.clone();
    let service = service_fn(|request: Request<Incoming>| {
        let response = respond(&request, &shared);
        async move { Ok::<_, Infallible>(response) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .max_buf_size(8 << 10);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        served = connection.as_mut() => return served,
        // An error means that the responder was dropped.
        _ = stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

fn respond(request: &Request<Incoming>, shared: &Shared) -> Response<Empty<Bytes>> {
    if request.method() != Method::GET || request.uri().path() != "/hello" {
        return empty(StatusCode::NOT_FOUND);
    }
    let keys = &shared.identity.keys;
    let headers = request.headers();
    match headers.get(AUTH_HEADER).map(HeaderValue::as_bytes) {
        Some(value) => {
            let prober = headers.get(PROBER_HEADER).map(HeaderValue::as_bytes);
            match keys.verify_request(value, prober.unwrap_or_default()) {
                Some(verified) => prove(request, &verified, shared),
                None => unproven(shared),
            }
        }
        // A publicly known key protects nothing, and agents of earlier versions send no proof.
        None if keys.is_public() => {
            let mut response = empty(StatusCode::OK);
            describe(request, shared, response.headers_mut());
            response
        }
        None => unproven(shared),
    }
}

/// The answer to a request without a valid proof.
fn unproven(shared: &Shared) -> Response<Empty<Bytes>> {
    shared.requests.add_no_proof();
    empty(StatusCode::UNAUTHORIZED)
}

fn empty(status: StatusCode) -> Response<Empty<Bytes>> {
    let mut response = Response::new(Empty::new());
    *response.status_mut() = status;
    response
}

/// The answer to a request that was made with a mesh key.
fn prove(
    request: &Request<Incoming>,
    verified: &Verified<'_>,
    shared: &Shared,
) -> Response<Empty<Bytes>> {
    let Identity { node, keys, .. } = &*shared.identity;
    let time = proof::now();
    let status = if verified.request.is_out_of_window(time) {
        StatusCode::UNAUTHORIZED
    } else if verified.request.asked != node {
        StatusCode::MISDIRECTED_REQUEST
    } else {
        StatusCode::OK
    };
    let mut response = empty(status);
    let headers = response.headers_mut();
    match status {
        StatusCode::OK => describe(request, shared, headers),
        StatusCode::UNAUTHORIZED => {
            shared.requests.add_clock();
            headers.insert(REASON_HEADER, HeaderValue::from_static(REASON_CLOCK));
        }
        _ => shared.requests.add_wrong_node(),
    }
    let answer = Answer {
        time,
        status: status.as_u16(),
        node,
    };
    let covered = [REASON_HEADER, HEALTH_ENDPOINT_HEADER, ARRIVALS_HEADER].map(|name| {
        let value = headers.get(name).map(HeaderValue::as_bytes);
        value.unwrap_or_default()
    });
    let value = keys.answer(verified, &answer, covered);
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(AUTH_HEADER, value);
    }
    response
}

/// Adds what this node reports about itself and about the asker's echo probes.
fn describe(request: &Request<Incoming>, shared: &Shared, headers: &mut HeaderMap) {
    let health_endpoint = shared.health_endpoint.borrow();
    if shared.identity.hosts_only {
        headers.insert(
            HEALTH_ENDPOINT_HEADER,
            HeaderValue::from_static(NO_ENDPOINT),
        );
    } else if !health_endpoint.is_empty() {
        let list: Vec<_> = health_endpoint.iter().map(IpAddr::to_string).collect();
        if let Ok(value) = HeaderValue::try_from(list.join(", ")) {
            headers.insert(HEALTH_ENDPOINT_HEADER, value);
        }
    }
    if let Some(value) = arrivals(request, shared) {
        headers.insert(ARRIVALS_HEADER, value);
    }
}

/// The report to the asker about its echo probes.
fn arrivals(request: &Request<Incoming>, shared: &Shared) -> Option<HeaderValue> {
    let asker = request.headers().get(PROBER_HEADER)?;
    let Some(prober) = parse_prober(asker.as_bytes()) else {
        shared.requests.add_malformed();
        tracing::debug!(?asker, "GET /hello request with a malformed header");
        return None;
    };
    match shared.arrivals.arrivals(prober) {
        Ok(arrivals) => HeaderValue::try_from(arrivals_value(&arrivals?)).ok(),
        Err(error) => {
            tracing::debug!(%error, "cannot read when an agent's probes arrived");
            None
        }
    }
}

#[cfg(test)]
mod tests;
