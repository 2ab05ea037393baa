//! Identity numbers, and the names of reserved identities.

use std::fmt;
use std::str::FromStr;

use health_common::identity as numbers;
use serde::{Deserialize, Serialize};

use crate::labels::LabelSet;

/// Name of the reserved identity for the other hosts of the cluster.
pub const REMOTE_NODE: &str = "remote-node";
/// Name of the reserved identity for hosts that run an API server of Kubernetes.
pub const KUBE_APISERVER: &str = "kube-apiserver";

/// Reserved identities by name.
const RESERVED: [(u32, &str); 9] = [
    (numbers::UNKNOWN, "unknown"),
    (numbers::HOST, "host"),
    (numbers::WORLD, "world"),
    (numbers::UNMANAGED, "unmanaged"),
    (numbers::HEALTH, "health"),
    (numbers::INIT, "init"),
    (numbers::REMOTE_NODE, REMOTE_NODE),
    (numbers::KUBE_APISERVER, KUBE_APISERVER),
    (numbers::INGRESS, "ingress"),
];

/// The text is neither a number nor the name of a reserved identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an identity; expected a number, or a reserved name such as reserved:host")]
pub struct ParseIdentityError(String);

/// A security identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Identity(pub u32);

impl Identity {
    /// Traffic with an unknown identity.
    pub const UNKNOWN: Self = Self(numbers::UNKNOWN);
    /// The local host.
    pub const HOST: Self = Self(numbers::HOST);
    /// Everything outside the cluster.
    pub const WORLD: Self = Self(numbers::WORLD);
    /// The health endpoint of any node.
    pub const HEALTH: Self = Self(numbers::HEALTH);
    /// An endpoint whose labels are still unknown.
    pub const INIT: Self = Self(numbers::INIT);
    /// Any other host of the cluster.
    pub const REMOTE_NODE: Self = Self(numbers::REMOTE_NODE);
    /// Any other host of the cluster that runs an API server of Kubernetes.
    pub const KUBE_APISERVER: Self = Self(numbers::KUBE_APISERVER);
    /// An endpoint that is not managed by an agent.
    const UNMANAGED: Self = Self(numbers::UNMANAGED);
    /// An ingress proxy.
    const INGRESS: Self = Self(numbers::INGRESS);

    /// All reserved identities, by number.
    pub fn all_reserved() -> impl Iterator<Item = Self> {
        RESERVED.iter().map(|(number, _)| Self(*number))
    }

    /// The reserved identity with this name.
    pub fn by_reserved_name(name: &str) -> Option<Self> {
        let found = RESERVED.iter().find(|(_, reserved)| *reserved == name);
        found.map(|(number, _)| Self(*number))
    }

    /// Its name, if it is reserved.
    pub fn reserved_name(self) -> Option<&'static str> {
        let found = RESERVED.iter().find(|(number, _)| *number == self.0);
        found.map(|(_, name)| *name)
    }

    /// Its labels, if it is reserved; an allocator keeps the labels of other identities.
    pub fn reserved_labels(self) -> Option<LabelSet> {
        let labels = self.reserved_name().map(LabelSet::reserved)?;
        Some(match self {
            Self::KUBE_APISERVER => labels.with_reserved(REMOTE_NODE),
            _ => labels,
        })
    }

    /// Whether it is allocated for labels and therefore the same on every node.
    pub const fn is_of_cluster(self) -> bool {
        matches!(self.0, numbers::CLUSTER_FIRST..=numbers::CLUSTER_LAST)
    }

    /// Whether an endpoint may have this identity.
    pub const fn is_of_endpoints(self) -> bool {
        self.is_of_cluster()
            || matches!(
                self,
                Self::INIT | Self::HEALTH | Self::UNMANAGED | Self::INGRESS
            )
    }

    /// Whether it is local to this node, as identities of CIDRs and of labelled nodes are.
    pub const fn is_local(self) -> bool {
        self.0 & (numbers::LOCAL | numbers::LOCAL_NODE) != 0
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, ParseIdentityError> {
        let name = text.strip_prefix("reserved:").unwrap_or(text);
        let number = || text.parse().ok().map(Self);
        Self::by_reserved_name(name)
            .or_else(number)
            .ok_or_else(|| ParseIdentityError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_read_by_number_and_by_reserved_name() {
        assert_eq!("reserved:host".parse(), Ok(Identity::HOST));
        assert_eq!("init".parse(), Ok(Identity::INIT));
        assert_eq!("30217".parse(), Ok(Identity(30_217)));
        for bad in ["", "-1", "reserved:nobody", "4294967296"] {
            assert!(bad.parse::<Identity>().is_err(), "{bad:?}");
        }
        let world = Identity::WORLD.reserved_labels().unwrap();
        assert!(world.has_reserved("world"));
        let server = Identity::KUBE_APISERVER.reserved_labels().unwrap();
        assert!(server.has_reserved("kube-apiserver") && server.has_reserved("remote-node"));
    }
}
