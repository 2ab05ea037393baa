//! A Kubernetes cluster's registry, identities, the pods of a node, and services, against a real kube-apiserver (`KUBE_APISERVER`)
//! on Debian's etcd, with the permissions that `deploy/kubernetes/rbac.yaml` grants. Needs `kubectl`.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_agent::agent::services::sources::remote::KubernetesServices;
use health_model::api::ServiceProblem;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_probe::source::ObjectPod;
use health_registry::identity::{IdentityAllocator, OnOutage, Timing};
use health_registry::kubernetes::{ObjectTable, PodWatch};
use health_registry::nodes::kubernetes::{
    EXCLUDE_LABEL, IPV4_HEALTH_ANNOTATION, KubernetesRegistry,
};
use health_registry::nodes::{Node, NodeSet, Registry};
use health_service::source::ServiceSet;
use health_service::spec::{Selection, ServiceName, SliceName};
use health_settings::RegistrySpec;
use serde_json::{Value, json};
use tests::apiserver::node;
use tests::{PATIENCE, wait_for};
use tokio::sync::watch::Receiver;

const RBAC: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../deploy/kubernetes/rbac.yaml"
);
const CRDS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../deploy/kubernetes/crds.yaml"
);
const NODES: usize = 450;

/// A process that is killed with SIGKILL on drop.
struct Process(Child);

impl Process {
    fn start(command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let log = std::fs::File::create(log)?;
        let command = command.stdout(Stdio::null()).stderr(log);
        let name = command.get_program().to_owned();
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {name:?}"))?;
        Ok(Self(child))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Cluster {
    folder: tempfile::TempDir,
    etcd_port: u16,
    _etcd: Process,
    apiserver: Option<Process>,
    port: u16,
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port())
}

impl Cluster {
    fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let etcd_port = free_port()?;
        let client = format!("http://127.0.0.1:{etcd_port}");
        let peer = format!("http://127.0.0.1:{}", free_port()?);
        let mut etcd = Command::new("etcd");
        etcd.args(["--name", "k8s-test", "--data-dir"])
            .arg(folder.path().join("etcd"))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &format!("k8s-test={peer}")]);
        let etcd = Process::start(&mut etcd, &folder.path().join("etcd.log"))?;
        let mut cluster = Self {
            port: free_port()?,
            folder,
            etcd_port,
            _etcd: etcd,
            apiserver: None,
        };
        std::fs::write(
            cluster.path("tokens.csv"),
            "admin-token,admin,1,system:masters\n",
        )?;
        let key = Command::new("openssl")
            .args(["genpkey", "-algorithm", "RSA", "-out"])
            .arg(cluster.path("sa.key"))
            .output()?;
        ensure!(
            key.status.success(),
            "{}",
            String::from_utf8_lossy(&key.stderr)
        );
        cluster.write_kubeconfig("admin", "admin-token")?;
        cluster.start_apiserver()?;
        Ok(cluster)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start_apiserver(&mut self) -> anyhow::Result<()> {
        let binary = std::env::var_os("KUBE_APISERVER").context(
            "set KUBE_APISERVER to a kube-apiserver, such as `tests/kubernetes/build.sh FOLDER kube-apiserver` builds in FOLDER/bin",
        )?;
        let mut command = Command::new(binary);
        command
            .arg(format!(
                "--etcd-servers=http://127.0.0.1:{}",
                self.etcd_port
            ))
            .arg(format!("--secure-port={}", self.port))
            .args(["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"])
            .args([
                "--endpoint-reconciler-type=none",
                "--service-cluster-ip-range=10.96.0.0/24",
            ])
            .args([
                "--authorization-mode=Node,RBAC",
                "--service-account-issuer=test",
            ]);
        for (flag, file) in [
            ("cert-dir", "pki"),
            ("token-auth-file", "tokens.csv"),
            ("service-account-key-file", "sa.key"),
            ("service-account-signing-key-file", "sa.key"),
        ] {
            command.arg(format!("--{flag}={}", self.path(file).display()));
        }
        self.apiserver = Some(Process::start(&mut command, &self.path("apiserver.log"))?);
        wait_for("the API server", PATIENCE, || {
            Ok(self.kubectl(&["get", "--raw", "/readyz"], "").ok())
        })?;
        Ok(())
    }

    /// Kills the API server with SIGKILL.
    fn kill_apiserver(&mut self) {
        self.apiserver = None;
    }

    fn write_kubeconfig(&self, user: &str, token: &str) -> anyhow::Result<PathBuf> {
        let server = format!("https://127.0.0.1:{}", self.port);
        // The server generated its own certificate at its first start.
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": user,
            "clusters": [{
                "name": "test",
                "cluster": { "server": server, "insecure-skip-tls-verify": true },
            }],
            "users": [{ "name": user, "user": { "token": token } }],
            "contexts": [{ "name": user, "context": { "cluster": "test", "user": user } }],
        });
        let path = self.path(user);
        std::fs::write(&path, config.to_string())?;
        Ok(path)
    }

    fn kubectl(&self, args: &[&str], input: &str) -> anyhow::Result<String> {
        let mut kubectl = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(self.path("admin"))
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        kubectl
            .stdin
            .take()
            .context("a pipe")?
            .write_all(input.as_bytes())?;
        let output = kubectl.wait_with_output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {args:?}: {error}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Writes a kubeconfig with a token of the agents' service account, which must exist.
    fn agents_kubeconfig(&self) -> anyhow::Result<PathBuf> {
        let token = [
            "create",
            "token",
            "--namespace=health-agent",
            "health-agent",
        ];
        let token = self.kubectl(&token, "")?;
        self.write_kubeconfig("agent", token.trim())
    }

    fn create(&self, nodes: Vec<Value>) -> anyhow::Result<()> {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": nodes });
        self.kubectl(&["create", "-f", "-"], &list.to_string())?;
        Ok(())
    }

    /// The annotation as kubectl reports it, and whether the agent wrote it.
    fn annotation(&self, name: &str) -> anyhow::Result<(Option<String>, bool)> {
        let args = ["get", "node", name, "-o", "json", "--show-managed-fields"];
        let object: Value = serde_json::from_str(&self.kubectl(&args, "")?)?;
        let metadata = &object["metadata"];
        let managers = metadata["managedFields"].as_array();
        let is_ours = managers.is_some_and(|managers| {
            managers.iter().any(|entry| {
                let fields = &entry["fieldsV1"]["f:metadata"]["f:annotations"];
                let key = format!("f:{IPV4_HEALTH_ANNOTATION}");
                entry["manager"] == "health-agent" && !fields[key].is_null()
            })
        });
        let value = metadata["annotations"][IPV4_HEALTH_ANNOTATION].as_str();
        Ok((value.map(str::to_owned), is_ours))
    }

    fn wait_for_annotation(&self, name: &str, address: &str) -> anyhow::Result<()> {
        wait_for("the annotation", PATIENCE, || {
            let annotation = self.annotation(name)?;
            Ok((annotation == (Some(address.to_owned()), true)).then_some(()))
        })
    }
}

async fn until(
    watch: &mut Receiver<Arc<NodeSet>>,
    what: &str,
    deadline: Duration,
    is_reached: impl Fn(&NodeSet) -> bool,
) -> anyhow::Result<Arc<NodeSet>> {
    let reached = tokio::time::timeout(deadline, watch.wait_for(|set| is_reached(set))).await;
    let reached = reached.map(|set| set.map(|set| set.clone()));
    match reached {
        Ok(set) => set.context("the registry ended"),
        Err(_) => anyhow::bail!(
            "waited in vain for {what}; it is {:?}",
            watch.borrow().sources
        ),
    }
}

fn reason(set: &NodeSet) -> Option<&str> {
    Some(set.sources[0].stale.as_ref()?.reason.as_str())
}

fn is_right(set: &NodeSet, nodes: usize) -> bool {
    reason(set).is_none() && set.nodes.len() == nodes
}

#[tokio::test(flavor = "multi_thread")]
async fn the_registry_holds_what_a_real_api_server_says() -> anyhow::Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.kubectl(&["apply", "-f", RBAC], "")?;
    let kubeconfig = cluster.agents_kubeconfig()?;
    let named = |i: usize| {
        let (high, low) = (i / 250, i % 250 + 1);
        node(
            &format!("n{i:03}"),
            &[&format!("172.30.{high}.{low}")],
            &[&format!("10.{}.{low}.0/24", 100 + high)],
        )
    };
    cluster.create((0..NODES).map(named).collect())?;

    let registry = KubernetesRegistry::open(Some(&kubeconfig), "west", Some("n001"))?;
    let mut watch = registry.watch();
    let set = until(&mut watch, "all nodes", PATIENCE, |set| {
        is_right(set, NODES)
    })
    .await?;
    assert_eq!(set.sources[0].rejected, []);
    assert_eq!(set.nodes[7].pod_cidrs, ["10.100.8.0/24".parse()?]);

    let own = Node {
        health_addresses: vec!["10.100.2.7".parse()?],
        ..set.nodes[1].clone()
    };
    registry.publish(own);
    cluster.wait_for_annotation("n001", "10.100.2.7")?;
    let is_reported = |set: &NodeSet| set.nodes[1].health_addresses.len() == 1;
    until(&mut watch, "the published address", PATIENCE, is_reported).await?;
    let remove = format!("{IPV4_HEALTH_ANNOTATION}-");
    cluster.kubectl(&["annotate", "node", "n001", &remove], "")?;
    cluster.wait_for_annotation("n001", "10.100.2.7")?;

    let label = format!("{EXCLUDE_LABEL}=yes");
    cluster.kubectl(&["label", "node", "n002", &label], "")?;
    until(&mut watch, "the node to leave", PATIENCE, |set| {
        is_right(set, NODES - 1)
    })
    .await?;
    let unlabel = format!("{EXCLUDE_LABEL}-");
    cluster.kubectl(&["label", "node", "n002", &unlabel], "")?;
    until(&mut watch, "the node to return", PATIENCE, |set| {
        is_right(set, NODES)
    })
    .await?;
    cluster.create(vec![node("z", &["not-an-address"], &[])])?;
    let is_reported = |set: &NodeSet| set.sources[0].rejected.len() == 1;
    let set = until(&mut watch, "the rejection", PATIENCE, is_reported).await?;
    assert_eq!(set.sources[0].rejected[0].key, "z");
    assert!(is_right(&set, NODES));

    // Kills and restarts the server, during which nothing is lost.
    cluster.kill_apiserver();
    let set = until(&mut watch, "stale", PATIENCE, |set| reason(set).is_some()).await?;
    assert_eq!(set.nodes.len(), NODES);
    cluster.start_apiserver()?;
    until(&mut watch, "the server's return", PATIENCE, |set| {
        is_right(set, NODES)
    })
    .await?;

    // A second server makes changes that the watch misses and that no history contains.
    cluster.kill_apiserver();
    until(&mut watch, "stale", PATIENCE, |set| reason(set).is_some()).await?;
    let port = std::mem::replace(&mut cluster.port, free_port()?);
    cluster.write_kubeconfig("admin", "admin-token")?;
    cluster.start_apiserver()?;
    cluster.kubectl(&["delete", "node", "n003", "n004"], "")?;
    let list = cluster.kubectl(&["get", "--raw", "/api/v1/nodes?limit=1"], "")?;
    let list: Value = serde_json::from_str(&list)?;
    let revision = list["metadata"]["resourceVersion"]
        .as_str()
        .context("a revision")?;
    let compaction = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .args([
            "--endpoints",
            &format!("http://127.0.0.1:{}", cluster.etcd_port),
        ])
        .args(["compact", revision])
        .output()?;
    ensure!(
        compaction.status.success(),
        "{}",
        String::from_utf8_lossy(&compaction.stderr)
    );
    cluster.kill_apiserver();
    cluster.port = port;
    cluster.write_kubeconfig("admin", "admin-token")?;
    cluster.start_apiserver()?;
    until(&mut watch, "the two to go", PATIENCE, |set| {
        is_right(set, NODES - 2)
    })
    .await?;

    // Access is revoked, which the server reports at the next request.
    cluster.kubectl(&["delete", "clusterrolebinding", "health-agent"], "")?;
    cluster.kill_apiserver();
    cluster.start_apiserver()?;
    let is_reported = |set: &NodeSet| reason(set).is_some_and(|reason| reason.contains("(403)"));
    let set = until(&mut watch, "the refusal", PATIENCE, is_reported).await?;
    assert_eq!(set.nodes.len(), NODES - 2);
    cluster.kubectl(&["apply", "-f", RBAC], "")?;
    until(&mut watch, "the access", PATIENCE, |set| {
        is_right(set, NODES - 2)
    })
    .await?;
    Ok(())
}

type Pods = ObjectTable<ObjectPod>;

async fn until_pods(
    watch: &mut Receiver<Arc<Pods>>,
    what: &str,
    is_reached: impl Fn(&Pods) -> bool,
) -> anyhow::Result<Arc<Pods>> {
    let reached = tokio::time::timeout(PATIENCE, watch.wait_for(|pods| is_reached(pods))).await;
    let reached = reached.map(|pods| pods.map(|pods| pods.clone()));
    match reached {
        Ok(pods) => pods.context("the watch ended"),
        Err(_) => anyhow::bail!("waited in vain for {what}; it is {:?}", watch.borrow()),
    }
}

/// A pod that already has a node, so that no scheduler is needed.
fn pod(node: &str, name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "nodeName": node, "automountServiceAccountToken": false,
            "containers": [{
                "name": "app", "image": "busybox",
                "livenessProbe": { "exec": { "command": ["test", "-e", "/tmp/alive"] } },
                "readinessProbe": { "httpGet": { "port": 8080 }, "periodSeconds": 2 },
            }],
        },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pods_of_a_node_are_those_of_a_real_api_server() -> anyhow::Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.kubectl(&["apply", "-f", RBAC], "")?;
    let account = ["create", "serviceaccount", "default"];
    // In a real cluster, a controller creates this account.
    cluster.kubectl(&account, "")?;
    let kubeconfig = cluster.agents_kubeconfig()?;
    let mut bad = pod("n1", "bad");
    bad["metadata"]["annotations"] = json!({ "probe.health-agent.io/app.liveness.period": "fast" });
    let objects = [pod("n1", "a"), pod("n2", "elsewhere"), bad];
    cluster.create(objects.to_vec())?;

    let watched = PodWatch::open(Some(&kubeconfig), "n1", ObjectPod::read)?;
    let mut watch = watched.pods.table();
    let is_right = |pods: &Pods, count| pods.stale.is_none() && pods.objects.len() == count;
    let seen = until_pods(&mut watch, "the pods", |pods| is_right(pods, 2)).await?;
    let a = seen.objects["default/a"].pod().context("a pod")?;
    // The server added a UID and defaults.
    assert_eq!(a.spec.uid.len(), 36);
    assert!(a.spec.containers[0].liveness.is_some());
    assert_eq!(seen.objects["default/a"].problems().count(), 0);
    assert_eq!(seen.objects["default/bad"].problems().count(), 1);

    cluster.create(vec![pod("n1", "b")])?;
    until_pods(&mut watch, "another one", |pods| is_right(pods, 3)).await?;
    // With a grace period, a pod stays in deletion until its kubelet reports that it is gone.
    cluster.kubectl(&["delete", "pod", "b", "--wait=false"], "")?;
    until_pods(&mut watch, "its end to be reported", |pods| {
        let b = pods.objects.get("default/b").and_then(|b| b.pod());
        b.and_then(|b| b.status.as_ref())
            .is_some_and(|status| status.deleting)
    })
    .await?;
    let gone = ["delete", "pod", "b", "--force", "--grace-period=0"];
    cluster.kubectl(&gone, "")?;
    until_pods(&mut watch, "it to be gone", |pods| is_right(pods, 2)).await?;

    cluster.kill_apiserver();
    let stale = until_pods(&mut watch, "stale", |pods| pods.stale.is_some()).await?;
    assert_eq!(stale.objects.len(), 2);
    cluster.start_apiserver()?;
    cluster.create(vec![pod("n1", "c")])?;
    until_pods(&mut watch, "the server's return", |pods| is_right(pods, 3)).await?;

    cluster.kubectl(&["delete", "clusterrolebinding", "health-agent"], "")?;
    cluster.kill_apiserver();
    cluster.start_apiserver()?;
    let is_reported = |pods: &Pods| {
        let reason = pods.stale.as_ref().map(|stale| stale.reason.as_str());
        reason.is_some_and(|reason| reason.contains("(403)"))
    };
    let refused = until_pods(&mut watch, "the refusal", is_reported).await?;
    assert_eq!(refused.objects.len(), 3);
    Ok(())
}

async fn until_services(
    watch: &mut Receiver<Arc<ServiceSet>>,
    what: &str,
    is_reached: impl Fn(&ServiceSet) -> bool,
) -> anyhow::Result<Arc<ServiceSet>> {
    let reached = tokio::time::timeout(PATIENCE, watch.wait_for(|set| is_reached(set))).await;
    let reached = reached.map(|set| set.map(|set| set.clone()));
    match reached {
        Ok(set) => set.context("the watch ended"),
        Err(_) => anyhow::bail!("waited in vain for {what}; it is {:?}", watch.borrow()),
    }
}

fn service(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "ports": [{ "port": 80, "targetPort": 8080 }] },
    })
}

/// An EndpointSlice as a cluster's controller writes it.
fn slice(service: &str, address: &str) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-1"), "namespace": "default",
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": "IPv4", "ports": [{ "name": "", "port": 8080 }],
        "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }],
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_services_are_those_of_a_real_api_server() -> anyhow::Result<()> {
    let mut cluster = Cluster::start()?;
    // The API exists since Kubernetes 1.21.
    let has_slices = cluster
        .kubectl(&["get", "--raw", "/apis/discovery.k8s.io/v1"], "")
        .is_ok();
    cluster.kubectl(&["apply", "-f", RBAC], "")?;
    let kubeconfig = cluster.agents_kubeconfig()?;
    let mut foreign = service("foreign");
    foreign["metadata"]["labels"] =
        json!({ "service.kubernetes.io/service-proxy-name": "another" });
    cluster.create(vec![service("web"), foreign])?;
    if has_slices {
        cluster.create(vec![slice("web", "10.100.1.7")])?;
    }

    let services = KubernetesServices::open(Some(&kubeconfig), Selection::default())?;
    let mut watch = services.services();
    let has = |set: &ServiceSet, name: &str| {
        set.services
            .contains_key(&ServiceName::new("default", name))
    };
    let web_1 = SliceName::new("default", "web-1");
    let is_well = |set: &ServiceSet| match has_slices {
        true => set.synced.is_complete() && set.problems.is_empty(),
        false => {
            let reported = set.problems.iter().map(|one| one.problem.as_str());
            let reported: Vec<_> = reported.collect();
            let without = "cannot list endpointslices: the API server answers 404: ";
            set.synced.services && matches!(*reported, [slices] if slices.contains(without))
        }
    };
    let set = until_services(&mut watch, "the services", |set| {
        is_well(set) && has(set, "web") && has(set, "kubernetes")
    })
    .await?;
    assert!(!has(&set, "foreign"));
    // The server assigned the service an address.
    let web = set.services[&ServiceName::new("default", "web")]
        .object
        .as_ref();
    let address = web.context("a service")?.common.cluster_ips[0].to_string();
    assert!(address.starts_with("10.96.0."), "{address}");
    if has_slices {
        let read = set.slices[&web_1].object.as_ref().context("a slice")?;
        assert_eq!(read.endpoints[0].address.to_string(), "10.100.1.7");
    }

    let unlabel = "service.kubernetes.io/service-proxy-name-";
    cluster.kubectl(&["label", "service", "foreign", unlabel], "")?;
    until_services(&mut watch, "it to come", |set| has(set, "foreign")).await?;
    let headless = "service.kubernetes.io/headless=";
    cluster.kubectl(&["label", "service", "foreign", headless], "")?;
    until_services(&mut watch, "it to go", |set| !has(set, "foreign")).await?;

    cluster.kill_apiserver();
    let stale = until_services(&mut watch, "stale", |set| {
        let mut reported = set.problems.iter();
        reported.any(|one| one.problem.starts_with("using the services as of "))
    })
    .await?;
    assert!(has(&stale, "web") && stale.slices.contains_key(&web_1) == has_slices);
    cluster.start_apiserver()?;
    cluster.create(vec![service("later")])?;
    if has_slices {
        cluster.kubectl(&["delete", "endpointslice", "web-1"], "")?;
    }
    until_services(&mut watch, "the server's return", |set| {
        is_well(set) && has(set, "web") && has(set, "later") && !set.slices.contains_key(&web_1)
    })
    .await?;

    cluster.kubectl(&["delete", "clusterrolebinding", "health-agent"], "")?;
    cluster.kill_apiserver();
    cluster.start_apiserver()?;
    let refused = until_services(&mut watch, "the refusal", |set| {
        let is_forbidden = |one: &ServiceProblem| one.problem.contains("(403)");
        set.problems.iter().filter(|one| is_forbidden(one)).count() == 2
    })
    .await?;
    assert!(has(&refused, "web") && has(&refused, "later"));
    Ok(())
}

fn app(number: usize) -> anyhow::Result<LabelSet> {
    Ok(LabelSet::new([format!("k8s:app=a{number}").parse()?])?)
}

async fn acquire_all(
    agents: &[Arc<IdentityAllocator>],
    sets: usize,
) -> anyhow::Result<BTreeMap<usize, Identity>> {
    let mut tasks = tokio::task::JoinSet::new();
    for agent in agents {
        for set in 0..sets {
            let (agent, labels) = (agent.clone(), app(set)?);
            tasks.spawn(async move { (set, agent.acquire(&labels, OnOutage::Wait).await) });
        }
    }
    let mut numbers = BTreeMap::new();
    while let Some(acquired) = tasks.join_next().await {
        let (set, identity) = acquired?;
        let identity = identity?;
        ensure!(
            *numbers.entry(set).or_insert(identity) == identity,
            "two numbers"
        );
    }
    Ok(numbers)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_identities_of_agents_are_one_object_for_each_label_set() -> anyhow::Result<()> {
    const SETS: usize = 1000;
    let mut cluster = Cluster::start()?;
    cluster.kubectl(&["apply", "-f", RBAC], "")?;
    let kubeconfig = cluster.agents_kubeconfig()?;
    cluster.create(vec![node("a", &["172.30.0.1"], &["10.244.1.0/24"])])?;
    let timing = Timing {
        collect_after: Duration::from_secs(1),
        look_period: Duration::from_millis(200),
        reuse_after: Duration::from_secs(1),
        ..Timing::default()
    };
    let open = |name: &str, timing| -> anyhow::Result<Arc<IdentityAllocator>> {
        let store = RegistrySpec::Kubernetes(Some(kubeconfig.clone()));
        let opened = IdentityAllocator::open(&store, "default", name, timing)?;
        Ok(Arc::new(opened))
    };
    let agents = [
        open("a", Timing::default())?,
        open("b", Timing::default())?,
        open("c", Timing::default())?,
    ];
    let mut watch = agents[0].identities();
    let lacks = watch.wait_for(|now| {
        let stale = now.stale.as_ref();
        stale.is_some_and(|stale| stale.reason.contains("crds.yaml"))
    });
    tokio::time::timeout(PATIENCE, lacks).await??;
    cluster.kubectl(&["apply", "-f", CRDS], "")?;

    let began = std::time::Instant::now();
    let numbers = acquire_all(&agents, SETS).await?;
    println!("{SETS} sets on three agents: {:?}", began.elapsed());
    let names = |cluster: &Cluster, kind| cluster.kubectl(&["get", kind, "-o", "name"], "");
    assert_eq!(names(&cluster, "healthidentities")?.lines().count(), SETS);
    agents[0].announce("10.244.1.9".parse()?, numbers[&0], "172.30.0.1".parse()?);
    let mut addresses = agents[1].addresses();
    tokio::time::timeout(PATIENCE, addresses.wait_for(|now| now.0.len() == 1)).await??;
    let shown = cluster.kubectl(&["get", "hid", &numbers[&0].to_string()], "")?;
    ensure!(shown.contains(r#"["k8s:app=a0"]"#), "{shown}");
    let slices = cluster.kubectl(&["get", "hes", "-o", "json"], "")?;
    let slices: Value = serde_json::from_str(&slices)?;
    let of_a = slices["items"].as_array().into_iter().flatten();
    let mut of_a = of_a.filter(|slice| slice["spec"]["node"] == "a");
    let owned = of_a.all(|slice| slice["metadata"]["ownerReferences"][0]["kind"] == "Node");
    ensure!(owned, "{slices}");

    cluster.kill_apiserver();
    let stale = watch.wait_for(|now| now.stale.is_some());
    tokio::time::timeout(PATIENCE, stale).await??;
    let waiting = tokio::spawn({
        let (agent, labels) = (agents[0].clone(), app(SETS)?);
        async move { agent.acquire(&labels, OnOutage::Wait).await }
    });
    cluster.start_apiserver()?;
    waiting.await??;
    drop(agents);

    // Nothing of the first agents is in use once their slices are gone.
    cluster.kubectl(&["delete", "hes", "--all"], "")?;
    let agent = open("a", timing)?;
    assert_eq!(agent.acquire(&app(7)?, OnOutage::Wait).await?, numbers[&7]);
    let mut watch = agent.identities();
    let before = watch.borrow().labels.len();
    let collected = watch.wait_for(|now| now.stale.is_none() && now.labels.len() + 3 <= before);
    let collected = tokio::time::timeout(PATIENCE, collected).await??;
    ensure!(
        collected.labels.contains_key(&numbers[&7]),
        "collected in use"
    );
    Ok(())
}
