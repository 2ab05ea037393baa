//! The manager and the enforcer together, with a fake kernel, store and devices.

mod cluster_policies;
pub(super) mod fakes;
mod model;
mod nodes;
mod tables;

use std::collections::BTreeSet;
use std::time::Duration;

use health_common::endpoint::{ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, EndpointInfo};
use health_model::ipam::NodeIpam;
use health_model::labels::LabelSet;
use health_registry::nodes::NodeSet;
use jiff::Timestamp;
use tempfile::TempDir;

use self::fakes::{
    Entries, Kernel, NODE, NODE_ADDRESS, NoRoutes, Session, SessionCluster, Store, filled_but,
};
use super::*;
use crate::manager::tests::World;
use crate::manager::{self, Manager, ManagerOptions, NewEndpoint, Selector};
use crate::workload::{SavedEndpoint, StateDir};

/// State that outlives an agent.
struct Site {
    kernel: Kernel,
    store: Store,
    devices: Arc<World>,
    dir: TempDir,
    /// Whether agents follow the policies of a Kubernetes cluster.
    follows_cluster: bool,
    nodes: watch::Sender<Arc<NodeSet>>,
}

/// The parts of an agent that handle endpoints.
#[derive(Clone)]
struct Agent {
    manager: Manager,
    enforcer: Enforcer,
    session: Arc<Session>,
}

impl Site {
    fn new() -> Self {
        Self {
            kernel: Kernel::default(),
            store: Store::default(),
            devices: Arc::new(World::with_namespaces()),
            dir: tempfile::tempdir().unwrap(),
            follows_cluster: false,
            nodes: watch::Sender::default(),
        }
    }

    async fn start(&self) -> Agent {
        let states = StateDir::of(self.dir.path());
        let survey = manager::survey(&states, &*self.devices).await.unwrap();
        self.adopt(&survey.living);
        let session = Session::new(&self.store);
        let enforcer = self.enforcer(&session);
        let cidrs = ["10.0.0.0/24", "fd00::/64"].map(|cidr| cidr.parse().unwrap());
        let options = ManagerOptions {
            states,
            ipam: NodeIpam::new(&cidrs, &[], &[], Duration::from_secs(60)).unwrap(),
            node_addresses: vec![NODE_ADDRESS],
            health: None,
            mtu: 1500,
            parallel: 2,
            devices: self.devices.clone(),
            identities: session.clone(),
            pods: None,
            regenerator: Arc::new(enforcer.clone()),
            clock: || Timestamp::UNIX_EPOCH,
        };
        let manager = Manager::start(options, survey);
        let (reporter, _) = health_model::activity::channel();
        let around = Surroundings {
            nodes: self.nodes.subscribe(),
            ..surroundings()
        };
        tokio::spawn(enforcer.clone().follow(manager.clone(), around, reporter));
        Agent {
            manager,
            enforcer,
            session,
        }
    }

    fn enforcer(&self, session: &Arc<Session>) -> Enforcer {
        let kernel = &self.kernel;
        let options = EnforcerOptions {
            settings: PolicySettings::default(),
            allow_dhcpv6: false,
            node_addresses: vec![NODE_ADDRESS],
            lag: watch::Sender::default(),
            follows_cluster: self.follows_cluster,
            clock: || Timestamp::UNIX_EPOCH,
        };
        let shared = Shared::new(
            self.dir.path(),
            options,
            Box::new(SessionCluster(session.clone())),
            Arc::new(kernel.clone()),
            Box::new(kernel.clone()),
            Box::new(kernel.clone()),
        );
        Enforcer(Arc::new(shared.unwrap()))
    }

    /// Makes the programs continue to serve the living endpoints, and no others.
    fn adopt(&self, living: &[SavedEndpoint]) {
        let mut kernel = self.kernel.now();
        let former = std::mem::take(&mut kernel.served);
        for saved in living {
            let ifindex = saved.ifindex.unwrap();
            let known = former.get(&saved.id);
            let known = known.filter(|known| known.info.ifindex == ifindex);
            let anew = || Workload {
                device: saved.device.clone(),
                addresses: saved.addresses().collect(),
                info: EndpointInfo {
                    ifindex,
                    identity: saved.identity.0,
                    id: saved.id,
                    mac: saved.mac.0,
                    host_mac: saved.host_mac.0,
                    ..EndpointInfo::default()
                },
            };
            let workload = known.cloned().unwrap_or_else(anew);
            kernel.served.insert(saved.id, workload);
        }
        let served: BTreeSet<u16> = kernel.served.keys().copied().collect();
        kernel.attached.retain(|id| served.contains(id));
    }
}

fn surroundings() -> Surroundings {
    Surroundings {
        own: format!("default/{NODE}"),
        host: vec![NODE_ADDRESS],
        routes: Box::new(NoRoutes),
        host_prefixes: None,
        services: watch::Sender::default().subscribe(),
        health: watch::Sender::default().subscribe(),
        nodes: watch::Sender::new(Arc::new(NodeSet::default())).subscribe(),
        has_heard: false,
    }
}

/// Number of random sequences to try on a model. Long tests try enough of them to find rare failures.
fn cases(usual: u32) -> u32 {
    match std::env::var_os("HEALTH_AGENT_LONG").is_some_and(|value| value == "1") {
        true => 100_000,
        false => usual,
    }
}

fn labels(text: &str) -> LabelSet {
    let labels = text.split(',').filter(|label| !label.is_empty());
    LabelSet::new(labels.map(|label| label.parse().unwrap())).unwrap()
}

/// A new endpoint in the namespace `/n<n>`.
fn new(n: u16, text: &str) -> NewEndpoint {
    NewEndpoint {
        netns: format!("/n{n}").into(),
        labels: labels(text),
        container_id: Some(format!("c{n}")),
        ..NewEndpoint::default()
    }
}

/// A policy that lets endpoints with the label `peer` reach endpoints with `subject` on `ports` ports, starting at
/// `port`.
fn policy(name: &str, subject: &str, peer: &str, port: u16, ports: u16) -> String {
    let key_value = |label: &str| {
        let (key, value) = label.split_once('=').unwrap();
        format!(r#"{{"matchLabels": {{"{key}": "{value}"}}}}"#)
    };
    let ports = (0..ports).map(|n| format!(r#"{{"port": "{}", "protocol": "TCP"}}"#, port + 2 * n));
    format!(
        r#"[{{"labels": ["{name}"], "endpointSelector": {},
              "ingress": [{{"fromEndpoints": [{}], "toPorts": [{{"ports": [{}]}}]}}]}}]"#,
        key_value(subject),
        key_value(peer),
        ports.collect::<Vec<_>>().join(",")
    )
}

/// Long enough for anything that a test waits for.
const LONG: Duration = Duration::from_secs(120);

impl Agent {
    async fn create(&self, n: u16, text: &str) -> u16 {
        self.manager.create(new(n, text)).await.unwrap().id
    }

    async fn import(&self, text: &str) -> bool {
        let (_, revision) = self.enforcer.import(text).unwrap();
        self.enforcer.in_force(revision, LONG).await
    }
}

#[tokio::test(start_paused = true)]
async fn siblings_of_an_endpoint_without_programs_get_the_new_policy() {
    let site = Site::new();
    let agent = site.start().await;
    let (one, two) = (
        agent.create(1, "app=a").await,
        agent.create(2, "app=a").await,
    );
    agent.create(3, "app=p").await;
    assert!(agent.import(&policy("p", "app=a", "app=p", 1000, 20)).await);
    let first = site.kernel.table_of(one).unwrap();
    assert!(first.len() >= 20);
    // A second table does not fit beside the first.
    site.kernel.now().filled = filled_but(first.len() + 5);
    // The first of the two endpoints has lost its programs, and gets none.
    site.kernel.now().attached.remove(&one.min(two));
    site.kernel.now().refuses_programs = true;
    let text = policy("p", "app=a", "app=p", 3000, 20);
    let (_, revision) = agent.enforcer.import(&text).unwrap();
    tokio::time::sleep(LONG).await;
    let sibling = site.kernel.table_of(one.max(two)).unwrap();
    assert_eq!(sibling.len(), first.len());
    assert_ne!(sibling, first);
    // No outdated policy lets anything pass.
    assert_eq!(site.kernel.table_of(one.min(two)).unwrap().len(), 0);
    let lag = agent.enforcer.lag().unwrap();
    assert_eq!(lag.endpoints, 1);
    assert!(lag.reason.contains("room for programs"), "{lag:?}");

    site.kernel.now().refuses_programs = false;
    assert!(agent.enforcer.in_force(revision, LONG).await);
    assert_eq!(site.kernel.table_of(one.min(two)), Some(sibling));
    assert_eq!(agent.enforcer.lag(), None);
    assert_eq!(site.kernel.now().mistakes, [""; 0]);
    assert_eq!(site.kernel.now().tables.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn endpoints_follow_when_policy_is_enforced_at_other_times() {
    let site = Site::new();
    let agent = site.start().await;
    let id = agent.create(1, "app=a").await;
    assert_eq!(site.kernel.table_of(id), None);
    for (mode, is_enforced) in [
        (PolicyMode::Always, true),
        (PolicyMode::Never, false),
        (PolicyMode::Always, true),
        (PolicyMode::Default, false),
    ] {
        agent.enforcer.set_mode(mode);
        assert_eq!(agent.enforcer.settings().mode, mode);
        tokio::time::sleep(LONG).await;
        let table = site.kernel.table_of(id);
        assert_eq!(table.is_some(), is_enforced, "{mode:?}: {table:?}");
        assert_eq!(agent.enforcer.lag(), None);
    }
    assert_eq!(site.kernel.now().mistakes, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn networks_that_leave_no_room_for_endpoints_are_refused_and_nothing_changes() {
    let site = Site::new();
    let agent = site.start().await;
    assert!(agent.import(&policy("p", "app=a", "app=p", 1000, 1)).await);
    let before = agent.enforcer.repository();
    let rule = |number: u32| {
        let first = number * 10_000;
        let quoted = |n: u32| format!("\"{}\"", std::net::Ipv4Addr::from(n << 8));
        let networks: Vec<_> = (first..first + 10_000).map(quoted).collect();
        format!(
            r#"{{"labels": ["many"], "endpointSelector": {{}}, "egress": [{{"toCIDR": [{}]}}]}}"#,
            networks.join(",")
        )
    };
    let rules: Vec<_> = (0..26).map(rule).collect();
    let refused = agent.enforcer.import(&format!("[{}]", rules.join(",")));
    let error = refused.unwrap_err().to_string();
    let reported =
        "all policies together would name 260000 networks, but at most 256000 are allowed";
    assert!(error.starts_with(reported), "{error}");
    assert_eq!(agent.enforcer.repository(), before);
    assert!(agent.import(&policy("p", "app=a", "app=p", 2000, 1)).await);
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_cannot_be_deleted_passes_nothing_and_delays_no_policy() {
    let site = Site::new();
    let agent = site.start().await;
    let stuck = agent.create(1, "app=a").await;
    let other = agent.create(2, "app=a").await;
    agent.create(3, "app=p").await;
    assert!(agent.import(&policy("p", "app=a", "app=p", 1000, 1)).await);
    *site.devices.failing.lock().unwrap() = Some("remove");
    let meant = Selector::Id(stuck);
    agent.manager.delete(&meant).await.unwrap_err();
    let reported = format!("endpoint {stuck} cannot be deleted: ");
    let is_reported = |agent: &Agent| {
        let lag = agent.enforcer.lag();
        lag.is_some_and(|lag| lag.endpoints == 1 && lag.reason.starts_with(&reported))
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(is_reported(&agent));
    let flags = site.kernel.now().served[&stuck].info.flags;
    let both = ENDPOINT_ENFORCE_INGRESS | ENDPOINT_ENFORCE_EGRESS;
    assert_eq!(flags & both, both);
    assert_eq!(site.kernel.table_of(stuck), Some(Entries::new()));

    let begun = tokio::time::Instant::now();
    let former = site.kernel.table_of(other);
    for (port, prefix) in [(2000, "198.51.100.0/24"), (3000, "203.0.113.0/24")] {
        let text = policy("p", "app=a", "app=p", port, 1);
        let of_prefix = format!(
            r#"[{{"labels": ["prefix"], "endpointSelector": {{"matchLabels": {{"app": "a"}}}},
                  "ingress": [{{"fromCIDR": ["{prefix}"]}}]}}]"#
        );
        agent.enforcer.import(&of_prefix).unwrap();
        assert!(agent.import(&text).await);
        let prefixes = site.kernel.now().prefixes.clone();
        assert!(prefixes.contains_key(&prefix.parse().unwrap()));
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{begun:?}");
    assert_ne!(site.kernel.table_of(other), former);
    assert_eq!(site.kernel.table_of(stuck), Some(Entries::new()));
    assert!(is_reported(&agent));

    *site.devices.failing.lock().unwrap() = None;
    agent.manager.delete(&meant).await.unwrap();
    tokio::time::sleep(LONG).await;
    assert_eq!(agent.enforcer.lag(), None);
    assert_eq!(site.kernel.now().tables.len(), 1);
    assert_eq!(site.kernel.now().mistakes, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn one_whose_labels_have_no_identity_passes_what_init_is_allowed_and_nothing_else() {
    let site = Site::new();
    let agent = site.start().await;
    agent.create(1, "app=p").await;
    site.store.now().is_away = true;
    agent.session.publish();
    let closed = agent.create(2, "app=a").await;
    let without_labels = agent.create(3, "").await;
    let both = ENDPOINT_ENFORCE_INGRESS | ENDPOINT_ENFORCE_EGRESS;
    let found = |id| {
        let flags = site.kernel.now().served[&id].info.flags & both;
        (flags, site.kernel.table_of(id))
    };
    // No rule selects any endpoint, and still nothing passes.
    assert_eq!(found(closed), (both, Some(Entries::new())));
    assert_eq!(found(without_labels), (0, None));

    let text = r#"[{"labels": ["init"], "endpointSelector": {"matchLabels": {"reserved:init": ""}},
                    "ingress": [{"fromEntities": ["host"]}]}]"#;
    assert!(agent.import(text).await);
    let (flags, table) = found(without_labels);
    assert_eq!(flags, ENDPOINT_ENFORCE_INGRESS);
    assert!(!table.as_ref().unwrap().is_empty());
    assert_eq!(found(closed), (both, table));
    assert!(agent.import(&policy("p", "app=a", "app=p", 1000, 1)).await);
    let (_, init) = found(without_labels);
    assert_eq!(found(closed), (both, init), "its own rules are not its yet");

    site.store.now().is_away = false;
    agent.session.publish();
    tokio::time::sleep(LONG).await;
    let (flags, table) = found(closed);
    assert_eq!(flags, ENDPOINT_ENFORCE_INGRESS);
    assert_ne!(table, found(without_labels).1);
    assert_eq!(agent.enforcer.lag(), None);
    assert_eq!(site.kernel.now().mistakes, [""; 0]);
}
