//! Users of a service who never stop.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, ensure};
use tests::served::{Connection, Datagrams, curl};
use tests::{Member, PATIENCE, wait_for};

/// Requests of one curl.
const REQUESTS: usize = 20;
/// Requests on a connection that is closed then.
const KEPT_ALIVE: usize = 50;

/// What users of a service do until it is over.
#[derive(Default)]
pub(super) struct Load {
    is_over: AtomicBool,
    /// Requests that were answered.
    done: AtomicUsize,
}

impl Load {
    /// Lets users work while something is done, one of `uses` for each client and target; fails if a request does. Returns
    /// how many were answered.
    pub(super) fn while_doing(
        clients: &[Member],
        targets: &[SocketAddr],
        uses: &[fn(&Self, &str, SocketAddr) -> anyhow::Result<()>],
        work: impl FnOnce(&Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<usize> {
        let load = Self::default();
        thread::scope(|scope| {
            let mut users = Vec::new();
            for (client, target) in clients.iter().zip(targets) {
                for used in uses {
                    let load = &load;
                    users.push(scope.spawn(move || used(load, &client.name, *target)));
                }
            }
            let worked = work(&load);
            load.is_over.store(true, Ordering::Relaxed);
            let used: anyhow::Result<Vec<()>> = users
                .into_iter()
                .map(|user| user.join().expect("no panic"))
                .collect();
            used.and(worked)
        })?;
        Ok(load.done.into_inner())
    }

    /// Waits until users had some answers more.
    pub(super) fn wait_answered(&self) -> anyhow::Result<()> {
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
    pub(super) fn connect(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
        self.until_over(|| {
            let answers = curl(from, target, REQUESTS)?;
            ensure!(answers.failed.is_empty(), "{from} to {target}: {answers}");
            Ok(REQUESTS)
        })
    }

    /// On connections that are used for a while, each with one backend.
    pub(super) fn keep_alive(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
        self.until_over(|| {
            let mut connection = Connection::open(from, target)?;
            let first = connection.ask()?;
            for _ in 1..KEPT_ALIVE {
                let answer = connection.ask()?;
                ensure!(answer == first, "{answer:?}, before {first:?}");
            }
            Ok(KEPT_ALIVE)
        })
    }

    /// On an open connection, and on a flow of UDP, with the same backends all the time.
    pub(super) fn stay(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
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
