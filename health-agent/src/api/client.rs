//! Speaks to an agent over its socket.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use super::types::ErrorBody;

/// Reading answers at once with what is known.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// A probe of all nodes takes up to the agent's probe timeout.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

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
        self.send(Method::GET, path, READ_TIMEOUT).await
    }

    /// Has the agent do what `path` stands for, within 30 s.
    pub async fn put<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(Method::PUT, path, PROBE_TIMEOUT).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        limit: Duration,
    ) -> Result<T, ClientError> {
        let name = format!("{method} {path}");
        let (code, body) = tokio::time::timeout(limit, self.exchange(method, path, &name))
            .await
            .unwrap_or_else(|_| {
                Err(ClientError::Timeout {
                    request: name.clone(),
                    path: self.socket.clone(),
                    seconds: limit.as_secs(),
                })
            })?;
        if !code.is_success() {
            let message = serde_json::from_slice(&body)
                .map_or_else(|_| code.to_string(), |ErrorBody { error }| error);
            return Err(ClientError::Refused {
                request: name,
                code,
                message,
            });
        }
        serde_json::from_slice(&body).map_err(|source| ClientError::Decode {
            request: name,
            path: self.socket.clone(),
            source,
        })
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        name: &str,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let broken = |source| ClientError::Broken {
            request: name.to_owned(),
            path: self.socket.clone(),
            source,
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "localhost")
            .body(Empty::<Bytes>::new())
            .map_err(|source| ClientError::Request {
                request: name.to_owned(),
                source,
            })?;
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|e| self.connect_error(e))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        let exchange = async {
            let (head, body) = sender.send_request(request).await?.into_parts();
            Ok((head.status, body.collect().await?.to_bytes()))
        };
        // The connection only moves while it is polled. When it ends well, the answer is on its way.
        tokio::select! {
            answer = exchange => answer,
            Err(e) = connection => Err(e),
        }
        .map_err(broken)
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
    }
}
