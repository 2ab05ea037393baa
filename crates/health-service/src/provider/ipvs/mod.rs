//! The IPVS provider: a virtual server of the kernel for each address of a service.
//!
//! [`plan`] computes the desired kernel state from the services and the node's addresses, and [`diff`] the steps to get
//! there; neither needs a kernel. Fixed [`rules`] decide which packets are masqueraded, rejected or dropped; they look up
//! addresses and ports in [`sets`] of ipset. Addresses of services are bound to a device of our own ([`DEVICE`]), so that
//! the node accepts packets to them.
//!
//! After a restart the provider finds all of this again: the table, the sets and the device by their names, virtual servers
//! by a set that lists ours. It leaves alone what other programs made. Connections continue while nothing runs. Draining
//! real servers are recognised because the state does not contain them.
//!
//! A virtual server treats all sources alike. So where an external address keeps the source, traffic from this node's pods
//! uses this node's endpoints too, as long as there are any.

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

/// Time between attempts to remove sets: the kernel releases them some time after their rules are gone.
const REMOVE_INTERVAL: Duration = Duration::from_millis(20);
/// When to give up these attempts.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Settings of the provider.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What virtual servers go by.
    pub plan: PlanSettings,
    /// What rules go by.
    pub rules: RuleSettings,
    /// NodePorts are served at the node's addresses in these networks; if empty, at all of its addresses.
    pub node_port_networks: Vec<IpNet>,
    /// Answer for an address by ARP only on the device that has it.
    pub strict_arp: bool,
    /// How often to check whether draining real servers have lost their last connection.
    pub drain_interval: Duration,
    /// How long the kernel keeps idle connections; what is 0 stays as it is.
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

/// Serves the services of this node by IPVS. Dropping it leaves the kernel as it is.
#[derive(Debug)]
pub struct Ipvs {
    worker: Arc<tokio::sync::Mutex<Worker>>,
    wake: Arc<tokio::sync::Notify>,
    drainer: JoinHandle<()>,
    _lock: Lock,
}

impl Ipvs {
    /// Serves in the network namespace of the calling thread; nothing but settings of the kernel changes before the first
    /// sync. An error if the kernel has no IPVS, or another agent serves there. Must be called in a tokio runtime.
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

/// Whether there is something of ours in the network namespace of the handle.
pub async fn is_present(handle: &Handle) -> Result<bool, IpvsError> {
    // The device is made first and goes last, unless somebody else has removed it.
    Ok(device::is_present(handle).await? || kernel::has_rules()?)
}

/// Ends services that were served before and are no more: their connections of TCP go on until they end, without new ones,
/// and then all of ours is removed. Something else must serve by then. In the network namespace that the handle and the
/// calling thread are in; ends when nothing is left, and can be begun anew at any time.
pub async fn retire(settings: Settings, handle: &Handle) -> Result<(), IpvsError> {
    if !is_present(handle).await? {
        return Ok(());
    }
    let _lock = match Lock::acquire() {
        // What another agent serves is none of ours.
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

/// Removes all of ours from the kernel, in the network namespace that the handle and the calling thread are in. Nothing
/// may serve there any more: an error if another agent does. Returns what there was, in words.
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
            let first = format!("cannot destroy the set {set}: rules of others use it");
            let more = busy.len() - 1;
            return Err(IpvsError::Steps { first, more });
        }
        sleep(REMOVE_INTERVAL).await;
    }
    if sets > 0 {
        removed.push(format!("sets HEALTH-* ({sets})"));
    }
    // At last: by it the rest is found.
    if device::remove(handle).await? {
        removed.push(format!("device {DEVICE}"));
    }
    Ok(removed)
}
