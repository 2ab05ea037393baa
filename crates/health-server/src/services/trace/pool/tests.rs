use health_common::service::{Backend, FRONTEND_DROPS_OUTSIDE};
use health_model::api::ServiceTopology;

use super::*;

fn backend(last: u8, is_local: bool) -> ServiceBackend {
    ServiceBackend {
        address: ([10, 1, 0, last], 8080).into(),
        ready: true,
        serving: true,
        terminating: false,
        local: is_local,
        probed: None,
        in_cluster_list: true,
        in_local_list: is_local,
        lingering: false,
        weight: 1,
        node: None,
        zone: None,
    }
}

fn owner(kind: &str, [inside, outside]: [&str; 2], backends: Vec<ServiceBackend>) -> Owner {
    let frontend = ServiceFrontend {
        kind: kind.to_owned(),
        listen: "10.96.0.1:80".to_owned(),
        family: "IPv4".to_owned(),
        inside: inside.to_owned(),
        outside: outside.to_owned(),
    };
    let port = ServicePortEntry {
        name: "http".to_owned(),
        protocol: "TCP".to_owned(),
        port: 80,
        node_port: None,
        frontends: vec![frontend.clone()],
        backends,
        topology: Vec::new(),
        failures: Vec::new(),
    };
    Owner {
        service: ServiceEntry {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            kind: "LoadBalancer".to_owned(),
            source: "web.yaml".to_owned(),
            internal_policy: "Cluster".to_owned(),
            external_policy: "Local".to_owned(),
            affinity_ns: None,
            algorithm: None,
            forwarding: "snat".to_owned(),
            forwarding_problem: None,
            health_check_node_port: None,
            ports: vec![port.clone()],
        },
        port,
        frontend,
        family: Family::V4,
    }
}

fn pool_of(lasts: &[u8]) -> Vec<ListedBackend> {
    let listed = lasts.iter().map(|last| ListedBackend {
        index: u32::from(*last),
        entry: Backend {
            addr: std::net::IpAddr::from([10, 1, 0, *last]).into(),
            port_be: 8080_u16.to_be(),
            service: 3,
            ..Backend::default()
        },
        share: 0.5,
    });
    listed.collect()
}

#[test]
fn a_pool_says_who_gets_nothing_and_why() {
    let unready = ServiceBackend {
        ready: false,
        serving: false,
        probed: Some(false),
        in_cluster_list: false,
        in_local_list: false,
        ..backend(2, true)
    };
    let local = owner(
        "NodePort",
        ["cluster", "local"],
        vec![backend(1, true), unready, backend(3, false)],
    );
    assert_eq!(local.title(), "shop/web:http");
    assert_eq!(
        (local.policy(Origin::Inside), local.policy(Origin::Outside)),
        ("Cluster", "Local")
    );
    assert_eq!(
        local.reasons(Origin::Outside),
        [
            "only endpoints on this node",
            "10.1.0.2:8080 gets no flows: its probe fails",
            "10.1.0.3:8080 gets no flows: on another node",
        ]
    );
    assert_eq!(
        local.reasons(Origin::Inside),
        [
            "flows from this node and its endpoints may use the whole cluster, whatever the policy",
            "10.1.0.2:8080 gets no flows: its probe fails",
        ]
    );
}

#[test]
fn a_pool_says_what_hints_come_to_and_that_only_endings_are_left() {
    let other_zone = ServiceBackend {
        in_cluster_list: false,
        ..backend(2, false)
    };
    let mut hinted = owner(
        "ClusterIP",
        ["cluster"; 2],
        vec![backend(1, true), other_zone],
    );
    hinted.port.topology.push(ServiceTopology {
        family: "IPv4".to_owned(),
        prefers: "zone".to_owned(),
        reason: "hints are for zones, including z1".to_owned(),
    });
    assert_eq!(
        hinted.reasons(Origin::Inside),
        [
            "hints are for zones, including z1",
            "10.1.0.2:8080 gets no flows: others are preferred",
        ]
    );
    let ending = ServiceBackend {
        ready: false,
        terminating: true,
        ..backend(1, true)
    };
    let endings = owner("ClusterIP", ["cluster"; 2], vec![ending]);
    assert_eq!(
        endings.reasons(Origin::Inside),
        ["no endpoint is ready; terminating endpoints that still serve get the flows"]
    );
    let many = (1..=7).map(|last| ServiceBackend {
        ready: false,
        serving: false,
        in_cluster_list: false,
        ..backend(last, true)
    });
    let none = owner("ClusterIP", ["reject"; 2], many.collect());
    let reasons = none.reasons(Origin::Inside);
    assert_eq!(reasons[0], "no endpoint is serving");
    assert_eq!(
        reasons.last().map(String::as_str),
        Some("2 more get no flows")
    );
}

#[test]
fn maps_that_lead_elsewhere_than_the_agent_means_are_reported() {
    let two = owner(
        "ClusterIP",
        ["cluster"; 2],
        vec![backend(1, true), backend(2, false)],
    );
    let entry = Frontend::default();
    assert_eq!(
        two.difference(Origin::Inside, &entry, &pool_of(&[2, 1])),
        None
    );
    assert_eq!(
        two.difference(Origin::Inside, &entry, &pool_of(&[1]))
            .as_deref(),
        Some("the programs use 10.1.0.1:8080, but the agent expects 10.1.0.1:8080, 10.1.0.2:8080")
    );
    let drops = owner("NodePort", ["cluster", "drop"], vec![backend(2, false)]);
    assert_eq!(
        drops.difference(Origin::Outside, &entry, &[]).as_deref(),
        Some("the programs reject the flow, but the agent chose `drop`")
    );
    let dropping = Frontend {
        flags: FRONTEND_DROPS_OUTSIDE,
        ..entry
    };
    assert_eq!(drops.difference(Origin::Outside, &dropping, &[]), None);
}
