//! The cases of `pkg/proxy/topology_test.go`, grouped by what they show.

use std::net::SocketAddr;

use health_model::policy::Protocol;

use super::*;
use crate::spec::{Common, Conditions, ServiceName, ServiceType, SourceRanges, TrafficPolicy};

const READY: &str = "ready";
const ENDING: &str = "ending";
const ILL: &str = "ill";

/// A port with these policies, with or without external traffic.
fn port(internal: TrafficPolicy, external: TrafficPolicy, is_external: bool) -> ServicePort {
    ServicePort {
        name: "".into(),
        protocol: Protocol::TCP,
        port: 80,
        node_port: is_external.then_some(30_000),
        service: Arc::new(Common {
            name: ServiceName::new("shop", "web"),
            kind: ServiceType::ClusterIp,
            created: None,
            cluster_ips: vec![[10, 96, 0, 1].into()],
            external_ips: Vec::new(),
            load_balancer_ips: Vec::new(),
            source_ranges: SourceRanges::default(),
            affinity: None,
            internal_policy: internal,
            external_policy: external,
            health_check_node_port: None,
            algorithm: None,
            forwarding: None,
            local_readiness: false,
        }),
    }
}

/// Endpoints numbered from 1: condition, whether local, and the nodes and zones of the hints.
fn endpoints(all: &[(&str, bool, &[&str], &[&str])]) -> Vec<Endpoint> {
    let names = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect();
    let numbered = all.iter().zip(1..);
    numbered
        .map(|((condition, is_local, nodes, zones), number)| Endpoint {
            address: SocketAddr::new([10, 1, 0, number].into(), 8080),
            conditions: Conditions {
                ready: *condition == READY,
                serving: *condition != ILL,
                terminating: *condition == ENDING,
            },
            is_local: *is_local,
            weight: 1,
            node: None,
            zone: None,
            hints: Some(Arc::new(Hints {
                nodes: names(nodes),
                zones: names(zones),
            }))
            .filter(|_| !nodes.is_empty() || !zones.is_empty()),
        })
        .collect()
}

fn topology(zone: Option<&str>) -> Topology {
    Topology {
        node: "here".into(),
        zone: zone.map(Arc::from),
    }
}

fn numbers(list: &[&Endpoint]) -> Vec<u8> {
    let last = |endpoint: &&Endpoint| match endpoint.address {
        SocketAddr::V4(address) => address.ip().octets()[3],
        SocketAddr::V6(_) => 0,
    };
    list.iter().map(last).collect()
}

/// The cluster list, the local list, the reachable endpoints, and whether there are any.
type Numbers = (Vec<u8>, Vec<u8>, Vec<u8>, bool);

fn chosen(endpoints: &[Endpoint], port: &ServicePort, zone: Option<&str>) -> Numbers {
    let choice = Choice::of(endpoints, port, &topology(zone));
    let reachable = numbers(&choice.reachable());
    (
        numbers(&choice.cluster),
        numbers(&choice.local),
        reachable,
        choice.has_any,
    )
}

fn cluster(endpoints: &[Endpoint], zone: Option<&str>) -> Vec<u8> {
    let port = port(TrafficPolicy::Cluster, TrafficPolicy::Cluster, false);
    chosen(endpoints, &port, zone).0
}

use TrafficPolicy::{Cluster, Local};

#[test]
fn hints_prefer_the_zone_if_all_ready_endpoints_have_one_and_one_is_for_it() {
    let both = endpoints(&[
        (READY, false, &[], &["z1"]),
        (READY, false, &[], &["z2", "z1"]),
        (READY, false, &[], &["z2"]),
        (ENDING, false, &[], &[]),
        (ILL, false, &[], &[]),
    ]);
    assert_eq!(cluster(&both, Some("z1")), [1, 2]);
    assert_eq!(cluster(&both, Some("z3")), [1, 2, 3]);
    assert_eq!(cluster(&both, None), [1, 2, 3]);
    let one_without = endpoints(&[(READY, false, &[], &["z1"]), (READY, false, &[], &[])]);
    assert_eq!(cluster(&one_without, Some("z1")), [1, 2]);
    // The only endpoint for this zone is not ready; the mode is decided before anything is filtered.
    let not_ready = endpoints(&[(ENDING, false, &[], &["z1"]), (READY, false, &[], &["z2"])]);
    assert_eq!(cluster(&not_ready, Some("z1")), [2]);
}

#[test]
fn hints_prefer_the_node_over_the_zone() {
    let both = endpoints(&[
        (READY, false, &["here"], &["z1"]),
        (READY, false, &["there"], &["z1"]),
        (READY, false, &["there"], &["z2"]),
    ]);
    assert_eq!(cluster(&both, Some("z1")), [1]);
    assert_eq!(cluster(&both, None), [1]);
    let one_without = endpoints(&[
        (READY, false, &["here"], &["z2"]),
        (READY, false, &[], &["z1"]),
    ]);
    assert_eq!(cluster(&one_without, Some("z1")), [2]);
    let not_here = endpoints(&[
        (READY, false, &["there"], &["z1"]),
        (READY, false, &["there"], &["z2"]),
    ]);
    assert_eq!(cluster(&not_here, Some("z1")), [1]);
}

#[test]
fn endpoints_that_end_are_used_when_no_other_is_ready() {
    let ending = endpoints(&[
        (ENDING, false, &[], &[]),
        (ILL, false, &[], &[]),
        (ENDING, true, &[], &[]),
    ]);
    let all = (vec![1, 3], vec![], vec![1, 3], true);
    assert_eq!(chosen(&ending, &port(Cluster, Cluster, true), None), all);
    let nothing = (vec![], vec![], vec![], false);
    let ill = endpoints(&[(ILL, true, &[], &[])]);
    assert_eq!(chosen(&ill, &port(Local, Local, true), None), nothing);
}

#[test]
fn the_two_lists_fall_back_each_on_its_own() {
    let port = port(Cluster, Local, true);
    let endpoints = endpoints(&[
        (READY, false, &[], &[]),
        (ENDING, true, &[], &[]),
        (ENDING, false, &[], &[]),
    ]);
    let expected = (vec![1], vec![2], vec![1, 2], true);
    assert_eq!(chosen(&endpoints, &port, None), expected);
}

#[test]
fn policies_decide_which_lists_there_are() {
    let all = endpoints(&[(READY, false, &[], &[]), (READY, true, &[], &[])]);
    for (internal, external, is_external, cluster, local) in [
        (Cluster, Cluster, true, vec![1, 2], vec![]),
        (Cluster, Local, true, vec![1, 2], vec![2]),
        (Local, Cluster, true, vec![1, 2], vec![2]),
        (Local, Local, true, vec![1, 2], vec![2]),
        (Local, Cluster, false, vec![], vec![2]),
        (Cluster, Local, false, vec![1, 2], vec![]),
    ] {
        let port = port(internal, external, is_external);
        let chosen = chosen(&all, &port, None);
        assert_eq!(
            (chosen.0, chosen.1),
            (cluster, local),
            "{internal:?} {external:?} {is_external}"
        );
    }
}

#[test]
fn a_local_list_ignores_hints_and_what_only_it_has_is_reachable_too() {
    let all = endpoints(&[(READY, false, &[], &["z1"]), (READY, true, &[], &["z2"])]);
    let expected = (vec![1], vec![2], vec![1, 2], true);
    assert_eq!(
        chosen(&all, &port(Cluster, Local, true), Some("z1")),
        expected
    );
}

#[test]
fn endpoints_elsewhere_are_there_though_the_policy_allows_none_of_them() {
    let elsewhere = endpoints(&[(READY, false, &[], &[])]);
    let expected = (vec![], vec![], vec![], true);
    assert_eq!(
        chosen(&elsewhere, &port(Local, Cluster, false), None),
        expected
    );
    let ending = endpoints(&[(ENDING, false, &[], &[])]);
    assert_eq!(
        chosen(&ending, &port(Local, Cluster, false), None),
        expected
    );
}
