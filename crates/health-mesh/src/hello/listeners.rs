//! A responder's listening sockets, and their state.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use health_model::activity::{self, Activity, Problem, Reporter};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::AcceptConn;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{EXCHANGE_TIMEOUT, Shared, serve};

/// Pause after the process runs out of file descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Accepts the connections of one socket.
pub(super) struct Acceptor {
    pub(super) task: JoinHandle<()>,
    /// Owned by the task, which closes it when it ends.
    listener: Weak<TcpListener>,
    /// Its listening address at creation.
    address: Option<SocketAddr>,
    activity: Activity,
}

impl Acceptor {
    pub(super) fn start(listener: TcpListener, shared: Shared) -> Self {
        let listener = Arc::new(listener);
        let (reporter, activity) = activity::channel();
        Self {
            listener: Arc::downgrade(&listener),
            address: listener.local_addr().ok(),
            activity,
            task: tokio::spawn(accept(listener, shared, reporter)),
        }
    }

    /// Why no client can connect, if that is the case.
    fn problem(&self) -> Option<String> {
        let reported = self.activity.last().problem;
        let reported = reported.map(|problem| problem.reason);
        let Some(listener) = self.listener.upgrade() else {
            return Some(reported.unwrap_or_else(|| "its socket is closed".to_owned()));
        };
        match getsockopt(&*listener, AcceptConn) {
            Ok(true) => reported,
            Ok(false) => Some("its socket no longer listens; restart the agent".to_owned()),
            Err(error) => Some(format!("cannot inspect its socket: {error}")),
        }
    }
}

/// State of a responder. Clones share it.
#[derive(Clone, Default)]
pub struct ResponderState(Arc<Mutex<Vec<Acceptor>>>);

impl ResponderState {
    /// Checks that clients can connect to each of its addresses; returns the problem, if any.
    pub fn problem(&self) -> Option<String> {
        let acceptors = self.acceptors();
        let problems: Vec<String> = acceptors
            .iter()
            .filter_map(|acceptor| {
                let problem = acceptor.problem()?;
                Some(match acceptor.address {
                    Some(address) => format!("GET /hello is not answered on {address}: {problem}"),
                    None => format!("GET /hello is not answered: {problem}"),
                })
            })
            .collect();
        (!problems.is_empty()).then(|| problems.join("; "))
    }

    /// Replaces the acceptors and returns the old ones.
    pub(super) fn replace(&self, acceptors: Vec<Acceptor>) -> Vec<Acceptor> {
        std::mem::replace(&mut *self.acceptors(), acceptors)
    }

    /// Adds acceptors.
    pub(super) fn add(&self, acceptors: Vec<Acceptor>) {
        self.acceptors().extend(acceptors);
    }

    fn acceptors(&self) -> MutexGuard<'_, Vec<Acceptor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn accept(listener: Arc<TcpListener>, shared: Shared, reporter: Reporter) {
    let mut is_failing = false;
    loop {
        let Some(slot) = shared.slots.free().await else {
            return;
        };
        let accepted = match is_failing {
            false => Some(listener.accept().await),
            // A time-out without a connection counts as a success too.
            true => timeout(ACCEPT_BACKOFF, listener.accept()).await.ok(),
        };
        match &accepted {
            Some(Err(error)) if error.kind() != io::ErrorKind::ConnectionAborted => {
                tracing::warn!(%error, "hello responder cannot accept a connection");
                reporter.end(Some(Problem::failure(error)), None);
                is_failing = true;
                tokio::time::sleep(ACCEPT_BACKOFF).await;
                continue;
            }
            _ if is_failing => {
                reporter.end(None, None);
                is_failing = false;
            }
            _ => {}
        }
        let Some(Ok((stream, from))) = accepted else {
            continue;
        };
        let Some(slot) = slot.take(from.ip()) else {
            shared.requests.add_too_many();
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            // Errors are the client's own: it disconnected, or did not speak HTTP.
            let _ = timeout(EXCHANGE_TIMEOUT, serve(stream, shared)).await;
            drop(slot);
        });
    }
}
