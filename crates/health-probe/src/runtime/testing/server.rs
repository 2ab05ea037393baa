//! The gRPC server of the test runtime.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::stream;
use hyper::http;
use prost::Message;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::server::Grpc;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::super::messages::{
    ContainerId, CreateContainerRequest, Nothing, StatusRequest, StopContainerRequest,
};
use super::state::{State, id};
use super::{Call, Fault, Shared};
use crate::runtime::ExecSyncRequest;

const SERVICE: &str = "/runtime.v1.RuntimeService/";

pub(super) fn spawn(listener: UnixListener, shared: Arc<Shared>) -> JoinHandle<()> {
    let incoming = stream::unfold(listener, async |listener| {
        let accepted = listener.accept().await;
        Some((accepted.map(|(stream, _)| stream), listener))
    });
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(serve(&shared, request).await) }
    });
    tokio::spawn(async move {
        let served = Server::builder().serve_with_incoming(service, incoming);
        served.await.unwrap();
    })
}

async fn serve(shared: &Shared, request: http::Request<Body>) -> http::Response<Body> {
    let path = request.uri().path().to_owned();
    let method = path.strip_prefix(SERVICE).unwrap_or(&path);
    let call = Answered { shared, method };
    match method {
        "ListPodSandbox" => {
            let subject = |_: &Nothing| String::new();
            call.by(request, subject, |state, _| Ok(state.list_pods()))
                .await
        }
        "ListContainers" => {
            let subject = |_: &Nothing| String::new();
            call.by(request, subject, |state, _| Ok(state.list_containers()))
                .await
        }
        "PodSandboxStatus" => {
            let subject = |asked: &StatusRequest| asked.id.clone();
            call.by(request, subject, |state, asked| state.pod_status(&asked.id))
                .await
        }
        "ContainerStatus" => {
            let subject = |asked: &StatusRequest| asked.id.clone();
            call.by(request, subject, |state, asked| {
                state.container_status(&asked.id)
            })
            .await
        }
        "CreateContainer" => {
            let subject = |asked: &CreateContainerRequest| {
                let config = asked.config.as_ref();
                let metadata = config.and_then(|config| config.metadata.clone());
                let metadata = metadata.unwrap_or_default();
                id(&asked.pod_sandbox_id, &metadata.name, metadata.attempt)
            };
            call.by(request, subject, |state, asked| state.create(asked))
                .await
        }
        "StartContainer" => {
            let subject = |asked: &ContainerId| asked.container_id.clone();
            call.by(request, subject, |state, asked| {
                state.start(&asked.container_id)
            })
            .await
        }
        "StopContainer" => {
            let subject = |asked: &StopContainerRequest| asked.container_id.clone();
            call.by(request, subject, |state, asked| {
                state.stop(&asked.container_id)
            })
            .await
        }
        "RemoveContainer" => {
            let subject = |asked: &ContainerId| asked.container_id.clone();
            call.by(request, subject, |state, asked| {
                Ok(state.remove(&asked.container_id))
            })
            .await
        }
        "ExecSync" => {
            let subject = |asked: &ExecSyncRequest| asked.container_id.clone();
            call.by(request, subject, |state, asked| {
                state.run_command(&asked.container_id)
            })
            .await
        }
        _ => Status::unimplemented(path).into_http(),
    }
}

/// A call to answer.
struct Answered<'a> {
    shared: &'a Shared,
    method: &'a str,
}

impl Answered<'_> {
    /// Responds with the result of `answer` on the state, unless the call must fail.
    async fn by<Q, A>(
        self,
        request: http::Request<Body>,
        subject: impl Fn(&Q) -> String,
        answer: impl Fn(&mut State, &Q) -> Result<A, Status>,
    ) -> http::Response<Body>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        let is_rubbish = AtomicBool::new(false);
        let service = service_fn(|request: Request<Q>| {
            let request = request.into_inner();
            let subject = subject(&request);
            let fault = self.note(&subject);
            let answer = match fault {
                None => answer(&mut self.shared.state(), &request),
                Some(_) => Err(Status::unknown("the test has it go wrong")),
            };
            if fault == Some(Fault::Refused) && self.method == "StartContainer" {
                self.shared.state().fail_start(&subject);
            }
            is_rubbish.store(fault == Some(Fault::Rubbish), Ordering::Relaxed);
            async move {
                if fault == Some(Fault::Hangs) {
                    std::future::pending::<()>().await;
                }
                answer.map(Response::new)
            }
        });
        let codec = ProstCodec::<A, Q>::default();
        let response = Grpc::new(codec).unary(service, request).await;
        match is_rubbish.into_inner() {
            true => http::Response::new(Body::new("no gRPC".to_owned())),
            false => response,
        }
    }

    /// Records the call. Returns how it fails.
    fn note(&self, subject: &str) -> Option<Fault> {
        let key = (self.method.to_owned(), subject.to_owned());
        let fault = self.shared.state().faults.get(&key).copied();
        let (method, subject) = key;
        let call = Call {
            method,
            subject,
            at: Instant::now(),
            fault,
        };
        self.shared.calls.send_modify(|calls| calls.push(call));
        fault
    }
}
