//! The side that answers: `GET /hello` on the node's addresses and inside the health endpoint's
//! namespace.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
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
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use super::exchange::{
    ARRIVALS_HEADER, MalformedHeaders, PROBER_HEADER, arrivals_value, parse_prober,
};
use super::proof::{self, AUTH_HEADER, Answer, HelloKeys, REASON_CLOCK, REASON_HEADER, Verified};

/// Header of a node's answer that tells the addresses of its health endpoint, comma-separated.
pub const HEALTH_ENDPOINT_HEADER: &str = "health-endpoint";

/// Connections that the kernel holds until they are accepted.
const BACKLOG: i32 = 1024;
/// Connections served at a time; more wait in the backlog.
const CONNECTIONS: usize = 512;
/// Time for a request's head to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for a whole exchange, so that a peer that does not read frees its place as well.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after the process has run out of file descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Why the responder cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody else listens there.
    #[error(
        "cannot listen on {0} for GET /hello: the port is in use; choose another --health-port on all nodes"
    )]
    InUse(SocketAddr),
    /// This host does not have the address.
    #[error("cannot listen on {0} for GET /hello: no interface of this host has the address")]
    NotLocal(SocketAddr),
    /// Anything else.
    #[error("cannot listen on {address} for GET /hello: {source}")]
    Other {
        /// Where.
        address: SocketAddr,
        /// The system's answer.
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

/// As whom a responder answers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Full name (`cluster/node`) of this node.
    pub node: String,
    /// Those of the mesh.
    pub keys: Arc<HelloKeys>,
}

/// Answers `GET /hello`; everything else is not found. Dropping it closes the listeners.
pub struct Responder {
    shared: Shared,
    acceptors: Mutex<Vec<JoinHandle<()>>>,
    stop: watch::Sender<bool>,
}

/// What all connections use.
#[derive(Clone)]
struct Shared {
    identity: Arc<Identity>,
    health_endpoint: watch::Receiver<Vec<IpAddr>>,
    arrivals: Arc<dyn ArrivalStore>,
    malformed: Arc<MalformedHeaders>,
    places: Arc<Semaphore>,
    stop: watch::Receiver<bool>,
}

impl Responder {
    /// Answers as `identity` on `listeners`, which may belong to any network namespace. The addresses in
    /// `health_endpoint`, if there are any, are told in [`HEALTH_ENDPOINT_HEADER`], and an asker that
    /// says who it is is told what `arrivals` knows of its echo probes. Must be called in a tokio
    /// runtime.
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
                malformed: Arc::default(),
                places: Arc::new(Semaphore::new(CONNECTIONS)),
                stop: stopped,
            },
            acceptors: Mutex::new(Vec::new()),
            stop,
        };
        responder.replace(listeners)?;
        Ok(responder)
    }

    /// Requests whose asker did not say properly who it is.
    pub fn malformed_headers(&self) -> Arc<MalformedHeaders> {
        self.shared.malformed.clone()
    }

    /// Goes over to other listeners; connections of the old ones are served to their end.
    pub fn replace(&self, listeners: Vec<TcpListener>) -> io::Result<()> {
        let listeners = listeners
            .into_iter()
            .map(|listener| {
                listener.set_nonblocking(true)?;
                tokio::net::TcpListener::from_std(listener)
            })
            .collect::<io::Result<Vec<_>>>()?;
        let acceptors = listeners
            .into_iter()
            .map(|listener| tokio::spawn(accept(listener, self.shared.clone())))
            .collect();
        let mut current = self
            .acceptors
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for old in std::mem::replace(&mut *current, acceptors) {
            old.abort();
        }
        Ok(())
    }

    /// Closes the listeners and waits until the open exchanges have ended.
    pub async fn shutdown(self) {
        self.stop.send_replace(true);
        let acceptors = std::mem::take(
            &mut *self
                .acceptors
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for acceptor in acceptors {
            acceptor.abort();
            // Aborted, so this ends at once, and the listener is closed when it has.
            let _ = acceptor.await;
        }
        // Each exchange holds a place and ends by its time-out at the latest.
        let _ = self.shared.places.acquire_many(CONNECTIONS as u32).await;
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        for acceptor in self
            .acceptors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            acceptor.abort();
        }
    }
}

async fn accept(listener: tokio::net::TcpListener, shared: Shared) {
    loop {
        let Ok(place) = shared.places.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let shared = shared.clone();
                tokio::spawn(async move {
                    // Errors are the client's own: it went away, or spoke no HTTP.
                    let _ = tokio::time::timeout(EXCHANGE_TIMEOUT, serve(stream, shared)).await;
                    drop(place);
                });
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "hello responder cannot accept a connection");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
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
                None => empty(StatusCode::UNAUTHORIZED),
            }
        }
        // A key that everybody knows protects nothing, and agents of earlier versions ask without proof.
        None if keys.is_public() => {
            let mut response = empty(StatusCode::OK);
            describe(request, shared, response.headers_mut());
            response
        }
        None => empty(StatusCode::UNAUTHORIZED),
    }
}

fn empty(status: StatusCode) -> Response<Empty<Bytes>> {
    let mut response = Response::new(Empty::new());
    *response.status_mut() = status;
    response
}

/// The answer to a request that was made with a key of the mesh.
fn prove(
    request: &Request<Incoming>,
    verified: &Verified<'_>,
    shared: &Shared,
) -> Response<Empty<Bytes>> {
    let Identity { node, keys } = &*shared.identity;
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
            headers.insert(REASON_HEADER, HeaderValue::from_static(REASON_CLOCK));
        }
        _ => {}
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

/// Adds what this node says of itself and of the asker's echo probes.
fn describe(request: &Request<Incoming>, shared: &Shared, headers: &mut HeaderMap) {
    let health_endpoint = shared.health_endpoint.borrow();
    if !health_endpoint.is_empty() {
        let list: Vec<_> = health_endpoint.iter().map(IpAddr::to_string).collect();
        if let Ok(value) = HeaderValue::try_from(list.join(", ")) {
            headers.insert(HEALTH_ENDPOINT_HEADER, value);
        }
    }
    if let Some(value) = arrivals(request, shared) {
        headers.insert(ARRIVALS_HEADER, value);
    }
}

/// What the asker is told of its echo probes.
fn arrivals(request: &Request<Incoming>, shared: &Shared) -> Option<HeaderValue> {
    let asker = request.headers().get(PROBER_HEADER)?;
    let Some(prober) = parse_prober(asker.as_bytes()) else {
        shared.malformed.add();
        tracing::debug!(?asker, "request of GET /hello with a malformed header");
        return None;
    };
    match shared.arrivals.arrivals(prober) {
        Ok(arrivals) => HeaderValue::try_from(arrivals_value(&arrivals?)).ok(),
        Err(error) => {
            tracing::debug!(%error, "cannot read what arrived of an agent's probes");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use health_common::arrivals::{Arrivals, Prober, WayCounts};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::failure::Failure;
    use crate::http::{Asker, Hello, get_hello};
    use crate::proof::KeyAge;
    use crate::testing::PATIENCE;

    const PROBER: Prober = Prober {
        session: 0x1a2b_3c4d,
        icmp_id_be: 0x5e6f_u16.to_be(),
        pad: 0,
    };

    /// Knows of one agent.
    struct OneAgent(Arrivals);

    impl ArrivalStore for OneAgent {
        fn arrivals(&self, prober: Prober) -> io::Result<Option<Arrivals>> {
            Ok((prober == PROBER).then_some(self.0))
        }
    }

    fn arrivals() -> Arc<dyn ArrivalStore> {
        let way = |arrived, replied| WayCounts { arrived, replied };
        Arc::new(OneAgent(Arrivals {
            since_ns: 7,
            ways: [way(60, 58), way(46, 46), way(0, 0), way(u32::MAX, 1)],
        }))
    }

    fn identity(keys: HelloKeys) -> Identity {
        Identity {
            node: "default/b".to_owned(),
            keys: Arc::new(keys),
        }
    }

    fn start(listener: TcpListener, keys: HelloKeys, told: &[&str]) -> Responder {
        let told = told.iter().map(|ip| ip.parse().unwrap()).collect();
        let told = watch::channel(told).1;
        Responder::start(identity(keys), vec![listener], told, arrivals()).unwrap()
    }

    async fn ask(
        address: SocketAddr,
        prober: Prober,
        keys: HelloKeys,
        asked: &str,
    ) -> Result<Hello, Failure> {
        let asker = Asker {
            name: "default/a".to_owned(),
            prober,
            keys: Arc::new(keys),
        };
        get_hello(&asker, asked, address, Instant::now() + PATIENCE).await
    }

    /// Asks `default/b` with the public key.
    async fn ask_b(address: SocketAddr) -> Result<Hello, Failure> {
        ask(address, PROBER, HelloKeys::default(), "default/b").await
    }

    /// A request of `default/a` to `default/b`, by the clock `time`.
    fn request(keys: &HelloKeys, time: u64) -> String {
        let mut value = Vec::new();
        let request = proof::Request {
            nonce: 7,
            time,
            asker: "default/a",
            asked: "default/b",
            address: "127.0.0.1:4240",
        };
        keys.write_request(&mut value, &request, b"");
        let value = String::from_utf8(value).unwrap();
        format!("GET /hello HTTP/1.1\r\nHost: a\r\n{AUTH_HEADER}: {value}\r\n\r\n")
    }

    fn loopback() -> (TcpListener, SocketAddr) {
        let listener = bind(&[IpAddr::from([127, 0, 0, 1])], 0).unwrap().remove(0);
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    async fn raw(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn hello_is_answered_and_all_else_is_not_found() {
        let (listener, address) = loopback();
        let (sender, receiver) = watch::channel(Vec::new());
        let identity = identity(HelloKeys::default());
        let responder = Responder::start(identity, vec![listener], receiver, arrivals()).unwrap();
        assert_eq!(ask_b(address).await.unwrap().headers.health_endpoint, None);
        let told: Vec<IpAddr> = vec!["10.1.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
        sender.send_replace(told.clone());
        assert_eq!(
            ask_b(address).await.unwrap().headers.health_endpoint,
            Some(told)
        );
        for request in [
            "GET / HTTP/1.1",
            "POST /hello HTTP/1.1",
            "GET /hello/x HTTP/1.1",
        ] {
            let response = raw(address, &format!("{request}\r\nHost: a\r\n\r\n")).await;
            assert!(response.starts_with("HTTP/1.1 404 "), "{response}");
        }
        let response = raw(address, "nonsense\r\n\r\n").await;
        assert!(response.starts_with("HTTP/1.1 400 "), "{response}");
        responder.shutdown().await;
        assert!(TcpStream::connect(address).await.is_err());
    }

    #[tokio::test]
    async fn who_asks_is_told_what_arrived_of_its_probes() {
        let (listener, address) = loopback();
        let responder = start(listener, HelloKeys::default(), &[]);
        let hello = ask_b(address).await.unwrap();
        let told = hello.headers.arrivals.unwrap();
        assert_eq!((told.since_ns, told.ways[1].arrived), (7, 46));
        assert_eq!(told.ways[3].arrived, u32::MAX);
        // One of whom nothing arrived.
        let other = Prober {
            session: 1,
            ..PROBER
        };
        let hello = ask(address, other, HelloKeys::default(), "default/b")
            .await
            .unwrap();
        assert_eq!(hello.headers.arrivals, None);
        assert_eq!(responder.malformed_headers().count(), 0);

        for rubbish in ["", "x", "1a2b3c4d-5e6f, 1a2b3c4d-5e6f"] {
            let head = format!("Host: a\r\nHealth-Prober: {rubbish}\r\n\r\n");
            let response = raw(address, &format!("GET /hello HTTP/1.1\r\n{head}")).await;
            assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
            assert!(!response.contains("arrivals"), "{response}");
        }
        assert_eq!(responder.malformed_headers().count(), 3);
    }

    #[tokio::test]
    async fn with_a_key_nobody_else_is_told_anything() {
        let (listener, address) = loopback();
        let keys = || HelloKeys::new(&[7; 16], None);
        let _responder = start(listener, keys(), &["10.1.0.7"]);
        let hello = ask(address, PROBER, keys(), "default/b").await.unwrap();
        assert!(hello.headers.health_endpoint.is_some() && hello.headers.arrivals.is_some());

        assert_eq!(ask_b(address).await, Err(Failure::KeyRefused));
        let prober = "health-prober: 1a2b3c4d-5e6f";
        for request in [
            "GET /hello HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(),
            format!("GET /hello HTTP/1.1\r\nHost: a\r\n{prober}\r\n\r\n"),
            "GET /hello HTTP/1.1\r\nHost: a\r\nhealth-auth: x\r\n\r\n".to_owned(),
            request(&HelloKeys::default(), proof::now()),
            // The code covers whose probes are counted.
            request(&keys(), proof::now()).replace("Host: a", &format!("Host: a\r\n{prober}")),
        ] {
            let response = raw(address, &request).await;
            assert!(response.starts_with("HTTP/1.1 401 "), "{response}");
            assert!(!response.contains("health-"), "{response}");
        }
    }

    #[tokio::test]
    async fn a_time_stamp_out_of_the_window_is_refused_with_the_time() {
        let (listener, address) = loopback();
        let keys = HelloKeys::new(&[7; 16], None);
        let _responder = start(listener, keys.clone(), &["10.1.0.7"]);
        let now = proof::now();
        for (time, status) in [
            (now, 200),
            (now - 86_400, 401),
            (now + 86_400, 401),
            (0, 401),
        ] {
            let response = raw(address, &request(&keys, time)).await;
            let header = |name| {
                let mut lines = response.lines().filter_map(|line| line.split_once(": "));
                lines.find(|(n, _)| *n == name).map(|(_, value)| value)
            };
            let is_refused = status == 401;
            let reason = header(REASON_HEADER);
            assert_eq!(reason, is_refused.then_some(REASON_CLOCK), "{response}");
            let endpoint = header(HEALTH_ENDPOINT_HEADER);
            assert_eq!(endpoint.is_none(), is_refused, "{response}");
            let covered = [reason, endpoint, None].map(|v| v.unwrap_or_default().as_bytes());
            let auth = header(AUTH_HEADER).unwrap();
            let (answer, _) = keys.verify_answer(7, auth.as_bytes(), covered).unwrap();
            assert_eq!((answer.status, answer.node), (status, "default/b"));
            assert!(answer.time.abs_diff(now) < 600);
        }
    }

    #[tokio::test]
    async fn a_request_to_another_node_is_misdirected() {
        let (listener, address) = loopback();
        let _responder = start(listener, HelloKeys::default(), &["10.1.0.7"]);
        let answer = ask(address, PROBER, HelloKeys::default(), "default/c").await;
        assert_eq!(answer, Err(Failure::WrongNode("default/b".into())));
    }

    #[tokio::test]
    async fn keys_are_exchanged_in_any_order() {
        let [old, new] = [[1; 16], [2; 16]];
        let first = HelloKeys::new(&old, None);
        let both = HelloKeys::new(&old, Some((KeyAge::Next, &new)));
        let swapped = HelloKeys::new(&new, Some((KeyAge::Previous, &old)));
        let last = HelloKeys::new(&new, None);
        // Before and after each of the three steps.
        for [a, b] in [[&first, &both], [&both, &swapped], [&swapped, &last]] {
            for [asker, asked] in [[a, a], [a, b], [b, a], [b, b]] {
                let (listener, address) = loopback();
                let _responder = start(listener, asked.clone(), &[]);
                let hello = ask(address, PROBER, asker.clone(), "default/b").await;
                assert!(hello.is_ok(), "{hello:?}");
            }
        }
        let (listener, address) = loopback();
        let _responder = start(listener, first, &[]);
        let answer = ask(address, PROBER, last, "default/b").await;
        assert_eq!(answer, Err(Failure::KeyRefused));
    }

    #[tokio::test]
    async fn a_slow_client_loses_its_connection() {
        let (listener, address) = loopback();
        let _responder = start(listener, HelloKeys::default(), &[]);
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /hello HT").await.unwrap();
        let mut rest = Vec::new();
        let closed = timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "still open");
    }

    #[tokio::test]
    async fn listeners_can_be_replaced() {
        let (first, first_address) = loopback();
        let (second, second_address) = loopback();
        let responder = start(first, HelloKeys::default(), &[]);
        assert!(ask_b(first_address).await.is_ok());
        responder.replace(vec![second]).unwrap();
        assert!(ask_b(second_address).await.is_ok());
        // The old listener closes when its task has been told.
        timeout(PATIENCE, async {
            while ask_b(first_address).await.is_ok() {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
    }

    #[test]
    fn a_port_in_use_is_named() {
        let (_listener, address) = loopback();
        let error = bind(&[address.ip()], address.port())
            .unwrap_err()
            .to_string();
        assert!(error.contains(&address.to_string()), "{error}");
        assert!(error.contains("in use"), "{error}");
        let error = bind(&[IpAddr::from([192, 0, 2, 1])], 0).unwrap_err();
        assert!(matches!(error, BindError::NotLocal(_)), "{error}");
    }
}
