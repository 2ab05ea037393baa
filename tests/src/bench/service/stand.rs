//! A node with the agent, one with kube-proxy's rules and one with nothing, each with a client and endpoints, and a host
//! outside.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use aya::maps::{HashMap, Map, MapData, MapError};
use health_common::ct::Tuple4;
use health_common::service::ServiceFlow4;
use health_datapath::dump::Pinned;
use health_datapath::layout;
use health_model::settings::Location;
use health_net::netns::NetNs;

use super::cluster::{self, BACKENDS, cluster_ip_ports};
use super::ruleset::{self, Text};
use super::server::Server;
use super::traffic::Targets;
use crate::bed::{BPFFS, add_host, sysctl};
use crate::process::run_with_input;
use crate::served::Manifests;
use crate::{Bed, Member, Node, PATIENCE, wait_for};

/// Clients run on this processor, and so does who sends back what they send.
pub(super) const CPU: usize = 1;
/// Services that `nft` gets at a time: of more, the kernel takes ever longer for each.
const BATCH: usize = 500;
/// Longest time that the agent may take for all services.
const LOAD_PATIENCE: Duration = Duration::from_secs(300);

/// A node's client and endpoints.
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
    pub(super) outside: NetNs,
    manifests: Manifests,
    _members: Vec<Member>,
    /// Services that there are.
    services: u32,
    bed: Bed,
}

impl Stand {
    pub(super) fn start() -> anyhow::Result<Self> {
        let manifests = Manifests::new()?;
        let bed = Bed::builder().nodes(4).without_agents();
        let bed = bed.agent_args(&manifests.agent_args());
        let bed = bed.start()?;
        let node = bed.node(1);
        node.start_agent()?;
        wait_for("the agent to make endpoints", PATIENCE, || {
            Ok(node
                .cli("endpoint list -o json")?
                .success()?
                .contains("ready")
                .then_some(()))
        })?;
        let mut members = vec![Member::on(node, "bench-client", "")?];
        for number in 0..BACKENDS {
            members.push(Member::on(node, &format!("bench-web-{number}"), "")?);
        }
        let ours = Place::of(&members, node)?;
        let nftables = Place::without_agent(bed.node(2))?;
        let bare = Place::without_agent(bed.node(3))?;
        let outside = NetNs::open(bed.node(4).name())?;
        let stand = Self {
            ours,
            nftables,
            bare,
            outside,
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
        self.bed.node(1)
    }

    /// Has so many services on both sides, which are no fewer than before. Returns how long the agent and `nft` took.
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
        self.services = services;
        Ok([ours, start.elapsed()])
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

    /// Has `nft` do what is in this text.
    pub(super) fn nft(&self, text: &str) -> anyhow::Result<()> {
        let mut nft = self.bed.node(2).command("nft");
        run_with_input(nft.args(["-f", "-"]), text)?.success()?;
        Ok(())
    }

    /// Has both sides forget all flows, so that neither has to make room for those of a round.
    pub(super) fn forget(&self) -> anyhow::Result<()> {
        self.bed.node(2).exec("conntrack -F")?;
        pinned(self.node())?.flush_conntrack(|_, _| true)?;
        for layout in [layout::REVNAT4, layout::REVNAT_ANY4] {
            let map = MapData::from_pin(self.node().pins().join(layout.name))?;
            let map = Map::from_map_data(map)?;
            let mut flows: HashMap<MapData, Tuple4, ServiceFlow4> = map.try_into()?;
            let known: Vec<Tuple4> = flows.keys().collect::<Result<_, _>>()?;
            for flow in known {
                match flows.remove(&flow) {
                    // The agent may have collected it.
                    Ok(()) | Err(MapError::KeyNotFound) => {}
                    Err(MapError::SyscallError(error))
                        if error.io_error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(error).context("cannot forget a flow"),
                }
            }
        }
        Ok(())
    }
}

impl Place {
    /// Of endpoints of the agent on a node, the client first.
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
            servers.push(Server::start(&member.netns, CPU)?);
        }
        Ok(Self {
            client: NetNs::open(&client.name)?,
            backends: addresses,
            node: node.ipv4(),
            servers,
        })
    }

    /// Of namespaces behind a node without agent.
    fn without_agent(node: &Node) -> anyhow::Result<Self> {
        let index = node.ipv4().octets()[3];
        sysctl(node.name(), "net.ipv4.ip_forward=1")?;
        let mut addresses = Vec::new();
        let mut servers = Vec::new();
        let mut client = None;
        for number in 0..=BACKENDS as u8 {
            // Named like a node, so that the bed removes it with them.
            let name = format!("hnode{}", index * 10 + 200 + number - 20);
            let net = index * 16 + number;
            let address = Ipv4Addr::new(10, 245, net, 2);
            add_host(
                &name,
                (node.name(), &format!("pod{number}")),
                [
                    &format!("10.245.{net}.1/30"),
                    &format!("fd00:245:{net}::1/64"),
                ],
                [&format!("{address}/30"), &format!("fd00:245:{net}::2/64")],
            )?;
            let netns = NetNs::open(&name)?;
            if number == 0 {
                client = Some(netns);
            } else {
                addresses.push(address);
                servers.push(Server::start(&netns, CPU)?);
            }
        }
        Ok(Self {
            client: client.context("no client")?,
            backends: addresses,
            node: node.ipv4(),
            servers,
        })
    }

    /// The ClusterIPs of so many services, reached in no order.
    pub(super) fn cluster_ips(services: u32) -> Targets {
        // A prime that divides no number of services makes it a permutation.
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

    /// The endpoints themselves.
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

    /// The first service at the node's address.
    pub(super) fn node_ports(&self) -> Targets {
        Targets {
            connect: vec![(self.node, cluster::NODE_PORT).into()],
            datagrams: (self.node, cluster::NODE_PORT).into(),
            echo: (self.node, cluster::ECHO_NODE_PORT).into(),
        }
    }
}

/// The maps of a node's agent.
pub(super) fn pinned(node: &Node) -> anyhow::Result<Pinned> {
    let location = Location {
        instance: node.name().to_owned(),
        runtime_dir: node.runtime_dir(),
        state_dir: node.runtime_dir(),
        bpf_root: PathBuf::from(BPFFS),
    };
    Ok(Pinned::open(&location)?)
}
