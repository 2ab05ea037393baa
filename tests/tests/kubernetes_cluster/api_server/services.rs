//! Services and endpoint slices.

use anyhow::Context as _;
use health_agent::agent::services::sources::remote::KubernetesServices;
use health_model::api::ServiceProblem;
use health_service::source::ServiceSet;
use health_service::spec::{Selection, ServiceName, SliceName};
use serde_json::{Value, json};

use super::{ApiServer, until};

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
    let mut server = ApiServer::start()?;
    // The API exists since Kubernetes 1.21.
    let has_slices = server
        .plane
        .kubectl("get --raw /apis/discovery.k8s.io/v1")
        .is_ok();
    let kubeconfig = server.agents()?;
    let mut foreign = service("foreign");
    foreign["metadata"]["labels"] =
        json!({ "service.kubernetes.io/service-proxy-name": "another" });
    server.plane.apply(&[service("web"), foreign])?;
    if has_slices {
        server.plane.apply(&[slice("web", "10.100.1.7")])?;
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
    let set = until(&mut watch, "the services", |set| {
        is_well(set) && has(set, "web") && has(set, "kubernetes")
    })
    .await?;
    assert!(!has(&set, "foreign"));
    // The server assigned the service an address.
    let web = set.services[&ServiceName::new("default", "web")]
        .object
        .as_ref();
    let address = web.context("a service")?.common.cluster_ips[0].to_string();
    assert!(address.starts_with("10.96."), "{address}");
    if has_slices {
        let read = set.slices[&web_1].object.as_ref().context("a slice")?;
        assert_eq!(read.endpoints[0].address.to_string(), "10.100.1.7");
    }

    let unlabel = "service.kubernetes.io/service-proxy-name-";
    server
        .plane
        .kubectl(&format!("label service foreign {unlabel}"))?;
    until(&mut watch, "it to come", |set| has(set, "foreign")).await?;
    let headless = "service.kubernetes.io/headless=";
    server
        .plane
        .kubectl(&format!("label service foreign {headless}"))?;
    until(&mut watch, "it to go", |set| !has(set, "foreign")).await?;

    server.plane.kill_api_server();
    let stale = until(&mut watch, "stale", |set| {
        let mut reported = set.problems.iter();
        reported.any(|one| one.problem.starts_with("using the services as of "))
    })
    .await?;
    assert!(has(&stale, "web") && stale.slices.contains_key(&web_1) == has_slices);
    server.plane.start_api_server()?;
    server.plane.apply(&[service("later")])?;
    if has_slices {
        server.plane.kubectl("delete endpointslice web-1")?;
    }
    until(&mut watch, "the server's return", |set| {
        is_well(set) && has(set, "web") && has(set, "later") && !set.slices.contains_key(&web_1)
    })
    .await?;

    server.revoke()?;
    let refused = until(&mut watch, "the refusal", |set| {
        let is_forbidden = |one: &ServiceProblem| one.problem.contains("(403)");
        set.problems.iter().filter(|one| is_forbidden(one)).count() == 2
    })
    .await?;
    assert!(has(&refused, "web") && has(&refused, "later"));
    Ok(())
}
