//! The server side of the API's conventions: paths, parameters, status codes and watch streams.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Extension, Path, Query, Request, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{self, get, post};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::store::{Gone, Selector};
use super::{Behaviour, Kind, Refusal, Shared};

/// Receives changes of the server's behaviour from the arrival of a request on.
type Behaviours = tokio::sync::watch::Receiver<Behaviour>;

/// Query parameters of lists and watches.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Parameters {
    label_selector: String,
    field_selector: String,
    limit: Option<usize>,
    #[serde(rename = "continue")]
    token: Option<String>,
    watch: Option<String>,
    resource_version: Option<u64>,
    allow_watch_bookmarks: Option<bool>,
    timeout_seconds: Option<u64>,
}

pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>) -> std::io::Result<()> {
    let events = Router::new()
        .route("/api/v1/namespaces/{namespace}/events", post(create_event))
        .route(
            "/api/v1/namespaces/{namespace}/events/{name}",
            routing::patch(patch_event),
        );
    let objects = Kind::ALL.into_iter().fold(events, |objects, kind| {
        let of_kind = match kind.is_written() {
            true => Router::new()
                .route(&kind.path(), get(list).post(create))
                .route(
                    &format!("{}/{{name}}", kind.path()),
                    get(read).patch(patch).delete(delete),
                )
                .route(
                    &format!("{}/{{name}}/status", kind.path()),
                    routing::patch(patch),
                ),
            false => Router::new().route(&kind.path(), get(list)),
        };
        objects.merge(of_kind.layer(Extension(kind)))
    });
    let objects = objects.layer(middleware::from_fn_with_state(shared.clone(), misbehave));
    let discovery = Router::new()
        .route(
            "/api",
            get(|| document(json!({ "kind": "APIVersions", "versions": ["v1"] }))),
        )
        .route(
            "/apis",
            get(|| document(json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": [] }))),
        )
        .route("/api/v1", get(|| document(resources())))
        .route(
            "/version",
            get(|| document(json!({ "major": "1", "minor": "33", "gitVersion": "v1.33.0" }))),
        );
    let app = objects.merge(discovery).with_state(shared);
    axum::serve(listener, app).await
}

fn resources() -> Value {
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1",
        "resources": [{
            "name": "nodes", "singularName": "node", "namespaced": false, "kind": "Node",
            "shortNames": ["no"],
            "verbs": ["create", "delete", "get", "list", "patch", "watch"],
        }, {
            "name": "pods", "singularName": "pod", "namespaced": true, "kind": "Pod",
            "shortNames": ["po"], "verbs": ["list", "watch"],
        }],
    })
}

async fn document(document: Value) -> Response {
    answer(StatusCode::OK, &document)
}

fn answer(code: StatusCode, body: &Value) -> Response {
    (code, [(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// An error as the API reports it, a `Status` object.
fn status(code: StatusCode, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "message": message, "reason": reason, "code": code.as_u16(),
    })
}

fn failure(code: StatusCode, reason: &str, message: &str) -> Response {
    answer(code, &status(code, reason, message))
}

fn not_found(kind: Kind, name: &str) -> Response {
    failure(
        StatusCode::NOT_FOUND,
        "NotFound",
        &format!("{} \"{name}\" not found", kind.plural()),
    )
}

/// The response if the server does not have the kind.
fn unknown_kind() -> Response {
    let message = "the server could not find the requested resource";
    failure(StatusCode::NOT_FOUND, "NotFound", message)
}

/// The response if the object has another version than the request asks for in `version`.
fn other_version(object: &Value, version: &Value) -> Option<Response> {
    let differs = |key: &str| {
        let wanted = &version[key];
        !wanted.is_null() && *wanted != object["metadata"][key]
    };
    (differs("uid") || differs("resourceVersion")).then(|| {
        let message = "the object has been modified";
        failure(StatusCode::CONFLICT, "Conflict", message)
    })
}

/// Records the request and handles it according to the current behaviour.
async fn misbehave(
    State(shared): State<Arc<Shared>>,
    mut request: Request,
    next: Next,
) -> Response {
    let uri = request.uri().clone();
    shared
        .requests()
        .push(format!("{} {uri}", request.method()));
    let mut behaviours = shared.behaviour.subscribe();
    let behaviour = behaviours.borrow_and_update().clone();
    // Subscribed here, so that a watch misses no change from now on.
    request.extensions_mut().insert(behaviours);
    let (request, refused) = refuse(&shared, request).await;
    if let Some(refused) = refused {
        return refused;
    }
    match behaviour {
        Behaviour::Serve | Behaviour::RubbishInWatches | Behaviour::LostStore => {
            next.run(request).await
        }
        Behaviour::Unauthorized => {
            failure(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized")
        }
        Behaviour::NotFound => {
            let message = "the server could not find the requested resource";
            failure(StatusCode::NOT_FOUND, "NotFound", message)
        }
        Behaviour::Forbidden => failure(StatusCode::FORBIDDEN, "Forbidden", &{
            let asked = |kind: &Kind| uri.path().ends_with(&format!("/{}", kind.plural()));
            let kind = Kind::ALL.into_iter().find(asked).unwrap_or(Kind::Node);
            let kind = kind.plural();
            format!("{kind} is forbidden: User \"test\" cannot list resource \"{kind}\"")
        }),
        Behaviour::Rubbish(text) => text.into_response(),
        Behaviour::BadGateway => (
            StatusCode::BAD_GATEWAY,
            "<html>\n<body>502 Bad Gateway</body>\n</html>",
        )
            .into_response(),
        Behaviour::Reset => broken_off("{\"kind\":\"NodeList\",\"items\":["),
        Behaviour::Hang => std::future::pending().await,
    }
}

/// The answer to a request that is to be refused.
async fn refuse(shared: &Shared, request: Request) -> (Request, Option<Response>) {
    let refusals = shared.refusals().clone();
    if refusals.is_empty() {
        return (request, None);
    }
    let (head, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&body);
    let is_refused = |refusal: &&Refusal| {
        refusal.method == head.method.as_str()
            && head.uri.path().starts_with(&refusal.kind.path())
            && text.contains(&refusal.text)
    };
    let refusal = refusals.iter().find(is_refused);
    let answer = refusal.map(|refusal| {
        let code = StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::FORBIDDEN);
        let mut refused = status(code, "Refused", "refused by the test");
        if code == StatusCode::TOO_MANY_REQUESTS {
            refused["details"] = json!({ "retryAfterSeconds": 1 });
        }
        answer(code, &refused)
    });
    (Request::from_parts(head, body.into()), answer)
}

/// A response that starts with this text and then breaks off.
fn broken_off(text: &'static str) -> Response {
    let (sender, body) = channel_body();
    // The channel has capacity for both.
    let _ = sender.try_send(Ok(Bytes::from_static(text.as_bytes())));
    let _ = sender.try_send(Err(std::io::ErrorKind::ConnectionReset.into()));
    Response::new(body)
}

type Piece = Result<Bytes, std::io::Error>;

fn channel_body() -> (mpsc::Sender<Piece>, Body) {
    let (sender, receiver) = mpsc::channel(16);
    let pieces = futures_util::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|piece| (piece, receiver))
    });
    (sender, Body::from_stream(pieces))
}

async fn list(
    State(shared): State<Arc<Shared>>,
    Extension(kind): Extension<Kind>,
    Extension(behaviours): Extension<Behaviours>,
    Query(parameters): Query<Parameters>,
) -> Response {
    if !shared.has(kind) {
        return unknown_kind();
    }
    let selector = Selector::parse(&parameters.label_selector, &parameters.field_selector);
    let name = format!("{}List", kind.name());
    if matches!(parameters.watch.as_deref(), Some("true" | "1")) {
        return watch(shared, kind, parameters, selector, behaviours);
    }
    if *shared.behaviour.borrow() == Behaviour::LostStore {
        return answer(
            StatusCode::OK,
            &json!({
                "kind": name, "apiVersion": kind.version(),
                "metadata": { "resourceVersion": "1" }, "items": [],
            }),
        );
    }
    let mut store = shared.store(kind);
    let limit = parameters.limit.filter(|limit| *limit > 0);
    let page = match parameters
        .token
        .as_deref()
        .filter(|token| !token.is_empty())
    {
        Some(token) => store.continue_list(token, limit),
        None => Ok(store.list(&selector, limit)),
    };
    match page {
        Ok(page) => answer(
            StatusCode::OK,
            &json!({
                "kind": name, "apiVersion": kind.version(),
                "metadata": { "resourceVersion": page.revision.to_string(), "continue": page.token },
                "items": page.objects,
            }),
        ),
        Err(Gone) => failure(StatusCode::GONE, "Expired", "the continue token is too old"),
    }
}

fn watch(
    shared: Arc<Shared>,
    kind: Kind,
    parameters: Parameters,
    selector: Selector,
    behaviours: Behaviours,
) -> Response {
    if *shared.behaviour.borrow() == Behaviour::RubbishInWatches {
        return broken_off("{\"type\":\"ADDED\",\"object\":7}\n{\"type\":");
    }
    let (sender, body) = channel_body();
    tokio::spawn(async move {
        // An error means that the client has gone.
        let _ = feed(&shared, kind, &parameters, &selector, behaviours, &sender).await;
    });
    Response::new(body)
}

/// Sends events until the watch times out as requested or the behaviour changes.
async fn feed(
    shared: &Shared,
    kind: Kind,
    parameters: &Parameters,
    selector: &Selector,
    mut behaviours: Behaviours,
    sender: &mpsc::Sender<Piece>,
) -> Result<(), mpsc::error::SendError<Piece>> {
    let line = |event: &Value| Ok(Bytes::from(format!("{event}\n")));
    let lifetime = Duration::from_secs(parameters.timeout_seconds.unwrap_or(3600));
    let end = Instant::now() + lifetime;
    let mut revisions = shared.revision.subscribe();
    let mut bookmarks = shared.bookmarks.subscribe();
    let present = shared.store(kind).revision();
    let mut sent = parameters.resource_version.unwrap_or(present);
    loop {
        let (events, revision) = {
            let store = shared.store(kind);
            (store.events(sent, selector), store.revision())
        };
        let Ok(events) = events else {
            let gone = status(StatusCode::GONE, "Expired", "too old resource version");
            return sender
                .send(line(&json!({ "type": "ERROR", "object": gone })))
                .await;
        };
        for event in &events {
            sender.send(line(event)).await?;
        }
        // As the real server, silent until its revision has passed one from its future.
        sent = sent.max(revision);
        tokio::select! {
            biased;
            // A watch that has ended sends nothing of what happened later.
            _ = behaviours.changed() => {
                let reset = std::io::ErrorKind::ConnectionReset.into();
                return sender.send(Err(reset)).await;
            }
            _ = revisions.changed() => {}
            _ = bookmarks.changed() => {
                if parameters.allow_watch_bookmarks == Some(true) {
                    let bookmark = json!({
                        "type": "BOOKMARK",
                        "object": {
                            "kind": kind.name(), "apiVersion": kind.version(),
                            "metadata": { "resourceVersion": sent.to_string() },
                        },
                    });
                    sender.send(line(&bookmark)).await?;
                }
            }
            () = sender.closed() => return Ok(()),
            () = tokio::time::sleep_until(end) => return Ok(()),
        }
    }
}

async fn read(
    State(shared): State<Arc<Shared>>,
    Extension(kind): Extension<Kind>,
    Path(name): Path<String>,
) -> Response {
    match shared.store(kind).get(&name) {
        Some(object) => answer(StatusCode::OK, object),
        None => not_found(kind, &name),
    }
}

async fn create(
    State(shared): State<Arc<Shared>>,
    Extension(kind): Extension<Kind>,
    body: Bytes,
) -> Response {
    if !shared.has(kind) {
        return unknown_kind();
    }
    let Ok(mut object) = serde_json::from_slice::<Value>(&body) else {
        return failure(
            StatusCode::BAD_REQUEST,
            "BadRequest",
            "the body is not JSON",
        );
    };
    let mut store = shared.store(kind);
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let name = name.to_owned();
    if store.get(&name).is_some() {
        let message = format!("{} \"{name}\" already exists", kind.plural());
        return failure(StatusCode::CONFLICT, "AlreadyExists", &message);
    }
    object["metadata"]["uid"] = format!("{}-{}", kind.plural(), store.revision()).into();
    let revision = store.put(object);
    let created = store.get(&name).cloned().unwrap_or_default();
    drop(store);
    shared.revision.send_replace(revision);
    answer(StatusCode::CREATED, &created)
}

async fn create_event(
    State(shared): State<Arc<Shared>>,
    Path(namespace): Path<String>,
    body: Bytes,
) -> Response {
    let Ok(mut event) = serde_json::from_slice::<Value>(&body) else {
        let message = "the body is not JSON";
        return failure(StatusCode::BAD_REQUEST, "BadRequest", message);
    };
    let name = event["metadata"]["name"].as_str().unwrap_or_default();
    let key = format!("{namespace}/{name}");
    if shared.store(Kind::Event).get(&key).is_some() {
        let message = format!("events \"{name}\" already exists");
        return failure(StatusCode::CONFLICT, "AlreadyExists", &message);
    }
    event["metadata"]["namespace"] = namespace.into();
    shared.store(Kind::Event).put(event.clone());
    answer(StatusCode::CREATED, &event)
}

async fn patch_event(
    State(shared): State<Arc<Shared>>,
    Path((namespace, name)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let patch: Value = serde_json::from_slice(&body).unwrap_or_default();
    let key = format!("{namespace}/{name}");
    match shared.store(Kind::Event).patch(&key, &patch, false) {
        Some(event) => answer(StatusCode::OK, &event),
        None => not_found(Kind::Event, &name),
    }
}

async fn delete(
    State(shared): State<Arc<Shared>>,
    Extension(kind): Extension<Kind>,
    Path(name): Path<String>,
    body: Bytes,
) -> Response {
    let options: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut store = shared.store(kind);
    let Some(object) = store.get(&name) else {
        return not_found(kind, &name);
    };
    if let Some(refusal) = other_version(object, &options["preconditions"]) {
        return refusal;
    }
    let revision = store.delete(&name);
    drop(store);
    shared.revision.send_replace(revision);
    let done = json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" });
    answer(StatusCode::OK, &done)
}

/// Handles merge patches, and strategic merge patches whose only list is that of conditions.
async fn patch(
    State(shared): State<Arc<Shared>>,
    Extension(kind): Extension<Kind>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let header = |name| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    };
    let format = header(CONTENT_TYPE);
    if ![
        "application/merge-patch+json",
        "application/strategic-merge-patch+json",
    ]
    .contains(&format)
    {
        return failure(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "UnsupportedMediaType",
            format,
        );
    }
    let Ok(patch) = serde_json::from_slice::<Value>(&body) else {
        return failure(
            StatusCode::BAD_REQUEST,
            "BadRequest",
            "the body is not JSON",
        );
    };
    let (object, revision) = {
        let mut store = shared.store(kind);
        let Some(object) = store.get(&name) else {
            return not_found(kind, &name);
        };
        if let Some(refusal) = other_version(object, &patch["metadata"]) {
            return refusal;
        }
        (
            store
                .patch(&name, &patch, format.contains("strategic"))
                .unwrap_or_default(),
            store.revision(),
        )
    };
    shared.revision.send_replace(revision);
    if header(ACCEPT).contains("as=PartialObjectMetadata") {
        let partial = json!({
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
            "metadata": object["metadata"],
        });
        return answer(StatusCode::OK, &partial);
    }
    answer(StatusCode::OK, &object)
}
