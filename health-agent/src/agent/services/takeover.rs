//! Handles a change of the proxy mode: once the new mode serves, removes the other mode's state from the kernel.

use std::sync::Arc;
use std::time::Duration;

use health_common::config::{SERVICES, SERVICES_HANDOVER};
use health_datapath::services::{ServiceTables, ServicesError};
use health_model::task::AbortOnDrop;
use health_net::clock;
use health_net::netlink::Handle;
use health_server::services::listeners::HealthChecks;
use health_service::provider::ipvs::{self, IpvsError};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

/// Time from a failed attempt to the next.
const TAKEOVER_RETRY: Duration = Duration::from_secs(10);
/// Time between two checks for remaining flows of the eBPF programs.
const FLOWS_PERIOD: Duration = Duration::from_secs(10);

/// The mode that may have served before this one.
pub(super) enum Other {
    /// The eBPF programs, with these tables.
    Ebpf(Box<ServiceTables>),
    /// IPVS, in the namespace of the handle.
    Ipvs(ipvs::Settings, Handle),
}

/// Removes the other mode's services. If dropped early, the next start does the rest.
pub(super) struct Takeover {
    flags: watch::Receiver<u16>,
    _task: AbortOnDrop,
}

impl Takeover {
    /// Begins the removal after the first successful sync, which changes `in_force`. Must be called in a tokio runtime.
    pub(super) fn begin(other: Other, mut in_force: watch::Receiver<Arc<HealthChecks>>) -> Self {
        let (sender, flags) = watch::channel(SERVICES | SERVICES_HANDOVER);
        let task = AbortOnDrop::spawn(async move {
            if in_force.changed().await.is_err() {
                return;
            }
            match other {
                Other::Ebpf(tables) => {
                    end_ebpf(*tables).await;
                    sender.send_replace(0);
                }
                Other::Ipvs(settings, handle) => {
                    end_ipvs(settings, &handle).await;
                    sender.send_replace(SERVICES);
                }
            }
        });
        Self { flags, _task: task }
    }

    /// Waits until the programs' flags change, and returns them: none or any of [`SERVICES`] and [`SERVICES_HANDOVER`].
    pub(super) async fn flags(&mut self) -> u16 {
        if self.flags.changed().await.is_err() {
            // The flags will not change any more.
            std::future::pending::<()>().await;
        }
        *self.flags.borrow_and_update()
    }
}

/// Removes all ports from the maps, and returns when the maps have no flows left.
async fn end_ebpf(mut tables: ServiceTables) {
    while let Err(error) = remove_ports(&mut tables) {
        warn!(%error, "cannot remove the services of ebpf mode; it will be retried");
        sleep(TAKEOVER_RETRY).await;
    }
    loop {
        match tables.maps().has_flows() {
            Ok(false) => return,
            Ok(true) => {}
            Err(error) => warn!(%error, "cannot check whether all flows have ended"),
        }
        sleep(FLOWS_PERIOD).await;
    }
}

fn remove_ports(tables: &mut ServiceTables) -> Result<(), ServicesError> {
    let written = tables.remove_all(clock::now_ns())?;
    if written.frontends_removed > 0 {
        let frontends = written.frontends_removed;
        info!(frontends, "ipvs mode replaced ebpf mode");
    }
    Ok(())
}

/// Drains the IPVS services, and returns when none of their state is left.
async fn end_ipvs(settings: ipvs::Settings, handle: &Handle) {
    loop {
        match retire(settings.clone(), handle).await {
            Ok(()) => return,
            Err(error) => {
                warn!(%error, "cannot remove the services of ipvs mode; it will be retried");
            }
        }
        sleep(TAKEOVER_RETRY).await;
    }
}

async fn retire(settings: ipvs::Settings, handle: &Handle) -> Result<(), IpvsError> {
    if ipvs::is_present(handle).await? {
        info!("ebpf mode replaced ipvs mode; IPVS connections continue until they end");
        ipvs::retire(settings, handle).await?;
        info!("removed all state of ipvs mode");
    }
    Ok(())
}
