//! The states that result from services and endpoints, one aspect at a time.

use std::net::IpAddr;

use ipnet::IpNet;

use super::super::*;
use super::bed::*;
use crate::spec::{SourceRanges, TrafficPolicy};

fn ends(list: &[Backend]) -> Vec<String> {
    list.iter()
        .map(|backend| backend.address.to_string())
        .collect()
}

/// Returns kind, inside target and outside target of each frontend.
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
    // To a provider, an endpoint that is neither ready nor serving does not exist.
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
    // An older service appears later.
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
    // A third service changes nothing for the first two. When the first one changes, the third one's conflict changes.
    bed.set(at_node_port(service("c", 30, |_| {}), 30_000));
    assert_eq!(bed.sync(), ["shop/c:http/TCP IPv4"]);
    bed.unset("b");
    assert_eq!(bed.sync(), ["shop/a:http/TCP IPv4", "shop/b:http/TCP IPv4"]);
    assert_eq!(bed.port("a").frontends.len(), 2);
    let owners: Vec<_> = bed.state.conflicts().map(|one| one.owner.clone()).collect();
    assert_eq!(owners, [Owner::Port(key("a").name)]);
    // If two services are equally old, the name decides.
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
    let reserve = |bed: &mut Bed, addresses: BTreeMap<IpAddr, ReservedFor>| {
        let changed = bed.state.set_reserved(&Arc::new(Reserved {
            addresses,
            ..Reserved::default()
        }));
        assert_eq!(bed.state, bed.state.recomputed());
        changed.len()
    };
    let reported =
        |bed: &Bed| -> Vec<_> { bed.state.conflicts().map(ToString::to_string).collect() };
    let before = reported(&bed);
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
            reported(&bed),
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
    // An address that no service claims affects no port; one that becomes free does.
    let other = "10.96.99.99".parse().unwrap();
    assert_eq!(reserve(&mut bed, [(other, ReservedFor::Gateway)].into()), 1);
    assert_eq!(reported(&bed), before);
    assert_eq!(bed.port("a").frontends.len(), 1);
    assert_eq!(reserve(&mut bed, BTreeMap::new()), 0);
}

/// A node `west/here` at 172.30.0.1, with a peer `west/there` at 172.30.0.2, and an API server at 198.51.100.1.
fn surroundings(external_ips: ExternalIps) -> Arc<Reserved> {
    let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
    let cidr = |text: &str, node: &str| {
        let cidr: IpNet = text.parse().unwrap();
        (cidr.network(), (cidr, node.to_owned()))
    };
    Arc::new(Reserved {
        sources: [(
            SocketAddr::new(ip("198.51.100.1"), 6443),
            "the API server https://198.51.100.1:6443".to_owned(),
        )]
        .into(),
        pod_cidrs: [
            cidr("10.244.1.0/24", "west/here"),
            cidr("10.244.2.0/24", "west/there"),
            cidr("fd00:10:244:2::/64", "west/there"),
        ]
        .into(),
        node: "west/here".to_owned(),
        own: [ip("172.30.0.1"), ip("172.30.0.9")].into(),
        registered: [ip("172.30.0.1")].into(),
        node_ports: [ip("172.30.0.1")].into(),
        ports: [
            (4240, "--health-port"),
            (10_256, "--service-healthz-address"),
        ]
        .map(|(port, flag)| ((Protocol::TCP, port), flag.to_owned()))
        .into(),
        peers: [(
            ip("172.30.0.2"),
            Peer {
                name: "west/there".to_owned(),
                port: 4240,
            },
        )]
        .into(),
        external_ips,
        ..Reserved::default()
    })
}

/// Returns who keeps a service from having this address, with port 80 or another one, as an address of this kind;
/// `None` if it is served there.
fn keeper(reserved: &Arc<Reserved>, kind: FrontendKind, address: &str) -> Option<String> {
    let address: SocketAddr = address.parse().unwrap();
    let mut bed = Bed::new();
    bed.state.set_reserved(reserved);
    let mut service = service("a", 10, |common| match kind {
        FrontendKind::ExternalIp => common.external_ips.push(address.ip()),
        FrontendKind::LoadBalancer => common.load_balancer_ips.push(address.ip()),
        FrontendKind::ClusterIp => common.cluster_ips = vec![address.ip()],
        FrontendKind::NodePort => {}
    });
    service.ports[0].port = address.port();
    if kind == FrontendKind::NodePort {
        service.ports[0].node_port = Some(address.port());
    }
    bed.set(service);
    bed.sync();
    assert_eq!(bed.state, bed.state.recomputed());
    let conflict = bed.state.conflicts().next()?;
    assert_eq!(conflict.kind, kind);
    assert!(bed.port("a").frontends.iter().all(|one| one.kind != kind));
    match &conflict.owner {
        Owner::Node(reserved) => Some(reserved.to_string()),
        Owner::Port(port) => panic!("{port}"),
    }
}

#[test]
fn services_leave_the_node_its_peers_and_its_sources_what_is_theirs() {
    use FrontendKind::{ClusterIp, ExternalIp, LoadBalancer, NodePort};
    let agent = "a port of this node's agent (--health-port)";
    let peer = "a port of the agent of the node west/there";
    let api = "the address of the API server https://198.51.100.1:6443";
    let here = "in the pod CIDR 10.244.1.0/24 of the node west/here";
    let there = "in the pod CIDR 10.244.2.0/24 of the node west/there";
    let own_node = "an address of the node west/here, which --service-external-ips refuses";
    let other_node = "an address of the node west/there, which --service-external-ips refuses";
    let by_default = surroundings(ExternalIps::NoNodes);
    for (kind, address, expected) in [
        (ExternalIp, "172.30.0.1:4240", Some(agent)),
        (LoadBalancer, "172.30.0.1:4240", Some(agent)),
        (NodePort, "172.30.0.1:4240", Some(agent)),
        (
            NodePort,
            "172.30.0.1:10256",
            Some("a port of this node's agent (--service-healthz-address)"),
        ),
        (ExternalIp, "172.30.0.2:4240", Some(peer)),
        (LoadBalancer, "172.30.0.2:4240", Some(peer)),
        (ExternalIp, "198.51.100.1:6443", Some(api)),
        (LoadBalancer, "198.51.100.1:6443", Some(api)),
        // Other ports at the server's address do not concern the agent, as the server may be a node.
        (LoadBalancer, "198.51.100.1:443", None),
        // A virtual address, which may move to another node at any time.
        (ExternalIp, "172.30.0.9:443", None),
        (ExternalIp, "172.30.0.9:4240", Some(agent)),
        (ExternalIp, "10.244.1.77:80", Some(here)),
        (ExternalIp, "10.244.2.77:80", Some(there)),
        (LoadBalancer, "10.244.2.0:80", Some(there)),
        (LoadBalancer, "10.244.2.255:80", Some(there)),
        (ExternalIp, "172.30.0.1:22", Some(own_node)),
        (ExternalIp, "172.30.0.2:22", Some(other_node)),
        // A load balancer may have the addresses of nodes, and the cluster assigns ClusterIPs.
        (LoadBalancer, "172.30.0.1:80", None),
        (LoadBalancer, "172.30.0.2:80", None),
        (ClusterIp, "198.51.100.1:443", None),
        (ExternalIp, "10.244.3.1:80", None),
        (ExternalIp, "203.0.113.1:4240", None),
        (NodePort, "172.30.0.1:30080", None),
    ] {
        let found = keeper(&by_default, kind, address);
        assert_eq!(found.as_deref(), expected, "{kind:?} {address}");
    }
    let outside = "refused by --service-external-ips";
    let networks = vec![
        "203.0.113.0/24".parse().unwrap(),
        "172.30.0.1/32".parse().unwrap(),
    ];
    for (setting, address, expected) in [
        (ExternalIps::All, "172.30.0.1:22", None),
        (ExternalIps::All, "172.30.0.1:4240", Some(agent)),
        (ExternalIps::All, "198.51.100.1:6443", Some(api)),
        (
            ExternalIps::Within(Vec::new()),
            "203.0.113.1:80",
            Some(outside),
        ),
        (
            ExternalIps::Within(networks.clone()),
            "203.0.113.1:80",
            None,
        ),
        (ExternalIps::Within(networks.clone()), "172.30.0.1:22", None),
        (
            ExternalIps::Within(networks),
            "203.0.114.1:80",
            Some(outside),
        ),
    ] {
        let found = keeper(&surroundings(setting.clone()), ExternalIp, address);
        assert_eq!(found.as_deref(), expected, "{setting:?} {address}");
    }
}

#[test]
fn the_older_of_a_node_port_and_an_address_of_the_node_owns_the_place() {
    let node: IpAddr = [172, 30, 0, 1].into();
    let external = |created| {
        let mut service = service("e", created, |common| common.external_ips.push(node));
        service.ports[0].port = 30_080;
        service
    };
    let reported =
        |bed: &Bed| -> Vec<_> { bed.state.conflicts().map(ToString::to_string).collect() };
    let listen = Listen::Address((node, 30_080).into());
    for (created, loser, winner, field) in [
        (20, "e", "n", "spec.externalIPs"),
        (5, "n", "e", "spec.ports.nodePort"),
    ] {
        let conflict = format!(
            "service shop/{loser}: {field} of shop/{loser}:http/TCP IPv4 belongs to shop/{winner}:http/TCP, which comes \
             first: it is not served at 172.30.0.1:30080/TCP"
        );
        // In both orders, and after a change of the node.
        for is_external_first in [true, false] {
            let mut bed = Bed::new();
            bed.state.set_reserved(&surroundings(ExternalIps::All));
            let node_port = at_node_port(service("n", 10, |_| {}), 30_080);
            if is_external_first {
                bed.set(external(created));
                bed.sync();
                bed.set(node_port);
            } else {
                bed.set(node_port);
                bed.sync();
                bed.set(external(created));
            }
            bed.sync();
            assert_eq!(reported(&bed), [conflict.as_str()]);
            assert_eq!(bed.state, bed.state.recomputed());
            let owner = bed.state.owner(Family::V4, Protocol::TCP, listen);
            assert_eq!(owner.is_some(), winner == "e");
            bed.state.set_reserved(&Arc::default());
            assert_eq!(reported(&bed), [""; 0]);
            bed.state.set_reserved(&surroundings(ExternalIps::All));
            assert_eq!(reported(&bed), [conflict.as_str()]);
            // The winner's address is free once the winner is gone.
            bed.unset(winner);
            bed.sync();
            assert_eq!(reported(&bed), [""; 0]);
            assert_eq!(bed.state, bed.state.recomputed());
            assert_eq!(bed.port(loser).frontends.len(), 2);
        }
    }
}

#[test]
fn a_health_check_keeps_its_port_of_the_node() {
    let mut bed = Bed::new();
    bed.state.set_reserved(&surroundings(ExternalIps::All));
    bed.set(at_node_port(service("n", 1, |_| {}), 31_000));
    bed.sync();
    assert_eq!(bed.port("n").frontends.len(), 2);
    bed.set(service("c", 10, |common| {
        common.health_check_node_port = Some(31_000)
    }));
    assert_eq!(bed.sync(), ["shop/c:http/TCP IPv4", "shop/n:http/TCP IPv4"]);
    let reported: Vec<_> = bed.state.conflicts().map(ToString::to_string).collect();
    assert_eq!(
        reported,
        [
            "service shop/n: spec.ports.nodePort of shop/n:http/TCP IPv4 is the health-check node port of shop/c: \
             it is not served at node port 31000/TCP"
        ]
    );
    assert_eq!(bed.state, bed.state.recomputed());
    bed.unset("c");
    bed.sync();
    assert_eq!(bed.port("n").frontends.len(), 2);
    assert_eq!(bed.state, bed.state.recomputed());
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
    // A load balancer that checks through the family that the service lacks gets the same result.
    assert_eq!(checks, bed.state.health_checks(Family::V6));
    // A service with both families counts the endpoints of each separately.
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
