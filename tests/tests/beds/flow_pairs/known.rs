//! Pairs that get no reply, and why. The test fails once all pairs of a rule succeed, so these lists can only get
//! shorter.

use super::table::{Client, Kind, Pair, Target, Way};

/// Pairs that fail, or may fail, for the same reason.
pub(super) struct Known {
    /// The reason.
    pub(super) why: &'static str,
    /// Whether the rule covers a pair.
    pub(super) has: fn(&Pair) -> bool,
}

/// Pairs that the kernel's own NAT cannot handle.
pub(super) const KERNEL: &[Known] = &[];

/// Pairs that the agents cannot handle. The first rule that matches a pair counts.
pub(super) const AGENTS: &[Known] = &[
    Known {
        why: "sockets of the host with one port are connected to the backend itself: to the kernel they are one",
        has: |pair| {
            // Sockets do not translate another node's NodePort; that node does so itself.
            let is_far = pair.flows.iter().any(|(_, way)| *way == Way::OtherNode);
            is_of(pair, Client::Host)
                && !is_far
                && matches!(pair.kind, Kind::Tcp | Kind::Udp)
                && pair.state.goes_on()
        },
    },
    Known {
        why: "of two flows of a client outside, only the backend's node sees that one by direct return meets the other",
        has: |pair| {
            let ways = pair.flows.map(|(_, way)| way);
            let is_unseen = [Way::Direct, Way::OtherNode]
                .iter()
                .any(|way| ways.contains(way));
            is_of(pair, Client::Far)
                && is_unseen
                && ways.contains(&Way::DirectReturn)
                && pair.target == Target::Far
                && pair.state.goes_on()
        },
    },
];

fn is_of(pair: &Pair, client: Client) -> bool {
    pair.has_one_client() && pair.flows[0].0 == client
}
