//! The health endpoint in the list of endpoints. The agent creates and repairs the health endpoint and reports its
//! findings, from which the manager derives the shown state.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use health_model::api::{Endpoint, EndpointHealth, EndpointSettings, Enforcement, HealthState};
use health_model::identity::Identity;
use health_model::ipam::{Family, IpamError, Owner};
use jiff::Timestamp;

use super::Manager;
use super::table::Table;
use crate::health::{DEVICE, HealthDescription, INNER_DEVICE};
use crate::lifecycle::{Lifecycle, Side, State};
use crate::log::Status;

/// The health endpoint's name as an owner of addresses.
const NAME: &str = "health";

/// The state of the health endpoint after the agent's repairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthReport {
    /// The endpoint's description.
    pub endpoint: HealthDescription,
    /// Repairs since the last report, in words.
    pub repaired: Vec<String>,
    /// Repairs since the agent's start, by cause.
    pub repairs: BTreeMap<String, u64>,
    /// Why the endpoint is not connected: faults of its devices, addresses, routes and responder.
    pub connection_problem: Option<String>,
    /// The faults of the endpoint's programs.
    pub program_problem: Option<String>,
}

impl HealthReport {
    /// Describes all faults.
    fn problem(&self) -> Option<String> {
        let problems: Vec<&str> = [&self.connection_problem, &self.program_problem]
            .into_iter()
            .filter_map(Option::as_deref)
            .collect();
        (!problems.is_empty()).then(|| problems.join("; "))
    }
}

/// The health endpoint as last reported.
#[derive(Debug)]
pub(super) struct HealthEntry {
    report: HealthReport,
    lifecycle: Lifecycle,
    /// The first hops of the endpoint's packets: the IPv4 gateway and the IPv6 gateway.
    gateways: [Option<IpAddr>; 2],
    shown: Arc<Endpoint>,
}

impl HealthEntry {
    fn new(report: HealthReport, gateways: [Option<IpAddr>; 2], now: Timestamp) -> Self {
        let mut lifecycle = Lifecycle::created(now, "the agent has started");
        lead(&mut lifecycle, &report, now, "created or adopted");
        Self {
            shown: show(&report, gateways, lifecycle.state()),
            report: HealthReport {
                repaired: Vec::new(),
                ..report
            },
            lifecycle,
            gateways,
        }
    }

    pub(super) fn id(&self) -> u16 {
        self.report.endpoint.id
    }

    pub(super) fn lifecycle(&self) -> &Lifecycle {
        &self.lifecycle
    }

    pub(super) fn shown(&self) -> Arc<Endpoint> {
        self.shown.clone()
    }

    /// Records a report. Returns whether this changes how the endpoint is shown.
    fn note(&mut self, mut report: HealthReport, now: Timestamp) -> bool {
        if report == self.report {
            return false;
        }
        let (before, problem) = (self.report.problem(), report.problem());
        if !report.repaired.is_empty() {
            let why = report.repaired.join("; ");
            lead(&mut self.lifecycle, &report, now, &why);
        } else if problem != before {
            let why = problem.as_deref().unwrap_or("in order again");
            lead(&mut self.lifecycle, &report, now, why);
        }
        self.shown = show(&report, self.gateways, self.lifecycle.state());
        // The next check does not report these repairs again.
        report.repaired.clear();
        self.report = report;
        true
    }

    pub(super) fn health(&self) -> EndpointHealth {
        let of = |is_well: bool| match is_well {
            true => HealthState::Ok,
            false => HealthState::Failure,
        };
        let report = &self.report;
        let is_connected = report.connection_problem.is_none();
        let has_programs = report.program_problem.is_none();
        EndpointHealth {
            overall_health: of(is_connected && has_programs),
            bpf: of(has_programs),
            policy: match report.endpoint.has_policy {
                true => HealthState::Ok,
                false => HealthState::Disabled,
            },
            connected: is_connected,
        }
    }
}

/// Takes the endpoint through a regeneration with the result given in the report.
fn lead(lifecycle: &mut Lifecycle, report: &HealthReport, now: Timestamp, why: &str) {
    // All these transitions are allowed from the states between two reports; the endpoint may already be waiting.
    let _ = lifecycle.set(Side::Manager, State::WaitingToRegenerate, now, why);
    let _ = lifecycle.set(Side::Builder, State::Regenerating, now, why);
    match report.problem() {
        None => {
            let _ = lifecycle.set(
                Side::Builder,
                State::Ready,
                now,
                &format!("regenerated: {why}"),
            );
        }
        Some(problem) => {
            let message = format!("not regenerated: {problem}");
            lifecycle.note(now, Status::Failure, message);
            let again = "will retry";
            let _ = lifecycle.set(Side::Manager, State::WaitingToRegenerate, now, again);
        }
    }
}

fn show(report: &HealthReport, gateways: [Option<IpAddr>; 2], state: State) -> Arc<Endpoint> {
    let endpoint = &report.endpoint;
    let enforcement = match endpoint.has_policy {
        true => Enforcement::Enabled,
        false => Enforcement::Disabled,
    };
    let labels = Identity::HEALTH.reserved_labels().unwrap_or_default();
    Arc::new(Endpoint {
        id: endpoint.id,
        name: None,
        container_id: None,
        pod: None,
        network: None,
        identity: Identity::HEALTH.0,
        labels: labels.iter().map(ToString::to_string).collect(),
        policy_ingress: enforcement,
        policy_egress: enforcement,
        settings: EndpointSettings::default(),
        ipv4: endpoint.ipv4.map(IpAddr::from),
        ipv6: endpoint.ipv6.map(IpAddr::from),
        gateway4: gateways[0].filter(|_| endpoint.ipv4.is_some()),
        gateway6: gateways[1].filter(|_| endpoint.ipv6.is_some()),
        state: state.text().to_owned(),
        reason: report.problem(),
        ready: None,
        interface: DEVICE.to_owned(),
        ifindex: endpoint.ifindex,
        inner_interface: INNER_DEVICE.to_owned(),
        mac: endpoint.mac.to_string(),
        host_mac: endpoint.host_mac.to_string(),
        netns: endpoint.netns.display().to_string(),
        repairs: report.repairs.clone(),
    })
}

impl Table {
    /// Records a report on the health endpoint. Returns whether this changes how it is shown. Fails if the endpoint has
    /// an address that this node may not assign.
    fn note_health(&mut self, report: HealthReport, at: Timestamp) -> Result<bool, IpamError> {
        let known = self.health.as_ref().map(|known| &known.report.endpoint);
        let claimed = match known {
            Some(known) if known.has_same_addresses(&report.endpoint) => Ok(()),
            known => {
                if let Some(former) = known.map(|known| known.id) {
                    self.ipam.release(former, Instant::now());
                }
                self.claim_health(&report.endpoint)
            }
        };
        let is_news = match &mut self.health {
            Some(known) => known.note(report, at),
            None => {
                let gateways = Family::ALL.map(|family| self.ipam.gateway(family));
                self.health = Some(HealthEntry::new(report, gateways, at));
                true
            }
        };
        claimed.map(|()| is_news)
    }

    fn claim_health(&mut self, endpoint: &HealthDescription) -> Result<(), IpamError> {
        let owner = Owner {
            endpoint: endpoint.id,
            name: NAME.to_owned(),
        };
        let mut claimed = Ok(());
        for address in endpoint.addresses() {
            claimed = claimed.and(self.ipam.claim(address, owner.clone()));
        }
        claimed
    }
}

impl Manager {
    /// Records a report on the health endpoint. From now on, no other endpoint gets its addresses. Fails if this node
    /// may not assign one of those addresses.
    pub fn note_health(&self, report: HealthReport) -> Result<(), IpamError> {
        let now = self.now();
        let noted = self.table().note_health(report, now);
        if !matches!(noted, Ok(false)) {
            self.note_change();
        }
        noted.map(drop)
    }
}
