//! The new destination or source of the packets of a flow or socket.

use std::fmt;
use std::net::SocketAddr;

use serde::Serialize;

use crate::bpf::flow::Direction;

/// The new destination or source, and its owner.
#[derive(Debug, Serialize)]
pub(in crate::bpf) struct Translation {
    // Already in the key.
    #[serde(skip)]
    pub(super) direction: Direction,
    pub(super) to: SocketAddr,
    /// Index of the backend.
    pub(super) backend: u32,
    /// Number of the service's port.
    pub(super) service: u32,
}

impl fmt::Display for Translation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rewritten = match self.direction {
            Direction::Out => "XLATE_DST",
            Direction::In => "XLATE_SRC",
        };
        let Self {
            to,
            backend,
            service,
            ..
        } = self;
        write!(f, "{rewritten} {to} backend={backend} service={service}")
    }
}
