//! Endpoints of pods have the labels that the API server gives the pods and their namespaces, and the policies that
//! select them.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_model::api::Endpoint;
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::apiserver::{self, ApiServer, Behaviour};
use tests::namespace::Namespace;
use tests::ping::{Pace, Pinging, is_answered};
use tests::plugin::{Answer, Plugin, TRY_AGAIN_LATER};
use tests::process::RunOutput;
use tests::{Bed, Node, PATIENCE, wait_for};

/// The labels of each pod of the namespace `shop`, besides its own.
const SHOP: [&str; 5] = [
    "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop",
    "k8s:io.cilium.k8s.namespace.labels.tier=gold",
    "k8s:io.cilium.k8s.policy.cluster=default",
    "k8s:io.cilium.k8s.policy.serviceaccount=default",
    "k8s:io.kubernetes.pod.namespace=shop",
];

/// The kubeconfig of agents that read the nodes of a cluster.
const NODES_KUBECONFIG: &str = "/run/health-agent/kubeconfig";
/// Ports at which each web server listens.
const WEB_PORTS: [u16; 3] = [7070, 8080, 9090];
/// How long to check that a dropped connection is not established.
const SILENCE: Duration = Duration::from_millis(300);

/// A pod whose server listens at all of [`WEB_PORTS`], one of which the pod names `web`.
struct WebPod {
    address: IpAddr,
    web: u16,
    _listeners: Vec<TcpListener>,
}

/// A node whose agent follows the pods of an API server, and a CNI plugin.
pub(crate) struct Stand {
    // Fields are dropped in this order.
    pub(crate) namespaces: Vec<Namespace>,
    pub(crate) plugin: Plugin,
    pub(crate) server: ApiServer,
    pub(crate) bed: Bed,
    pub(crate) folder: TempDir,
}

impl Stand {
    pub(crate) fn start() -> anyhow::Result<Self> {
        Self::start_with("")
    }

    /// Starts the agent with these flags, in which `{kubeconfig}` stands for the path of the kubeconfig.
    pub(crate) fn start_with(flags: &str) -> anyhow::Result<Self> {
        Self::start_after(|_| {}, flags)
    }

    /// Like [`Self::start_with`], but prepares the API server before the agent starts.
    pub(crate) fn start_after(
        prepare: impl FnOnce(&ApiServer),
        flags: &str,
    ) -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).without_agents().start()?;
        Self::start_on(
            bed,
            |_, server| {
                prepare(server);
                Ok(())
            },
            flags,
        )
    }

    /// Like [`Self::start_with`], but the API server has the nodes, too.
    pub(crate) fn start_in_cluster(
        prepare: impl FnOnce(&ApiServer),
        flags: &str,
    ) -> anyhow::Result<Self> {
        let bed = Bed::builder()
            .nodes(1)
            .registry(|_| format!("--registry kubernetes:{NODES_KUBECONFIG}"))
            .without_agents()
            .start()?;
        let prepare = |node: &Node, server: &ApiServer| -> anyhow::Result<()> {
            server.write_kubeconfig(Path::new(NODES_KUBECONFIG))?;
            let mut object = apiserver::node(node.name(), &[], &[]);
            let addresses = node.addresses();
            let addresses = addresses.iter();
            object["status"]["addresses"] = addresses
                .map(|address| json!({ "type": "InternalIP", "address": address }))
                .collect();
            object["spec"] = json!({ "podCIDRs": node.pod_cidrs() });
            server.put(object);
            prepare(server);
            Ok(())
        };
        Self::start_on(bed, prepare, flags)
    }

    fn start_on(
        bed: Bed,
        prepare: impl FnOnce(&Node, &ApiServer) -> anyhow::Result<()>,
        flags: &str,
    ) -> anyhow::Result<Self> {
        let server = ApiServer::start_on(bed.node(1))?;
        server.put(namespace("shop", &json!({ "tier": "gold" })));
        prepare(bed.node(1), &server)?;
        let folder = tempfile::tempdir()?;
        let stand = Self {
            namespaces: Vec::new(),
            plugin: Plugin::of(bed.node(1), folder.path())?,
            server,
            bed,
            folder,
        };
        stand.server.write_kubeconfig(&stand.kubeconfig())?;
        stand.start_agent(flags)?;
        Ok(stand)
    }

    fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    pub(crate) fn start_agent(&self, flags: &str) -> anyhow::Result<()> {
        let kubeconfig = self.kubeconfig();
        let kubeconfig = kubeconfig.display();
        let flags = flags.replace("{kubeconfig}", &kubeconfig.to_string());
        self.node()
            .start_agent_with(&format!("--pods-from-kubernetes={kubeconfig} {flags}"))
    }

    pub(crate) fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// Puts a pod of the namespace `shop`.
    pub(crate) fn put_pod(&self, name: &str, uid: &str, labels: &Value) {
        self.put_pod_in("shop", name, uid, labels);
    }

    pub(crate) fn put_pod_in(&self, namespace: &str, name: &str, uid: &str, labels: &Value) {
        self.put_pod_with_ports([namespace, name], uid, labels, &json!([]));
    }

    fn put_pod_with_ports(
        &self,
        [namespace, name]: [&str; 2],
        uid: &str,
        labels: &Value,
        ports: &Value,
    ) {
        self.server.put(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": namespace, "name": name, "uid": uid, "labels": labels },
            "spec": {
                "nodeName": self.node().name(), "serviceAccountName": "default",
                "containers": [{ "name": "app", "image": "busybox", "ports": ports }],
            },
        }));
    }

    /// Connects a pod of the namespace `shop`, as a container runtime does.
    pub(crate) fn connect(&mut self, name: &str, uid: &str) -> anyhow::Result<Endpoint> {
        let namespace = self.connect_container("shop", name, uid)?;
        self.namespaces.push(namespace);
        self.endpoint(name)
    }

    /// Connects a container, whose ID is the pod's UID. Returns its network namespace.
    pub(crate) fn connect_container(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> anyhow::Result<Namespace> {
        let netns = Namespace::new(&format!("hpod-{uid}"))?;
        wait_for("the agent to connect a pod", PATIENCE, || {
            let added = self.add(&netns, namespace, name, uid)?;
            // A runtime tries again, too.
            let is_starting = added.code() == TRY_AGAIN_LATER;
            ensure!(added.is_success || is_starting, "{}", added.json);
            Ok(added.is_success.then_some(()))
        })?;
        Ok(netns)
    }

    /// Tries once to connect a pod of the namespace `shop`, which must fail.
    pub(crate) fn try_connect(&self, name: &str, uid: &str) -> anyhow::Result<Answer> {
        let netns = Namespace::new(&format!("hpod-{uid}"))?;
        self.add(&netns, "shop", name, uid)
    }

    fn add(
        &self,
        netns: &Namespace,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> anyhow::Result<Answer> {
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID={uid}"
        );
        self.plugin.call_with(&[
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", uid),
            ("CNI_NETNS", &netns.path()),
            ("CNI_IFNAME", "eth0"),
            ("CNI_ARGS", &arguments),
        ])
    }

    /// Connects a pod with the label `app=NAME` that names this port `web`.
    fn connect_web(&mut self, name: &str, uid: &str, web: u16) -> anyhow::Result<WebPod> {
        let ports = json!([{ "name": "web", "containerPort": web }]);
        self.put_pod_with_ports(["shop", name], uid, &json!({ "app": name }), &ports);
        self.connect(name, uid)?;
        let endpoint = self.wait_web_labels(name, web)?;
        let address = endpoint.ipv4.context("no IPv4 address")?;
        let namespace = self.namespaces.last().context("no namespace")?;
        let namespace = NetNs::open(namespace.name())?;
        let listeners = namespace.run_in(|| {
            let listen = |port| TcpListener::bind((address, port));
            WEB_PORTS.into_iter().map(listen).collect::<Result<_, _>>()
        });
        Ok(WebPod {
            address,
            web,
            _listeners: listeners?.context("cannot listen")?,
        })
    }

    /// Waits until the endpoint of a pod with a port `web` is ready.
    fn wait_web_labels(&self, name: &str, web: u16) -> anyhow::Result<Endpoint> {
        let (app, port) = (format!("k8s:app={name}"), format!("port:web={web}/TCP"));
        let expected: Vec<&str> = [&*app].into_iter().chain(SHOP).chain([&*port]).collect();
        self.wait_all_labels(name, &expected)
    }

    /// Imports a policy, and returns when it is in force.
    pub(crate) fn import(&self, policy: &Value) -> anyhow::Result<()> {
        self.try_import(policy)?.success().map(drop)
    }

    /// Runs the import of a policy, which may be refused.
    pub(crate) fn try_import(&self, policy: &Value) -> anyhow::Result<RunOutput> {
        let file = self.folder.path().join("policy.json");
        fs::write(&file, policy.to_string())?;
        self.node()
            .cli(&format!("policy import {}", file.display()))
    }

    fn endpoint(&self, name: &str) -> anyhow::Result<Endpoint> {
        let name = format!("shop/{name}");
        let listed = self.node().listing("endpoint list")?;
        let listed: Vec<Endpoint> = serde_json::from_value(listed)?;
        let found = listed
            .into_iter()
            .find(|one| one.name.as_ref() == Some(&name) && one.state != "disconnected");
        found.with_context(|| format!("no endpoint {name}"))
    }

    /// Waits until a pod's endpoint is ready with these labels and those of its namespace.
    pub(crate) fn wait_labels(&self, name: &str, own: &[&str]) -> anyhow::Result<Endpoint> {
        let expected: Vec<&str> = own.iter().chain(&SHOP).copied().collect();
        self.wait_all_labels(name, &expected)
    }

    fn wait_all_labels(&self, name: &str, expected: &[&str]) -> anyhow::Result<Endpoint> {
        let mut last = None;
        let found = wait_for("the labels of a pod", PATIENCE, || {
            // A starting agent has none yet.
            let Ok(endpoint) = self.endpoint(name) else {
                return Ok(None);
            };
            let is_so = endpoint.labels == expected && endpoint.state == "ready";
            last = Some(endpoint.clone());
            Ok(is_so.then_some(endpoint))
        });
        found.with_context(|| format!("{last:#?}"))
    }
}

/// Checks that a client can connect to each pod at the port that the pod names `web`, and at no other port.
fn check_web_alone_is_open(client: &str, pods: &[WebPod]) -> anyhow::Result<()> {
    let client = NetNs::open(client)?;
    for (pod, port) in pods
        .iter()
        .flat_map(|pod| WEB_PORTS.map(|port| (pod, port)))
    {
        let to = SocketAddr::new(pod.address, port);
        let within = if port == pod.web { PATIENCE } else { SILENCE };
        let is_open = match client.run_in(|| TcpStream::connect_timeout(&to, within))? {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::TimedOut => false,
            Err(error) => return Err(error).context(to),
        };
        ensure!(
            is_open == (port == pod.web),
            "{to}: connected: {is_open}, web: {}",
            pod.web
        );
    }
    Ok(())
}

/// A Namespace object.
pub(crate) fn namespace(name: &str, labels: &Value) -> Value {
    let mut labels = labels.clone();
    labels["kubernetes.io/metadata.name"] = name.into();
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": name, "labels": labels },
    })
}

#[test]
#[ignore = "needs root"]
fn the_endpoint_of_a_pod_follows_the_labels_of_the_pod_and_its_namespace() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    // The runtime connects a pod before the agent has heard of it.
    let early = stand.connect("web", "u-1")?;
    assert_eq!(
        (early.identity, early.labels.as_slice()),
        (5, &["reserved:init".to_owned()][..])
    );
    let reason = early.reason.context("no reason")?;
    assert!(reason.contains("pod shop/web"), "{reason}");
    stand.put_pod(
        "web",
        "u-1",
        &json!({ "app": "web", "pod-template-hash": "5d4f" }),
    );
    let first = stand.wait_labels("web", &["k8s:app=web"])?;
    assert!(first.identity >= 256, "{first:?}");

    // A label of a rollout does not change the identity; another one does.
    stand.put_pod(
        "web",
        "u-1",
        &json!({ "app": "web", "pod-template-hash": "77aa" }),
    );
    stand.put_pod("db", "u-2", &json!({ "app": "db" }));
    let db = stand.connect("db", "u-2")?;
    let db = stand
        .wait_labels("db", &["k8s:app=db"])
        .with_context(|| format!("{db:?}"))?;
    assert_eq!(stand.endpoint("web")?.identity, first.identity);
    stand.put_pod("web", "u-1", &json!({ "app": "web2" }));
    let second = stand.wait_labels("web", &["k8s:app=web2"])?;
    assert!(![first.identity, db.identity].contains(&second.identity));

    // Labels of the namespace change all its pods.
    stand
        .server
        .put(namespace("shop", &json!({ "tier": "iron" })));
    let iron: Vec<&str> = ["k8s:app=web2"]
        .into_iter()
        .chain(SHOP)
        .map(|label| match label.ends_with("tier=gold") {
            true => "k8s:io.cilium.k8s.namespace.labels.tier=iron",
            false => label,
        })
        .collect();
    stand.wait_all_labels("web", &iron)?;

    let refused = stand
        .node()
        .cli(&format!("endpoint labels {} --add k8s:app=db", second.id))?;
    assert_ne!(refused.code, Some(0));
    assert!(
        refused.stderr.contains("comes from pod shop/web"),
        "{}",
        refused.stderr
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_outage_changes_no_labels_and_a_new_pod_leaves_init_when_it_ends() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    stand.put_pod("web", "u-1", &json!({ "app": "web" }));
    stand.connect("web", "u-1")?;
    let web = stand.wait_labels("web", &["k8s:app=web"])?;

    stand.server.stop();
    let new = stand.connect("db", "u-2")?;
    assert_eq!(new.identity, 5);
    stand.node().kill_agent(Signal::SIGKILL)?;
    stand.start_agent("")?;
    let kept = stand.wait_labels("web", &["k8s:app=web"])?;
    assert_eq!(kept.identity, web.identity);
    assert_eq!(stand.endpoint("db")?.identity, 5);

    stand.put_pod("db", "u-2", &json!({ "app": "db" }));
    // A pod with the name of another one that is still connected.
    stand.put_pod("web", "u-3", &json!({ "app": "intruder" }));
    stand.server.resume()?;
    stand.wait_labels("db", &["k8s:app=db"])?;
    let kept = stand.endpoint("web")?;
    assert_eq!((kept.identity, kept.labels), (web.identity, web.labels));

    // What the server does not allow is named, and changes nothing.
    stand.server.behave(Behaviour::Forbidden);
    wait_for("the reason in the log", PATIENCE, || {
        let log = stand.node().log()?;
        let is_named = |kind: &str| log.contains(&format!("{kind} is forbidden"));
        Ok((is_named("pods") && is_named("namespaces")).then_some(()))
    })?;
    assert_eq!(stand.endpoint("web")?.identity, web.identity);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_policy_for_the_labels_of_a_namespace_applies_to_its_pods() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    stand.put_pod("web", "u-1", &json!({ "app": "web" }));
    stand.put_pod("client", "u-2", &json!({ "app": "client" }));
    stand.connect("web", "u-1")?;
    stand.connect("client", "u-2")?;
    let web = stand.wait_labels("web", &["k8s:app=web"])?;
    stand.wait_labels("client", &["k8s:app=client"])?;
    let client = stand.namespaces[1].name();
    let address = web.ipv4.context("no IPv4 address")?;
    ensure!(is_answered(client, address)?, "no answer without a policy");
    stand.import(&json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
        "metadata": { "name": "web", "namespace": "shop" },
        "spec": {
            "endpointSelector": { "matchLabels": { "app": "web" } },
            "ingress": [{ "fromEndpoints": [{ "matchLabels": {
                "k8s:io.cilium.k8s.namespace.labels.tier": "gold",
                "io.cilium.k8s.policy.serviceaccount": "default",
                "app": "client",
            } }] }],
        },
    }))?;
    ensure!(
        is_answered(client, address)?,
        "no answer although it is allowed"
    );
    stand.put_pod("client", "u-2", &json!({ "app": "other" }));
    stand.wait_labels("client", &["k8s:app=other"])?;
    ensure!(
        !is_answered(client, address)?,
        "an answer although it is not allowed"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn packets_that_all_policies_treat_alike_do_not_notice_changes_of_labels() -> anyhow::Result<()> {
    const CHANGES: usize = 20;
    let mut stand = Stand::start()?;
    let mut addresses = Vec::new();
    for (name, uid) in [("web", "u-1"), ("client", "u-2"), ("stranger", "u-3")] {
        stand.put_pod(name, uid, &json!({ "app": name }));
        addresses.push(stand.connect(name, uid)?.ipv4.context("no IPv4 address")?);
        stand.wait_labels(name, &[&format!("k8s:app={name}")])?;
    }
    let any_of = |apps: [&str; 2]| {
        let expression = json!({ "key": "app", "operator": "In", "values": apps });
        json!({ "matchExpressions": [expression] })
    };
    let policy = |name: &str, subject: &Value, direction: &str, section: &Value| {
        json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": { "name": name, "namespace": "shop" },
            "spec": { "podSelector": subject, "policyTypes": [direction], direction.to_lowercase(): section },
        })
    };
    let (webs, clients) = (any_of(["web", "web2"]), any_of(["client", "client2"]));
    let named = |app: &str| json!({ "matchLabels": { "app": app } });
    // Each endpoint has another policy with each label.
    let mut policies = Vec::new();
    for (web, client) in [("web", "client"), ("web2", "client2")] {
        let from = json!([{ "from": [{ "podSelector": clients, "namespaceSelector": {} }] }]);
        policies.push(policy(web, &named(web), "Ingress", &from));
        let to = json!([{ "to": [{ "podSelector": webs }] }]);
        policies.push(policy(client, &named(client), "Egress", &to));
    }
    stand.import(&json!({ "apiVersion": "v1", "kind": "List", "items": policies }))?;

    let netns = |at: usize| stand.namespaces[at].name();
    let allowed = Pinging::start(netns(1), addresses[0], Pace::DENSE);
    let refused = Pace {
        patience: Duration::from_secs(1),
        ..Pace::DENSE
    };
    let refused = [
        Pinging::start(netns(2), addresses[0], refused),
        Pinging::start(netns(1), addresses[2], refused),
    ];
    for change in 0..CHANGES {
        let suffix = if change % 2 == 0 { "2" } else { "" };
        for (name, uid) in [("web", "u-1"), ("client", "u-2")] {
            // No identity was there before.
            let (app, build) = (format!("{name}{suffix}"), change.to_string());
            stand.put_pod(name, uid, &json!({ "app": app, "build": build }));
            let labels = [format!("k8s:app={app}"), format!("k8s:build={build}")];
            stand.wait_labels(name, &labels.each_ref().map(String::as_str))?;
        }
    }
    let summary = allowed.end()?;
    ensure!(
        summary.transmitted > 0 && summary.lost() == 0,
        "{summary:?}"
    );
    for refused in refused {
        let summary = refused.end()?;
        ensure!(
            summary.transmitted > 0 && summary.received == 0,
            "{summary:?}"
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn patterns_choose_the_labels_of_identities() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    stand.node().kill_agent(Signal::SIGTERM)?;
    stand.start_agent("--identity-labels k8s:app,k8s:!app-version")?;
    stand.put_pod(
        "web",
        "u-1",
        &json!({ "app": "web", "app-version": "7", "team": "a" }),
    );
    stand.connect("web", "u-1")?;
    // Nothing includes the label of the service account.
    let expected: Vec<&str> = ["k8s:app=web"]
        .into_iter()
        .chain(SHOP)
        .filter(|label| !label.contains("serviceaccount"))
        .collect();
    stand.wait_all_labels("web", &expected)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_named_port_is_the_one_that_the_receiving_pod_has() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    stand.put_pod("client", "u-1", &json!({ "app": "client" }));
    stand.connect("client", "u-1")?;
    stand.wait_labels("client", &["k8s:app=client"])?;
    let client = stand.namespaces[0].name().to_owned();
    let mut pods = vec![
        stand.connect_web("a", "u-2", 8080)?,
        stand.connect_web("b", "u-3", 9090)?,
    ];

    let mut policy = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "name": "web", "namespace": "shop" },
        "spec": {
            "podSelector": { "matchLabels": { "app": "client" } },
            "policyTypes": ["Egress"],
            "egress": [{ "ports": [{ "port": "web" }] }],
        },
    });
    stand.import(&policy)?;
    check_web_alone_is_open(&client, &pods).context("egress of the client")?;
    // The policy also covers a later pod with another number.
    pods.push(stand.connect_web("c", "u-4", 7070)?);
    check_web_alone_is_open(&client, &pods).context("egress to a later pod")?;

    // Another policy of the same name replaces it.
    policy["spec"] = json!({
        "podSelector": { "matchExpressions": [
            { "key": "app", "operator": "In", "values": ["a", "b", "c"] },
        ] },
        "ingress": [{
            "from": [{ "podSelector": { "matchLabels": { "app": "client" } } }],
            "ports": [{ "port": "web", "protocol": "TCP" }],
        }],
    });
    stand.import(&policy)?;
    check_web_alone_is_open(&client, &pods).context("ingress of the pods")?;

    stand.node().kill_agent(Signal::SIGKILL)?;
    stand.start_agent("")?;
    for (name, pod) in ["a", "b", "c"].into_iter().zip(&pods) {
        stand.wait_web_labels(name, pod.web)?;
    }
    check_web_alone_is_open(&client, &pods).context("after a restart of the agent")?;
    Ok(())
}
