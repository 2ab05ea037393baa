//! Supervises a started agent until it stops, and shuts it down in order.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use health_mesh::hello;
use health_net::changes::Changes;
use health_registry::nodes::NodeSet;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use super::Reread;
use super::own::OwnChange;
use super::services::ServedServices;
use super::watch::{self, Backoff, News};
use super::{Agent, own};

/// Longest wait for requests in flight when the agent stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a registered address may be missing from the host before another one counts: leases get renewed.
const MOVE_PATIENCE: Duration = Duration::from_secs(10);

/// Why an agent stops.
enum End {
    /// It was asked to.
    Signal,
    /// A pod CIDR for a health endpoint is available now, and was not at the start.
    PodCidr,
    /// The node has these addresses now, not those that the agent was built on.
    OtherAddresses(Vec<IpAddr>),
}

/// An address of this node without a listener yet.
pub(super) struct Unbound {
    address: IpAddr,
    /// Whether the reason was logged.
    is_told: bool,
}

impl From<IpAddr> for Unbound {
    fn from(address: IpAddr) -> Self {
        Self {
            address,
            is_told: false,
        }
    }
}

impl Agent {
    /// Supervises everything until a signal arrives or this agent has become obsolete, then stops in order. Fails if
    /// the agent must be restarted.
    pub(super) async fn supervise(
        mut self,
        reread: Reread,
        mut reloads: Signal,
    ) -> anyhow::Result<()> {
        let ended = match self.watch_until_signal(reread, &mut reloads).await {
            Ok(End::Signal) => Ok(()),
            Ok(End::PodCidr) => Err(anyhow::anyhow!(
                "{} has a pod CIDR now; restart the agent to give it endpoints",
                self.own.full_name()
            )),
            Ok(End::OtherAddresses(now)) => Err(anyhow::anyhow!(
                "{} has the addresses {} instead of {}; restart the agent to use them",
                self.own.full_name(),
                list(&now),
                list(&self.own.addresses)
            )),
            Err(error) => {
                warn!(%error, "cannot wait for signals");
                Ok(())
            }
        };
        self.routes.abort();
        self.deleting.abort();
        self.enforcing.abort();
        self.events.close();
        self.relay.abort();
        self.telling.abort();
        if let Some(containers) = &self.containers {
            containers.supervisor.shutdown().await;
        }
        if let Some(mesh) = self.source.mesh() {
            mesh.shutdown().await;
        }
        let services = self.services;
        let [healthz, scrapes] = self.monitors;
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
        reloads: &mut Signal,
    ) -> std::io::Result<End> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut ticks = tokio::time::interval(watch::PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut backoff = Backoff::default();
        let mut news = News::new(Changes::listen());
        let mut nodes = self.registry.watch();
        // The node set may have changed while this agent was starting.
        nodes.mark_changed();
        let mut is_reached = false;
        let mut gone_since: Option<Instant> = None;
        // Addresses in the registry that this host does not have yet.
        let mut moving_to: Option<Vec<IpAddr>> = None;
        loop {
            tokio::select! {
                _ = terminate.recv() => return Ok(End::Signal),
                _ = interrupt.recv() => return Ok(End::Signal),
                Some(()) = reloads.recv() => self.reload(reread).await,
                Ok(()) = nodes.changed() => {
                    let set = nodes.borrow_and_update().clone();
                    is_reached = is_reached || self.note_reached(&set);
                    match self.change(&set) {
                        OwnChange::None => moving_to = None,
                        OwnChange::PodCidr => return Ok(End::PodCidr),
                        OwnChange::OtherAddresses(now) => moving_to = Some(now),
                        OwnChange::MoreAddresses(more) => {
                            moving_to = None;
                            self.add_addresses(more);
                        }
                    }
                    if self.is_at(moving_to.as_deref()).await {
                        return Ok(End::OtherAddresses(moving_to.unwrap_or_default()));
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
                        return Ok(End::OtherAddresses(moving_to.unwrap_or_default()));
                    }
                    if let Some(now) = self.moved_uplinks(&mut gone_since).await {
                        return Ok(End::OtherAddresses(now));
                    }
                    let is_due = backoff.is_due();
                    let has_repaired = self.look(is_due, &mut backoff).await;
                    news.pace(has_repaired);
                }
                () = news.next() => {
                    let has_repaired = self.look(false, &mut backoff).await;
                    news.pace(has_repaired);
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

    /// Returns whether nothing is left to record.
    fn note_reached(&self, set: &NodeSet) -> bool {
        let noted = own::note_reached(self.source.settings(), set);
        noted.unwrap_or_else(|error| {
            warn!("{error:#}; a cleanup may leave this node's record behind");
            true
        })
    }

    /// The uplinks' addresses, if this node registered its uplinks' addresses and they have differed for a while.
    async fn moved_uplinks(&self, gone_since: &mut Option<Instant>) -> Option<Vec<IpAddr>> {
        let config = self.source.settings();
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
        let now = own::from_settings(config).await.ok().flatten()?.addresses;
        (now != self.own.addresses).then_some(now)
    }

    fn change(&self, set: &NodeSet) -> OwnChange {
        let config = self.source.settings();
        let has_services = config.services.has_services();
        own::change(set, &config.node.registry, &self.own, has_services)
    }

    /// Starts to answer on addresses that came after the start, as soon as this host has them.
    fn listen_on_unbound(&mut self) {
        let port = self.source.settings().mesh.health_port;
        let responder = &self.host_responder;
        self.unbound.retain_mut(|Unbound { address, is_told }| {
            let address = *address;
            let bound = hello::bind(&[address], port).map_err(anyhow::Error::from);
            match bound.and_then(|listeners| Ok(responder.add(listeners)?)) {
                Ok(()) => {
                    info!(%address, "answering GET /hello on a new address");
                    false
                }
                Err(error) => {
                    if !std::mem::replace(is_told, true) {
                        warn!(%address, "{error:#}; it will be retried");
                    }
                    true
                }
            }
        });
    }

    /// Whether this host now has the registry's addresses instead of those that the agent was built on. Until then, the
    /// agent keeps serving unchanged.
    async fn is_at(&self, addresses: Option<&[IpAddr]>) -> bool {
        match addresses {
            Some(addresses) => own::is_here(addresses, &self.netlink)
                .await
                .unwrap_or(false),
            None => false,
        }
    }

    /// Checks everything if a check is due, otherwise only the health endpoint: damage to it is reported at once, even
    /// if something else cannot be repaired. Returns whether something was repaired.
    async fn look(&mut self, is_due: bool, backoff: &mut Backoff) -> bool {
        self.source.begin_look();
        if is_due || self.node.has_changed().await {
            let outcome = watch::repair(&mut self.node, &self.source).await;
            backoff.note(&outcome);
            self.source.note_repairs(&self.node, &outcome);
            self.note_missing_programs(outcome.without_programs);
            self.endpoints.set_mtu(self.node.mtu());
            return !outcome.repaired.is_empty();
        }
        false
    }

    /// Makes the manager retry endpoints whose programs could not be attached, and endpoints whose programs are
    /// attached again. Their reported state is the result of that retry.
    fn note_missing_programs(&mut self, now: BTreeSet<u16>) {
        let before = std::mem::replace(&mut self.without_programs, now);
        let changed: BTreeSet<u16> = before
            .symmetric_difference(&self.without_programs)
            .copied()
            .collect();
        if !changed.is_empty() {
            self.endpoints.regenerate(
                Some(&changed),
                "its programs were detached or attached again",
            );
        }
    }

    /// Publishes the health endpoint's addresses in the registry.
    fn publish(&mut self) {
        let addresses = self.health_addresses.borrow_and_update();
        self.registry
            .publish(own::with_health_addresses(&self.own, &addresses));
    }
}

fn list(addresses: &[IpAddr]) -> String {
    let texts: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

/// Like [`ServedServices::flags`]; never changes without services.
async fn service_flags(services: Option<&mut ServedServices>) -> u16 {
    match services {
        Some(services) => services.flags().await,
        None => std::future::pending().await,
    }
}
