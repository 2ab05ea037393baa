//! Serves the API.

use std::convert::Infallible;
use std::fs::{self, Permissions};
use std::future::{Future, IntoFuture};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{self, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, put};
use axum::{Json, Router};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::UnixListener;
use tokio::sync::oneshot;

use super::types::{
    AgentState, Endpoint, ErrorBody, HealthStatus, HealthzResponse, LoadAverage, NodeList,
    RegistryState,
};
use crate::config::{Config, duration_text};
use crate::mesh::IgnoredReplyCounts;

/// The API in OpenAPI's terms. Tests hold it against the routes and their answers.
const OPENAPI: &str = include_str!("openapi.json");

/// Owner and group may speak to the agent.
const SOCKET_MODE: u32 = 0o660;
const BACKLOG: i32 = 128;
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// What the server reads; the agent implements it. Every call answers at once with what is known.
pub trait Source: Send + Sync + 'static {
    /// The last results.
    fn status(&self) -> HealthStatus;
    /// Probes all nodes now; ends with the probe timeout at the latest, with what is known then.
    fn probe(&self) -> impl Future<Output = HealthStatus> + Send;
    /// The registry.
    fn nodes(&self) -> NodeList;
    /// How the node registries do.
    fn registries(&self) -> Vec<RegistryState> {
        self.nodes().registries
    }
    /// ICMP messages that were not taken for answers.
    fn ignored_replies(&self) -> IgnoredReplyCounts {
        IgnoredReplyCounts::default()
    }
    /// Local endpoints.
    fn endpoints(&self) -> Vec<Endpoint>;
    /// The settings in force.
    fn config(&self) -> Config;
    /// How the agent itself does.
    fn state(&self) -> AgentState;
    /// Since when it runs.
    fn uptime(&self) -> Duration;
}

/// Why the socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// A live agent answers on it.
    #[error(
        "the socket {path} is in use by pid {pid}; stop that agent, or give this one a \
         --runtime-dir of its own"
    )]
    InUse {
        /// The socket.
        path: PathBuf,
        /// The process that listens.
        pid: i32,
    },
    /// Something else has its name.
    #[error("cannot make the socket {0}: the name is taken by something that is no socket")]
    NoSocket(PathBuf),
    /// The system refused.
    #[error("cannot {what} the socket {path}: {source}")]
    Io {
        /// What was attempted.
        what: &'static str,
        /// The socket.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// Opens the API's socket at `path`, whose folder must exist, readable and writable by owner and
/// group. A socket that nobody listens on any more is taken over.
///
/// Two processes that do this at the same time could take over each other's socket: the caller
/// holds the [pid file](crate::pidfile::PidFile).
///
/// Panics outside a tokio runtime.
pub fn bind(path: &Path) -> Result<UnixListener, BindError> {
    let failed = |what| {
        move |source| BindError::Io {
            what,
            path: path.to_owned(),
            source,
        }
    };
    remove_stale(path)?;
    let address = SockAddr::unix(path).map_err(failed("name"))?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed("create"))?;
    socket.set_nonblocking(true).map_err(failed("set up"))?;
    socket.bind(&address).map_err(failed("bind"))?;
    // Nobody can connect before the socket listens, so the permissions of its birth don't matter.
    fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))
        .map_err(failed("set the permissions of"))?;
    socket.listen(BACKLOG).map_err(failed("listen on"))?;
    UnixListener::from_std(StdUnixListener::from(socket)).map_err(failed("poll"))
}

/// Removes a socket that nobody listens on; an error if somebody does.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let failed = |what| {
        move |source| BindError::Io {
            what,
            path: path.to_owned(),
            source,
        }
    };
    match fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_socket() => {}
        Ok(_) => return Err(BindError::NoSocket(path.to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("inspect")(e)),
    }
    let address = SockAddr::unix(path).map_err(failed("name"))?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed("create"))?;
    // A listener that has stopped accepting, its backlog full, must not hold us up.
    socket.set_nonblocking(true).map_err(failed("set up"))?;
    match socket.connect(&address) {
        Ok(()) => {
            let peer = getsockopt(&socket, PeerCredentials)
                .map_err(|e| failed("ask for the owner of")(e.into()))?;
            Err(BindError::InUse {
                path: path.to_owned(),
                pid: peer.pid(),
            })
        }
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed("remove the stale"))
        }
        Err(e) => Err(failed("connect to")(e)),
    }
}

/// Serves the API until `shutdown` ends; requests under way are answered, if that takes no longer
/// than 2 s. Then removes the socket's file.
pub async fn serve<S: Source>(
    listener: UnixListener,
    source: Arc<S>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let path = listener.local_addr()?.as_pathname().map(Path::to_path_buf);
    let (stopping, stopped) = oneshot::channel();
    let server = axum::serve(listener, router(source)).with_graceful_shutdown(async move {
        shutdown.await;
        // The other end is only gone when the server is.
        let _ = stopping.send(());
    });
    // A client that sends half a request and waits must not hold up the agent's end.
    let grace = async {
        let _ = stopped.await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        result = server.into_future() => result?,
        () = grace => {}
    }
    match path {
        Some(path) => fs::remove_file(path),
        None => Ok(()),
    }
}

fn router<S: Source>(source: Arc<S>) -> Router {
    routes()
        .into_iter()
        .fold(Router::new(), |router, (path, methods)| {
            router.route(path, methods)
        })
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .with_state(source)
}

/// Paths as OpenAPI writes them, each with what answers it.
fn routes<S: Source>() -> [(&'static str, MethodRouter<Arc<S>, Infallible>); 9] {
    [
        ("/v1beta/healthz", get(healthz)),
        ("/v1beta/status", get(status)),
        ("/v1beta/status/probe", put(probe)),
        ("/v1beta/hello", get(hello)),
        ("/v1/nodes", get(nodes)),
        ("/v1/endpoints", get(endpoints)),
        ("/v1/endpoints/{id}", get(endpoint)),
        ("/v1/config", get(config)),
        ("/v1/openapi.json", get(openapi)),
    ]
}

async fn healthz<S: Source>(State(source): State<Arc<S>>) -> Response {
    let cilium = source.state();
    let code = match cilium.state.as_str() {
        "Failure" => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::OK,
    };
    match load_average() {
        Ok(system_load) => (
            code,
            Json(HealthzResponse {
                cilium,
                uptime: duration_text(source.uptime()),
                system_load,
            }),
        )
            .into_response(),
        Err(e) => error(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot read /proc/loadavg: {e}"),
        ),
    }
}

/// See proc_loadavg(5).
fn load_average() -> io::Result<LoadAverage> {
    let text = fs::read_to_string("/proc/loadavg")?;
    let mut fields = text.split_ascii_whitespace().map(str::to_owned);
    match (fields.next(), fields.next(), fields.next()) {
        (Some(last_1_min), Some(last_5_min), Some(last_15_min)) => Ok(LoadAverage {
            last_1_min,
            last_5_min,
            last_15_min,
        }),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

async fn status<S: Source>(State(source): State<Arc<S>>) -> Json<HealthStatus> {
    Json(source.status())
}

async fn probe<S: Source>(State(source): State<Arc<S>>) -> Json<HealthStatus> {
    Json(source.probe().await)
}

async fn hello() {}

async fn nodes<S: Source>(State(source): State<Arc<S>>) -> Json<NodeList> {
    Json(source.nodes())
}

async fn endpoints<S: Source>(State(source): State<Arc<S>>) -> Json<Vec<Endpoint>> {
    Json(source.endpoints())
}

async fn endpoint<S: Source>(
    State(source): State<Arc<S>>,
    extract::Path(id): extract::Path<String>,
) -> Response {
    let Ok(number) = id.parse::<u16>() else {
        return error(
            StatusCode::BAD_REQUEST,
            format!("'{id}' is no endpoint id: they are numbers from 1 to 4095"),
        );
    };
    match source.endpoints().into_iter().find(|e| e.id == number) {
        Some(endpoint) => Json(endpoint).into_response(),
        None => error(
            StatusCode::NOT_FOUND,
            format!("no endpoint {number}; `health-agent endpoint list` shows those there are"),
        ),
    }
}

async fn config<S: Source>(State(source): State<Arc<S>>) -> Json<Config> {
    Json(source.config())
}

async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI)
}

async fn no_such_path(request: Request) -> Response {
    error(
        StatusCode::NOT_FOUND,
        format!(
            "no such path: {}; /v1/openapi.json lists all",
            request.uri().path()
        ),
    )
}

async fn no_such_method(request: Request) -> Response {
    error(
        StatusCode::METHOD_NOT_ALLOWED,
        format!(
            "{} does not take {}; /v1/openapi.json tells what it takes",
            request.uri().path(),
            request.method()
        ),
    )
}

fn error(code: StatusCode, error: String) -> Response {
    (code, Json(ErrorBody { error })).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    /// Stands for the type parameter of [`routes`]; no request reaches it.
    struct Unasked;

    impl Source for Unasked {
        fn status(&self) -> HealthStatus {
            unreachable!()
        }
        async fn probe(&self) -> HealthStatus {
            unreachable!()
        }
        fn nodes(&self) -> NodeList {
            unreachable!()
        }
        fn endpoints(&self) -> Vec<Endpoint> {
            unreachable!()
        }
        fn config(&self) -> Config {
            unreachable!()
        }
        fn state(&self) -> AgentState {
            unreachable!()
        }
        fn uptime(&self) -> Duration {
            unreachable!()
        }
    }

    #[test]
    fn the_document_lists_exactly_the_routes() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        let documented: BTreeSet<_> = document["paths"]
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let served: BTreeSet<_> = routes::<Unasked>().iter().map(|(path, _)| *path).collect();
        assert_eq!(documented, served);
    }

    #[tokio::test]
    async fn a_live_socket_is_refused_by_pid_and_a_stale_one_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = bind(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, SOCKET_MODE);

        let error = bind(&path).expect_err("it is in use").to_string();
        let pid = format!("in use by pid {};", std::process::id());
        assert!(error.contains(&pid), "{error}");

        drop(listener);
        assert!(path.exists());
        let _again = bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[tokio::test]
    async fn only_sockets_are_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(bind(&path), Err(BindError::NoSocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");

        let nowhere = dir.path().join("missing/health.sock");
        let error = bind(&nowhere).expect_err("no folder").to_string();
        assert!(error.contains("missing/health.sock"), "{error}");
    }

    #[tokio::test]
    async fn the_socket_goes_when_serving_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = bind(&path).unwrap();
        serve(listener, Arc::new(Unasked), async {}).await.unwrap();
        assert!(!path.exists());
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_request_does_not_hold_up_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = bind(&path).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"GET /v1beta/sta").unwrap();
        let shutdown = tokio::time::sleep(Duration::from_secs(1));
        let begun = tokio::time::Instant::now();
        serve(listener, Arc::new(Unasked), shutdown).await.unwrap();
        assert!(begun.elapsed() <= Duration::from_secs(4));
        assert!(!path.exists());
    }
}
