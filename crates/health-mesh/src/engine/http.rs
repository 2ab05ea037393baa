//! HTTP probes: running probes, probes waiting for a slot, and results.

use std::collections::{HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::probe::Path;
use nix::sys::resource::{Resource, getrlimit};
use tokio::task::{JoinError, JoinSet};

use super::Engine;
use super::exchange::WayCounts;
use crate::accounts::nanos;
use crate::failure::Failure;
use crate::http::{self, Asker, Hello};
use crate::results::{Answer, HttpTimes};
use crate::sending::is_lack_of_resources;
use crate::target::{Protocol, TargetId, TargetKey};

/// Minimum and maximum number of concurrent HTTP probes, and the share of this process's file descriptors that they may
/// use. A dead peer occupies its slot until the time-out, so with too few slots dead peers would delay the live ones.
const HTTP_CONCURRENCY: (usize, usize) = (64, 4096);
const HTTP_DESCRIPTORS_DIVISOR: u64 = 2;

/// A finished HTTP probe.
#[derive(Debug)]
pub(super) struct HttpProbeEnd {
    id: TargetId,
    key: TargetKey,
    sent: Duration,
    /// This side's counts of the node's ways at the time of sending.
    counts: Option<Box<WayCounts>>,
    answer: Result<Hello, Failure>,
}

/// Running and waiting HTTP probes.
pub(super) struct HttpProbes {
    asker: Arc<Asker>,
    /// Full names of the nodes, in the order of the set.
    pub(super) names: Vec<Arc<str>>,
    pub(super) running: JoinSet<HttpProbeEnd>,
    slots: usize,
    /// Targets that became due while no slot was free, with their due times.
    waiting: VecDeque<(TargetId, Duration)>,
    /// The targets in `waiting`.
    queued: HashSet<TargetId>,
}

impl HttpProbes {
    /// Creates an empty queue, with as many slots as the limit on open files allows.
    pub(super) fn new(asker: Asker) -> Self {
        Self {
            asker: Arc::new(asker),
            names: Vec::new(),
            running: JoinSet::new(),
            slots: slots(),
            waiting: VecDeque::new(),
            queued: HashSet::new(),
        }
    }

    /// Queues a probe that became due at `due`, unless one is already waiting.
    pub(super) fn queue(&mut self, id: TargetId, due: Duration) {
        if self.queued.insert(id) {
            self.waiting.push_back((id, due));
        }
    }

    /// The next probe to start, if there is a free slot.
    fn next(&mut self) -> Option<(TargetId, Duration)> {
        if self.running.len() >= self.slots {
            return None;
        }
        let (id, due) = self.waiting.pop_front()?;
        self.queued.remove(&id);
        Some((id, due))
    }
}

impl Engine {
    pub(super) fn begin_http(&mut self) {
        while let Some((id, due)) = self.http.next() {
            let Some(target) = self.targets.get(id) else {
                continue;
            };
            let (key, node) = (target.key, target.node);
            let sent = self.now();
            let late = match self.sweep {
                Some(_) => Duration::ZERO,
                None => sent.saturating_sub(due),
            };
            self.shared.sending().tried(Protocol::Http, sent, late);
            let counts = self.way_counts(node);
            let expiry = sent + self.options.tuning.timeout;
            self.confirmation.sent(id, sent, expiry);
            let peer = SocketAddr::new(key.address, self.options.port);
            let deadline = self.shared.start + expiry;
            let Some(asked) = self.http.names.get(node).cloned() else {
                continue;
            };
            let asker = self.http.asker.clone();
            self.http.running.spawn(async move {
                let answer = http::get_hello(&asker, &asked, peer, deadline).await;
                HttpProbeEnd {
                    id,
                    key,
                    sent,
                    counts,
                    answer,
                }
            });
        }
    }

    pub(super) fn http_done(&mut self, done: Result<HttpProbeEnd, JoinError>) {
        let HttpProbeEnd {
            id,
            key,
            sent,
            counts,
            answer,
        } = match done {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, "an HTTP probe ended without a result");
                return;
            }
        };
        let Some(&target) = self.targets.get(id) else {
            return;
        };
        match answer {
            Ok(hello) => {
                let (rtt, source) = self.accounts.connected(key, &hello);
                let answer = Answer {
                    rtt,
                    source,
                    http: Some(HttpTimes {
                        connect_ns: nanos(hello.connect),
                        total_ns: nanos(hello.total),
                    }),
                    key: hello.key,
                };
                self.exchange(target.node, sent, counts.as_deref(), &hello);
                let reachable = self.answered(id, sent, answer);
                let all_reported = key.path != Path::Host
                    || self.learn(target, hello.headers.health_endpoint.as_deref());
                if reachable && all_reported {
                    let now = self.now();
                    self.schedule.settle(id, now);
                }
            }
            Err(failure) => {
                if is_lack_of_resources(&failure) {
                    self.shared.sending().unsent(Protocol::Http, &failure);
                }
                self.accounts.lost_untracked(key);
                self.failed(id, sent, failure);
            }
        }
    }
}

/// Maximum number of concurrent HTTP probes under the limit on open files.
fn slots() -> usize {
    let (fewest, most) = HTTP_CONCURRENCY;
    getrlimit(Resource::RLIMIT_NOFILE).map_or(fewest, |(soft, _)| {
        usize::try_from(soft / HTTP_DESCRIPTORS_DIVISOR).map_or(most, |n| n.clamp(fewest, most))
    })
}
