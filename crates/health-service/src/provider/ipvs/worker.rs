//! Writes states into the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use health_model::policy::Protocol;
use health_net::changes::Changes;
use health_net::link::{self, Link};
use health_net::netlink::Handle;
use tracing::{debug, warn};

use super::diff::{Present, Step, diff, mark};
use super::error::IpvsError;
use super::kernel::{Kernel, Outcome};
use super::netlink::server::{Change, ServerId, ServerKey};
use super::plan::{NodeAddresses, Plan, Touched, wanted};
use super::{Settings, device};
use crate::services::Work;

/// Maximum number of failures to log in one sync.
const LOGGED_FAILURES: usize = 20;

/// The plan, and the known kernel state.
#[derive(Debug)]
pub(super) struct Worker {
    settings: Settings,
    kernel: Arc<Mutex<Kernel>>,
    handle: Handle,
    plan: Plan,
    node: NodeAddresses,
    /// Changes of devices and addresses.
    changes: Changes,
    /// Whether there were changes since the node's addresses were last read.
    may_be_other: bool,
    /// The last known kernel state.
    present: Present,
    /// Whether the kernel may differ from `present`, and must be read.
    is_stale: bool,
    draining: BTreeSet<ServerKey>,
    /// Virtual servers of other programs about which a warning was logged.
    warned: BTreeSet<ServerKey>,
    /// Whether the warning was logged that the kernel cannot delete flows.
    cannot_forget: bool,
}

impl Worker {
    pub(super) fn new(
        settings: Settings,
        kernel: Kernel,
        handle: Handle,
        changes: Changes,
    ) -> Self {
        Self {
            settings,
            kernel: Arc::new(Mutex::new(kernel)),
            handle,
            plan: Plan::default(),
            node: NodeAddresses::default(),
            changes,
            may_be_other: true,
            present: Present::default(),
            is_stale: true,
            draining: BTreeSet::new(),
            warned: BTreeSet::new(),
            cannot_forget: false,
        }
    }

    pub(super) async fn sync(&mut self, work: Work<'_>) -> Result<(), IpvsError> {
        let (device, is_new) = device::ensure(&self.handle).await?;
        let must_read = work.is_full || is_new || self.is_stale;
        let is_other_node = self.look_at_node(&device, must_read).await?;
        let settings = &self.settings.plan;
        let touched = if must_read || is_other_node {
            self.plan = wanted(work.state, &self.node, settings);
            let was_stale = std::mem::replace(&mut self.is_stale, true);
            let known = self.read(&device, true).await?;
            if !was_stale {
                warn_of_lost(&known, &self.present);
            }
            let mut touched = self.plan.touched();
            touched.extend(self.present.touched());
            touched
        } else {
            let ports = &work.changes.ports;
            self.plan.update(work.state, ports, &self.node, settings)
        };
        self.warn_of_foreign();
        let done = self.bring(&device, &touched).await;
        self.reap_on(&device).await?;
        done
    }

    /// Empties the plan: connections continue until they end, and no new ones start. Reads the kernel state first.
    /// Leaves the rules as they are.
    pub(super) async fn end(&mut self) -> Result<(), IpvsError> {
        let (device, _) = device::ensure(&self.handle).await?;
        self.plan = Plan::default();
        self.read(&device, false).await?;
        let touched = self.present.touched();
        self.bring(&device, &touched).await?;
        self.reap_on(&device).await
    }

    /// Reads the node's addresses if they may have changed, or if `must` is set. Returns whether they differ.
    async fn look_at_node(&mut self, device: &Link, must: bool) -> Result<bool, IpvsError> {
        while let Some(news) = self.changes.next().now_or_never() {
            self.may_be_other = true;
            if news.is_err() {
                break;
            }
        }
        if !must && !self.may_be_other {
            return Ok(false);
        }
        let networks = &self.settings.node_port_networks;
        let node = device::of_node(&self.handle, device, networks).await?;
        self.may_be_other = false;
        let is_other = self.node != node;
        self.node = node;
        Ok(is_other)
    }

    /// Whether real servers are draining.
    pub(super) fn is_draining(&self) -> bool {
        !self.draining.is_empty()
    }

    /// Deletes draining real servers that have no connections left.
    pub(super) async fn reap(&mut self) -> Result<(), IpvsError> {
        let (device, _) = device::ensure(&self.handle).await?;
        self.reap_on(&device).await
    }

    async fn reap_on(&mut self, device: &Link) -> Result<(), IpvsError> {
        if self.draining.is_empty() || self.is_stale {
            return Ok(());
        }
        let servers = self.draining.clone();
        let keys = servers.clone();
        let listed = self.blocking(move |kernel| {
            let keys = keys.into_iter();
            let list = |key| kernel.real_servers(key).map(|real| (key, real));
            keys.map(list).collect::<Result<Vec<_>, _>>()
        });
        for (key, real) in listed.await? {
            self.present.note_real(key, &real);
        }
        let touched = Touched {
            servers,
            ..Touched::default()
        };
        self.bring(device, &touched).await
    }

    /// Reads the kernel state, after installing rules and sets if `serves` is set. Returns the previously known state.
    async fn read(&mut self, device: &Link, serves: bool) -> Result<Present, IpvsError> {
        let bound = device::bound(&self.handle, device).await?;
        let rules = serves.then(|| self.settings.rules.clone());
        let ours = self.present.servers.keys().copied().collect();
        let read = self.blocking(move |kernel| {
            if let Some(rules) = rules {
                kernel.prepare(&rules)?;
            }
            kernel.read(bound, &ours)
        });
        let present = read.await?;
        self.is_stale = false;
        Ok(std::mem::replace(&mut self.present, present))
    }

    /// Brings the touched parts of the kernel state in line with the plan.
    async fn bring(&mut self, device: &Link, touched: &Touched) -> Result<(), IpvsError> {
        let steps = diff(&self.plan, &self.present, touched);
        let mut servers: BTreeSet<_> = touched.servers.clone();
        let is_of_device = |step: &Step| matches!(step, Step::Bind(_) | Step::Unbind(_));
        let (mut failed, mut foreign) = (Vec::new(), Vec::new());
        let mut added = BTreeSet::new();
        for steps in steps.chunk_by(|one, next| is_of_device(one) == is_of_device(next)) {
            let outcome = if steps.first().is_some_and(is_of_device) {
                self.bind(device, steps).await
            } else {
                let steps = steps.to_vec();
                self.blocking(move |kernel| kernel.run(steps)).await?
            };
            for step in &outcome.done {
                debug!(?step, "done");
                self.present.apply(step);
                if let Step::Change(Change::AddServer(server)) = step
                    && let ServerId::Address(key) = server.id
                    && key.protocol == Protocol::UDP
                {
                    added.insert(key);
                }
            }
            failed.extend(outcome.failed);
            foreign.extend(outcome.foreign);
        }
        self.forget_flows(added).await;
        self.disown(&foreign).await?;
        servers.extend(self.draining.iter().copied());
        for key in servers {
            if self.present.is_draining(&self.plan, &key) {
                self.draining.insert(key);
            } else {
                self.draining.remove(&key);
            }
        }
        self.report(failed)
    }

    /// Deletes flows that are older than these UDP virtual servers. Otherwise the replies would not be translated:
    /// neither rules nor IPVS change a known flow.
    async fn forget_flows(&mut self, added: BTreeSet<ServerKey>) {
        let servers = added.into_iter().filter_map(|key| {
            let real = self.plan.server(&key)?.real.keys();
            Some((key, real.copied().collect()))
        });
        let servers: BTreeMap<_, _> = servers.collect();
        if servers.is_empty() {
            return;
        }
        let forgotten = self.blocking(move |kernel| kernel.forget_flows(&servers));
        match forgotten.await {
            Ok(0) => {}
            Ok(flows) => debug!(flows, "deleted flows that are older than their services"),
            // The kernel may not support such messages at all (no `nf_conntrack_netlink`).
            Err(error) if std::mem::replace(&mut self.cannot_forget, true) => {
                debug!(%error, "cannot delete flows that are older than their services; they get no answers");
            }
            Err(error) => {
                warn!(%error, "cannot delete flows that are older than their services; they get no answers");
            }
        }
    }

    async fn bind(&self, device: &Link, steps: &[Step]) -> Outcome {
        let mut outcome = Outcome::default();
        for step in steps {
            let result = match step {
                Step::Bind(address) => {
                    link::add_destination_address(&self.handle, device, *address).await
                }
                Step::Unbind(address) => {
                    let deleted = link::delete_address(&self.handle, device, *address).await;
                    deleted.map(drop)
                }
                _ => Ok(()),
            };
            match result {
                Ok(()) => outcome.done.push(step.clone()),
                Err(error) => outcome.failed.push(error.to_string()),
            }
        }
        outcome
    }

    /// Gives up the virtual servers that another program created first.
    async fn disown(&mut self, foreign: &[ServerKey]) -> Result<(), IpvsError> {
        if foreign.is_empty() {
            return Ok(());
        }
        let marks = foreign.iter().map(|key| mark(*key));
        let steps = marks.map(|(set, entry)| Step::DeleteEntries(set, vec![entry]));
        let steps: Vec<_> = steps.collect();
        let outcome = self.blocking(move |kernel| kernel.run(steps)).await?;
        for step in &outcome.done {
            self.present.apply(step);
        }
        self.present.foreign.extend(foreign);
        self.warn_of_foreign();
        self.report(outcome.failed)
    }

    /// Logs a warning once for each virtual server of another program at one of our addresses.
    fn warn_of_foreign(&mut self) {
        let foreign = &self.present.foreign;
        self.warned.retain(|key| foreign.contains(key));
        for key in foreign {
            if self.plan.server(key).is_some() && self.warned.insert(*key) {
                warn!(server = %key, "a service is not served at an address: another program has a virtual server there");
            }
        }
    }

    fn report(&mut self, failed: Vec<String>) -> Result<(), IpvsError> {
        for failure in failed.iter().take(LOGGED_FAILURES) {
            warn!(
                failure,
                "a change to IPVS, its sets or its addresses failed"
            );
        }
        let more = failed.len().saturating_sub(1);
        match failed.into_iter().next() {
            None => Ok(()),
            Some(first) => {
                self.is_stale = true;
                Err(IpvsError::Steps { first, more })
            }
        }
    }

    /// Runs blocking requests on a thread where they may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Kernel) -> Result<T, IpvsError> + Send + 'static,
    ) -> Result<T, IpvsError> {
        let kernel = self.kernel.clone();
        let run = move || work(&mut kernel.lock().unwrap_or_else(PoisonError::into_inner));
        match tokio::task::spawn_blocking(run).await {
            Ok(result) => result,
            // The task cannot have been cancelled.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}

/// Logs parts of the kernel state that have disappeared without being removed by us.
fn warn_of_lost(known: &Present, present: &Present) {
    let addresses = known.addresses.difference(&present.addresses).count();
    let entries = known.entries.difference(&present.entries).count();
    let servers = known.servers.keys();
    let servers = servers.filter(|key| !present.servers.contains_key(key));
    let servers = servers.count();
    if addresses + entries + servers > 0 {
        warn!(
            addresses,
            entries, servers, "IPVS state was removed externally; restoring it"
        );
    }
}
