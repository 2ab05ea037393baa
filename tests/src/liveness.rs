//! What an agent's `/healthz` says of the agent itself.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use health_agent::api::liveness::Liveness;

use crate::{Node, http};

/// Where agents serve it, unless told otherwise.
pub const HEALTHZ_PORT: u16 = 9879;

/// What `/healthz` says, and its status code.
pub fn liveness(node: &Node) -> anyhow::Result<(u16, Liveness)> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, HEALTHZ_PORT));
    let (code, body) = http::get(node, address, "/healthz")?;
    let liveness = serde_json::from_str(&body).with_context(|| body.clone())?;
    Ok((code, liveness))
}
