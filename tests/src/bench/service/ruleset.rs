//! kube-proxy's nftables rules, as it writes them for IPv4 services of type ClusterIP and NodePort: maps from addresses
//! to one chain per service, which jumps to the chain of a random endpoint.

use std::fmt::{self, Write as _};
use std::net::Ipv4Addr;

use super::cluster::{CLUSTER_IPS, POD_CIDRS, cluster_ip, endpoints, ports};
use crate::served::ServicePort;

/// Family and name of the table.
const TABLE: &str = "ip kube-proxy";

/// The table without services, for a node with this address.
pub(super) fn base(node: Ipv4Addr) -> String {
    format!(
        "
add table {TABLE}
delete table {TABLE}
table {TABLE} {{
  set cluster-ips {{ type ipv4_addr; }}
  set nodeport-ips {{ type ipv4_addr; elements = {{ {node} }}; }}
  map no-endpoint-services {{ type ipv4_addr . inet_proto . inet_service : verdict; }}
  map no-endpoint-nodeports {{ type inet_proto . inet_service : verdict; }}
  map firewall-ips {{ type ipv4_addr . inet_proto . inet_service : verdict; }}
  map service-ips {{ type ipv4_addr . inet_proto . inet_service : verdict; }}
  map service-nodeports {{ type inet_proto . inet_service : verdict; }}
  chain mark-for-masquerade {{ mark set mark or 0x4000; }}
  chain masquerading {{
    mark and 0x4000 == 0 return
    mark set mark xor 0x4000
    masquerade fully-random
  }}
  chain reject-chain {{ reject; }}
  chain services {{
    ip daddr . meta l4proto . th dport vmap @service-ips
    ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
  }}
  chain firewall-check {{ ip daddr . meta l4proto . th dport vmap @firewall-ips; }}
  chain service-endpoints-check {{ ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }}
  chain nodeport-endpoints-check {{
    ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
  }}
  chain cluster-ips-check {{
    ip daddr @cluster-ips reject
    ip daddr {CLUSTER_IPS} drop
  }}
  chain filter-prerouting {{
    type filter hook prerouting priority -110
    ct state new jump firewall-check
  }}
  chain filter-input {{
    type filter hook input priority -110
    ct state new jump nodeport-endpoints-check
    ct state new jump service-endpoints-check
  }}
  chain filter-forward {{
    type filter hook forward priority -110
    ct state new jump service-endpoints-check
    ct state new jump cluster-ips-check
  }}
  chain filter-output {{
    type filter hook output priority -110
    ct state new jump service-endpoints-check
    ct state new jump firewall-check
  }}
  chain filter-output-post-dnat {{
    type filter hook output priority -90
    ct state new jump cluster-ips-check
  }}
  chain nat-prerouting {{
    type nat hook prerouting priority -100
    jump services
  }}
  chain nat-output {{
    type nat hook output priority -100
    jump services
  }}
  chain nat-postrouting {{
    type nat hook postrouting priority 100
    jump masquerading
  }}
}}
"
    )
}

/// Adds service `number`, whose endpoints are among `backends`.
pub(super) fn add(text: &mut Text, number: u32, backends: &[Ipv4Addr]) {
    let ip = cluster_ip(number);
    let backends = &backends[endpoints(number)];
    for port in ports(number) {
        let protocol = port.protocol.to_lowercase();
        for backend in backends {
            let (name, target) = (endpoint_chain(number, &port, *backend), port.target);
            text.chain(&name);
            text.rule(
                &name,
                &format!("ip saddr {backend} jump mark-for-masquerade"),
            );
            text.rule(
                &name,
                &format!("meta l4proto {protocol} dnat to {backend}:{target}"),
            );
        }
        let service = chain("service", number, &port);
        text.chain(&service);
        choose(text, number, &port, backends);
        text.element(
            "service-ips",
            &format!("{ip} . {protocol} . {} : goto {service}", port.port),
        );
        if let Some(node_port) = port.node_port {
            let external = chain("external", number, &port);
            text.chain(&external);
            text.rule(&external, "jump mark-for-masquerade");
            text.rule(&external, &format!("goto {service}"));
            text.element(
                "service-nodeports",
                &format!("{protocol} . {node_port} : goto {external}"),
            );
        }
    }
    text.element("cluster-ips", &ip.to_string());
}

/// Restricts the service to these endpoints, like kube-proxy does when the others become unready.
pub(super) fn change(text: &mut Text, number: u32, backends: &[Ipv4Addr]) {
    for port in ports(number) {
        text.flush(&chain("service", number, &port));
        choose(text, number, &port, backends);
    }
}

/// Writes the rules of a service's chain.
fn choose(text: &mut Text, number: u32, port: &ServicePort, backends: &[Ipv4Addr]) {
    let service = chain("service", number, port);
    let protocol = port.protocol.to_lowercase();
    let names: Vec<String> = backends
        .iter()
        .map(|backend| endpoint_chain(number, port, *backend))
        .collect();
    text.rule(
        &service,
        &format!(
            "ip daddr {} {protocol} dport {} ip saddr != {POD_CIDRS} jump mark-for-masquerade",
            cluster_ip(number),
            port.port
        ),
    );
    text.rule(&service, &choice(&names));
}

/// Chooses a random endpoint. A single endpoint is chosen without a random number: kube-proxy draws one even then, but
/// the kernel takes minutes to load 50,000 maps of this kind.
fn choice(chains: &[String]) -> String {
    if let [only] = chains {
        return format!("goto {only}");
    }
    let verdicts: Vec<String> = chains
        .iter()
        .enumerate()
        .map(|(number, chain)| format!("{number} : goto {chain}"))
        .collect();
    format!(
        "numgen random mod {} vmap {{ {} }}",
        chains.len(),
        verdicts.join(", ")
    )
}

fn chain(kind: &str, number: u32, port: &ServicePort) -> String {
    let lower = port.protocol.to_lowercase();
    format!(
        "{kind}-{number:08X}-default/service-{number}/{lower}/{}",
        port.name
    )
}

fn endpoint_chain(number: u32, port: &ServicePort, backend: Ipv4Addr) -> String {
    format!(
        "{}__{backend}/{}",
        chain("endpoint", number, port),
        port.target
    )
}

/// Commands for `nft`.
#[derive(Default)]
pub(super) struct Text(pub(super) String);

impl Text {
    fn chain(&mut self, name: &str) {
        self.line(format_args!("add chain {TABLE} {name}"));
    }

    fn flush(&mut self, chain: &str) {
        self.line(format_args!("flush chain {TABLE} {chain}"));
    }

    fn rule(&mut self, chain: &str, rule: &str) {
        self.line(format_args!("add rule {TABLE} {chain} {rule}"));
    }

    fn element(&mut self, set: &str, element: &str) {
        self.line(format_args!("add element {TABLE} {set} {{ {element} }}"));
    }

    fn line(&mut self, line: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{line}");
    }
}
