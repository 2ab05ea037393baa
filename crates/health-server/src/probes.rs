//! The paths under `/v1/probes` and `/v1/pods`: container probes and their pods.

use std::collections::BTreeMap;
use std::io;
use std::str::FromStr as _;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::StatusCode;
use futures_util::stream;
use health_model::api::{
    ContainerEvent, ContainerProbe, ContainerProbeEvent, ContainerProbeKey, ContainerProbeSummary,
    PodProblem, ProbedPod, is_pod_named,
};
use health_probe::spec::ProbeType;
use health_probe::supervisor::Supervisor;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use super::answer::{Answer, AnswerOrLines, Batch, Lines, Refusal, answer};
use super::pacing::Client;
use super::server::Shared;
use super::source::Source;

/// Minimum time between two checks for a watching client.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Whether to answer with lines: a [`ContainerProbeEvent`] for each probe, then one for each change, at most every
    /// 100 ms, until the client disconnects or the agent stops.
    #[serde(default)]
    watch: bool,
    /// Only probes of this pod, `NAMESPACE/NAME` or `NAME`.
    #[cfg_attr(test, schemars(example = "shop/web"))]
    pod: Option<String>,
    /// Only probes of containers with this name.
    container: Option<String>,
    /// Only probes of this type. Container events have no type and are included for every type.
    #[cfg_attr(test, schemars(extend("enum" = ["startup", "readiness", "liveness"])))]
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// The probes that a client asks for.
#[derive(Clone, Debug, Default)]
struct Selection {
    pod: Option<String>,
    container: Option<String>,
    kind: Option<ProbeType>,
}

impl Selection {
    fn of(query: ListQuery) -> Result<Self, Refusal> {
        let parse = |text: String| {
            ProbeType::from_str(&text).map_err(|error| {
                Refusal(StatusCode::BAD_REQUEST, format!("type: {text:?}: {error}"))
            })
        };
        Ok(Self {
            pod: query.pod,
            container: query.container,
            kind: query.kind.map(parse).transpose()?,
        })
    }

    fn has_container(&self, pod: &str, container: &str) -> bool {
        let is_pod = |wanted: &str| is_pod_named(pod, wanted);
        self.pod.as_deref().is_none_or(is_pod)
            && self.container.as_ref().is_none_or(|one| *one == container)
    }

    fn has(&self, probe: &ContainerProbe) -> bool {
        self.has_container(&probe.pod, &probe.container)
            && self.kind.is_none_or(|kind| kind.name() == probe.kind)
    }

    fn probes(&self, supervisor: &Supervisor) -> Vec<ContainerProbe> {
        let mut probes = supervisor.probes();
        probes.retain(|probe| self.has(probe));
        probes
    }
}

pub(super) async fn list<S: Source>(
    State(api): Shared<S>,
    Extension(client): Extension<Client>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<AnswerOrLines<Vec<ContainerProbe>, ContainerProbeEvent>, Refusal> {
    let Query(query) = query?;
    let is_watched = query.watch;
    let selection = Selection::of(query)?;
    if !is_watched {
        let probes = answer(move || Ok(of(&*api.source, |all| selection.probes(all)))).await?;
        return Ok(AnswerOrLines::Answer(probes));
    }
    let supervisor = api.source.containers().cloned().ok_or_else(|| {
        Refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "this agent probes no containers".to_owned(),
        )
    })?;
    let slot = api.container_watches.take()?;
    client.stay();
    Ok(AnswerOrLines::Lines(lines(Watch {
        changes: supervisor.changes(),
        supervisor,
        view: ClientView::new(selection),
        next_look: None,
        _slot: slot,
    })))
}

/// Streams the events for a watching client, one per line.
fn lines(watch: Watch) -> Lines<ContainerProbeEvent> {
    Lines::of_stream(stream::try_unfold(watch, async |mut watch| {
        let events = watch.next().await?;
        if events.is_empty() {
            return Ok::<_, io::Error>(None);
        }
        Ok(Some((Batch::write(&events)?, watch)))
    }))
}

/// A watching client.
struct Watch {
    supervisor: Supervisor,
    changes: watch::Receiver<u64>,
    view: ClientView,
    /// `None` before the first check.
    next_look: Option<Instant>,
    _slot: OwnedSemaphorePermit,
}

impl Watch {
    /// Returns everything at first, and later the changes as they happen; empty when the agent stops.
    async fn next(&mut self) -> io::Result<Vec<ContainerProbeEvent>> {
        loop {
            let is_first = self.next_look.is_none();
            if let Some(at) = self.next_look {
                if self.changes.changed().await.is_err() {
                    return Ok(Vec::new());
                }
                tokio::time::sleep_until(at).await;
            }
            self.next_look = Some(Instant::now() + LOOK_PERIOD);
            // The next check sees later changes.
            self.changes.mark_unchanged();
            let (supervisor, mut view) = (self.supervisor.clone(), std::mem::take(&mut self.view));
            let look = move || {
                let events = if is_first {
                    view.first(&supervisor)
                } else {
                    view.since(&supervisor)
                };
                (view, events)
            };
            let (view, events) = spawn_blocking(look).await?;
            self.view = view;
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }
}

/// The probes as last sent to a client.
#[derive(Default)]
struct ClientView {
    selection: Selection,
    probes: BTreeMap<ContainerProbeKey, ContainerProbe>,
    /// Number of the last event that was sent or precedes the watch.
    last_event: u64,
}

impl ClientView {
    fn new(selection: Selection) -> Self {
        Self {
            selection,
            ..Self::default()
        }
    }

    fn first(&mut self, supervisor: &Supervisor) -> Vec<ContainerProbeEvent> {
        let newest = supervisor.events_since(0).into_iter().next_back();
        self.last_event = newest.map_or(0, |event| event.number);
        let mut events = self.update(self.selection.probes(supervisor));
        events.push(ContainerProbeEvent::Listed);
        events
    }

    fn since(&mut self, supervisor: &Supervisor) -> Vec<ContainerProbeEvent> {
        let happened = supervisor.events_since(self.last_event);
        let mut events = self.update(self.selection.probes(supervisor));
        events.extend(self.happened(happened));
        events
    }

    fn happened(&mut self, events: Vec<ContainerEvent>) -> Vec<ContainerProbeEvent> {
        if let Some(newest) = events.last() {
            self.last_event = newest.number;
        }
        let wanted = events
            .into_iter()
            .filter(|event| self.selection.has_container(&event.pod, &event.container));
        let reported = wanted.map(|event| ContainerProbeEvent::Happened {
            happened: Box::new(event),
        });
        reported.collect()
    }

    fn update(&mut self, probes: Vec<ContainerProbe>) -> Vec<ContainerProbeEvent> {
        let now: BTreeMap<_, _> = probes.iter().map(|probe| (probe.key(), probe)).collect();
        let gone = self
            .probes
            .iter()
            .filter(|(key, _)| !now.contains_key(*key));
        let gone = gone.map(|(_, probe)| ContainerProbeEvent::Deleted {
            pod: probe.pod.clone(),
            pod_uid: probe.pod_uid.clone(),
            container: probe.container.clone(),
            kind: probe.kind.clone(),
        });
        let is_reported = |key: &ContainerProbeKey, probe: &ContainerProbe| {
            let reported = self.probes.get(key);
            reported.is_some_and(|reported| reported.is_like(probe))
        };
        // In listing order.
        let changed = probes
            .iter()
            .filter(|probe| !is_reported(&probe.key(), probe));
        let changed = changed.map(|probe| ContainerProbeEvent::Updated {
            probe: Box::new(probe.clone()),
        });
        let events = gone.chain(changed).collect();
        self.probes = probes
            .into_iter()
            .map(|probe| (probe.key(), probe))
            .collect();
        events
    }
}

/// Reads something from the supervisor; returns the default if there is none.
fn of<S: Source, T: Default>(source: &S, read: impl FnOnce(&Supervisor) -> T) -> T {
    source.containers().map(read).unwrap_or_default()
}

pub(super) async fn summary<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<ContainerProbeSummary>, Refusal> {
    answer(move || Ok(of(&*api.source, Supervisor::summary))).await
}

pub(super) async fn pods<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<Vec<ProbedPod>>, Refusal> {
    answer(move || Ok(of(&*api.source, Supervisor::pods))).await
}

pub(super) async fn events<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<Vec<ContainerEvent>>, Refusal> {
    answer(move || Ok(of(&*api.source, |all| all.events_since(0)))).await
}

pub(super) async fn problems<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<Vec<PodProblem>>, Refusal> {
    answer(move || Ok(of(&*api.source, Supervisor::problems))).await
}

#[cfg(test)]
mod tests {
    use health_model::api::{ProbeRun, ProbeVerdict};
    use jiff::Timestamp;

    use super::*;

    fn probe(container: &str) -> ContainerProbe {
        ContainerProbe {
            pod: "shop/web".into(),
            pod_uid: "u-1".into(),
            container: container.into(),
            container_id: Some("3f2a".into()),
            kind: "liveness".into(),
            target: "tcp://10.244.1.7:8080".into(),
            result: Some(ProbeVerdict::Success),
            last: Some(ProbeVerdict::Success),
            run: 1,
            threshold: 1,
            on_hold: false,
            waiting: None,
            in_flight: false,
            period_ns: 10_000_000_000,
            timeout_ns: 1_000_000_000,
            next: None,
            overdue_ns: None,
            last_run: Some(ProbeRun {
                at: Timestamp::UNIX_EPOCH,
                counted: "successful".into(),
                message: "connected".into(),
            }),
        }
    }

    fn names(events: &[ContainerProbeEvent]) -> Vec<String> {
        let name = |event: &ContainerProbeEvent| match event {
            ContainerProbeEvent::Updated { probe } => format!("+{}", probe.container),
            ContainerProbeEvent::Deleted { container, .. } => format!("-{container}"),
            ContainerProbeEvent::Happened { happened } => happened.message.clone(),
            ContainerProbeEvent::Listed => "listed".to_owned(),
        };
        events.iter().map(name).collect()
    }

    #[test]
    fn a_watch_reports_what_came_changed_and_went_but_not_each_run() {
        let mut view = ClientView::default();
        let reported = view.update(vec![probe("b"), probe("a")]);
        assert_eq!(
            names(&reported),
            ["+b", "+a"],
            "in the order of the listing"
        );
        let again = ContainerProbe {
            run: 2,
            next: Some(Timestamp::UNIX_EPOCH),
            in_flight: true,
            ..probe("a")
        };
        assert_eq!(names(&view.update(vec![probe("b"), again])), [""; 0]);
        let held = ContainerProbe {
            on_hold: true,
            ..probe("a")
        };
        assert_eq!(names(&view.update(vec![held])), ["-b", "+a"]);
    }

    #[test]
    fn events_are_reported_once_and_only_of_what_is_watched() {
        let event = |number, pod: &str| ContainerEvent {
            number,
            first: Timestamp::UNIX_EPOCH,
            last: Timestamp::UNIX_EPOCH,
            count: 1,
            kind: "Normal".into(),
            reason: "Killing".into(),
            pod: pod.into(),
            container: "app".into(),
            message: format!("{number} {pod}"),
        };
        let mut view = ClientView::new(Selection {
            pod: Some("web".into()),
            ..Selection::default()
        });
        let reported = view.happened(vec![event(3, "shop/web"), event(4, "shop/db")]);
        assert_eq!(names(&reported), ["3 shop/web"]);
        assert_eq!(view.last_event, 4);
        assert_eq!(names(&view.happened(Vec::new())), [""; 0]);
        assert_eq!(view.last_event, 4);
    }

    #[test]
    fn a_pod_is_meant_by_its_name_with_or_without_its_namespace() {
        let wants = |pod: &str| {
            let pod = Some(pod.to_owned());
            Selection {
                pod,
                ..Selection::default()
            }
            .has(&probe("app"))
        };
        assert!(wants("web") && wants("shop/web"));
        assert!(!wants("shop") && !wants("default/web") && !wants("eb"));
        let of_type = |kind| {
            let kind = Some(kind);
            Selection {
                kind,
                ..Selection::default()
            }
            .has(&probe("app"))
        };
        assert!(of_type(ProbeType::Liveness) && !of_type(ProbeType::Startup));
    }
}
