//! An agent's `/healthz`, `/livez` and `/readyz`, which report on the agent itself.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use health_server::liveness::Liveness;

use crate::{Node, http};

/// Default port of `/healthz`.
pub const HEALTHZ_PORT: u16 = 9879;

/// Returns the status code and the body of one of the agent's own pages, such as `/readyz`.
pub fn page(node: &Node, path: &str) -> anyhow::Result<(u16, String)> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, HEALTHZ_PORT));
    http::get(node, address, path)
}

/// Returns the status code and the parsed body of `/healthz`.
pub fn liveness(node: &Node) -> anyhow::Result<(u16, Liveness)> {
    let (code, body) = page(node, "/healthz")?;
    let liveness = serde_json::from_str(&body).with_context(|| body.clone())?;
    Ok((code, liveness))
}
