//! The services of all sides: how many there are, their addresses, and their endpoints.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;

use serde_json::{Value, json};

use crate::served::{Manifests, ServiceManifest, ServicePort, SliceEndpoint};

/// Port of a service.
pub(super) const PORT: u16 = 80;
/// Additional port of the first service, whose endpoints echo.
pub(super) const ECHO_PORT: u16 = 81;
/// NodePort of the first service, and NodePort of its echo port.
pub(super) const NODE_PORT: u16 = 30_080;
pub(super) const ECHO_NODE_PORT: u16 = 30_081;
/// Ports on which endpoints accept connections and datagrams, and port on which they echo.
pub(super) const BACKEND_PORT: u16 = 8080;
pub(super) const BACKEND_ECHO_PORT: u16 = 8081;
/// Number of endpoints on each side.
pub(super) const BACKENDS: usize = 5;
/// Number of services that have all endpoints. The other services have one each. By default, the agent's maps have
/// space for 65,535 backends.
const FULL_SERVICES: u32 = 3_000;
/// Number of ports that the first service has in addition to those of the other services.
const MORE_PORTS: u32 = 2;
const FIRST_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Prefixes of the addresses of services and endpoints.
pub(super) const CLUSTER_IPS: &str = "10.96.0.0/16";
pub(super) const POD_CIDRS: &str = "10.244.0.0/15";
/// Number of services per manifest file.
const FILE: usize = 1_000;

/// The ports of service `number`.
pub(super) fn ports(number: u32) -> Vec<ServicePort> {
    let port = ServicePort {
        name: "http",
        protocol: "TCP",
        port: PORT,
        target: BACKEND_PORT,
        node_port: None,
    };
    if number > 0 {
        return vec![port];
    }
    vec![
        ServicePort {
            node_port: Some(NODE_PORT),
            ..port.clone()
        },
        ServicePort {
            name: "datagrams",
            protocol: "UDP",
            node_port: Some(NODE_PORT),
            ..port.clone()
        },
        ServicePort {
            name: "echo",
            port: ECHO_PORT,
            target: BACKEND_ECHO_PORT,
            node_port: Some(ECHO_NODE_PORT),
            ..port
        },
    ]
}

/// A number of services in words.
pub(super) fn counted(services: u32) -> String {
    match services {
        1 => "1 service".to_owned(),
        more => format!("{more} services"),
    }
}

/// Total number of ClusterIP ports that `services` services have.
pub(super) fn cluster_ip_ports(services: u32) -> usize {
    (services + MORE_PORTS) as usize
}

/// The ClusterIP of service `number`.
pub(super) fn cluster_ip(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(FIRST_IP.to_bits() + number)
}

/// Indexes of the endpoints of service `number`.
pub(super) fn endpoints(number: u32) -> Range<usize> {
    if number < FULL_SERVICES {
        return 0..BACKENDS;
    }
    let first = number as usize % BACKENDS;
    first..first + 1
}

/// Total number of endpoints over all ports of this many services.
pub(super) fn endpoint_count(services: u32) -> usize {
    let counts = (0..services).map(|number| ports(number).len() * endpoints(number).len());
    counts.sum()
}

/// Service `number` in the format that an agent reads.
pub(super) fn manifest(number: u32, backends: &[Ipv4Addr], node: &str) -> ServiceManifest {
    let endpoints = backends.iter().map(|ip| {
        let addresses = vec![IpAddr::from(*ip)];
        SliceEndpoint::new(addresses, node)
    });
    ServiceManifest {
        name: format!("service-{number}"),
        cluster_ips: vec![cluster_ip(number).into()],
        ports: ports(number),
        spec: json!({}),
        annotations: json!({}),
        load_balancer: Vec::new(),
        endpoints: endpoints.collect(),
    }
}

/// Writes the services with these numbers into an agent's folder, many per file.
pub(super) fn write(
    manifests: &Manifests,
    numbers: Range<u32>,
    backends: &[Ipv4Addr],
    node: &str,
) -> anyhow::Result<()> {
    let numbers: Vec<u32> = numbers.collect();
    for some in numbers.chunks(FILE) {
        let mut items = Vec::new();
        for number in some {
            let backends = &backends[endpoints(*number)];
            let mut list = manifest(*number, backends, node).json();
            if let Some(Value::Array(own)) = list.get_mut("items").map(Value::take) {
                items.extend(own);
            }
        }
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        let first = some.first().copied().unwrap_or_default();
        manifests.write_file(&format!("services-{first}"), &list.to_string())?;
    }
    Ok(())
}
