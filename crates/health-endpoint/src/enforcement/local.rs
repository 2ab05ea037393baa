//! The identities that are local to this node: of the prefixes and nodes that policies tell apart.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use health_model::identity::{Identity, KUBE_APISERVER, REMOTE_NODE};
use health_model::labels::{Label, LabelSet, NODE};
use health_policy::Repository;
use health_registry::identity::{LocalNeeds, LocalNumbers};
use health_registry::nodes::Node;
use ipnet::IpNet;

use super::Surroundings;

/// What policies tell apart.
pub(super) struct Distinctions {
    pub(super) needs: LocalNeeds,
    /// The labels of other nodes' addresses, for those that have more than `reserved:remote-node`.
    nodes: BTreeMap<IpAddr, LabelSet>,
}

/// The local identities of addresses.
#[derive(Debug, Default)]
pub(super) struct LocalAddresses {
    pub(super) cidrs: BTreeMap<IpNet, Identity>,
    /// The identities of other nodes' addresses, for those that have another one than `remote-node`.
    pub(super) nodes: BTreeMap<IpAddr, Identity>,
}

impl Distinctions {
    pub(super) fn of(repository: &Repository, around: &Surroundings, nodes: &[Node]) -> Self {
        let api_servers: BTreeSet<IpAddr> = repository.services().api_servers().collect();
        let keys = repository.node_keys();
        let mut host = LabelSet::default();
        let mut others = BTreeMap::new();
        for node in nodes {
            let labels = named_labels(node, &keys);
            if node.full_name() == around.own {
                host = labels;
                continue;
            }
            for ip in node.addresses.iter().chain(&node.secondary_addresses) {
                let mut labels = labels.clone();
                if api_servers.contains(ip) {
                    labels = labels.with_reserved(KUBE_APISERVER);
                }
                if !labels.is_empty() {
                    others.insert(*ip, labels.with_reserved(REMOTE_NODE));
                }
            }
        }
        if api_servers.iter().any(|ip| around.is_host(*ip)) {
            host = host.with_reserved(KUBE_APISERVER);
        }
        let needs = LocalNeeds {
            prefixes: repository.prefixes(),
            api_servers,
            host,
            nodes: others
                .values()
                .filter(|labels| reserved(labels).is_none())
                .cloned()
                .collect(),
        };
        Self {
            needs,
            nodes: others,
        }
    }

    /// Returns the identities of addresses, given those of prefixes and labels. With `in_use`, the local identities in
    /// the ipcache, uses no others: the tables in use may not know them yet.
    pub(super) fn addresses(
        &self,
        numbers: &LocalNumbers,
        in_use: Option<&BTreeMap<IpNet, Identity>>,
    ) -> LocalAddresses {
        let is_kept = |prefix: &IpNet, identity: &Identity| match in_use {
            None => self.needs.prefixes.contains(prefix),
            Some(in_use) => in_use.get(prefix) == Some(identity),
        };
        let cidrs = numbers.prefixes.iter();
        let cidrs = cidrs.filter(|(prefix, identity)| is_kept(prefix, identity));
        let known: Option<BTreeSet<Identity>> =
            in_use.map(|in_use| in_use.values().copied().collect());
        let of_node = |ip: &IpAddr, labels: &LabelSet| {
            let without_labels = match labels.has_reserved(KUBE_APISERVER) {
                true => Identity::KUBE_APISERVER,
                false => Identity::REMOTE_NODE,
            };
            let wanted = reserved(labels).or_else(|| numbers.nodes.get(labels).copied());
            let wanted = wanted.unwrap_or(without_labels);
            let is_known = |identity: &Identity| {
                !identity.is_local() || known.as_ref().is_none_or(|known| known.contains(identity))
            };
            let former = || in_use?.get(&IpNet::from(*ip)).copied();
            let is_of_nodes = |identity: &Identity| numbers.nodes.values().any(|n| n == identity);
            Some(wanted)
                .filter(is_known)
                .or_else(|| former().filter(is_of_nodes))
                .unwrap_or(without_labels)
        };
        LocalAddresses {
            cidrs: cidrs
                .map(|(prefix, identity)| (*prefix, *identity))
                .collect(),
            nodes: self
                .nodes
                .iter()
                .map(|(ip, labels)| (*ip, of_node(ip, labels)))
                .collect(),
        }
    }
}

/// The labels of a node that policies name.
fn named_labels(node: &Node, keys: &BTreeSet<String>) -> LabelSet {
    let named = keys.iter().filter_map(|key| {
        let value = node.labels.get(key)?;
        Label::new(NODE, key, value).ok()
    });
    LabelSet::new(named).unwrap_or_default()
}

/// The reserved identity of another node with these labels, if there is one.
fn reserved(labels: &LabelSet) -> Option<Identity> {
    let mut of_nodes = [Identity::REMOTE_NODE, Identity::KUBE_APISERVER].into_iter();
    of_nodes.find(|identity| identity.reserved_labels().as_ref() == Some(labels))
}
