//! Propagates changes of rules, identities and addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use health_common::addr::Addr;
use health_common::ipcache::IpcacheEntry;
use health_datapath::TrieError;
use health_model::activity::{Problem, Reporter};
use health_model::api::PolicyLag;
use health_model::identity::Identity;
use health_net::netlink::Handle;
use health_net::{KernelError, route};
use health_registry::identity::{Addresses, IpcacheInputs, ipcache};
use health_registry::nodes::NodeSet;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use super::build::Room;
use super::local::{Distinctions, LocalAddresses};
use super::subjects::{Behind, Generation, Subject};
use super::{Enforcer, lock, uninformed};
use crate::manager::Manager;
use crate::regenerate::RegenerationError;

/// How long to wait for endpoints to reach a change, as some may never do.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to collect built and removed endpoints before the next turn. The build or removal itself did whatever was
/// urgent; the turn then checks everything.
const GATHER: Duration = Duration::from_millis(50);
/// How soon a failed change is retried.
const AGAIN: Duration = Duration::from_secs(1);

/// Log message for an endpoint whose old and new policies do not fit at the same time.
const CLOSED: &str = "its policy denies everything until it is regenerated: no room for the \
                      previous policy alongside the new one";

/// Reports which prefixes lead to this host.
pub trait HostRoutes: Send + Sync {
    /// Returns the host's addresses, the broadcast and anycast addresses of their networks, and everything else in the
    /// local routing table.
    fn to_this_host(
        &self,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<IpNet>, KernelError>> + Send + '_>>;
}

impl HostRoutes for Handle {
    fn to_this_host(
        &self,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<IpNet>, KernelError>> + Send + '_>> {
        Box::pin(async {
            let found = route::to_this_host(self).await?;
            Ok(found.into_iter().map(|(prefix, _)| prefix).collect())
        })
    }
}

/// Everything besides the endpoints that enforcement follows.
pub struct Surroundings {
    /// This node's full name, `cluster/node`.
    pub own: String,
    /// Addresses of this node.
    pub host: Vec<IpAddr>,
    /// Reports the other addresses of this host.
    pub routes: Box<dyn HostRoutes>,
    /// Other prefixes that lead to this host, as last read; `None` before the first read.
    pub host_prefixes: Option<Vec<IpNet>>,
    /// Service addresses that are not translated before policy is applied.
    pub services: watch::Receiver<Arc<BTreeSet<IpAddr>>>,
    /// Addresses of this node's health endpoint.
    pub health: watch::Receiver<Vec<IpAddr>>,
    /// All nodes.
    pub nodes: watch::Receiver<Arc<NodeSet>>,
    /// Whether every source of addresses, including this node's endpoints, has reported since the start.
    pub has_heard: bool,
}

impl Surroundings {
    /// Whether an address leads to this host.
    pub(super) fn is_host(&self, ip: IpAddr) -> bool {
        let mut prefixes = self.host_prefixes.iter().flatten();
        self.host.contains(&ip) || prefixes.any(|prefix| prefix.contains(&ip))
    }

    /// Reads which prefixes lead to this host.
    async fn read_host(&mut self) -> Result<(), Problem> {
        match self.routes.to_this_host().await {
            Ok(prefixes) => {
                self.host_prefixes = Some(prefixes);
                Ok(())
            }
            Err(error) => Err(to_be_tried_again(
                "cannot read the routes to this host",
                &error,
            )),
        }
    }
}

impl Enforcer {
    /// Follows everything that policy depends on until the agent stops, and reports the outcome of each turn.
    pub async fn follow(self, manager: Manager, mut around: Surroundings, reporter: Reporter) {
        let mut revisions = self.0.revision.subscribe();
        let mut settings = self.0.settings.subscribe();
        let mut unknown_policies = self.0.unknown_policies.subscribe();
        let mut identities = self.0.identities.clone();
        let mut addresses = self.0.cluster.addresses();
        loop {
            revisions.mark_unchanged();
            settings.mark_unchanged();
            unknown_policies.mark_unchanged();
            identities.mark_unchanged();
            let known = addresses.borrow_and_update().clone();
            reporter.begin();
            let done = self.carry_on(&manager, &mut around, &known).await;
            let pause = done.is_err().then_some(AGAIN);
            reporter.end(done.unwrap_or_else(Some), pause);
            let again = async {
                match pause {
                    None => std::future::pending().await,
                    Some(pause) => tokio::time::sleep(pause).await,
                }
            };
            tokio::select! {
                Ok(()) = revisions.changed() => {}
                Ok(()) = settings.changed() => {}
                Ok(()) = unknown_policies.changed() => {}
                Ok(()) = identities.changed() => {}
                Ok(()) = addresses.changed() => {}
                Ok(()) = around.nodes.changed() => {}
                Ok(()) = around.health.changed() => {}
                Ok(()) = around.services.changed() => {}
                () = self.0.built.notified() => tokio::time::sleep(GATHER).await,
                () = again => {}
                else => return,
            }
        }
    }

    /// Brings endpoints and maps up to date. Fails with the worst of the problems; returns any problem that this node
    /// cannot fix by itself.
    ///
    /// An address gets the identity of a prefix only once the tables know that identity, and keeps it for as long as
    /// they need it. Otherwise packets would briefly be judged by an identity that the rules do not cover yet. While
    /// endpoints lag behind, prefixes stay unchanged, but all other addresses are updated.
    async fn carry_on(
        &self,
        manager: &Manager,
        around: &mut Surroundings,
        announced: &Addresses,
    ) -> Result<Option<Problem>, Problem> {
        let host_read = around.read_host().await;
        if around.host_prefixes.is_none() {
            // Without the host's prefixes, its addresses would count as world.
            return host_read.map(|()| None);
        }
        let repository = self.repository();
        // A change from here on wakes this task again.
        let nodes = around.nodes.borrow_and_update().clone();
        let distinctions = Distinctions::of(&repository, around, &nodes.nodes);
        let needs = &distinctions.needs;
        let mut both = needs.clone();
        both.keep(&self.0.cluster.local());
        let known = self.0.cluster.require(&both);
        self.wait_for_identities(known.all().collect()).await;
        let local = distinctions.addresses(&known, None);
        if !self.is_informed() {
            self.inform(around, &local)?;
        }

        let behind = self.bring_endpoints(manager).await;
        let lag = lag_of(&behind);
        self.report_lag(lag.clone());
        // An endpoint whose build failed for another reason does not hold back prefixes.
        let generation = self.generation();
        let tables_follow = self.subjects().name_their_tables(&generation);
        if tables_follow {
            self.0.covered.send_replace(generation.identities.clone());
        }

        // Endpoints of the previous agent still use its tables.
        let tables_know_local = tables_follow && !self.subjects().has_former();
        let local = match tables_know_local {
            true => local,
            // Tables still in use know no local identities besides those already in the ipcache.
            false => distinctions.addresses(&known, Some(&self.local_in_ipcache())),
        };
        let written = self
            .write_ipcache(around, announced, &local)
            .map_err(|error| to_be_tried_again("cannot update the ipcache", &error));
        if tables_know_local {
            self.0.cluster.require(needs);
        }
        if self.is_informed() && !self.subjects().has_former() {
            self.0.cluster.forget_earlier();
        }
        let swept = self
            .subjects()
            .sweep()
            .map_err(|error| to_be_tried_again("cannot remove unused policy tables", &error));
        let is_in_force = tables_follow && host_read.is_ok() && written.is_ok() && swept.is_ok();
        // Each build of a taken-over endpoint wakes this task again.
        if is_in_force && !self.subjects().has_former() {
            self.0.followed.send_replace(repository.revision());
            let mode = generation.settings.mode;
            self.0.followed_mode.send_replace(Some(mode));
        }
        host_read?;
        written?;
        swept.map(drop)?;
        match lag {
            // Their deletion is retried on the next request.
            Some(lag) if behind.are_all_leaving() => Ok(Some(Problem::warning(in_words(&lag)))),
            Some(lag) => Err(Problem::warning(in_words(&lag))),
            None if tables_follow => Ok(None),
            None => Err(Problem::warning(
                "some endpoints still use previous policy tables",
            )),
        }
    }

    /// Allows endpoints of the previous agent to be built once the cluster's identities are known; until then, reports
    /// why they are held back.
    fn inform(&self, around: &mut Surroundings, local: &LocalAddresses) -> Result<(), Problem> {
        let stale = self.0.identities.borrow().stale.clone();
        // From here on, endpoints may be built, and this map judges their packets at once.
        if stale.is_none() && self.unknown_policies().is_none() && self.0.is_blank {
            let announced = self.0.cluster.addresses().borrow().clone();
            self.write_ipcache(around, &announced, local)
                .map_err(|error| to_be_tried_again("cannot write the ipcache", &error))?;
        }
        let unknown = self.unknown_policies().map(RegenerationError);
        let reason = stale.map(|stale| uninformed(Some(&stale))).or(unknown);
        self.0.held_back.send_if_modified(|known| {
            let is_news = *known != reason;
            known.clone_from(&reason);
            is_news
        });
        Ok(())
    }

    /// Builds the endpoints that do not use their current tables, and makes space for those tables. Returns the
    /// endpoints that failed or were not built within [`PATIENCE`].
    async fn bring_endpoints(&self, manager: &Manager) -> Behind {
        let generation = self.generation();
        let mut closed = BTreeSet::new();
        loop {
            // Endpoints not built by then are requested again in the next turn.
            let _ = timeout(PATIENCE, self.wait_built(manager, &generation)).await;
            let made = self.free_tables_blocking(closed).await;
            let room = match made {
                Ok((room, closed_by_now)) => {
                    closed = closed_by_now;
                    room
                }
                Err(error) => {
                    warn!(%error, "cannot free space for policy tables");
                    break;
                }
            };
            let (ids, reason) = match &room {
                Room::Swept(ids) => (ids, "space for the policy was freed"),
                Room::Closed(ids) => {
                    let leaving = manager.leaving();
                    let staying = ids.iter().filter(|id| !leaving.contains_key(id));
                    manager.note(&staying.copied().collect(), CLOSED);
                    (ids, "the previous policy was removed to free space")
                }
            };
            if ids.is_empty() {
                break;
            }
            self.subjects().retry(ids);
            manager.regenerate(Some(ids), reason);
        }
        self.behind(manager, &generation)
    }

    /// Returns the endpoints that lag behind a generation.
    fn behind(&self, manager: &Manager, generation: &Generation) -> Behind {
        let leaving = manager.leaving();
        let mut subjects = self.subjects();
        subjects.note_leaving(leaving);
        subjects.behind(generation)
    }

    /// Waits until each endpoint uses its current table or has failed to build.
    async fn wait_built(&self, manager: &Manager, generation: &Generation) {
        let mut asked = BTreeSet::new();
        loop {
            let pending = self.behind(manager, generation).pending;
            if pending.is_empty() {
                return;
            }
            let news: BTreeSet<u16> = pending.difference(&asked).copied().collect();
            if !news.is_empty() {
                manager.regenerate(Some(&news), "policy changed");
                asked.extend(news);
            }
            self.0.built.notified().await;
        }
    }

    async fn free_tables_blocking(
        &self,
        mut closed: BTreeSet<Subject>,
    ) -> Result<(Room, BTreeSet<Subject>), RegenerationError> {
        self.blocking(move |enforcer| {
            let room = enforcer.free_tables(&mut closed);
            let room = room.map_err(|error| RegenerationError(error.to_string()))?;
            Ok((room, closed))
        })
        .await
    }

    /// Reports which endpoints lag behind, if that has changed.
    fn report_lag(&self, lag: Option<PolicyLag>) {
        self.0.lag.send_if_modified(|known| {
            if *known == lag {
                return false;
            }
            match &lag {
                Some(PolicyLag { endpoints, reason }) => {
                    warn!(
                        endpoints,
                        reason, "policy is not in force for some endpoints"
                    );
                }
                None => info!("policy is in force for all endpoints again"),
            }
            known.clone_from(&lag);
            true
        });
    }

    /// Returns the local identities that are in the ipcache now.
    fn local_in_ipcache(&self) -> BTreeMap<IpNet, Identity> {
        let map = lock(&self.0.ipcache);
        let known = map.entries();
        let known = known.map(|(prefix, entry)| (prefix, Identity(entry.identity)));
        known.filter(|(_, identity)| identity.is_local()).collect()
    }

    /// Writes all known addresses to the ipcache. The previous agent's entries stay until every source has reported
    /// since the start.
    pub(super) fn write_ipcache(
        &self,
        around: &mut Surroundings,
        announced: &Addresses,
        local: &LocalAddresses,
    ) -> Result<(), TrieError> {
        // Locked from here on, so that no concurrent update is lost.
        let mut map = lock(&self.0.ipcache);
        let (endpoints, has_former) = {
            let subjects = self.subjects();
            (subjects.addresses(), subjects.has_former())
        };
        let nodes = around.nodes.borrow().clone();
        let health = around.health.borrow_and_update().clone();
        let services = around.services.borrow_and_update().clone();
        // Since this turn started, the store may have been read and the endpoints built.
        let is_latest = || *announced == **self.0.cluster.addresses().borrow();
        around.has_heard = around.has_heard
            || self.is_informed()
                && !has_former
                && nodes.sources.iter().all(|source| source.stale.is_none())
                && is_latest();
        let known = ipcache(IpcacheInputs {
            host: &around.host,
            host_prefixes: around.host_prefixes.as_deref().unwrap_or_default(),
            services: &services,
            health: &health,
            endpoints: &endpoints,
            own: &around.own,
            nodes: &nodes.nodes,
            of_nodes: &local.nodes,
            announced,
            cidrs: &local.cidrs,
        });
        let mut entries: BTreeMap<IpNet, IpcacheEntry> = match around.has_heard {
            true => BTreeMap::new(),
            false => map.entries().collect(),
        };
        entries.extend(known.into_iter().map(|(prefix, (identity, node))| {
            let entry = IpcacheEntry {
                identity: identity.0,
                node: node.map(Addr::from).unwrap_or_default(),
                ..IpcacheEntry::default()
            };
            (prefix, entry)
        }));
        map.set_all(&entries)
    }

    /// Waits until the labels of all these identities are known.
    async fn wait_for_identities(&self, wanted: BTreeSet<Identity>) {
        let mut identities = self.0.identities.clone();
        let known = identities.wait_for(|known| {
            wanted
                .iter()
                .all(|identity| known.labels.contains_key(identity))
        });
        // Labels arrive within 100 ms; any still missing come with the next change.
        let _ = timeout(PATIENCE, known).await;
    }
}

/// Logs a step that failed in this turn. Until it succeeds, policy is not fully enforced. Restarting the agent would
/// not help.
fn to_be_tried_again(what: &str, error: &dyn std::error::Error) -> Problem {
    warn!(%error, "{what}; it will be retried");
    Problem::warning(format!("{what}: {error}"))
}

/// Describes which endpoints lag behind, if any.
fn lag_of(behind: &Behind) -> Option<PolicyLag> {
    let endpoints = behind.failed.len() + behind.pending.len();
    let reason = behind.failed.values().next();
    (endpoints > 0).then(|| PolicyLag {
        endpoints: endpoints as u64,
        reason: reason
            .map_or("they are still being built", String::as_str)
            .to_owned(),
    })
}

fn in_words(PolicyLag { endpoints, reason }: &PolicyLag) -> String {
    let plural = if *endpoints == 1 { "" } else { "s" };
    format!("not in force for {endpoints} endpoint{plural}: {reason}")
}
