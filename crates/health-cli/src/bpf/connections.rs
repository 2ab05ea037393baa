//! Human-readable `HEALTH_PEERS` and `HEALTH_TCP` entries: TCP connections whose round trips are measured.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use health_api::rtt::path_name;
use health_common::addr::Addr;
use health_common::tcp::{Flow, FlowKey, Peer, TIMED_CLOCK, TIMED_SYN};
use serde::Serialize;

use super::entry::Entry;

/// Converts an entry of `HEALTH_PEERS` for display.
pub(super) fn peer((address, peer): (Addr, Peer)) -> Entry<IpAddr, PeerPath> {
    Entry {
        key: address.to_ip(),
        value: PeerPath {
            path: path_name(peer.path),
        },
    }
}

/// Converts an entry of `HEALTH_TCP` for display.
pub(super) fn connection((key, flow): (FlowKey, Flow)) -> Entry<Connection, Timing> {
    Entry {
        key: Connection {
            local: SocketAddr::new(key.local.to_ip(), u16::from_be(key.local_port_be)),
            peer: SocketAddr::new(key.peer.to_ip(), u16::from_be(key.peer_port_be)),
        },
        value: Timing {
            // Connections of HTTP probes have no path.
            path: (flow.path != 0).then(|| path_name(flow.path)),
            timed_ns: flow.timed_ns,
            pause_ns: flow.pause_ns,
            handshake_ns: flow.handshake_ns,
            sent_end: flow.sent_end,
            timed_sequence: flow.timed_sequence,
            timed_clock: flow.timed_clock,
            is_syn: flow.timed_flags & TIMED_SYN != 0,
            has_timestamps: flow.timed_flags & TIMED_CLOCK != 0,
        },
    }
}

/// The path to a peer whose connections are measured.
#[derive(Debug, Serialize)]
pub(super) struct PeerPath {
    path: &'static str,
}

impl fmt::Display for PeerPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "path={}", self.path)
    }
}

/// The key: a connection.
#[derive(Debug, Serialize)]
pub(super) struct Connection {
    local: SocketAddr,
    peer: SocketAddr,
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "local={} peer={}", self.local, self.peer)
    }
}

/// The connection's measurements. Times are in `CLOCK_MONOTONIC`, 0 for none.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Timing {
    /// `null` for the connection of an HTTP probe.
    path: Option<&'static str>,
    timed_ns: u64,
    pause_ns: u64,
    handshake_ns: u64,
    sent_end: u32,
    timed_sequence: u32,
    timed_clock: u32,
    is_syn: bool,
    has_timestamps: bool,
}

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "path={} timed_ns={} pause_ns={} handshake_ns={} sent_end={} timed_sequence={} \
             timed_clock={} is_syn={} has_timestamps={}",
            self.path.unwrap_or("probe"),
            self.timed_ns,
            self.pause_ns,
            self.handshake_ns,
            self.sent_end,
            self.timed_sequence,
            self.timed_clock,
            self.is_syn,
            self.has_timestamps
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bpf::entry::lines;

    fn addr(text: &str) -> Addr {
        text.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn peers_are_shown_with_their_path() {
        let value = Peer {
            path: 2,
            pad: [0; 3],
        };
        let entry = peer((addr("10.244.2.7"), value));
        assert_eq!(
            serde_json::to_string(&entry).unwrap(),
            r#"{"key":"10.244.2.7","value":{"path":"endpoint"}}"#
        );
        assert_eq!(lines(&[entry]), "10.244.2.7: path=endpoint\n");
    }

    #[test]
    fn connections_are_shown_with_what_is_timed_of_them() {
        let key = FlowKey {
            peer: addr("fd00:30::2"),
            local: addr("fd00:30::1"),
            peer_port_be: 443_u16.to_be(),
            local_port_be: 40_000_u16.to_be(),
        };
        let flow = Flow {
            timed_ns: 5,
            pause_ns: 6,
            handshake_ns: 7,
            sent_end: 100,
            timed_sequence: 99,
            timed_clock: 1,
            timed_flags: TIMED_SYN,
            path: 0,
            pad: 0,
        };
        let entry = connection((key, flow));
        let json = serde_json::to_value(&entry).unwrap();
        assert_eq!(json["key"]["peer"], "[fd00:30::2]:443");
        assert_eq!(json["value"]["path"], serde_json::Value::Null);
        assert_eq!(
            lines(&[entry]),
            "local=[fd00:30::1]:40000 peer=[fd00:30::2]:443: path=probe timed_ns=5 pause_ns=6 \
             handshake_ns=7 sent_end=100 timed_sequence=99 timed_clock=1 is_syn=true \
             has_timestamps=false\n"
        );
    }
}
