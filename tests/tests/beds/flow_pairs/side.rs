//! The side that translates: the agents of two nodes, or the kernel's own NAT on two other nodes, with the same pods,
//! servers and services.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;
use serde_json::json;
use tests::bed::{ROUTER, add_host, ip, sysctl};
use tests::outside::{FAR, FAR4, FAR6};
use tests::process::run_with_input;
use tests::served::{Manifests, PORT, ServiceManifest, SliceEndpoint};
use tests::{Bed, Member, Node, PATIENCE, wait_for};

use super::server::Server;
use super::table::{self, Client, Kind, Pair, State, Target, Way};
use super::{kernel, run};

/// Name of the server outside.
pub(super) const OUTSIDE: &str = "outside";
/// Lets sockets of all groups send echo requests.
const PING: &str = "net.ipv4.ping_group_range=0 2147483647";

/// Name of a backend.
pub(super) const fn name(target: Target) -> &'static str {
    match target {
        Target::Near => "near",
        Target::Far => "far",
    }
}

/// A service with one backend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Service {
    pub(super) target: Target,
    pub(super) way: Way,
    /// Distinguishes the service's addresses from those of others.
    number: u8,
}

impl Service {
    /// The services of both backends.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        Target::BOTH.into_iter().flat_map(|target| {
            [Way::Cluster, Way::Other, Way::Sticky, Way::DirectReturn]
                .into_iter()
                .map(move |way| Self::of(target, way))
        })
    }

    fn of(target: Target, way: Way) -> Self {
        let base = match target {
            Target::Near => 10,
            Target::Far => 20,
        };
        Self {
            target,
            way,
            number: base + way as u8,
        }
    }

    pub(super) fn node_port(self) -> u16 {
        30_000 + u16::from(self.number)
    }
}

/// Two nodes, with their clients and backends.
pub(super) struct Side {
    /// Network number in ClusterIPs and external addresses.
    net: u8,
    nodes: [Vec<IpAddr>; 2],
    namespaces: BTreeMap<Client, NetNs>,
    backends: [Vec<IpAddr>; 2],
    /// The manifests that the agents read.
    manifests: Option<Manifests>,
    _servers: Vec<Server>,
    _members: Vec<Member>,
}

impl Side {
    /// Uses the first two nodes of a bed, which run agents.
    pub(super) fn of_agents(bed: &Bed, manifests: Manifests) -> anyhow::Result<Self> {
        let [here, there] = [1, 2].map(|index| bed.node(index));
        for node in [here, there] {
            wait_for("the agent to make endpoints", PATIENCE, || {
                let listed = node.cli("endpoint list -o json")?.success()?;
                Ok(listed.contains("ready").then_some(()))
            })?;
        }
        let member = |node, name: &str| Member::on(node, name, "");
        let members = [
            member(here, "near")?,
            member(there, "far")?,
            member(here, "pod")?,
            member(here, "neighbour")?,
        ];
        let [near, far, ..] = members.each_ref().map(Member::addresses);
        let [near_name, _, pod, neighbour] = members.each_ref().map(|member| &*member.name);
        let names = [pod, neighbour, here.name(), FAR, near_name];
        let side = Self::new(0, [here, there], names, [near, far])?;
        Ok(Self {
            manifests: Some(manifests),
            _servers: servers([&members[0].netns, &members[1].netns])?,
            _members: members.into(),
            ..side
        })
    }

    /// Uses the third and fourth nodes of a bed, which have no agents.
    pub(super) fn of_kernel(bed: &Bed) -> anyhow::Result<Self> {
        let [here, there] = [3, 4].map(|index| bed.node(index));
        kernel::add_routes([here, there])?;
        let near = kernel::Pod::add(here, 0)?;
        let far = kernel::Pod::add(there, 0)?;
        let others = [kernel::Pod::add(here, 1)?, kernel::Pod::add(here, 2)?];
        let [pod, neighbour] = others.each_ref().map(|pod| &*pod.namespace);
        let names = [pod, neighbour, here.name(), FAR, &near.namespace];
        let side = Self::new(1, [here, there], names, [near.addresses(), far.addresses()])?;
        for node in [here, there] {
            let rules = kernel::rules(&side, node);
            run_with_input(node.command("nft").args(["-f", "-"]), &rules)?.success()?;
        }
        let namespaces = [&near, &far].map(|pod| NetNs::open(&pod.namespace));
        let [near, far] = namespaces;
        Ok(Self {
            _servers: servers([&near?, &far?])?,
            ..side
        })
    }

    fn new(
        net: u8,
        nodes: [&Node; 2],
        names: [&str; 5],
        backends: [Vec<IpAddr>; 2],
    ) -> anyhow::Result<Self> {
        let mut namespaces = BTreeMap::new();
        for (client, name) in Client::ALL.into_iter().zip(names) {
            namespaces.insert(client, NetNs::open(name)?);
            sysctl(name, PING)?;
        }
        let side = Self {
            net,
            nodes: nodes.map(Node::addresses),
            namespaces,
            backends,
            manifests: None,
            _servers: Vec::new(),
            _members: Vec::new(),
        };
        side.add_routes(nodes)?;
        Ok(side)
    }

    /// Adds the router's routes to the addresses that the nodes serve, and the nodes' routes to the router.
    fn add_routes(&self, nodes: [&Node; 2]) -> anyhow::Result<()> {
        let [first, _] = &self.nodes;
        for (is_v4, cidr) in [(true, 24), (false, 112)] {
            for ips in [self.cluster_ip(0, is_v4), self.external_ip(0, is_v4)] {
                let via = of_version(first, is_v4)?;
                ip(ROUTER, &format!("route add {ips}/{cidr} via {via}"))?;
            }
        }
        for (node, addresses) in nodes.into_iter().zip(&self.nodes) {
            for (cidr, via) in node.pod_cidrs().iter().zip(addresses) {
                ip(ROUTER, &format!("route add {cidr} via {via}"))?;
            }
        }
        Ok(())
    }

    /// Makes the agents serve the services, and waits until the affinity of each client is known.
    pub(super) fn serve(&self, bed: &Bed) -> anyhow::Result<()> {
        for service in Service::all() {
            self.write(service, &[service.target], bed)?;
        }
        self.wait_served()?;
        for target in Target::BOTH {
            let service = Service::of(target, Way::Sticky);
            self.write(service, &Target::BOTH, bed)?;
        }
        for index in [1, 2] {
            let node = bed.node(index);
            wait_for("both backends to be known", PATIENCE, || {
                let listed = node.cli("service list")?.success()?;
                let complete = listed.lines().filter(|line| line.contains("2/2")).count();
                // For TCP and UDP.
                Ok((complete >= 4).then_some(()))
            })?;
        }
        self.wait_served()
    }

    /// Waits until each client reaches each backend in each way.
    pub(super) fn wait_served(&self) -> anyhow::Result<()> {
        wait_for("all ways to be served", PATIENCE, || {
            let mut singles: Vec<Pair> = table::all();
            singles.retain(|pair| {
                pair.flows[0] == pair.flows[1]
                    && pair.state == State::ClosedByServer
                    && pair.kind == Kind::Tcp
            });
            // Datagrams have a separate affinity.
            let datagrams = singles.clone().into_iter().map(|pair| Pair {
                kind: Kind::Unconnected,
                state: State::Open,
                ..pair
            });
            singles.extend(datagrams.collect::<Vec<_>>());
            let failed = run::run(self, &singles, run::SOON)?;
            ensure!(failed.is_empty(), "{failed:#?}");
            Ok(Some(()))
        })
    }

    fn write(&self, service: Service, targets: &[Target], bed: &Bed) -> anyhow::Result<()> {
        let manifests = self.manifests.as_ref().context("no agents")?;
        let Service { way, number, .. } = service;
        let mut manifest = ServiceManifest::new(&format!("service-{number}"), number)
            .with_node_port(service.node_port());
        manifest.cluster_ips = self.both(|is_v4| self.cluster_ip(number, is_v4)).into();
        manifest.endpoints = targets
            .iter()
            .map(|target| {
                let node = bed.node(1 + *target as usize);
                SliceEndpoint::new(self.backends[*target as usize].clone(), node.name())
            })
            .collect();
        match way {
            Way::Cluster => {
                manifest.spec =
                    json!({ "externalIPs": self.both(|is_v4| self.external_ip(number, is_v4)) });
            }
            Way::Sticky => {
                let lasting = json!({ "clientIP": { "timeoutSeconds": 86_400 } });
                manifest.spec =
                    json!({ "sessionAffinity": "ClientIP", "sessionAffinityConfig": lasting });
            }
            Way::DirectReturn => {
                manifest.annotations = json!({ "service.health-agent.io/forwarding": "dsr" });
            }
            _ => {}
        }
        manifests.write(&manifest)
    }

    fn both(&self, ip: impl Fn(bool) -> IpAddr) -> [IpAddr; 2] {
        [ip(true), ip(false)]
    }

    fn cluster_ip(&self, number: u8, is_v4: bool) -> IpAddr {
        if is_v4 {
            Ipv4Addr::new(10, 96, self.net, number).into()
        } else {
            let [net, number] = [self.net, number].map(u16::from);
            Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, net, number).into()
        }
    }

    fn external_ip(&self, number: u8, is_v4: bool) -> IpAddr {
        if is_v4 {
            Ipv4Addr::new(198, 18, self.net, number).into()
        } else {
            let [net, number] = [self.net, number].map(u16::from);
            Ipv6Addr::new(0x2001, 0xdb8, 0x198, 0, 0, 0, net, number).into()
        }
    }

    /// A service's addresses in both IP versions that lead to its backend, with the port.
    pub(super) fn frontends(&self, service: Service, node: &Node) -> Vec<(SocketAddr, Frontend)> {
        let mut all = Vec::new();
        for is_v4 in [true, false] {
            let number = service.number;
            let cluster = SocketAddr::new(self.cluster_ip(number, is_v4), 80);
            all.push((cluster, Frontend::Cluster));
            let external = SocketAddr::new(self.external_ip(number, is_v4), 80);
            all.push((external, Frontend::Outward));
        }
        let own = node.addresses().into_iter();
        all.extend(own.map(|ip| (SocketAddr::new(ip, service.node_port()), Frontend::Outward)));
        all
    }

    pub(super) fn backend(&self, target: Target) -> &[IpAddr] {
        &self.backends[target as usize]
    }

    /// A client's namespace.
    pub(super) fn namespace(&self, client: Client) -> anyhow::Result<&NetNs> {
        self.namespaces.get(&client).context("no such client")
    }

    /// The destination of a pair's flow.
    pub(super) fn destination(&self, pair: &Pair, way: Way) -> anyhow::Result<SocketAddr> {
        let Pair { target, is_v4, .. } = *pair;
        let at_node = |node: usize, way| -> anyhow::Result<SocketAddr> {
            let ip = of_version(&self.nodes[node], is_v4)?;
            Ok((ip, Service::of(target, way).node_port()).into())
        };
        let number = Service::of(target, way).number;
        Ok(match way {
            Way::Direct => (of_version(self.backend(target), is_v4)?, PORT).into(),
            Way::Cluster | Way::Other | Way::Sticky => (self.cluster_ip(number, is_v4), 80).into(),
            Way::External => {
                let number = Service::of(target, Way::Cluster).number;
                (self.external_ip(number, is_v4), 80).into()
            }
            Way::NodePort => at_node(0, Way::Cluster)?,
            Way::OtherNode => at_node(1, Way::Cluster)?,
            Way::DirectReturn => at_node(0, Way::DirectReturn)?,
            Way::Outside if is_v4 => (FAR4, PORT).into(),
            Way::Outside => (FAR6, PORT).into(),
        })
    }
}

/// The kind of address at which a service is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frontend {
    Cluster,
    /// A NodePort or an external address.
    Outward,
}

/// Returns the address with this IP version.
fn of_version(addresses: &[IpAddr], is_v4: bool) -> anyhow::Result<IpAddr> {
    let mut addresses = addresses.iter();
    let found = addresses.find(|ip| ip.is_ipv4() == is_v4);
    found.copied().context("no address of this version")
}

/// Servers of both backends.
fn servers([near, far]: [&NetNs; 2]) -> anyhow::Result<Vec<Server>> {
    Ok(vec![
        Server::start(near, name(Target::Near))?,
        Server::start(far, name(Target::Far))?,
    ])
}

/// Adds the bed's router and the outside host with its server, and gives all nodes a route to that host.
pub(super) fn add_outside(bed: &Bed) -> anyhow::Result<Server> {
    tests::bed::add_router()?;
    add_host(
        FAR,
        (ROUTER, tests::outside::ROUTER_DEVICE),
        ["192.0.2.1/24", "2001:db8::1/64"],
        [&format!("{FAR4}/24"), &format!("{FAR6}/64")],
    )?;
    for node in bed.nodes() {
        for router in [tests::bed::ROUTER4, tests::bed::ROUTER6] {
            ip(node.name(), &format!("route add default via {router}"))?;
        }
        for setting in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
            sysctl(node.name(), setting)?;
        }
    }
    Server::start(&NetNs::open(FAR)?, OUTSIDE)
}
