//! Continuous load on a service.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tests::served::{Connection, Datagrams};
use tests::{Member, PATIENCE, wait_for};

/// Requests that must be answered before a step ends.
const REQUESTS: usize = 80;
/// Number of requests on each kept-alive connection before it is closed.
const KEPT_ALIVE: usize = 50;
/// Pause between a user's requests, without which clients and servers would starve the agents of CPU time.
const PAUSE: Duration = Duration::from_millis(20);

/// The load that users put on a service until it is over.
#[derive(Debug, Default)]
pub(crate) struct Load {
    is_over: AtomicBool,
    /// Number of answered requests.
    done: AtomicUsize,
    /// The current step, and when it started.
    step: Mutex<Option<(String, Instant)>>,
}

/// Stops all users, even after a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How one client uses one address.
pub(crate) type Use = fn(&Load, &str, SocketAddr) -> anyhow::Result<()>;

impl Load {
    /// Runs the users until `work` is done. None of their requests may fail.
    pub(crate) fn during<T>(
        &self,
        users: &[(Use, &str, SocketAddr)],
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let done = thread::scope(|scope| {
            let users = users.iter();
            let users: Vec<_> = users
                .map(|(use_it, from, target)| {
                    scope.spawn(move || {
                        let _over = Over(&self.is_over);
                        use_it(self, from, *target).with_context(|| self.moment())
                    })
                })
                .collect();
            let over = Over(&self.is_over);
            let done = work();
            drop(over);
            let users = users.into_iter();
            let used: anyhow::Result<Vec<()>> =
                users.map(|user| user.join().expect("no panic")).collect();
            used.and(done)
        })?;
        println!("{} requests", self.done.load(Ordering::Relaxed));
        Ok(done)
    }

    /// Names the next step, and waits until enough further requests are answered.
    pub(crate) fn goes_on(&self, step: String) -> anyhow::Result<()> {
        let before = self.done.load(Ordering::Relaxed);
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = Some((step, Instant::now()));
        wait_for("requests to be answered", PATIENCE, || {
            ensure!(!self.is_over.load(Ordering::Relaxed), "a request failed");
            let done = self.done.load(Ordering::Relaxed);
            Ok((done >= before + REQUESTS).then_some(()))
        })
        .with_context(|| self.moment())
    }

    fn moment(&self) -> String {
        let step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        step.as_ref().map_or_else(
            || "before the first step".to_owned(),
            |(step, since)| format!("{:.1?} after: {step}", since.elapsed()),
        )
    }

    fn until_over(&self, mut work: impl FnMut() -> anyhow::Result<usize>) -> anyhow::Result<()> {
        while !self.is_over.load(Ordering::Relaxed) {
            self.done.fetch_add(work()?, Ordering::Relaxed);
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Uses a new connection for each request, which the server closes.
    pub(crate) fn connect(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
        self.until_over(|| {
            let answer = Connection::open(from, target).and_then(Connection::ask_last);
            answer.with_context(|| format!("{from} to {target}"))?;
            Ok(1)
        })
    }

    /// Uses connections for several requests each, all answered by the same backend.
    pub(crate) fn keep_alive(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
        self.until_over(|| {
            let mut connection = Connection::open(from, target)?;
            let first = connection.ask()?;
            for _ in 1..KEPT_ALIVE {
                thread::sleep(PAUSE);
                let answer = connection.ask()?;
                ensure!(answer == first, "{answer:?}, before {first:?}");
            }
            Ok(KEPT_ALIVE)
        })
    }

    /// Uses one connection and one UDP flow, which keep their backends all the time.
    pub(crate) fn stay(&self, from: &str, target: SocketAddr) -> anyhow::Result<()> {
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

/// Every client uses its target in all of these ways.
pub(crate) fn users<'a>(
    clients: &'a [Member],
    targets: &[SocketAddr],
    uses: &[Use],
) -> Vec<(Use, &'a str, SocketAddr)> {
    let pairs = clients.iter().zip(targets);
    pairs
        .flat_map(|(client, target)| {
            let uses = uses.iter();
            uses.map(move |used| (*used, client.name.as_str(), *target))
        })
        .collect()
}
