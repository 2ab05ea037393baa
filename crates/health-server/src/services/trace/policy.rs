//! Policy for the flow: the programs' tables say whether it passes, and the agent's rules say why.

use health_common::endpoint::{
    ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, EndpointInfo, is_enforced,
};
use health_common::policy::{POLICY_EGRESS, POLICY_INGRESS, VERDICT_ALLOW};
use health_datapath::dump::PolicyQuery;
use health_datapath::services::Connection;
use health_model::api::{TracedPolicy, TracedSource};
use health_model::identity::Identity;
use health_model::policy::{Direction, L4, Protocol};
use health_policy::{Peer, TraceRequest};

use super::kernel::Kernel;
use crate::answer::Refusal;
use crate::policies::enforcement_of;
use crate::source::Source;

/// Judges packets of a client.
pub(super) struct Judge<'a, S> {
    pub(super) source: &'a S,
    pub(super) kernel: &'a Kernel,
    pub(super) client: &'a TracedSource,
}

/// One side of a packet's path.
struct Side {
    direction: Direction,
    /// The endpoint whose policy applies.
    endpoint: EndpointInfo,
    /// Identity of the other side.
    peer: u32,
}

impl<S: Source> Judge<'_, S> {
    /// Judges packets from the client, which is an endpoint of this node.
    pub(super) fn egress(
        &self,
        to: &Connection,
        differences: &mut Vec<String>,
    ) -> Result<TracedPolicy, Refusal> {
        if let Some(itself) = itself(to) {
            return Ok(itself);
        }
        let endpoint = self.kernel.pinned.endpoint(to.source.ip())?;
        let side = Side {
            direction: Direction::Egress,
            endpoint: endpoint.unwrap_or_default(),
            peer: self.kernel.pinned.identity_of(to.destination.ip())?,
        };
        self.judge(to, &side, differences)
    }

    /// Judges packets to a backend, which is this endpoint of this node.
    pub(super) fn ingress(
        &self,
        to: &Connection,
        endpoint: &EndpointInfo,
        differences: &mut Vec<String>,
    ) -> Result<TracedPolicy, Refusal> {
        if let Some(itself) = itself(to) {
            return Ok(itself);
        }
        let side = Side {
            direction: Direction::Ingress,
            endpoint: *endpoint,
            peer: self.client.identity,
        };
        self.judge(to, &side, differences)
    }

    fn judge(
        &self,
        to: &Connection,
        side: &Side,
        differences: &mut Vec<String>,
    ) -> Result<TracedPolicy, Refusal> {
        let allowed = self.passes(to, side)?;
        let EndpointInfo { id, policy, .. } = side.endpoint;
        let direction = match side.direction {
            Direction::Egress => "egress",
            Direction::Ingress => "ingress",
        };
        let verb = |allowed| if allowed { "allow" } else { "refuse" };
        let Some((meant, reason)) = self.reason(to, side) else {
            let reason = format!("according to policy table {policy}");
            return Ok(TracedPolicy { allowed, reason });
        };
        if meant == allowed {
            return Ok(TracedPolicy { allowed, reason });
        }
        let (does, means) = (verb(allowed), verb(meant));
        differences.push(format!(
            "the programs {does} {direction} of endpoint {id} for {}, but the rules {means} it: {reason}",
            to.destination
        ));
        let reason = format!("according to policy table {policy}, but not according to the rules");
        Ok(TracedPolicy { allowed, reason })
    }

    /// Whether the programs let the packet pass.
    fn passes(&self, to: &Connection, side: &Side) -> Result<bool, Refusal> {
        let (enforced, direction) = match side.direction {
            Direction::Egress => (ENDPOINT_ENFORCE_EGRESS, POLICY_EGRESS),
            Direction::Ingress => (ENDPOINT_ENFORCE_INGRESS, POLICY_INGRESS),
        };
        if !is_enforced(side.endpoint.flags, enforced) {
            return Ok(true);
        }
        let entry = self.kernel.pinned.policy_entry(PolicyQuery {
            table: side.endpoint.policy,
            direction,
            identity: side.peer,
            protocol: to.protocol,
            port: to.destination.port(),
        })?;
        Ok(entry.is_some_and(|entry| entry.verdict == VERDICT_ALLOW))
    }

    /// Whether the agent's rules let the packet pass, and why; `None` if the rules or the labels of one side are not
    /// known yet.
    fn reason(&self, to: &Connection, side: &Side) -> Option<(bool, String)> {
        let enforcer = self.source.enforcer()?;
        let identities = enforcer.identities();
        let labels = |identity: u32| identities.labels.get(&Identity(identity)).cloned();
        let own = (side.endpoint.identity, labels(side.endpoint.identity)?);
        let peer = (side.peer, labels(side.peer)?);
        let (source, destination) = match side.direction {
            Direction::Egress => (&own, &peer),
            Direction::Ingress => (&peer, &own),
        };
        let enforcement = enforcement_of(self.source, side.endpoint.id);
        let request = TraceRequest {
            source: Peer::new(Identity(source.0), &source.1),
            destination: Peer::new(Identity(destination.0), &destination.1),
            l4: L4::new(Protocol(to.protocol), to.destination.port()),
            only: Some(side.direction),
        };
        let trace = enforcer.trace(&request, [enforcement; 2]);
        let side = trace.sides.first()?;
        let reason = match side.enforcement.is_on() {
            true => side.decision.reason.to_string(),
            false => side.enforcement.to_string(),
        };
        Some((trace.passes, reason))
    }
}

/// An endpoint that is its own backend is not judged: its packets are turned around before policy applies.
fn itself(to: &Connection) -> Option<TracedPolicy> {
    (to.source.ip() == to.destination.ip()).then(|| TracedPolicy {
        allowed: true,
        reason: "the endpoint is its own backend".to_owned(),
    })
}
