//! `GET /v1/services/trace`: what becomes of a new flow to a service, and why.
//!
//! The maps say what happens: [`kernel`] looks into them as the programs do. The agent adds names and reasons, and where
//! it means the programs to know something else, that is told as a difference. Nothing is changed, and no packet is sent.

mod ends;
mod kernel;
mod outcome;
mod policy;
mod pool;
mod stay;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use health_common::nat::can_change_port;
use health_common::service::{
    ALGORITHM_MAGLEV, FRONTEND_DROPS_INSIDE, FRONTEND_DROPS_OUTSIDE, FRONTEND_RESTRICTED, Frontend,
    Pool,
};
use health_datapath::services::{Connection, ListedBackend, ListedFrontend};
use health_model::api::{
    ServiceTrace, SourceKind, TracedBackend, TracedFrontend, TracedRanges, TracedSource,
};
use health_model::policy::Protocol;
use health_registry::config::ServiceProxyMode;
use serde::Deserialize;

use self::ends::Ends;
use self::kernel::Kernel;
use self::outcome::{Outcome, Refused};
use self::pool::Owner;
use self::stay::Stay;
use crate::api::answer::{Refusal, answer};
use crate::api::server::Shared;
use crate::api::source::Source;
use crate::frontend_names::{algorithm_name, kind_name};

/// A flow that is asked about.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct TraceQuery {
    /// Who opens it.
    source: String,
    /// To where.
    destination: String,
    /// By which protocol; that of the service's port, or TCP, if none is given.
    protocol: Option<Protocol>,
}

pub(in crate::api) async fn trace<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<TraceQuery>, QueryRejection>,
) -> Result<Response, Refusal> {
    let Query(query) = query?;
    answer(move || explain(&*api.source, &query)).await
}

fn explain<S: Source>(source: &S, query: &TraceQuery) -> Result<ServiceTrace, Refusal> {
    let Some(book) = source.services() else {
        let problem = "this agent serves no services; see run --service-manifests";
        return Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, problem.to_owned()));
    };
    let config = source.config();
    if config.services.service_proxy_mode == ServiceProxyMode::Ipvs {
        let problem =
            "services are served by IPVS, which chooses by itself; `ipvsadm -Ln` shows what it has";
        return Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, problem.to_owned()));
    }
    let ends = Ends::of(source, book, query)?;
    let kernel = Kernel::open(&config.location)?;
    let mut differences = Vec::new();
    let traced = ends.source(source, &kernel, &mut differences)?;
    let flow = Connection {
        protocol: ends.protocol.0,
        source: (traced.address, traced.port.unwrap_or_default()).into(),
        destination: ends.destination,
    };
    let found = kernel.maps.find(flow.destination, flow.protocol)?;
    let is_own_address = ends.is_own(source, flow.destination.ip());
    let owner = Owner::find(book, &flow, found.as_ref(), is_own_address);
    let (frontend, shown) = match (&found, &owner) {
        (None, None) => return Err(pool::nobody(book, &flow)),
        (Some(found), _) => (Some(found), frontend(found, owner.as_ref())),
        (None, Some(owner)) => (None, unknown(owner)),
    };
    let mut tracer = Tracer {
        source,
        kernel: &kernel,
        differences,
        flow,
        is_port_known: traced.port.is_some(),
        is_inside: traced.kind.is_inside(),
        owner: owner.as_ref(),
    };
    let mut pool = pool::pool(&flow, &traced, found.as_ref(), owner.as_ref());
    let (mut source_ranges, mut stay, mut affinity) = (None, None, None);
    let mut backends = Vec::new();
    let mut refused = Some(Refused::Unknown);
    if let Some(found) = frontend {
        tracer.compare(found);
        stay = tracer.known_flow()?;
        source_ranges = tracer.ranges(&found.entry)?;
        affinity = tracer.affinity(&found.entry)?;
        refused = tracer.refused(&found.entry, stay.as_ref(), source_ranges.as_ref());
        if refused.is_none() {
            let candidates =
                tracer.candidates(found, stay.as_ref(), affinity.as_ref(), &mut pool.reasons)?;
            for candidate in &candidates {
                backends.push(tracer.backend(candidate, &traced)?);
            }
        }
    }
    if let Some(unserved) = kernel.unserved(traced.kind) {
        refused = Some(Refused::NotServed(unserved));
    }
    let outcome = Outcome::of(&shown, &flow, refused, &backends);
    Ok(ServiceTrace {
        source: traced,
        destination: flow.destination,
        protocol: ends.protocol.to_string(),
        frontend: shown,
        pool,
        source_ranges,
        flow: stay.map(|stay| stay.told),
        affinity: affinity.map(|stay| stay.told),
        backends,
        differences: tracer.differences,
        verdict: outcome.verdict,
        answer: outcome.answer,
    })
}

fn frontend(found: &ListedFrontend, owner: Option<&Owner>) -> TracedFrontend {
    let entry = &found.entry;
    let affinity = u64::from(entry.affinity_secs) * 1_000_000_000;
    TracedFrontend {
        service: owner.map(Owner::title),
        kind: kind_name(entry.kind),
        number: Some(entry.service),
        algorithm: algorithm_name(entry.algorithm),
        affinity_ns: (affinity > 0).then_some(affinity),
    }
}

/// A frontend that the programs do not know.
fn unknown(owner: &Owner) -> TracedFrontend {
    TracedFrontend {
        service: Some(owner.title()),
        kind: owner.frontend.kind.clone(),
        number: None,
        algorithm: owner.service.algorithm.clone().unwrap_or_default(),
        affinity_ns: owner.service.affinity_ns,
    }
}

/// What a flow is followed by.
struct Tracer<'a, S> {
    source: &'a S,
    kernel: &'a Kernel,
    differences: Vec<String>,
    flow: Connection,
    is_port_known: bool,
    is_inside: bool,
    owner: Option<&'a Owner>,
}

/// A backend that the flow may go to.
struct Candidate {
    listed: ListedBackend,
    /// How likely, from 0 to 1.
    share: f64,
}

impl<S: Source> Tracer<'_, S> {
    /// Tells where the maps are not as the agent means them to be.
    fn compare(&mut self, found: &ListedFrontend) {
        match self.owner {
            None => self.differences.push(format!(
                "the agent knows of no service at {}",
                self.flow.destination
            )),
            Some(owner) => {
                let backends = self.pool_of(found);
                let difference = owner.difference(self.is_inside, &found.entry, backends);
                self.differences.extend(difference);
            }
        }
    }

    fn pool_of<'f>(&self, found: &'f ListedFrontend) -> &'f [ListedBackend] {
        if self.is_inside {
            &found.inside
        } else {
            &found.outside
        }
    }

    fn pool_entry(&self, entry: &Frontend) -> Pool {
        if self.is_inside {
            entry.inside
        } else {
            entry.outside
        }
    }

    fn known_flow(&self) -> Result<Option<Stay>, Refusal> {
        if !self.is_port_known {
            return Ok(None);
        }
        let facts = self.kernel.known_flow(&self.flow)?;
        Ok(facts.map(|facts| stay::flow(&self.flow, &facts)))
    }

    fn affinity(&self, entry: &Frontend) -> Result<Option<Stay>, Refusal> {
        let facts = self.kernel.client(self.flow.source.ip(), entry)?;
        Ok(facts.map(|facts| stay::client(entry, &facts)))
    }

    fn ranges(&self, entry: &Frontend) -> Result<Option<TracedRanges>, Refusal> {
        if entry.flags & FRONTEND_RESTRICTED == 0 {
            return Ok(None);
        }
        let maps = &self.kernel.maps;
        let mut ranges = maps.source_ranges()?;
        Ok(Some(TracedRanges {
            ranges: ranges.remove(&entry.service).unwrap_or_default(),
            admitted: maps.is_in_range(self.flow.source.ip(), entry.service)?,
        }))
    }

    /// What keeps the flow from all backends, in the order in which the programs look. Nothing does of one that they know.
    fn refused(
        &self,
        entry: &Frontend,
        stay: Option<&Stay>,
        ranges: Option<&TracedRanges>,
    ) -> Option<Refused> {
        if stay.is_some_and(|stay| stay.told.stays) {
            return None;
        }
        if ranges.is_some_and(|ranges| !ranges.admitted) {
            return Some(Refused::SourceRange);
        }
        let drops = if self.is_inside {
            FRONTEND_DROPS_INSIDE
        } else {
            FRONTEND_DROPS_OUTSIDE
        };
        match (self.pool_entry(entry).len, entry.flags & drops) {
            (0, 0) => Some(Refused::NoBackend),
            (0, _) => Some(Refused::NoLocalBackend),
            _ => None,
        }
    }

    /// The backends that the flow may go to.
    fn candidates(
        &self,
        found: &ListedFrontend,
        stay: Option<&Stay>,
        affinity: Option<&Stay>,
        reasons: &mut Vec<String>,
    ) -> Result<Vec<Candidate>, Refusal> {
        let stays = [
            (stay, "the flow is known, and keeps its backend"),
            (affinity, "the client stays with its backend"),
        ];
        for (stay, reason) in stays {
            if let Some(stay) = stay.filter(|stay| stay.told.stays) {
                reasons.push(reason.to_owned());
                return self.only(stay.index);
            }
        }
        let is_by_client = found.entry.affinity_secs != 0;
        if found.entry.algorithm == ALGORITHM_MAGLEV && (self.is_port_known || is_by_client) {
            let pool = self.pool_entry(&found.entry);
            let index = self.kernel.maps.by_maglev(pool, &self.flow, is_by_client)?;
            if let Some(index) = index {
                let Some(taken) = self.taken(index)? else {
                    reasons.push("the Maglev table has this one for the flow".to_owned());
                    return self.only(index);
                };
                reasons.push(taken);
            }
        }
        let listed = self.pool_of(found).iter();
        Ok(listed
            .map(|listed| Candidate {
                listed: *listed,
                share: listed.share,
            })
            .collect())
    }

    /// Why another backend is chosen by chance: the client has a connection to this one between the same ports.
    fn taken(&self, index: u32) -> Result<Option<String>, Refusal> {
        if !self.flow.is_tcp() || !self.is_port_known {
            return Ok(None);
        }
        let Some(backend) = self.kernel.maps.backend(index)? else {
            return Ok(None);
        };
        let to = kernel::address(&backend);
        let is_open = self.kernel.is_open(&self.flow, to)?;
        Ok((is_open == Some(true)).then(|| {
            format!(
                "the client has a connection to {to} from this port: another is chosen by chance"
            )
        }))
    }

    fn only(&self, index: u32) -> Result<Vec<Candidate>, Refusal> {
        let entry = self.kernel.maps.backend(index)?.unwrap_or_default();
        let listed = ListedBackend {
            index,
            entry,
            share: 1.0,
        };
        Ok(vec![Candidate { listed, share: 1.0 }])
    }

    fn backend(
        &mut self,
        candidate: &Candidate,
        source: &TracedSource,
    ) -> Result<TracedBackend, Refusal> {
        let Candidate { listed, share } = candidate;
        let address = listed.address();
        let known = self.owner.and_then(|owner| owner.backend(address));
        let endpoint = self.kernel.pinned.endpoint(address.ip())?;
        let name = endpoint.and_then(|info| ends::name_of(self.source, info.id));
        let problem = if listed.entry.service == 0 {
            let index = listed.index;
            Some(format!("the programs know no backend {index}"))
        } else if address.port() != self.flow.destination.port()
            && !can_change_port(self.flow.protocol)
        {
            let protocol = Protocol(self.flow.protocol);
            Some(format!(
                "{protocol} reaches only backends at the service's port"
            ))
        } else {
            None
        };
        let to = Connection {
            destination: address,
            ..self.flow
        };
        let mut traced = TracedBackend {
            address,
            share: *share,
            weight: known.map(|known| known.weight),
            state: known.map_or("unknown", |known| known.state()).to_owned(),
            flows: listed.entry.flows,
            node: known.and_then(|known| known.node.clone()),
            endpoint: endpoint.map(|info| info.id),
            name,
            egress: None,
            ingress: None,
            problem,
        };
        if traced.problem.is_none() {
            let judge = policy::Judge {
                source: self.source,
                kernel: self.kernel,
                client: source,
            };
            if source.kind == SourceKind::Endpoint {
                traced.egress = Some(judge.egress(&to, &mut self.differences)?);
            }
            if let Some(info) = &endpoint {
                traced.ingress = Some(judge.ingress(&to, info, &mut self.differences)?);
            }
        }
        Ok(traced)
    }
}
