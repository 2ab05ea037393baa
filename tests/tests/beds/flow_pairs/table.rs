//! Who opens flows, in which ways, and which two flows may get the same tuple after translation.

use std::fmt;

/// Who opens a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Client {
    /// A pod of the first node.
    Pod,
    /// Another pod of the first node.
    Neighbour,
    /// A process in the first node's network namespace.
    Host,
    /// A host behind the router.
    Far,
    /// The near backend itself.
    Backend,
}

impl Client {
    pub(super) const ALL: [Self; 5] = [
        Self::Pod,
        Self::Neighbour,
        Self::Host,
        Self::Far,
        Self::Backend,
    ];
}

/// How a client addresses a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// The backend's own address.
    Direct,
    /// The ClusterIP of a service with only this backend.
    Cluster,
    /// The ClusterIP of another service with only this backend.
    Other,
    /// The ClusterIP of a service with both backends, whose affinity pins all clients to this one.
    Sticky,
    /// The NodePort of the first service at the first node.
    NodePort,
    /// The same NodePort at the second node.
    OtherNode,
    /// The external address of the first service, which the router sends to the first node.
    External,
    /// The NodePort, at the first node, of a service whose backend answers clients directly.
    DirectReturn,
    /// A server behind the router. Traffic from pods to it is masqueraded.
    Outside,
}

impl Way {
    pub(super) const ALL: [Self; 9] = [
        Self::Direct,
        Self::Cluster,
        Self::Other,
        Self::Sticky,
        Self::NodePort,
        Self::OtherNode,
        Self::External,
        Self::DirectReturn,
        Self::Outside,
    ];

    /// The clients that use this way. A new way takes one row.
    const fn clients(self) -> &'static [Client] {
        use Client::{Backend, Far, Host, Neighbour, Pod};
        match self {
            Self::Direct => &[Pod, Host, Far],
            Self::Cluster | Self::NodePort | Self::External => &[Pod, Host, Far, Backend],
            Self::Other | Self::Sticky => &[Pod, Host, Backend],
            Self::OtherNode => &[Pod, Neighbour, Host, Far],
            Self::DirectReturn => &[Far],
            Self::Outside => &[Pod, Neighbour, Host],
        }
    }
}

/// Where the backend is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    /// On the first node.
    Near,
    /// On the second node.
    Far,
}

impl Target {
    pub(super) const BOTH: [Self; 2] = [Self::Near, Self::Far];
}

/// The kind of socket that the clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Tcp,
    /// Connected UDP sockets.
    Udp,
    /// A UDP socket that sends to any destination. One socket serves both flows if the same client opens both.
    Unconnected,
    /// Echo requests, whose identifiers act as ports.
    Echo,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Tcp, Self::Udp, Self::Unconnected, Self::Echo];

    /// Whether this kind of socket can use a way: services do not handle echo requests.
    fn goes(self, way: Way) -> bool {
        self != Self::Echo || matches!(way, Way::Direct | Way::Outside)
    }
}

/// State of the first flow when the second one is opened. Protocols other than TCP have only the first state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    Open,
    /// The client has closed its side, but the server still sends.
    HalfClosed,
    /// The client closed first, and is in TIME_WAIT.
    ClosedByClient,
    /// The server closed first, and is in TIME_WAIT.
    ClosedByServer,
    Reset,
}

impl State {
    pub(super) const ALL: [Self; 5] = [
        Self::Open,
        Self::HalfClosed,
        Self::ClosedByClient,
        Self::ClosedByServer,
        Self::Reset,
    ];

    /// Whether the first flow must continue alongside the second one.
    pub(super) const fn goes_on(self) -> bool {
        matches!(self, Self::Open | Self::HalfClosed)
    }
}

/// A flow: the client that opens it and the way that the client uses.
pub(super) type FlowKey = (Client, Way);

/// Two flows from the same port, opened one after the other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pair {
    pub(super) kind: Kind,
    pub(super) is_v4: bool,
    pub(super) target: Target,
    pub(super) flows: [FlowKey; 2],
    pub(super) state: State,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [(client, way), (other_client, other_way)] = self.flows;
        let version = if self.is_v4 { 4 } else { 6 };
        write!(
            f,
            "{:?} IPv{version}, backend {:?}: {client:?} {way:?} ({:?}), then {other_client:?} {other_way:?}",
            self.kind, self.target, self.state
        )
    }
}

impl Pair {
    /// Whether one client opens both flows.
    pub(super) fn has_one_client(&self) -> bool {
        self.flows[0].0 == self.flows[1].0
    }

    /// Whether the pair can be opened at all, and may lead to the same tuple twice.
    fn is_meant(&self) -> bool {
        let [(client, way), (other_client, other_way)] = self.flows;
        let is_outside = [way, other_way].map(|way| way == Way::Outside);
        let is_echo = self.kind == Kind::Echo;
        // All ways except `Outside` lead to the backend.
        if is_outside[0] != is_outside[1] || is_outside[0] && self.target != Target::Near {
            return false;
        }
        let is_of_far = [client, other_client].contains(&Client::Backend);
        if is_of_far && self.target != Target::Near {
            return false;
        }
        if self.state != State::Open && self.kind != Kind::Tcp {
            return false;
        }
        // The client's own socket prevents another one with the same address.
        let needs_other = self.state.goes_on() || self.state == State::ClosedByClient;
        if self.flows[0] == self.flows[1] && needs_other {
            return false;
        }
        let may_be_translated =
            |(client, way): FlowKey| client == Client::Host || way != Way::Direct;
        let meets = client == other_client || self.flows.into_iter().all(may_be_translated);
        meets
            && self.flows.iter().all(|(_, way)| self.kind.goes(*way))
            && !(is_echo && client == other_client)
    }
}

/// All pairs.
pub(super) fn all() -> Vec<Pair> {
    let flows: Vec<FlowKey> = Way::ALL
        .into_iter()
        .flat_map(|way| way.clients().iter().map(move |client| (*client, way)))
        .collect();
    let mut pairs = Vec::new();
    for kind in Kind::ALL {
        for is_v4 in [true, false] {
            for target in Target::BOTH {
                for state in State::ALL {
                    for first in &flows {
                        for second in &flows {
                            let flows = [*first, *second];
                            pairs.push(Pair {
                                kind,
                                is_v4,
                                target,
                                flows,
                                state,
                            });
                        }
                    }
                }
            }
        }
    }
    pairs.retain(Pair::is_meant);
    pairs
}
