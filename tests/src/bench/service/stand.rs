//! The nodes to compare: one with the agent, one with kube-proxy's rules, a bare one and one that only redirects, each
//! with a client and endpoints; and an outside host.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use aya::maps::{HashMap, Map, MapData, MapError};
use health_common::ct::Tuple4;
use health_common::service::ServiceFlow4;
use health_datapath::dump::Pinned;
use health_datapath::layout;
use health_model::settings::{HostRouting, Location};
use health_net::netns::NetNs;

use super::cluster::{self, BACKENDS, cluster_ip_ports};
use super::floor::Floor;
use super::ipvs::{self, Ipvs};
use super::ruleset::{self, Text};
use super::server::Server;
use super::traffic::Targets;
use crate::bed::{BPFFS, add_host, sysctl};
use crate::process::{print_line, run_with_input};
use crate::served::Manifests;
use crate::{Bed, Member, Node, PATIENCE, wait_for};

/// Indexes of the bed's nodes by role.
const AGENT: usize = 1;
const NFTABLES: usize = 2;
const BARE: usize = 3;
const OUTSIDE: usize = 4;
const FLOOR: usize = 5;
const IPVS: [usize; 2] = [6, 7];
/// Names of the sides that serve with IPVS.
pub(super) const AGENT_BY_IPVS: &str = "the agent by IPVS";
pub(super) const KUBE_PROXY_BY_IPVS: &str = "kube-proxy's IPVS";
/// Number of services per `nft` call. With more, the kernel takes longer per service.
const BATCH: usize = 500;
/// How long to wait for the agent to load all services.
pub(super) const LOAD_PATIENCE: Duration = Duration::from_secs(300);

/// The client and the endpoints of a node.
pub(super) struct Place {
    pub(super) client: NetNs,
    pub(super) backends: Vec<Ipv4Addr>,
    pub(super) node: Ipv4Addr,
    pub(super) servers: Vec<Server>,
}

pub(super) struct Stand {
    pub(super) ours: Place,
    pub(super) nftables: Place,
    pub(super) bare: Place,
    pub(super) floor: Floor,
    pub(super) outside: NetNs,
    /// Present if the kernel has IPVS.
    pub(super) ipvs: Option<Ipvs>,
    manifests: Manifests,
    _members: Vec<Member>,
    /// The current number of services.
    services: u32,
    bed: Bed,
}

impl Stand {
    /// Starts all nodes. The agent uses this mode of host routing.
    pub(super) fn start(routing: HostRouting) -> anyhow::Result<Self> {
        let manifests = Manifests::new()?;
        let has_ipvs = ipvs::is_there()?;
        if !has_ipvs {
            print_line("  this kernel has no IPVS");
        }
        let nodes = if has_ipvs { IPVS[1] } else { FLOOR };
        let bed = Bed::builder().nodes(nodes as u8).without_agents().start()?;
        let node = bed.node(AGENT);
        let (ours, members) = start_agent(
            node,
            &format!("{} --host-routing {routing}", manifests.agent_args()),
            "ebpf",
        )?;
        let nftables = Place::without_agent(bed.node(NFTABLES))?;
        let bare = Place::without_agent(bed.node(BARE))?;
        let floor = Floor::start(bed.node(FLOOR), node)?;
        let outside = NetNs::open(bed.node(OUTSIDE).name())?;
        let ipvs = has_ipvs.then(|| Ipvs::start(&bed, IPVS)).transpose()?;
        let stand = Self {
            ours,
            nftables,
            bare,
            floor,
            outside,
            ipvs,
            manifests,
            _members: members,
            services: 0,
            bed,
        };
        stand.nft(&ruleset::base(stand.nftables.node))?;
        Ok(stand)
    }

    /// The node with the agent.
    pub(super) fn node(&self) -> &Node {
        self.bed.node(AGENT)
    }

    /// The sides with which the agent is compared, by name.
    pub(super) fn others(&self) -> Vec<(&'static str, &Place)> {
        let mut others = vec![("nftables", &self.nftables)];
        if let Some(ipvs) = &self.ipvs {
            others.push((AGENT_BY_IPVS, &ipvs.agent));
            others.push((KUBE_PROXY_BY_IPVS, &ipvs.kube_proxy));
        }
        others
    }

    /// Increases the number of services on all sides to `services`. Returns how long the agent and `nft` took.
    pub(super) fn serve(&mut self, services: u32) -> anyhow::Result<[Duration; 2]> {
        let new = self.services..services;
        let start = Instant::now();
        cluster::write(
            &self.manifests,
            new.clone(),
            &self.ours.backends,
            self.node().name(),
        )?;
        self.wait_served(services)?;
        let ours = start.elapsed();
        let start = Instant::now();
        let new: Vec<u32> = new.collect();
        for some in new.chunks(BATCH) {
            let mut text = Text::default();
            for number in some {
                ruleset::add(&mut text, *number, &self.nftables.backends);
            }
            self.nft(&text.0)?;
        }
        let nft = start.elapsed();
        if let Some(ipvs) = &self.ipvs {
            ipvs.serve(&self.bed, self.services..services)?;
        }
        self.services = services;
        Ok([ours, nft])
    }

    fn wait_served(&self, services: u32) -> anyhow::Result<()> {
        let wanted = cluster_ip_ports(services);
        wait_for("the agent to serve", LOAD_PATIENCE, || {
            let frontends = pinned(self.node())?.frontend4_rows()?.collect()?;
            if frontends.len() < wanted {
                bail!("{} of {wanted} frontends", frontends.len());
            }
            Ok(Some(()))
        })
    }

    /// Feeds `text` to `nft`.
    pub(super) fn nft(&self, text: &str) -> anyhow::Result<()> {
        let mut nft = self.bed.node(NFTABLES).command("nft");
        run_with_input(nft.args(["-f", "-"]), text)?.success()?;
        Ok(())
    }

    /// Flushes all flows on all sides, so that a round evicts none.
    pub(super) fn forget(&self) -> anyhow::Result<()> {
        self.bed.node(NFTABLES).exec("conntrack -F")?;
        if let Some(ipvs) = &self.ipvs {
            ipvs.forget(&self.bed)?;
        }
        pinned(self.node())?.flush_conntrack(|_, _| true)?;
        for layout in [layout::REVNAT4, layout::REVNAT_ANY4] {
            let map = MapData::from_pin(self.node().pins().join(layout.name))?;
            let map = Map::from_map_data(map)?;
            let mut flows: HashMap<MapData, Tuple4, ServiceFlow4> = map.try_into()?;
            let known: Vec<Tuple4> = flows.keys().collect::<Result<_, _>>()?;
            for flow in known {
                match flows.remove(&flow) {
                    // The agent may have collected the entry already.
                    Ok(()) | Err(MapError::KeyNotFound) => {}
                    Err(MapError::SyscallError(error))
                        if error.io_error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(error).context("cannot delete a conntrack entry"),
                }
            }
        }
        Ok(())
    }
}

impl Place {
    /// Builds a place from endpoints of a node's agent. The first one is the client.
    fn of(members: &[Member], node: &Node) -> anyhow::Result<Self> {
        let [client, backends @ ..] = members else {
            bail!("no client");
        };
        let mut addresses = Vec::new();
        let mut servers = Vec::new();
        for member in backends {
            let IpAddr::V4(address) = member.ipv4()? else {
                bail!("{} has an address of another version", member.name);
            };
            addresses.push(address);
            servers.push(Server::start(&member.netns, cpu())?);
        }
        Ok(Self {
            client: NetNs::open(&client.name)?,
            backends: addresses,
            node: node.ipv4(),
            servers,
        })
    }

    /// Builds a place from namespaces behind a node without an agent.
    pub(super) fn without_agent(node: &Node) -> anyhow::Result<Self> {
        sysctl(node.name(), "net.ipv4.ip_forward=1")?;
        let pods = Pod::all_of(node);
        for pod in &pods {
            let [_, _, net, _] = pod.address.octets();
            add_host(
                &pod.namespace,
                (node.name(), &pod.device),
                [
                    &format!("10.245.{net}.1/30"),
                    &format!("fd00:245:{net}::1/64"),
                ],
                [
                    &format!("{}/30", pod.address),
                    &format!("fd00:245:{net}::2/64"),
                ],
            )?;
        }
        let [client, backends @ ..] = &pods[..] else {
            bail!("no client");
        };
        let servers = backends
            .iter()
            .map(|pod| Server::start(&NetNs::open(&pod.namespace)?, cpu()))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            client: NetNs::open(&client.namespace)?,
            backends: backends.iter().map(|pod| pod.address).collect(),
            node: node.ipv4(),
            servers,
        })
    }

    /// The ClusterIPs of this many services in a permuted order.
    pub(super) fn cluster_ips(services: u32) -> Targets {
        // A prime that does not divide the number of services, so that the result is a permutation.
        const STEP: u64 = 7_919;
        let numbers = (0..u64::from(services)).map(|n| n * STEP % u64::from(services));
        let connect =
            numbers.map(|number| (cluster::cluster_ip(number as u32), cluster::PORT).into());
        let first = cluster::cluster_ip(0);
        Targets {
            connect: connect.collect(),
            datagrams: (first, cluster::PORT).into(),
            echo: (first, cluster::ECHO_PORT).into(),
        }
    }

    /// Addresses the endpoints directly.
    pub(super) fn direct(&self) -> anyhow::Result<Targets> {
        let first = *self.backends.first().context("no endpoint")?;
        let connect = self.backends.iter();
        Ok(Targets {
            connect: connect
                .map(|ip| (*ip, cluster::BACKEND_PORT).into())
                .collect(),
            datagrams: (first, cluster::BACKEND_PORT).into(),
            echo: (first, cluster::BACKEND_ECHO_PORT).into(),
        })
    }

    /// Addresses the first service by its NodePorts at the node's address.
    pub(super) fn node_ports(&self) -> Targets {
        Targets {
            connect: vec![(self.node, cluster::NODE_PORT).into()],
            datagrams: (self.node, cluster::NODE_PORT).into(),
            echo: (self.node, cluster::ECHO_NODE_PORT).into(),
        }
    }
}

/// A namespace behind a node without an agent.
pub(super) struct Pod {
    pub(super) namespace: String,
    /// The node's end of the namespace's veth pair.
    pub(super) device: String,
    pub(super) address: Ipv4Addr,
}

impl Pod {
    /// The pods of a node: the client followed by the endpoints.
    pub(super) fn all_of(node: &Node) -> Vec<Self> {
        let index = node.ipv4().octets()[3];
        let numbers = 0..=BACKENDS as u8;
        let pods = numbers.map(|number| Self {
            // Named like a node's namespace, so that the bed removes it too.
            namespace: format!("hnode{}", index * 10 + 200 + number - 20),
            device: format!("pod{number}"),
            address: Ipv4Addr::new(10, 245, index * 16 + number, 2),
        });
        pods.collect()
    }
}

/// The CPU for clients and for echoing servers: the second one if the machine has several.
pub(super) fn cpu() -> usize {
    thread::available_parallelism().map_or(0, |count| (count.get() - 1).min(1))
}

/// Starts a node's agent with these flags, and creates a client and endpoints whose names have this prefix.
pub(super) fn start_agent(
    node: &Node,
    flags: &str,
    prefix: &str,
) -> anyhow::Result<(Place, Vec<Member>)> {
    node.start_agent_with(flags)?;
    wait_for("the agent to make endpoints", PATIENCE, || {
        Ok(node
            .cli("endpoint list -o json")?
            .success()?
            .contains("ready")
            .then_some(()))
    })?;
    let mut members = vec![Member::on(node, &format!("{prefix}-client"), "")?];
    for number in 0..BACKENDS {
        members.push(Member::on(node, &format!("{prefix}-web-{number}"), "")?);
    }
    Ok((Place::of(&members, node)?, members))
}

/// Opens the pinned maps of a node's agent.
pub(super) fn pinned(node: &Node) -> anyhow::Result<Pinned> {
    let location = Location {
        instance: node.name().to_owned(),
        runtime_dir: node.runtime_dir(),
        state_dir: node.runtime_dir(),
        bpf_root: PathBuf::from(BPFFS),
    };
    Ok(Pinned::open(&location)?)
}
