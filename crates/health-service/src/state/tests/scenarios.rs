//! What comes of services and endpoints, one thing at a time.

use super::super::*;
use super::bed::*;
use crate::spec::{SourceRanges, TrafficPolicy};

fn ends(list: &[Backend]) -> Vec<String> {
    list.iter()
        .map(|backend| backend.address.to_string())
        .collect()
}

/// Kind, target from inside, target from outside.
fn targets(port: &PortState) -> Vec<(FrontendKind, Target, Target)> {
    let frontends = port.frontends.iter();
    frontends
        .map(|frontend| (frontend.kind, frontend.inside, frontend.outside))
        .collect()
}

#[test]
fn a_service_without_endpoints_rejects_and_gets_backends_with_the_first() {
    let mut bed = Bed::new();
    bed.set(service("a", 1, |_| {}));
    assert_eq!(bed.sync(), ["shop/a:http/TCP IPv4"]);
    let reject = (FrontendKind::ClusterIp, Target::Reject, Target::Reject);
    assert_eq!(targets(bed.port("a")), [reject]);
    bed.slice(slice("a", &[(1, READY, "there")]));
    assert_eq!(bed.sync(), ["shop/a:http/TCP IPv4"]);
    let cluster = (FrontendKind::ClusterIp, Target::Cluster, Target::Cluster);
    assert_eq!(targets(bed.port("a")), [cluster]);
    assert_eq!(ends(&bed.port("a").cluster), ["10.1.0.1:8080"]);
    bed.unset("a");
    assert_eq!(bed.sync(), ["shop/a:http/TCP IPv4"]);
    assert_eq!(bed.state.ports().count(), 0);
}

#[test]
fn a_change_of_one_service_names_no_port_of_another() {
    let mut bed = Bed::new();
    for name in ["a", "b", "c"] {
        bed.set(service(name, 1, |_| {}));
        bed.slice(slice(name, &[(1, READY, "there")]));
    }
    assert_eq!(bed.sync().len(), 3);
    bed.slice(slice("b", &[(1, READY, "there"), (2, READY, "here")]));
    assert_eq!(bed.sync(), ["shop/b:http/TCP IPv4"]);
    // One that is not ready and does not serve is nothing to a provider.
    bed.slice(slice(
        "b",
        &[(1, READY, "there"), (2, READY, "here"), (3, ILL, "here")],
    ));
    assert!(bed.sync().is_empty());
    assert!(bed.sync().is_empty());
}

#[test]
fn the_policy_local_drops_from_outside_where_endpoints_are_elsewhere_and_serves_the_inside() {
    let mut bed = Bed::new();
    let local = |common: &mut crate::spec::Common| common.external_policy = TrafficPolicy::Local;
    bed.set(at_node_port(service("a", 1, local), 30_000));
    bed.slice(slice("a", &[(1, READY, "there")]));
    bed.sync();
    let expected = [
        (FrontendKind::ClusterIp, Target::Cluster, Target::Cluster),
        (FrontendKind::NodePort, Target::Cluster, Target::Drop),
    ];
    assert_eq!(targets(bed.port("a")), expected);
    let counts = bed.state.no_local_endpoints();
    assert_eq!((counts.internal, counts.external), (0, 1));
    bed.slice(slice("a", &[(1, READY, "there"), (2, ENDING, "here")]));
    bed.sync();
    assert_eq!(targets(bed.port("a"))[1].2, Target::Local);
    assert_eq!(ends(&bed.port("a").cluster), ["10.1.0.1:8080"]);
    assert_eq!(ends(&bed.port("a").local), ["10.1.0.2:8080"]);
    assert_eq!(bed.state.no_local_endpoints(), NoLocalEndpoints::default());
    bed.slice(slice("a", &[]));
    bed.sync();
    let reject = |kind| (kind, Target::Reject, Target::Reject);
    let kinds = [FrontendKind::ClusterIp, FrontendKind::NodePort];
    assert_eq!(targets(bed.port("a")), kinds.map(reject));
}

#[test]
fn the_internal_policy_local_is_for_the_cluster_ip_alone() {
    let mut bed = Bed::new();
    let local = |common: &mut crate::spec::Common| common.internal_policy = TrafficPolicy::Local;
    bed.set(at_node_port(service("a", 1, local), 30_000));
    bed.slice(slice("a", &[(1, READY, "there")]));
    bed.sync();
    let expected = [
        (FrontendKind::ClusterIp, Target::Drop, Target::Drop),
        (FrontendKind::NodePort, Target::Cluster, Target::Cluster),
    ];
    assert_eq!(targets(bed.port("a")), expected);
    assert_eq!(bed.state.no_local_endpoints().internal, 1);
}

#[test]
fn endpoints_that_serve_without_being_chosen_keep_their_flows() {
    let mut bed = Bed::new();
    bed.set(service("a", 1, |_| {}));
    bed.slice(slice(
        "a",
        &[(1, READY, "there"), (2, ENDING, "there"), (3, ILL, "there")],
    ));
    bed.sync();
    assert_eq!(ends(&bed.port("a").cluster), ["10.1.0.1:8080"]);
    assert_eq!(bed.port("a").lingering, ["10.1.0.2:8080".parse().unwrap()]);
}

#[test]
fn the_older_service_has_a_node_port_and_the_younger_gets_it_when_that_goes() {
    let mut bed = Bed::new();
    bed.set(at_node_port(service("a", 20, |_| {}), 30_000));
    bed.sync();
    assert_eq!(bed.port("a").frontends.len(), 2);
    // An older one is seen later.
    bed.set(at_node_port(service("b", 10, |_| {}), 30_000));
    assert_eq!(bed.sync(), ["shop/a:http/TCP IPv4", "shop/b:http/TCP IPv4"]);
    assert_eq!(bed.port("a").frontends.len(), 1);
    assert_eq!(bed.port("b").frontends.len(), 2);
    let conflicts: Vec<_> = bed.state.conflicts().map(ToString::to_string).collect();
    assert_eq!(
        conflicts,
        [
            "service shop/a: spec.ports.nodePort of shop/a:http/TCP IPv4 belongs to shop/b:http/TCP, \
             which comes first: it is not served at node port 30000/TCP"
        ]
    );
    // A third one changes nothing for them, and a change of who is first changes what the last is told.
    bed.set(at_node_port(service("c", 30, |_| {}), 30_000));
    assert_eq!(bed.sync(), ["shop/c:http/TCP IPv4"]);
    bed.unset("b");
    assert_eq!(bed.sync(), ["shop/a:http/TCP IPv4", "shop/b:http/TCP IPv4"]);
    assert_eq!(bed.port("a").frontends.len(), 2);
    let owners: Vec<_> = bed.state.conflicts().map(|one| one.owner.clone()).collect();
    assert_eq!(owners, [Owner::Port(key("a").name)]);
    // Of the same age, the name decides.
    bed.set(at_node_port(service("c", 20, |_| {}), 30_000));
    assert!(bed.sync().is_empty());
}

#[test]
fn no_service_takes_an_address_that_the_node_uses_and_it_is_served_when_that_is_free() {
    let mut bed = Bed::new();
    let victim = service("a", 10, |_| {});
    let address = victim.common.cluster_ips[0];
    bed.set(victim);
    bed.set(service("b", 20, |common| common.external_ips.push(address)));
    bed.sync();
    let reserve = |bed: &mut Bed, reserved: ReservedAddresses| {
        let changed = bed.state.set_reserved(&Arc::new(reserved));
        assert_eq!(bed.state, bed.state.recomputed());
        changed.len()
    };
    let told = |bed: &Bed| -> Vec<_> { bed.state.conflicts().map(ToString::to_string).collect() };
    let before = told(&bed);
    let client = ReservedFor::Endpoint("h-client".into());
    for (used, words) in [
        (ReservedFor::Gateway, "the gateway of this node's endpoints"),
        (client, "the address of the endpoint h-client of this node"),
    ] {
        reserve(&mut bed, [(address, used)].into());
        let conflict = |service: &str, field: &str| {
            format!(
                "service shop/{service}: {field} of shop/{service}:http/TCP IPv4 is {words}: \
                 it is not served at {address}:80/TCP"
            )
        };
        assert_eq!(
            told(&bed),
            [
                conflict("a", "spec.clusterIPs"),
                conflict("b", "spec.externalIPs")
            ]
        );
        // The other service keeps its own address.
        let counts = ["a", "b"].map(|name| bed.port(name).frontends.len());
        assert_eq!(counts, [0, 1]);
        let listen = Listen::Address((address, 80).into());
        let owner = bed.state.owner(Family::V4, Protocol::TCP, listen);
        assert_eq!(owner, None);
    }
    // One that nobody claims changes no port, and one that is free again does.
    let other = "10.96.99.99".parse().unwrap();
    assert_eq!(reserve(&mut bed, [(other, ReservedFor::Gateway)].into()), 1);
    assert_eq!(told(&bed), before);
    assert_eq!(bed.port("a").frontends.len(), 1);
    assert_eq!(reserve(&mut bed, ReservedAddresses::new()), 0);
}

#[test]
fn nobody_takes_a_cluster_ip_by_writing_it_down() {
    let mut bed = Bed::new();
    let victim = service("v", 20, |_| {});
    let address = victim.common.cluster_ips[0];
    bed.set(service("a", 10, |common| common.external_ips.push(address)));
    bed.sync();
    assert_eq!(bed.port("a").frontends.len(), 2);
    bed.set(victim);
    bed.sync();
    assert_eq!(bed.port("a").frontends.len(), 1);
    assert_eq!(bed.port("v").frontends.len(), 1);
    assert_eq!(
        bed.state.conflicts().next().unwrap().kind,
        FrontendKind::ExternalIp
    );
}

#[test]
fn source_ranges_are_for_load_balancers_alone_and_one_that_cannot_be_read_opens_nothing() {
    let mut bed = Bed::new();
    let ranges = |networks: &[&str], has_error| SourceRanges {
        networks: networks.iter().map(|text| text.parse().unwrap()).collect(),
        has_error,
    };
    for (ranges, expected) in [
        (ranges(&["10.0.0.0/8", "fd00::/8"], false), Some(1)),
        (ranges(&["fd00::/8"], false), None),
        (ranges(&["fd00::/8"], true), Some(0)),
        (ranges(&[], false), None),
    ] {
        bed.set(at_node_port(
            service("a", 1, |common| {
                common.load_balancer_ips.push([192, 0, 2, 1].into());
                common.external_ips.push([192, 0, 2, 2].into());
                common.source_ranges = ranges;
            }),
            30_000,
        ));
        bed.sync();
        let restricted: Vec<_> = bed
            .port("a")
            .frontends
            .iter()
            .map(|frontend| frontend.source_ranges.as_ref().map(|ranges| ranges.len()))
            .collect();
        assert_eq!(restricted, [None, expected, None, None]);
    }
}

#[test]
fn a_node_that_moves_to_another_zone_prefers_other_endpoints() {
    let mut bed = Bed::new();
    bed.set(service("a", 1, |_| {}));
    let mut hinted = slice("a", &[(1, READY, "there"), (2, READY, "there")]);
    for (endpoint, zone) in hinted.endpoints.iter_mut().zip(["z1", "z2"]) {
        endpoint.hints = Some(std::sync::Arc::new(crate::spec::Hints {
            nodes: Vec::new(),
            zones: vec![zone.into()],
        }));
    }
    bed.slice(hinted);
    bed.sync();
    assert_eq!(ends(&bed.port("a").cluster), ["10.1.0.1:8080"]);
    assert!(bed.state.set_topology(topology("z1")).is_empty());
    assert_eq!(bed.state.set_topology(topology("z2")).len(), 1);
    assert_eq!(ends(&bed.port("a").cluster), ["10.1.0.2:8080"]);
    bed.state.set_topology(topology("z3"));
    assert_eq!(bed.port("a").cluster.len(), 2);
}

#[test]
fn health_checks_count_the_addresses_of_local_ready_endpoints() {
    let mut bed = Bed::new();
    bed.set(service("a", 1, |common| {
        common.health_check_node_port = Some(31_000)
    }));
    bed.set(service("b", 1, |_| {}));
    bed.slice(slice(
        "a",
        &[(1, READY, "here"), (2, READY, "there"), (3, ENDING, "here")],
    ));
    let mut second = slice("a", &[(1, READY, "here")]);
    second.name.name = "a-2".into();
    second.ports[0].port = 9090;
    bed.slice(second);
    bed.sync();
    let checks = bed.state.health_checks(Family::V4);
    let expected = HealthCheck {
        port: 31_000,
        local_endpoints: 1,
    };
    assert_eq!(
        *checks,
        [(ServiceName::new("shop", "a"), expected)]
            .into_iter()
            .collect()
    );
    // A load balancer that checks by the family that the service lacks hears the same.
    assert_eq!(checks, bed.state.health_checks(Family::V6));
    // A service of both counts each by itself.
    bed.set(service("a", 1, |common| {
        common.health_check_node_port = Some(31_000);
        common.cluster_ips.push("fd00:96::1".parse().unwrap());
    }));
    bed.sync();
    let counts = Family::ALL.map(|family| {
        let check = bed
            .state
            .health_checks(family)
            .get(&ServiceName::new("shop", "a"));
        check.map(|check| check.local_endpoints)
    });
    assert_eq!(counts, [Some(1), Some(0)]);
    bed.unset("a");
    bed.sync();
    for family in Family::ALL {
        assert!(bed.state.health_checks(family).is_empty());
    }
}
