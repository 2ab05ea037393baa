//! Watches over a started agent until it ends, and stops it in order.

use std::collections::BTreeSet;
use std::time::Duration;

use health_net::changes::Changes;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

use super::services::ServedServices;
use super::watch::{self, Backoff, News};
use super::{Agent, own};

/// Longest wait for requests that are under way when the agent stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Why an agent ends.
enum End {
    /// It is told to.
    Signal,
    /// There is something to make a health endpoint from, and was not when it started.
    PodCidr,
}

impl Agent {
    /// Watches over everything until a signal comes, or this agent is of no more use; then stops in order. Fails where
    /// it is to be started again.
    pub(super) async fn supervise(mut self) -> anyhow::Result<()> {
        let ended = match self.watch_until_signal().await {
            Ok(End::Signal) => Ok(()),
            Ok(End::PodCidr) => Err(anyhow::anyhow!(
                "{} has a pod CIDR by now: start the agent again, so that it has endpoints",
                self.own.full_name()
            )),
            Err(error) => {
                warn!(%error, "cannot wait for signals");
                Ok(())
            }
        };
        self.routes.abort();
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
            warn!("stopped with requests under way");
        }
        info!("agent stopped; its programs and endpoints stay until cleanup");
        ended
    }

    async fn watch_until_signal(&mut self) -> std::io::Result<End> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut ticks = tokio::time::interval(watch::PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut backoff = Backoff::default();
        let mut news = News::new(Changes::listen());
        let mut nodes = self.registry.watch();
        // It may have changed since this agent began to start.
        nodes.mark_changed();
        loop {
            tokio::select! {
                _ = terminate.recv() => return Ok(End::Signal),
                _ = interrupt.recv() => return Ok(End::Signal),
                Ok(()) = nodes.changed(), if self.own.pod_cidrs.is_empty() => {
                    if own::has_pod_cidr(&nodes.borrow_and_update(), &self.own) {
                        return Ok(End::PodCidr);
                    }
                }
                Ok(()) = self.health_addresses.changed() => self.publish(),
                flags = service_flags(self.services.as_mut()) => {
                    if let Err(error) = self.node.set_service_flags(flags) {
                        warn!(%error, "cannot tell the programs about services");
                    }
                }
                _ = ticks.tick() => {
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

    /// Looks at everything if that is due, and else at the health endpoint: what others do to it is told at once,
    /// whatever else cannot be repaired. Returns whether something was repaired.
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

    /// Has the manager try endpoints whose programs could not be attached again, and those where they are again: what
    /// is told of them is what comes of that.
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

    /// Tells the registry the addresses of the health endpoint.
    fn publish(&mut self) {
        let addresses = self.health_addresses.borrow_and_update();
        self.registry
            .publish(own::with_health_addresses(&self.own, &addresses));
    }
}

/// As [`ServedServices::flags`]; without services it never changes.
async fn service_flags(services: Option<&mut ServedServices>) -> u16 {
    match services {
        Some(services) => services.flags().await,
        None => std::future::pending().await,
    }
}
