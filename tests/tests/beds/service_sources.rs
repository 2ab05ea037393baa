//! Services from an API server that fails on demand, and from a real etcd: the agent follows their changes, and loses
//! no services when a source goes away.

use std::sync::Arc;

use anyhow::Context as _;
use health_agent::agent::services::sources::remote::{EtcdServices, KubernetesServices};
use health_net::netns::NetNs;
use health_service::source::ServiceSet;
use health_service::spec::{Selection, ServiceName, SliceName};
use health_settings::RegistrySpec;
use serde_json::{Value, json};
use tests::apiserver::{ApiServer, Behaviour, Kind};
use tests::bed::Etcd;
use tests::{Bed, PATIENCE};
use tokio::sync::watch::Receiver;

const SERVER: std::net::Ipv4Addr = std::net::Ipv4Addr::new(172, 30, 0, 254);
const PREFIX: &str = "/health-agent/services/v1/default/";
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
const HEADLESS: &str = "service.kubernetes.io/headless";

type Sets = Receiver<Arc<ServiceSet>>;

fn service(name: &str, ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": "shop", "name": name },
        "spec": { "clusterIP": ip, "ports": [{ "port": 80 }] },
    })
}

fn slice(service: &str, endpoints: &[&str]) -> Value {
    let endpoints: Vec<_> = endpoints
        .iter()
        .map(|address| json!({ "addresses": [address] }))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": "shop", "name": format!("{service}-1"),
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": "IPv4", "ports": [{ "name": "", "port": 8080 }],
        "endpoints": endpoints,
    })
}

fn labelled(mut object: Value, key: &str, value: &str) -> Value {
    object["metadata"]["labels"][key] = value.into();
    object
}

/// The services with their first ClusterIP, and the slices with their endpoints, as strings.
fn shown(set: &ServiceSet) -> Vec<String> {
    let services = set.services.iter().map(|(name, sourced)| {
        let ip = sourced.object.as_ref().map(|one| one.common.cluster_ips[0]);
        format!(
            "{} {}",
            name.name,
            ip.map_or("-".to_owned(), |ip| ip.to_string())
        )
    });
    let slices = set.slices.iter().map(|(name, sourced)| {
        let object = sourced.object.as_ref();
        let addresses = object.into_iter().flat_map(|one| &one.endpoints);
        let addresses: Vec<_> = addresses.map(|one| one.address.to_string()).collect();
        format!("{} {}", name.name, addresses.join(","))
    });
    services.chain(slices).collect()
}

fn has_problem(set: &ServiceSet, part: &str) -> bool {
    let mut problems = set.problems.iter();
    problems.any(|one| format!("{}: {}", one.subject, one.problem).contains(part))
}

async fn until(
    sets: &mut Sets,
    what: &str,
    is_so: impl Fn(&ServiceSet) -> bool,
) -> anyhow::Result<Arc<ServiceSet>> {
    let reached = tokio::time::timeout(PATIENCE, sets.wait_for(|set| is_so(set))).await;
    let reached = reached.map(|set| set.map(|set| set.clone()));
    match reached {
        Ok(set) => set.context("the source ended"),
        Err(_) => anyhow::bail!("waited in vain for {what}; it is {:?}", sets.borrow()),
    }
}

/// Waits until the set is complete, has no problems, and contains exactly these objects.
async fn until_shown(sets: &mut Sets, expected: &[&str]) -> anyhow::Result<Arc<ServiceSet>> {
    until(sets, &format!("exactly {expected:?}"), |set| {
        set.synced.is_complete() && set.problems.is_empty() && shown(set) == expected
    })
    .await
}

struct Api {
    server: ApiServer,
    _services: KubernetesServices,
    sets: Sets,
    _folder: tempfile::TempDir,
}

impl Api {
    fn start(selection: Selection, objects: &[Value]) -> anyhow::Result<Self> {
        let server = ApiServer::start()?;
        for object in objects {
            server.put(object.clone());
        }
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("config");
        server.write_kubeconfig(&kubeconfig)?;
        let services = KubernetesServices::open(Some(&kubeconfig), selection)?;
        Ok(Self {
            sets: services.services(),
            _services: services,
            server,
            _folder: folder,
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn services_of_the_api_are_followed_and_those_of_others_are_not_asked_for()
-> anyhow::Result<()> {
    let objects = [
        service("web", "10.96.0.1"),
        slice("web", &["10.1.0.1"]),
        labelled(service("mesh", "10.96.0.2"), PROXY_NAME, "mesh"),
        labelled(slice("mesh", &["10.1.0.2"]), PROXY_NAME, "mesh"),
        labelled(service("none", "10.96.0.3"), HEADLESS, ""),
        labelled(slice("none", &["10.1.0.3"]), HEADLESS, ""),
    ];
    let mut api = Api::start(Selection::default(), &objects)?;
    until_shown(&mut api.sets, &["web 10.96.0.1", "web-1 10.1.0.1"]).await?;
    let mut own = Api::start(
        Selection {
            proxy_name: Some("mesh".to_owned()),
        },
        &objects,
    )?;
    until_shown(&mut own.sets, &["mesh 10.96.0.2", "mesh-1 10.1.0.2"]).await?;
    for (server, selector) in [
        (&api.server, format!("%21{PROXY_NAME}%2C%21{HEADLESS}")),
        (&own.server, format!("{PROXY_NAME}%3Dmesh%2C%21{HEADLESS}")),
    ] {
        let selector = selector.replace('/', "%2F");
        for asked in server.requests() {
            assert!(asked.contains(&selector), "{asked} has no {selector}");
        }
    }

    // Objects are added, changed and deleted, and change hands between this proxy and another.
    let server = &api.server;
    server.put(slice("web", &["10.1.0.1", "10.1.0.9"]));
    server.put(service("mesh", "10.96.0.2"));
    server.put(service("new", "10.96.0.4"));
    let all = [
        "mesh 10.96.0.2",
        "new 10.96.0.4",
        "web 10.96.0.1",
        "web-1 10.1.0.1,10.1.0.9",
    ];
    until_shown(&mut api.sets, &all).await?;
    server.put(labelled(service("mesh", "10.96.0.2"), PROXY_NAME, "mesh"));
    server.delete_of(Kind::Service, "shop/new");
    server.delete_of(Kind::EndpointSlice, "shop/web-1");
    until_shown(&mut api.sets, &["web 10.96.0.1"]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_of_the_api_with_an_error_is_named_and_stays_served() -> anyhow::Result<()> {
    let web = [service("web", "10.96.0.1"), slice("web", &["10.1.0.1"])];
    let mut api = Api::start(Selection::default(), &web)?;
    until_shown(&mut api.sets, &["web 10.96.0.1", "web-1 10.1.0.1"]).await?;
    let mut bad = service("web", "10.96.0.7");
    bad["spec"]["ports"] = "http".into();
    api.server.put(bad);
    api.server.put(slice("web", &["10.1.0.2"]));
    api.server.put(service("other", "10.96.0.2"));
    let set = until(&mut api.sets, "the others to go on", |set| {
        shown(set) == ["other 10.96.0.2", "web 10.96.0.1", "web-1 10.1.0.2"]
            && has_problem(set, "kubernetes: service shop/web: spec.ports: ")
    })
    .await?;
    assert_eq!(set.problems.len(), 1, "{:?}", set.problems);
    api.server.put(service("web", "10.96.0.8"));
    let right = ["other 10.96.0.2", "web 10.96.0.8", "web-1 10.1.0.2"];
    until_shown(&mut api.sets, &right).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn services_stay_whatever_the_api_server_does() -> anyhow::Result<()> {
    let web = [service("web", "10.96.0.1"), slice("web", &["10.1.0.1"])];
    let mut api = Api::start(Selection::default(), &web)?;
    let well = ["web 10.96.0.1", "web-1 10.1.0.1"];
    until_shown(&mut api.sets, &well).await?;
    for (behaviour, reason) in [
        (Behaviour::Unauthorized, "(401)"),
        (Behaviour::Forbidden, "services is forbidden"),
        (Behaviour::BadGateway, "answers 502"),
        (
            Behaviour::Rubbish("{\"items\": 7}".to_owned()),
            "cannot watch services: ",
        ),
        (Behaviour::RubbishInWatches, "cannot watch services: "),
    ] {
        api.server.behave(behaviour.clone());
        let reported = until(
            &mut api.sets,
            &format!("{behaviour:?} to be reported"),
            |set| {
                has_problem(set, "kubernetes: using the services as of ")
                    && has_problem(set, "kubernetes: using the endpoint slices as of ")
                    && has_problem(set, reason)
            },
        )
        .await?;
        assert_eq!(shown(&reported), well, "{behaviour:?}");
        assert!(reported.synced.is_complete());
        api.server.behave(Behaviour::Serve);
        until_shown(&mut api.sets, &well).await?;
    }

    // A new store, which is empty and has no history to continue from.
    api.server.stop();
    for object in web {
        api.server.put(object);
    }
    api.server.compact();
    api.server.behave(Behaviour::LostStore);
    api.server.resume()?;
    let reported = until(
        &mut api.sets,
        "the loss of its store to be reported",
        |set| {
            let lost = |resource| format!("the API server lists no {resource}; its store may");
            has_problem(set, &lost("services")) && has_problem(set, &lost("endpointslices"))
        },
    )
    .await?;
    assert_eq!(shown(&reported), well);
    api.server.behave(Behaviour::Serve);
    until_shown(&mut api.sets, &well).await?;

    // Changes made during an outage take effect afterwards, even if the server no longer has their history.
    api.server.stop();
    let reported = until(&mut api.sets, "the outage", |set| !set.problems.is_empty()).await?;
    assert_eq!(shown(&reported), well);
    api.server.delete_of(Kind::EndpointSlice, "shop/web-1");
    api.server.put(slice("new", &["10.1.0.2"]));
    api.server.put(service("new", "10.96.0.2"));
    api.server.compact();
    api.server.resume()?;
    let later = ["new 10.96.0.2", "web 10.96.0.1", "new-1 10.1.0.2"];
    until_shown(&mut api.sets, &later).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn services_are_not_whole_until_some_of_both_kinds_were_listed() -> anyhow::Result<()> {
    let server = ApiServer::start()?;
    server.behave(Behaviour::Hang);
    let folder = tempfile::tempdir()?;
    let kubeconfig = folder.path().join("config");
    server.write_kubeconfig(&kubeconfig)?;
    let services = KubernetesServices::open(Some(&kubeconfig), Selection::default())?;
    let mut sets = services.services();
    let first = until(&mut sets, "a first word", |set| {
        has_problem(set, "no answer from the API server yet")
    })
    .await?;
    assert!(!first.synced.services && !first.synced.slices);

    // A cluster always has at least one service, so the agent does not trust an empty list, even at the start.
    server.behave(Behaviour::Serve);
    let reported = until(&mut sets, "the loss of its store to be reported", |set| {
        let lost = |resource| format!("the API server lists no {resource}; its store may");
        has_problem(set, &lost("services")) && has_problem(set, &lost("endpointslices"))
    })
    .await?;
    assert!(!reported.synced.services && !reported.synced.slices);
    server.put(service("web", "10.96.0.1"));
    let reported = until(&mut sets, "the services", |set| set.synced.services).await?;
    assert!(!reported.synced.slices);
    server.put(slice("web", &["10.1.0.1"]));
    until_shown(&mut sets, &["web 10.96.0.1", "web-1 10.1.0.1"]).await?;
    Ok(())
}

/// Runs a test with an etcd, whose services the bed's first node follows.
fn with_etcd(
    test: impl AsyncFnOnce(Etcd, &EtcdServices, Sets) -> anyhow::Result<()> + Send,
) -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let etcd = Etcd::start(&bed, SERVER, "")?;
    etcd.put(
        &format!("{PREFIX}services/shop/web"),
        &service("web", "10.96.0.1").to_string(),
    )?;
    etcd.put(
        &format!("{PREFIX}endpointslices/shop/web-1"),
        &slice("web", &["10.1.0.1"]).to_string(),
    )?;
    let spec: RegistrySpec = format!("etcd:{}", etcd.url()).parse()?;
    NetNs::open(bed.node(1).name())?.run_in(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let services = EtcdServices::open(&spec, "default", Selection::default())?;
            let mut sets = services.services();
            until_shown(&mut sets, &["web 10.96.0.1", "web-1 10.1.0.1"]).await?;
            test(etcd, &services, sets).await
        })
    })?
}

#[test]
#[ignore = "needs root"]
fn services_of_etcd_follow_their_keys_and_a_broken_document_keeps_its_last_good_form()
-> anyhow::Result<()> {
    with_etcd(async |etcd, _services, mut sets| {
        let put =
            |key: &str, object: &Value| etcd.put(&format!("{PREFIX}{key}"), &object.to_string());
        put("endpointslices/shop/web-1", &slice("web", &["10.1.0.2"]))?;
        put("services/shop/new", &service("new", "10.96.0.2"))?;
        let right = ["new 10.96.0.2", "web 10.96.0.1", "web-1 10.1.0.2"];
        let set = until_shown(&mut sets, &right).await?;
        let source = &set.services[&ServiceName::new("shop", "new")].source;
        assert_eq!(&**source, format!("etcd:{PREFIX}services/shop/new"));

        let key = format!("{PREFIX}endpointslices/shop/web-1");
        etcd.put(&key, "{ half a docu")?;
        etcd.put(&format!("{PREFIX}pods/web"), "{}")?;
        put("services/shop/later", &service("later", "10.96.0.3"))?;
        let kept = [
            "later 10.96.0.3",
            "new 10.96.0.2",
            "web 10.96.0.1",
            "web-1 10.1.0.2",
        ];
        let set = until(&mut sets, "the errors to be named, and the others", |set| {
            shown(set) == kept
                && has_problem(set, &format!("etcd:{key}: "))
                && has_problem(set, &format!("etcd:{PREFIX}pods/web: the key must be "))
        })
        .await?;
        assert_eq!(set.problems.len(), 2, "{:?}", set.problems);
        put("endpointslices/shop/web-1", &slice("web", &["10.1.0.3"]))?;
        for gone in ["pods/web", "services/shop/later"] {
            etcd.ctl(&format!("del {PREFIX}{gone}"))?.success()?;
        }
        let right = ["new 10.96.0.2", "web 10.96.0.1", "web-1 10.1.0.3"];
        until_shown(&mut sets, &right).await?;
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn services_of_etcd_stay_while_it_is_away_and_catch_up_also_after_a_compaction()
-> anyhow::Result<()> {
    with_etcd(async |mut etcd, _services, mut sets| {
        let web = ["web 10.96.0.1", "web-1 10.1.0.1"];
        etcd.kill()?;
        let reported = until(&mut sets, "the outage", |set| {
            has_problem(set, "etcd: using the services as of ")
        })
        .await?;
        assert_eq!(shown(&reported), web);
        etcd.restart()?;
        until_shown(&mut sets, &web).await?;

        // Another client writes while the agent is held up, and the history is gone when the agent continues: no agent
        // code runs until this thread awaits.
        etcd.kill()?;
        until(&mut sets, "the outage", |set| !set.problems.is_empty()).await?;
        etcd.restart()?;
        etcd.ctl(&format!("del {PREFIX}endpointslices/shop/web-1"))?
            .success()?;
        let new = service("new", "10.96.0.2").to_string();
        etcd.put(&format!("{PREFIX}services/shop/new"), &new)?;
        let revision = etcd.revision()?;
        etcd.ctl(&format!("compact {revision}"))?.success()?;
        let set = until(&mut sets, "what was written meanwhile", |set| {
            set.problems.is_empty() && set.services.len() == 2
        })
        .await?;
        // An object that a new list lacks is kept for a while, since another client may write it again.
        assert!(set.slices.contains_key(&SliceName::new("shop", "web-1")));
        etcd.ctl(&format!("del {PREFIX}services/shop/new"))?
            .success()?;
        until_shown(&mut sets, &web).await?;
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn an_etcd_that_comes_back_without_its_data_takes_no_service_away() -> anyhow::Result<()> {
    with_etcd(async |mut etcd, _services, mut sets| {
        etcd.kill()?;
        until(&mut sets, "the outage", |set| !set.problems.is_empty()).await?;
        etcd.forget()?;
        etcd.restart()?;
        let reported = until(&mut sets, "the loss to be reported", |set| {
            has_problem(set, "its data may have been lost")
        })
        .await?;
        let web = ["web 10.96.0.1", "web-1 10.1.0.1"];
        assert_eq!(shown(&reported), web);
        etcd.put(
            &format!("{PREFIX}services/shop/web"),
            &service("web", "10.96.0.9").to_string(),
        )?;
        until_shown(&mut sets, &["web 10.96.0.9", "web-1 10.1.0.1"]).await?;
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn what_changed_while_etcd_was_away_is_in_force_once_it_is_back() -> anyhow::Result<()> {
    with_etcd(async |mut etcd, _services, mut sets| {
        // The last change seen before the outage was the first list, a put or a deletion.
        let (old, new) = ("services/shop/old", "services/shop/new");
        for last_change in ["", "put", "delete"] {
            let text = service("new", "10.96.0.2").to_string();
            match last_change {
                "put" => {
                    let text = service("old", "10.96.0.3").to_string();
                    etcd.put(&format!("{PREFIX}{old}"), &text)?;
                    until(&mut sets, "the old service", |set| set.services.len() == 2).await?;
                }
                "delete" => {
                    etcd.put(&format!("{PREFIX}{new}"), &text)?;
                    until(&mut sets, "the new service", |set| set.services.len() == 2).await?;
                    etcd.ctl(&format!("del {PREFIX}{new}"))?.success()?;
                    until(&mut sets, "its end", |set| set.services.len() == 1).await?;
                }
                _ => {}
            }
            etcd.kill()?;
            until(&mut sets, "the outage", |set| !set.problems.is_empty()).await?;
            etcd.restart()?;
            etcd.put(&format!("{PREFIX}{new}"), &text)?;
            etcd.ctl(&format!("del {PREFIX}{old}"))?.success()?;
            // Without the history, the old service would be kept for longer than this wait.
            let right = ["new 10.96.0.2", "web 10.96.0.1", "web-1 10.1.0.1"];
            until_shown(&mut sets, &right).await?;
            etcd.ctl(&format!("del {PREFIX}{new}"))?.success()?;
            until_shown(&mut sets, &["web 10.96.0.1", "web-1 10.1.0.1"]).await?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn an_etcd_that_lost_its_data_and_was_written_further_is_listed_again() -> anyhow::Result<()> {
    with_etcd(async |mut etcd, _services, mut sets| {
        for (last_change, ip) in [
            ("", "10.96.0.2"),
            ("put", "10.96.0.3"),
            ("delete", "10.96.0.4"),
        ] {
            let other = format!("{PREFIX}services/shop/other");
            if !last_change.is_empty() {
                etcd.put(&other, &service("other", "10.96.0.9").to_string())?;
                until(&mut sets, "another service", |set| set.services.len() == 2).await?;
            }
            if last_change == "delete" {
                etcd.ctl(&format!("del {other}"))?.success()?;
                until(&mut sets, "its end", |set| set.services.len() == 1).await?;
            }
            let known = etcd.revision()?;
            etcd.kill()?;
            until(&mut sets, "the outage", |set| !set.problems.is_empty()).await?;
            etcd.forget()?;
            // No agent code runs until this thread awaits: the agent then finds a store with the same ID and later
            // revisions.
            etcd.restart()?;
            etcd.put(
                &format!("{PREFIX}services/shop/web"),
                &service("web", ip).to_string(),
            )?;
            while etcd.revision()? <= known {
                etcd.put("/elsewhere", "x")?;
            }
            until(&mut sets, "what the store has now", |set| {
                shown(set).contains(&format!("web {ip}"))
            })
            .await?;
        }
        Ok(())
    })
}
