//! Change of the mode: what another mode has in the kernel goes once this one is in force.

use std::sync::Arc;
use std::time::Duration;

use health_common::config::{SERVICES, SERVICES_HANDOVER};
use health_datapath::services::{ServiceTables, ServicesError};
use health_net::clock;
use health_net::netlink::Handle;
use health_service::provider::ipvs::{self, IpvsError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::api::services::listeners::HealthChecks;

/// Time until the next attempt after one that failed.
const RETRY: Duration = Duration::from_secs(10);
/// Time between two looks whether flows of the eBPF programs have ended.
const FLOWS_PERIOD: Duration = Duration::from_secs(10);

/// What may have served before this mode.
pub(super) enum Other {
    /// The programs, by these tables.
    Ebpf(Box<ServiceTables>),
    /// IPVS, in the namespace of the handle.
    Ipvs(ipvs::Settings, Handle),
}

/// Ends what the other mode served. Dropping it leaves the rest to the next start.
pub(super) struct Takeover {
    flags: watch::Receiver<u16>,
    task: JoinHandle<()>,
}

impl Takeover {
    /// Waits for the first sync, which `in_force` tells of. Must be called in a tokio runtime.
    pub(super) fn begin(other: Other, mut in_force: watch::Receiver<Arc<HealthChecks>>) -> Self {
        let (told, flags) = watch::channel(SERVICES | SERVICES_HANDOVER);
        let task = tokio::spawn(async move {
            if in_force.changed().await.is_err() {
                return;
            }
            match other {
                Other::Ebpf(tables) => {
                    end_ebpf(*tables).await;
                    told.send_replace(0);
                }
                Other::Ipvs(settings, handle) => {
                    end_ipvs(settings, &handle).await;
                    told.send_replace(SERVICES);
                }
            }
        });
        Self { flags, task }
    }

    /// What the programs are to do about services from now on: waits until that is something else.
    pub(super) async fn flags(&mut self) -> u16 {
        if self.flags.changed().await.is_err() {
            // It stays so.
            std::future::pending::<()>().await;
        }
        *self.flags.borrow_and_update()
    }
}

impl Drop for Takeover {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Ends when the programs know no flow any more.
async fn end_ebpf(mut tables: ServiceTables) {
    while let Err(error) = remove_ports(&mut tables) {
        warn!(%error, "cannot remove what the mode ebpf served; it is tried again");
        sleep(RETRY).await;
    }
    loop {
        match tables.maps().has_flows() {
            Ok(false) => return,
            Ok(true) => {}
            Err(error) => warn!(%error, "cannot tell whether flows have ended"),
        }
        sleep(FLOWS_PERIOD).await;
    }
}

fn remove_ports(tables: &mut ServiceTables) -> Result<(), ServicesError> {
    let written = tables.remove_all(clock::now_ns())?;
    if written.frontends_removed > 0 {
        let frontends = written.frontends_removed;
        info!(frontends, "the mode ipvs serves in place of ebpf");
    }
    Ok(())
}

/// Ends when nothing is left of what IPVS served.
async fn end_ipvs(settings: ipvs::Settings, handle: &Handle) {
    loop {
        match retire(settings.clone(), handle).await {
            Ok(()) => return,
            Err(error) => {
                warn!(%error, "cannot remove what the mode ipvs served; it is tried again");
            }
        }
        sleep(RETRY).await;
    }
}

async fn retire(settings: ipvs::Settings, handle: &Handle) -> Result<(), IpvsError> {
    if ipvs::is_present(handle).await? {
        info!("the mode ebpf serves in place of ipvs, whose connections go on until they end");
        ipvs::retire(settings, handle).await?;
        info!("nothing is left of the mode ipvs");
    }
    Ok(())
}
