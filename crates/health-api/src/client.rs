//! The client for an agent's API.

mod access;
mod error;
mod tls_error;

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
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::access::Access;
pub use self::access::{ApiUrl, ApiUrlError, TlsMaterial, TlsSetupError};
pub use self::error::ClientError;

/// Read requests return at once with whatever is known.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// A probe of all nodes takes up to the agent's probe timeout, and longer if the probe rate requires it. A streamed
/// probe sends data all the time.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);
/// Creating an endpoint takes milliseconds, unless its namespace or the disk is slow.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// A client of one agent. Each request opens a connection.
#[derive(Clone, Debug)]
pub struct Client {
    access: Access,
}

impl Client {
    /// A client of the agent that listens on `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            access: Access::Unix(socket.into()),
        }
    }

    /// A client of the agent that listens on a TCP port with TLS. Fails if the certificates are unusable.
    pub fn over_tls(
        host: &str,
        port: u16,
        material: &TlsMaterial<'_>,
    ) -> Result<Self, TlsSetupError> {
        let access = Access::over_tls(host, port, material)?;
        Ok(Self { access })
    }

    /// Whether the agent may be on another machine.
    pub fn is_remote(&self) -> bool {
        matches!(self.access, Access::Tls(_))
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

    /// Sends a PUT request to `path`; waits up to 30 s.
    pub async fn put<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(Method::PUT, path, PROBE_TIMEOUT).await
    }

    /// Probes all nodes and passes on results as they arrive, up to and including [`ProbeEvent::Done`]. Waits at most
    /// 30 s between two events.
    pub async fn stream_probe(&self, mut each: impl FnMut(ProbeEvent)) -> Result<(), ClientError> {
        let path = "/v1beta/status/probe?stream=true";
        let name = format!("{} {path}", Method::PUT);
        let request = request(Method::PUT, path, &name, Bytes::new())?;
        self.exchange(request, &name, PROBE_TIMEOUT, async |response| {
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

    /// Calls `begin` when the agent starts to report these events, and then `each` with every line up to
    /// [`MonitorLine::End`], until `each` breaks. There is no limit on idle time.
    pub async fn monitor(
        &self,
        filter: &EventFilter,
        begin: impl FnOnce(),
        mut each: impl FnMut(MonitorLine) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let path = format!("/v1/monitor?{}", filter.query());
        let name = format!("{} /v1/monitor", Method::GET);
        let request = request(Method::GET, &path, &name, Bytes::new())?;
        self.exchange(request, &name, READ_TIMEOUT, async |response| {
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

    /// Posts `body` as JSON to `path`, and reads the result within 30 s.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.send_json(Method::POST, path, body).await
    }

    /// Posts a document to `path`, and reads the result within 30 s.
    pub async fn post_text<T: DeserializeOwned>(
        &self,
        path: &str,
        text: Vec<u8>,
    ) -> Result<T, ClientError> {
        self.send_with(Method::POST, path, text.into(), CHANGE_TIMEOUT)
            .await
    }

    /// Patches the resource at `path` with `body`, within 30 s.
    pub async fn patch<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.send_json(Method::PATCH, path, body).await
    }

    /// Deletes the resource at `path`, within 30 s.
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(Method::DELETE, path, CHANGE_TIMEOUT).await
    }

    /// Calls `each` with every line of a continuous response, until `each` breaks. There is no limit on idle time.
    pub async fn watch<T: DeserializeOwned>(
        &self,
        path: &str,
        mut each: impl FnMut(T) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let name = format!("{} {path}", Method::GET);
        let request = request(Method::GET, path, &name, Bytes::new())?;
        self.exchange(request, &name, READ_TIMEOUT, async |response| {
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
        // A value that JSON cannot express is the caller's mistake, and the agent will report it.
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
        let request = request(method, path, &name, body)?;
        let exchange = self.exchange(request, &name, limit, async |response| {
            let body = response.into_body().collect().await;
            let body = body.map_err(|source| self.broken(&name, source))?;
            self.decode(&name, &body.to_bytes())
        });
        tokio::time::timeout(limit, exchange)
            .await
            .unwrap_or_else(|_| Err(self.timeout(&name, limit)))
    }

    /// Sends a request whose response must begin within `limit`, and passes a successful response to `read`.
    async fn exchange<T>(
        &self,
        request: Request<Full<Bytes>>,
        name: &str,
        limit: Duration,
        read: impl AsyncFnOnce(Response<Incoming>) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let begin = async {
            let stream = self.access.connect().await?;
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
        // The connection only makes progress while it is polled. If it ends without an error, the response is on its
        // way.
        tokio::select! {
            answer = exchange => answer,
            Err(source) = connection => Err(self.broken(name, source)),
        }
    }

    /// Reads the agent's message from an error response.
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
            agent: self.access.to_string(),
            source,
        })
    }

    fn timeout(&self, name: &str, limit: Duration) -> ClientError {
        ClientError::Timeout {
            request: name.to_owned(),
            agent: self.access.to_string(),
            seconds: limit.as_secs(),
        }
    }

    fn broken(&self, name: &str, source: hyper::Error) -> ClientError {
        let agent = self.access.to_string();
        // The agent verifies a client's certificate after the client has sent its request.
        match tls_error::reason(&source) {
            Some(reason) => ClientError::Tls { agent, reason },
            None => ClientError::Broken {
                request: name.to_owned(),
                agent,
                source,
            },
        }
    }

    fn cut(&self, name: &str) -> ClientError {
        ClientError::Cut {
            request: name.to_owned(),
            agent: self.access.to_string(),
        }
    }
}

/// Builds a request that errors refer to as `name`.
fn request(
    method: Method,
    path: &str,
    name: &str,
    body: Bytes,
) -> Result<Request<Full<Bytes>>, ClientError> {
    Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, "localhost")
        .body(Full::new(body))
        .map_err(|source| ClientError::Request {
            request: name.to_owned(),
            source,
        })
}

/// The lines of a response as they arrive.
struct Lines {
    body: Incoming,
    received: BytesMut,
    /// Number of bytes known to contain no line break.
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
mod tests;
