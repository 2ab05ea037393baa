//! The host's own sockets that are connected to backends.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use health_common::ct::IP_PROTOCOL_UDP;
use health_common::service::socket::{SocketFlow, SocketKey};
use health_common::service::{Backend, Frontend, FrontendKey4, FrontendKey6};

use super::keys::{FrontendKey, socket_addr};
use crate::error::DatapathError;
use crate::layout;
use crate::maps::map_data;
use crate::table::Table;

/// The maps that record the peers of such sockets.
#[derive(Debug)]
pub struct SocketTable {
    sockets: Table<SocketKey, SocketFlow>,
    backends: Table<u32, Backend>,
    frontends4: Table<FrontendKey4, Frontend>,
    frontends6: Table<FrontendKey6, Frontend>,
}

/// A connected UDP socket whose datagrams reach no backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StuckSocket {
    /// The socket's id in the kernel (`SO_COOKIE`).
    pub cookie: u64,
    /// The backend that it was connected to.
    pub backend: SocketAddr,
}

impl SocketTable {
    /// Opens the maps pinned in an instance's folder.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        Ok(Self {
            sockets: Table::new(map_data(pins, &layout::SOCKETS)?),
            backends: Table::new(map_data(pins, &layout::BACKENDS)?),
            frontends4: Table::new(map_data(pins, &layout::SVC4)?),
            frontends6: Table::new(map_data(pins, &layout::SVC6)?),
        })
    }

    /// Returns the connected UDP sockets whose backend no longer serves, or whose frontend is gone. These sockets may
    /// be connected elsewhere by now.
    pub fn stuck(&self) -> io::Result<Vec<StuckSocket>> {
        let mut connected = Vec::new();
        self.sockets.for_each(|key, flow| {
            if key.is_connected() && key.protocol == IP_PROTOCOL_UDP {
                connected.push((key, flow));
            }
        })?;
        let mut stuck = Vec::new();
        for (key, flow) in connected {
            if !self.is_serving(&flow)? || !self.has_frontend(&key, &flow)? {
                stuck.push(StuckSocket {
                    cookie: key.cookie,
                    backend: socket_addr((flow.addr, flow.port_be)),
                });
            }
        }
        Ok(stuck)
    }

    fn is_serving(&self, flow: &SocketFlow) -> io::Result<bool> {
        let backend = self.backends.get(&flow.backend)?;
        Ok(backend.is_some_and(|backend| {
            backend.service == flow.service
                && (backend.addr, backend.port_be) == (flow.addr, flow.port_be)
        }))
    }

    /// Whether the frontend to which a socket was connected still belongs to the service. Also `true` if the frontend
    /// is unknown.
    fn has_frontend(&self, key: &SocketKey, flow: &SocketFlow) -> io::Result<bool> {
        let answers = key.answers(flow.addr, flow.port_be);
        let Some(named) = self.sockets.get(&answers)? else {
            return Ok(true);
        };
        let key = FrontendKey {
            addr: named.addr,
            port_be: named.port_be,
            protocol: key.protocol,
        };
        let frontend = match (key.key4(), key.key6()) {
            (Some(key), _) => self.frontends4.get(&key)?,
            (_, Some(key)) => self.frontends6.get(&key)?,
            _ => None,
        };
        Ok(frontend.is_some_and(|frontend| frontend.service == flow.service))
    }
}
