//! Serves HTTP on listeners of any kind, plain or over TLS. Silent or slow clients do not delay others.
//!
//! A connection carries one request. It is closed if the request head does not arrive in time, or if the client has
//! made the server wait too long in total. When all slots are taken and a new client is waiting, the clients that have
//! made the server wait the longest lose their slots. Responses that last until the client disconnects do not occupy
//! slots.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::HttpBody;
use axum::extract::Request;
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinSet};

use super::pacing::{Client, PacedStream, Waits};

/// Maximum size of a request head in bytes.
const MAX_HEAD: usize = 16 << 10;
/// A client that has made the server wait for less than this keeps its slot.
const COURTESY: Duration = Duration::from_millis(100);
/// Interval of checks on the clients' waiting times while a new client waits for a slot.
const REVIEW_PERIOD: Duration = Duration::from_millis(20);
/// Divisor: one check frees up to this fraction of all slots.
const CLEARED_PART: usize = 4;

/// Limits for clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum number of concurrent connections on each listener, not counting clients that [stay](Client::stay).
    /// Further clients wait in the listener's backlog.
    pub(super) connections: usize,
    /// Time limit for letting a client in, and another for receiving its request's head.
    pub(super) head: Duration,
    /// Total time that a client may make the server wait, whether for the request head or for buffer space to write the
    /// response.
    pub(super) patience: Duration,
}

/// A running server. Closes all listeners and connections when dropped.
#[derive(Debug)]
pub(super) struct Server {
    acceptors: JoinSet<()>,
    stop: watch::Sender<bool>,
}

impl Server {
    /// Serves the clients of `listeners` that `admit` lets in. Must be called in a tokio runtime.
    pub(super) fn start<L: Listener>(
        listeners: impl IntoIterator<Item = L>,
        admit: &impl Admit<L::Io>,
        limits: Limits,
    ) -> Self {
        let (stop, stopped) = watch::channel(false);
        let mut acceptors = JoinSet::new();
        for listener in listeners {
            acceptors.spawn(accept(listener, admit.clone(), limits, stopped.clone()));
        }
        Self { acceptors, stop }
    }

    /// Closes the listeners and waits for the requests in flight.
    pub(super) async fn shutdown(mut self) {
        self.stop.send_replace(true);
        while self.acceptors.join_next().await.is_some() {}
    }
}

/// Lets a client in: makes the stream that carries HTTP out of an accepted one, and chooses the router of the client.
pub(super) trait Admit<S>: Clone + Send + 'static {
    /// Carries HTTP.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Fails if the client may not come in. Must end within [`Limits::head`]; later, the connection is closed.
    fn admit(self, stream: S) -> impl Future<Output = io::Result<(Self::Stream, Router)>> + Send;
}

/// Lets everyone in.
impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Admit<S> for Router {
    type Stream = S;

    async fn admit(self, stream: S) -> io::Result<(S, Router)> {
        Ok((stream, self))
    }
}

/// Whether a request has a body. Few paths accept one.
pub(super) fn has_body(request: &Request) -> bool {
    !request.body().is_end_stream()
}

async fn accept<L: Listener>(
    mut listener: L,
    admit: impl Admit<L::Io>,
    limits: Limits,
    stop: watch::Receiver<bool>,
) {
    let mut stopped = stop.clone();
    let mut connections = JoinSet::new();
    let mut clients: HashMap<Id, (AbortHandle, Arc<Waits>)> = HashMap::new();
    let mut waiting = None;
    loop {
        if slots_taken(&clients) < limits.connections
            && let Some(stream) = waiting.take()
        {
            let waits = Arc::new(Waits::default());
            waits.begin();
            let exchange = exchange(stream, admit.clone(), limits, waits.clone(), stop.clone());
            let task = connections.spawn(async move {
                // Errors are the client's own fault: it disconnected, was slow, did not speak HTTP, or may not come in.
                let _ = exchange.await;
            });
            clients.insert(task.id(), (task, waits));
        }
        tokio::select! {
            // An error means that the server was dropped.
            _ = stopped.wait_for(|stop| *stop) => break,
            Some(ended) = connections.join_next_with_id() => {
                let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
                clients.remove(&id);
            }
            (stream, _) = listener.accept(), if waiting.is_none() => waiting = Some(stream),
            // All slots are taken.
            () = tokio::time::sleep(REVIEW_PERIOD), if waiting.is_some() => {
                close_slowest(&clients, limits.connections.div_ceil(CLEARED_PART));
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Number of connections that occupy a slot.
fn slots_taken(clients: &HashMap<Id, (AbortHandle, Arc<Waits>)>) -> usize {
    let passing = clients.values().filter(|(_, waits)| !waits.stays());
    passing.count()
}

/// Closes up to `slots` of the connections whose clients have made the server wait the longest.
fn close_slowest(clients: &HashMap<Id, (AbortHandle, Arc<Waits>)>, slots: usize) {
    let mut waits: Vec<_> = clients
        .values()
        .filter(|(_, waits)| waits.is_waiting() && !waits.stays())
        .map(|(task, waits)| (waits.total(), task))
        .filter(|&(total, _)| total >= COURTESY)
        .collect();
    waits.sort_unstable_by_key(|&(total, _)| std::cmp::Reverse(total));
    for (_, task) in waits.into_iter().take(slots) {
        task.abort();
    }
}

async fn exchange<S, A: Admit<S>>(
    stream: S,
    admit: A,
    limits: Limits,
    waits: Arc<Waits>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let admitted = tokio::time::timeout(limits.head, admit.admit(stream));
    let (stream, router) = tokio::select! {
        admitted = admitted => admitted??,
        _ = stop.wait_for(|stop| *stop) => return Ok(()),
    };
    let paced = PacedStream::new(stream, waits.clone(), limits.patience);
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        waits.end();
        request.extensions_mut().insert(Client(waits.clone()));
        router.call(request)
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .keep_alive(false)
        .max_buf_size(MAX_HEAD);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(paced), service));
    tokio::select! {
        served = connection.as_mut() => return Ok(served?),
        _ = stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
    }
    Ok(connection.await?)
}

#[cfg(test)]
mod tests {
    use axum::Extension;
    use axum::body::Body;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{UnixListener, UnixStream};
    use tokio::time::timeout;

    use super::*;

    /// How long a test waits for something that must happen, however busy the machine is.
    const PATIENCE: Duration = Duration::from_secs(120);

    /// Limits that no test reaches.
    const LIMITS: Limits = Limits {
        connections: 4,
        head: Duration::from_secs(3600),
        patience: Duration::from_secs(3600),
    };
    /// Far larger than a socket's buffers.
    const LARGE: usize = 8 << 20;

    struct Bed {
        dir: tempfile::TempDir,
        server: Server,
    }

    impl Bed {
        fn start(limits: Limits) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(dir.path().join("s")).unwrap();
            let router = Router::new()
                .route("/small", get(|| async { "fine" }))
                .route("/large", get(|| async { vec![b'x'; LARGE] }))
                .route("/patient", get(patient))
                .route("/endless", get(endless));
            let server = Server::start([listener], &router, limits);
            Self { dir, server }
        }

        async fn connect(&self) -> UnixStream {
            UnixStream::connect(self.dir.path().join("s"))
                .await
                .unwrap()
        }

        async fn send(&self, path: &str) -> UnixStream {
            let mut stream = self.connect().await;
            let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            stream
        }

        /// Requests `path`, and returns the whole response.
        async fn ask(&self, path: &str) -> Vec<u8> {
            rest(&mut self.send(path).await).await
        }
    }

    async fn patient(Extension(client): Extension<Client>) -> Vec<u8> {
        client.stay();
        vec![b'x'; LARGE]
    }

    async fn endless(Extension(client): Extension<Client>) -> Body {
        client.stay();
        let first = futures_util::stream::once(async { Ok::<_, io::Error>("begun") });
        let never = futures_util::stream::pending();
        Body::from_stream(futures_util::StreamExt::chain(first, never))
    }

    async fn rest(stream: &mut UnixStream) -> Vec<u8> {
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        // An error also ends the stream.
        let _ = timeout(PATIENCE, read).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn a_flood_of_silent_connections_gives_way() {
        let bed = Bed::start(LIMITS);
        let mut flood = Vec::new();
        for _ in 0..40 {
            flood.push(bed.connect().await);
        }
        let answer = bed.ask("/small").await;
        assert!(answer.ends_with(b"fine"));
        assert_eq!(rest(&mut flood[0]).await, b"");
    }

    #[tokio::test]
    async fn slow_readers_give_way() {
        let bed = Bed::start(LIMITS);
        let mut slow = Vec::new();
        for _ in 0..LIMITS.connections {
            slow.push(bed.send("/large").await);
        }
        let answer = bed.ask("/large").await;
        assert!(answer.len() > LARGE);
        let mut cut = 0;
        for stream in &mut slow {
            cut += usize::from(rest(stream).await.len() < LARGE);
        }
        assert!(cut > 0);
    }

    #[tokio::test]
    async fn those_who_stay_take_no_slot_and_are_not_cut_off() {
        let bed = Bed::start(LIMITS);
        let mut stay = Vec::new();
        for _ in 0..2 * LIMITS.connections {
            stay.push(bed.send("/endless").await);
        }
        stay.push(bed.send("/patient").await);
        for _ in 0..2 * LIMITS.connections {
            assert!(bed.ask("/small").await.ends_with(b"fine"));
        }
        let mut patient = stay.pop().unwrap();
        assert!(rest(&mut patient).await.len() > LARGE);
        for stream in &mut stay {
            let mut begin = [0; 12];
            stream.read_exact(&mut begin).await.unwrap();
            assert!(begin.starts_with(b"HTTP/1.1 200"));
        }
    }

    #[tokio::test]
    async fn a_slow_reader_is_cut_off_though_nobody_else_is_there() {
        let patience = Duration::from_millis(200);
        let bed = Bed::start(Limits { patience, ..LIMITS });
        let slow = bed.send("/large").await;
        timeout(PATIENCE, bed.server.shutdown()).await.unwrap();
        drop(slow);
    }

    #[tokio::test]
    async fn one_that_may_take_its_time_is_not() {
        let patience = Duration::from_millis(200);
        let bed = Bed::start(Limits { patience, ..LIMITS });
        let mut patient = bed.send("/patient").await;
        let mut slow = bed.send("/large").await;
        while slow.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(rest(&mut patient).await.len() > LARGE);
    }

    #[tokio::test]
    async fn a_connection_without_a_request_ends() {
        let head = Duration::from_millis(200);
        let bed = Bed::start(Limits { head, ..LIMITS });
        let mut silent = bed.connect().await;
        let mut half = bed.connect().await;
        half.write_all(b"GET /sma").await.unwrap();
        rest(&mut silent).await;
        rest(&mut half).await;
    }

    /// Lets nobody in, and never says so.
    #[derive(Clone)]
    struct Undecided;

    impl Admit<UnixStream> for Undecided {
        type Stream = UnixStream;

        async fn admit(self, stream: UnixStream) -> io::Result<(UnixStream, Router)> {
            std::future::pending::<()>().await;
            Ok((stream, Router::new()))
        }
    }

    #[tokio::test]
    async fn one_who_is_not_let_in_is_given_up_or_gives_way() {
        let dir = tempfile::tempdir().unwrap();
        let head = Duration::from_millis(200);
        for (name, limits) in [
            ("given up", Limits { head, ..LIMITS }),
            ("gives way", LIMITS),
        ] {
            let path = dir.path().join(name);
            let listener = UnixListener::bind(&path).unwrap();
            let _server = Server::start([listener], &Undecided, limits);
            let mut waiting = Vec::new();
            for _ in 0..=LIMITS.connections {
                waiting.push(UnixStream::connect(&path).await.unwrap());
            }
            assert_eq!(rest(&mut waiting[0]).await, b"", "{name}");
        }
    }

    #[tokio::test]
    async fn a_connection_carries_one_request() {
        let bed = Bed::start(LIMITS);
        let answer = bed.ask("/small").await;
        let head = String::from_utf8(answer).unwrap().to_lowercase();
        assert!(head.contains("connection: close"), "{head}");
    }

    #[tokio::test]
    async fn a_head_without_end_is_refused() {
        let bed = Bed::start(LIMITS);
        let path = format!("/{}", "x".repeat(MAX_HEAD));
        let answer = bed.ask(&path).await;
        assert!(!answer.starts_with(b"HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn a_request_under_way_is_answered_at_the_end() {
        let bed = Bed::start(LIMITS);
        let mut stream = bed.send("/large").await;
        let mut begin = [0; 12];
        stream.read_exact(&mut begin).await.unwrap();
        let (answer, ()) = tokio::join!(rest(&mut stream), bed.server.shutdown());
        assert!(answer.len() >= LARGE);
        let gone = UnixStream::connect(bed.dir.path().join("s")).await;
        assert!(gone.is_err());
    }
}
