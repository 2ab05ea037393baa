//! The manager's records of its endpoints, under one lock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use health_model::api::{Endpoint, EndpointHealth, EndpointSettings, Enforcement, HealthState};
use health_model::identity::Identity;
use health_model::ipam::{Family, NodeIpam, Owner};
use health_net::netns::{self, NetNsId};
use jiff::Timestamp;

use super::Selector;
use super::departed::DepartedEndpoints;
use super::health::HealthEntry;
use crate::error::EndpointError;
use crate::health::ENDPOINT_IDS;
use crate::identities::Hold;
use crate::lifecycle::{Lifecycle, RefusedTransition, Side, State};
use crate::log::{LogEntry, Status};
use crate::queue::RegenerationQueue;
use crate::regenerate::{RealizedPolicy, RegenerationError};
use crate::workload::SavedEndpoint;

/// Upper bounds of the histogram of regeneration times, in seconds.
pub const DURATION_BOUNDS: [f64; 8] = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0];

/// Maximum number of endpoints that a summary names.
const NAMED: usize = 3;

/// Describes the policy in force for an endpoint whose labels have no identity.
pub(super) const NO_IDENTITY: &str =
    "its labels have no identity yet, so only traffic allowed for reserved:init passes";

/// Number of endpoints per state, and statistics of regenerations since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// Number of endpoints per state, without deleted ones.
    pub states: BTreeMap<State, u64>,
    /// Number of regenerations that succeeded.
    pub succeeded: u64,
    /// Number of regenerations that failed.
    pub failed: u64,
    /// Total duration of the regenerations.
    pub duration: Duration,
    /// Histogram of durations: one bucket each up to 1, 5, 10, 50, 100 and 500 ms, 1 and 5 s, and one for the rest.
    pub durations: [u64; DURATION_BOUNDS.len() + 1],
}

/// The record of an endpoint.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) saved: SavedEndpoint,
    pub(super) lifecycle: Lifecycle,
    /// The policy in force.
    pub(super) realized: Option<RealizedPolicy>,
    /// The settings with which the policy in force was built.
    pub(super) settings_in_force: Option<EndpointSettings>,
    /// Number of consecutive failed regenerations.
    pub(super) failures: u32,
    /// Why the last regeneration failed, or why the endpoint cannot be deleted.
    pub(super) problem: Option<String>,
    /// Whether the creation of the endpoint was completed.
    pub(super) is_complete: bool,
    /// Whether the endpoint is kept although its device was not found at the start; nothing serves it.
    pub(super) is_lost: bool,
    /// Whether a task is removing the endpoint.
    pub(super) is_being_removed: bool,
    /// Whether the host's end of the pair was up at the last check.
    pub(super) is_up: bool,
    /// The faults of the endpoint's devices that could not be repaired.
    pub(super) device_problem: Option<String>,
    /// Repairs of the endpoint's devices, by cause.
    pub(super) repairs: BTreeMap<String, u64>,
    /// Whether all containers behind the endpoint can serve; `None` if none is probed.
    pub(super) ready: Option<bool>,
    /// Whether the policy in force was built without an identity for the endpoint's labels.
    pub(super) is_closed: bool,
    /// Why there is no identity for the endpoint's labels yet.
    pub(super) identity_problem: Option<String>,
    /// Why the endpoint lacks labels of its pod.
    pub(super) pod_problem: Option<String>,
    /// Whether a task is requesting the endpoint's identity.
    pub(super) is_resolving: bool,
    /// Whether the store has since given the labels another identity than the last acquired one.
    pub(super) is_renumbered: bool,
    /// Holds from the identity source: on the identity in use, and on identities that packets may still meet.
    pub(super) held: Vec<Hold>,
    /// The first hops of the endpoint's packets: the IPv4 gateway and the IPv6 gateway.
    gateways: [Option<IpAddr>; 2],
    /// The endpoint as shown, cached until it changes.
    shown: OnceLock<Arc<Endpoint>>,
}

impl Entry {
    pub(super) fn new(saved: SavedEndpoint, lifecycle: Lifecycle, ipam: &NodeIpam) -> Self {
        Self {
            saved,
            gateways: Family::ALL.map(|family| ipam.gateway(family)),
            lifecycle,
            realized: None,
            settings_in_force: None,
            failures: 0,
            problem: None,
            is_complete: false,
            is_lost: false,
            is_being_removed: false,
            is_up: true,
            device_problem: None,
            repairs: BTreeMap::new(),
            ready: None,
            is_closed: false,
            identity_problem: None,
            pod_problem: None,
            is_resolving: false,
            is_renumbered: false,
            held: Vec::new(),
            shown: OnceLock::new(),
        }
    }

    pub(super) fn state(&self) -> State {
        self.lifecycle.state()
    }

    /// Whether the datapath of the previous agent still serves the endpoint.
    fn is_former(&self) -> bool {
        self.is_complete && !self.is_lost && self.realized.is_none()
    }

    /// Records that the endpoint's device was not found at the start, and why.
    pub(super) fn lose(&mut self, now: Timestamp, why: &str) {
        let reason = format!(
            "{why}; many endpoints are affected, so this one is kept until it is deleted or an agent finds its device"
        );
        self.note(now, Status::Failure, reason.clone());
        self.problem = Some(reason);
        self.is_lost = true;
        self.is_up = false;
    }

    /// Changes the state; logs the refusal of a forbidden transition.
    pub(super) fn set(
        &mut self,
        side: Side,
        to: State,
        now: Timestamp,
        reason: &str,
    ) -> Result<(), RefusedTransition> {
        self.touch();
        self.lifecycle.set(side, to, now, reason)
    }

    pub(super) fn note(&mut self, now: Timestamp, status: Status, message: impl Into<String>) {
        self.lifecycle.note(now, status, message);
    }

    /// Must be called after every change that is shown.
    pub(super) fn touch(&mut self) {
        self.shown = OnceLock::new();
    }

    pub(super) fn shown(&self) -> Arc<Endpoint> {
        self.shown.get_or_init(|| Arc::new(self.show())).clone()
    }

    fn show(&self) -> Endpoint {
        let saved = &self.saved;
        let enforcement = |enforces: fn(&RealizedPolicy) -> bool| match &self.realized {
            Some(realized) if enforces(realized) => Enforcement::Enabled,
            Some(_) => Enforcement::Disabled,
            None => Enforcement::Unknown,
        };
        let labels = match saved.labels.is_empty() {
            true => Identity::INIT.reserved_labels().unwrap_or_default(),
            false => saved.labels.clone(),
        };
        Endpoint {
            id: saved.id,
            name: saved.name.clone(),
            container_id: saved.container_id.clone(),
            pod: saved.pod.clone(),
            network: saved.network.clone(),
            identity: saved.identity.0,
            labels: labels.iter().map(ToString::to_string).collect(),
            policy_ingress: enforcement(|realized| realized.enforces_ingress),
            policy_egress: enforcement(|realized| realized.enforces_egress),
            settings: saved.settings,
            ipv4: saved.ipv4.map(IpAddr::from),
            ipv6: saved.ipv6.map(IpAddr::from),
            gateway4: self.gateways[0].filter(|_| saved.has_default_route && saved.ipv4.is_some()),
            gateway6: self.gateways[1].filter(|_| saved.has_default_route && saved.ipv6.is_some()),
            state: self.state().text().to_owned(),
            reason: self.reason(),
            ready: self.ready,
            interface: saved.device.clone(),
            ifindex: saved.ifindex.unwrap_or_default(),
            inner_interface: saved.ifname.clone(),
            mac: saved.mac.to_string(),
            host_mac: saved.host_mac.to_string(),
            netns: saved.netns.display().to_string(),
            repairs: self.repairs.clone(),
        }
    }

    /// Returns why the endpoint is not in order, if known.
    pub(super) fn reason(&self) -> Option<String> {
        if self.saved.lacks_identity()
            && let Some(problem) = &self.identity_problem
        {
            return Some(format!("{NO_IDENTITY}: {problem}"));
        }
        self.problem.clone().or_else(|| self.missing_labels())
    }

    /// Returns which labels the endpoint lacks.
    fn missing_labels(&self) -> Option<String> {
        let pod_problem = self.pod_problem.clone();
        pod_problem.or_else(|| self.saved.awaited_labels())
    }

    fn health(&self) -> EndpointHealth {
        let policy = match &self.realized {
            Some(realized) if realized.enforces_ingress || realized.enforces_egress => {
                HealthState::Ok
            }
            Some(_) => HealthState::Disabled,
            None => HealthState::Bootstrap,
        };
        let (overall, bpf, policy) = match (self.state(), &self.problem, &self.realized) {
            (State::Disconnecting | State::Disconnected, ..) => (
                HealthState::Disabled,
                HealthState::Disabled,
                HealthState::Disabled,
            ),
            (_, Some(_), Some(_)) => (HealthState::Warning, HealthState::Warning, policy),
            (_, Some(_), None) => (HealthState::Failure, HealthState::Failure, policy),
            (State::Ready, ..) => (HealthState::Ok, HealthState::Ok, policy),
            (State::Restoring, ..) => (HealthState::Bootstrap, HealthState::Bootstrap, policy),
            (_, None, _) => (HealthState::Pending, HealthState::Pending, policy),
        };
        let is_ending = self.state().is_ending();
        let is_well = self.is_up && self.device_problem.is_none();
        EndpointHealth {
            overall_health: match is_well || is_ending {
                true => overall,
                false => HealthState::Failure,
            },
            bpf,
            policy,
            connected: self.is_complete && is_well && !is_ending,
        }
    }
}

/// All endpoints, their addresses and their regenerations.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) entries: BTreeMap<u16, Entry>,
    pub(super) departed: DepartedEndpoints,
    pub(super) ipam: NodeIpam,
    pub(super) queue: RegenerationQueue,
    /// Whether endpoints of the previous agent must wait before they are built.
    pub(super) holds_back: bool,
    /// The health endpoint, which the agent creates and repairs.
    pub(super) health: Option<HealthEntry>,
    /// Repairs of endpoints' devices, by cause.
    pub(super) repairs: BTreeMap<String, u64>,
    counts: Counts,
}

impl Table {
    pub(super) fn new(ipam: NodeIpam, parallel: usize) -> Self {
        Self {
            entries: BTreeMap::new(),
            departed: DepartedEndpoints::default(),
            ipam,
            queue: RegenerationQueue::new(parallel),
            holds_back: false,
            health: None,
            repairs: BTreeMap::new(),
            counts: Counts::default(),
        }
    }

    /// Returns the id of the health endpoint, if there is one.
    fn health_id(&self) -> Option<u16> {
        self.health.as_ref().map(HealthEntry::id)
    }

    /// Returns the health endpoint, if this is its id.
    fn health_at(&self, id: u16) -> Option<&HealthEntry> {
        self.health.as_ref().filter(|health| health.id() == id)
    }

    /// Returns a free id; if possible, not that of a deleted endpoint that is still shown.
    pub(super) fn free_id(&mut self, rng: &mut impl rand::Rng) -> Result<u16, EndpointError> {
        let health = self.health_id();
        let is_free = |id: &u16| {
            Some(*id) != health
                && !self.entries.contains_key(id)
                && self.departed.get(*id).is_none()
        };
        let count = ENDPOINT_IDS.filter(is_free).count();
        if count == 0 {
            return self.departed.forget_first().ok_or(EndpointError::NoIds);
        }
        let place = rng.random_range(0..count);
        let id = ENDPOINT_IDS.filter(is_free).nth(place);
        id.ok_or(EndpointError::NoIds)
    }

    /// Returns the ids of the selected endpoints.
    pub(super) fn matching(&self, selector: &Selector) -> Result<Vec<u16>, EndpointError> {
        let is_meant = |entry: &&Entry| match selector {
            Selector::Id(id) => entry.saved.id == *id,
            Selector::Container(id) => entry.saved.container_id.as_ref() == Some(id),
            Selector::Attachment {
                container_id,
                ifname,
            } => entry.saved.is_of(container_id, ifname),
            // The caller may give the path through a link, such as `/var/run/netns`.
            Selector::Netns(path) => {
                let there = &entry.saved.netns;
                there == path || netns::resolved(there) == netns::resolved(path)
            }
        };
        match selector {
            Selector::Id(id) if Some(*id) == self.health_id() => Err(EndpointError::Health(*id)),
            _ => {
                let meant = self.entries.values().filter(is_meant);
                Ok(meant.map(|entry| entry.saved.id).collect())
            }
        }
    }

    /// Returns the endpoint with this id, if it exists and is not being deleted.
    pub(super) fn living(&mut self, id: u16) -> Result<&mut Entry, EndpointError> {
        if Some(id) == self.health_id() {
            return Err(EndpointError::Health(id));
        }
        match self.entries.get_mut(&id) {
            Some(entry) if entry.state().is_ending() => Err(EndpointError::Deleted(id)),
            Some(entry) => Ok(entry),
            None => Err(EndpointError::NotFound(id)),
        }
    }

    /// Returns the endpoints that are being deleted, with the reason if the deletion failed.
    pub(super) fn leaving(&self) -> BTreeMap<u16, Option<String>> {
        let entries = self.entries.iter();
        let leaving = entries.filter(|(_, entry)| entry.state().is_ending());
        leaving
            .map(|(id, entry)| (*id, entry.problem.clone()))
            .collect()
    }

    /// Returns the endpoint to which a namespace's default routes lead, and its device there.
    pub(super) fn default_route_in(&self, netns_id: NetNsId) -> Option<(u16, String)> {
        let mut entries = self.entries.values();
        let found = entries.find(|entry| {
            let saved = &entry.saved;
            saved.netns_id == netns_id && saved.has_default_route && !entry.state().is_ending()
        });
        found.map(|entry| (entry.saved.id, entry.saved.ifname.clone()))
    }

    /// Requests the regeneration of an endpoint. Requests for a taken-over endpoint have no effect until it may be
    /// built; an endpoint that is being created comes first.
    pub(super) fn push(&mut self, id: u16, reason: &str) {
        match self.entries.get(&id) {
            Some(entry) if entry.is_lost => {}
            Some(entry) if entry.is_former() && self.holds_back => {}
            Some(entry) if !entry.is_complete => self.queue.push_first(id, reason),
            _ => self.queue.push(id, reason),
        }
    }

    /// Requests builds of the taken-over endpoints.
    pub(super) fn take_over(&mut self) {
        self.holds_back = false;
        for id in self.former() {
            self.push(id, "restored");
        }
    }

    /// Logs to the taken-over endpoints why they are not built yet.
    pub(super) fn note_held_back(&mut self, reason: &RegenerationError, now: Timestamp) {
        for id in self.former() {
            if let Some(entry) = self.entries.get_mut(&id) {
                let message = format!("its previous policy stays in force: {reason}");
                entry.note(now, Status::Warning, message);
            }
        }
    }

    fn former(&self) -> Vec<u16> {
        let entries = self.entries.iter();
        let former = entries.filter(|(_, entry)| entry.is_former());
        former.map(|(id, _)| *id).collect()
    }

    /// Requests regenerations.
    pub(super) fn request(&mut self, ids: Option<&BTreeSet<u16>>, now: Timestamp, reason: &str) {
        let is_meant = |id: u16| ids.is_none_or(|ids| ids.contains(&id));
        let mut asked = Vec::new();
        for (id, entry) in &mut self.entries {
            // The first request for an endpoint comes once it has devices.
            let is_built = entry.saved.ifindex.is_some();
            if !is_meant(*id) || !is_built || entry.is_lost || entry.state().is_ending() {
                continue;
            }
            // The previous agent's programs serve a restoring endpoint until its first build takes over. An endpoint
            // that waits for an identity continues with its current one.
            if !matches!(entry.state(), State::Restoring | State::WaitingForIdentity) {
                // The endpoint may already be waiting.
                let _ = entry.set(Side::Manager, State::WaitingToRegenerate, now, reason);
            }
            asked.push(*id);
        }
        for id in asked {
            self.push(id, reason);
        }
    }

    pub(super) fn note_regeneration(&mut self, succeeded: bool, took: Duration) {
        let counts = &mut self.counts;
        match succeeded {
            true => counts.succeeded += 1,
            false => counts.failed += 1,
        }
        counts.duration += took;
        let seconds = took.as_secs_f64();
        let bucket = DURATION_BOUNDS.iter().position(|bound| seconds <= *bound);
        counts.durations[bucket.unwrap_or(DURATION_BOUNDS.len())] += 1;
    }

    pub(super) fn shown(&self) -> Vec<Arc<Endpoint>> {
        let health = self.health.iter().map(HealthEntry::shown);
        let living = self.entries.values().map(Entry::shown);
        health.chain(living).chain(self.departed.shown()).collect()
    }

    pub(super) fn log(&self, id: u16) -> Option<Vec<LogEntry>> {
        let lifecycle = match self.health_at(id) {
            Some(health) => health.lifecycle(),
            None => &self.known(id)?.lifecycle,
        };
        Some(lifecycle.log().iter().cloned().collect())
    }

    pub(super) fn health(&self, id: u16) -> Option<EndpointHealth> {
        match self.health_at(id) {
            Some(health) => Some(health.health()),
            None => self.known(id).map(Entry::health),
        }
    }

    /// Returns the endpoint with this id, even if it was recently deleted.
    fn known(&self, id: u16) -> Option<&Entry> {
        self.entries.get(&id).or_else(|| self.departed.get(id))
    }

    pub(super) fn counts(&self) -> Counts {
        let mut counts = self.counts.clone();
        let of_living = State::ALL
            .into_iter()
            .filter(|state| *state != State::Disconnected);
        counts.states = of_living.map(|state| (state, 0)).collect();
        for entry in self.entries.values() {
            *counts.states.entry(entry.state()).or_default() += 1;
        }
        counts
    }

    /// Describes which endpoints wait for something that the operator should know about, and for what.
    pub(super) fn problem(&self) -> Option<String> {
        let closed = self.waiting(|entry| {
            let is_closed = entry.saved.lacks_identity() && entry.identity_problem.is_some();
            is_closed && !entry.state().is_ending()
        });
        let lost = self.waiting(|entry| entry.is_lost && !entry.state().is_ending());
        let unlabelled =
            self.waiting(|entry| entry.missing_labels().is_some() && !entry.state().is_ending());
        let all = lost.into_iter().chain(closed).chain(unlabelled);
        let all = all.map(|(ids, reason)| format!("endpoint {ids}: {reason}"));
        all.reduce(|first, second| format!("{first}; {second}"))
    }

    /// Returns the ids of the matching endpoints (only the first few if there are many), and why the first of them
    /// waits.
    fn waiting(&self, is_meant: impl Fn(&Entry) -> bool) -> Option<(String, String)> {
        let meant: Vec<&Entry> = self.entries.values().filter(|one| is_meant(one)).collect();
        let reason = meant.first()?.reason().unwrap_or_default();
        let ids: Vec<String> = meant
            .iter()
            .take(NAMED)
            .map(|one| one.saved.id.to_string())
            .collect();
        let more = meant.len().saturating_sub(NAMED);
        let ids = match more {
            0 => ids.join(", "),
            more => format!("{} and {more} more", ids.join(", ")),
        };
        Some((ids, reason))
    }

    /// Reclaims addresses whose endpoint is gone, and returns them with their previous owners.
    pub(super) fn take_back_leaks(&mut self, now: Instant) -> Vec<(IpAddr, Owner)> {
        let (entries, health) = (&self.entries, self.health_id());
        let leaks = self
            .ipam
            .leaks(|id| Some(id) == health || entries.contains_key(&id));
        for (address, _) in &leaks {
            self.ipam.release_address(*address, now);
        }
        leaks
    }
}
