//! An agent's `/healthz`, which reports on the agent itself.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use health_server::liveness::Liveness;

use crate::{Node, http};

/// Default port of `/healthz`.
pub const HEALTHZ_PORT: u16 = 9879;

/// Returns the status code and the parsed body of `/healthz`.
pub fn liveness(node: &Node) -> anyhow::Result<(u16, Liveness)> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, HEALTHZ_PORT));
    let (code, body) = http::get(node, address, "/healthz")?;
    let liveness = serde_json::from_str(&body).with_context(|| body.clone())?;
    Ok((code, liveness))
}
