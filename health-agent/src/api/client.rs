//! Speaks to an agent over its socket.

use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use bytes::BytesMut;
use health_model::api::{ErrorBody, ProbeEvent};
use health_model::events::{EventFilter, MonitorLine};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

/// Reading answers at once with what is known.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// A probe of all nodes takes up to the agent's probe timeout, and longer where the probe rate does
/// not allow that; one that is streamed says something all the while.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);
/// Making an endpoint takes milliseconds, unless its namespace or the disk is slow.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Pause between two attempts to connect to an agent that is flooded.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket's file is not there.
    #[error("no agent at {0}: is it running, and are --instance and --runtime-dir right?")]
    NoAgent(PathBuf),
    /// Nobody listens on the socket.
    #[error("no agent at {0}: the socket is left over from one that was killed; start it again")]
    Stale(PathBuf),
    /// The socket's permissions forbid it.
    #[error("cannot connect to the agent at {0}: permission denied; try it as root")]
    Permission(PathBuf),
    /// The request cannot be written down.
    #[error("{request}: {source}")]
    Request {
        /// Method and path.
        request: String,
        /// What is wrong with it.
        source: hyper::http::Error,
    },
    /// The connection failed.
    #[error("cannot connect to the agent at {path}: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The agent took too long.
    #[error(
        "{request} at {path}: no answer in {seconds} s; is the agent stopped or overloaded? see its \
         log"
    )]
    Timeout {
        /// Method and path.
        request: String,
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The connection broke.
    #[error("{request} at {path}: the connection broke: {source}; see the agent's log")]
    Broken {
        /// Method and path.
        request: String,
        /// The socket.
        path: PathBuf,
        /// What happened.
        source: hyper::Error,
    },
    /// The answer ended before its last line.
    #[error("{request} at {path}: the agent ended the answer early; was it stopped? see its log")]
    Cut {
        /// Method and path.
        request: String,
        /// The socket.
        path: PathBuf,
    },
    /// The agent refused.
    #[error("{request}: {message}")]
    Refused {
        /// Method and path.
        request: String,
        /// The HTTP status.
        code: StatusCode,
        /// The agent's reason.
        message: String,
    },
    /// The answer makes no sense.
    #[error(
        "{request} at {path}: cannot read the answer: {source}; are agent and command line of the \
         same version?"
    )]
    Decode {
        /// Method and path.
        request: String,
        /// The socket.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// A client of one agent. Each request opens a connection.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the agent that serves `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
        }
    }

    /// Reads `path`, within 5 s.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.get_within(path, READ_TIMEOUT).await
    }

    /// Reads `path`, within `limit`.
    pub async fn get_within<T: DeserializeOwned>(
        &self,
        path: &str,
        limit: Duration,
    ) -> Result<T, ClientError> {
        self.send(Method::GET, path, limit).await
    }

    /// Has the agent do what `path` stands for, within 30 s.
    pub async fn put<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(Method::PUT, path, PROBE_TIMEOUT).await
    }

    /// Probes all nodes and hands over what comes out as it comes, up to and including
    /// [`ProbeEvent::Done`]. Between two events it waits 30 s at most.
    pub async fn stream_probe(&self, mut each: impl FnMut(ProbeEvent)) -> Result<(), ClientError> {
        let path = "/v1beta/status/probe?stream=true";
        let name = format!("{} {path}", Method::PUT);
        self.exchange(Method::PUT, path, &name, PROBE_TIMEOUT, async |response| {
            let mut lines = Lines::of(response);
            loop {
                let line = tokio::time::timeout(PROBE_TIMEOUT, lines.next(self, &name))
                    .await
                    .map_err(|_| self.timeout(&name, PROBE_TIMEOUT))??;
                let event = self.decode(&name, &line)?;
                let is_last = matches!(event, ProbeEvent::Done(_));
                each(event);
                if is_last {
                    return Ok(());
                }
            }
        })
        .await
    }

    /// Calls `begin` when the agent tells of these events, and then `each` with every line up to
    /// [`MonitorLine::End`], until it breaks. However long nothing happens.
    pub async fn monitor(
        &self,
        filter: &EventFilter,
        begin: impl FnOnce(),
        mut each: impl FnMut(MonitorLine) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let path = format!("/v1/monitor?{}", filter.query());
        let name = format!("{} /v1/monitor", Method::GET);
        self.exchange(Method::GET, &path, &name, READ_TIMEOUT, async |response| {
            begin();
            let mut lines = Lines::of(response);
            loop {
                let line = self.decode(&name, &lines.next(self, &name).await?)?;
                let is_last = line == MonitorLine::End;
                if each(line).is_break() || is_last {
                    return Ok(());
                }
            }
        })
        .await
    }

    /// Sends `body` as JSON to `path`, and reads what comes of it within 30 s.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.send_json(Method::POST, path, body).await
    }

    /// Sends a text to `path`, and reads what comes of it within 30 s.
    pub async fn post_text<T: DeserializeOwned>(
        &self,
        path: &str,
        text: Vec<u8>,
    ) -> Result<T, ClientError> {
        self.send_with(Method::POST, path, text.into(), CHANGE_TIMEOUT)
            .await
    }

    /// Changes what `path` stands for as `body` says, within 30 s.
    pub async fn patch<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.send_json(Method::PATCH, path, body).await
    }

    /// Removes what `path` stands for, within 30 s.
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(Method::DELETE, path, CHANGE_TIMEOUT).await
    }

    /// Calls `each` with every line of an answer that goes on, until it breaks. However long nothing happens.
    pub async fn watch<T: DeserializeOwned>(
        &self,
        path: &str,
        mut each: impl FnMut(T) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let name = format!("{} {path}", Method::GET);
        self.exchange(Method::GET, path, &name, READ_TIMEOUT, async |response| {
            let mut lines = Lines::of(response);
            loop {
                let event = self.decode(&name, &lines.next(self, &name).await?)?;
                if each(event).is_break() {
                    return Ok(());
                }
            }
        })
        .await
    }

    async fn send_json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        // What has no JSON is a mistake of the caller's, which the agent then tells.
        let body = serde_json::to_vec(body).unwrap_or_default();
        self.send_with(method, path, body.into(), CHANGE_TIMEOUT)
            .await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        limit: Duration,
    ) -> Result<T, ClientError> {
        self.send_with(method, path, Bytes::new(), limit).await
    }

    async fn send_with<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        limit: Duration,
    ) -> Result<T, ClientError> {
        let name = format!("{method} {path}");
        let exchange = self.exchange_with(method, path, body, &name, limit, async |response| {
            let body = response.into_body().collect().await;
            let body = body.map_err(|source| self.broken(&name, source))?;
            self.decode(&name, &body.to_bytes())
        });
        tokio::time::timeout(limit, exchange)
            .await
            .unwrap_or_else(|_| Err(self.timeout(&name, limit)))
    }

    /// Sends a request whose answer has to begin within `limit`, and has `read` take it if it is a
    /// success.
    async fn exchange<T>(
        &self,
        method: Method,
        path: &str,
        name: &str,
        limit: Duration,
        read: impl AsyncFnOnce(Response<Incoming>) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let nothing = Bytes::new();
        self.exchange_with(method, path, nothing, name, limit, read)
            .await
    }

    /// As [`exchange`](Self::exchange), with a body.
    async fn exchange_with<T>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        name: &str,
        limit: Duration,
        read: impl AsyncFnOnce(Response<Incoming>) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "localhost")
            .body(Full::new(body))
            .map_err(|source| ClientError::Request {
                request: name.to_owned(),
                source,
            })?;
        let begin = async {
            let stream = self.connect().await.map_err(|e| self.connect_error(e))?;
            http1::handshake(TokioIo::new(stream))
                .await
                .map_err(|source| self.broken(name, source))
        };
        let (mut sender, connection) = tokio::time::timeout(limit, begin)
            .await
            .unwrap_or_else(|_| Err(self.timeout(name, limit)))?;
        let exchange = async {
            let response = tokio::time::timeout(limit, sender.send_request(request))
                .await
                .map_err(|_| self.timeout(name, limit))?
                .map_err(|source| self.broken(name, source))?;
            if response.status().is_success() {
                read(response).await
            } else {
                Err(self.refusal(name, response, limit).await)
            }
        };
        // The connection only moves while it is polled. When it ends well, the answer is on its way.
        tokio::select! {
            answer = exchange => answer,
            Err(source) = connection => Err(self.broken(name, source)),
        }
    }

    async fn connect(&self) -> io::Result<UnixStream> {
        loop {
            match UnixStream::connect(&self.socket).await {
                // The listener's backlog is full, and nothing tells when it is not any more.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    tokio::time::sleep(CONNECT_PAUSE).await;
                }
                connected => return connected,
            }
        }
    }

    /// What the agent says in an answer that is not a success.
    async fn refusal(
        &self,
        name: &str,
        response: Response<Incoming>,
        limit: Duration,
    ) -> ClientError {
        let code = response.status();
        match tokio::time::timeout(limit, response.into_body().collect()).await {
            Ok(Ok(body)) => ClientError::Refused {
                request: name.to_owned(),
                code,
                message: serde_json::from_slice(&body.to_bytes())
                    .map_or_else(|_| code.to_string(), |ErrorBody { error }| error),
            },
            Ok(Err(source)) => self.broken(name, source),
            Err(_) => self.timeout(name, limit),
        }
    }

    fn decode<T: DeserializeOwned>(&self, name: &str, text: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(text).map_err(|source| ClientError::Decode {
            request: name.to_owned(),
            path: self.socket.clone(),
            source,
        })
    }

    fn timeout(&self, name: &str, limit: Duration) -> ClientError {
        ClientError::Timeout {
            request: name.to_owned(),
            path: self.socket.clone(),
            seconds: limit.as_secs(),
        }
    }

    fn broken(&self, name: &str, source: hyper::Error) -> ClientError {
        ClientError::Broken {
            request: name.to_owned(),
            path: self.socket.clone(),
            source,
        }
    }

    fn cut(&self, name: &str) -> ClientError {
        ClientError::Cut {
            request: name.to_owned(),
            path: self.socket.clone(),
        }
    }

    fn connect_error(&self, source: io::Error) -> ClientError {
        let path = self.socket.clone();
        match source.kind() {
            io::ErrorKind::NotFound => ClientError::NoAgent(path),
            io::ErrorKind::ConnectionRefused => ClientError::Stale(path),
            io::ErrorKind::PermissionDenied => ClientError::Permission(path),
            _ => ClientError::Connect { path, source },
        }
    }
}

/// The lines of an answer as they come.
struct Lines {
    body: Incoming,
    received: BytesMut,
    /// Bytes of it that are known to have no end of a line.
    searched: usize,
}

impl Lines {
    fn of(response: Response<Incoming>) -> Self {
        Self {
            body: response.into_body(),
            received: BytesMut::new(),
            searched: 0,
        }
    }

    async fn next(&mut self, client: &Client, name: &str) -> Result<BytesMut, ClientError> {
        loop {
            let unknown = &self.received[self.searched..];
            if let Some(end) = unknown.iter().position(|&b| b == b'\n') {
                let line = self.received.split_to(self.searched + end + 1);
                self.searched = 0;
                return Ok(line);
            }
            self.searched = self.received.len();
            let frame = self
                .body
                .frame()
                .await
                .ok_or_else(|| client.cut(name))?
                .map_err(|source| client.broken(name, source))?;
            if let Ok(data) = frame.into_data() {
                self.received.extend_from_slice(&data);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener as StdUnixListener;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    /// The error of a `GET /x` against a server that sends `answer` and closes.
    async fn error_for(answer: &'static str) -> ClientError {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let n = stream.read(&mut request).await.unwrap();
            assert!(request[..n].starts_with(b"GET /x HTTP/1.1\r\n"));
            stream.write_all(answer.as_bytes()).await.unwrap();
        };
        let client = Client::new(&path);
        let (answer, ()) = tokio::join!(client.get::<Vec<u8>>("/x"), server);
        answer.expect_err("the answer is none")
    }

    #[tokio::test]
    async fn an_absent_and_a_dead_agent_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let client = Client::new(&path);
        let error = client.get::<()>("/x").await.expect_err("no socket");
        assert!(matches!(error, ClientError::NoAgent(_)), "{error}");
        assert!(error.to_string().contains("--runtime-dir"), "{error}");

        drop(StdUnixListener::bind(&path).unwrap());
        let error = client.get::<()>("/x").await.expect_err("nobody listens");
        assert!(matches!(error, ClientError::Stale(_)), "{error}");
    }

    #[tokio::test]
    async fn a_refusal_carries_the_agents_reason() {
        let error = error_for(
            "HTTP/1.1 404 Not Found\r\ncontent-length: 23\r\n\r\n{\"error\":\"no endpoint\"}",
        )
        .await;
        assert_eq!(error.to_string(), "GET /x: no endpoint");
        let error = error_for("HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(error.to_string(), "GET /x: 502 Bad Gateway");
    }

    #[tokio::test]
    async fn broken_answers_are_errors_of_one_line() {
        let error = error_for("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
        assert!(matches!(error, ClientError::Decode { .. }), "{error}");
        for broken in [
            "",
            "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n[",
            "nonsense\r\n\r\n",
        ] {
            let error = error_for(broken).await;
            assert!(matches!(error, ClientError::Broken { .. }), "{error}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }

    /// A connection whose request has been read.
    async fn accept(listener: &UnixListener) -> UnixStream {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        assert_ne!(stream.read(&mut request).await.unwrap(), 0);
        stream
    }

    const EVENTS: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";

    fn chunk(text: &str) -> String {
        format!("{:x}\r\n{text}\r\n", text.len())
    }

    #[tokio::test]
    async fn probe_events_are_handed_over_as_they_come() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (seen, mut sights) = tokio::sync::mpsc::unbounded_channel();
        let server = async {
            let mut stream = accept(&listener).await;
            let first = r#"{"progress":{"done":1,"#;
            stream.write_all(EVENTS.as_bytes()).await.unwrap();
            stream.write_all(chunk(first).as_bytes()).await.unwrap();
            let rest = "\"total\":2}}\n{\"progress\":{\"done\":2,\"total\":2}}\n{\"done\"";
            stream.write_all(chunk(rest).as_bytes()).await.unwrap();
            // The last event is held back until those before it have arrived.
            sights.recv().await.unwrap();
            sights.recv().await.unwrap();
            let done = ":{\"probeInterval\":\"10s\",\"local\":{\"name\":\"a/b\"},\"nodes\":[]}}\n";
            stream.write_all(chunk(done).as_bytes()).await.unwrap();
            stream.write_all(b"0\r\n\r\n").await.unwrap();
        };
        let client = Client::new(&path);
        let mut events = Vec::new();
        let streamed = client.stream_probe(|event| {
            events.push(event);
            let _ = seen.send(());
        });
        let (streamed, ()) = tokio::join!(streamed, server);
        streamed.unwrap();
        let progress = |done| ProbeEvent::Progress { done, total: 2 };
        assert_eq!(events[..2], [progress(1), progress(2)]);
        assert!(matches!(&events[2..], [ProbeEvent::Done(_)]), "{events:?}");
    }

    #[tokio::test]
    async fn probe_events_without_an_end_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let line = chunk("{\"progress\":{\"done\":1,\"total\":2}}\n");
        let server = async {
            for end in ["0\r\n\r\n", ""] {
                let mut stream = accept(&listener).await;
                let answer = format!("{EVENTS}{line}{end}");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        };
        let client = Client::new(&path);
        let ask = async {
            let cut = client.stream_probe(|_| {}).await.expect_err("no last line");
            assert!(matches!(cut, ClientError::Cut { .. }), "{cut}");
            let broken = client.stream_probe(|_| {}).await.expect_err("cut off");
            assert!(matches!(broken, ClientError::Broken { .. }), "{broken}");
        };
        tokio::join!(ask, server);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_agent_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let client = Client::new(&path);
        let read = client.get::<()>("/x").await.expect_err("no answer");
        assert!(read.to_string().contains("no answer in 5 s"), "{read}");
        let probe = client.put::<()>("/x").await.expect_err("no answer");
        assert!(probe.to_string().contains("no answer in 30 s"), "{probe}");
        let probe = client.stream_probe(|_| {}).await.expect_err("no answer");
        assert!(probe.to_string().contains("no answer in 30 s"), "{probe}");
    }
}
