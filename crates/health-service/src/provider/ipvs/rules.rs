//! The table of rules that masquerade, reject and drop packets. It depends only on the settings; addresses and ports
//! are in the sets.
//!
//! The rules match ipset sets through the iptables match (`nft_compat`, `xt_set`), as `iptables-nft` does.

use health_model::ipam::Family;
use health_model::policy::Protocol;
use ipnet::IpNet;

use super::netlink::nft::expression::Side::{Destination, Source};
use super::netlink::nft::expression::{
    Side, drop, from_network, in_set, is_local, jump, lacks_mark, leave, masquerade, not_new,
    of_protocol, reject, set_mark,
};
use super::netlink::nft::{Base, Chain, InetHookNumber, Rule, Table};
use super::sets::SetKind;

/// The name of the table, in both families.
pub const TABLE: &str = "health-agent-services";

const SERVICES: &str = "services";
const CLUSTER_IPS: &str = "cluster-ips";
const NODE_PORTS: &str = "node-ports";
const MARK: &str = "mark-for-masquerade";
const CHECK: &str = "check";
const SOURCES: &str = "sources";
const OUTSIDE: &str = "outside";

/// The priorities `dstnat` and `srcnat` of nft(8).
const PRIORITY_DESTINATION: i32 = -100;
const PRIORITY_SOURCE: i32 = 100;
/// Before IPVS takes arriving packets (98, `NF_IP_PRI_NAT_SRC - 2`), and before other filters.
const PRIORITY_INPUT: i32 = -10;
/// Before IPVS takes packets of this node (-99, `NF_IP_PRI_NAT_DST + 1`), and after conntrack (-200).
const PRIORITY_OUTPUT: i32 = -110;

/// Settings for rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSettings {
    /// The pod networks; empty if unknown. Traffic to ClusterIPs from sources outside them is masqueraded.
    pub pod_networks: Vec<IpNet>,
    /// Whether to masquerade all traffic to ClusterIPs.
    pub masquerade_all: bool,
    /// The bit in a packet's mark that requests masquerading.
    pub masquerade_mark: u32,
}

impl Default for RuleSettings {
    fn default() -> Self {
        Self {
            pod_networks: Vec::new(),
            masquerade_all: false,
            masquerade_mark: 0x4000,
        }
    }
}

/// Returns the table of a family. `index` returns the index of each set.
pub fn table(family: Family, settings: &RuleSettings, index: impl Fn(SetKind) -> u16) -> Table {
    let builder = Builder {
        family,
        settings,
        index,
    };
    Table {
        family,
        name: TABLE,
        chains: builder.chains(),
    }
}

struct Builder<'a, F> {
    family: Family,
    settings: &'a RuleSettings,
    index: F,
}

impl<F: Fn(SetKind) -> u16> Builder<'_, F> {
    fn chains(&self) -> Vec<Chain> {
        let base = |kind, hook, priority| {
            Some(Base {
                kind,
                hook,
                priority,
            })
        };
        let nat = |hook, priority| base("nat", hook, priority);
        let filter = |hook, priority| base("filter", hook, priority);
        let chain = |name, base, rules| Chain { name, base, rules };
        let to_services = || vec![jump(SERVICES)];
        vec![
            chain(
                "prerouting",
                nat(InetHookNumber::PreRouting, PRIORITY_DESTINATION),
                to_services(),
            ),
            chain(
                "output",
                nat(InetHookNumber::LocalOut, PRIORITY_DESTINATION),
                to_services(),
            ),
            chain(
                "postrouting",
                nat(InetHookNumber::PostRouting, PRIORITY_SOURCE),
                self.postrouting(),
            ),
            chain(
                "filter-input",
                filter(InetHookNumber::LocalIn, PRIORITY_INPUT),
                self.filter_input(),
            ),
            chain(
                "filter-output",
                filter(InetHookNumber::LocalOut, PRIORITY_OUTPUT),
                self.filter_output(),
            ),
            chain(SERVICES, None, self.services()),
            chain(CLUSTER_IPS, None, self.cluster_ips()),
            chain(NODE_PORTS, None, self.node_ports()),
            chain(MARK, None, self.mark()),
            chain(CHECK, None, self.check()),
            chain(SOURCES, None, self.sources()),
            chain(OUTSIDE, None, self.outside()),
        ]
    }

    /// Returns the rules that mark packets to be masqueraded.
    fn services(&self) -> Vec<Rule> {
        let mut rules = vec![rule([from_network(loopback(self.family)), leave()])];
        rules.push(rule([
            self.to_service(SetKind::ClusterIp),
            jump(CLUSTER_IPS),
        ]));
        for kind in [SetKind::ExternalIp, SetKind::LoadBalancer] {
            rules.push(rule([self.to_service(kind), jump(MARK)]));
        }
        // Packets that the node sends to one of these addresses have that same address as their source, to which no
        // endpoint could reply.
        for kind in [SetKind::ExternalIpLocal, SetKind::LoadBalancerLocal] {
            let own = self.set(SetKind::BoundIps, &[Source]);
            rules.push(rule([self.to_service(kind), own, jump(MARK)]));
        }
        rules.push(rule([is_local(Destination), jump(NODE_PORTS)]));
        rules
    }

    fn cluster_ips(&self) -> Vec<Rule> {
        if self.settings.masquerade_all {
            return vec![jump(MARK)];
        }
        let networks: Vec<_> = self.pod_networks().collect();
        if networks.is_empty() {
            return vec![rule([self.set(SetKind::BoundIps, &[Source]), jump(MARK)])];
        }
        let pods = networks.into_iter();
        let pods = pods.map(|network| rule([from_network(network), leave()]));
        pods.chain([jump(MARK)]).collect()
    }

    fn node_ports(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for (protocol, kind) in [
            (Protocol::TCP, SetKind::NodePortTcp),
            (Protocol::UDP, SetKind::NodePortUdp),
        ] {
            let port = self.set(kind, &[Destination]);
            rules.push(rule([of_protocol(protocol), port, jump(MARK)]));
        }
        rules.push(rule([self.to_service(SetKind::NodePortSctp), jump(MARK)]));
        rules
    }

    fn mark(&self) -> Vec<Rule> {
        vec![set_mark(self.settings.masquerade_mark, true)]
    }

    fn postrouting(&self) -> Vec<Rule> {
        let mark = self.settings.masquerade_mark;
        let hairpin = [Destination, Destination, Source];
        vec![
            rule([self.set(SetKind::LoopBack, &hairpin), masquerade()]),
            rule([lacks_mark(mark), leave()]),
            set_mark(mark, false),
            masquerade(),
        ]
    }

    /// Returns rules that check new connections only: existing ones continue until they end.
    fn filter_input(&self) -> Vec<Rule> {
        let mut rules = self.not_looked_at();
        let to_service = self.to_service(SetKind::DropOutside);
        rules.push(rule([to_service, jump(OUTSIDE)]));
        rules.push(jump(CHECK));
        // Other programs that listen on this node must not be reachable at service addresses.
        for kind in [
            SetKind::ClusterIp,
            SetKind::ExternalIp,
            SetKind::ExternalIpLocal,
            SetKind::LoadBalancer,
            SetKind::LoadBalancerLocal,
        ] {
            rules.push(rule([self.to_service(kind), leave()]));
        }
        let check_port = self.set(SetKind::CheckNodePort, &[Destination]);
        rules.push(rule([of_protocol(Protocol::TCP), check_port, leave()]));
        let bound = self.set(SetKind::BoundIps, &[Destination]);
        rules.push(rule([bound, reject(self.family)]));
        rules
    }

    fn filter_output(&self) -> Vec<Rule> {
        let mut rules = self.not_looked_at();
        rules.push(jump(CHECK));
        rules
    }

    fn not_looked_at(&self) -> Vec<Rule> {
        let icmp = match self.family {
            Family::V4 => Protocol::ICMP,
            Family::V6 => Protocol::ICMPV6,
        };
        vec![
            rule([not_new(), leave()]),
            rule([of_protocol(icmp), leave()]),
        ]
    }

    fn check(&self) -> Vec<Rule> {
        vec![
            rule([self.to_service(SetKind::Drop), drop()]),
            rule([self.to_service(SetKind::Reject), reject(self.family)]),
            rule([
                self.to_service(SetKind::LoadBalancerFirewall),
                jump(SOURCES),
            ]),
        ]
    }

    fn sources(&self) -> Vec<Rule> {
        let parts = [Destination, Destination, Source];
        vec![
            rule([self.set(SetKind::SourceCidr, &parts), leave()]),
            rule([self.set(SetKind::SourceIp, &parts), leave()]),
            drop(),
        ]
    }

    fn outside(&self) -> Vec<Rule> {
        let pods = self.pod_networks();
        let pods = pods.map(|network| rule([from_network(network), leave()]));
        pods.chain([rule([is_local(Source), leave()]), drop()])
            .collect()
    }

    fn pod_networks(&self) -> impl Iterator<Item = IpNet> {
        let networks = self.settings.pod_networks.iter().copied();
        networks.filter(|network| Family::of(network.addr()) == self.family)
    }

    /// Matches packets whose destination address and port are in a set.
    fn to_service(&self, kind: SetKind) -> Rule {
        self.set(kind, &[Destination, Destination])
    }

    fn set(&self, kind: SetKind, parts: &[Side]) -> Rule {
        debug_assert_eq!(parts.len(), usize::from(kind.set_type().dimensions()));
        in_set((self.index)(kind), parts)
    }
}

fn rule<const N: usize>(parts: [Rule; N]) -> Rule {
    parts.into_iter().flatten().collect()
}

fn loopback(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::new_assert([127, 0, 0, 0].into(), 8),
        Family::V6 => IpNet::new_assert(std::net::Ipv6Addr::LOCALHOST.into(), 128),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sched::{CloneFlags, unshare};

    use super::super::netlink::ipset;
    use super::super::netlink::nft::Client;
    use super::super::sets::SetId;
    use super::*;

    fn nft(arguments: &[&str]) -> String {
        let output = Command::new("nft").args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs in the kernel, in a namespace of its own.
    #[test]
    fn the_kernel_takes_the_table_in_one_step_and_leaves_others() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        std::thread::scope(|scope| scope.spawn(install).join().unwrap());
    }

    fn install() {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        nft(&["add", "table", "ip", "other"]);
        let mut sets = ipset::Client::open().unwrap();
        for set in SetId::all() {
            sets.create(&set.spec()).unwrap();
        }
        let mut client = Client::open().unwrap();
        for family in Family::ALL {
            let settings = RuleSettings {
                pod_networks: vec!["10.1.0.0/16".parse().unwrap(), "fd01::/48".parse().unwrap()],
                ..RuleSettings::default()
            };
            let index = |kind| {
                let set = SetId { family, kind }.to_string();
                sets.index(&set).unwrap().unwrap()
            };
            let indexes = SetKind::ALL.map(index);
            let table = table(family, &settings, |kind| indexes[kind as usize]);
            for _ in 0..2 {
                client.replace(&table).unwrap();
            }
            let rules = table.chains.iter().map(|chain| chain.rules.len());
            let listed = client.rules(family, TABLE).unwrap();
            assert_eq!(listed.len(), rules.sum::<usize>());
            let busy = sets.destroy(
                &SetId {
                    family,
                    kind: SetKind::Reject,
                }
                .to_string(),
            );
            assert_eq!(busy.unwrap_err().to_string(), "the set is in use");
        }
        let tables = nft(&["list", "tables"]);
        assert!(tables.contains("table ip other"), "{tables}");
        assert!(
            tables.contains("table ip6 health-agent-services"),
            "{tables}"
        );
        let listed = nft(&["list", "table", "ip", TABLE]);
        for part in [
            "type nat hook postrouting priority srcnat; policy accept;",
            "type filter hook output priority -110; policy accept;",
            "ct state ! new return",
            "ip saddr 127.0.0.0/8 return",
            "ip saddr 10.1.0.0/16 return",
            "fib daddr type local jump node-ports",
            "masquerade fully-random",
        ] {
            assert!(listed.contains(part), "{part}\n{listed}");
        }
        assert!(client.delete(Family::V4, TABLE).unwrap());
        assert!(!client.delete(Family::V4, TABLE).unwrap());
        assert!(client.delete(Family::V6, TABLE).unwrap());
        assert_eq!(nft(&["list", "tables"]).trim(), "table ip other");
    }
}
