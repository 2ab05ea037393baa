//! The started parts of an agent, as the API and the metrics read them.

use std::ops::Add;
use std::sync::Arc;
use std::time::Duration;

use health_datapath::conntrack::SharedCounts;
use health_datapath::events::Hub;
use health_endpoint::enforcement::Enforcer;
use health_endpoint::manager::Manager;
use health_mesh::hello::{Responder, ResponderState};
use health_mesh::{HelloRequestCounts, HelloRequests, MeshHandle};
use health_metrics::{Figures, Sample};
use health_model::activity::{Activity, Controller};
use health_model::api::IdentityEntry;
use health_probe::supervisor::Supervisor;
use health_registry::identity::Identities;
use health_server::liveness::Observation;
use health_server::services::ServiceCatalog;
use jiff::Timestamp;
use tokio::sync::watch;

/// The started parts. Published only once complete.
pub(super) struct StartedParts {
    pub(super) mesh: MeshHandle,
    pub(super) responders: Responders,
    /// The parts that report their activity.
    pub(super) reporting: Vec<ReportingPart>,
    pub(super) collections: SharedCounts,
    pub(super) events: Arc<Hub>,
    pub(super) manager: Manager,
    pub(super) enforcer: Enforcer,
    pub(super) identities: watch::Receiver<Arc<Identities>>,
    /// `None` if this agent probes no containers.
    pub(super) containers: Option<Supervisor>,
    /// `None` if this agent serves no services.
    pub(super) services: Option<ServiceCatalog>,
}

/// A part of the agent that reports its activity.
pub(super) struct ReportingPart {
    /// Name of the check that covers this part.
    check: &'static str,
    activity: Activity,
    /// Whether the agent works without this part. If so, its problems are only warnings.
    is_optional: bool,
}

impl ReportingPart {
    pub(super) fn needed(check: &'static str, activity: Activity) -> Self {
        Self {
            check,
            activity,
            is_optional: false,
        }
    }

    pub(super) fn optional(check: &'static str, activity: Activity) -> Self {
        Self {
            is_optional: true,
            ..Self::needed(check, activity)
        }
    }

    fn observation(&self) -> Observation {
        let reported = Observation::reported(self.check, self.activity.last());
        match self.is_optional {
            true => reported.warning(),
            false => reported,
        }
    }
}

/// Request counts and states of the `GET /hello` responders.
pub(super) struct Responders {
    requests: [Arc<HelloRequests>; 2],
    states: [ResponderState; 2],
}

impl Responders {
    pub(super) fn of(responders: [&Responder; 2]) -> Self {
        Self {
            requests: responders.map(Responder::requests),
            states: responders.map(Responder::state),
        }
    }

    /// Request counts, summed over all responders.
    pub(super) fn requests(&self) -> HelloRequestCounts {
        let counts = self.requests.iter().map(|requests| requests.counts());
        counts.fold(HelloRequestCounts::default(), Add::add)
    }

    pub(super) fn observation(&self) -> Observation {
        let states = self.states.iter();
        let problems: Vec<String> = states.filter_map(ResponderState::problem).collect();
        let problem = (!problems.is_empty()).then(|| problems.join("; "));
        Observation::now("responders", problem)
    }
}

impl StartedParts {
    /// The parts that report their activity, as controllers.
    pub(super) fn controllers(&self) -> impl Iterator<Item = Controller> {
        let reporting = self.reporting.iter();
        reporting.map(|part| Controller::new(part.check, part.activity.clone()))
    }

    /// The parts' own reports, except those of the mesh and the responders.
    pub(super) fn observations(&self) -> impl Iterator<Item = Observation> {
        let reporting = self.reporting.iter().map(ReportingPart::observation);
        let endpoints = Observation::now("endpoints", self.manager.problem()).warning();
        let services = self.services.iter().map(observed_services);
        reporting.chain([endpoints]).chain(services)
    }

    /// How up to date the registries are at the time `now`.
    pub(super) fn observed_registries(&self, now: Timestamp) -> impl Iterator<Item = Observation> {
        let registries = self.mesh.registries().into_iter();
        registries.map(move |registry| {
            let problem = registry
                .stale
                .map(|reason| format!("{} is stale: {reason}", registry.registry));
            let age = now.duration_since(registry.last_read);
            let age = age.try_into().unwrap_or_default();
            // The registry itself reports when it has been silent for too long.
            Observation {
                overdue: Duration::ZERO,
                ..Observation::aged("registry", problem, age).warning()
            }
        })
    }

    /// The figures of these parts; all other figures have their defaults.
    pub(super) fn figures(&self) -> Figures {
        Figures {
            registries: self.mesh.registries(),
            ignored_replies: self.mesh.ignored_replies(),
            hello_requests: self.responders.requests(),
            malformed_answers: self.mesh.malformed_headers(),
            collections: self.collections.counts(),
            endpoints: Some(self.manager.counts()),
            policy_lag: self.enforcer.lag(),
            events: self.events.counts(),
            containers: self.containers.as_ref().map(Sample::from),
            ..Figures::default()
        }
    }

    /// All security identities in numeric order.
    pub(super) fn identity_entries(&self) -> Vec<IdentityEntry> {
        let identities = self.identities.borrow();
        identities
            .labels
            .iter()
            .map(|(identity, labels)| IdentityEntry {
                id: identity.0,
                labels: labels.iter().map(ToString::to_string).collect(),
                references: identity.is_of_cluster().then(|| {
                    identities
                        .references
                        .get(identity)
                        .cloned()
                        .unwrap_or_default()
                }),
            })
            .collect()
    }
}

fn observed_services(catalog: &ServiceCatalog) -> Observation {
    match catalog.problem() {
        Some((true, problem)) => Observation::now("services", Some(problem)),
        Some((false, problem)) => Observation::now("services", Some(problem)).warning(),
        None => Observation::now("services", None),
    }
}
