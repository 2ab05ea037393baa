//! The paths under `/v1/endpoints`.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::StatusCode;
use futures_util::stream;
use health_endpoint::enforcement::Enforcer;
use health_endpoint::error::{EndpointError, ErrorKind};
use health_endpoint::health::ENDPOINT_IDS;
use health_endpoint::log::LogEntry;
use health_endpoint::manager::{Manager, NewEndpoint, Selector};
use health_model::address::parse_ip;
use health_model::api::{
    AgentState, Deleted, Endpoint, EndpointEvent, EndpointHealth, EndpointRequest,
    EndpointSettingsChange, LabelChange, PodName, TakenAddress,
};
use health_model::labels::pod::PORT;
use health_model::labels::{LABELS_MAX, Label, LabelError, LabelSet};
use serde::{Deserialize, Serialize, Serializer};
use tokio::sync::watch;

use super::answer::{Answer, AnswerOrLines, Batch, Lines, Refusal, answer, bad};
use super::body::JsonBody;
use super::pacing::Client;
use super::path_id::PathId;
use super::server::Shared;
use super::source::Source;

/// How long the creation of an endpoint waits for the policies of the Kubernetes cluster.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum length of names and container ids in bytes.
const MAX_NAME: usize = 253;
/// Maximum length of an interface name in bytes (`IFNAMSIZ` minus the terminating zero).
const MAX_IFNAME: usize = 15;
/// Maximum length of a path in bytes (`PATH_MAX` minus the terminating zero).
const MAX_PATH: usize = 4095;

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Whether to answer with lines: an [`EndpointEvent`] for each endpoint, then one for each change, until the client
    /// disconnects or the agent stops.
    #[serde(default)]
    watch: bool,
}

/// The id of an endpoint.
pub(super) struct EndpointId(u16);

impl FromStr for EndpointId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().filter(|id| ENDPOINT_IDS.contains(id));
        number.map(Self).ok_or_else(|| {
            format!("invalid endpoint id '{text}'; expected a number from 1 to 4095")
        })
    }
}

pub(super) async fn list<S: Source>(
    State(api): Shared<S>,
    Extension(client): Extension<Client>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<AnswerOrLines<Listing, EndpointEvent>, Refusal> {
    let Query(ListQuery { watch }) = query?;
    if !watch {
        let listing = answer(move || Ok(Listing(api.source.endpoints()))).await?;
        return Ok(AnswerOrLines::Answer(listing));
    }
    let changes = manager(&*api.source)?.changes();
    let slot = api.watches.take()?;
    client.stay();
    let view = ClientView::default();
    let state = (api, changes, view, true, slot);
    let lines = Lines::of_stream(stream::try_unfold(
        state,
        async |(api, mut changes, mut view, is_first, slot)| {
            let events = match is_first {
                true => view.first(&api.source.endpoints()),
                false => next(&*api.source, &mut changes, &mut view).await,
            };
            if events.is_empty() {
                return Ok::<_, io::Error>(None);
            }
            let state = (api, changes, view, false, slot);
            Ok(Some((Batch::write(&events)?, state)))
        },
    ));
    Ok(AnswerOrLines::Lines(lines))
}

/// All endpoints.
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(inline))]
pub(super) struct Listing(Vec<Arc<Endpoint>>);

impl Serialize for Listing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(Arc::as_ref))
    }
}

/// Waits for changes and returns them; empty when the agent stops.
async fn next<S: Source>(
    source: &S,
    changes: &mut watch::Receiver<u64>,
    view: &mut ClientView,
) -> Vec<EndpointEvent> {
    while changes.changed().await.is_ok() {
        let events = view.since(&source.endpoints());
        if !events.is_empty() {
            return events;
        }
    }
    Vec::new()
}

/// The endpoints as last sent to a client.
#[derive(Default)]
struct ClientView(BTreeMap<u16, Arc<Endpoint>>);

impl ClientView {
    fn first(&mut self, endpoints: &[Arc<Endpoint>]) -> Vec<EndpointEvent> {
        let mut events = self.since(endpoints);
        events.push(EndpointEvent::Listed);
        events
    }

    fn since(&mut self, endpoints: &[Arc<Endpoint>]) -> Vec<EndpointEvent> {
        let now: BTreeMap<_, _> = endpoints.iter().map(|one| (one.id, one.clone())).collect();
        let gone = self.0.keys().filter(|id| !now.contains_key(id));
        let gone = gone.map(|id| EndpointEvent::Deleted { id: *id });
        let is_reported = |one: &Endpoint| {
            self.0
                .get(&one.id)
                .is_some_and(|reported| **reported == *one)
        };
        let changed = now.values().filter(|one| !is_reported(one));
        let changed = changed.map(|one| EndpointEvent::Updated {
            endpoint: Box::new(Endpoint::clone(one)),
        });
        let events = gone.chain(changed).collect();
        self.0 = now;
        events
    }
}

pub(super) async fn create<S: Source>(
    State(api): Shared<S>,
    JsonBody(request): JsonBody<EndpointRequest>,
) -> Result<Answer<Endpoint>, Refusal> {
    let new = new_endpoint(request)?;
    if let Some(enforcer) = api.source.enforcer() {
        let known = enforcer.until_policies_known(PATIENCE).await;
        let unavailable = |reason| {
            Refusal(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{reason}; try again later"),
            )
        };
        known.map_err(unavailable)?;
    }
    let made = manager(&*api.source)?.create(new).await?;
    answer(move || Ok(Arc::unwrap_or_clone(made))).await
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct EndpointSelection {
    /// The container. Either this or `netns`.
    #[cfg_attr(test, schemars(example = "3f2a"))]
    container_id: Option<String>,
    /// Path of the network namespace file, as given when the endpoint was created.
    netns: Option<PathBuf>,
}

pub(super) async fn delete_meant<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<EndpointSelection>, QueryRejection>,
) -> Result<Answer<Deleted>, Refusal> {
    let Query(meant) = query?;
    let selector = match (meant.container_id, meant.netns) {
        (Some(id), None) => Selector::Container(id),
        (None, Some(path)) => Selector::Netns(path),
        _ => {
            return Err(bad(
                "expected either container-id=ID or netns=PATH".to_owned()
            ));
        }
    };
    delete(&*api.source, &selector).await
}

pub(super) async fn delete_one<S: Source>(
    State(api): Shared<S>,
    PathId(EndpointId(id)): PathId<EndpointId>,
) -> Result<Answer<Deleted>, Refusal> {
    delete(&*api.source, &Selector::Id(id)).await
}

async fn delete<S: Source>(source: &S, selector: &Selector) -> Result<Answer<Deleted>, Refusal> {
    let deleted = manager(source)?.delete(selector).await?;
    answer(move || Ok(Deleted { deleted })).await
}

pub(super) async fn get<S: Source>(
    State(api): Shared<S>,
    PathId(EndpointId(id)): PathId<EndpointId>,
) -> Result<Answer<Endpoint>, Refusal> {
    answer(move || found(&*api.source, id).map(Arc::unwrap_or_clone)).await
}

pub(super) async fn log<S: Source>(
    State(api): Shared<S>,
    PathId(id): PathId<EndpointId>,
) -> Result<Answer<Vec<LogEntry>>, Refusal> {
    of_endpoint(&*api.source, id, Manager::log).await
}

pub(super) async fn health<S: Source>(
    State(api): Shared<S>,
    PathId(id): PathId<EndpointId>,
) -> Result<Answer<EndpointHealth>, Refusal> {
    of_endpoint(&*api.source, id, Manager::health).await
}

/// Reads something about an endpoint from the manager.
async fn of_endpoint<S: Source, T: Serialize + 'static>(
    source: &S,
    EndpointId(id): EndpointId,
    read: fn(&Manager, u16) -> Option<T>,
) -> Result<Answer<T>, Refusal> {
    let manager = manager(source)?.clone();
    answer(move || read(&manager, id).ok_or_else(|| EndpointError::NotFound(id).into())).await
}

pub(super) async fn change_labels<S: Source>(
    State(api): Shared<S>,
    PathId(EndpointId(id)): PathId<EndpointId>,
    JsonBody(LabelChange { add, remove }): JsonBody<LabelChange>,
) -> Result<Answer<Endpoint>, Refusal> {
    let (add, remove) = (labels("add", &add)?, labels("remove", &remove)?);
    let manager = manager(&*api.source)?;
    let changed = manager.change_labels(id, add, remove).await?;
    answer(move || Ok(Arc::unwrap_or_clone(changed))).await
}

pub(super) async fn change_settings<S: Source>(
    State(api): Shared<S>,
    PathId(EndpointId(id)): PathId<EndpointId>,
    JsonBody(change): JsonBody<EndpointSettingsChange>,
) -> Result<Answer<Endpoint>, Refusal> {
    let changed = manager(&*api.source)?.change_settings(id, change).await?;
    answer(move || Ok(Arc::unwrap_or_clone(changed))).await
}

/// Answers like [`create`] would for a valid request, as far as it does not depend on free addresses.
pub(super) async fn readiness<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<AgentState>, Refusal> {
    let manager = manager(&*api.source)?;
    let unknown = api.source.enforcer().and_then(Enforcer::unknown_policies);
    if let Some(reason) = unknown {
        return Err(Refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{reason}; try again later"),
        ));
    }
    manager.taken_addresses()?;
    answer(|| {
        Ok(AgentState {
            state: "Ok".to_owned(),
            msg: String::new(),
        })
    })
    .await
}

pub(super) async fn ipam<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<Vec<TakenAddress>>, Refusal> {
    let manager = manager(&*api.source)?.clone();
    answer(move || Ok(manager.taken_addresses()?)).await
}

fn manager<S: Source>(source: &S) -> Result<&Manager, Refusal> {
    source.manager().ok_or_else(|| {
        Refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "the agent has not taken over its endpoints yet; try again later".to_owned(),
        )
    })
}

fn found<S: Source>(source: &S, id: u16) -> Result<Arc<Endpoint>, Refusal> {
    let found = source.endpoints().into_iter().find(|one| one.id == id);
    found.ok_or_else(|| EndpointError::NotFound(id).into())
}

impl From<EndpointError> for Refusal {
    fn from(error: EndpointError) -> Self {
        let code = match error.kind() {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(code, error.to_string())
    }
}

fn new_endpoint(request: EndpointRequest) -> Result<NewEndpoint, Refusal> {
    let labels = labels("labels", &request.labels)?;
    Ok(NewEndpoint {
        netns: netns(&request.netns)?,
        labels: LabelSet::new(labels).map_err(|error| of_field("labels", &error))?,
        name: request.name.map(|text| name("name", text)).transpose()?,
        container_id: request
            .container_id
            .map(|text| name("container-id", text))
            .transpose()?,
        pod: request.pod.map(pod).transpose()?,
        network: request
            .network
            .map(|text| name("network", text))
            .transpose()?,
        ifname: request.ifname.map(ifname).transpose()?,
        default_route: request.default_route,
        ipv4: address("ipv4", request.ipv4, |ip| match ip {
            IpAddr::V4(v4) => Some(v4),
            IpAddr::V6(_) => None,
        })?,
        ipv6: address("ipv6", request.ipv6, |ip| match ip {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => Some(v6),
        })?,
    })
}

fn of_field(field: &str, error: &LabelError) -> Refusal {
    bad(format!("{field}: {error}"))
}

fn labels(field: &str, texts: &[String]) -> Result<Vec<Label>, Refusal> {
    if texts.len() > LABELS_MAX {
        return Err(of_field(field, &LabelError::TooMany(texts.len())));
    }
    let parse = |(index, text): (usize, &String)| {
        let at = format!("{field}[{index}]");
        let label = Label::from_str(text).map_err(|error| of_field(&at, &error))?;
        if !label.is_for_endpoints() || label.source() == PORT {
            let why = "endpoints cannot have labels from this source";
            return Err(bad(format!("{at}: {label}: {why}")));
        }
        Ok(label)
    };
    texts.iter().enumerate().map(parse).collect()
}

fn netns(text: &str) -> Result<PathBuf, Refusal> {
    let path = Path::new(text);
    if !path.is_absolute() || text.len() > MAX_PATH || text.contains('\0') {
        return Err(bad(format!(
            "netns: {:?} is not an absolute path such as /run/netns/NAME",
            text.chars().take(64).collect::<String>()
        )));
    }
    Ok(path.to_owned())
}

fn name(field: &str, text: String) -> Result<String, Refusal> {
    if (1..=MAX_NAME).contains(&text.len()) && !text.chars().any(char::is_control) {
        return Ok(text);
    }
    Err(bad(format!(
        "{field}: must have 1 to {MAX_NAME} bytes and no control characters"
    )))
}

fn pod(pod: PodName) -> Result<PodName, Refusal> {
    Ok(PodName {
        namespace: name("pod.namespace", pod.namespace)?,
        name: name("pod.name", pod.name)?,
        uid: pod.uid.map(|uid| name("pod.uid", uid)).transpose()?,
    })
}

/// Accepts names that the kernel accepts for devices (net/core/dev.c, `dev_valid_name`), except names of sysctl
/// folders.
fn ifname(text: String) -> Result<String, Refusal> {
    let is_usable = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | ':' | '%');
    let is_path = matches!(text.as_str(), "." | ".." | "all" | "default");
    if (1..=MAX_IFNAME).contains(&text.len()) && text.chars().all(is_usable) && !is_path {
        return Ok(text);
    }
    Err(bad(format!(
        "ifname: must have 1 to {MAX_IFNAME} visible characters other than / : and %"
    )))
}

/// Parses the address in a field; `of` converts it if it has the right IP version.
fn address<T>(
    field: &str,
    text: Option<String>,
    of: impl Fn(IpAddr) -> Option<T>,
) -> Result<Option<T>, Refusal> {
    let parse = |text: String| {
        let parsed = parse_ip(&text).ok().and_then(of);
        parsed.ok_or_else(|| {
            bad(format!(
                "{field}: {text:?} is not an address of this IP version"
            ))
        })
    };
    text.map(parse).transpose()
}
