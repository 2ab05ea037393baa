//! Nodes that serve with IPVS, if the kernel has it: one with the agent in that mode, and one with kube-proxy's virtual
//! servers, sets and rules.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;

use anyhow::{Context as _, ensure};
use health_model::policy::Protocol;
use health_service::provider::ipvs::netlink::NetlinkError;
use health_service::provider::ipvs::netlink::server::{Client, ServerId, ServerKey};

use super::cluster::{self, POD_CIDRS, cluster_ip, endpoints, ports};
use super::stand::{LOAD_PATIENCE, Place, start_agent};
use crate::bed::sysctl;
use crate::process::run_with_input;
use crate::served::Manifests;
use crate::{Bed, Member, wait_for};

/// kube-proxy's device that owns the addresses of services.
const DEVICE: &str = "kube-ipvs0";
/// kube-proxy's IP sets, as far as needed for IPv4 ClusterIPs and NodePorts.
const SETS: &str = "\
create KUBE-CLUSTER-IP hash:ip,port maxelem 65536
create KUBE-LOOP-BACK hash:ip,port,ip maxelem 65536
create KUBE-IPVS-IPS hash:ip maxelem 65536
create KUBE-NODE-PORT-TCP bitmap:port range 0-65535
create KUBE-NODE-PORT-UDP bitmap:port range 0-65535
";
/// Sysctls that kube-proxy enables for IPVS.
const SYSCTLS: [&str; 3] = [
    "conntrack",
    "expire_nodest_conn",
    "expire_quiescent_template",
];

/// Whether this kernel has IPVS.
pub(super) fn is_there() -> anyhow::Result<bool> {
    match Client::open() {
        Ok(_) => Ok(true),
        Err(NetlinkError::Refused(refusal)) if refusal.code == libc::ENOENT => Ok(false),
        Err(error) => Err(error).context("cannot ask for IPVS"),
    }
}

/// Both nodes, with their services.
pub(super) struct Ipvs {
    pub(super) agent: Place,
    pub(super) kube_proxy: Place,
    /// Indexes of the agent's node and kube-proxy's node in the bed.
    nodes: [usize; 2],
    manifests: Manifests,
    _members: Vec<Member>,
}

impl Ipvs {
    /// Starts both sides on these two nodes.
    pub(super) fn start(bed: &Bed, nodes: [usize; 2]) -> anyhow::Result<Self> {
        let [with_agent, other] = nodes.map(|index| bed.node(index));
        let manifests = Manifests::new()?;
        let flags = format!("{} --service-proxy-mode ipvs", manifests.agent_args());
        let (agent, members) = start_agent(with_agent, &flags, "ipvs")?;
        let kube_proxy = Place::without_agent(other)?;
        let ipvs = Self {
            agent,
            kube_proxy,
            nodes,
            manifests,
            _members: members,
        };
        for name in SYSCTLS {
            sysctl(other.name(), &format!("net.ipv4.vs.{name}=1"))?;
        }
        other.exec(&format!("ip link add {DEVICE} type dummy"))?;
        ipvs.feed(bed, "ipset restore", SETS)?;
        ipvs.feed(bed, "iptables-restore", &rules())?;
        Ok(ipvs)
    }

    /// Adds the services with these numbers on both nodes.
    pub(super) fn serve(&self, bed: &Bed, new: Range<u32>) -> anyhow::Result<()> {
        let node = bed.node(self.nodes[0]);
        let backends = &self.agent.backends;
        cluster::write(&self.manifests, new.clone(), backends, node.name())?;
        self.serve_as_kube_proxy(bed, new.clone())?;
        let wanted: Vec<_> = new
            .flat_map(|number| keys(number, self.agent.node))
            .collect();
        wait_for("the agent to serve by IPVS", LOAD_PATIENCE, || {
            node.run_in(|| are_served(&wanted))?.map(Some)
        })
    }

    /// Flushes all netfilter flows on both nodes.
    pub(super) fn forget(&self, bed: &Bed) -> anyhow::Result<()> {
        for node in self.nodes {
            bed.node(node).exec("conntrack -F")?;
        }
        Ok(())
    }

    fn serve_as_kube_proxy(&self, bed: &Bed, new: Range<u32>) -> anyhow::Result<()> {
        let (mut servers, mut sets, mut addresses) = (String::new(), String::new(), String::new());
        for number in new {
            let ip = cluster_ip(number);
            let backends = &self.kube_proxy.backends[endpoints(number)];
            writeln!(addresses, "address add {ip}/32 dev {DEVICE}")?;
            writeln!(sets, "add KUBE-IPVS-IPS {ip}")?;
            for port in ports(number) {
                let protocol = port.protocol.to_lowercase();
                writeln!(sets, "add KUBE-CLUSTER-IP {ip},{protocol}:{}", port.port)?;
                let mut served = vec![(ip, port.port)];
                if let Some(node_port) = port.node_port {
                    served.push((self.kube_proxy.node, node_port));
                    writeln!(sets, "add KUBE-NODE-PORT-{} {node_port}", port.protocol)?;
                }
                let kind = &protocol[..1];
                for (ip, number) in served {
                    writeln!(servers, "-A -{kind} {ip}:{number} -s rr")?;
                    for backend in backends {
                        let target = port.target;
                        writeln!(
                            servers,
                            "-a -{kind} {ip}:{number} -r {backend}:{target} -m -w 1"
                        )?;
                    }
                }
                for backend in backends {
                    let target = port.target;
                    writeln!(
                        sets,
                        "add KUBE-LOOP-BACK {backend},{protocol}:{target},{backend}"
                    )?;
                }
            }
        }
        self.feed(bed, "ip -batch -", &addresses)?;
        self.feed(bed, "ipset restore -exist", &sets)?;
        self.feed(bed, "ipvsadm -R", &servers)
    }

    /// Feeds `text` to a tool on the node without an agent.
    fn feed(&self, bed: &Bed, command: &str, text: &str) -> anyhow::Result<()> {
        let mut words = command.split(' ');
        let mut tool = bed
            .node(self.nodes[1])
            .command(words.next().unwrap_or_default());
        run_with_input(tool.args(words), text)?.success()?;
        Ok(())
    }
}

/// The virtual servers of service `number` on a node with this address.
fn keys(number: u32, node: Ipv4Addr) -> Vec<ServerKey> {
    let mut keys = Vec::new();
    for port in ports(number) {
        let mut add = |ip: Ipv4Addr, number| {
            keys.push(ServerKey {
                address: SocketAddr::from((ip, number)),
                protocol: match port.protocol {
                    "UDP" => Protocol::UDP,
                    _ => Protocol::TCP,
                },
            });
        };
        add(cluster_ip(number), port.port);
        if let Some(node_port) = port.node_port {
            add(node, node_port);
        }
    }
    keys
}

/// Fails unless the kernel has these virtual servers, each with at least one real server.
fn are_served(wanted: &[ServerKey]) -> anyhow::Result<()> {
    let mut client = Client::open()?;
    let servers = client.servers()?.into_iter().map(|server| server.id);
    let servers: BTreeSet<ServerId> = servers.collect();
    for key in wanted {
        let id = ServerId::from(*key);
        ensure!(servers.contains(&id), "no virtual server {key}");
        let real = client.real_servers(id)?;
        ensure!(!real.is_empty(), "no real server of {key}");
    }
    Ok(())
}

/// kube-proxy's iptables rules for IPVS, as far as needed for ClusterIPs and NodePorts.
fn rules() -> String {
    format!(
        "\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
-A KUBE-SERVICES ! -s {POD_CIDRS} -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-NODE-PORT -p udp -m set --match-set KUBE-NODE-PORT-UDP dst -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-IPVS-FILTER - [0:0]
-A INPUT -j KUBE-IPVS-FILTER
-A FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
COMMIT
"
    )
}
