//! `service trace` predicts correctly what happens afterwards.

mod endpoint;
mod host;
mod outside;

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tests::{Member, Node, PATIENCE, wait_for};

use super::{Row, Stand};

pub(super) use endpoint::ROWS as ENDPOINT_ROWS;
pub(super) use host::ROWS as HOST_ROWS;
pub(super) use outside::ROWS as OUTSIDE_ROWS;

/// The output and exit code of a trace.
struct Trace {
    code: i32,
    reported: Value,
}

impl Trace {
    fn run(node: &Node, source: &str, destination: &str, more: &str) -> anyhow::Result<Self> {
        let words = format!("service trace {source} {destination} {more} -o json");
        let ran = node.cli(&words)?;
        let reported = serde_json::from_str(&ran.stdout);
        Ok(Self {
            reported: reported.with_context(|| format!("{words}: {}", ran.stderr))?,
            code: ran.code.context("a signal")?,
        })
    }

    /// Whether the flow is known and keeps its backend.
    fn stays(&self) -> bool {
        self.reported["flow"]["stays"] == true
    }

    fn backends(&self) -> Vec<&Value> {
        let backends = self.reported["backends"].as_array();
        backends.into_iter().flatten().collect()
    }

    /// The addresses of the predicted backends.
    fn addresses(&self) -> BTreeSet<&str> {
        let backends = self.backends().into_iter();
        backends.filter_map(|one| one["address"].as_str()).collect()
    }

    fn verdict(&self) -> &str {
        self.reported["verdict"].as_str().unwrap_or_default()
    }

    fn answer(&self) -> &str {
        self.reported["answer"].as_str().unwrap_or_default()
    }
}

/// Waits until a trace has this verdict, and checks that it reports no difference between intended and actual state.
fn wait_traced(
    node: &Node,
    [source, destination, more]: [&str; 3],
    verdict: &str,
) -> anyhow::Result<Trace> {
    let traced = wait_for("a trace to say so", PATIENCE, || {
        // A service is unknown until its file has been read.
        let trace = Trace::run(node, source, destination, more)?;
        ensure!(trace.verdict() == verdict, "{}", trace.reported);
        ensure!(
            trace.reported["differences"] == json!([]),
            "{}",
            trace.reported
        );
        Ok(Some(trace))
    });
    let trace = traced.with_context(|| format!("{source} to {destination}: {verdict}"))?;
    let code = match verdict {
        "reached" | "partly" => 0,
        _ => 3,
    };
    ensure!(
        trace.code == code,
        "ended with {}: {}",
        trace.code,
        trace.reported
    );
    Ok(trace)
}

/// Addresses of the backends with these names, in the target's address family.
fn of_names(stand: &Stand, names: &[&str], target: SocketAddr) -> anyhow::Result<BTreeSet<String>> {
    let mut addresses = BTreeSet::new();
    for name in names {
        let mut own = stand.backend(name)?.addresses().into_iter();
        let own = own.find(|address| address.is_ipv4() == target.is_ipv4());
        addresses.insert(own.context("no such address")?.to_string());
    }
    Ok(addresses)
}

/// The source address of a client's packets to a target.
fn address_of(client: &Member, target: SocketAddr) -> anyhow::Result<String> {
    let mut own = client.addresses().into_iter();
    let own = own.find(|address| address.is_ipv4() == target.is_ipv4());
    Ok(own.context("no such address")?.to_string())
}

/// A client's address and the port of its socket.
fn with_port(client: &Member, socket: SocketAddr) -> anyhow::Result<String> {
    let ip = address_of(client, socket)?;
    Ok(SocketAddr::new(ip.parse()?, socket.port()).to_string())
}

/// Checks that policy refuses a client's flow to these backends: either its own egress rules, or the ingress rules of
/// backends on its node.
pub(super) fn is_refused(
    node: &Node,
    client: &Member,
    target: SocketAddr,
    [verdict, side]: [&str; 2],
) -> anyhow::Result<()> {
    let id = client.endpoint.id.to_string();
    let trace = wait_traced(node, [&id, &target.to_string(), ""], verdict)?;
    let refused = trace.backends().into_iter();
    let refused = refused.filter(|backend| backend[side]["allowed"] == false);
    ensure!(refused.count() > 0, "{}", trace.reported);
    ensure!(
        trace.answer().contains("no rule allows it"),
        "{}",
        trace.answer()
    );
    Ok(())
}

/// Checks that a rule admits a client's flow, and that the trace names the rule.
pub(super) fn is_admitted(
    node: &Node,
    client: &Member,
    target: SocketAddr,
    rule: &str,
) -> anyhow::Result<()> {
    let id = client.endpoint.id.to_string();
    let trace = wait_traced(node, [&id, &target.to_string(), ""], "reached")?;
    ensure!(trace.answer().contains(rule), "{}", trace.reported);
    Ok(())
}
