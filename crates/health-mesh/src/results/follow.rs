//! Ways to nodes that lose probes and are therefore followed.

use std::time::Duration;

use health_common::arrivals::{self, WAYS};

use super::{NodeTargets, Results};
use crate::direction::{self, Ways};
use crate::target::{TargetId, TargetKey};

impl Results {
    /// The followed ways.
    pub(crate) fn ways(&mut self) -> &mut Ways {
        &mut self.ways
    }

    /// The ICMP targets on a way to the node with this index in the current set; the first one represents the way.
    pub(crate) fn way(&self, node: usize, way: usize) -> impl Iterator<Item = TargetId> {
        let node = self.nodes.get(node).into_iter();
        node.flat_map(move |node| node.way(way))
    }

    /// The target that represents a target's way.
    pub(crate) fn way_of(&self, node: usize, key: TargetKey) -> Option<TargetId> {
        let way = arrivals::way(key.address.is_ipv4(), key.path as u8);
        self.way(node, way).next()
    }

    /// Whether any way to the node is followed.
    pub(crate) fn is_followed(&self, node: usize) -> bool {
        let of_node = |node| self.is_node_followed(node);
        !self.ways.is_empty() && self.nodes.get(node).is_some_and(of_node)
    }

    pub(super) fn is_node_followed(&self, node: &NodeTargets) -> bool {
        let followed = |way| {
            let first = node.way(way).next();
            first.is_some_and(|first| self.ways.is_followed(first))
        };
        !self.ways.is_empty() && (0..WAYS).any(followed)
    }

    /// Whether a way lost probes recently.
    pub(crate) fn is_lossy(&self, node: usize, way: usize, now: Duration) -> bool {
        self.way(node, way).any(|id| {
            let known = self.known.get(id);
            known.is_some_and(|known| known.history.has_losses(now, direction::WINDOWS[0]))
        })
    }
}
