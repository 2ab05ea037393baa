//! Serves the API on its sockets and ports.

use std::future::Future;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, MatchedPath, Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use futures_util::stream;
use health_api::rtt::RttEntry;
use health_model::api::{
    AgentReport, ClusterNodeStatus, HealthStatus, HealthzResponse, IdentityEntry, LoadAverage,
    NodeList, PathMtuEntry, ProbeEvent, TargetHistory,
};
use health_model::duration::duration_text;
use health_model::events::{EventFilter, MonitorLine};
use health_model::identity::Identity;
use health_settings::SettingList;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;

use super::answer::{Answer, AnswerOrLines, Batch, Lines, Refusal, answer, cannot_write};
use super::audience::Audience;
use super::certificates::Certificates;
use super::node_feed::{self, NodeFeed};
use super::pacing::Client;
use super::path_id::PathId;
use super::serve::{Limits, Server, has_body};
use super::slots::Slots;
use super::source::Source;
use super::{routes, streamed};

/// The API's OpenAPI document. Tests compare it with the handlers, their types and real responses.
pub(super) const OPENAPI: &str = include_str!(concat!(env!("OUT_DIR"), "/openapi.json"));

const LIMITS: Limits = Limits {
    connections: 64,
    head: Duration::from_secs(5),
    patience: Duration::from_secs(10),
};
/// Maximum number of concurrent requests to probe nodes; each lasts as long as the probes.
const PROBE_REQUESTS: usize = 16;
/// Maximum number of concurrent clients that watch endpoints, and of those that watch container probes.
const WATCHES: usize = 16;
/// Maximum number of clients that monitor, for each audience but that of the unix socket. The agent serves 16 in all,
/// so that at least four of these can always be local.
const GUEST_MONITORS: usize = 4;
/// Maximum number of events written at once.
const EVENT_BATCH: usize = 256;
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Where the API is served.
pub struct Entrances {
    /// The unix socket.
    pub socket: UnixListener,
    /// The unix socket for reading.
    pub read_only_socket: Option<UnixListener>,
    /// The TCP ports for clients with certificates.
    pub remote: Option<Remote>,
}

/// The API over TLS.
pub struct Remote {
    /// The TCP ports.
    pub listeners: Vec<TcpListener>,
    /// The agent's certificate, and the authorities of its clients.
    pub certificates: Certificates,
}

/// Serves the API until `shutdown` completes, then finishes requests in flight for up to 2 s and removes the socket
/// files. Each entrance has limits of its own.
pub async fn serve<S: Source>(
    entrances: Entrances,
    source: Arc<S>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let mut files = Vec::new();
    let mut servers = Vec::new();
    let sockets = [
        (Some(entrances.socket), Audience::Local),
        (entrances.read_only_socket, Audience::LocalReaders),
    ];
    for (socket, audience) in sockets {
        let Some(socket) = socket else { continue };
        let address = socket.local_addr()?;
        files.extend(address.as_pathname().map(Path::to_path_buf));
        let router = router(source.clone(), audience);
        servers.push(Server::start([socket], &router, LIMITS));
    }
    let mut following = JoinSet::new();
    if let Some(remote) = entrances.remote {
        let door = remote.certificates.door(
            router(source.clone(), Audience::Remote),
            router(source, Audience::RemoteReaders),
        );
        servers.push(Server::start(remote.listeners, &door, LIMITS));
        following.spawn(remote.certificates.follow());
    }
    shutdown.await;
    let ends = servers.into_iter().map(Server::shutdown);
    // Requests that take longer are cut off.
    let _ = tokio::time::timeout(SHUTDOWN_GRACE, join_all(ends)).await;
    files.iter().try_for_each(fs::remove_file)
}

/// The state of the API's handlers.
pub(super) struct Api<S> {
    pub(super) source: S,
    audience: Audience,
    started: Instant,
    feed: Mutex<NodeFeed>,
    /// Limits requests that last as long as probes.
    probes: Slots,
    /// Limits watches of endpoints, which last until the client disconnects.
    pub(super) watches: Slots,
    /// Limits watches of container probes.
    pub(super) container_watches: Slots,
    /// Limits clients that monitor; `None` for the local audience, which only the agent's own limit concerns.
    monitors: Option<Slots>,
}

pub(super) type Shared<S> = State<Arc<Api<Arc<S>>>>;

fn router<S: Source>(source: Arc<S>, audience: Audience) -> Router {
    let is_guest = audience != Audience::Local;
    let api = Api {
        source,
        audience,
        started: Instant::now(),
        feed: Mutex::new(NodeFeed::new(node_feed::random_generation())),
        probes: Slots::new(PROBE_REQUESTS, "requests to probe nodes"),
        watches: Slots::new(WATCHES, "watches of endpoints"),
        container_watches: Slots::new(WATCHES, "watches of container probes"),
        monitors: is_guest.then(|| Slots::new(GUEST_MONITORS, "clients that monitor")),
    };
    let api = Arc::new(api);
    routes::routes(audience)
        .fold(Router::new(), |router, (path, method)| {
            router.route(path, method)
        })
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(middleware::from_fn(refuse_bodies))
        .layer(middleware::from_fn_with_state(
            api.clone(),
            refuse_while_starting,
        ))
        .with_state(api)
}

/// Paths that are served from the start: the state of the agent and of the mesh, and whatever does not depend on them.
/// Other paths would report that something does not exist when it is merely not known yet.
pub(super) const ANSWERED_WHILE_STARTING: [&str; 7] = [
    "/v1beta/healthz",
    "/v1beta/status",
    "/v1beta/status/probe",
    "/v1beta/hello",
    "/v1/agent",
    "/v1/config",
    "/v1/openapi.json",
];

async fn refuse_while_starting<S: Source>(
    State(api): Shared<S>,
    request: Request,
    next: Next,
) -> Response {
    if !ANSWERED_WHILE_STARTING.contains(&request.uri().path())
        && let Some(starting) = api.source.starting()
    {
        let reason = format!("{starting}; try again later");
        return Refusal(StatusCode::SERVICE_UNAVAILABLE, reason).into_response();
    }
    next.run(request).await
}

pub(super) async fn healthz<S: Source>(
    State(api): Shared<S>,
) -> Result<(StatusCode, Answer<HealthzResponse>), Refusal> {
    let cilium = api.source.state();
    let code = match cilium.state.as_str() {
        "Failure" => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::OK,
    };
    let healthz = load_average().and_then(|system_load| {
        let uptime = duration_text(api.source.uptime());
        let healthz = HealthzResponse {
            cilium,
            uptime,
            system_load,
        };
        Ok(serde_json::to_vec(&healthz)?)
    });
    let body = healthz.map_err(|error| {
        Refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot read /proc/loadavg: {error}"),
        )
    })?;
    Ok((code, Answer::of_json(body)))
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

pub(super) async fn status<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<HealthStatus>, Refusal> {
    let body = streamed::body(move |out| api.source.write_status(out)).await;
    Ok(Answer::of_json(body.map_err(cannot_write)?))
}

pub(super) async fn agent<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<AgentReport>, Refusal> {
    answer(move || Ok(api.source.agent())).await
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct ProbeQuery {
    /// Whether to answer at once, with lines: a [`ProbeEvent`] for each node whose results are complete, progress, and
    /// finally the whole report.
    #[serde(default)]
    stream: bool,
}

pub(super) async fn probe<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<ProbeQuery>, QueryRejection>,
) -> Result<AnswerOrLines<HealthStatus, ProbeEvent>, Refusal> {
    let Query(query) = query?;
    let slot = api.probes.take()?;
    Ok(if query.stream {
        AnswerOrLines::Lines(event_lines(api.source.probe_events(), slot))
    } else {
        let status = api.source.probe().await;
        AnswerOrLines::Answer(answer(move || Ok(status)).await?)
    })
}

/// Streams one line of JSON per event. Holds `slot` until the last one.
fn event_lines(
    events: mpsc::Receiver<ProbeEvent>,
    slot: OwnedSemaphorePermit,
) -> Lines<ProbeEvent> {
    Lines::of_stream(stream::try_unfold(
        (events, slot),
        async |(mut events, slot)| {
            let mut batch = Vec::new();
            if events.recv_many(&mut batch, EVENT_BATCH).await == 0 {
                return Ok(None);
            }
            let lines = tokio::task::spawn_blocking(move || Batch::write(&batch)).await??;
            Ok(Some((lines, (events, slot))))
        },
    ))
}

pub(super) async fn hello() {}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct FeedQuery {
    /// The client id in the last response; 0 in the first request. Without it, all nodes are returned each time.
    client_id: Option<i64>,
    /// The generation in the last response that arrived, so that the client misses nothing if a response is lost.
    /// Without it, every response is assumed to have arrived.
    generation: Option<u64>,
}

pub(super) async fn cluster_nodes<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<FeedQuery>, QueryRejection>,
) -> Result<Answer<ClusterNodeStatus>, Refusal> {
    let Query(FeedQuery {
        client_id,
        generation,
    }) = query?;
    answer(move || {
        let mut feed = api.feed.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock, so that the feed never returns to an older set.
        feed.update(&api.source.nodes());
        let now = api.started.elapsed();
        let diff = feed.read(client_id, generation, now, node_feed::random_client_id);
        Ok(ClusterNodeStatus {
            own_name: api.source.settings().node.full_name(),
            ..diff
        })
    })
    .await
}

pub(super) async fn nodes<S: Source>(State(api): Shared<S>) -> Result<Answer<NodeList>, Refusal> {
    answer(move || Ok(api.source.nodes())).await
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct NodeQuery {
    /// Only this node, `cluster/node`.
    node: Option<String>,
}

pub(super) async fn path_mtus<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<NodeQuery>, QueryRejection>,
) -> Result<Answer<Vec<PathMtuEntry>>, Refusal> {
    let Query(NodeQuery { node }) = query?;
    answer(move || {
        let paths = api.source.path_mtus(node.as_deref());
        of_known_node(&*api.source, node, paths)
    })
    .await
}

pub(super) async fn probe_path_mtus<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<NodeQuery>, QueryRejection>,
) -> Result<Answer<Vec<PathMtuEntry>>, Refusal> {
    let Query(NodeQuery { node }) = query?;
    let _slot = api.probes.take()?;
    let paths = api.source.probe_path_mtus(node.as_deref()).await;
    answer(move || of_known_node(&*api.source, node, paths)).await
}

pub(super) async fn history<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<NodeQuery>, QueryRejection>,
) -> Result<Answer<Vec<TargetHistory>>, Refusal> {
    let Query(NodeQuery { node }) = query?;
    answer(move || {
        let history = api.source.history(node.as_deref());
        of_known_node(&*api.source, node, history)
    })
    .await
}

pub(super) async fn rtt<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<Vec<RttEntry<'static>>>, Refusal> {
    let body = streamed::body(move |out| super::rtt::write_all(&*api.source, out)).await;
    let cannot_read = |error| {
        Refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("cannot read the round-trip times: {error}"),
        )
    };
    Ok(Answer::of_json(body.map_err(cannot_read)?))
}

pub(super) async fn monitor<S: Source>(
    State(api): Shared<S>,
    Extension(client): Extension<Client>,
    query: Result<Query<EventFilter>, QueryRejection>,
) -> Result<Lines<MonitorLine>, Refusal> {
    let Query(filter) = query?;
    let slot = api.monitors.as_ref().map(Slots::take).transpose()?;
    let unavailable = |reason: String| Refusal(StatusCode::SERVICE_UNAVAILABLE, reason);
    let subscription = api.source.monitor(filter).ok_or_else(|| {
        unavailable("the agent has not loaded its programs yet; try again later".to_owned())
    })?;
    let subscription = subscription.map_err(|error| unavailable(error.to_string()))?;
    client.stay();
    Ok(Lines::of_stream(stream::try_unfold(
        (subscription, slot),
        async |(mut subscription, slot)| {
            let lines = subscription.next(EVENT_BATCH).await;
            if lines.is_empty() {
                return Ok(None);
            }
            Ok(Some((Batch::write(&lines)?, (subscription, slot))))
        },
    )))
}

/// Returns `reported` for a known node or for all nodes; refuses if the node does not exist.
fn of_known_node<T>(
    source: &impl Source,
    node: Option<String>,
    reported: Vec<T>,
) -> Result<Vec<T>, Refusal> {
    match node {
        Some(node) if reported.is_empty() && !is_known(&source.nodes(), &node) => Err(Refusal(
            StatusCode::NOT_FOUND,
            format!("no node '{node}'; `health-agent node list` lists the existing ones"),
        )),
        _ => Ok(reported),
    }
}

fn is_known(nodes: &NodeList, name: &str) -> bool {
    nodes.nodes.iter().any(|node| node.name == name)
}

pub(super) async fn identities<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<Vec<IdentityEntry>>, Refusal> {
    answer(move || Ok(api.source.identities())).await
}

pub(super) async fn identity<S: Source>(
    State(api): Shared<S>,
    PathId(Identity(number)): PathId<Identity>,
) -> Result<Answer<IdentityEntry>, Refusal> {
    answer(move || {
        let identities = api.source.identities();
        let found = identities.into_iter().find(|one| one.id == number);
        found.ok_or_else(|| {
            Refusal(
                StatusCode::NOT_FOUND,
                format!(
                    "no identity {number}; `health-agent identity list` lists the existing ones"
                ),
            )
        })
    })
    .await
}

pub(super) async fn config<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<SettingList>, Refusal> {
    answer(move || {
        Ok(SettingList {
            settings: api.source.settings().values.to_vec(),
        })
    })
    .await
}

pub(super) async fn openapi() -> Answer<Map<String, Value>> {
    Answer::of_json(OPENAPI)
}

/// Serves the paths of operations that the audience may not use.
pub(super) async fn refuse_change<S: Source>(State(api): Shared<S>, request: Request) -> Refusal {
    let operation = format!("{} {}", request.method(), request.uri().path());
    api.audience.refusal(&operation)
}

async fn refuse_bodies(request: Request, next: Next) -> Response {
    // Unknown paths match none.
    let path = request.extensions().get::<MatchedPath>();
    let takes_body = path.is_some_and(|path| routes::takes_body(request.method(), path.as_str()));
    if has_body(&request) && !takes_body {
        let (method, path) = (request.method(), request.uri().path());
        return Refusal(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("{method} {path} does not accept a body"),
        )
        .into_response();
    }
    next.run(request).await
}

async fn no_such_path(request: Request) -> Refusal {
    Refusal(
        StatusCode::NOT_FOUND,
        format!(
            "no such path: {}; see /v1/openapi.json for all paths",
            request.uri().path()
        ),
    )
}

async fn no_such_method(request: Request) -> Refusal {
    Refusal(
        StatusCode::METHOD_NOT_ALLOWED,
        format!(
            "{} is not allowed for {}; see /v1/openapi.json for its methods",
            request.method(),
            request.uri().path()
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::socket::bind;
    use crate::source::testing::Unasked;

    fn only(socket: UnixListener) -> Entrances {
        Entrances {
            socket,
            read_only_socket: None,
            remote: None,
        }
    }

    /// Covers every operation in the document, except those on the agent's own state: reading anything else from the
    /// source would panic.
    #[tokio::test]
    async fn no_path_says_that_there_is_nothing_while_the_agent_starts() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = bind(&path, None).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let served = tokio::spawn(serve(only(listener), Arc::new(Unasked), async {
            let _ = stopped.await;
        }));
        let mut refused = 0;
        for (asked, operations) in document["paths"].as_object().unwrap() {
            if ANSWERED_WHILE_STARTING.contains(&asked.as_str()) {
                continue;
            }
            let methods = operations.as_object().unwrap().keys();
            for method in methods.filter(|key| *key != "parameters") {
                let method = method.to_uppercase();
                let uri = asked.replace("{id}", "1017");
                let request = format!("{method} {uri} HTTP/1.1\r\nHost: a\r\n\r\n");
                let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
                stream.write_all(request.as_bytes()).await.unwrap();
                let mut answered = String::new();
                stream.read_to_string(&mut answered).await.unwrap();
                assert!(
                    answered.starts_with("HTTP/1.1 503 "),
                    "{method} {uri}: {answered}"
                );
                assert!(
                    answered.contains("waiting for node default/a"),
                    "{answered}"
                );
                refused += 1;
            }
        }
        assert!(refused > 30 - ANSWERED_WHILE_STARTING.len(), "{refused}");
        let known: BTreeSet<_> = routes::routes::<Unasked>(Audience::Local)
            .map(|(path, _)| path)
            .collect();
        assert!(
            ANSWERED_WHILE_STARTING
                .iter()
                .all(|path| known.contains(path))
        );
        stop.send(()).unwrap();
        served.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn the_socket_goes_when_serving_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = bind(&path, None).unwrap();
        serve(only(listener), Arc::new(Unasked), async {})
            .await
            .unwrap();
        assert!(!path.exists());
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_request_does_not_hold_up_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = bind(&path, None).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"GET /v1beta/sta").unwrap();
        let shutdown = tokio::time::sleep(Duration::from_secs(1));
        let begun = tokio::time::Instant::now();
        serve(only(listener), Arc::new(Unasked), shutdown)
            .await
            .unwrap();
        assert!(begun.elapsed() <= Duration::from_secs(4));
        assert!(!path.exists());
    }
}
