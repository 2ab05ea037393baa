//! Agents that end and start again while services are used.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use tests::served::{Connection, Datagrams, curl, curl_soon};
use tests::{PATIENCE, wait_for};

use super::{Stand, targets, wait_answered_by};

/// Requests of one curl.
const REQUESTS: usize = 20;

/// What users of a service do until it is over.
#[derive(Debug, Default)]
pub(crate) struct Load {
    is_over: AtomicBool,
    /// Requests that were answered.
    done: AtomicUsize,
}

/// What a client does at an address.
type Use = fn(&Load, &str, SocketAddr) -> anyhow::Result<()>;

impl Load {
    /// Has clients do something until `work` is done. None of their requests may fail.
    pub(crate) fn during<T>(
        &self,
        users: &[(Use, &str, SocketAddr)],
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        thread::scope(|scope| {
            let users = users.iter();
            let users: Vec<_> = users
                .map(|(use_it, from, target)| scope.spawn(move || use_it(self, from, *target)))
                .collect();
            let done = work();
            self.is_over.store(true, Ordering::Relaxed);
            let users = users.into_iter();
            let used: anyhow::Result<Vec<()>> =
                users.map(|user| user.join().expect("no panic")).collect();
            used.and(done)
        })
    }

    /// Waits until requests were answered from now on.
    pub(crate) fn goes_on(&self) -> anyhow::Result<()> {
        let before = self.done.load(Ordering::Relaxed);
        wait_for("requests to be answered", PATIENCE, || {
            let done = self.done.load(Ordering::Relaxed);
            Ok((done >= before + 4 * REQUESTS).then_some(()))
        })
    }

    fn until_over(&self, mut work: impl FnMut() -> anyhow::Result<usize>) -> anyhow::Result<()> {
        while !self.is_over.load(Ordering::Relaxed) {
            self.done.fetch_add(work()?, Ordering::Relaxed);
        }
        Ok(())
    }

    /// On new connections.
    pub(crate) fn connect(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
        self.until_over(|| {
            let answers = curl(from, target, REQUESTS)?;
            ensure!(answers.failed.is_empty(), "{from} to {target}: {answers}");
            Ok(REQUESTS)
        })
    }

    /// On an open connection, and on a flow of UDP, with the same backends all the time.
    fn stay(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
        let mut connection = Connection::open(from, target)?;
        let mut flow = Datagrams::open(from, target)?;
        let mut ask = || -> anyhow::Result<_> {
            let answer = flow.ask(PATIENCE)?.context("a datagram was lost")?;
            Ok([connection.ask()?.backend, answer.backend])
        };
        let first = ask()?;
        self.until_over(|| {
            let backends = ask()?;
            ensure!(backends == first, "{backends:?}, before {first:?}");
            Ok(backends.len())
        })
    }
}

#[test]
#[ignore = "needs root"]
fn no_request_fails_while_agents_are_killed_and_started_again() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let service = stand.service("busy", 1);
    stand.write(&service)?;
    let targets = targets(&service);
    for client in &stand.clients {
        for target in &targets {
            wait_answered_by(&client.name, *target, &["web-1", "web-2", "web-3"])?;
        }
    }
    let load = Load::default();
    let mut users: Vec<(Use, &str, SocketAddr)> = Vec::new();
    for (client, target) in stand.clients.iter().zip(&targets) {
        users.push((Load::connect, &client.name, *target));
        users.push((Load::stay, &client.name, *target));
    }
    load.during(&users, || {
        for signal in [Signal::SIGKILL, Signal::SIGTERM] {
            for node in stand.bed.nodes() {
                node.kill_agent(signal)?;
                load.goes_on()
                    .with_context(|| format!("without {}", node.name()))?;
                node.take_over(None)?;
                load.goes_on()
                    .with_context(|| format!("{} is back", node.name()))?;
            }
        }
        Ok(())
    })?;
    println!("{} requests", load.done.load(Ordering::Relaxed));

    // What is said to the new agents is done.
    let mut fewer = service;
    fewer.endpoints[0].set_ready(false);
    stand.write(&fewer)?;
    for client in &stand.clients {
        for target in &targets {
            wait_answered_by(&client.name, *target, &["web-2", "web-3"])?;
        }
    }

    // Without an agent, all services go at once, and who is connected stays so.
    let client = &stand.clients[0];
    let node = stand.node_of(client);
    let mut connection = Connection::open(&client.name, targets[0])?;
    let backend = connection.ask()?.backend;
    let refused = node.cli("cleanup --services ebpf")?;
    ensure!(refused.code == Some(1), "an agent runs");
    node.kill_agent(Signal::SIGTERM)?;
    let removed = node.cli("cleanup --services all")?.success()?;
    ensure!(
        removed.contains("removed frontends of services (4)\n")
            && removed.contains("removed backends of services ("),
        "{removed}"
    );
    let again = node.cli("cleanup --services all -o json")?.success()?;
    ensure!(again.trim() == "[]", "{again}");
    let answers = curl_soon(&client.name, targets[0], 1)?;
    ensure!(answers.backends.is_empty(), "{answers}");
    ensure!(connection.ask()?.backend == backend);
    node.take_over(None)?;
    wait_answered_by(&client.name, targets[0], &["web-2", "web-3"])?;
    ensure!(connection.ask()?.backend == backend);
    Ok(())
}
