//! The other side of a packet, and how rules select it.

use std::collections::BTreeMap;
use std::fmt;

use health_model::address::parse_network;
use health_model::identity::{Identity, KUBE_APISERVER, REMOTE_NODE};
use health_model::labels::LabelSet;
use ipnet::IpNet;

use super::selector::Selector;
use super::services::{ClusterServices, ServicePeers};

/// Source of the labels of identities that stand for a prefix; the label's key is the prefix.
const CIDR: &str = "cidr";
/// Name of the reserved identity for everything outside the cluster.
const WORLD: &str = "world";

/// An identity as the other side of a packet.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    identity: Identity,
    labels: &'a LabelSet,
    prefix: Option<IpNet>,
}

impl<'a> Peer<'a> {
    /// Creates a peer with this identity and these labels.
    pub fn new(identity: Identity, labels: &'a LabelSet) -> Self {
        Self {
            identity,
            labels,
            prefix: prefix(labels),
        }
    }

    /// Returns the peer's identity.
    pub const fn identity(&self) -> Identity {
        self.identity
    }

    /// Returns the peer's labels.
    pub const fn labels(&self) -> &'a LabelSet {
        self.labels
    }

    pub(super) fn is_host(&self) -> bool {
        self.is_reserved("host")
    }

    /// Whether nothing is known about the peer. Only rules for every peer apply to it. In a trace, labels can be known
    /// that have no identity.
    fn is_unknown(&self) -> bool {
        self.identity == Identity::UNKNOWN
            && (self.labels.is_empty() || self.is_reserved("unknown"))
    }

    /// Whether the peer is a host of the cluster.
    fn is_node(&self) -> bool {
        self.is_host() || self.is_reserved(REMOTE_NODE)
    }

    fn is_reserved(&self, name: &str) -> bool {
        self.labels.has_reserved(name)
    }
}

/// Returns the prefix that an identity with these labels stands for; the longest if there are several.
pub fn prefix(labels: &LabelSet) -> Option<IpNet> {
    labels
        .iter()
        .filter(|label| label.source() == CIDR)
        .filter_map(|label| parse_network(label.key()).ok())
        .max_by_key(IpNet::prefix_len)
}

/// A named class of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entity {
    All,
    /// Every known identity that is not part of the world, and the API servers wherever they are, as in Cilium.
    Cluster,
    None,
    /// Peers with the label of this reserved identity.
    Reserved(&'static str),
}

impl Entity {
    /// Names of all entities.
    pub(super) const NAMES: &'static str = "all, world, host, remote-node, cluster, init, health, \
         unmanaged, kube-apiserver, ingress and none";

    pub(super) fn by_name(name: &str) -> Option<Self> {
        match name {
            "all" => Some(Self::All),
            "cluster" => Some(Self::Cluster),
            "none" => Some(Self::None),
            "unknown" => None,
            name => {
                let name = Identity::by_reserved_name(name)?.reserved_name()?;
                Some(Self::Reserved(name))
            }
        }
    }

    fn selects(self, peer: &Peer<'_>) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Cluster => {
                !peer.is_unknown() && (!peer.is_reserved(WORLD) || peer.is_reserved(KUBE_APISERVER))
            }
            Self::Reserved(name) => peer.is_reserved(name),
        }
    }
}

/// CIDRs, each with its exceptions. The same CIDR may occur several times with different exceptions; each occurrence
/// selects independently.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CidrSet(BTreeMap<IpNet, Vec<Vec<IpNet>>>);

impl CidrSet {
    pub(super) fn insert(&mut self, cidr: IpNet, except: Vec<IpNet>) {
        self.0.entry(cidr.trunc()).or_default().push(except);
    }

    /// Returns all CIDRs, including the exceptions.
    pub(super) fn prefixes(&self) -> impl Iterator<Item = IpNet> {
        self.0.iter().flat_map(|(cidr, excepts)| {
            let excepts = excepts.iter().flatten().map(IpNet::trunc);
            std::iter::once(*cidr).chain(excepts)
        })
    }

    /// Whether a CIDR selects the peer. A CIDR selects the identity of a prefix if it contains the prefix and none of
    /// its exceptions does. The world's identity, which has no prefix, belongs to both `0.0.0.0/0` and `::/0`.
    pub(super) fn selects(&self, peer: &Peer<'_>) -> bool {
        match peer.prefix {
            Some(prefix) => std::iter::successors(Some(prefix.trunc()), IpNet::supernet)
                .filter_map(|cidr| self.0.get(&cidr))
                .flatten()
                .any(|excepts| !excepts.iter().any(|except| except.contains(&prefix))),
            None if peer.is_reserved(WORLD) => self
                .0
                .iter()
                .filter(|(cidr, _)| cidr.prefix_len() == 0)
                .flat_map(|(_, excepts)| excepts)
                .any(|excepts| !excepts.iter().any(|except| except.prefix_len() == 0)),
            None => false,
        }
    }
}

/// One way to select peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PeerSelector {
    Labels(Selector),
    Entity(Entity),
    Cidrs(CidrSet),
    /// Hosts of the cluster by the labels of their nodes.
    Nodes(Selector),
    Services(ServicePeers),
}

impl PeerSelector {
    fn selects(&self, peer: &Peer<'_>) -> bool {
        match self {
            Self::Labels(selector) => {
                selector.is_wildcard() || !peer.is_unknown() && selector.matches(peer.labels)
            }
            Self::Entity(entity) => entity.selects(peer),
            Self::Cidrs(cidrs) => cidrs.selects(peer),
            Self::Nodes(selector) => peer.is_node() && selector.matches(peer.labels),
            Self::Services(services) => services.selects(peer),
        }
    }

    /// Whether the selected peers depend on the services of the Kubernetes cluster.
    fn depends_on_services(&self) -> bool {
        match self {
            Self::Services(_)
            | Self::Entity(Entity::Cluster | Entity::Reserved(KUBE_APISERVER)) => true,
            Self::Labels(selector) | Self::Nodes(selector) => selector.names_api_servers(),
            Self::Entity(_) | Self::Cidrs(_) => false,
        }
    }
}

/// The peers to which a rule applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Peers {
    /// Every peer.
    All,
    /// Peers that at least one of these selectors selects; none if the list is empty.
    Selected(Vec<PeerSelector>),
}

impl Peers {
    pub(super) const NOBODY: Self = Self::Selected(Vec::new());

    pub(super) fn contains(&self, peer: &Peer<'_>) -> bool {
        match self {
            Self::All => true,
            Self::Selected(selectors) => selectors.iter().any(|selector| selector.selects(peer)),
        }
    }

    fn selectors(&self) -> &[PeerSelector] {
        match self {
            Self::All => &[],
            Self::Selected(selectors) => selectors,
        }
    }

    /// Returns all CIDRs that the selectors name, and the addresses behind the services that they name.
    pub(super) fn prefixes(&self) -> impl Iterator<Item = IpNet> {
        self.selectors().iter().flat_map(|selector| {
            let prefixes: Vec<IpNet> = match selector {
                PeerSelector::Cidrs(cidrs) => cidrs.prefixes().collect(),
                PeerSelector::Services(services) => services.prefixes().collect(),
                PeerSelector::Labels(_) | PeerSelector::Entity(_) | PeerSelector::Nodes(_) => {
                    Vec::new()
                }
            };
            prefixes
        })
    }

    /// Returns the keys of the labels of nodes by which peers are named.
    pub(super) fn node_keys(&self) -> impl Iterator<Item = &str> {
        self.selectors().iter().flat_map(|selector| {
            let keys = match selector {
                PeerSelector::Nodes(selector) => Some(selector.node_keys(true)),
                PeerSelector::Labels(selector) => Some(selector.node_keys(false)),
                _ => None,
            };
            keys.into_iter().flatten()
        })
    }

    /// Returns the kind of object of a Kubernetes cluster by which peers are named, and the field that names it without
    /// its preposition.
    pub(super) fn cluster_field(&self) -> Option<(&'static str, &'static str)> {
        self.selectors().iter().find_map(|selector| match selector {
            PeerSelector::Services(_) => Some(("matching by service", "Services")),
            PeerSelector::Nodes(_) => Some(("matching by node labels", "Nodes")),
            _ => None,
        })
    }

    /// Returns the peers that are named by service.
    pub(super) fn services(&self) -> impl Iterator<Item = &ServicePeers> {
        let selectors = self.selectors().iter();
        selectors.filter_map(|selector| match selector {
            PeerSelector::Services(services) => Some(services),
            _ => None,
        })
    }

    /// Whether the selected peers depend on the services of the Kubernetes cluster.
    pub(super) fn depend_on_services(&self) -> bool {
        let mut selectors = self.selectors().iter();
        selectors.any(PeerSelector::depends_on_services)
    }

    /// Selects the peers behind these services from now on.
    pub(super) fn bind(&mut self, known: &ClusterServices) {
        if let Self::Selected(selectors) = self {
            for selector in selectors {
                if let PeerSelector::Services(services) = selector {
                    services.bind(known);
                }
            }
        }
    }
}

impl fmt::Display for Peer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [", self.identity)?;
        for (i, label) in self.labels.iter().enumerate() {
            write!(f, "{}{label}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidrs(all: &[(&str, &[&str])]) -> Peers {
        let mut set = CidrSet::default();
        for (cidr, except) in all {
            let except = except.iter().map(|cidr| cidr.parse().unwrap()).collect();
            set.insert(cidr.parse().unwrap(), except);
        }
        Peers::Selected(vec![PeerSelector::Cidrs(set)])
    }

    fn selects(peers: &Peers, labels: &[&str]) -> bool {
        let labels = LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap();
        peers.contains(&Peer::new(Identity(1 << 24), &labels))
    }

    #[test]
    fn cidrs_select_the_prefixes_in_them_and_not_in_an_exception() {
        let peers = cidrs(&[("10.0.0.0/8", &["10.1.0.0/16", "10.2.0.0/16"])]);
        for (prefix, selected) in [
            ("10.0.0.0/8", true),
            ("10.3.0.0/16", true),
            ("10.1.0.0/16", false),
            ("10.1.2.3/32", false),
            ("10.0.0.0/7", false),
            ("0.0.0.0/0", false),
            ("fd00::/8", false),
        ] {
            let label = format!("cidr:{prefix}");
            assert_eq!(
                selects(&peers, &[&label, "reserved:world"]),
                selected,
                "{prefix}"
            );
        }
        assert!(!selects(&peers, &["reserved:world"]));
        assert!(!selects(&peers, &["reserved:host"]));
    }

    #[test]
    fn nodes_are_selected_by_their_labels_and_nothing_else_is() {
        let read = |selector: serde_json::Value| {
            let selector = Selector::read(&crate::field::Field::root(&selector)).unwrap();
            Peers::Selected(vec![PeerSelector::Nodes(selector)])
        };
        let key = "topology.kubernetes.io/zone";
        let zone = format!("node:{key}=a");
        let by_zone = read(serde_json::json!({ "matchLabels": { key: "a" } }));
        let all = read(serde_json::json!({}));
        for (labels, is_in_zone, is_node) in [
            (&["reserved:remote-node", &zone][..], true, true),
            (&["reserved:host", &zone], true, true),
            (
                &["reserved:kube-apiserver", "reserved:remote-node", &zone],
                true,
                true,
            ),
            (&["reserved:remote-node"], false, true),
            (&["reserved:host"], false, true),
            (&[&zone], false, false),
            (&["k8s:topology.kubernetes.io/zone=a"], false, false),
            (&["reserved:world", "cidr:10.0.0.1/32"], false, false),
        ] {
            assert_eq!(selects(&by_zone, labels), is_in_zone, "{labels:?}");
            assert_eq!(selects(&all, labels), is_node, "{labels:?}");
        }
        assert!(by_zone.node_keys().eq([key]));
        // A selector of endpoints means nodes only if it says so.
        let endpoints = serde_json::json!({ "matchLabels": { "node:zone": "a", "app": "b" } });
        let endpoints = Selector::read(&crate::field::Field::root(&endpoints)).unwrap();
        let endpoints = Peers::Selected(vec![PeerSelector::Labels(endpoints)]);
        assert!(endpoints.node_keys().eq(["zone"]));
    }

    #[test]
    fn the_cluster_includes_its_api_servers_wherever_they_are() {
        let cluster = Peers::Selected(vec![PeerSelector::Entity(Entity::Cluster)]);
        for (labels, is_selected) in [
            (&["cidr:192.0.2.1/32", "reserved:world"][..], false),
            (
                &[
                    "cidr:192.0.2.1/32",
                    "reserved:kube-apiserver",
                    "reserved:world",
                ],
                true,
            ),
            (&["reserved:kube-apiserver", "reserved:remote-node"], true),
            (&["k8s:app=web"], true),
        ] {
            assert_eq!(selects(&cluster, labels), is_selected, "{labels:?}");
        }
        assert!(cluster.depend_on_services());
    }

    #[test]
    fn selectors_that_name_api_servers_depend_on_services() {
        for (key, depends) in [
            ("reserved:kube-apiserver", true),
            ("kube-apiserver", true),
            ("k8s:kube-apiserver", false),
            ("reserved:host", false),
        ] {
            let selector = serde_json::json!({ "matchLabels": { key: "" } });
            let selector = Selector::read(&crate::field::Field::root(&selector)).unwrap();
            for selector in
                [PeerSelector::Labels, PeerSelector::Nodes].map(|of| of(selector.clone()))
            {
                let peers = Peers::Selected(vec![selector]);
                assert_eq!(peers.depend_on_services(), depends, "{key}");
            }
        }
    }

    #[test]
    fn a_cidr_given_twice_selects_what_either_does() {
        let peers = cidrs(&[
            ("10.0.0.0/8", &["10.1.0.0/16"]),
            ("10.0.0.0/8", &["10.2.0.0/16"]),
        ]);
        assert!(selects(&peers, &["cidr:10.1.0.0/16"]));
        assert!(selects(&peers, &["cidr:10.2.0.0/16"]));
    }

    #[test]
    fn the_world_is_in_the_cidrs_of_all_addresses() {
        let world = &["reserved:world"][..];
        assert!(selects(&cidrs(&[("0.0.0.0/0", &["10.0.0.0/8"])]), world));
        assert!(selects(&cidrs(&[("::/0", &[])]), world));
        assert!(!selects(&cidrs(&[("0.0.0.0/0", &["0.0.0.0/0"])]), world));
        assert!(!selects(&cidrs(&[("0.0.0.0/1", &[])]), world));
        assert!(!selects(&cidrs(&[("::/0", &[])]), &["k8s:app=web"]));
        assert!(selects(&cidrs(&[("::/0", &[])]), &["cidr:fd00::/8"]));
        assert!(!selects(&cidrs(&[("::/0", &[])]), &["cidr:10.0.0.0/8"]));
    }
}
