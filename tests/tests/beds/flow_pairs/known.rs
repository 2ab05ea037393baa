//! Pairs that are not answered, and why. A test fails if none of a rule's pairs fails any more: these lists can only get
//! shorter.

use super::table::{Client, Kind, Pair, Target, Way};

/// Pairs that fail for one reason, or may fail.
pub(super) struct Known {
    /// The reason.
    pub(super) why: &'static str,
    /// Which they are.
    pub(super) has: fn(&Pair) -> bool,
}

/// What the kernel's own NAT cannot do.
pub(super) const KERNEL: &[Known] = &[];

/// What the agents cannot do. The first rule that a pair belongs to counts.
pub(super) const AGENTS: &[Known] = &[
    Known {
        why: "a flow that meets another one moves the affinity of its client",
        has: |pair| pair.flows.iter().any(|(_, way)| *way == Way::Sticky),
    },
    Known {
        why: "sockets of the host with one port are connected to the backend itself: to the kernel they are one",
        has: |pair| {
            is_of(pair, Client::Host)
                && matches!(pair.kind, Kind::Tcp | Kind::Udp)
                && pair.state.goes_on()
        },
    },
    Known {
        why: "a flow of the host to another node's NodePort comes back as one to the backend",
        has: |pair| {
            let is_by_other = pair.flows.iter().any(|(_, way)| *way == Way::OtherNode);
            is_of(pair, Client::Host) && is_by_other && pair.target == Target::Far
        },
    },
    Known {
        why: "no flow of a client gets another port because of one by another way to the same backend",
        has: |pair| pair.has_one_client() && !is_of(pair, Client::Host) && pair.state.goes_on(),
    },
    Known {
        why: "a client outside keeps its port where the node translates it, and the host's own flow gets no other",
        has: |pair| {
            let clients = pair.flows.map(|(client, _)| client);
            let are_they = [Client::Far, Client::Host]
                .iter()
                .all(|one| clients.contains(one));
            are_they && pair.target == Target::Far
        },
    },
];

fn is_of(pair: &Pair, client: Client) -> bool {
    pair.has_one_client() && pair.flows[0].0 == client
}
