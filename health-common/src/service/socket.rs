//! `HEALTH_SOCKETS`: what the host's own sockets were sent to instead of a service.

use crate::addr::Addr;
use crate::ct::{TUPLE_IN, TUPLE_OUT};

/// Entries of `HEALTH_SOCKETS`. A connected socket has two, an unconnected one two for each frontend.
pub const SOCKET_ENTRIES: u32 = 65_536;

/// The other end of a socket; without address and port, whatever it is connected to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SocketKey {
    /// The kernel's number of the socket (`SO_COOKIE`), never given to another one.
    pub cookie: u64,
    /// Of the frontend with [`crate::ct::TUPLE_OUT`], of the backend with [`crate::ct::TUPLE_IN`].
    pub addr: Addr,
    /// Its port.
    pub port_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// [`crate::ct::TUPLE_OUT`] for what the socket sends, [`crate::ct::TUPLE_IN`] for whose answers it reads.
    pub direction: u8,
    /// Explicit padding, zero.
    pub pad: u32,
}

/// What stands for the other end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketFlow {
    /// Of the backend with [`crate::ct::TUPLE_OUT`], of the frontend with [`crate::ct::TUPLE_IN`].
    pub addr: Addr,
    /// Its port.
    pub port_be: u16,
    /// Explicit padding, zero.
    pub pad: u16,
    /// Index of the backend in `HEALTH_BACKENDS`, where another may stand by now.
    pub backend: u32,
    /// Number of the service's port.
    pub service: u32,
}

impl SocketKey {
    /// Of what a socket is connected to.
    #[inline(always)]
    pub const fn connected(cookie: u64, protocol: u8) -> Self {
        Self {
            cookie,
            addr: Addr { words_be: [0; 4] },
            port_be: 0,
            protocol,
            direction: TUPLE_OUT,
            pad: 0,
        }
    }

    /// Whether it is such a key.
    #[inline(always)]
    pub const fn is_connected(&self) -> bool {
        self.port_be == 0
    }

    /// Of what the socket's other end answers.
    #[inline(always)]
    pub const fn answers(&self, addr: Addr, port_be: u16) -> Self {
        Self {
            addr,
            port_be,
            direction: TUPLE_IN,
            ..*self
        }
    }
}

crate::map_types!(SocketKey = 32, SocketFlow = 28);
