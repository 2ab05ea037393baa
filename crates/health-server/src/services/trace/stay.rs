//! Whether flows and clients keep their backends. Follows the programs' conditions, in order.

use std::net::SocketAddr;

use health_common::ct::IP_PROTOCOL_UDP;
use health_common::service::{FLOW_DIRECT, FLOW_RELAYED, Frontend};
use health_datapath::services::Connection;
use health_model::api::TracedStay;

use super::kernel::{ClientFacts, FlowFacts, SocketFacts, address};

/// A backend that is known before one is selected.
pub(super) struct Stay {
    /// Index of the backend in the map.
    pub(super) index: u32,
    pub(super) traced: TracedStay,
}

/// Whether a new flow between these ends goes to the backend of the last one.
pub(super) fn flow(flow: &Connection, facts: &FlowFacts) -> Stay {
    let FlowFacts {
        entry,
        is_serving,
        can_notify,
        has_answer,
        is_open,
        now,
    } = *facts;
    let unreported = "this node has no key to notify the backend's node of it";
    let (stays, reason) = if entry.flags & FLOW_RELAYED != 0 {
        // The entry of a relayed flow only covers flows sent to the backend itself.
        (
            false,
            "another node forwarded it to its backend here and chooses the backend",
        )
    } else if flow.is_tcp() {
        match (is_serving, has_answer, is_open) {
            (false, ..) => (
                false,
                "its backend no longer serves: the old connection stays there, a new one goes elsewhere",
            ),
            (true, ..) if !can_notify => (false, unreported),
            (true, false, _) => (false, "the return path from its backend is no longer known"),
            (true, true, Some(false)) => (false, "its connection is closed"),
            (true, true, Some(true)) => (true, "its connection is open"),
            (true, true, None) => (true, "its connection is not known to be closed"),
        }
    } else {
        match (now >= entry.expires, flow.protocol == IP_PROTOCOL_UDP) {
            (true, _) => (false, "it was idle for too long"),
            (false, true) if !is_serving => (false, "its backend no longer serves"),
            _ if !can_notify => (false, unreported),
            _ => (true, "it is still in use"),
        }
    };
    let reason = match entry.flags & FLOW_DIRECT != 0 {
        true => format!("{reason}; its backend answers the client directly"),
        false => reason.to_owned(),
    };
    stay(entry.backend, Some(entry.to), stays, reason)
}

/// Whether packets of a host socket go to the backend of earlier ones.
pub(super) fn socket(flow: &Connection, facts: &SocketFacts) -> Stay {
    let SocketFacts {
        to,
        backend,
        is_connected,
        is_serving,
    } = *facts;
    let (stays, reason) = match (is_connected, is_serving) {
        (true, _) if flow.is_tcp() => (true, "its socket is connected to it"),
        (true, true) => (true, "its socket is connected to it"),
        (true, false) => (
            false,
            "its backend no longer serves: the agent closes the socket",
        ),
        (false, true) => (true, "its socket keeps it while it serves"),
        (false, false) => (false, "its backend no longer serves"),
    };
    stay(backend, Some(to), stays, reason.to_owned())
}

/// Whether a client's next flow goes to the backend of its last one.
pub(super) fn client(frontend: &Frontend, facts: &ClientFacts) -> Stay {
    let ClientFacts {
        entry,
        backend,
        is_within_reach,
        now,
    } = facts;
    let secs = frontend.affinity_secs;
    let age = now.wrapping_sub(entry.last_used);
    let backend = backend.filter(|backend| backend.service == frontend.service);
    let gets_flows = backend.is_some_and(|backend| backend.gets_flows(frontend.service));
    let (stays, reason) = match (backend, gets_flows, entry.is_fresh(*now, secs)) {
        (None, ..) => (false, "its backend is gone".to_owned()),
        (Some(_), false, _) => (false, "its backend gets no new flows".to_owned()),
        (_, true, false) => (
            false,
            format!("its last flow started {age} s ago; the limit is {secs} s"),
        ),
        (_, true, true) if !is_within_reach => (
            false,
            "its backend is not on this node, as the traffic policy requires".to_owned(),
        ),
        (_, true, true) => (
            true,
            format!("its last flow started {age} s ago; the limit is {secs} s"),
        ),
    };
    stay(entry.backend, backend.as_ref().map(address), stays, reason)
}

fn stay(index: u32, backend: Option<SocketAddr>, stays: bool, reason: String) -> Stay {
    Stay {
        index,
        traced: TracedStay {
            backend,
            stays,
            reason,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use health_common::service::{Affinity, BACKEND_LINGERS, Backend, FLOW_FROM_OUTSIDE};
    use health_datapath::dump::ServiceFlow;
    use health_model::policy::Protocol;

    use super::*;

    fn connection(protocol: Protocol) -> Connection {
        Connection {
            protocol: protocol.0,
            source: "10.1.0.9:4000".parse().unwrap(),
            destination: "10.96.0.1:80".parse().unwrap(),
        }
    }

    const FACTS: FlowFacts = FlowFacts {
        entry: ServiceFlow {
            to: SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 0, 1)), 8080),
            backend: 4,
            service: 3,
            expires: 100,
            flags: 0,
            client_port: None,
        },
        is_serving: true,
        can_notify: true,
        has_answer: true,
        is_open: None,
        now: 99,
    };

    #[test]
    fn a_connection_keeps_its_backend_while_it_is_open_and_the_backend_serves() {
        let stays = |facts: FlowFacts| flow(&connection(Protocol::TCP), &facts).traced.stays;
        assert!(stays(FACTS));
        assert!(stays(FlowFacts {
            is_open: Some(true),
            ..FACTS
        }));
        // For a connection, the programs check no expiry time.
        assert!(stays(FlowFacts {
            now: 1_000,
            ..FACTS
        }));
        assert!(!stays(FlowFacts {
            is_open: Some(false),
            ..FACTS
        }));
        assert!(!stays(FlowFacts {
            is_serving: false,
            ..FACTS
        }));
        assert!(!stays(FlowFacts {
            has_answer: false,
            ..FACTS
        }));
    }

    #[test]
    fn the_answering_backend_is_reported() {
        let of = |flags| {
            let entry = ServiceFlow {
                flags,
                ..FACTS.entry
            };
            flow(&connection(Protocol::TCP), &FlowFacts { entry, ..FACTS }).traced
        };
        let direct = of(FLOW_FROM_OUTSIDE | FLOW_DIRECT);
        assert!(
            direct.stays
                && direct
                    .reason
                    .ends_with("; its backend answers the client directly")
        );
        let relayed = of(FLOW_FROM_OUTSIDE | FLOW_RELAYED);
        assert!(!relayed.stays && relayed.reason.starts_with("another node"));
    }

    #[test]
    fn a_flow_whose_backend_no_longer_learns_of_it_gets_another_one() {
        let facts = FlowFacts {
            can_notify: false,
            ..FACTS
        };
        for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
            let traced = flow(&connection(protocol), &facts).traced;
            assert!(!traced.stays && traced.reason.contains("no key"));
        }
    }

    #[test]
    fn other_flows_last_for_their_time_and_only_those_of_udp_need_a_backend_that_serves() {
        let stays = |protocol, facts: FlowFacts| flow(&connection(protocol), &facts).traced.stays;
        assert!(stays(Protocol::UDP, FACTS));
        assert!(!stays(Protocol::UDP, FlowFacts { now: 100, ..FACTS }));
        let gone = FlowFacts {
            is_serving: false,
            ..FACTS
        };
        assert!(!stays(Protocol::UDP, gone));
        assert!(stays(Protocol::SCTP, gone));
        assert_eq!(flow(&connection(Protocol::UDP), &FACTS).index, 4);
    }

    #[test]
    fn a_socket_keeps_its_backend_while_that_serves_and_a_connection_longer() {
        let stays = |protocol, is_connected, is_serving| {
            let facts = SocketFacts {
                to: FACTS.entry.to,
                backend: 4,
                is_connected,
                is_serving,
            };
            socket(&connection(protocol), &facts).traced.stays
        };
        assert!(stays(Protocol::TCP, true, true) && stays(Protocol::TCP, true, false));
        for is_connected in [true, false] {
            assert!(stays(Protocol::UDP, is_connected, true));
            assert!(!stays(Protocol::UDP, is_connected, false));
        }
    }

    #[test]
    fn a_client_stays_for_its_time_with_a_backend_that_gets_flows() {
        let frontend = Frontend {
            service: 3,
            affinity_secs: 60,
            ..Frontend::default()
        };
        let facts = |last_used, backend: Option<Backend>| ClientFacts {
            entry: Affinity {
                backend: 9,
                last_used,
            },
            backend,
            is_within_reach: true,
            now: 130,
        };
        let backend = Backend {
            addr: IpAddr::from([10, 1, 0, 1]).into(),
            port_be: 80_u16.to_be(),
            service: 3,
            ..Backend::default()
        };
        let traced = |facts| client(&frontend, &facts).traced;
        let well = traced(facts(100, Some(backend)));
        assert!(well.stays);
        assert_eq!(well.backend, Some("10.1.0.1:80".parse().unwrap()));
        assert_eq!(
            well.reason,
            "its last flow started 30 s ago; the limit is 60 s"
        );
        assert!(!traced(facts(70, Some(backend))).stays);
        let away = ClientFacts {
            is_within_reach: false,
            ..facts(100, Some(backend))
        };
        assert!(!traced(away).stays);
        let lingers = Backend {
            flags: BACKEND_LINGERS,
            ..backend
        };
        assert!(!traced(facts(100, Some(lingers))).stays);
        let of_another = Backend {
            service: 4,
            ..backend
        };
        for gone in [None, Some(of_another)] {
            let traced = traced(facts(100, gone));
            assert_eq!((traced.stays, traced.backend), (false, None));
        }
    }
}
