//! An API server for the objects that agents read, and the events, identities and slices that they write. It implements enough of the
//! Kubernetes API for the registry, the sources of pods, policies and services and `kubectl`, and produces faults on
//! demand.

mod http;
mod store;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use health_net::netns::NetNs;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use self::store::{Selector, Snapshot, Store};
use crate::Node;

/// How long to wait for requests in progress on shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// How the server handles requests for objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Behaviour {
    /// Serves them normally.
    #[default]
    Serve,
    /// Responds with 401: the credentials are not valid.
    Unauthorized,
    /// Responds with 403: the credentials do not allow the request.
    Forbidden,
    /// Responds with 404: the server does not know the kind.
    NotFound,
    /// Responds with 200 and this text.
    Rubbish(String),
    /// Responds with 502 and a web page like a load balancer's.
    BadGateway,
    /// Closes the connection in the middle of the response.
    Reset,
    /// Accepts requests and never responds.
    Hang,
    /// Serves lists. Accepts watches, then breaks them off with garbage.
    RubbishInWatches,
    /// Responds like a server that has lost its store.
    LostStore,
}

/// Requests that the server refuses.
#[derive(Clone, Debug)]
struct Refusal {
    method: &'static str,
    kind: Kind,
    /// Part of the body.
    text: String,
    code: u16,
}

/// All objects of a server at one moment.
#[derive(Clone, Debug)]
pub struct Backup(Vec<Snapshot>);

/// Failures of a server from which agents recover; `None` stops it.
pub const OUTAGES: [Option<Behaviour>; 7] = [
    None,
    Some(Behaviour::Unauthorized),
    Some(Behaviour::Forbidden),
    Some(Behaviour::BadGateway),
    Some(Behaviour::Reset),
    Some(Behaviour::RubbishInWatches),
    Some(Behaviour::LostStore),
];

/// Kinds of API objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `v1`.
    Node,
    /// `v1`.
    Namespace,
    /// `v1`.
    Pod,
    /// `v1`.
    Service,
    /// `discovery.k8s.io/v1`.
    EndpointSlice,
    /// `networking.k8s.io/v1`.
    NetworkPolicy,
    /// `cilium.io/v2`; exists once [`ApiServer::define_cilium`] was called.
    CiliumNetworkPolicy,
    /// `cilium.io/v2`; exists once [`ApiServer::define_cilium`] was called.
    CiliumClusterwideNetworkPolicy,
    /// `v1`.
    Event,
    /// `health-agent.io/v1`; exists unless [`ApiServer::lack_identities`] was called.
    HealthIdentity,
    /// `health-agent.io/v1`; exists unless [`ApiServer::lack_identities`] was called.
    HealthEndpointSlice,
}

impl Kind {
    const ALL: [Self; 11] = [
        Self::Node,
        Self::Namespace,
        Self::Pod,
        Self::Service,
        Self::EndpointSlice,
        Self::NetworkPolicy,
        Self::CiliumNetworkPolicy,
        Self::CiliumClusterwideNetworkPolicy,
        Self::Event,
        Self::HealthIdentity,
        Self::HealthEndpointSlice,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Node => "Node",
            Self::Namespace => "Namespace",
            Self::Pod => "Pod",
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::CiliumNetworkPolicy => "CiliumNetworkPolicy",
            Self::CiliumClusterwideNetworkPolicy => "CiliumClusterwideNetworkPolicy",
            Self::Event => "Event",
            Self::HealthIdentity => "HealthIdentity",
            Self::HealthEndpointSlice => "HealthEndpointSlice",
        }
    }

    const fn plural(self) -> &'static str {
        match self {
            Self::Node => "nodes",
            Self::Namespace => "namespaces",
            Self::Pod => "pods",
            Self::Service => "services",
            Self::EndpointSlice => "endpointslices",
            Self::NetworkPolicy => "networkpolicies",
            Self::CiliumNetworkPolicy => "ciliumnetworkpolicies",
            Self::CiliumClusterwideNetworkPolicy => "ciliumclusterwidenetworkpolicies",
            Self::Event => "events",
            Self::HealthIdentity => "healthidentities",
            Self::HealthEndpointSlice => "healthendpointslices",
        }
    }

    const fn version(self) -> &'static str {
        match self {
            Self::Node | Self::Namespace | Self::Pod | Self::Service | Self::Event => "v1",
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::NetworkPolicy => "networking.k8s.io/v1",
            Self::CiliumNetworkPolicy | Self::CiliumClusterwideNetworkPolicy => "cilium.io/v2",
            Self::HealthIdentity | Self::HealthEndpointSlice => "health-agent.io/v1",
        }
    }

    /// Path of the list of all objects.
    fn path(self) -> String {
        let version = self.version();
        let root = if version.contains('/') { "apis" } else { "api" };
        format!("/{root}/{version}/{}", self.plural())
    }

    /// Whether clients other than a kubelet write objects of this kind.
    const fn is_written(self) -> bool {
        matches!(
            self,
            Self::Node | Self::HealthIdentity | Self::HealthEndpointSlice
        )
    }

    fn of(object: &Value) -> Self {
        let named = |kind: &Self| object["kind"] == kind.name();
        Self::ALL.into_iter().find(named).unwrap_or(Self::Node)
    }
}

/// A running server, which stops on drop. Its objects survive [`ApiServer::stop`].
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// The network namespace that the server listens in, if not this process's.
    netns: Option<NetNs>,
    runtime: Option<Runtime>,
}

/// State shared by requests in progress.
#[derive(Debug)]
struct Shared {
    /// One store per kind.
    stores: [Mutex<Store>; Kind::ALL.len()],
    behaviour: watch::Sender<Behaviour>,
    /// Whether the server has Cilium's kinds.
    has_cilium: AtomicBool,
    /// Whether the server has the kinds of this project.
    has_identities: AtomicBool,
    /// Changes with each new revision in any store.
    revision: watch::Sender<u64>,
    /// Changes when watches should send a bookmark.
    bookmarks: watch::Sender<u64>,
    /// Requests so far, each as `METHOD path?query`.
    requests: Mutex<Vec<String>>,
    refusals: Mutex<Vec<Refusal>>,
}

impl Shared {
    fn store(&self, kind: Kind) -> MutexGuard<'_, Store> {
        let store = &self.stores[kind as usize];
        store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the server has this kind.
    fn has(&self, kind: Kind) -> bool {
        match kind {
            Kind::CiliumNetworkPolicy | Kind::CiliumClusterwideNetworkPolicy => {
                self.has_cilium.load(Ordering::Relaxed)
            }
            Kind::HealthIdentity | Kind::HealthEndpointSlice => {
                self.has_identities.load(Ordering::Relaxed)
            }
            _ => true,
        }
    }

    fn refusals(&self) -> MutexGuard<'_, Vec<Refusal>> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn requests(&self) -> MutexGuard<'_, Vec<String>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ApiServer {
    /// Starts a server without objects on a free port of the loopback device.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_in(None, Ipv4Addr::LOCALHOST)
    }

    /// Like [`start`](Self::start), but on a node of the bed.
    pub fn start_on(node: &Node) -> anyhow::Result<Self> {
        Self::start_in(Some(NetNs::open(node.name())?), Ipv4Addr::LOCALHOST)
    }

    /// Like [`start_on`](Self::start_on), but at the node's address, for all nodes of the bed.
    pub fn start_for(node: &Node) -> anyhow::Result<Self> {
        Self::start_in(Some(NetNs::open(node.name())?), node.ipv4())
    }

    fn start_in(netns: Option<NetNs>, address: Ipv4Addr) -> anyhow::Result<Self> {
        let mut server = Self {
            shared: Arc::new(Shared {
                stores: Default::default(),
                behaviour: watch::Sender::default(),
                has_cilium: AtomicBool::default(),
                has_identities: AtomicBool::new(true),
                revision: watch::Sender::default(),
                bookmarks: watch::Sender::default(),
                requests: Mutex::default(),
                refusals: Mutex::default(),
            }),
            address: (address, 0).into(),
            netns,
            runtime: None,
        };
        server.resume()?;
        Ok(server)
    }

    /// Restarts the server on its previous port.
    pub fn resume(&mut self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let bind = || std::net::TcpListener::bind(self.address);
        let listener = match &self.netns {
            Some(netns) => netns.run_in(bind)?,
            None => bind(),
        };
        let listener = listener.with_context(|| format!("cannot listen on {}", self.address))?;
        listener.set_nonblocking(true)?;
        self.address = listener.local_addr()?;
        let shared = self.shared.clone();
        runtime.spawn(async { http::serve(TcpListener::from_std(listener)?, shared).await });
        self.runtime = Some(runtime);
        Ok(())
    }

    /// Stops the server as a kill would: connections break off.
    pub fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A thread of a test's own runtime must not block on another runtime.
            let stopping = std::thread::spawn(|| runtime.shutdown_timeout(SHUTDOWN_TIMEOUT));
            // If the thread panicked, the panic was already printed.
            let _ = stopping.join();
        }
    }

    /// The server's URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Writes a kubeconfig for this server.
    pub fn write_kubeconfig(&self, path: &Path) -> anyhow::Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": { "server": self.url() } }],
            "users": [{ "name": "test", "user": { "token": "of-a-test" } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        std::fs::write(path, config.to_string())
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Changes the server's behaviour and ends the watches in progress.
    pub fn behave(&self, behaviour: Behaviour) {
        self.shared.behaviour.send_replace(behaviour);
    }

    /// Refuses requests for a kind whose body contains `text`, until [`Self::refuse_nothing`]. With code 429, the answer
    /// asks to wait for a second.
    pub fn refuse(&self, method: &'static str, kind: Kind, text: &str, code: u16) {
        self.shared.refusals().push(Refusal {
            method,
            kind,
            text: text.to_owned(),
            code,
        });
    }

    /// Ends all refusals.
    pub fn refuse_nothing(&self) {
        self.shared.refusals().clear();
    }

    /// Ends the watches in progress.
    pub fn end_watches(&self) {
        self.shared.behaviour.send_modify(|_| ());
    }

    /// All objects at this moment, for [`Self::restore`].
    pub fn backup(&self) -> Backup {
        let stores = Kind::ALL.into_iter();
        Backup(
            stores
                .map(|kind| self.shared.store(kind).snapshot())
                .collect(),
        )
    }

    /// Returns to the state of a backup, revisions included, and ends the watches in progress.
    pub fn restore(&self, backup: &Backup) {
        for (kind, snapshot) in Kind::ALL.into_iter().zip(&backup.0) {
            self.shared.store(kind).restore(snapshot.clone());
        }
        self.end_watches();
    }

    /// Adds Cilium's kinds, as their custom resource definitions do.
    pub fn define_cilium(&self) {
        self.shared.has_cilium.store(true, Ordering::Relaxed);
    }

    /// Removes the kinds of `deploy/kubernetes/crds.yaml`, as before they are installed.
    pub fn lack_identities(&self) {
        self.shared.has_identities.store(false, Ordering::Relaxed);
    }

    /// Installs the kinds of `deploy/kubernetes/crds.yaml`.
    pub fn define_identities(&self) {
        self.shared.has_identities.store(true, Ordering::Relaxed);
    }

    /// All objects of a kind.
    pub fn list_of(&self, kind: Kind) -> Vec<Value> {
        let mut store = self.shared.store(kind);
        store.list(&Selector::default(), None).objects
    }

    /// Loses all objects of a kind, without events.
    pub fn lose_all(&self, kind: Kind) {
        let revision = self.shared.store(kind).lose_all();
        self.shared.revision.send_replace(revision);
    }

    /// The events that were written.
    pub fn events(&self) -> Vec<Value> {
        self.list_of(Kind::Event)
    }

    /// Creates or replaces an object.
    pub fn put(&self, object: Value) {
        let kind = Kind::of(&object);
        let revision = self.shared.store(kind).put(object);
        self.shared.revision.send_replace(revision);
    }

    /// Deletes a node.
    pub fn delete(&self, name: &str) {
        let revision = self.shared.store(Kind::Node).delete(name);
        self.shared.revision.send_replace(revision);
    }

    /// Deletes a pod by `NAMESPACE/NAME`.
    pub fn delete_pod(&self, name: &str) {
        self.delete_of(Kind::Pod, name);
    }

    /// Deletes an object by name, or by `NAMESPACE/NAME` if it is namespaced.
    pub fn delete_of(&self, kind: Kind, name: &str) {
        let revision = self.shared.store(kind).delete(name);
        self.shared.revision.send_replace(revision);
    }

    /// The current node object.
    pub fn get(&self, name: &str) -> Option<Value> {
        self.shared.store(Kind::Node).get(name).cloned()
    }

    /// Discards the history: older watches and lists in progress are rejected.
    pub fn compact(&self) {
        for kind in Kind::ALL {
            self.shared.store(kind).compact();
        }
    }

    /// Sends the current revision to the watches that asked for bookmarks.
    pub fn bookmark(&self) {
        self.shared.bookmarks.send_modify(|count| *count += 1);
    }

    /// The requests so far, each as `METHOD path?query`.
    pub fn requests(&self) -> Vec<String> {
        self.shared.requests().clone()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A Node object like one that a kubelet registers.
pub fn node(name: &str, internal_ips: &[&str], pod_cidrs: &[&str]) -> Value {
    let addresses: Vec<_> = internal_ips
        .iter()
        .map(|address| json!({ "type": "InternalIP", "address": address }))
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name },
        "spec": { "podCIDR": pod_cidrs.first(), "podCIDRs": pod_cidrs },
        "status": { "addresses": addresses },
    })
}
