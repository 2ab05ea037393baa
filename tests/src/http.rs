//! Plain HTTP requests, from within a node's network namespace or to its agent's API.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::de::DeserializeOwned;

use crate::{Node, PATIENCE};

/// Default port of the agents' metrics endpoint.
pub const METRICS_PORT: u16 = 9962;

/// Read timeout for an agent's response, the same as in its own command line.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends `GET path` and returns the status code and the body.
pub fn get(node: &Node, address: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let (code, _, body) = get_as(node, address, path, "*/*")?;
    Ok((code, body))
}

/// Sends `GET path` with this `Accept` header and returns the status code, the media type and the body.
pub fn get_as(
    node: &Node,
    address: SocketAddr,
    path: &str,
    accept: &str,
) -> anyhow::Result<(u16, String, String)> {
    let response = node.run_in(|| -> io::Result<String> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        exchange(stream, path, accept)
    })??;
    split(&response)
}

/// Queries an API path of a node's agent. Takes a tenth of the time that running the command-line client takes.
pub fn of_agent<T: DeserializeOwned>(node: &Node, path: &str) -> anyhow::Result<T> {
    let reported = || -> anyhow::Result<T> {
        let stream = UnixStream::connect(node.socket())?;
        stream.set_read_timeout(Some(AGENT_TIMEOUT))?;
        let response = exchange(stream, path, "*/*")?;
        let (code, _, body) = split(&response)?;
        ensure!(code == 200, "{code}: {body}");
        Ok(serde_json::from_str(&body)?)
    };
    reported().with_context(|| format!("{path} of {}", node.name()))
}

/// Sends `GET path` and returns the whole response.
fn exchange(mut stream: impl Read + Write, path: &str, accept: &str) -> io::Result<String> {
    // HTTP/1.0 has no chunked encoding, so there is nothing to reassemble.
    write!(
        stream,
        "GET {path} HTTP/1.0\r\nHost: node\r\nAccept: {accept}\r\n\r\n"
    )?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    Ok(response)
}

/// Splits a response into status code, media type and body.
fn split(response: &str) -> anyhow::Result<(u16, String, String)> {
    let (head, body) = response
        .split_once("\r\n\r\n")
        .context("the answer is not HTTP")?;
    let code = head.split(' ').nth(1).context("no status line")?.parse()?;
    let header = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-type").then_some(value)
    });
    Ok((code, header.unwrap_or_default().to_owned(), body.to_owned()))
}
