//! The paths under `/v1/policies`.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, Query, Request, State};
use axum::http::StatusCode;
use health_endpoint::enforcement::{EnforceError, Enforcer};
use health_endpoint::lifecycle::State as EndpointState;
use health_model::api::{
    Endpoint, PolicyChange, PolicyDocument, PolicyList, PolicyModeChange, PolicyModeStatus,
    RefusedPolicy, TraceEndRequest, TraceQuery,
};
use health_model::identity::Identity;
use health_model::labels::{Label, LabelSet};
use health_model::policy::PolicyMode;
use health_policy::{HeldPolicy, Peer, PolicyName, Repository, Trace, TraceRequest};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::answer::{Answer, Refusal, answer, bad};
use super::body::{JsonBody, receive};
use super::server::Shared;
use super::source::Source;

/// Response to `POST /v1/policies/trace`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct TraceAnswer {
    /// Human-readable explanation.
    text: String,
    /// Machine-readable result: both ends, each side's policy with the rules that select and match, and whether the
    /// packet passes.
    #[cfg_attr(test, schemars(with = "serde_json::Map<String, serde_json::Value>"))]
    trace: Trace,
}

/// Maximum size of a document in bytes.
pub(super) const MAX_DOCUMENT: usize = 10 * 1024 * 1024;
/// Time limit for receiving a document.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a response waits for endpoints to apply a change.
const PATIENCE: Duration = Duration::from_secs(10);

/// Selects policies.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub(super) struct PolicySelection {
    /// The policy with this name: the full name, or the part after the kind.
    name: Option<String>,
    /// Policies with a rule that has all of these labels, separated by commas.
    labels: Option<String>,
    /// All policies; the default for a listing.
    all: bool,
}

pub(super) async fn list<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<PolicySelection>, QueryRejection>,
) -> Result<Answer<PolicyList>, Refusal> {
    let Query(meant) = query?;
    let enforcer = enforcer(&*api.source)?.clone();
    answer(move || {
        let repository = enforcer.repository();
        let policies: Vec<PolicyDocument> = match (&meant.name, &meant.labels) {
            (Some(name), None) => {
                let name = named(&repository, name)?;
                let found = repository.iter().filter(|held| *held.name() == name);
                found.map(document).collect()
            }
            (None, Some(text)) => {
                let labels = labels(text)?;
                repository.labelled(&labels).map(document).collect()
            }
            (None, None) => repository.iter().map(document).collect(),
            (Some(_), Some(_)) => return Err(bad("give a name or labels, not both".to_owned())),
        };
        let refused = enforcer.refused_policies();
        let is_meant = |refused: &&RefusedPolicy| match (&meant.name, &meant.labels) {
            (Some(name), _) => is_named(&refused.name, name),
            (None, labels) => labels.is_none(),
        };
        Ok(PolicyList {
            revision: repository.revision(),
            mode: enforcer.settings().mode,
            commanded_mode: enforcer.commanded_mode(),
            policies,
            refused: refused.iter().filter(is_meant).cloned().collect(),
        })
    })
    .await
}

fn document(held: &HeldPolicy) -> PolicyDocument {
    PolicyDocument {
        name: held.name().to_string(),
        origin: held.origin(),
        since: held.since(),
        document: held.document().clone(),
    }
}

/// A request whose body contains policies in YAML or JSON.
pub(super) struct PolicyText(Request);

impl<S: Sync> FromRequest<S> for PolicyText {
    type Rejection = Infallible;

    async fn from_request(request: Request, _: &S) -> Result<Self, Infallible> {
        Ok(Self(request))
    }
}

pub(super) async fn import<S: Source>(
    State(api): Shared<S>,
    PolicyText(request): PolicyText,
) -> Result<Answer<PolicyChange>, Refusal> {
    let enforcer = enforcer(&*api.source)?.clone();
    let bytes = receive(request, MAX_DOCUMENT, DOCUMENT_TIMEOUT).await?;
    let begun = Instant::now();
    let importing = enforcer.clone();
    let imported = tokio::task::spawn_blocking(move || {
        let text = std::str::from_utf8(&bytes)
            .map_err(|error| bad(format!("the policies are not UTF-8: {error}")))?;
        Ok::<_, Refusal>(importing.import(text)?)
    });
    let (imported, revision) = imported.await.map_err(|error| failed(&error))??;
    let texts = |names: &[PolicyName]| names.iter().map(ToString::to_string).collect();
    let change = PolicyChange {
        added: texts(&imported.added),
        replaced: texts(&imported.replaced),
        unchanged: texts(&imported.unchanged),
        skipped: imported.skipped,
        ..PolicyChange::default()
    };
    answer_when_in_force(&enforcer, change, revision, begun).await
}

pub(super) async fn delete<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<PolicySelection>, QueryRejection>,
) -> Result<Answer<PolicyChange>, Refusal> {
    let Query(meant) = query?;
    let enforcer = enforcer(&*api.source)?.clone();
    let begun = Instant::now();
    let (deleted, revision) = match (&meant.name, &meant.labels, meant.all) {
        (Some(name), None, false) => {
            let name = named(&enforcer.repository(), name)?;
            let revision = enforcer.delete(&name)?;
            (vec![name], revision)
        }
        (None, Some(text), false) => enforcer.delete_labelled(&labels(text)?)?,
        (None, None, true) => enforcer.delete_labelled(&[])?,
        _ => {
            return Err(bad(
                "expected one of name=NAME, labels=LABELS or all=true".to_owned()
            ));
        }
    };
    let change = PolicyChange {
        deleted: deleted.iter().map(ToString::to_string).collect(),
        ..PolicyChange::default()
    };
    answer_when_in_force(&enforcer, change, revision, begun).await
}

pub(super) async fn set_mode<S: Source>(
    State(api): Shared<S>,
    JsonBody(PolicyModeChange { mode: commanded }): JsonBody<PolicyModeChange>,
) -> Result<Answer<PolicyModeStatus>, Refusal> {
    let enforcer = enforcer(&*api.source)?.clone();
    let setting = enforcer.clone();
    let set = tokio::task::spawn_blocking(move || setting.command_mode(commanded));
    let mode = set.await.map_err(|error| failed(&error))??;
    let is_in_force = enforcer.mode_in_force(mode, PATIENCE).await;
    answer(move || {
        Ok(PolicyModeStatus {
            mode,
            is_commanded: commanded.is_some(),
            is_in_force,
        })
    })
    .await
}

/// Responds once endpoints have applied the change, or after [`PATIENCE`].
async fn answer_when_in_force(
    enforcer: &Enforcer,
    change: PolicyChange,
    revision: u64,
    begun: Instant,
) -> Result<Answer<PolicyChange>, Refusal> {
    let is_in_force = enforcer.in_force(revision, PATIENCE).await;
    let took = begun.elapsed().as_nanos();
    answer(move || {
        Ok(PolicyChange {
            revision,
            is_in_force,
            took_ns: took.try_into().unwrap_or(u64::MAX),
            ..change
        })
    })
    .await
}

pub(super) async fn trace<S: Source>(
    State(api): Shared<S>,
    JsonBody(query): JsonBody<TraceQuery>,
) -> Result<Answer<TraceAnswer>, Refusal> {
    let enforcer = enforcer(&*api.source)?.clone();
    answer(move || {
        let source = end(&*api.source, &enforcer, "source", &query.source)?;
        let destination = end(&*api.source, &enforcer, "destination", &query.destination)?;
        let request = TraceRequest {
            source: Peer::new(source.0, &source.1),
            destination: Peer::new(destination.0, &destination.1),
            l4: query.l4,
            only: query.only,
        };
        let ends = [&query.source, &query.destination];
        let enforcement = ends.map(|end| match end {
            TraceEndRequest::Endpoint(id) => enforcement_of(&*api.source, *id),
            _ => PolicyMode::Default,
        });
        let trace = enforcer.trace(&request, enforcement);
        Ok(TraceAnswer {
            text: trace.to_string(),
            trace,
        })
    })
    .await
}

/// When policy is enforced for an endpoint, apart from the node's mode.
pub(crate) fn enforcement_of(source: &impl Source, id: u16) -> PolicyMode {
    let endpoints = source.endpoints();
    let found = endpoints.iter().find(|endpoint| endpoint.id == id);
    found.map_or(PolicyMode::Default, |found| found.settings.enforcement)
}

/// The identity and labels of one end of a packet's path.
fn end<S: Source>(
    source: &S,
    enforcer: &Enforcer,
    field: &str,
    end: &TraceEndRequest,
) -> Result<(Identity, LabelSet), Refusal> {
    let of_identity = |identity: Identity| {
        let identities = enforcer.identities();
        let known = identities
            .labels
            .get(&identity)
            .map(|labels| (**labels).clone());
        known.map(|labels| (identity, labels)).ok_or_else(|| {
            Refusal(
                StatusCode::NOT_FOUND,
                format!("{field}: no identity {identity}; `health-agent identity list` lists the existing ones"),
            )
        })
    };
    match end {
        TraceEndRequest::Endpoint(id) => {
            let endpoints = source.endpoints();
            let is_meant = |endpoint: &&Arc<Endpoint>| {
                endpoint.id == *id
                    && EndpointState::of(endpoint) != Some(EndpointState::Disconnected)
            };
            let found = endpoints.iter().find(is_meant);
            let found = found.ok_or_else(|| {
                Refusal(StatusCode::NOT_FOUND, format!("{field}: no endpoint {id}"))
            })?;
            of_identity(Identity(found.identity))
        }
        TraceEndRequest::Identity(text) => {
            let identity = text.parse();
            of_identity(identity.map_err(|error| bad(format!("{field}: {error}")))?)
        }
        TraceEndRequest::Ip(ip) => of_identity(enforcer.identity_of(ip_of(field, ip)?)),
        TraceEndRequest::Labels(texts) => {
            let labels = texts.iter().map(|text| text.parse());
            let labels: Result<Vec<Label>, _> = labels.collect();
            let labels = labels
                .and_then(LabelSet::new)
                .map_err(|error| bad(format!("{field}: {error}")))?;
            let identities = enforcer.identities();
            let known = identities.labels.iter();
            let known = known
                .filter(|(_, of_identity)| ***of_identity == labels)
                .map(|(identity, _)| *identity)
                .next();
            // Labels without an endpoint have no identity; rules only need the labels.
            Ok((known.unwrap_or(Identity::UNKNOWN), labels))
        }
    }
}

fn ip_of(field: &str, text: &str) -> Result<IpAddr, Refusal> {
    text.parse()
        .map_err(|_| bad(format!("{field}: {text:?} is not an IP address")))
}

/// Finds a policy by its full name, or by the part after the kind.
fn named(repository: &Repository, text: &str) -> Result<PolicyName, Refusal> {
    let names = repository.iter().map(|held| held.name());
    // Policies of both origins may have the same name.
    let found: BTreeSet<&PolicyName> = names
        .filter(|name| is_named(&name.to_string(), text))
        .collect();
    let names = || found.iter().map(ToString::to_string).collect::<Vec<_>>();
    match (found.first(), found.len()) {
        (Some(name), 1) => Ok((*name).clone()),
        (None, _) => Err(Refusal(
            StatusCode::NOT_FOUND,
            format!("no policy {text:?}; `health-agent policy get` lists the existing ones"),
        )),
        _ => Err(bad(format!(
            "several policies match {text:?}: {}; also give the kind",
            names().join(", ")
        ))),
    }
}

fn is_named(name: &str, text: &str) -> bool {
    let short = name.split_once(' ').map(|(_, short)| short);
    name == text || short == Some(text)
}

fn labels(text: &str) -> Result<Vec<Label>, Refusal> {
    let labels = text.split(',').filter(|label| !label.is_empty());
    let labels: Result<Vec<Label>, _> = labels.map(str::parse).collect();
    match labels.map_err(|error| bad(format!("labels: {error}")))? {
        none if none.is_empty() => Err(bad("labels: expected at least one".to_owned())),
        labels => Ok(labels),
    }
}

fn enforcer<S: Source>(source: &S) -> Result<&Enforcer, Refusal> {
    source.enforcer().ok_or_else(|| {
        Refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "the agent has not taken over its policies yet; try again later".to_owned(),
        )
    })
}

impl From<EnforceError> for Refusal {
    fn from(error: EnforceError) -> Self {
        let code = match &error {
            EnforceError::Policy(_)
            | EnforceError::TooManyNetworks { .. }
            | EnforceError::TooManyNodeLabels { .. } => StatusCode::BAD_REQUEST,
            EnforceError::NoPolicy(_) => StatusCode::NOT_FOUND,
            EnforceError::OfCluster(_) => StatusCode::CONFLICT,
            EnforceError::Damaged { .. }
            | EnforceError::Save { .. }
            | EnforceError::SaveCluster { .. }
            | EnforceError::Forget { .. }
            | EnforceError::Table(_)
            | EnforceError::Datapath(_)
            | EnforceError::Ipcache(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(code, error.to_string())
    }
}

fn failed(error: &dyn std::error::Error) -> Refusal {
    Refusal(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}
