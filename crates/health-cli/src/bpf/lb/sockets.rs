//! `bpf lb list --sockets`: the destinations of the host's own sockets.

use std::fmt;
use std::net::SocketAddr;

use health_common::addr::Addr;
use health_common::ct::TUPLE_IN;
use health_common::service::socket::{SocketFlow, SocketKey};
use health_datapath::dump::Pinned;
use health_model::flow::IpProtocol;
use serde::Serialize;

use super::selection::Selection;
use super::translation::Translation;
use crate::bpf::entry::{Entry, Row};
use crate::bpf::flow::Direction;
use crate::bpf::stream;
use crate::output::Format;

/// A socket and the peer that it sends to or receives from.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::bpf) struct SocketRowKey {
    protocol: IpProtocol,
    direction: Direction,
    cookie: u64,
    /// `null` for the peer that the socket is connected to.
    peer: Option<SocketAddr>,
}

impl fmt::Display for SocketRowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.direction {
            Direction::Out => "->",
            Direction::In => "<-",
        };
        write!(
            f,
            "{} {} socket={} {way} ",
            self.protocol, self.direction, self.cookie
        )?;
        match self.peer {
            Some(peer) => write!(f, "{peer}"),
            None => f.write_str("connected"),
        }
    }
}

pub(super) fn print(pinned: &Pinned, selection: &Selection, format: Format) -> anyhow::Result<()> {
    let rows = [pinned.socket_rows()?];
    stream::print(format, &rows, |row| {
        selection.has(row.1.service).then(|| Row::from(entry(row)))
    })
}

/// Converts an entry for display.
pub(in crate::bpf) fn entry(
    (key, flow): (SocketKey, SocketFlow),
) -> Entry<SocketRowKey, Translation> {
    let end = |addr: Addr, port_be| SocketAddr::new(addr.to_ip(), u16::from_be(port_be));
    let direction = if key.direction == TUPLE_IN {
        Direction::In
    } else {
        Direction::Out
    };
    Entry {
        key: SocketRowKey {
            protocol: IpProtocol(key.protocol),
            direction,
            cookie: key.cookie,
            peer: (!key.is_connected()).then(|| end(key.addr, key.port_be)),
        },
        value: Translation {
            direction,
            to: end(flow.addr, flow.port_be),
            backend: flow.backend,
            service: flow.service,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn sockets_are_shown_with_what_they_send_to_and_hear_from() {
        let addr = |text: &str| Addr::from(text.parse::<IpAddr>().unwrap());
        let connected = SocketKey::connected(77, 6);
        let flow = |text: &str, port: u16| SocketFlow {
            addr: addr(text),
            port_be: port.to_be(),
            backend: 4,
            service: 3,
            ..SocketFlow::default()
        };
        assert_eq!(
            Row::from(entry((connected, flow("10.1.0.1", 8080)))).to_string(),
            "TCP OUT socket=77 -> connected XLATE_DST 10.1.0.1:8080 backend=4 service=3"
        );
        let answers = SocketKey::connected(78, 17).answers(addr("fd00:1::1"), 53_u16.to_be());
        assert_eq!(
            Row::from(entry((answers, flow("fd00:96::1", 53)))).to_string(),
            "UDP IN socket=78 <- [fd00:1::1]:53 XLATE_SRC [fd00:96::1]:53 backend=4 service=3"
        );
    }
}
