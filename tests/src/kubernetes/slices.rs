//! EndpointSlices of `discovery.k8s.io/v1`, from a server that has only `v1beta1` (Kubernetes 1.17 to 1.20). The server's
//! own aggregation layer passes requests for `v1` on to this one, which asks for `v1beta1` and translates the answers.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::serve::Listener;
use futures_util::{StreamExt as _, stream};
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

use super::control_plane::{ControlPlane, start};
use crate::bed::Authority;
use crate::process::Running;
use crate::{PATIENCE, wait_for};

const NEW: &str = "discovery.k8s.io/v1";
const OLD: &str = "discovery.k8s.io/v1beta1";
/// Where kubectl passes requests on to the API server as the administrator.
const PROXY_PORT: u16 = 8001;
const PORT: u16 = 6444;
/// How long to wait for requests in progress on shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// The translation, which ends on drop.
#[derive(Debug)]
pub(super) struct Slices {
    runtime: Option<Runtime>,
    _proxy: Running,
}

impl Slices {
    /// Starts the translation, and waits until the API server serves `v1`.
    pub(super) fn serve(plane: &ControlPlane, folder: &std::path::Path) -> anyhow::Result<Self> {
        let mut proxy = plane.kubectl_command();
        proxy.args(["proxy", &format!("--port={PROXY_PORT}")]);
        let proxy = start(&mut proxy, folder, "proxy")?;
        let address = SocketAddr::from((plane.address(), PORT));
        let acceptor = acceptor(plane.address())?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let listener = runtime
            .block_on(TcpListener::bind(address))
            .with_context(|| format!("cannot listen on {address}"))?;
        let client: Upstream = Client::builder(TokioExecutor::new()).build_http();
        let app = Router::new()
            .route(&format!("/apis/{NEW}"), get(resources))
            .fallback(translate)
            .with_state(client);
        runtime.spawn(async move {
            let listener = TlsListener { listener, acceptor };
            // Ends with the runtime.
            axum::serve(listener, app).await
        });
        let slices = Self {
            runtime: Some(runtime),
            _proxy: proxy,
        };
        plane.apply(&registration(plane.address()))?;
        wait_for("EndpointSlices of v1", PATIENCE, || {
            Ok(plane
                .kubectl(&format!("get --raw /apis/{NEW}/endpointslices"))
                .ok())
        })?;
        Ok(slices)
    }
}

impl Drop for Slices {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
        }
    }
}

/// Makes the API server pass on requests for `v1`. Controllers prefer the version with the higher priority, the server's own.
fn registration(address: Ipv4Addr) -> [Value; 2] {
    let service = json!({ "name": "slices", "namespace": "kube-system" });
    [
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": service,
            "spec": { "type": "ExternalName", "externalName": address },
        }),
        json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": { "name": "v1.discovery.k8s.io" },
            "spec": {
                "group": "discovery.k8s.io", "version": "v1",
                "groupPriorityMinimum": 100, "versionPriority": 1,
                "insecureSkipTLSVerify": true,
                "service": { "name": "slices", "namespace": "kube-system", "port": PORT },
            },
        }),
    ]
}

fn acceptor(address: Ipv4Addr) -> anyhow::Result<TlsAcceptor> {
    let signed = Authority::new("slices")?.sign(&[&address.to_string()])?;
    let chain = vec![CertificateDer::from_pem_slice(
        signed.certificate.as_bytes(),
    )?];
    let key = PrivateKeyDer::from_pem_slice(signed.key.as_bytes())?;
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

struct TlsListener {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            // Both fail with the client; the next one may succeed.
            if let Ok((stream, peer)) = self.listener.accept().await
                && let Ok(stream) = self.acceptor.accept(stream).await
            {
                return (stream, peer);
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

type Upstream = Client<HttpConnector, Body>;

async fn resources() -> Response {
    let list = json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": NEW,
        "resources": [{
            "name": "endpointslices", "singularName": "", "namespaced": true,
            "kind": "EndpointSlice", "verbs": ["get", "list", "watch"],
        }],
    });
    ([(CONTENT_TYPE, "application/json")], list.to_string()).into_response()
}

async fn translate(State(client): State<Upstream>, request: Request) -> Response {
    answer(&client, request.uri())
        .await
        .unwrap_or_else(|error| (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response())
}

async fn answer(client: &Upstream, uri: &Uri) -> anyhow::Result<Response> {
    let asked = uri.path_and_query().context("no path")?.as_str();
    let path = asked.replacen(NEW, OLD, 1);
    let upstream: Uri = format!("http://127.0.0.1:{PROXY_PORT}{path}").parse()?;
    let answer = client.get(upstream).await?;
    let (mut parts, body) = answer.into_parts();
    parts.headers.remove("content-length");
    if path.contains("watch=") {
        let body = Body::from_stream(lines(Body::new(body)));
        return Ok(Response::from_parts(parts, body));
    }
    let bytes = body.collect().await?.to_bytes();
    let body = match serde_json::from_slice(&bytes) {
        Ok(document) => Bytes::from(translated(document).to_string()),
        Err(_) => bytes,
    };
    Ok(Response::from_parts(parts, body.into()))
}

/// The translated events of a watch, each a line.
fn lines(body: Body) -> impl futures_util::Stream<Item = Result<Bytes, axum::Error>> {
    let state = (body.into_data_stream(), Vec::new());
    stream::try_unfold(state, |(mut pieces, mut buffer)| async move {
        loop {
            if let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                let rest = buffer.split_off(end + 1);
                let line = match serde_json::from_slice::<Value>(&buffer) {
                    Ok(mut event) => {
                        event["object"] = translated(event["object"].take());
                        Bytes::from(format!("{event}\n"))
                    }
                    Err(_) => Bytes::from(buffer),
                };
                return Ok(Some((line, (pieces, rest))));
            }
            match pieces.next().await {
                Some(piece) => buffer.extend_from_slice(&piece?),
                None => return Ok(None),
            }
        }
    })
}

/// A slice or a list of slices in the form of `v1`: what was a topology has fields of its own.
fn translated(mut object: Value) -> Value {
    if object["apiVersion"] == OLD {
        object["apiVersion"] = NEW.into();
    }
    for item in list_mut(&mut object, "items") {
        *item = translated(item.take());
    }
    for endpoint in list_mut(&mut object, "endpoints") {
        let Some(topology) = endpoint
            .as_object_mut()
            .and_then(|it| it.remove("topology"))
        else {
            continue;
        };
        for (field, key) in [
            ("nodeName", "kubernetes.io/hostname"),
            ("zone", "topology.kubernetes.io/zone"),
        ] {
            if let Some(value) = topology.get(key) {
                endpoint[field] = value.clone();
            }
        }
    }
    object
}

fn list_mut<'a>(object: &'a mut Value, field: &str) -> impl Iterator<Item = &'a mut Value> {
    let list = object.get_mut(field).and_then(Value::as_array_mut);
    list.into_iter().flatten()
}
