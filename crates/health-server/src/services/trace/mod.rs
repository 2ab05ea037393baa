//! `GET /v1/services/trace`: what happens to a new flow to a service, and why.
//!
//! The maps determine what happens: [`kernel`] reads them as the programs do. The agent adds names and reasons, and
//! reports where the maps differ from its intent. Tracing changes nothing and sends no packet.

mod ends;
mod hook;
mod kernel;
mod outcome;
mod policy;
mod pool;
mod stay;
mod tracer;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use health_api::frontend_names::{algorithm_name, kind_name};
use health_common::service::FRONTEND_DIRECT;
use health_datapath::services::{Connection, ListedFrontend};
use health_model::api::{ServiceTrace, TracedFrontend};
use health_model::policy::Protocol;
use health_model::settings::ServiceForwarding;
use health_settings::ServiceProxyMode;
use serde::Deserialize;

use self::ends::Ends;
use self::hook::TraceHook;
use self::kernel::Kernel;
use self::outcome::{Outcome, Refused};
use self::pool::Owner;
use self::tracer::Tracer;
use crate::answer::{Answer, Refusal, answer};
use crate::server::Shared;
use crate::source::Source;

/// The traced flow.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct TraceQuery {
    /// Who opens it: an endpoint of this node by id, name or address, `host`, or any other address; with a port as
    /// `SOURCE:PORT`.
    #[cfg_attr(test, schemars(example = "10.244.1.7"))]
    source: String,
    /// Where it goes: `ADDRESS:PORT`, or a service as `NAMESPACE/NAME:PORT` with the number or name of its port.
    #[cfg_attr(test, schemars(example = "shop/web:http"))]
    destination: String,
    /// Its protocol, TCP, UDP or SCTP; defaults to that of the service's port, or else TCP.
    protocol: Option<Protocol>,
}

pub(crate) async fn trace<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<TraceQuery>, QueryRejection>,
) -> Result<Answer<ServiceTrace>, Refusal> {
    let Query(query) = query?;
    answer(move || explain(&*api.source, &query)).await
}

fn explain<S: Source>(source: &S, query: &TraceQuery) -> Result<ServiceTrace, Refusal> {
    let Some(catalog) = source.services() else {
        let problem = "this agent serves no services; see run --service-manifests";
        return Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, problem.to_owned()));
    };
    let settings = source.settings();
    if settings.services.service_proxy_mode == ServiceProxyMode::Ipvs {
        let problem = "IPVS serves the services and chooses the backends; `ipvsadm -Ln` lists them";
        return Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, problem.to_owned()));
    }
    let ends = Ends::of(source, catalog, query)?;
    let kernel = Kernel::open(&settings.location)?;
    let mut differences = Vec::new();
    let traced = ends.source(source, &kernel, &mut differences)?;
    let flow = Connection {
        protocol: ends.protocol.0,
        source: (traced.address, traced.port.unwrap_or_default()).into(),
        destination: ends.destination,
    };
    let found = kernel.maps.find(flow.destination, flow.protocol)?;
    let is_own_address = ends.is_own(source, flow.destination.ip());
    let owner = Owner::find(catalog, &flow, found.as_ref(), is_own_address);
    let hook = TraceHook::of(traced.kind);
    let (frontend, shown) = match (&found, &owner) {
        (None, None) => return Err(pool::nobody(catalog, &flow)),
        (Some(found), _) => (Some(found), frontend(found, owner.as_ref(), hook)),
        (None, Some(owner)) => (None, unknown(owner)),
    };
    let mut pool = pool::pool(&flow, &traced, found.as_ref(), owner.as_ref());
    let (mut source_ranges, mut stay, mut affinity) = (None, None, None);
    let mut backends = Vec::new();
    let mut refused = Some(Refused::Unknown);
    if let Some(found) = frontend {
        let mut tracer = Tracer {
            source,
            kernel: &kernel,
            differences: &mut differences,
            flow,
            hook,
            client: kernel.client_of(hook, &flow),
            owner: owner.as_ref(),
            frontend: found,
        };
        tracer.compare();
        refused = hook
            .unserved(&kernel, &traced, &flow, &found.entry)
            .map(Refused::NotServed);
        if refused.is_none() {
            stay = tracer.known_flow()?;
            source_ranges = tracer.ranges()?;
            affinity = tracer.affinity()?;
            refused = tracer.refused(stay.as_ref(), source_ranges.as_ref());
        }
        if refused.is_none() {
            let candidates =
                tracer.candidates(stay.as_ref(), affinity.as_ref(), &mut pool.reasons)?;
            for candidate in &candidates {
                backends.push(tracer.backend(candidate, &traced)?);
            }
        }
    }
    let outcome = Outcome::of(hook, &shown, &flow, refused, &backends);
    Ok(ServiceTrace {
        source: traced,
        destination: flow.destination,
        protocol: ends.protocol.to_string(),
        frontend: shown,
        pool,
        source_ranges,
        flow: stay.map(|stay| stay.traced),
        affinity: affinity.map(|stay| stay.traced),
        backends,
        differences,
        verdict: outcome.verdict,
        answer: outcome.answer,
    })
}

fn frontend(found: &ListedFrontend, owner: Option<&Owner>, hook: TraceHook) -> TracedFrontend {
    let entry = &found.entry;
    let forwarding = match entry.flags & FRONTEND_DIRECT != 0 {
        true => ServiceForwarding::Dsr,
        false => ServiceForwarding::Snat,
    };
    let affinity = u64::from(entry.affinity_secs) * 1_000_000_000;
    TracedFrontend {
        service: owner.map(Owner::title),
        kind: kind_name(entry.kind),
        number: Some(entry.service),
        algorithm: algorithm_name(entry.algorithm),
        forwarding: (hook == TraceHook::Uplink).then(|| forwarding.name().to_owned()),
        affinity_ns: (affinity > 0).then_some(affinity),
    }
}

/// A frontend that the agent knows but the maps lack.
fn unknown(owner: &Owner) -> TracedFrontend {
    TracedFrontend {
        service: Some(owner.title()),
        kind: owner.frontend.kind.clone(),
        number: None,
        algorithm: owner.service.algorithm.clone().unwrap_or_default(),
        forwarding: None,
        affinity_ns: owner.service.affinity_ns,
    }
}
