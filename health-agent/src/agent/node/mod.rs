//! This node's health endpoint together with its datapath: created and repaired as one.

mod establish;
mod previous;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use health_common::LAYOUT_VERSION;
use health_common::addr::Addr;
use health_common::config::{DatapathConfig, SERVICES, SERVICES_HANDOVER};
use health_common::ct::Timeouts;
use health_common::service::direct::DirectConfig;
use health_common::siphash::SipKey;
use health_datapath::{Datapath, DatapathError, Hook};
use health_endpoint::health::{DEVICE, Fault, HealthEndpoint, HealthEndpointSpec, forwarding};
use health_endpoint::manager::HealthReport;
use health_mesh::hello::Responder;
use health_mesh::mesh_key::MeshKeys;
use health_model::causes::with_causes;
use health_model::ipam::Family;
use health_net::netlink::Handle;
use health_net::sysctl::Setting;
use health_net::{clock, link};
use tokio::sync::watch;
use tracing::info;

use self::previous::PreviousState;
use super::outcome::{CompletedRepair, EndpointOutcome, Outcome};
use super::uplinks::{UplinkSurvey, Uplinks};

/// Number of endpoints whose programs are checked in one pass: each check has a cost, and there may be very many
/// endpoints.
const WORKLOADS_AT_ONCE: usize = 32;

/// The health endpoint, the programs on its device and on the uplinks, and the responder in its namespace.
pub(super) struct NodeDatapath {
    /// `None` on a node without a health endpoint.
    pub(super) endpoint: Option<HealthEndpoint>,
    /// Next hops of endpoints' packets, for IPv4 and IPv6.
    pub(super) gateways: [Option<IpAddr>; 2],
    netlink: Handle,
    /// MTU of endpoints, in bytes.
    mtu: u32,
    datapath: Arc<Mutex<Datapath>>,
    pub(super) responder: Responder,
    pub(super) icmp_id: u16,
    /// Session number of the probes.
    pub(super) session: u32,
    pub(super) keys: MeshKeys,
    /// Offset of `CLOCK_TAI` from UTC when the programs were last configured.
    tai_offset_ns: u64,
    /// Number of repairs since the start, by cause.
    pub(super) repairs: BTreeMap<String, u64>,
    uplinks: Uplinks,
    /// The endpoint's specification.
    spec: HealthEndpointSpec,
    /// Whether the endpoint was built from `spec`.
    is_planned: bool,
    before: PreviousState,
    port: u16,
    /// Whether the endpoint's device exists. A foreign device with the same name must not be touched.
    has_device: bool,
    /// Flags of [`DatapathConfig`].
    flags: u16,
    /// Cookie of the host's network namespace if services are available to its sockets; otherwise 0.
    netns_cookie: u64,
    /// This process's thread group ID as the programs see it; 0 if no program handles sockets.
    agent_tgid: u32,
    timeouts: Timeouts,
    /// Whether settings, programs and responder match the current endpoint.
    is_followed: bool,
    /// Whether the responder is still in the namespace of an earlier endpoint.
    responder_is_elsewhere: bool,
    health_addresses: watch::Sender<Vec<IpAddr>>,
    left: LeftFaults,
}

/// Faults of the health endpoint that remained after the last check.
#[derive(Debug, Default)]
struct LeftFaults {
    faults: Vec<Fault>,
    /// The problem with the programs, in words.
    programs: Option<String>,
}

impl NodeDatapath {
    /// Locks the programs and maps.
    pub(super) fn datapath(&self) -> MutexGuard<'_, Datapath> {
        self.datapath.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Like [`datapath`](Self::datapath), but returns the mutex itself.
    pub(super) fn shared_datapath(&self) -> Arc<Mutex<Datapath>> {
        self.datapath.clone()
    }

    /// The health endpoint's current addresses, updated whenever they change.
    pub(super) fn health_addresses(&self) -> watch::Receiver<Vec<IpAddr>> {
        self.health_addresses.subscribe()
    }

    /// The endpoints' gateways.
    pub(super) fn gateways(&self) -> impl Iterator<Item = IpAddr> {
        self.gateways.into_iter().flatten()
    }

    /// MTU of endpoints, in bytes.
    pub(super) fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Names of the uplinks.
    pub(super) fn uplinks(&self) -> &[String] {
        &self.spec.uplinks
    }

    /// Adds addresses of the node: the devices that carry them become uplinks.
    pub(super) fn add_addresses(&mut self, addresses: &[IpAddr]) {
        self.uplinks.add_addresses(addresses);
    }

    /// Checks which uplinks exist. The repairs that follow apply the changes and do not depend on missing uplinks.
    pub(super) async fn look_at_uplinks(&mut self, outcome: &mut Outcome) -> anyhow::Result<()> {
        let UplinkSurvey {
            devices,
            unusable,
            missing,
        } = self.uplinks.look().await?;
        outcome.missing = missing;
        if devices != self.spec.uplinks {
            info!(uplinks = ?devices, "uplinks changed");
        }
        let spec = HealthEndpointSpec {
            unusable_addresses: unusable,
            mtu_device: devices.first().cloned(),
            uplinks: devices,
            ..self.spec.clone()
        };
        if spec != self.spec {
            self.spec = spec;
            self.is_planned = false;
        }
        Ok(())
    }

    /// Current faults of the health endpoint, if it exists.
    pub(super) async fn endpoint_faults(&self) -> anyhow::Result<Vec<Fault>> {
        match &self.endpoint {
            Some(endpoint) => Ok(endpoint.check().await?),
            None => Ok(Vec::new()),
        }
    }

    /// The faults as text, if they differ from those that remained after the last check.
    pub(super) fn news_of(&self, faults: &[Fault]) -> Option<String> {
        let texts: Vec<String> = faults.iter().map(ToString::to_string).collect();
        (!faults.is_empty() && *faults != *self.left.faults).then(|| texts.join("; "))
    }

    /// The problem with the programs that remained after the last check.
    pub(super) fn left_program_problem(&self) -> Option<String> {
        self.left.programs.clone()
    }

    /// Repairs the given faults of the health endpoint. If the device or the namespace was recreated, moves the
    /// programs and the responder there.
    pub(super) async fn repair_endpoint(
        &mut self,
        faults: Vec<Fault>,
        outcome: &mut Outcome,
    ) -> anyhow::Result<()> {
        if self.endpoint.is_none() {
            return self.repair_forwarding(outcome).await;
        }
        self.left.faults.clone_from(&faults);
        self.has_device = !faults.iter().any(is_lost);
        if !self.is_planned || !faults.is_empty() {
            let (endpoint, repaired) = HealthEndpoint::ensure(&self.spec).await?;
            for repair in &repaired {
                let cause = repair.0.cause();
                let what = repair.to_string();
                outcome.endpoint.repaired.push(what.clone());
                outcome.repaired.push(CompletedRepair { cause, what });
            }
            self.left.faults.clear();
            // An ifindex may be reused; a namespace is not.
            let is_same = |former: &HealthEndpoint| endpoint.netns().is_same(former.netns());
            self.responder_is_elsewhere |= !self.endpoint.as_ref().is_some_and(is_same);
            self.mtu = endpoint.mtu();
            self.endpoint = Some(endpoint);
            self.is_planned = true;
            self.has_device = true;
            self.is_followed = false;
        }
        if !self.is_followed {
            self.follow_endpoint(outcome)?;
            self.is_followed = true;
        }
        Ok(())
    }

    /// Replaces the health endpoint on a node without one: enables forwarding on the host and finds the MTU.
    async fn repair_forwarding(&mut self, outcome: &mut Outcome) -> anyhow::Result<()> {
        for setting in self.ensure_forwarding()? {
            outcome.repaired.push(CompletedRepair {
                cause: "sysctl-changed",
                what: format!("{} was not {}", setting.key, setting.value),
            });
        }
        if let Some(mtu) = mtu_of(&self.netlink, self.spec.mtu_device.as_deref()).await? {
            self.mtu = mtu;
        }
        self.is_planned = true;
        Ok(())
    }

    /// Enables forwarding on the host when no health endpoint does so. Returns the settings that were wrong.
    fn ensure_forwarding(&self) -> anyhow::Result<Vec<Setting>> {
        let families = Family::ALL.into_iter().zip(self.gateways);
        let families = families.filter_map(|(family, gateway)| gateway.map(|_| family));
        let spec = &self.spec;
        Ok(forwarding::ensure(
            &spec.state_dir,
            &spec.uplinks,
            families,
        )?)
    }

    /// Points the settings, the programs and the responder at the current endpoint.
    fn follow_endpoint(&mut self, outcome: &mut Outcome) -> anyhow::Result<()> {
        self.configure()?;
        // A later check finds and reattaches missing programs; the HTTP responder does not wait for them.
        let attached = self.datapath().attach(&self.hooks());
        if let Err(error) = attached {
            outcome.fail(error.into());
        }
        let Some(endpoint) = &self.endpoint else {
            return Ok(());
        };
        if self.responder_is_elsewhere {
            self.responder.replace(endpoint.listen(self.port)?)?;
            self.responder_is_elsewhere = false;
        }
        self.health_addresses.send_replace(addresses(endpoint));
        Ok(())
    }

    /// Repairs pins and attached programs.
    pub(super) fn repair_datapath(&mut self, outcome: &mut Outcome) -> anyhow::Result<()> {
        // The kernel learns of leap seconds when its clock is first set, and when a new one occurs.
        if clock::state()?.tai_offset_ns() != self.tai_offset_ns {
            self.configure()?;
        }
        let hooks = self.hooks();
        let mut datapath = self.datapath();
        if !datapath.pins_are_there() {
            for name in datapath.repair_pins()? {
                outcome.repaired.push(CompletedRepair {
                    cause: "pin-lost",
                    what: format!("the pin of {name} was removed"),
                });
            }
        }
        if hooks != datapath.hooks()
            && let Err(error) = datapath.attach(&hooks)
        {
            outcome.fail(error.into());
        }
        let faults = datapath.hook_faults();
        let of_workloads = datapath.workload_faults(WORKLOADS_AT_ONCE);
        for fault in faults.into_iter().chain(of_workloads) {
            match datapath.repair_hook(&fault) {
                Ok(()) => {
                    let what = fault.to_string();
                    if fault.hook().device == DEVICE {
                        outcome.endpoint.repaired.push(what.clone());
                    }
                    let cause = fault.cause();
                    outcome.repaired.push(CompletedRepair { cause, what });
                }
                // Everything is served without this program, so its failure does not slow down the other checks.
                Err(error) if fault.hook().is_optional() => {
                    outcome.slower = Some(with_causes(&error));
                }
                // A single missing device does not hold up the others.
                Err(error) => outcome.fail(error.into()),
            }
        }
        for fault in datapath.socket_faults() {
            match datapath.repair_sockets(fault) {
                Ok(()) => outcome.repaired.push(CompletedRepair {
                    cause: fault.cause(),
                    what: fault.to_string(),
                }),
                Err(error) => outcome.fail(error.into()),
            }
        }
        // Without XDP hooks, the last call of `attach` left no devices to keep up to date.
        if hooks.iter().any(Hook::is_optional) {
            datapath.note_xdp_devices()?;
        }
        outcome.without_programs = datapath.workloads_without_programs();
        Ok(())
    }

    /// Detaches the programs from a foreign device that replaced the health endpoint's device during repairs. The
    /// foreign device may even have the same ifindex: the kernel reuses the ifindex of a device that came from another
    /// namespace.
    pub(super) async fn release_foreign_device(&mut self) -> anyhow::Result<()> {
        if self.has_device && self.endpoint_faults().await?.iter().any(is_lost) {
            self.has_device = false;
            let hooks = self.hooks();
            self.datapath().attach(&hooks)?;
        }
        Ok(())
    }

    /// Records what is wrong with the health endpoint's programs after all repairs.
    pub(super) fn note_programs(&mut self, outcome: &mut Outcome) {
        // If nothing failed, all programs are in place.
        self.left.programs = outcome
            .failure
            .as_ref()
            .and_then(|_| self.program_problem());
        outcome
            .endpoint
            .program_problem
            .clone_from(&self.left.programs);
    }

    /// What is wrong with the health endpoint's programs, in words.
    fn program_problem(&self) -> Option<String> {
        let endpoint = self.endpoint.as_ref()?;
        if !self.has_device {
            return Some(format!("this agent's device {DEVICE} is missing"));
        }
        let datapath = self.datapath();
        let wanted = Hook::endpoint(endpoint.ifname(), endpoint.ifindex());
        let missing = wanted
            .iter()
            .filter(|hook| !datapath.hooks().contains(hook));
        let missing = missing.map(|hook| format!("program {hook} is not attached"));
        let faults = datapath.hook_faults().into_iter();
        let faults = faults.filter(|fault| fault.hook().device == DEVICE);
        let problems: Vec<String> = missing
            .chain(faults.map(|fault| fault.to_string()))
            .collect();
        (!problems.is_empty()).then(|| problems.join("; "))
    }

    /// Whether the health endpoint's faults differ from those that remained after the last check.
    pub(super) async fn has_changed(&self) -> bool {
        let Some(endpoint) = &self.endpoint else {
            return false;
        };
        let faults = endpoint.check().await;
        faults.is_ok_and(|faults| faults != self.left.faults)
            || self.program_problem() != self.left.programs
    }

    /// The report on the health endpoint after a check; `None` on a node without one.
    pub(super) fn health_report(&self, found: &EndpointOutcome) -> Option<HealthReport> {
        let endpoint = self.endpoint.as_ref()?;
        Some(HealthReport {
            endpoint: endpoint.description(),
            repaired: found.repaired.clone(),
            repairs: self.repairs.clone(),
            connection_problem: found.connection_problem.clone(),
            program_problem: found.program_problem.clone(),
        })
    }

    fn hooks(&self) -> Vec<Hook> {
        let endpoint = self.endpoint.as_ref().filter(|_| self.has_device);
        endpoint
            .map(|endpoint| Hook::endpoint(endpoint.ifname(), endpoint.ifindex()))
            .into_iter()
            .flatten()
            .chain(self.uplinks.hooks(self.uplinks()))
            .collect()
    }

    /// Sets the programs' service flags: none or any of [`SERVICES`] and [`SERVICES_HANDOVER`].
    pub(super) fn set_service_flags(&mut self, flags: u16) -> anyhow::Result<()> {
        self.flags = self.flags & !(SERVICES | SERVICES_HANDOVER) | flags;
        self.configure()
    }

    /// The node's first address of a family; unset if it has none.
    fn node_address(&self, family: Family) -> Addr {
        let mut addresses = self.spec.node_addresses.iter();
        let address = addresses.find(|address| Family::of(**address) == family);
        address.copied().map(Addr::from).unwrap_or_default()
    }

    /// Why an uplink's driver does not run the requested XDP program, in words.
    fn without_native_xdp(&self) -> Option<String> {
        let datapath = self.datapath();
        let mut refused = datapath.refused().iter();
        let found = refused.find(|error| matches!(error, DatapathError::NoNativeXdp { .. }));
        found.map(DatapathError::to_string)
    }

    /// Sets the conntrack timeouts. They apply to an existing entry from its next packet on.
    pub(super) fn set_timeouts(&mut self, timeouts: Timeouts) -> anyhow::Result<()> {
        let former = std::mem::replace(&mut self.timeouts, timeouts);
        let set = self.configure().context("cannot change conntrack timeouts");
        if set.is_err() {
            self.timeouts = former;
        }
        set
    }

    /// Passes the endpoint and the parameters of the agent's own probes to the programs.
    fn configure(&mut self) -> anyhow::Result<()> {
        let endpoint = self.endpoint.as_ref();
        let endpoints: Vec<_> = endpoint
            .into_iter()
            .flat_map(|endpoint| {
                addresses(endpoint)
                    .into_iter()
                    .map(|addr| (addr, endpoint.info()))
            })
            .collect();
        self.datapath().set_endpoints(&endpoints)?;
        self.tai_offset_ns = clock::state()?.tai_offset_ns();
        let config = DatapathConfig {
            layout_version: LAYOUT_VERSION,
            icmp_id_be: self.icmp_id.to_be(),
            health_port_be: self.port.to_be(),
            probe_key: self.keys.probe,
            session: self.session,
            // No device has ifindex 0.
            health_ifindex: endpoint.map(HealthEndpoint::ifindex).unwrap_or_default(),
            timeouts: self.timeouts,
            tai_offset_ns: self.tai_offset_ns,
            netns_cookie: self.netns_cookie,
            node4: self.node_address(Family::V4),
            node6: self.node_address(Family::V6),
            gateway4: self.gateways[0].map(Addr::from).unwrap_or_default(),
            gateway6: self.gateways[1].map(Addr::from).unwrap_or_default(),
            health4: endpoint
                .and_then(HealthEndpoint::ipv4)
                .map(Addr::from)
                .unwrap_or_default(),
            health6: endpoint
                .and_then(HealthEndpoint::ipv6)
                .map(Addr::from)
                .unwrap_or_default(),
            health_mac: endpoint
                .map(|endpoint| endpoint.mac().0)
                .unwrap_or_default(),
            // Set only while maps are being replaced, which has finished by now.
            flows_held_until_ns: 0,
            flags: self.flags,
            agent_tgid: self.agent_tgid,
            pad: 0,
        };
        self.datapath().configure(config)?;
        self.datapath()
            .set_direct(direct_config(&self.keys.direct))?;
        Ok(())
    }
}

/// An endpoint's addresses, IPv4 first.
fn addresses(endpoint: &HealthEndpoint) -> Vec<IpAddr> {
    let v4 = endpoint.ipv4().map(IpAddr::V4);
    let v6 = endpoint.ipv6().map(IpAddr::V6);
    v4.into_iter().chain(v6).collect()
}

/// The keys by which a node recognises packets that other nodes forward to its backends.
fn direct_config(keys: &[SipKey]) -> DirectConfig {
    let mut config = DirectConfig::default();
    for (place, key) in config.keys.iter_mut().zip(keys) {
        *place = *key;
        config.count += 1;
    }
    config
}

/// The MTU of a device, bytes; `None` if the device is gone.
async fn mtu_of(netlink: &Handle, device: Option<&str>) -> anyhow::Result<Option<u32>> {
    let Some(device) = device else {
        return Ok(None);
    };
    let found = link::by_name(netlink, device).await?;
    Ok(found.map(|found| found.mtu))
}

/// Whether the endpoint's device is gone or was replaced.
fn is_lost(fault: &Fault) -> bool {
    matches!(fault, Fault::VethGone | Fault::VethReplaced)
}
