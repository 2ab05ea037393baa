//! The manager with fake devices, identities and programs.

mod holds;
mod labels;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use health_model::api::{Enforcement, HealthState};
use health_model::identity::Identity;
use health_net::mac::MacAddr;
use health_net::netns::{NetNsError, NetNsId};
use health_registry::identity::HeldIdentities;
use jiff::Timestamp;
use tempfile::TempDir;

use super::*;
use crate::health::HealthDescription;
use crate::identities::{Hold, IdentityUnavailable};
use crate::log::Status;
use crate::regenerate::{RealizedPolicy, Regeneration, RegenerationError};
use crate::workload::{Blueprint, DeviceFault, FoundDevice, SavedEndpoint, Task, WorkloadError};

type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Fakes of everything that a manager uses, with a record of its calls.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) devices: Mutex<BTreeMap<String, (u16, u32)>>,
    /// Whether dumps lack all devices.
    are_lists_empty: Mutex<bool>,
    /// Whether the namespaces' files are missing from the agent's mount namespace.
    sees_no_files: Mutex<bool>,
    /// Existing namespaces, by file.
    namespaces: Mutex<BTreeMap<PathBuf, u64>>,
    in_use: Mutex<BTreeSet<IpAddr>>,
    /// How often the manager checked whether an address is in use.
    asked: AtomicUsize,
    /// Names of devices that are down.
    down: Mutex<BTreeSet<String>>,
    /// The namespace of each device's inner end.
    inside: Mutex<BTreeMap<String, u64>>,
    /// The faults of devices.
    faults: Mutex<Vec<DeviceFault>>,
    /// MTU per device.
    mtus: Mutex<BTreeMap<String, u32>>,
    /// The step that fails, if any.
    pub(crate) failing: Mutex<Option<&'static str>>,
    identities: Mutex<HashMap<LabelSet, Identity>>,
    held: Mutex<BTreeMap<Identity, i32>>,
    /// Identities that were released while the last build of an endpoint still used them.
    given_back_in_use: Mutex<Vec<Identity>>,
    held_by_labels: watch::Sender<Arc<HeldIdentities>>,
    is_store_away: Mutex<bool>,
    /// Labels for which the store has no identity.
    refused: Mutex<BTreeSet<LabelSet>>,
    /// Whether the store replies.
    may_acquire: watch::Sender<bool>,
    built: Mutex<Vec<Regeneration>>,
    served: Mutex<BTreeSet<u16>>,
    running: AtomicUsize,
    most_running: AtomicUsize,
    /// Whether the activation of devices is held up.
    holds_activation: watch::Sender<bool>,
    held_back: watch::Sender<Option<RegenerationError>>,
    /// An identity that no policy covers yet.
    uncovered: watch::Sender<Option<Identity>>,
    /// Whether builds may continue.
    may_build: watch::Sender<bool>,
}

impl World {
    /// A world that is empty except for the namespaces `/n0` to `/n19`.
    pub(crate) fn with_namespaces() -> Self {
        let world = Self::default();
        world.may_acquire.send_replace(true);
        world.may_build.send_replace(true);
        for n in 0..20 {
            let path = PathBuf::from(format!("/n{n}"));
            world.namespaces.lock().unwrap().insert(path, 1000 + n);
        }
        world
    }

    fn fails(&self, step: &'static str) -> bool {
        *self.failing.lock().unwrap() == Some(step)
    }

    fn fail(step: &str) -> WorkloadError {
        WorkloadError::NotRunning(step.to_owned())
    }

    fn found(&self) -> Vec<FoundDevice> {
        let devices = self.devices.lock().unwrap();
        let down = self.down.lock().unwrap();
        let namespaces = self.namespaces.lock().unwrap();
        let inside = self.inside.lock().unwrap();
        let found = devices
            .iter()
            .map(|(device, (endpoint, ifindex))| FoundDevice {
                device: device.clone(),
                ifindex: *ifindex,
                endpoint: *endpoint,
                is_up: !down.contains(device),
                has_peer: (inside.get(device))
                    .is_none_or(|ino| namespaces.values().any(|there| there == ino)),
            });
        found.collect()
    }

    fn end_namespace(&self, path: &str) {
        self.namespaces.lock().unwrap().remove(Path::new(path));
    }

    /// Gives labels a new identity, as does a store that lost the old one.
    fn number(&self, labels: &LabelSet, identity: Identity) {
        let mut identities = self.identities.lock().unwrap();
        identities.insert(labels.clone(), identity);
        let held = identities.iter();
        let held = held.map(|(labels, identity)| (Arc::new(labels.clone()), *identity));
        self.held_by_labels.send_replace(Arc::new(held.collect()));
    }
}

impl Devices for World {
    fn look_at(&self, netns: &Path) -> Result<NetNsId, WorkloadError> {
        if *self.sees_no_files.lock().unwrap() {
            return Err(NetNsError::NotANamespace(netns.to_owned()).into());
        }
        match self.namespaces.lock().unwrap().get(netns) {
            Some(ino) => Ok(NetNsId { dev: 4, ino: *ino }),
            None => Err(NetNsError::NotANamespace(netns.to_owned()).into()),
        }
    }

    fn is_in_use(&self, address: IpAddr) -> Task<'_, Result<bool, WorkloadError>> {
        Box::pin(async move {
            let asked = self.asked.fetch_add(1, Ordering::SeqCst);
            assert!(asked < 10_000, "asked for addresses without an end");
            Ok(self.in_use.lock().unwrap().contains(&address))
        })
    }

    fn create<'a>(&'a self, blueprint: &'a Blueprint) -> Task<'a, Result<u32, WorkloadError>> {
        Box::pin(async {
            if self.fails("create") {
                return Err(Self::fail("create"));
            }
            let mut mtus = self.mtus.lock().unwrap();
            mtus.insert(blueprint.device.clone(), blueprint.mtu);
            drop(mtus);
            let ifindex = 100 + u32::from(blueprint.id);
            let device = blueprint.device.clone();
            if let Some(ino) = self.namespaces.lock().unwrap().get(&blueprint.netns) {
                self.inside.lock().unwrap().insert(device.clone(), *ino);
            }
            let mut devices = self.devices.lock().unwrap();
            devices.insert(device, (blueprint.id, ifindex));
            Ok(ifindex)
        })
    }

    fn activate<'a>(&'a self, _: &'a Blueprint, _: u32) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(async {
            let mut holds = self.holds_activation.subscribe();
            holds.wait_for(|holds| !*holds).await.unwrap();
            match self.fails("activate") {
                true => Err(Self::fail("activate")),
                false => Ok(()),
            }
        })
    }

    fn set_mtu<'a>(&'a self, blueprint: &'a Blueprint) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(async {
            if self.fails("set_mtu") {
                return Err(Self::fail("set_mtu"));
            }
            let mut mtus = self.mtus.lock().unwrap();
            mtus.insert(blueprint.device.clone(), blueprint.mtu);
            Ok(())
        })
    }

    fn inspect<'a>(
        &'a self,
        _: &'a Blueprint,
        _: u32,
    ) -> Task<'a, Result<Vec<DeviceFault>, WorkloadError>> {
        Box::pin(async { Ok(self.faults.lock().unwrap().clone()) })
    }

    fn repair<'a>(
        &'a self,
        _: &'a Blueprint,
        _: u32,
        fault: &'a DeviceFault,
    ) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(async move {
            if self.fails("repair") {
                return Err(Self::fail("repair"));
            }
            self.faults.lock().unwrap().retain(|one| one != fault);
            Ok(())
        })
    }

    fn remove<'a>(&'a self, device: &'a str) -> Task<'a, Result<bool, WorkloadError>> {
        Box::pin(async move {
            if self.fails("remove") {
                return Err(Self::fail("remove"));
            }
            Ok(self.devices.lock().unwrap().remove(device).is_some())
        })
    }

    fn find(&self, ifindex: u32) -> Task<'_, Result<Option<FoundDevice>, WorkloadError>> {
        let found = self.found().into_iter().find(|one| one.ifindex == ifindex);
        Box::pin(std::future::ready(Ok(found)))
    }

    fn list(&self) -> Task<'_, Result<Vec<FoundDevice>, WorkloadError>> {
        let listed = match *self.are_lists_empty.lock().unwrap() {
            true => Vec::new(),
            false => self.found(),
        };
        Box::pin(std::future::ready(Ok(listed)))
    }
}

impl IdentitySource for World {
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Answer<'a, Result<Hold, IdentityUnavailable>> {
        Box::pin(async {
            let mut may_acquire = self.may_acquire.subscribe();
            may_acquire.wait_for(|may| *may).await.unwrap();
            if *self.is_store_away.lock().unwrap() {
                return Err(IdentityUnavailable("the store is away".to_owned()));
            }
            if self.refused.lock().unwrap().contains(labels) {
                return Err(IdentityUnavailable("no identity is left".to_owned()));
            }
            let mut identities = self.identities.lock().unwrap();
            let next = Identity(300 + u32::try_from(identities.len()).unwrap());
            let identity = *identities.entry(labels.clone()).or_insert(next);
            *self.held.lock().unwrap().entry(identity).or_default() += 1;
            Ok(Hold {
                labels: labels.clone(),
                identity,
            })
        })
    }

    fn release(&self, hold: Hold) -> Answer<'_, ()> {
        let mut held = self.held.lock().unwrap();
        let count = held.entry(hold.identity).or_default();
        *count -= 1;
        let (built, served) = (self.built.lock().unwrap(), self.served.lock().unwrap());
        let served = built.iter().filter(|one| served.contains(&one.id));
        let last: BTreeMap<u16, Identity> = served.map(|one| (one.id, one.identity)).collect();
        if *count == 0 && last.values().any(|identity| *identity == hold.identity) {
            self.given_back_in_use.lock().unwrap().push(hold.identity);
        }
        Box::pin(std::future::ready(()))
    }

    fn held(&self) -> watch::Receiver<Arc<HeldIdentities>> {
        self.held_by_labels.subscribe()
    }
}

impl Regenerator for World {
    fn held_back(&self) -> watch::Receiver<Option<RegenerationError>> {
        self.held_back.subscribe()
    }

    fn until_informed(&self) -> Answer<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn until_covered(&self, identity: Identity) -> Answer<'_, ()> {
        Box::pin(async move {
            let mut uncovered = self.uncovered.subscribe();
            let covered = uncovered.wait_for(|uncovered| *uncovered != Some(identity));
            covered.await.unwrap();
        })
    }

    fn regenerate<'a>(
        &'a self,
        endpoint: &'a Regeneration,
    ) -> Answer<'a, Result<RealizedPolicy, RegenerationError>> {
        Box::pin(async {
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_running.fetch_max(running, Ordering::SeqCst);
            let mut may_build = self.may_build.subscribe();
            may_build.wait_for(|may| *may).await.unwrap();
            let mut held_back = self.held_back.subscribe();
            let is_former = self.served.lock().unwrap().contains(&endpoint.id);
            if is_former {
                // The other endpoints must wait.
                let known = held_back.wait_for(Option::is_none);
                let _ = tokio::time::timeout(Duration::from_secs(5), known).await;
            }
            self.running.fetch_sub(1, Ordering::SeqCst);
            self.built.lock().unwrap().push(endpoint.clone());
            if self.fails("regenerate") {
                return Err(RegenerationError("the verifier refused it".to_owned()));
            }
            self.served.lock().unwrap().insert(endpoint.id);
            Ok(RealizedPolicy {
                policy: 1,
                enforces_ingress: true,
                enforces_egress: false,
            })
        })
    }

    fn shut_off(&self, id: u16) -> Answer<'_, Result<Option<RealizedPolicy>, RegenerationError>> {
        let is_served = self.served.lock().unwrap().contains(&id);
        let realized = is_served.then_some(RealizedPolicy {
            policy: 2,
            enforces_ingress: true,
            enforces_egress: true,
        });
        Box::pin(std::future::ready(Ok(realized)))
    }

    fn remove(&self, id: u16) -> Answer<'_, Result<(), RegenerationError>> {
        self.served.lock().unwrap().remove(&id);
        Box::pin(std::future::ready(Ok(())))
    }
}

struct Bed {
    world: Arc<World>,
    manager: Manager,
    dir: TempDir,
}

impl Bed {
    async fn start() -> Self {
        let world = Arc::new(World::with_namespaces());
        Self::with(world, tempfile::tempdir().unwrap()).await
    }

    async fn with(world: Arc<World>, dir: TempDir) -> Self {
        let identities = world.clone();
        Self::with_identities(world, dir, identities).await
    }

    async fn with_identities(
        world: Arc<World>,
        dir: TempDir,
        identities: Arc<dyn IdentitySource>,
    ) -> Self {
        Self::with_sources(world, dir, identities, None).await
    }

    async fn with_sources(
        world: Arc<World>,
        dir: TempDir,
        identities: Arc<dyn IdentitySource>,
        pods: Option<watch::Receiver<Arc<PodLabels>>>,
    ) -> Self {
        let cidrs = ["10.0.0.0/24", "fd00::/64"].map(|cidr| cidr.parse().unwrap());
        let options = ManagerOptions {
            states: StateDir::of(dir.path()),
            ipam: NodeIpam::new(&cidrs, &[], &[], Duration::from_secs(60)).unwrap(),
            node_addresses: Vec::new(),
            health: Some(health()),
            mtu: 1500,
            parallel: 2,
            devices: world.clone(),
            identities,
            pods,
            regenerator: world.clone(),
            clock: || Timestamp::UNIX_EPOCH,
        };
        let survey = survey(&options.states, &*world).await.unwrap();
        let manager = Manager::start(options, survey);
        Self {
            world,
            manager,
            dir,
        }
    }

    /// Returns the same machine after the agent was killed and restarted.
    async fn restarted(self) -> Self {
        Self::with(self.world, self.dir).await
    }

    async fn create(&self, n: u16, labels: &[&str]) -> Result<Arc<Endpoint>, EndpointError> {
        self.manager.create(new(n, labels)).await
    }

    /// Waits until an endpoint is ready and has no pending work.
    async fn ready(&self, id: u16) -> Arc<Endpoint> {
        let wait = self.manager.wait_until(|table| {
            let is_busy = table.queue.is_running(id) || table.queue.waiting() > 0;
            let entry = table.entries.get(&id)?;
            (entry.shown().state == "ready" && !is_busy).then(|| entry.shown())
        });
        tokio::time::timeout(Duration::from_secs(3600), wait)
            .await
            .unwrap()
    }

    fn states(&self, id: u16) -> Vec<String> {
        let mut states: Vec<String> = Vec::new();
        for entry in self.manager.log(id).unwrap() {
            let state = entry.state.to_string();
            if states.last() != Some(&state) {
                states.push(state);
            }
        }
        states
    }

    fn held(&self) -> Vec<(Identity, i32)> {
        let held = self.world.held.lock().unwrap();
        held.iter()
            .filter(|(_, n)| **n != 0)
            .map(|(id, n)| (*id, *n))
            .collect()
    }

    /// Returns all endpoints except the health endpoint.
    fn workloads(&self) -> Vec<Arc<Endpoint>> {
        let mut all = self.manager.endpoints();
        all.retain(|one| one.id != HEALTH);
        all
    }

    /// Returns the workload endpoints that are not deleted.
    fn living(&self) -> Vec<Arc<Endpoint>> {
        let mut all = self.workloads();
        all.retain(|one| one.state != "disconnected");
        all
    }

    /// Waits until the saved endpoint has these labels in use. Paused time runs ahead of the thread that writes the
    /// file.
    async fn wait_saved(&self, labels: &LabelSet) {
        let start = std::time::Instant::now();
        loop {
            let (saved, _) = StateDir::of(self.dir.path()).load().unwrap();
            if saved.iter().any(|one| one.labels_in_use() == labels) {
                return;
            }
            assert!(start.elapsed() < REAL_PATIENCE, "{saved:?}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Asserts that all resources of all endpoints are gone; deleted endpoints may still be shown.
    fn assert_empty(&self) {
        assert_eq!(self.living(), []);
        assert!(self.world.devices.lock().unwrap().is_empty());
        assert!(self.world.served.lock().unwrap().is_empty());
        assert_eq!(self.held(), []);
        let (saved, _) = StateDir::of(self.dir.path()).load().unwrap();
        assert_eq!(saved, []);
        assert_eq!(self.manager.table().ipam.leaks(|id| id == HEALTH), []);
    }
}

/// How long a test waits for a real thread.
const REAL_PATIENCE: Duration = Duration::from_secs(120);

/// Id of the health endpoint.
const HEALTH: u16 = 7;

/// A healthy health endpoint.
fn health() -> HealthReport {
    HealthReport {
        endpoint: HealthDescription {
            id: HEALTH,
            ipv4: Some([10, 0, 0, 7].into()),
            ipv6: None,
            ifindex: 5,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            host_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            netns: "/run/netns/health-a".into(),
            has_policy: false,
        },
        repaired: Vec::new(),
        repairs: BTreeMap::new(),
        connection_problem: None,
        program_problem: None,
    }
}

fn new(n: u16, labels: &[&str]) -> NewEndpoint {
    NewEndpoint {
        netns: format!("/n{n}").into(),
        labels: LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap(),
        name: Some(format!("w{n}")),
        container_id: Some(format!("c{n}")),
        ..NewEndpoint::default()
    }
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_is_made_changed_and_deleted_and_leaves_nothing() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    assert_eq!((made.state.as_str(), made.identity), ("ready", 300));
    assert_eq!(made.policy_ingress.text(), "Enabled");
    assert_eq!(made.policy_egress.text(), "Disabled");
    assert!(made.ipv4.is_some() && made.ipv6.is_some());
    assert_eq!(
        bed.states(made.id),
        [
            "waiting-for-identity",
            "waiting-to-regenerate",
            "regenerating",
            "ready"
        ]
    );
    let add = vec!["app=b".parse().unwrap()];
    bed.manager
        .change_labels(made.id, add, vec![])
        .await
        .unwrap();
    let changed = bed.ready(made.id).await;
    assert_eq!(
        (changed.identity, &changed.labels[..]),
        (301, &["unspec:app=b".to_owned()][..])
    );
    assert_eq!(
        bed.states(made.id)[3..],
        [
            "ready",
            "waiting-for-identity",
            "waiting-to-regenerate",
            "regenerating",
            "ready"
        ]
    );
    // The old identity is released once packets no longer meet it.
    assert_eq!(bed.held(), [(Identity(301), 1)]);
    let deleted = bed.manager.delete(&Selector::Container("c1".into())).await;
    assert_eq!(deleted.unwrap(), [made.id]);
    assert_eq!(
        bed.manager.delete(&Selector::Id(made.id)).await.unwrap(),
        [0; 0]
    );
    bed.assert_empty();
}

#[tokio::test(start_paused = true)]
async fn a_deleted_endpoint_is_shown_as_disconnected_for_a_minute() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    let meant = Selector::Id(made.id);
    bed.manager.delete(&meant).await.unwrap();
    let shown = bed.workloads();
    let states: Vec<_> = shown.iter().map(|one| (one.id, &*one.state)).collect();
    assert_eq!(states, [(made.id, "disconnected")]);
    assert_eq!(
        bed.states(made.id)[3..],
        ["ready", "disconnecting", "disconnected"]
    );
    let health = bed.manager.health(made.id).unwrap();
    assert_eq!(health.overall_health.text(), "Disabled");
    assert!(!health.connected);
    // All the endpoint's resources are free, and it can no longer be changed.
    let again = bed.create(1, &["app=a"]).await.unwrap();
    assert_ne!(again.id, made.id);
    assert_eq!(bed.manager.delete(&meant).await.unwrap(), [0; 0]);
    let container = Selector::Container("c1".into());
    assert_eq!(bed.manager.delete(&container).await.unwrap(), [again.id]);

    tokio::time::sleep(Duration::from_secs(59)).await;
    assert_eq!(bed.workloads().len(), 2);
    let changes = bed.manager.changes();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(bed.workloads(), []);
    assert!(changes.has_changed().unwrap());
    assert!(bed.manager.log(made.id).is_none());
    assert!(bed.manager.health(made.id).is_none());
}

#[tokio::test(start_paused = true)]
async fn why_an_endpoint_was_not_made_can_be_read_in_its_log() {
    let bed = Bed::start().await;
    *bed.world.failing.lock().unwrap() = Some("activate");
    let error = bed.create(1, &[]).await.unwrap_err().to_string();
    let [shown] = &bed.workloads()[..] else {
        panic!("one is to be shown");
    };
    let log = bed.manager.log(shown.id).unwrap();
    let problem = log.iter().find(|entry| entry.status == Status::Failure);
    assert_eq!(
        problem.unwrap().message,
        format!("creation failed: {error}")
    );
}

#[tokio::test(start_paused = true)]
async fn the_health_endpoint_is_shown_as_it_was_found() {
    let bed = Bed::start().await;
    let manager = &bed.manager;
    let shown = || manager.endpoints()[0].clone();
    let reported = || {
        let health = manager.health(HEALTH).unwrap();
        (
            shown().state.clone(),
            health.overall_health,
            health.bpf,
            health.connected,
        )
    };
    let last = || manager.log(HEALTH).unwrap().last().unwrap().clone();
    let well = ("ready".to_owned(), HealthState::Ok, HealthState::Ok, true);
    assert_eq!(reported(), well);
    assert_eq!(
        (shown().labels[0].as_str(), shown().identity),
        ("reserved:health", 4)
    );
    let taken = manager.taken_addresses().unwrap();
    assert_eq!(
        (taken[0].endpoint, taken[0].name.as_str()),
        (HEALTH, "health")
    );

    // An unchanged finding is not reported again.
    let mut changes = manager.changes();
    let lines = manager.log(HEALTH).unwrap().len();
    manager.note_health(health()).unwrap();
    assert!(!changes.has_changed().unwrap());

    let replaced = HealthReport {
        connection_problem: Some("veth lxc_health is replaced by another device".to_owned()),
        program_problem: Some("no programs".to_owned()),
        ..health()
    };
    for _ in 0..2 {
        manager.note_health(replaced.clone()).unwrap();
        let broken = (
            "waiting-to-regenerate".to_owned(),
            HealthState::Failure,
            HealthState::Failure,
            false,
        );
        assert_eq!(reported(), broken);
    }
    assert!(changes.has_changed().unwrap());
    changes.mark_unchanged();
    let log = manager.log(HEALTH).unwrap();
    let failures: Vec<_> = log
        .iter()
        .filter(|line| line.status == Status::Failure)
        .collect();
    assert_eq!(failures.len(), 1, "{log:?}");
    assert!(
        failures[0].message.contains("lxc_health is replaced"),
        "{log:?}"
    );
    assert!(log.len() > lines);

    let detached = HealthReport {
        program_problem: Some("program from_endpoint was detached".to_owned()),
        ..health()
    };
    manager.note_health(detached).unwrap();
    let (state, overall, bpf, connected) = reported();
    assert_eq!((state.as_str(), connected), ("waiting-to-regenerate", true));
    assert_eq!((overall, bpf), (HealthState::Failure, HealthState::Failure));

    let repaired = HealthReport {
        repaired: vec!["program from_endpoint was detached".to_owned()],
        repairs: BTreeMap::from([("program-detached".to_owned(), 1)]),
        ..health()
    };
    manager.note_health(repaired).unwrap();
    assert_eq!(reported(), well);
    assert_eq!(
        last().message,
        "regenerated: program from_endpoint was detached"
    );
    assert_eq!(shown().repairs["program-detached"], 1);

    // The health endpoint is recreated with another address and id; the old ones are free.
    let mut other = health();
    other.endpoint.id = 8;
    other.endpoint.ipv4 = Some([10, 0, 0, 8].into());
    manager.note_health(other).unwrap();
    let taken = manager.taken_addresses().unwrap();
    assert_eq!(taken.len(), 1);
    assert_eq!(
        (taken[0].endpoint, taken[0].address),
        (8, "10.0.0.8".parse().unwrap())
    );
    assert!(manager.log(HEALTH).is_none());
}

#[tokio::test(start_paused = true)]
async fn whatever_step_fails_nothing_is_left() {
    for step in ["create", "regenerate", "activate"] {
        let bed = Bed::start().await;
        *bed.world.failing.lock().unwrap() = Some(step);
        let error = bed.create(1, &["app=a"]).await.unwrap_err().to_string();
        let naming = if step == "regenerate" {
            "the verifier refused it"
        } else {
            step
        };
        assert!(error.contains(naming), "{error}");
        bed.assert_empty();
        *bed.world.failing.lock().unwrap() = None;
        bed.create(1, &["app=a"]).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_deleted_is_reported_and_deleted_later() {
    let bed = Bed::start().await;
    let made = bed.create(1, &[]).await.unwrap();
    *bed.world.failing.lock().unwrap() = Some("remove");
    bed.manager
        .delete(&Selector::Id(made.id))
        .await
        .unwrap_err();
    let shown = &bed.living()[0];
    assert_eq!(shown.state, "disconnecting");
    assert_eq!(shown.policy_egress, Enforcement::Enabled);
    let log = bed.manager.log(made.id).unwrap();
    let [.., failed, shut_off] = &log[..] else {
        panic!("{log:?}");
    };
    assert_eq!(failed.status, Status::Failure);
    assert_eq!(shut_off.message, "all its traffic is dropped");
    *bed.world.failing.lock().unwrap() = None;
    assert_eq!(
        bed.manager.delete(&Selector::Id(made.id)).await.unwrap(),
        [made.id]
    );
    bed.assert_empty();
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_whose_device_is_down_is_not_connected() {
    let bed = Bed::start().await;
    let made = bed.create(1, &[]).await.unwrap();
    let health = || {
        let health = bed.manager.health(made.id).unwrap();
        (health.overall_health, health.connected)
    };
    assert_eq!(health(), (HealthState::Ok, true));
    let device = made.interface.clone();
    bed.world.down.lock().unwrap().insert(device.clone());
    tokio::time::sleep(LOOK_PERIOD * 3).await;
    assert_eq!(health(), (HealthState::Failure, false));
    let log = bed.manager.log(made.id).unwrap();
    let reported = format!("its device {device} is down");
    let of_it = log.iter().filter(|line| line.message == reported);
    assert_eq!(of_it.count(), 1, "{log:?}");
    bed.world.down.lock().unwrap().clear();
    tokio::time::sleep(LOOK_PERIOD * 2).await;
    assert_eq!(health(), (HealthState::Ok, true));
}

#[tokio::test(start_paused = true)]
async fn what_others_did_to_the_devices_of_an_endpoint_is_reported_and_put_right() {
    let bed = Bed::start().await;
    let made = bed.create(1, &[]).await.unwrap();
    let health = || {
        let health = bed.manager.health(made.id).unwrap();
        (health.overall_health, health.connected)
    };
    let lines = |words: &str| {
        let log = bed.manager.log(made.id).unwrap();
        log.iter()
            .filter(|line| line.message.contains(words))
            .count()
    };
    let lost = DeviceFault::NeighbourMissing(made.ipv4.unwrap());
    let words = format!("the neighbour entry of {} is missing", made.ipv4.unwrap());
    bed.world.faults.lock().unwrap().push(lost.clone());
    tokio::time::sleep(LOOK_PERIOD * 2).await;
    assert_eq!((health(), lines(&words)), ((HealthState::Ok, true), 1));
    assert_eq!(lines("in order again"), 1);
    let repairs = BTreeMap::from([("neighbour-missing".to_owned(), 1)]);
    assert_eq!(bed.manager.repairs(), repairs);
    let shown = bed.manager.endpoints();
    let shown = shown.iter().find(|one| one.id == made.id).unwrap();
    assert_eq!(shown.repairs, repairs);

    *bed.world.failing.lock().unwrap() = Some("repair");
    bed.world.faults.lock().unwrap().push(lost);
    tokio::time::sleep(LOOK_PERIOD * 3).await;
    assert_eq!(health(), (HealthState::Failure, false));
    assert_eq!(lines("not repaired"), 1);
    *bed.world.failing.lock().unwrap() = None;
    tokio::time::sleep(LOOK_PERIOD * 2).await;
    assert_eq!(health(), (HealthState::Ok, true));
    assert_eq!(lines("in order again"), 2);
}

#[tokio::test(start_paused = true)]
async fn contradictions_are_refused_by_name() {
    let bed = Bed::start().await;
    let made = bed.create(1, &[]).await.unwrap();
    let id = made.id;
    let reported = |new: NewEndpoint| {
        let manager = bed.manager.clone();
        async move { manager.create(new).await.unwrap_err().to_string() }
    };
    let container = NewEndpoint {
        container_id: Some("c1".into()),
        ..new(2, &[])
    };
    assert_eq!(
        reported(container).await,
        format!("eth0 of container c1 is already endpoint {id}; delete it first")
    );
    let device = NewEndpoint {
        container_id: None,
        ..new(1, &[])
    };
    assert_eq!(
        reported(device).await,
        format!("device eth0 in /n1 already belongs to endpoint {id}")
    );
    let health = NewEndpoint {
        ipv4: Some([10, 0, 0, 7].into()),
        ..new(2, &[])
    };
    assert_eq!(
        reported(health).await,
        "address 10.0.0.7 belongs to endpoint 7 (health); request another, or delete that endpoint"
    );
    bed.world
        .in_use
        .lock()
        .unwrap()
        .insert("10.0.0.9".parse().unwrap());
    let foreign = NewEndpoint {
        ipv4: Some([10, 0, 0, 9].into()),
        ..new(2, &[])
    };
    assert_eq!(
        reported(foreign).await,
        "address 10.0.0.9 is already in use on this host"
    );
    assert_eq!(bed.living().len(), 1);
    let error = bed.manager.delete(&Selector::Id(7)).await.unwrap_err();
    assert_eq!(error.kind(), crate::error::ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn where_others_have_all_addresses_that_are_left_this_is_reported() {
    let bed = Bed::start().await;
    let one = bed.create(1, &[]).await.unwrap();
    let all = (0..=255).map(|n| IpAddr::from([10, 0, 0, n]));
    bed.world.in_use.lock().unwrap().extend(all);
    let error = bed.create(2, &[]).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "no free address in pod CIDR 10.0.0.0/24: 251 without an endpoint are in use on this host; free \
         them, or give the node a larger one"
    );
    assert_eq!(error.kind(), crate::error::ErrorKind::Unavailable);
    assert_eq!(bed.living(), [one]);
    // An address that became free is found even before its cool-down ends.
    bed.world.in_use.lock().unwrap().clear();
    bed.create(2, &[]).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn endpoints_follow_when_their_labels_get_another_identity() {
    let bed = Bed::start().await;
    let labels = new(1, &["app=a"]).labels;
    bed.world.number(&labels, Identity(300));
    let [one, two] = [1, 2].map(|n| bed.create(n, &["app=a"]));
    let (one, two) = (one.await.unwrap(), two.await.unwrap());
    let other = bed.create(3, &["app=b"]).await.unwrap();
    assert_eq!((one.identity, two.identity), (300, 300));
    bed.world.built.lock().unwrap().clear();

    *bed.world.is_store_away.lock().unwrap() = true;
    bed.world.number(&labels, Identity(777));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(bed.states(one.id).last().unwrap(), "waiting-for-identity");
    // The identity changes again before it could be requested.
    bed.world.number(&labels, Identity(778));
    *bed.world.is_store_away.lock().unwrap() = false;
    tokio::time::sleep(Duration::from_secs(60)).await;
    for id in [one.id, two.id] {
        assert_eq!(bed.ready(id).await.identity, 778);
        let log = bed.manager.log(id).unwrap();
        let reported =
            |entry: &&LogEntry| entry.message == "the identity of its labels has changed";
        assert_eq!(log.iter().filter(reported).count(), 1);
    }
    let built = bed.world.built.lock().unwrap().clone();
    assert!(built.iter().all(|one| one.id != other.id));
    assert_eq!(
        bed.held(),
        [(Identity(other.identity), 1), (Identity(778), 2)]
    );
    let (saved, _) = StateDir::of(bed.dir.path()).load().unwrap();
    let of_two = saved.iter().filter(|saved| saved.identity == Identity(778));
    assert_eq!(of_two.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn one_that_is_deleted_while_its_identity_is_asked_for_holds_none() {
    let bed = Bed::start().await;
    bed.world.may_acquire.send_replace(false);
    let manager = bed.manager.clone();
    let making = tokio::spawn(async move { manager.create(new(1, &["app=a"])).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    let id = bed.workloads()[0].id;
    let manager = bed.manager.clone();
    let deleting = tokio::spawn(async move { manager.delete(&Selector::Id(id)).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    bed.world.may_acquire.send_replace(true);
    making.await.unwrap().unwrap_err();
    assert_eq!(deleting.await.unwrap().unwrap(), [id]);
    bed.assert_empty();
}

#[tokio::test(start_paused = true)]
async fn without_the_store_an_endpoint_fails_closed_until_it_is_back() {
    let bed = Bed::start().await;
    *bed.world.is_store_away.lock().unwrap() = true;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    let is_closed = |one: &Endpoint| {
        assert_eq!(
            (one.state.as_str(), one.identity),
            ("waiting-for-identity", 5)
        );
        let reason = one.reason.as_deref().unwrap();
        assert!(
            reason.starts_with("its labels have no identity yet"),
            "{reason}"
        );
        assert!(reason.contains("the store is away"), "{reason}");
        assert!(bed.world.built.lock().unwrap().last().unwrap().fails_closed);
    };
    is_closed(&made);
    let reported = bed.manager.problem().unwrap();
    assert!(
        reported.starts_with(&format!("endpoint {}: ", made.id)),
        "{reported}"
    );
    // An endpoint without labels is not affected.
    let init = bed.create(2, &[]).await.unwrap();
    assert_eq!((init.state.as_str(), init.identity), ("ready", 5));
    assert_eq!(init.reason, None);
    assert!(!bed.world.built.lock().unwrap().last().unwrap().fails_closed);
    bed.manager
        .regenerate(Some(&BTreeSet::from([made.id])), "policy changed");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let shown = bed.living().into_iter().find(|one| one.id == made.id);
    is_closed(&shown.unwrap());
    let log = bed.manager.log(made.id).unwrap();
    let reported = log
        .iter()
        .filter(|entry| entry.message.contains("the store is away"));
    assert!(
        (1..=2).contains(&reported.count()),
        "reported once, not at each attempt"
    );
    *bed.world.is_store_away.lock().unwrap() = false;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let ready = bed.ready(made.id).await;
    assert_eq!((ready.identity, &ready.reason), (300, &None));
    assert!(!bed.world.built.lock().unwrap().last().unwrap().fails_closed);
    assert_eq!(bed.manager.problem(), None);
    assert_eq!(bed.held(), [(Identity(300), 1)]);
}

#[tokio::test(start_paused = true)]
async fn labels_that_get_no_identity_close_an_endpoint_that_had_none_and_their_end_opens_it() {
    let bed = Bed::start().await;
    let made = bed.create(1, &[]).await.unwrap();
    *bed.world.is_store_away.lock().unwrap() = true;
    let label = || vec!["app=a".parse().unwrap()];
    let changed = bed.manager.change_labels(made.id, label(), vec![]).await;
    assert_eq!(changed.unwrap().state, "waiting-for-identity");
    tokio::time::sleep(Duration::from_secs(5)).await;
    let is_closed = || bed.world.built.lock().unwrap().last().unwrap().fails_closed;
    assert!(is_closed());
    assert_eq!(bed.living()[0].state, "waiting-for-identity");
    let changed = bed.manager.change_labels(made.id, vec![], label()).await;
    changed.unwrap();
    let ready = bed.ready(made.id).await;
    assert_eq!((ready.identity, &ready.reason), (5, &None));
    assert!(!is_closed());
}

#[tokio::test(start_paused = true)]
async fn one_that_was_open_under_an_earlier_version_is_closed_by_the_next_agent() {
    let bed = Bed::start().await;
    *bed.world.is_store_away.lock().unwrap() = true;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    bed.world.built.lock().unwrap().clear();
    let bed = bed.restarted().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(bed.world.built.lock().unwrap().last().unwrap().fails_closed);
    let shown = bed.living()[0].clone();
    assert_eq!(
        (shown.id, shown.state.as_str()),
        (made.id, "waiting-for-identity")
    );
    *bed.world.is_store_away.lock().unwrap() = false;
    assert_eq!(bed.ready(made.id).await.identity, 300);
}

#[tokio::test(start_paused = true)]
async fn a_failed_regeneration_leaves_what_was_in_force_and_is_tried_again() {
    let bed = Bed::start().await;
    let made = bed.create(1, &[]).await.unwrap();
    *bed.world.failing.lock().unwrap() = Some("regenerate");
    bed.manager.regenerate(None, "policy changed");
    tokio::time::sleep(Duration::from_secs(5)).await;
    let shown = bed.living()[0].clone();
    assert_eq!(shown.state, "waiting-to-regenerate");
    assert_eq!(shown.policy_ingress.text(), "Enabled");
    let health = bed.manager.health(made.id).unwrap();
    assert_eq!(health.overall_health.text(), "Warning");
    let log = bed.manager.log(made.id).unwrap();
    let failures = log.iter().filter(|entry| entry.status == Status::Failure);
    assert!(failures.count() >= 3);
    *bed.world.failing.lock().unwrap() = None;
    bed.ready(made.id).await;
    assert_eq!(
        bed.manager.health(made.id).unwrap().overall_health.text(),
        "OK"
    );
    let counts = bed.manager.counts();
    assert!(counts.failed >= 3 && counts.succeeded == 2);
}

#[tokio::test(start_paused = true)]
async fn regenerations_are_coalesced_and_no_more_than_the_limit_at_a_time() {
    let bed = Bed::start().await;
    for n in 0..8 {
        bed.create(n, &[]).await.unwrap();
    }
    bed.world.built.lock().unwrap().clear();
    bed.world.may_build.send_replace(false);
    for _ in 0..5 {
        bed.manager.regenerate(None, "policy changed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(bed.world.running.load(Ordering::SeqCst), 2);
    bed.world.may_build.send_replace(true);
    for endpoint in bed.living() {
        bed.ready(endpoint.id).await;
    }
    assert_eq!(bed.world.most_running.load(Ordering::SeqCst), 2);
    // Each is built once, and the two that were running are built once more.
    assert_eq!(bed.world.built.lock().unwrap().len(), 10);
    let one = bed.living()[0].id;
    bed.manager
        .regenerate(Some(&BTreeSet::from([one])), "policy changed");
    bed.ready(one).await;
    assert_eq!(bed.world.built.lock().unwrap().len(), 11);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_takes_over_what_lives_and_drops_the_rest() {
    let bed = Bed::start().await;
    let kept = bed.create(1, &["app=a"]).await.unwrap();
    let no_netns = bed.create(3, &[]).await.unwrap();
    let half = bed.create(4, &[]).await.unwrap();
    let orphan = bed.create(5, &[]).await.unwrap();
    bed.world.end_namespace("/n3");
    let states = StateDir::of(bed.dir.path());
    let (saved, _) = states.load().unwrap();
    let intent = saved.into_iter().find(|saved| saved.id == half.id).unwrap();
    states
        .save(&SavedEndpoint {
            ifindex: None,
            ..intent
        })
        .unwrap();
    states.remove(orphan.id).unwrap();
    // The previous agent's references end with its lease.
    bed.world.held.lock().unwrap().clear();
    bed.world.served.lock().unwrap().clear();

    let bed = bed.restarted().await;
    let restored = bed.ready(kept.id).await;
    assert_eq!(restored, kept);
    assert_eq!(bed.living().len(), 1);
    assert_eq!(bed.states(kept.id)[..2], ["restoring", "regenerating"]);
    let devices: Vec<_> = bed.world.devices.lock().unwrap().keys().cloned().collect();
    assert_eq!(devices, std::slice::from_ref(&kept.interface));
    assert_eq!(states.load().unwrap().0.len(), 1);
    for gone in [no_netns, half, orphan] {
        let Some(IpAddr::V4(address)) = gone.ipv4 else {
            panic!("an IPv4 address");
        };
        assert_eq!(bed.manager.table().ipam.owner(address.into()), None);
    }
    bed.manager.delete(&Selector::Id(kept.id)).await.unwrap();
    bed.assert_empty();
}

#[tokio::test(start_paused = true)]
async fn endpoints_whose_namespace_has_no_file_for_the_agent_live_on() {
    let bed = Bed::start().await;
    for n in 1..8 {
        bed.create(n, &["app=a"]).await.unwrap();
    }
    let made = bed.living();
    *bed.world.sees_no_files.lock().unwrap() = true;
    let bed = bed.restarted().await;
    for one in &made {
        assert_eq!(bed.ready(one.id).await, *one);
    }
    // A second interface of the same container is no reason to drop a live endpoint.
    *bed.world.sees_no_files.lock().unwrap() = false;
    let error = bed.create(1, &["app=a"]).await.unwrap_err();
    assert_eq!(error.kind(), crate::error::ErrorKind::Conflict);
    assert_eq!(bed.living(), made);
}

#[tokio::test(start_paused = true)]
async fn one_whose_device_is_gone_is_dropped_and_several_are_kept_until_they_are_deleted() {
    let bed = Bed::start().await;
    let one = bed.create(1, &["app=a"]).await.unwrap();
    bed.world.devices.lock().unwrap().remove(&one.interface);
    // The previous agent's references end with its lease.
    bed.world.held.lock().unwrap().clear();
    bed.world.served.lock().unwrap().clear();
    let bed = bed.restarted().await;
    bed.assert_empty();

    let mut lost = Vec::new();
    for n in 1..4 {
        lost.push(bed.create(n, &["app=a"]).await.unwrap());
    }
    let kept = bed.create(4, &[]).await.unwrap();
    let gone = bed.create(5, &[]).await.unwrap();
    let devices = bed.world.devices.lock().unwrap().clone();
    let forget = |ones: &[Arc<Endpoint>]| {
        let mut devices = bed.world.devices.lock().unwrap();
        devices.retain(|name, _| ones.iter().all(|one| one.interface != *name));
    };
    forget(&lost);
    // Its deletion was in progress when the agent was killed.
    forget(std::slice::from_ref(&gone));
    let states = StateDir::of(bed.dir.path());
    let (saved, _) = states.load().unwrap();
    let third = saved.iter().find(|saved| saved.id == lost[2].id).cloned();
    let saved = saved.into_iter().find(|saved| saved.id == gone.id);
    let is_deleting = SavedEndpoint {
        is_deleting: true,
        ..saved.unwrap()
    };
    states.save(&is_deleting).unwrap();

    let bed = bed.restarted().await;
    bed.ready(kept.id).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(bed.living().len(), 4);
    for one in &lost {
        let shown = bed.living().into_iter().find(|shown| shown.id == one.id);
        let shown = shown.unwrap();
        assert_eq!(shown.state, "restoring");
        assert_eq!((shown.ipv4, shown.ipv6), (one.ipv4, one.ipv6));
        let reason = shown.reason.as_deref().unwrap();
        assert!(reason.starts_with("its device is gone"), "{reason}");
        assert!(!bed.manager.health(one.id).unwrap().connected);
    }
    let reported = bed.manager.problem().unwrap();
    assert!(
        lost.iter()
            .all(|one| reported.contains(&one.id.to_string())),
        "{reported}"
    );
    // A new endpoint of the container replaces one, and a request deletes another.
    let again = bed.create(1, &["app=a"]).await.unwrap();
    assert_ne!(again.ipv4, lost[0].ipv4);
    let meant = Selector::Id(lost[1].id);
    assert_eq!(bed.manager.delete(&meant).await.unwrap(), [lost[1].id]);
    let reported = bed.manager.problem().unwrap();
    assert!(reported.contains(&lost[2].id.to_string()), "{reported}");

    // The next agent that finds the device serves it again. The manager from before the restart, whose tasks continue
    // in this test, has dropped the endpoints whose devices were missing.
    states.save(&third.unwrap()).unwrap();
    let (name, device) = devices.get_key_value(&lost[2].interface).unwrap();
    bed.world
        .devices
        .lock()
        .unwrap()
        .insert(name.clone(), *device);
    let bed = bed.restarted().await;
    let back = bed.ready(lost[2].id).await;
    assert_eq!((back.ipv4, &back.reason), (lost[2].ipv4, &None));
    assert_eq!(bed.manager.problem(), None);
}

#[tokio::test(start_paused = true)]
async fn those_of_a_former_boot_are_dropped_however_many_they_are() {
    let bed = Bed::start().await;
    for n in 0..4 {
        bed.create(n, &[]).await.unwrap();
    }
    bed.world.devices.lock().unwrap().clear();
    bed.world.held.lock().unwrap().clear();
    let states = StateDir::of(bed.dir.path());
    for (saved, is_named) in states
        .load()
        .unwrap()
        .0
        .into_iter()
        .zip([true, false].repeat(2))
    {
        let former = match is_named {
            true => SavedEndpoint {
                boot_id: Some("another boot".to_owned()),
                ..saved
            },
            // The form in which earlier versions wrote it.
            false => SavedEndpoint {
                boot_id: None,
                created: Timestamp::UNIX_EPOCH,
                ..saved
            },
        };
        states.save(&former).unwrap();
    }
    bed.world.served.lock().unwrap().clear();
    bed.restarted().await.assert_empty();
}

#[tokio::test(start_paused = true)]
async fn endpoints_follow_the_mtu_of_the_node_across_restarts_too() {
    let bed = Bed::start().await;
    let made = bed.create(1, &[]).await.unwrap();
    let mtu_of = |bed: &Bed, device: &str| bed.world.mtus.lock().unwrap().get(device).copied();
    assert_eq!(mtu_of(&bed, &made.interface), Some(1500));
    *bed.world.failing.lock().unwrap() = Some("set_mtu");
    bed.manager.set_mtu(1400);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(mtu_of(&bed, &made.interface), Some(1500));
    *bed.world.failing.lock().unwrap() = None;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(mtu_of(&bed, &made.interface), Some(1400));
    let later = bed.create(2, &[]).await.unwrap();
    assert_eq!(mtu_of(&bed, &later.interface), Some(1400));
    let (saved, _) = StateDir::of(bed.dir.path()).load().unwrap();
    assert!(saved.iter().all(|saved| saved.mtu == 1400));

    // The labels were changed back while no agent was running.
    let bed = bed.restarted().await;
    bed.ready(made.id).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    for endpoint in [&made, &later] {
        assert_eq!(mtu_of(&bed, &endpoint.interface), Some(1500));
    }
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_whose_device_goes_is_dropped() {
    let bed = Bed::start().await;
    bed.create(1, &["app=a"]).await.unwrap();
    bed.world.devices.lock().unwrap().clear();
    tokio::time::sleep(LOOK_PERIOD * 2).await;
    bed.assert_empty();
}

#[tokio::test(start_paused = true)]
async fn no_listing_alone_costs_an_endpoint() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    *bed.world.are_lists_empty.lock().unwrap() = true;
    tokio::time::sleep(LOOK_PERIOD * 2).await;
    assert_eq!(bed.living(), std::slice::from_ref(&made));
    let bed = bed.restarted().await;
    bed.ready(made.id).await;
    tokio::time::sleep(LOOK_PERIOD * 2).await;
    assert_eq!(bed.living().len(), 1);
    // Endpoints whose device is gone are still dropped.
    bed.world.devices.lock().unwrap().clear();
    tokio::time::sleep(LOOK_PERIOD * 2).await;
    assert_eq!(bed.living(), []);
}

#[tokio::test(start_paused = true)]
async fn one_that_is_deleted_while_it_is_made_is_gone_for_both() {
    let bed = Bed::start().await;
    bed.world.may_build.send_replace(false);
    let manager = bed.manager.clone();
    let making = tokio::spawn(async move { manager.create(new(1, &["app=a"])).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    let id = bed.living()[0].id;
    let manager = bed.manager.clone();
    let deleting = tokio::spawn(async move { manager.delete(&Selector::Id(id)).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    bed.world.may_build.send_replace(true);
    assert!(matches!(
        making.await.unwrap(),
        Err(EndpointError::Deleted(_))
    ));
    assert_eq!(deleting.await.unwrap().unwrap(), [id]);
    bed.assert_empty();
}

#[tokio::test(start_paused = true)]
async fn what_is_written_while_an_endpoint_is_deleted_leaves_no_file() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    let [holder, relabels, deletes] = [(); 3].map(|()| bed.manager.clone());
    let (signal_held, held) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let holder = thread::spawn(move || {
        let _files = holder.0.files.lock();
        signal_held.send(()).unwrap();
        // Blocks until the other end is dropped.
        let _ = released.recv();
    });
    held.recv().unwrap();
    let (id, add) = (made.id, vec!["app=b".parse().unwrap()]);
    let relabelling = tokio::spawn(async move { relabels.change_labels(id, add, vec![]).await });
    let deleting = tokio::spawn(async move { deletes.delete(&Selector::Id(id)).await });
    let is_ending = |table: &mut Table| table.living(id).is_err().then_some(());
    bed.manager.wait_until(is_ending).await;
    drop(release);
    holder.join().unwrap();
    assert_eq!(deleting.await.unwrap().unwrap(), [id]);
    let _ = relabelling.await.unwrap();
    bed.assert_empty();
}

/// Blocks writes to endpoints' files.
struct BlockedFiles {
    folder: PathBuf,
    aside: PathBuf,
}

impl BlockedFiles {
    fn of(dir: &Path) -> Self {
        let folder = StateDir::of(dir).path().to_owned();
        let aside = folder.with_extension("aside");
        fs::rename(&folder, &aside).unwrap();
        fs::write(&folder, "").unwrap();
        Self { folder, aside }
    }

    fn end(self) {
        fs::remove_file(&self.folder).unwrap();
        fs::rename(self.aside, self.folder).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn labels_that_cannot_be_kept_change_nothing() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    let add = || vec!["app=b".parse().unwrap()];
    let blocked = BlockedFiles::of(bed.dir.path());
    let error = bed.manager.change_labels(made.id, add(), vec![]).await;
    assert_eq!(error.unwrap_err().kind(), crate::error::ErrorKind::Failed);
    assert_eq!(bed.workloads(), std::slice::from_ref(&made));
    blocked.end();
    bed.manager
        .change_labels(made.id, add(), vec![])
        .await
        .unwrap();
    assert_eq!(bed.ready(made.id).await.identity, 301);
}

#[tokio::test(start_paused = true)]
async fn one_that_waits_for_another_identity_follows_policy_with_the_one_it_has() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    let built = |bed: &Bed| {
        let built = std::mem::take(&mut *bed.world.built.lock().unwrap());
        let built = built.into_iter().map(|one| (one.identity, one.labels));
        built.collect::<Vec<_>>()
    };
    let before = (Identity(300), new(1, &["app=a"]).labels);
    assert_eq!(built(&bed), std::slice::from_ref(&before));

    *bed.world.is_store_away.lock().unwrap() = true;
    let add = vec!["app=b".parse().unwrap()];
    bed.manager
        .change_labels(made.id, add, vec![])
        .await
        .unwrap();
    let this = BTreeSet::from([made.id]);
    bed.manager.regenerate(Some(&this), "policy changed");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(built(&bed), std::slice::from_ref(&before));
    assert_eq!(bed.workloads()[0].state, "waiting-for-identity");

    // Failures in the meantime are retried.
    *bed.world.failing.lock().unwrap() = Some("regenerate");
    bed.manager.regenerate(Some(&this), "policy changed");
    tokio::time::sleep(Duration::from_secs(10)).await;
    *bed.world.failing.lock().unwrap() = None;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(built(&bed).len() > 2);
    assert_eq!(bed.manager.health(made.id).unwrap().bpf.text(), "Pending");

    let bed = bed.restarted().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(built(&bed), [before]);
    *bed.world.is_store_away.lock().unwrap() = false;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(bed.ready(made.id).await.identity, 301);
    bed.wait_saved(&new(1, &["app=b"]).labels).await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_holds_the_identity_that_is_in_force_while_another_is_looked_for() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    // The agent was killed while the endpoint waited for another identity.
    let labels = new(1, &["app=b"]).labels;
    let states = StateDir::of(bed.dir.path());
    let mut saved = states.load().unwrap().0.remove(0);
    saved.relabel(labels.clone());
    states.save(&saved).unwrap();
    bed.world.refused.lock().unwrap().insert(labels);
    // The previous agent's references end with its lease.
    bed.world.held.lock().unwrap().clear();
    let bed = bed.restarted().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(bed.held(), [(Identity(300), 1)]);
    assert_eq!(bed.workloads()[0].identity, 300);
    bed.world.refused.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(bed.ready(made.id).await.identity, 301);
    assert_eq!(bed.held(), [(Identity(301), 1)]);
    bed.manager.delete(&Selector::Id(made.id)).await.unwrap();
    bed.assert_empty();
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_for_while_an_endpoint_waits_is_built_though_its_identity_stays() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    bed.world.built.lock().unwrap().clear();
    *bed.world.is_store_away.lock().unwrap() = true;
    bed.world.may_build.send_replace(false);
    let this = BTreeSet::from([made.id]);
    for label in ["app=b", "app=a"] {
        bed.manager.regenerate(Some(&this), "policy changed");
        let add = vec![label.parse().unwrap()];
        let changed = bed.manager.change_labels(made.id, add, vec![]).await;
        changed.unwrap();
    }
    *bed.world.is_store_away.lock().unwrap() = false;
    tokio::time::sleep(Duration::from_secs(10)).await;
    bed.world.may_build.send_replace(true);
    assert_eq!(bed.ready(made.id).await.identity, 300);
    assert!(bed.world.built.lock().unwrap().len() > 1);
}

#[tokio::test(start_paused = true)]
async fn those_that_are_held_back_take_nobody_s_place() {
    let bed = Bed::start().await;
    for n in 0..10 {
        bed.create(n, &["app=a"]).await.unwrap();
    }
    let away = |reason: &str| Some(RegenerationError(reason.to_owned()));
    bed.world.held_back.send_replace(away("not connected yet"));
    bed.world.built.lock().unwrap().clear();
    let bed = bed.restarted().await;
    bed.manager.regenerate(None, "asked by hand");
    tokio::time::sleep(Duration::from_millis(1)).await;
    let begun = tokio::time::Instant::now();
    let made = bed.create(10, &[]).await.unwrap();
    assert!(begun.elapsed() < Duration::from_millis(100));
    for reason in ["not connected yet", "the store is away"] {
        bed.world.held_back.send_replace(away(reason));
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    let built: Vec<u16> = bed
        .world
        .built
        .lock()
        .unwrap()
        .iter()
        .map(|one| one.id)
        .collect();
    assert_eq!(built, [made.id]);
    for endpoint in bed.workloads() {
        let log = bed.manager.log(endpoint.id).unwrap();
        let reported = log
            .iter()
            .filter(|entry| entry.message.contains("previous policy stays in force"));
        let reported: Vec<&str> = reported
            .map(|entry| entry.message.rsplit(": ").next().unwrap())
            .collect();
        match endpoint.id == made.id {
            true => assert_eq!(reported, [""; 0]),
            false => assert_eq!(reported, ["not connected yet", "the store is away"]),
        }
    }
    bed.world.held_back.send_replace(None);
    for endpoint in bed.workloads() {
        bed.ready(endpoint.id).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_endpoint_is_built_before_others() {
    let bed = Bed::start().await;
    for n in 0..10 {
        bed.create(n, &[]).await.unwrap();
    }
    bed.world.built.lock().unwrap().clear();
    bed.world.may_build.send_replace(false);
    bed.manager.regenerate(None, "policy changed");
    let manager = bed.manager.clone();
    let making = tokio::spawn(async move { manager.create(new(10, &[])).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    bed.world.may_build.send_replace(true);
    let made = making.await.unwrap().unwrap();
    let built = bed.world.built.lock().unwrap().clone();
    // The endpoint follows the two builds that were already running.
    let place = built.iter().position(|one| one.id == made.id);
    assert!(place <= Some(2), "{place:?}");
}

#[tokio::test(start_paused = true)]
async fn labels_that_have_the_number_of_the_former_ones_are_built_all_the_same() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    let labels = new(1, &["app=b"]).labels;
    // The state after the store has lost the first endpoint's number.
    let number = Identity(made.identity);
    let known = &bed.world.identities;
    known.lock().unwrap().insert(labels.clone(), number);
    let add = vec!["app=b".parse().unwrap()];
    let changed = bed.manager.change_labels(made.id, add, vec![]).await;
    changed.unwrap();
    assert_eq!(bed.ready(made.id).await.identity, number.0);
    let built = bed.world.built.lock().unwrap();
    assert_eq!(built.last().map(|one| &one.labels), Some(&labels));
}

#[tokio::test(start_paused = true)]
async fn an_identity_is_held_while_packets_meet_it_though_another_came_during_a_build() {
    let bed = Bed::start().await;
    let made = bed.create(1, &["app=a"]).await.unwrap();
    bed.world.may_build.send_replace(false);
    bed.manager.regenerate(None, "policy changed");
    tokio::time::sleep(Duration::from_millis(10)).await;
    let add = vec!["app=b".parse().unwrap()];
    let (manager, id) = (bed.manager.clone(), made.id);
    let changing = tokio::spawn(async move { manager.change_labels(id, add, vec![]).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    bed.world.may_build.send_replace(true);
    changing.await.unwrap().unwrap();
    assert_eq!(bed.ready(made.id).await.identity, 301);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(bed.held(), [(Identity(301), 1)]);
    assert_eq!(*bed.world.given_back_in_use.lock().unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_new_endpoint_takes_the_place_of_one_whose_namespace_has_ended() {
    let bed = Bed::start().await;
    let mut former = bed.create(1, &["app=a"]).await.unwrap();
    let error = bed.create(1, &["app=a"]).await.unwrap_err();
    assert_eq!(error.kind(), crate::error::ErrorKind::Conflict);
    let ends: [fn(&World); 3] = [
        // The device is gone too, and the kernel reuses the namespace's inode number.
        |world| world.devices.lock().unwrap().clear(),
        // Another namespace exists, and the kernel has not removed the device yet.
        |world| {
            let mut namespaces = world.namespaces.lock().unwrap();
            namespaces.insert("/n1".into(), 5000);
        },
        // The namespace's file is gone, and the container has another one.
        |world| {
            let mut namespaces = world.namespaces.lock().unwrap();
            namespaces.remove(Path::new("/n1"));
        },
    ];
    for (turn, end) in ends.into_iter().enumerate() {
        end(&bed.world);
        let again = NewEndpoint {
            netns: if turn == 2 { "/n2" } else { "/n1" }.into(),
            ..new(1, &["app=a"])
        };
        let made = bed.manager.create(again).await.unwrap();
        assert_eq!(bed.living(), std::slice::from_ref(&made));
        assert_ne!(made.ipv4, former.ipv4);
        assert_eq!(bed.held(), [(Identity(300), 1)]);
        assert_eq!(bed.world.devices.lock().unwrap().len(), 1);
        former = made;
    }
}

#[tokio::test(start_paused = true)]
async fn policy_that_changes_between_the_first_build_and_the_activation_is_followed() {
    let bed = Bed::start().await;
    bed.world.holds_activation.send_replace(true);
    let manager = bed.manager.clone();
    let making = tokio::spawn(async move { manager.create(new(1, &["app=a"])).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    let id = bed.workloads()[0].id;
    assert_eq!(bed.world.built.lock().unwrap().len(), 1);
    bed.manager
        .regenerate(Some(&BTreeSet::from([id])), "policy changed");
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(bed.world.built.lock().unwrap().len(), 2);
    bed.world.holds_activation.send_replace(false);
    assert_eq!(making.await.unwrap().unwrap().state, "ready");
}
