//! Traces a flow to its backend as the programs handle it, step by step.

use std::net::SocketAddr;

use health_common::nat::can_change_port;
use health_common::service::{ALGORITHM_MAGLEV, Backend, FRONTEND_RESTRICTED};
use health_datapath::services::{Connection, ListedBackend, ListedFrontend};
use health_model::api::{SourceKind, TracedBackend, TracedRanges, TracedSource};
use health_model::policy::Protocol;

use super::hook::TraceHook;
use super::kernel::{self, Client, Kernel};
use super::outcome::Refused;
use super::pool::Owner;
use super::stay::{self, Stay};
use super::{ends, policy};
use crate::answer::Refusal;
use crate::source::Source;

/// The context for tracing a flow to a frontend.
pub(super) struct Tracer<'a, S> {
    pub(super) source: &'a S,
    pub(super) kernel: &'a Kernel,
    pub(super) differences: &'a mut Vec<String>,
    /// The source port is 0 if it is unknown.
    pub(super) flow: Connection,
    pub(super) hook: TraceHook,
    pub(super) client: Client,
    pub(super) owner: Option<&'a Owner>,
    pub(super) frontend: &'a ListedFrontend,
}

/// A backend that the flow may go to.
pub(super) struct Candidate {
    listed: ListedBackend,
    /// Probability that the flow gets this backend, from 0 to 1.
    share: f64,
}

impl<S: Source> Tracer<'_, S> {
    /// Reports where the maps differ from the agent's intent.
    pub(super) fn compare(&mut self) {
        let difference = match self.owner {
            None => Some(format!(
                "the agent knows of no service at {}",
                self.flow.destination
            )),
            Some(owner) => owner.difference(self.hook.origin(), &self.frontend.entry, self.pool()),
        };
        self.differences.extend(difference);
    }

    fn pool(&self) -> &[ListedBackend] {
        self.frontend.pool(self.hook.origin())
    }

    fn is_port_known(&self) -> bool {
        self.flow.source.port() != 0
    }

    pub(super) fn known_flow(&self) -> Result<Option<Stay>, Refusal> {
        if !self.is_port_known() {
            return Ok(None);
        }
        if self.hook == TraceHook::Socket {
            let entry = &self.frontend.entry;
            let facts = self.kernel.known_socket(&self.flow, entry)?;
            return Ok(facts.map(|facts| stay::socket(&self.flow, &facts)));
        }
        let facts = self.kernel.known_flow(self.hook, &self.flow)?;
        Ok(facts.map(|facts| stay::flow(&self.flow, &facts)))
    }

    pub(super) fn affinity(&self) -> Result<Option<Stay>, Refusal> {
        let entry = &self.frontend.entry;
        let facts = self.kernel.client(self.hook, &self.client, entry)?;
        Ok(facts.map(|facts| stay::client(entry, &facts)))
    }

    pub(super) fn ranges(&self) -> Result<Option<TracedRanges>, Refusal> {
        let entry = &self.frontend.entry;
        if entry.flags & FRONTEND_RESTRICTED == 0 {
            return Ok(None);
        }
        let maps = &self.kernel.maps;
        let mut ranges = maps.source_ranges()?;
        Ok(Some(TracedRanges {
            ranges: ranges.remove(&entry.service).unwrap_or_default(),
            admitted: maps.is_in_range(self.client.source, entry.service)?,
        }))
    }

    /// Why the flow reaches no backend. Checks the conditions in the programs' order; they do not apply to known flows.
    pub(super) fn refused(
        &self,
        stay: Option<&Stay>,
        ranges: Option<&TracedRanges>,
    ) -> Option<Refused> {
        if stay.is_some_and(|stay| stay.traced.stays) {
            return None;
        }
        if ranges.is_some_and(|ranges| !ranges.admitted) {
            return Some(Refused::SourceRange);
        }
        let entry = &self.frontend.entry;
        let origin = self.hook.origin();
        match (entry.pool(origin).len, entry.drops(origin)) {
            (0, false) => Some(Refused::NoBackend),
            (0, true) => Some(Refused::NoLocalBackend),
            _ => None,
        }
    }

    /// The backends that the flow may go to.
    pub(super) fn candidates(
        &self,
        stay: Option<&Stay>,
        affinity: Option<&Stay>,
        reasons: &mut Vec<String>,
    ) -> Result<Vec<Candidate>, Refusal> {
        let stays = [
            (stay, "the flow is known and keeps its backend"),
            (affinity, "the client stays with its backend"),
        ];
        for (stay, reason) in stays {
            if let Some(stay) = stay.filter(|stay| stay.traced.stays) {
                reasons.push(reason.to_owned());
                return self.only(stay.index, stay.traced.backend);
            }
        }
        let entry = &self.frontend.entry;
        if entry.algorithm == ALGORITHM_MAGLEV {
            match self.kernel.by_maglev(self.hook, &self.flow, entry)? {
                Some(index) => {
                    reasons.push("the Maglev table selects this backend for the flow".to_owned());
                    reasons.extend(self.taken(index)?);
                    return self.only(index, None);
                }
                None if self.hook == TraceHook::Socket => reasons.push(
                    "Maglev hashes the socket's cookie, which is not known in advance: any of these"
                        .to_owned(),
                ),
                None => {}
            }
        }
        let listed = self.pool().iter();
        Ok(listed
            .map(|listed| Candidate {
                listed: *listed,
                share: listed.share,
            })
            .collect())
    }

    /// Why the backend sees a different source port: the client already has a connection to the backend with these
    /// ports.
    fn taken(&self, index: u32) -> Result<Option<String>, Refusal> {
        if !self.flow.is_tcp() || !self.is_port_known() {
            return Ok(None);
        }
        let Some(backend) = self.kernel.maps.backend(index)? else {
            return Ok(None);
        };
        let to = kernel::address(&backend);
        let is_open = self.kernel.is_open(self.hook, &self.flow, to)?;
        Ok(is_open.then(|| {
            format!(
                "the client already has a connection to {to} from this port, so the backend sees another port"
            )
        }))
    }

    /// The backend at an index as the only candidate. A known flow goes to the address in its entry, even if another
    /// backend has that index now.
    fn only(&self, index: u32, kept: Option<SocketAddr>) -> Result<Vec<Candidate>, Refusal> {
        let found = self.kernel.maps.backend(index)?.unwrap_or_default();
        let entry = match kept {
            Some(kept) if kernel::address(&found) != kept => Backend {
                addr: kept.ip().into(),
                port_be: kept.port().to_be(),
                service: self.frontend.entry.service,
                ..Backend::default()
            },
            _ => found,
        };
        let listed = ListedBackend {
            index,
            entry,
            share: 1.0,
        };
        Ok(vec![Candidate { listed, share: 1.0 }])
    }

    pub(super) fn backend(
        &mut self,
        candidate: &Candidate,
        source: &TracedSource,
    ) -> Result<TracedBackend, Refusal> {
        let Candidate { listed, share } = candidate;
        let address = listed.address();
        let known = self.owner.and_then(|owner| owner.backend(address));
        let endpoint = self.kernel.pinned.endpoint(address.ip())?;
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
            name: endpoint.and_then(|info| ends::name_of(self.source, info.id)),
            egress: None,
            ingress: None,
            problem: self.problem(listed)?,
        };
        if traced.problem.is_none() {
            let judge = policy::Judge {
                source: self.source,
                kernel: self.kernel,
                client: source,
            };
            if source.kind == SourceKind::Endpoint {
                traced.egress = Some(judge.egress(&to, self.differences)?);
            }
            if let Some(info) = &endpoint {
                traced.ingress = Some(judge.ingress(&to, info, self.differences)?);
            }
        }
        Ok(traced)
    }

    /// Why the flow does not reach its chosen backend.
    fn problem(&self, listed: &ListedBackend) -> Result<Option<String>, Refusal> {
        if listed.entry.service == 0 {
            let index = listed.index;
            return Ok(Some(format!("the programs have no backend {index}")));
        }
        let has_other_port = listed.address().port() != self.flow.destination.port();
        if self.hook.has_packets() && has_other_port && !can_change_port(self.flow.protocol) {
            let protocol = Protocol(self.flow.protocol);
            return Ok(Some(format!(
                "{protocol} can reach only backends at the service's port"
            )));
        }
        match self.hook {
            TraceHook::Uplink => self.kernel.unreachable(&listed.entry, &self.frontend.entry),
            TraceHook::Socket | TraceHook::Endpoint => Ok(None),
        }
    }
}
