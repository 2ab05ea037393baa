//! The container runtime, by its CRI (`runtime.v1` of k8s.io/cri-api): which pods and containers it has and how they do,
//! and to end containers and start them again. Commands in containers are run in
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

/// Most bytes of an answer. Runtimes hold back what is more than 16 MiB, as the kubelet takes no more.
const ANSWER_LIMIT: usize = 17 << 20;
/// Most bytes of a command's output that wait to be read, and of all commands.
const COMMAND_WINDOW: u32 = 64 << 10;
const COMMANDS_WINDOW: u32 = 1 << 20;
/// Longest time for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same where a container is made or started.
const LONG_PATIENCE: Duration = Duration::from_secs(60);

/// A container runtime. It is connected to when it is needed, and again whenever it is back.
#[derive(Clone)]
pub struct Runtime {
    channel: Channel,
    /// For commands: what these write is in no other call's way.
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
    /// The one that listens on a socket, such as `/run/containerd/containerd.sock`. Must be called inside a tokio
    /// runtime.
    pub fn at(socket: &Path) -> Self {
        let path: Arc<Path> = socket.into();
        let connect = {
            let path = path.clone();
            move || {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }
        };
        // The authority of requests. Nothing is resolved.
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

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends a container: it may take `grace` (whole seconds, rounded up) to end by itself, and is killed then. Good too if
    /// it is gone or has ended already.
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

    /// One call, which is about `subject`.
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

    /// A call without a limit of time of its own.
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
        let told = match std::error::Error::source(status) {
            Some(source) => format!("{}: {}", status.message(), chain(source)),
            None => status.message().to_owned(),
        };
        match status.code() {
            Code::Unavailable => Self::Away(told),
            code => Self::Refused(code, told),
        }
    }
}
