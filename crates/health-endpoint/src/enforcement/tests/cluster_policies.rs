//! Policies of a Kubernetes cluster: kept through restarts, refused whole, and waited for.

use std::collections::BTreeMap;

use health_policy::{ClusterServices, Kind, Policy, Service, read_policy};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::enforcement::{CLUSTER_FILE, RefusedObject};

/// A NetworkPolicy of this name, which lets endpoints reach one port of those with the label `app=a`.
fn object(name: &str, port: u16) -> Arc<Policy> {
    let object = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "name": name, "namespace": "shop" },
        "spec": {
            "podSelector": { "matchLabels": { "app": "a" } },
            "ingress": [{ "ports": [{ "port": port }] }],
        },
    });
    Arc::new(read_policy(&object).unwrap())
}

fn complete(policies: impl IntoIterator<Item = Arc<Policy>>) -> ClusterPolicies {
    let policies = policies.into_iter();
    ClusterPolicies {
        objects: policies.map(|one| (one.name().clone(), Ok(one))).collect(),
        complete: Kind::ALL.into(),
        ..ClusterPolicies::default()
    }
}

fn refused(uid: Option<&str>, reason: &str) -> Result<Arc<Policy>, RefusedObject> {
    Err(RefusedObject {
        uid: uid.map(str::to_owned),
        reason: reason.to_owned(),
    })
}

fn names(enforcer: &Enforcer) -> Vec<String> {
    let repository = enforcer.repository();
    repository
        .of_cluster()
        .map(|held| held.name().to_string())
        .collect()
}

fn following() -> Site {
    Site {
        follows_cluster: true,
        ..Site::new()
    }
}

#[tokio::test(start_paused = true)]
async fn policies_of_the_cluster_are_kept_until_the_server_answers_and_forgotten_without_one() {
    let mut site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    enforcer
        .set_cluster_policies(&complete([object("p", 80), object("q", 80)]))
        .unwrap();
    enforcer.save_cluster_policies().unwrap();
    drop(enforcer);

    let enforcer = site.enforcer(&Session::new(&site.store));
    assert_eq!(
        names(&enforcer),
        ["NetworkPolicy shop/p", "NetworkPolicy shop/q"]
    );
    assert_eq!(enforcer.until_policies_known(Duration::ZERO).await, Ok(()));
    // The server has not listed this kind yet.
    let incomplete = ClusterPolicies {
        complete: [Kind::CiliumNetworkPolicy].into(),
        ..ClusterPolicies::default()
    };
    enforcer.set_cluster_policies(&incomplete).unwrap();
    assert_eq!(names(&enforcer).len(), 2);
    let before = enforcer.repository().revision();
    enforcer
        .set_cluster_policies(&complete([object("q", 80)]))
        .unwrap();
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/q"]);
    assert_eq!(enforcer.repository().revision(), before + 1);
    drop(enforcer);

    site.follows_cluster = false;
    let enforcer = site.enforcer(&Session::new(&site.store));
    assert_eq!(names(&enforcer), [""; 0]);
    assert!(!site.dir.path().join(CLUSTER_FILE).exists());
}

#[tokio::test(start_paused = true)]
async fn a_refused_object_keeps_the_form_that_was_in_force() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    enforcer
        .set_cluster_policies(&complete([object("p", 80)]))
        .unwrap();
    let mut changed = complete([object("q", 80)]);
    let p = object("p", 80).name().clone();
    changed
        .objects
        .insert(p, refused(None, "spec.x: unknown field"));
    enforcer.set_cluster_policies(&changed).unwrap();
    assert_eq!(
        names(&enforcer),
        ["NetworkPolicy shop/p", "NetworkPolicy shop/q"]
    );
    let reported = enforcer.refused_policies();
    assert_eq!(reported.len(), 1);
    assert_eq!(
        (reported[0].name.as_str(), reported[0].reason.as_str()),
        ("NetworkPolicy shop/p", "spec.x: unknown field")
    );
    enforcer
        .set_cluster_policies(&complete([object("q", 80)]))
        .unwrap();
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/q"]);
    assert!(enforcer.refused_policies().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_object_with_networks_that_do_not_fit_is_refused_and_the_others_stay() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let many = |name: &str, first: u32| {
        let blocks = (0..10_000_u32).map(|n| {
            let network = std::net::Ipv4Addr::from((first + n) << 8);
            json!({ "ipBlock": { "cidr": format!("{network}/24") } })
        });
        let object = json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": { "name": name, "namespace": "shop" },
            "spec": { "podSelector": {}, "egress": [{ "to": blocks.collect::<Vec<_>>() }] },
        });
        Arc::new(read_policy(&object).unwrap())
    };
    let policies: Vec<_> = (0..26)
        .map(|n| many(&format!("p{n:02}"), n * 10_000))
        .collect();
    enforcer.set_cluster_policies(&complete(policies)).unwrap();
    assert_eq!(names(&enforcer).len(), 25);
    let refused = enforcer.refused_policies();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].name, "NetworkPolicy shop/p25");
    assert!(refused[0].reason.contains("260000 networks"), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_waits_for_policies_that_it_has_never_known() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let unknown = |reason: &str| {
        let known = "the policies of the Kubernetes cluster are not known yet";
        Err(format!("{known}{reason}"))
    };
    assert_eq!(enforcer.until_policies_known(LONG).await, unknown(""));
    let mut given = complete([object("p", 80)]);
    given.complete = [Kind::NetworkPolicy].into();
    given.reason = Some("cannot list x".to_owned());
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(
        enforcer.until_policies_known(LONG).await,
        unknown(": cannot list x")
    );
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/p"]);
    given.complete = Kind::ALL.into();
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(enforcer.until_policies_known(LONG).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn policies_that_cannot_be_saved_are_in_force_and_saved_later() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let file = site.dir.path().join(CLUSTER_FILE);
    // Nothing can replace a folder.
    std::fs::create_dir(&file).unwrap();
    let given = complete([object("p", 80)]);
    enforcer.set_cluster_policies(&given).unwrap();
    let error = enforcer.save_cluster_policies().unwrap_err().to_string();
    assert!(error.contains(CLUSTER_FILE), "{error}");
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/p"]);
    assert!(enforcer.has_unsaved_policies());
    std::fs::remove_dir(&file).unwrap();
    enforcer.set_cluster_policies(&given).unwrap();
    assert!(enforcer.has_unsaved_policies());
    enforcer.save_cluster_policies().unwrap();
    assert!(file.is_file() && !enforcer.has_unsaved_policies());
}

/// A policy that allows endpoints only this egress.
fn egress(to: &Value) -> Arc<Policy> {
    let object = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
        "metadata": { "name": "egress" },
        "spec": { "endpointSelector": { "matchLabels": { "app": "a" } }, "egress": [to] },
    });
    Arc::new(read_policy(&object).unwrap())
}

/// Services without pods, with these addresses.
fn services(addresses: &[(&str, &str)]) -> ClusterServices {
    let service = |name: &str| {
        let (namespace, _) = name.split_once('/').unwrap();
        Arc::new(Service {
            namespace: namespace.to_owned(),
            ..Service::default()
        })
    };
    let named = addresses.iter();
    let services = named.map(|(name, _)| ((*name).to_owned(), service(name)));
    let addresses = addresses.iter();
    let addresses = addresses.map(|(name, ip)| ((*name).to_owned(), [ip.parse().unwrap()].into()));
    ClusterServices {
        services: Some(Arc::new(services.collect())),
        addresses: Some(Arc::new(addresses.collect::<BTreeMap<_, _>>())),
    }
}

fn to_db() -> Value {
    json!({ "toServices": [{ "k8sService": { "serviceName": "db", "namespace": "shop" } }] })
}

#[tokio::test(start_paused = true)]
async fn endpoints_follow_the_addresses_of_services_and_keep_them_over_restarts() {
    let site = following();
    let agent = site.start().await;
    let id = agent.create(1, "app=a").await;
    let mut given = complete([egress(&to_db())]);
    given.services = services(&[("shop/db", "198.51.100.1")]);
    agent.enforcer.set_cluster_policies(&given).unwrap();
    let reached = async |agent: &Agent, address: &str| {
        let revision = agent.enforcer.repository().revision();
        assert!(agent.enforcer.in_force(revision, LONG).await);
        let identity = agent.enforcer.identity_of(address.parse().unwrap());
        let table = site.kernel.table_of(id).unwrap();
        identity.is_local() && table.keys().any(|key| key.identity == identity.0)
    };
    assert!(reached(&agent, "198.51.100.1").await);
    given.services = services(&[("shop/db", "198.51.100.2")]);
    agent.enforcer.set_cluster_policies(&given).unwrap();
    assert!(reached(&agent, "198.51.100.2").await);
    assert!(!reached(&agent, "198.51.100.1").await);
    // The server does not answer.
    given.services = ClusterServices::default();
    agent.enforcer.set_cluster_policies(&given).unwrap();
    assert!(reached(&agent, "198.51.100.2").await);
    agent.enforcer.save_cluster_policies().unwrap();
    drop(agent);

    let enforcer = site.enforcer(&Session::new(&site.store));
    assert_eq!(enforcer.until_policies_known(Duration::ZERO).await, Ok(()));
    let prefixes = enforcer.repository().prefixes();
    assert_eq!(prefixes, ["198.51.100.2/32".parse().unwrap()].into());
}

#[tokio::test(start_paused = true)]
async fn an_agent_waits_for_the_services_that_policies_name() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let mut given = complete([egress(&to_db())]);
    given.reason = Some("cannot list services".to_owned());
    enforcer.set_cluster_policies(&given).unwrap();
    let unknown = "the services that policies name are not known yet: cannot list services";
    assert_eq!(
        enforcer.until_policies_known(LONG).await,
        Err(unknown.to_owned())
    );
    given.services = services(&[]);
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(enforcer.until_policies_known(LONG).await, Ok(()));
    // A policy that comes later holds no endpoint back.
    given.services = ClusterServices::default();
    given.complete.clear();
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(enforcer.until_policies_known(LONG).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn addresses_of_services_that_do_not_fit_change_nothing() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let mut given = complete([egress(&to_db())]);
    given.services = services(&[("shop/db", "198.51.100.1")]);
    enforcer.set_cluster_policies(&given).unwrap();
    let many = (0..256_001_u32).map(|n| std::net::Ipv4Addr::from(n).into());
    let many = BTreeMap::from([("shop/db".to_owned(), many.collect())]);
    given.services.addresses = Some(Arc::new(many));
    let error = enforcer
        .set_cluster_policies(&given)
        .unwrap_err()
        .to_string();
    assert!(error.contains("256001 networks"), "{error}");
    assert_eq!(enforcer.repository().prefixes().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn services_that_an_import_names_are_kept_and_refused_without_a_cluster() {
    let mut site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let mut given = complete([]);
    given.services = services(&[("shop/db", "198.51.100.1")]);
    enforcer.set_cluster_policies(&given).unwrap();
    let text = egress(&to_db()).document().to_string();
    enforcer.import(&text).unwrap();
    drop(enforcer);
    let enforcer = site.enforcer(&Session::new(&site.store));
    let prefixes = enforcer.repository().prefixes();
    assert_eq!(prefixes, ["198.51.100.1/32".parse().unwrap()].into());
    drop(enforcer);

    site.follows_cluster = false;
    let enforcer = site.enforcer(&Session::new(&site.store));
    assert!(enforcer.repository().prefixes().is_empty());
    let error = enforcer.import(&text).unwrap_err().to_string();
    let expected = "spec.egress[0].toServices: matching by service needs a Kubernetes cluster";
    assert!(error.contains(expected), "{error}");
}

#[tokio::test(start_paused = true)]
async fn the_api_servers_are_this_host_another_node_or_an_address_outside() {
    let site = following();
    let agent = site.start().await;
    let id = agent.create(1, "app=a").await;
    let mut given = complete([egress(&json!({ "toEntities": ["kube-apiserver"] }))]);
    let own = NODE_ADDRESS.to_string();
    for (address, identity, reaches_host) in [
        ("198.51.100.1", None, false),
        (own.as_str(), Some(Identity::HOST), true),
        ("198.51.100.2", None, false),
    ] {
        given.services = services(&[("default/kubernetes", address)]);
        agent.enforcer.set_cluster_policies(&given).unwrap();
        let revision = agent.enforcer.repository().revision();
        assert!(agent.enforcer.in_force(revision, LONG).await);
        let found = agent.enforcer.identity_of(address.parse().unwrap());
        assert_eq!(found.is_local().then_some(found).xor(Some(found)), identity);
        let table = site.kernel.table_of(id).unwrap();
        let reaches = |identity: Identity| table.keys().any(|key| key.identity == identity.0);
        assert!(reaches(found), "{address}");
        assert!(reaches(Identity::KUBE_APISERVER));
        assert_eq!(reaches(Identity::HOST), reaches_host, "{address}");
        assert!(!reaches(Identity::WORLD) && !reaches(Identity::REMOTE_NODE));
    }
}

#[tokio::test(start_paused = true)]
async fn another_object_of_the_same_name_inherits_no_rules() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let object = |uid: &str| {
        let mut document = object("p", 80).document().clone();
        document["metadata"]["uid"] = uid.into();
        Arc::new(read_policy(&document).unwrap())
    };
    let mut given = complete([object("1")]);
    let name = object("1").name().clone();
    enforcer.set_cluster_policies(&given).unwrap();
    given.objects.insert(name.clone(), refused(Some("1"), "x"));
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/p"]);
    // The server has not listed all objects, but this one is another.
    given.complete.clear();
    given.objects.insert(name.clone(), refused(Some("2"), "x"));
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(names(&enforcer), [""; 0]);
    given.objects.insert(name, Ok(object("3")));
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/p"]);
}

#[tokio::test(start_paused = true)]
async fn saved_policies_that_cannot_be_read_are_put_aside_and_endpoints_wait_for_the_server() {
    let site = following();
    let file = site.dir.path().join(CLUSTER_FILE);
    let half = r#"{"revision":7,"documents":[{"kind":"NetworkPolicy"#;
    std::fs::write(&file, half).unwrap();
    let enforcer = site.enforcer(&Session::new(&site.store));
    enforcer.until_policies_known(LONG).await.unwrap_err();
    let aside = std::fs::read_to_string(file.with_extension("json.damaged")).unwrap();
    assert_eq!(aside, half);
    enforcer
        .set_cluster_policies(&complete([object("p", 80)]))
        .unwrap();
    assert_eq!(enforcer.until_policies_known(LONG).await, Ok(()));
    enforcer.save_cluster_policies().unwrap();
    drop(enforcer);
    let enforcer = site.enforcer(&Session::new(&site.store));
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/p"]);
}

#[tokio::test(start_paused = true)]
async fn policies_that_name_more_labels_than_a_node_may_have_are_refused() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let of = |name: &str, keys: std::ops::Range<u32>| {
        let nodes = keys.map(|key| json!({ "matchLabels": { format!("key-{key}"): "" } }));
        let object = json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
            "metadata": { "name": name },
            "spec": { "endpointSelector": {}, "egress": [{ "toNodes": nodes.collect::<Vec<_>>() }] },
        });
        Arc::new(read_policy(&object).unwrap())
    };
    let given = complete([of("a", 0..200), of("b", 200..300), of("c", 100..250)]);
    enforcer.set_cluster_policies(&given).unwrap();
    let shown = ["CiliumNetworkPolicy a", "CiliumNetworkPolicy c"];
    assert_eq!(names(&enforcer), shown);
    let reported = enforcer.refused_policies();
    let reason =
        "all policies together would name 300 labels of nodes, but at most 250 are allowed";
    assert_eq!((reported.len(), reported[0].reason.as_str()), (1, reason));
    let import = of("d", 240..260).document().to_string();
    enforcer.import(&import).unwrap_err();
}

/// An agent in a runtime of its own, which ends with it.
fn start_alone(site: &Site) -> (Runtime, Agent) {
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let agent = runtime.block_on(site.start());
    (runtime, agent)
}

#[test]
fn endpoints_of_the_previous_agent_reach_addresses_that_new_policies_tell_apart() {
    let site = following();
    let to = |cidrs: &[&str]| complete([egress(&json!({ "toCIDR": cidrs }))]);
    let (runtime, agent) = start_alone(&site);
    let id = runtime.block_on(async {
        let id = agent.create(1, "app=a").await;
        let given = to(&["198.51.0.0/16"]);
        agent.enforcer.set_cluster_policies(&given).unwrap();
        let revision = agent.enforcer.repository().revision();
        assert!(agent.enforcer.in_force(revision, LONG).await);
        id
    });
    drop((runtime, agent));

    // Endpoints are not built before the identities of the cluster are known.
    site.store.now().is_away = true;
    let (runtime, agent) = start_alone(&site);
    runtime.block_on(async {
        let identity = || agent.enforcer.identity_of("198.51.100.1".parse().unwrap());
        let passes = || {
            let table = site.kernel.table_of(id).unwrap();
            table.keys().any(|key| key.identity == identity().0)
        };
        let before = identity();
        assert!(passes());
        let given = to(&["198.51.0.0/16", "198.51.100.1/32"]);
        agent.enforcer.set_cluster_policies(&given).unwrap();
        tokio::time::sleep(LONG).await;
        assert!(passes(), "the table in use does not know {:?}", identity());
        site.store.now().is_away = false;
        agent.session.publish();
        let revision = agent.enforcer.repository().revision();
        assert!(agent.enforcer.in_force(revision, LONG).await);
        assert!(passes());
        assert_ne!(identity(), before);
    });
    drop(runtime);
    assert_eq!(site.kernel.now().mistakes, [""; 0]);
}
