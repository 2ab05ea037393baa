//! The rights that `deploy/kubernetes` grants are those that agents use with every setting on, and no others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_registry::identity::{IdentityAllocator, Timing};
use health_registry::kubernetes::{EventType, EventWriter, ObjectEvent};
use health_settings::RegistrySpec;
use serde_json::{Value, json};
use tests::apiserver::{ApiServer, Kind};
use tests::deploy::{self, Inputs};
use tests::{PATIENCE, wait_for};

use crate::identities::{acquire_all, app};
use crate::kubernetes_labels::Stand;

/// Verbs by resource, as `RESOURCE` or `RESOURCE.GROUP`.
type Rights = BTreeMap<String, BTreeSet<String>>;

const IDENTITIES: &str = "healthidentities.health-agent.io";
const SLICES: &str = "healthendpointslices.health-agent.io";
/// With so many label sets, two agents that ask for all of them at once have met.
const MOST_SETS: usize = 2000;
/// What agents do with objects.
const NEEDED: [(&str, &[&str]); 12] = [
    ("nodes", &["get", "list", "watch", "patch"]),
    ("pods", &["list", "watch"]),
    ("namespaces", &["list", "watch"]),
    ("services", &["list", "watch"]),
    ("endpointslices.discovery.k8s.io", &["list", "watch"]),
    ("networkpolicies.networking.k8s.io", &["list", "watch"]),
    ("ciliumnetworkpolicies.cilium.io", &["list", "watch"]),
    (
        "ciliumclusterwidenetworkpolicies.cilium.io",
        &["list", "watch"],
    ),
    ("nodes/status", &["patch"]),
    ("events", &["create", "patch"]),
    (
        IDENTITIES,
        &["get", "list", "watch", "create", "patch", "delete"],
    ),
    (SLICES, &["list", "watch", "create", "patch", "delete"]),
];

fn needed() -> Rights {
    let sets = NEEDED.iter().map(|(resource, verbs)| {
        let verbs = verbs.iter().map(|verb| (*verb).to_owned());
        ((*resource).to_owned(), verbs.collect())
    });
    sets.collect()
}

/// What the service account may do in all namespaces, with all components.
fn granted() -> anyhow::Result<Rights> {
    let components = deploy::components()?;
    let components: Vec<_> = components.iter().map(String::as_str).collect();
    let inputs = Inputs {
        api_server: "10.0.0.1",
        mesh_key: "",
    };
    let objects = deploy::objects(&components, inputs)?;
    let is_of = |object: &Value, kind: &str| object["kind"] == kind;
    ensure!(
        !objects.iter().any(|object| is_of(object, "Role")),
        "a role of one namespace is not compared"
    );
    let bindings = objects.iter().filter(|it| is_of(it, "ClusterRoleBinding"));
    let bound: BTreeSet<_> = bindings
        .map(|binding| {
            ensure!(
                binding["subjects"][0]["name"] == "health-agent",
                "{binding}"
            );
            Ok(binding["roleRef"]["name"].to_string())
        })
        .collect::<Result<_, _>>()?;
    let roles = objects.iter().filter(|object| is_of(object, "ClusterRole"));
    let roles = roles.filter(|role| bound.contains(&role["metadata"]["name"].to_string()));
    let mut rights = Rights::new();
    for rule in roles.flat_map(|role| role["rules"].as_array().into_iter().flatten()) {
        let texts = |field: &str| {
            let texts = rule[field].as_array().cloned().unwrap_or_default();
            let texts = texts
                .into_iter()
                .filter_map(|text| Some(text.as_str()?.to_owned()));
            texts.collect::<Vec<_>>()
        };
        for group in texts("apiGroups") {
            for resource in texts("resources") {
                ensure!(
                    resource != "*" && group != "*",
                    "{rule} grants more than it names"
                );
                rights
                    .entry(qualified(&group, &resource))
                    .or_default()
                    .extend(texts("verbs"));
            }
        }
    }
    Ok(rights)
}

fn qualified(group: &str, resource: &str) -> String {
    match group {
        "" => resource.to_owned(),
        group => format!("{resource}.{group}"),
    }
}

/// The right that a request, `METHOD path?query`, needs: the request attributes of an authorizer. `None` for paths without
/// objects.
fn right(request: &str) -> Option<(String, String)> {
    let (method, uri) = request.split_once(' ')?;
    let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
    let words: Vec<_> = path.split('/').skip(1).collect();
    let (group, rest) = match words.as_slice() {
        ["api", _, rest @ ..] => ("", rest),
        ["apis", group, _, rest @ ..] => (*group, rest),
        _ => return None,
    };
    let rest = match rest {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
        rest => rest,
    };
    let (resource, name) = match rest {
        [resource] => ((*resource).to_owned(), None),
        [resource, name] => ((*resource).to_owned(), Some(name)),
        [resource, name, part] => (format!("{resource}/{part}"), Some(name)),
        _ => return None,
    };
    let is_watch = query
        .split('&')
        .any(|one| ["watch=true", "watch=1"].contains(&one));
    let verb = match (method, name) {
        ("GET", None) if is_watch => "watch",
        ("GET", None) => "list",
        ("GET", Some(_)) => "get",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", None) => "deletecollection",
        ("DELETE", Some(_)) => "delete",
        (method, _) => method,
    };
    Some((qualified(group, &resource), verb.to_owned()))
}

fn used(server: &ApiServer) -> Rights {
    let mut rights = Rights::new();
    for (resource, verb) in server
        .requests()
        .iter()
        .filter_map(|request| right(request))
    {
        rights.entry(resource).or_default().insert(verb);
    }
    rights
}

fn wait_used(server: &ApiServer, resource: &str, verb: &str) -> anyhow::Result<()> {
    wait_for(&format!("{verb} of {resource}"), PATIENCE, || {
        let used = used(server);
        let verbs = used.get(resource);
        Ok(verbs
            .is_some_and(|verbs| verbs.contains(verb))
            .then_some(()))
    })
}

/// An agent that follows everything, with pods that come and go, and a policy that it refuses.
fn work_of_an_agent() -> anyhow::Result<Rights> {
    const SETTINGS: &str = "--services-from-kubernetes={kubeconfig} --node-condition";
    let prepare = |server: &ApiServer| {
        server.define_cilium();
        // The service of the API server, without which lists of services are not believed.
        let metadata = json!({ "namespace": "default", "name": "kubernetes" });
        server.put(json!({
            "apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": { "clusterIP": "10.96.0.1", "ports": [{ "port": 443 }] },
        }));
        server.put(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata,
            "addressType": "IPv4", "ports": [{ "port": 6443 }], "endpoints": [],
        }));
    };
    let mut stand = Stand::start_in_cluster(prepare, SETTINGS)?;
    stand.server.put(json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
        "metadata": { "namespace": "shop", "name": "names", "uid": "u-names" },
        "spec": { "endpointSelector": {}, "egress": [{ "toFQDNs": [{ "matchName": "a.example" }] }] },
    }));
    for name in ["web", "client"] {
        let uid = format!("u-{name}");
        stand.put_pod(name, &uid, &json!({ "app": name }));
        stand.connect(name, &uid)?;
        let label = format!("k8s:app={name}");
        stand.wait_labels(name, &[&label])?;
        // The first pod needs a slice of endpoints, and the second changes it.
        wait_used(
            &stand.server,
            SLICES,
            if name == "web" { "create" } else { "patch" },
        )?;
    }
    for (resource, verb) in [
        ("nodes", "patch"),
        ("nodes/status", "patch"),
        ("events", "create"),
        ("services", "watch"),
        ("endpointslices.discovery.k8s.io", "watch"),
        ("networkpolicies.networking.k8s.io", "watch"),
        ("ciliumclusterwidenetworkpolicies.cilium.io", "watch"),
    ] {
        wait_used(&stand.server, resource, verb)?;
    }
    Ok(used(&stand.server))
}

/// What agents do with identities within minutes, in seconds: two that race for numbers, and collect those they drop.
#[tokio::main(flavor = "multi_thread")]
async fn work_of_identities() -> anyhow::Result<Rights> {
    let server = ApiServer::start()?;
    let folder = tempfile::tempdir()?;
    let kubeconfig = folder.path().join("config");
    server.write_kubeconfig(&kubeconfig)?;
    let timing = Timing {
        settle_seen: Duration::from_millis(200),
        collect_after: Duration::from_millis(500),
        look_period: Duration::from_millis(100),
        reuse_after: Duration::from_secs(1),
        ..Timing::default()
    };
    let open = |node: &str| {
        let store = RegistrySpec::Kubernetes(Some(kubeconfig.clone()));
        IdentityAllocator::open(&store, "default", node, timing).map(Arc::new)
    };
    let agents = [open("a")?, open("b")?];
    agents[0].forget_earlier();
    // They read a number if both write it at once, which is up to chance.
    let mut sets = 0;
    let numbers = loop {
        sets += 200;
        let numbers = acquire_all(&agents, sets).await?;
        let used = used(&server);
        let verbs = used.get(IDENTITIES);
        if sets == MOST_SETS || verbs.is_some_and(|verbs| verbs.contains("get")) {
            break numbers;
        }
    };
    let address = "10.244.1.9".parse()?;
    agents[0].announce(1, numbers[&0], &[(address, "172.30.0.1".parse()?)]);
    let entries = || server.list_of(Kind::HealthEndpointSlice).len();
    wait_used(&server, SLICES, "create")?;
    agents[0].withdraw(address);
    for agent in &agents {
        (0..sets).for_each(|set| agent.release(&app(set)));
    }
    for verb in ["get", "patch", "delete"] {
        wait_used(&server, IDENTITIES, verb)?;
    }
    wait_used(&server, SLICES, "delete").with_context(|| format!("{} slices", entries()))?;
    Ok(used(&server))
}

/// A container that is killed twice, which is counted in one event.
#[tokio::main(flavor = "multi_thread")]
async fn work_of_events() -> anyhow::Result<Rights> {
    let server = ApiServer::start()?;
    let folder = tempfile::tempdir()?;
    let kubeconfig = folder.path().join("config");
    server.write_kubeconfig(&kubeconfig)?;
    let writer = EventWriter::open(Some(&kubeconfig), "a")?;
    for verb in ["create", "patch"] {
        writer.occur(ObjectEvent {
            kind: "Pod".to_owned(),
            api_version: "v1".to_owned(),
            namespace: Some("default".to_owned()),
            name: "web".to_owned(),
            uid: "u-1".to_owned(),
            field_path: None,
            event_type: EventType::Normal,
            reason: "Killing",
            message: "Container app failed liveness probe".to_owned(),
        });
        wait_used(&server, "events", verb)?;
    }
    Ok(used(&server))
}

#[test]
#[ignore = "needs root"]
fn agents_use_the_rights_that_the_manifests_grant_and_no_others() -> anyhow::Result<()> {
    let mut used = work_of_an_agent()?;
    for (resource, verbs) in work_of_identities()?.into_iter().chain(work_of_events()?) {
        used.entry(resource).or_default().extend(verbs);
    }
    assert_eq!(used, needed(), "what agents did");
    assert_eq!(granted()?, needed(), "what deploy/kubernetes grants");
    Ok(())
}

#[test]
fn a_request_needs_the_right_of_its_verb_and_resource() {
    for (request, resource, verb) in [
        ("GET /api/v1/nodes?&limit=200", "nodes", "list"),
        (
            "GET /api/v1/nodes?&watch=true&timeoutSeconds=290",
            "nodes",
            "watch",
        ),
        ("GET /api/v1/namespaces/shop", "namespaces", "get"),
        ("POST /api/v1/namespaces/shop/events", "events", "create"),
        (
            "PATCH /api/v1/nodes/a/status?fieldManager=x",
            "nodes/status",
            "patch",
        ),
        ("DELETE /apis/a.io/v1/things/x", "things.a.io", "delete"),
        (
            "DELETE /apis/a.io/v1/things",
            "things.a.io",
            "deletecollection",
        ),
    ] {
        let right = right(request).unwrap_or_default();
        assert_eq!(right, (resource.to_owned(), verb.to_owned()), "{request}");
    }
}
