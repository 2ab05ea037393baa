//! Plain HTTP, asked from within a node's network namespace.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use anyhow::Context as _;

use crate::{Node, PATIENCE};

/// Where agents serve their metrics unless told otherwise.
pub const METRICS_PORT: u16 = 9962;

/// Status code and body of `GET path`.
pub fn get(node: &Node, address: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let (code, _, body) = get_as(node, address, path, "*/*")?;
    Ok((code, body))
}

/// Status code, media type and body of `GET path`, with this wish for a media type.
pub fn get_as(
    node: &Node,
    address: SocketAddr,
    path: &str,
    accept: &str,
) -> anyhow::Result<(u16, String, String)> {
    // In HTTP/1.0 there are no chunks to put together.
    let response = node.run_in(|| -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(
            stream,
            "GET {path} HTTP/1.0\r\nHost: node\r\nAccept: {accept}\r\n\r\n"
        )?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    })??;
    let (head, body) = response.split_once("\r\n\r\n").context("no HTTP")?;
    let code = head.split(' ').nth(1).context("no status line")?.parse()?;
    let header = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-type").then_some(value)
    });
    Ok((code, header.unwrap_or_default().to_owned(), body.to_owned()))
}
