//! Supervises a started agent until it stops, and shuts it down in order.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use health_datapath::conntrack::Collector;
use health_endpoint::manager::Manager;
use health_mesh::MeshHandle;
use health_mesh::hello::{self, Responder};
use health_model::task::AbortOnDrop;
use health_net::changes::Changes;
use health_net::netlink::Handle;
use health_registry::identity::IdentityAllocator;
use health_registry::nodes::{Node, NodeSet, Registry};
use health_server::page_server::PageServer;
use health_server::source::Source as _;
use health_settings::Settings;
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

use super::check_schedule::{Backoff, ChangeTrigger, PERIOD};
use super::containers::ContainerProbes;
use super::event_relay::EventRelay;
use super::kubernetes_pods::KubernetesPods;
use super::node::NodeDatapath;
use super::own_node::{self, OwnChange};
use super::probing::tuning;
use super::registration;
use super::reload::{self, ReloadRequests, Reread};
use super::repair::{note_health, repair};
use super::services::ServedServices;
use super::source::AgentSource;
use super::stop::StopRequests;
use crate::logging;

/// Longest wait for requests in flight when the agent stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a registered address may be missing from the host before another one replaces it. A lease renewal may
/// remove an address for a moment.
const MOVE_PATIENCE: Duration = Duration::from_secs(10);

/// A started agent.
pub(super) struct Agent {
    pub(super) node: NodeDatapath,
    pub(super) source: Arc<AgentSource>,
    pub(super) registry: Box<dyn Registry>,
    pub(super) own: Node,
    /// Addresses that the registry gave this node after the start and that have no listener yet.
    pub(super) unbound: Vec<Unbound>,
    pub(super) netlink: Handle,
    pub(super) endpoints: Manager,
    /// `None` if this agent probes no containers.
    pub(super) containers: Option<ContainerProbes>,
    /// `None` if this agent serves no services.
    pub(super) services: Option<ServedServices>,
    /// Endpoints whose programs could not be attached at the last check.
    pub(super) without_programs: BTreeSet<u16>,
    pub(super) health_addresses: Receiver<Vec<IpAddr>>,
    pub(super) mesh: MeshHandle,
    pub(super) host_responder: Responder,
    pub(super) events: EventRelay,
    pub(super) page_servers: [PageServer; 2],
    /// Publishes problems, keeps routes, carries out deletions, enforces policy, describes endpoints.
    pub(super) tasks: Vec<AbortOnDrop>,
    /// Stops when dropped.
    pub(super) _collector: Collector,
    /// Likewise.
    pub(super) _identities: Arc<IdentityAllocator>,
    /// Likewise.
    pub(super) _kubernetes_pods: Option<KubernetesPods>,
    /// Likewise.
    pub(super) kubernetes_policies: Option<AbortOnDrop>,
    /// Likewise.
    pub(super) _own_addresses: AbortOnDrop,
}

/// Why an agent stops.
enum End {
    /// A stop was requested.
    Signal,
    /// A pod CIDR for a health endpoint is available now, but was not at the start.
    PodCidr,
    /// The node now has these addresses instead of those with which the agent started.
    OtherAddresses(Vec<IpAddr>),
}

/// An address of this node without a listener yet.
pub(super) struct Unbound {
    address: IpAddr,
    /// Whether the reason was logged.
    is_logged: bool,
}

impl From<IpAddr> for Unbound {
    fn from(address: IpAddr) -> Self {
        Self {
            address,
            is_logged: false,
        }
    }
}

impl Agent {
    /// Supervises everything until a signal arrives or this agent becomes obsolete, then shuts down in order. Fails if
    /// the agent must be restarted.
    pub(super) async fn supervise(
        mut self,
        reread: Reread,
        mut reloads: ReloadRequests,
        mut stop: StopRequests,
    ) -> anyhow::Result<()> {
        let ended = match self
            .watch_until_signal(reread, &mut reloads, &mut stop)
            .await
        {
            End::Signal => Ok(()),
            End::PodCidr => Err(anyhow::anyhow!(
                "{} now has a pod CIDR; restart the agent to give it endpoints",
                self.own.full_name()
            )),
            End::OtherAddresses(now) => Err(anyhow::anyhow!(
                "{} now has addresses {} instead of {}; restart the agent to use them",
                self.own.full_name(),
                list(&now),
                list(&self.own.addresses)
            )),
        };
        drop(self.tasks);
        drop(self.kubernetes_policies);
        if let Some(enforcer) = self.source.enforcer()
            && let Err(error) = enforcer.save_cluster_policies()
        {
            warn!(%error, "cannot save the policies of the Kubernetes cluster");
        }
        self.events.stop();
        if let Some(containers) = &self.containers {
            containers.supervisor.shutdown().await;
        }
        self.mesh.shutdown().await;
        let services = self.services;
        let [healthz, scrapes] = self.page_servers;
        let responders = async {
            tokio::join!(
                self.host_responder.shutdown(),
                self.node.responder.shutdown(),
                healthz.shutdown(),
                scrapes.shutdown(),
                async {
                    if let Some(services) = services {
                        services.stop().await;
                    }
                },
            );
        };
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, responders)
            .await
            .is_err()
        {
            warn!("stopped with requests in progress");
        }
        info!("agent stopped; its programs and endpoints stay until cleanup");
        ended
    }

    async fn watch_until_signal(
        &mut self,
        reread: Reread,
        reloads: &mut ReloadRequests,
        stop: &mut StopRequests,
    ) -> End {
        if self.source.settings.has_changed() {
            // The settings were reloaded while the start was waiting.
            let settings = self.source.settings.now();
            self.put_in_force(&settings, reloads).await;
        }
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut backoff = Backoff::default();
        let mut trigger = ChangeTrigger::new(Changes::listen());
        let mut nodes = self.registry.watch();
        // The node set may have changed while this agent was starting.
        nodes.mark_changed();
        let mut is_reached = false;
        let mut gone_since: Option<Instant> = None;
        // Addresses in the registry that this host does not have yet.
        let mut moving_to: Option<Vec<IpAddr>> = None;
        loop {
            tokio::select! {
                () = stop.requested() => return End::Signal,
                () = reloads.next() => self.reload(reread, reloads).await,
                Ok(()) = nodes.changed() => {
                    let set = nodes.borrow_and_update().clone();
                    is_reached = is_reached || self.note_reached(&set);
                    match self.change(&set) {
                        OwnChange::None => moving_to = None,
                        OwnChange::PodCidr => return End::PodCidr,
                        OwnChange::OtherAddresses(now) => moving_to = Some(now),
                        OwnChange::MoreAddresses(more) => {
                            moving_to = None;
                            self.add_addresses(more);
                        }
                    }
                    if self.is_at(moving_to.as_deref()).await {
                        return End::OtherAddresses(moving_to.unwrap_or_default());
                    }
                }
                Ok(()) = self.health_addresses.changed() => self.publish(),
                flags = service_flags(self.services.as_mut()) => {
                    if let Err(error) = self.node.set_service_flags(flags) {
                        warn!(%error, "cannot set the programs' service flags");
                    }
                }
                _ = ticks.tick() => {
                    self.listen_on_unbound();
                    if self.is_at(moving_to.as_deref()).await {
                        return End::OtherAddresses(moving_to.unwrap_or_default());
                    }
                    if let Some(now) = self.moved_uplinks(&mut gone_since).await {
                        return End::OtherAddresses(now);
                    }
                    let is_due = backoff.is_due();
                    let has_repaired = self.look(is_due, &mut backoff).await;
                    trigger.note_outcome(has_repaired);
                }
                () = trigger.next() => {
                    let has_repaired = self.look(false, &mut backoff).await;
                    trigger.note_outcome(has_repaired);
                }
            }
        }
    }

    /// Adopts additional addresses that the registry has given this node.
    fn add_addresses(&mut self, more: Vec<IpAddr>) {
        info!(addresses = ?more, "this node has additional addresses");
        self.node.add_addresses(&more);
        self.own.addresses.extend(&more);
        self.unbound.extend(more.into_iter().map(Unbound::from));
        self.listen_on_unbound();
    }

    /// Records that the registry has answered. Returns whether nothing is left to record.
    fn note_reached(&self, set: &NodeSet) -> bool {
        let noted = registration::note_reached(self.source.settings.at_start(), set);
        noted.unwrap_or_else(|error| {
            warn!("{error:#}; a cleanup may leave this node's record behind");
            true
        })
    }

    /// Returns the uplinks' current addresses if this node registered its uplinks' addresses and some of the registered
    /// ones have been missing from the host for [`MOVE_PATIENCE`].
    async fn moved_uplinks(&self, gone_since: &mut Option<Instant>) -> Option<Vec<IpAddr>> {
        let config = self.source.settings.at_start();
        let registers_uplinks =
            config.node.registry.is_written_by_nodes() && config.node.node_addresses.is_empty();
        if !registers_uplinks || self.is_at(Some(&self.own.addresses)).await {
            *gone_since = None;
            return None;
        }
        let since = gone_since.get_or_insert_with(Instant::now);
        if since.elapsed() < MOVE_PATIENCE {
            return None;
        }
        let now = own_node::from_settings(config)
            .await
            .ok()
            .flatten()?
            .addresses;
        (now != self.own.addresses).then_some(now)
    }

    fn change(&self, set: &NodeSet) -> OwnChange {
        let config = self.source.settings.at_start();
        let has_services = config.services.has_services();
        own_node::change(set, &config.node.registry, &self.own, has_services)
    }

    /// Starts answering on addresses added after the start, as soon as this host has them.
    fn listen_on_unbound(&mut self) {
        let port = self.source.settings.at_start().mesh.health_port;
        let responder = &self.host_responder;
        self.unbound.retain_mut(|Unbound { address, is_logged }| {
            let address = *address;
            let bound = hello::bind(&[address], port).map_err(anyhow::Error::from);
            match bound.and_then(|listeners| Ok(responder.add(listeners)?)) {
                Ok(()) => {
                    info!(%address, "answering GET /hello on a new address");
                    false
                }
                Err(error) => {
                    if !std::mem::replace(is_logged, true) {
                        warn!(%address, "{error:#}; it will be retried");
                    }
                    true
                }
            }
        });
    }

    /// Whether this host has all of these addresses. Until it has new addresses from the registry, the agent keeps
    /// serving unchanged.
    async fn is_at(&self, addresses: Option<&[IpAddr]>) -> bool {
        match addresses {
            Some(addresses) => own_node::is_here(addresses, &self.netlink)
                .await
                .unwrap_or(false),
            None => false,
        }
    }

    /// Checks everything if a check is due or the health endpoint has changed. Damage to the health endpoint is
    /// therefore reported at once, even if something else cannot be repaired. Returns whether something was repaired.
    async fn look(&mut self, is_due: bool, backoff: &mut Backoff) -> bool {
        self.source.begin_look();
        if is_due || self.node.has_changed().await {
            let outcome = repair(&mut self.node, &self.source, &self.endpoints).await;
            backoff.note(&outcome);
            note_health(&self.node, &self.endpoints, &outcome.endpoint);
            self.source.note_repairs(&self.node.repairs, &outcome);
            self.note_missing_programs(outcome.without_programs);
            self.endpoints.set_mtu(self.node.mtu());
            return !outcome.repaired.is_empty();
        }
        false
    }

    /// Makes the manager regenerate endpoints whose programs could not be attached or have been attached again. The
    /// result of the regeneration becomes their reported state.
    fn note_missing_programs(&mut self, now: BTreeSet<u16>) {
        let before = std::mem::replace(&mut self.without_programs, now);
        let changed: BTreeSet<u16> = before
            .symmetric_difference(&self.without_programs)
            .copied()
            .collect();
        if !changed.is_empty() {
            self.endpoints
                .regenerate(Some(&changed), "its programs were detached or reattached");
        }
    }

    /// Applies new settings: all that need no restart, or none if any setting is invalid.
    async fn reload(&mut self, reread: Reread, requests: &mut ReloadRequests) {
        let settings = &self.source.settings;
        match reload::read(settings, reread).await {
            Ok(new) => {
                if self.put_in_force(&new, requests).await {
                    self.source.settings.take(&new);
                }
            }
            Err(error) => settings.refuse(&error),
        }
    }

    /// Passes live settings to the parts that use them, or requests another reload. Returns whether they are in force.
    async fn put_in_force(&mut self, new: &Settings, requests: &mut ReloadRequests) -> bool {
        if let Err(error) = self.node.set_timeouts(new.conntrack.timeouts.into()) {
            requests.retry();
            let error = format!("{error:#}; it will be retried");
            self.source.settings.refuse(&error);
            return false;
        }
        if let Some(enforcer) = self.source.enforcer() {
            enforcer.set_mode(new.policy.policy_mode);
        }
        self.mesh.tune(tuning(&new.mesh)).await;
        logging::set_level(new.log.log_level);
        true
    }

    /// Publishes the health endpoint's addresses in the registry.
    fn publish(&mut self) {
        let addresses = self.health_addresses.borrow_and_update();
        self.registry
            .publish(own_node::with_health_addresses(&self.own, &addresses));
    }
}

fn list(addresses: &[IpAddr]) -> String {
    let texts: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

/// Like [`ServedServices::flags`]; never returns without services.
async fn service_flags(services: Option<&mut ServedServices>) -> u16 {
    match services {
        Some(services) => services.flags().await,
        None => std::future::pending().await,
    }
}
