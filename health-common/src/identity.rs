//! Reserved security identities, the same on every node (numbers as in Cilium).

/// Traffic with an unknown identity.
pub const UNKNOWN: u32 = 0;
/// The local host.
pub const HOST: u32 = 1;
/// Everything outside the cluster.
pub const WORLD: u32 = 2;
/// An endpoint that no agent manages.
pub const UNMANAGED: u32 = 3;
/// The health endpoint of any node.
pub const HEALTH: u32 = 4;
/// An endpoint whose labels are not known yet.
pub const INIT: u32 = 5;
/// Another host of the cluster.
pub const REMOTE_NODE: u32 = 6;
/// A host of the cluster that runs a Kubernetes API server.
pub const KUBE_APISERVER: u32 = 7;
/// An ingress proxy.
pub const INGRESS: u32 = 8;

/// The smallest identity allocated for labels. These identities are the same on every node.
pub const CLUSTER_FIRST: u32 = 256;
/// The largest identity allocated for labels.
pub const CLUSTER_LAST: u32 = 65_535;
/// Bit that marks node-local identities of CIDRs.
pub const LOCAL: u32 = 1 << 24;
/// Bit that marks node-local identities of other hosts of the cluster, by their labels.
pub const LOCAL_NODE: u32 = 1 << 25;

/// Whether an identity is that of another host of the cluster.
#[must_use]
#[inline(always)]
pub const fn is_remote_node(identity: u32) -> bool {
    matches!(identity, REMOTE_NODE | KUBE_APISERVER) || identity & LOCAL_NODE != 0
}
