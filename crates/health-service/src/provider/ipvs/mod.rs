//! The IPVS provider: one virtual server in the kernel for each address of a service.
//!
//! [`plan`] computes the desired kernel state from the services and the node's addresses, and [`diff`] the steps to
//! reach it; neither needs a kernel. Fixed [`rules`] decide which packets are masqueraded, rejected or dropped; they
//! look up addresses and ports in ipset [`sets`]. Service addresses are bound to a device of our own ([`DEVICE`]), so
//! that the node accepts packets to them.
//!
//! After a restart, the provider finds all of this again: the table, the sets and the device by their names, and
//! virtual servers by a set that lists ours. It does not touch objects of other programs. Connections continue while no
//! provider runs. Draining real servers are recognized by their absence from the state.
//!
//! A virtual server treats all sources alike. Therefore, where an external address preserves the source, traffic from
//! this node's pods also uses this node's endpoints, as long as there are any.

mod device;
pub mod diff;
mod drain;
mod error;
mod kernel;
mod lock;
pub mod netlink;
pub mod plan;
pub mod rules;
pub mod sets;
mod sysctl;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use health_net::changes::Changes;
use health_net::netlink::Handle;
use ipnet::IpNet;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::services::{Provider, Work};
use drain::drain;
use kernel::Kernel;
use lock::Lock;
use netlink::server::Timeouts;
use plan::PlanSettings;
use rules::RuleSettings;
use worker::Worker;

pub use device::DEVICE;
pub use error::IpvsError;

/// Time between attempts to remove sets, which the kernel releases some time after their rules are gone.
const REMOVE_INTERVAL: Duration = Duration::from_millis(20);
/// When to give up removing sets.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Settings of the provider.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Settings for virtual servers.
    pub plan: PlanSettings,
    /// Settings for rules.
    pub rules: RuleSettings,
    /// NodePorts are served at the node's addresses in these networks or, if there are none, at all of its addresses.
    pub node_port_networks: Vec<IpNet>,
    /// Whether to answer ARP for an address only on the device that has it.
    pub strict_arp: bool,
    /// How often to check whether draining real servers have lost their last connection.
    pub drain_interval: Duration,
    /// How long the kernel keeps idle connections; a value of 0 leaves the current timeout unchanged.
    pub timeouts: Timeouts,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            plan: PlanSettings::default(),
            rules: RuleSettings::default(),
            node_port_networks: Vec::new(),
            strict_arp: false,
            drain_interval: Duration::from_secs(10),
            timeouts: Timeouts::default(),
        }
    }
}

/// Serves the services of this node through IPVS. Dropping the provider leaves the kernel as it is.
#[derive(Debug)]
pub struct Ipvs {
    worker: Arc<tokio::sync::Mutex<Worker>>,
    wake: Arc<tokio::sync::Notify>,
    drainer: JoinHandle<()>,
    _lock: Lock,
}

impl Ipvs {
    /// Opens a provider in the calling thread's network namespace; before the first sync, only kernel settings change.
    /// Fails if the kernel has no IPVS, or if another agent serves there. Must be called in a tokio runtime.
    pub fn open(settings: Settings) -> Result<Self, IpvsError> {
        let lock = Lock::acquire()?;
        let mut kernel = Kernel::open()?;
        kernel.set_timeouts(settings.timeouts)?;
        sysctl::apply(settings.strict_arp)?;
        let handle = health_net::netlink::open()?;
        let changes = Changes::listen()?;
        let interval = settings.drain_interval;
        let worker = Worker::new(settings, kernel, handle, changes);
        let worker = Arc::new(tokio::sync::Mutex::new(worker));
        let wake = Arc::new(tokio::sync::Notify::new());
        let drainer = tokio::spawn(drain(worker.clone(), wake.clone(), interval));
        Ok(Self {
            worker,
            wake,
            drainer,
            _lock: lock,
        })
    }
}

impl Drop for Ipvs {
    fn drop(&mut self) {
        self.drainer.abort();
    }
}

impl Provider for Ipvs {
    type Error = IpvsError;

    async fn sync(&mut self, work: Work<'_>) -> Result<(), IpvsError> {
        let result = self.worker.lock().await.sync(work).await;
        self.wake.notify_one();
        result
    }
}

/// Whether any object of ours exists in the network namespace of the handle.
pub async fn is_present(handle: &Handle) -> Result<bool, IpvsError> {
    // The device is created first and removed last, unless another program has removed it.
    Ok(device::is_present(handle).await? || kernel::has_rules()?)
}

/// Ends the IPVS service of a previous run: existing TCP connections continue until they end, no new ones are accepted,
/// and then all our objects are removed. Something else must already serve by then. Works in the network namespace of
/// the handle and the calling thread. Finishes when nothing is left, and can be interrupted and restarted at any time.
pub async fn retire(settings: Settings, handle: &Handle) -> Result<(), IpvsError> {
    if !is_present(handle).await? {
        return Ok(());
    }
    let _lock = match Lock::acquire() {
        // We do not touch the services of another agent.
        Err(IpvsError::InUse) => return Ok(()),
        lock => lock?,
    };
    let interval = settings.drain_interval;
    let changes = Changes::listen()?;
    let mut worker = Worker::new(settings, Kernel::open()?, handle.clone(), changes);
    worker.end().await?;
    while worker.is_draining() {
        sleep(interval).await;
        worker.reap().await?;
    }
    remove(handle).await.map(drop)
}

/// Removes all our objects from the kernel, in the network namespace of the handle and the calling thread. Fails if
/// another agent still serves there. Returns descriptions of what was removed.
pub async fn cleanup(handle: &Handle) -> Result<Vec<String>, IpvsError> {
    let _lock = Lock::acquire()?;
    remove(handle).await
}

async fn remove(handle: &Handle) -> Result<Vec<String>, IpvsError> {
    let mut removed = kernel::remove_rules_and_servers()?;
    let begin = Instant::now();
    let mut sets = 0;
    loop {
        let (busy, gone) = kernel::remove_sets()?;
        sets += gone;
        let Some(set) = busy.first() else {
            break;
        };
        if begin.elapsed() > REMOVE_TIMEOUT {
            let first = format!("cannot destroy the set {set}: other programs' rules use it");
            let more = busy.len() - 1;
            return Err(IpvsError::Steps { first, more });
        }
        sleep(REMOVE_INTERVAL).await;
    }
    if sets > 0 {
        removed.push(format!("sets HEALTH-* ({sets})"));
    }
    // Remove the device last, because it shows that other objects may be left.
    if device::remove(handle).await? {
        removed.push(format!("device {DEVICE}"));
    }
    Ok(removed)
}
