//! Agents that end and start again while services are used.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use tests::served::{Connection, Datagrams, curl};
use tests::upgrade::with_other_programs;
use tests::{PATIENCE, wait_for};

use super::{Stand, targets, wait_answered_by};

/// Requests of one curl.
const REQUESTS: usize = 20;

/// What users of a service do until it is over.
struct Load<'a> {
    is_over: &'a AtomicBool,
    /// Requests that were answered.
    done: AtomicUsize,
}

impl Load<'_> {
    fn until_over(&self, mut work: impl FnMut() -> anyhow::Result<usize>) -> anyhow::Result<()> {
        while !self.is_over.load(Ordering::Relaxed) {
            self.done.fetch_add(work()?, Ordering::Relaxed);
        }
        Ok(())
    }

    /// On new connections.
    fn connect(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
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
fn no_request_fails_while_agents_are_killed_restarted_and_upgraded() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let folder = tempfile::tempdir()?;
    let other = folder.path().join("health-agent");
    with_other_programs(&other)?;
    let service = stand.service("busy", 1);
    stand.write(&service)?;
    let targets = targets(&service);
    for client in &stand.clients {
        for target in &targets {
            wait_answered_by(&client.name, *target, &["web-1", "web-2", "web-3"])?;
        }
    }
    let is_over = AtomicBool::new(false);
    let load = Load {
        is_over: &is_over,
        done: AtomicUsize::new(0),
    };
    thread::scope(|scope| {
        let mut users = Vec::new();
        for (client, target) in stand.clients.iter().zip(&targets) {
            let load = &load;
            users.push(scope.spawn(move || load.connect(&client.name, *target)));
            users.push(scope.spawn(move || load.stay(&client.name, *target)));
        }
        // Whatever happens, there is load in between.
        let answered = || -> anyhow::Result<()> {
            let before = load.done.load(Ordering::Relaxed);
            wait_for("requests to be answered", PATIENCE, || {
                let done = load.done.load(Ordering::Relaxed);
                Ok((done >= before + 4 * REQUESTS).then_some(()))
            })
        };
        let disturb = || -> anyhow::Result<()> {
            for (signal, binary) in [
                (Signal::SIGKILL, None),
                (Signal::SIGTERM, Some(other.as_path())),
                (Signal::SIGKILL, None),
            ] {
                for node in stand.bed.nodes() {
                    node.kill_agent(signal)?;
                    answered().with_context(|| format!("without {}", node.name()))?;
                    node.take_over(binary)?;
                    answered().with_context(|| format!("{} is back", node.name()))?;
                }
            }
            Ok(())
        };
        let disturbed = disturb();
        is_over.store(true, Ordering::Relaxed);
        let used: anyhow::Result<Vec<()>> = users
            .into_iter()
            .map(|user| user.join().expect("no panic"))
            .collect();
        used.and(disturbed)
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
    Ok(())
}
