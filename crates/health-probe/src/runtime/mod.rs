//! The container runtime, accessed through its CRI (`runtime.v1` of k8s.io/cri-api): lists pods and containers with
//! their states, and stops and restarts containers. Commands in containers are run by
//! [`mechanism::exec`](crate::mechanism::exec).

mod config;
mod error;
mod exec;
mod messages;
mod observe;
mod restart;
mod status;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hyper::http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use self::messages::{Nothing, StopContainerRequest};
use crate::mechanism::chain;

pub(crate) use self::exec::Executed;
pub(crate) use self::messages::ExecSyncRequest;

pub use self::error::{Reason, RuntimeError};
pub use self::status::{Observation, RuntimeContainer, RuntimePod};

/// Maximum size of a response in bytes. Runtimes send at most 16 MiB, because the kubelet accepts no more.
const ANSWER_LIMIT: usize = 17 << 20;
/// Maximum number of bytes of unread output, both of one command and of all commands together.
const COMMAND_WINDOW: u32 = 64 << 10;
const COMMANDS_WINDOW: u32 = 1 << 20;
/// How long to wait for a response.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for the response to a call that creates or starts a container.
const LONG_PATIENCE: Duration = Duration::from_secs(60);

/// A container runtime. Connects on demand, and reconnects once the runtime is back.
#[derive(Clone)]
pub struct Runtime {
    channel: Channel,
    /// A separate channel for commands, so that their output does not hold up other calls.
    commands: Channel,
    socket: Arc<Path>,
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl Runtime {
    /// Returns the runtime that listens on a socket, such as `/run/containerd/containerd.sock`. Must be called inside a
    /// tokio runtime.
    pub fn at(socket: &Path) -> Self {
        let path: Arc<Path> = socket.into();
        let connect = {
            let path = path.clone();
            move || {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }
        };
        // The authority of requests, which is not resolved.
        let endpoint = Endpoint::from_static("http://localhost");
        let bounded = endpoint
            .clone()
            .initial_stream_window_size(COMMAND_WINDOW)
            .initial_connection_window_size(COMMANDS_WINDOW);
        let connect_for_commands = connect.clone();
        Self {
            channel: endpoint.connect_with_connector_lazy(service_fn(move |_| connect())),
            commands: bounded
                .connect_with_connector_lazy(service_fn(move |_| connect_for_commands())),
            socket: path,
        }
    }

    /// The socket of the runtime.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Stops a container: kills it if it has not exited by itself within `grace`, which is rounded up to whole seconds.
    /// Also succeeds if the container is gone or has already exited.
    pub async fn stop(&self, container_id: &str, grace: Duration) -> Result<(), RuntimeError> {
        let seconds = grace.as_secs() + u64::from(grace.subsec_nanos() > 0);
        let request = StopContainerRequest {
            container_id: container_id.to_owned(),
            timeout: i64::try_from(seconds).unwrap_or(i64::MAX),
        };
        let patience = grace.saturating_add(PATIENCE);
        let stopped = self.call::<_, Nothing>("StopContainer", container_id, request, patience);
        match stopped.await {
            Err(error) if error.is_not_found() => Ok(()),
            other => other.map(drop),
        }
    }

    /// Makes one call, about `subject`.
    async fn call<Q, A>(
        &self,
        method: &'static str,
        subject: &str,
        request: Q,
        patience: Duration,
    ) -> Result<A, RuntimeError>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        let answer = timeout(patience, self.unary(method, request)).await;
        let reason = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(status)) => Reason::from(&status),
            Err(_) => Reason::TimedOut(patience),
        };
        Err(self.error(method, subject, reason))
    }

    fn error(&self, method: &'static str, subject: &str, reason: Reason) -> RuntimeError {
        RuntimeError {
            socket: self.socket.clone(),
            method,
            subject: subject.to_owned(),
            reason,
        }
    }

    /// Makes a call, without a time limit of its own.
    async fn unary<Q, A>(&self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        let mut client = Grpc::new(self.channel.clone()).max_decoding_message_size(ANSWER_LIMIT);
        client
            .ready()
            .await
            .map_err(|error| Status::unavailable(chain(&error)))?;
        let path = PathAndQuery::try_from(format!("/runtime.v1.RuntimeService/{method}"))
            .map_err(|error| Status::internal(error.to_string()))?;
        let codec = ProstCodec::<Q, A>::default();
        let answer = client.unary(Request::new(request), path, codec).await?;
        Ok(answer.into_inner())
    }
}

impl From<&Status> for Reason {
    fn from(status: &Status) -> Self {
        let reported = match std::error::Error::source(status) {
            Some(source) => format!("{}: {}", status.message(), chain(source)),
            None => status.message().to_owned(),
        };
        match status.code() {
            Code::Unavailable => Self::Away(reported),
            code => Self::Refused(code, reported),
        }
    }
}
