//! Measures the MTU of the paths to other nodes' addresses: decides when to check which path, and keeps the results.
//!
//! A path is checked once per interval, at its own phase, and on request. `search` decides which sizes to send; this
//! module looks up the outgoing route, sends and receives. Its probes use a small part of the probe rate, and wait when
//! that is used up.

mod search;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use jiff::Timestamp;
use nix::errno::Errno;
use slotmap::SparseSecondaryMap;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};

pub(super) use self::search::TooBig;

use health_model::pace::{Budget, fraction, phase, regular_after};
use health_net::KernelError;
use health_net::mtu::{self, DeviceMtu, WayOut};
use health_net::netlink;

use self::search::{Limits, Outcome, Search, Step, Verdict};
use super::counters::IgnoredReplies;
use super::icmp::sized::{SizedEvent, SizedSockets};
use super::target::TargetId;

/// Fraction of the probe rate available to this module: one in this many.
const SHARE: u32 = 10;
/// The first check of a path is due within this fraction of the interval.
const FIRST_DIVISOR: u32 = 10;
/// A path with a reduced MTU is checked again after this time, so that recovery is reported soon.
const RECHECK: Duration = Duration::from_secs(60);
/// Number of probes for a path without problems.
const USUAL_PROBES: u32 = 2;
/// Maximum number of searches per check: a search ends early if the device's MTU has changed.
const SEARCHES: u32 = 3;
/// Pause before retrying a probe for which the socket had no space.
const DEFERRED_RETRY: Duration = Duration::from_millis(10);
/// Maximum number of such retries. After that the probe counts as lost: the shortage may persist, and larger packets
/// may need more.
const DEFERRALS: u32 = 10;

/// The last observed MTU of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PathMtu {
    /// Length in bytes of the largest IP packet that gets through.
    pub(super) mtu: u32,
    /// The outgoing route of this host.
    pub(super) way: Arc<WayOut>,
    /// The router that reports it, if `mtu` is below what the outgoing route allows; `None` if packets vanish.
    pub(super) notice: Option<TooBig>,
    /// When the MTU was observed.
    pub(super) probed: Timestamp,
}

impl PathMtu {
    /// Whether packets that this host sends are too large for the path.
    pub(super) fn is_reduced(&self) -> bool {
        self.mtu < self.way.mtu
    }
}

/// Result of a path check.
#[derive(Clone, Debug)]
pub(super) struct PathMtuOutcome {
    /// The target whose path it is.
    pub(super) id: TargetId,
    /// The result, if it is conclusive.
    pub(super) found: Option<PathMtu>,
}

/// How paths are checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathMtuOptions {
    /// Time between two checks; `None`: only on request.
    pub(super) interval: Option<Duration>,
    /// Maximum number of probes of all kinds a second.
    pub(super) rate: u32,
    /// How long a probe waits for an answer.
    pub(super) timeout: Duration,
}

/// The result of a route lookup.
type Lookup = (TargetId, Result<Option<WayOut>, KernelError>);

/// Measures the MTU of paths.
pub(super) struct PathMtuProber {
    /// Full name of this node.
    agent: String,
    options: PathMtuOptions,
    /// Budget of this module's probes.
    share: Budget,
    sockets: SizedSockets,
    netlink: netlink::Handle,
    /// Notifies about device changes.
    devices: Pin<Box<dyn Stream<Item = DeviceMtu> + Send>>,
    /// Whether the MTU of a device on some path has changed.
    mtu_has_changed: bool,
    lookups: JoinSet<Lookup>,
    /// Finished lookups that are not processed yet.
    looked_up: Vec<Result<Lookup, JoinError>>,
    /// Only a few targets have an entry.
    paths: SparseSecondaryMap<TargetId, Path>,
    /// Known outgoing routes, each once: nearly all paths use the same one.
    ways: Vec<Arc<WayOut>>,
    /// When a path's next action is due.
    due: BTreeSet<(Duration, TargetId)>,
    /// Probes waiting for an answer, by sequence number.
    sent: HashMap<u16, TargetId>,
    next_sequence: u16,
    waiters: Vec<Waiter>,
    ignored: Arc<IgnoredReplies>,
}

/// One path. There are very many.
#[derive(Debug)]
struct Path {
    address: IpAddr,
    due: Option<Duration>,
    /// The last measured MTU, if it is reduced.
    reduced: Option<u32>,
    /// The check in progress; usually none.
    look: Option<Box<Look>>,
}

/// A path check in progress.
#[derive(Debug)]
struct Look {
    /// Number of searches started.
    searches: u32,
    /// The search; `None` while the outgoing route is being looked up.
    searching: Option<OngoingSearch>,
}

#[derive(Debug)]
struct OngoingSearch {
    way: Arc<WayOut>,
    search: Search,
    /// Sequence number and send time of the probe that is waiting for an answer.
    waits: Option<(u16, Duration)>,
    /// How often the socket had no space for the next probe.
    deferrals: u32,
}

/// A client that requested path checks.
#[derive(Debug)]
struct Waiter {
    awaited: HashSet<TargetId>,
    /// Dropped once all paths have been checked.
    _done: oneshot::Sender<()>,
}

impl PathMtuProber {
    /// Adopts new options. If the interval changes, the next check of each path moves; a check in progress is
    /// unaffected.
    pub(super) fn tune(&mut self, options: PathMtuOptions, now: Duration) {
        let former = std::mem::replace(&mut self.options, options);
        self.share = Budget::new(options.rate / SHARE);
        if options.interval == former.interval {
            return;
        }
        let idle = self.paths.iter().filter(|(_, path)| path.look.is_none());
        let idle: Vec<_> = idle.map(|(id, path)| (id, path.address)).collect();
        for (id, address) in idle {
            self.set_due(id, self.first_due(address, now));
        }
    }

    /// When a path is checked first, counted from `now`.
    fn first_due(&self, address: IpAddr, now: Duration) -> Option<Duration> {
        let spread = self.options.interval? / FIRST_DIVISOR;
        Some(now + fraction(spread, self.phase(address)))
    }

    /// Opens the sockets, with ICMP identifier `id` in host byte order. Received messages that no probe waits for are
    /// counted in `ignored`. Must be called inside a tokio runtime.
    pub(super) fn open(
        agent: &str,
        options: PathMtuOptions,
        id: u16,
        ignored: Arc<IgnoredReplies>,
    ) -> io::Result<Self> {
        let (netlink, devices) = mtu::open()?;
        Ok(Self {
            agent: agent.to_owned(),
            options,
            share: Budget::new(options.rate / SHARE),
            sockets: SizedSockets::open(id)?,
            netlink,
            devices: Box::pin(devices),
            mtu_has_changed: false,
            lookups: JoinSet::new(),
            looked_up: Vec::new(),
            paths: SparseSecondaryMap::new(),
            ways: Vec::new(),
            due: BTreeSet::new(),
            sent: HashMap::new(),
            next_sequence: rand::random(),
            waiters: Vec::new(),
            ignored,
        })
    }

    /// Sets the targets whose paths are checked.
    pub(super) fn set_paths(
        &mut self,
        wanted: impl Iterator<Item = (TargetId, IpAddr)>,
        now: Duration,
    ) {
        let wanted: HashMap<TargetId, IpAddr> = wanted.collect();
        let known = self.paths.keys();
        let gone: Vec<_> = known.filter(|id| !wanted.contains_key(id)).collect();
        for id in gone {
            self.remove(id);
        }
        for (id, address) in wanted {
            if self.paths.contains_key(id) {
                continue;
            }
            let path = Path {
                address,
                due: None,
                reduced: None,
                look: None,
            };
            self.paths.insert(id, path);
            self.set_due(id, self.first_due(address, now));
        }
    }

    /// Whether the path to this target is checked.
    pub(super) fn has(&self, id: TargetId) -> bool {
        self.paths.contains_key(id)
    }

    /// Checks paths as soon as the rate allows. `done` is dropped when all checks are finished.
    pub(super) fn request(&mut self, ids: &[TargetId], now: Duration, done: oneshot::Sender<()>) {
        self.pull_in(ids, now);
        let awaited = ids.iter().filter(|&&id| self.has(id));
        self.waiters.push(Waiter {
            awaited: awaited.copied().collect(),
            _done: done,
        });
        self.waiters.retain(|waiter| !waiter.awaited.is_empty());
    }

    /// Makes paths due as soon as the rate allows.
    fn pull_in(&mut self, ids: &[TargetId], now: Duration) {
        let pace = self.share.period() * USUAL_PROBES;
        let mut at = now;
        for &id in ids {
            if self.paths.get(id).is_some_and(|path| path.look.is_none()) {
                self.set_due(id, Some(at));
                at += pace;
            }
        }
    }

    /// Waits until something was received; [`Self::turn`] must follow.
    pub(super) async fn ready(&mut self) {
        tokio::select! {
            _ = self.sockets.readable() => {}
            Some(lookup) = self.lookups.join_next() => self.looked_up.push(lookup),
            Some(device) = self.devices.next() => self.note_mtu(&device),
        }
    }

    /// Records the current MTU of a device.
    fn note_mtu(&mut self, now: &DeviceMtu) {
        let before = self.ways.len();
        self.ways
            .retain(|way| way.device != now.device || way.device_mtu == now.mtu);
        self.mtu_has_changed |= self.ways.len() < before;
    }

    /// When the next action is due, if the budget allows.
    pub(super) fn next_due(&self, budget: &Budget) -> Option<Duration> {
        let &(at, _) = self.due.first()?;
        Some(at.max(budget.ready()).max(self.share.ready()))
    }

    /// Handles received replies and sends due probes. Returns the results; for each path, [`Self::end_wait`] must
    /// follow once its result can be read.
    pub(super) fn turn(&mut self, now: Duration, budget: &mut Budget) -> Vec<PathMtuOutcome> {
        if !self.sent.is_empty() {
            self.receive(now);
        }
        if std::mem::take(&mut self.mtu_has_changed) && self.options.interval.is_some() {
            let all: Vec<_> = self.paths.keys().collect();
            self.pull_in(&all, now);
        }
        let mut looked = Vec::new();
        while let Some(lookup) = self.lookups.try_join_next() {
            self.looked_up.push(lookup);
        }
        for lookup in std::mem::take(&mut self.looked_up) {
            looked.extend(self.found_way(lookup, now));
        }
        while budget.allows(now)
            && self.share.allows(now)
            && let Some(&(at, id)) = self.due.first()
            && at <= now
        {
            self.set_due(id, None);
            looked.extend(self.advance(id, now, budget));
        }
        looked
    }

    fn receive(&mut self, now: Duration) {
        let mut events = Vec::new();
        if let Err(error) = self.sockets.receive(|event| events.push(event)) {
            tracing::warn!(%error, "cannot receive replies to path MTU probes");
        }
        for event in events {
            let (address, sequence) = match event {
                SizedEvent::Answered { from, sequence } => (from, sequence),
                SizedEvent::Error {
                    destination,
                    sequence,
                    ..
                } => (destination, sequence),
                SizedEvent::Unmarked => {
                    self.ignored.wrong_payload();
                    continue;
                }
            };
            let waiting = self.sent.get(&sequence).copied();
            let Some(id) = waiting.filter(|&id| self.is_to(id, address)) else {
                match (event, waiting) {
                    (SizedEvent::Error { .. }, _) => self.ignored.unmatched_error(),
                    (_, Some(_)) => self.ignored.wrong_source(),
                    (_, None) => self.ignored.unexpected(),
                }
                continue;
            };
            self.sent.remove(&sequence);
            let Some(searching) = self.paths.get_mut(id).and_then(Path::searching) else {
                continue;
            };
            let sent = searching.waits.take().map_or(now, |(_, sent)| sent);
            let outcome = match event {
                SizedEvent::Answered { .. } => Outcome::Answered(now.saturating_sub(sent)),
                SizedEvent::Error {
                    error,
                    next_hop_mtu: Some(next_hop_mtu),
                    ..
                } => Outcome::TooBig(TooBig {
                    from: error.from,
                    next_hop_mtu,
                }),
                SizedEvent::Error { .. } | SizedEvent::Unmarked => Outcome::Lost,
            };
            searching.search.note(outcome, now);
            self.set_due(id, Some(now));
        }
    }

    fn is_to(&self, id: TargetId, address: IpAddr) -> bool {
        self.paths
            .get(id)
            .is_some_and(|path| path.address == address)
    }

    /// Performs the due action of a path.
    fn advance(
        &mut self,
        id: TargetId,
        now: Duration,
        budget: &mut Budget,
    ) -> Option<PathMtuOutcome> {
        let path = self.paths.get_mut(id)?;
        let Some(look) = &mut path.look else {
            self.look_up(id, now);
            return None;
        };
        let Some(searching) = &mut look.searching else {
            // The kernel has not answered the route lookup in time.
            return self.end(id, Verdict::Inconclusive, now);
        };
        if let Some((sequence, _)) = searching.waits.take() {
            self.sent.remove(&sequence);
            searching.search.note(Outcome::Lost, now);
        }
        self.step(id, now, budget)
    }

    /// Starts a check, or restarts its search, by looking up the outgoing route.
    fn look_up(&mut self, id: TargetId, now: Duration) {
        let Some(path) = self.paths.get_mut(id) else {
            return;
        };
        let searches = path.look.as_ref().map_or(0, |look| look.searches);
        path.look = Some(Box::new(Look {
            searches: searches + 1,
            searching: None,
        }));
        let (netlink, address) = (self.netlink.clone(), path.address);
        self.lookups
            .spawn(async move { (id, mtu::way_out(&netlink, address).await) });
        self.set_due(id, Some(now + self.options.timeout));
    }

    /// Records the outgoing route to an address, and starts the search.
    fn found_way(
        &mut self,
        lookup: Result<Lookup, JoinError>,
        now: Duration,
    ) -> Option<PathMtuOutcome> {
        let (id, way) = match lookup {
            Ok(lookup) => lookup,
            Err(error) => {
                tracing::error!(%error, "route lookup failed");
                return None;
            }
        };
        let path = self.paths.get_mut(id)?;
        // The lookup may have finished too late.
        let look = path.look.as_mut()?;
        if look.searching.is_some() {
            return None;
        }
        let way = match way {
            Ok(Some(way)) => way,
            Ok(None) => return self.end(id, Verdict::Inconclusive, now),
            Err(error) => {
                tracing::debug!(address = %path.address, %error, "cannot read the device's MTU");
                return self.end(id, Verdict::Inconclusive, now);
            }
        };
        let way = match self.ways.iter().find(|known| ***known == way) {
            Some(known) => known.clone(),
            None => {
                let way = Arc::new(way);
                self.ways.push(way.clone());
                way
            }
        };
        let limits = Limits {
            mtu: way.mtu,
            device_mtu: way.device_mtu,
        };
        look.searching = Some(OngoingSearch {
            way,
            search: Search::new(limits, path.reduced, self.options.timeout),
            waits: None,
            deferrals: 0,
        });
        self.set_due(id, Some(now));
        None
    }

    /// Performs the next step of the search.
    fn step(&mut self, id: TargetId, now: Duration, budget: &mut Budget) -> Option<PathMtuOutcome> {
        let path = self.paths.get_mut(id)?;
        let address = path.address;
        let searching = path.searching()?;
        loop {
            let (size, patience) = match searching.search.step(now) {
                Step::Send { size, patience } => (size, patience),
                Step::Wait(until) => {
                    self.set_due(id, Some(until));
                    return None;
                }
                Step::End(verdict) => return self.end(id, verdict, now),
            };
            while self.sent.contains_key(&self.next_sequence) {
                self.next_sequence = self.next_sequence.wrapping_add(1);
            }
            let sequence = self.next_sequence;
            match self.sockets.send(address, sequence, size) {
                Ok(()) => {
                    self.next_sequence = sequence.wrapping_add(1);
                    budget.take(now);
                    self.share.take(now);
                    searching.waits = Some((sequence, now));
                    searching.deferrals = 0;
                    self.sent.insert(sequence, id);
                    self.set_due(id, Some(now + patience));
                    return None;
                }
                Err(Errno::EMSGSIZE) => searching.search.note(Outcome::Refused, now),
                Err(Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM | Errno::EINTR) => {
                    // The packet may have reached the device.
                    budget.take(now);
                    self.share.take(now);
                    if searching.deferrals < DEFERRALS {
                        searching.deferrals += 1;
                        self.set_due(id, Some(now + DEFERRED_RETRY));
                        return None;
                    }
                    searching.deferrals = 0;
                    searching.search.note(Outcome::Lost, now);
                    self.set_due(id, Some(now));
                    return None;
                }
                // Regular probes get the same error and report it.
                Err(_) => return self.end(id, Verdict::Inconclusive, now),
            }
        }
    }

    /// Finishes a search.
    fn end(&mut self, id: TargetId, verdict: Verdict, now: Duration) -> Option<PathMtuOutcome> {
        let path = self.paths.get_mut(id)?;
        let searches = path.look.as_ref().map_or(0, |look| look.searches);
        if verdict == Verdict::OtherMtu && searches < SEARCHES {
            self.look_up(id, now);
            return None;
        }
        let look = path.look.take();
        let way = look.and_then(|look| Some(look.searching?.way));
        let seen = match verdict {
            Verdict::Full => way.map(|way| (way.mtu, way, None)),
            Verdict::Reduced { mtu, notice } => way.map(|way| (mtu, way, notice)),
            Verdict::Inconclusive | Verdict::OtherMtu => None,
        };
        let found = seen.map(|(mtu, way, notice)| PathMtu {
            mtu,
            way,
            notice,
            probed: Timestamp::now(),
        });
        if let Some(found) = &found {
            path.reduced = found.is_reduced().then_some(found.mtu);
        }
        let interval = match path.reduced {
            Some(_) => self.options.interval.map(|i| i.min(RECHECK)),
            None => self.options.interval,
        };
        let address = path.address;
        let phase = self.phase(address);
        let due = interval.map(|i| regular_after(now + i / 2, i, phase));
        self.set_due(id, due);
        Some(PathMtuOutcome { id, found })
    }

    fn remove(&mut self, id: TargetId) {
        self.set_due(id, None);
        let mut path = self.paths.remove(id);
        let searching = path.as_mut().and_then(Path::searching);
        if let Some((sequence, _)) = searching.and_then(|searching| searching.waits) {
            self.sent.remove(&sequence);
        }
        self.end_wait(id);
    }

    /// Stops waiters from waiting for a path: its result can be read, or the path is gone.
    pub(super) fn end_wait(&mut self, id: TargetId) {
        self.waiters.retain_mut(|waiter| {
            waiter.awaited.remove(&id);
            !waiter.awaited.is_empty()
        });
    }

    /// Phase within the interval at which a path is checked.
    fn phase(&self, address: IpAddr) -> u64 {
        phase((&self.agent, address, "path MTU"))
    }

    fn set_due(&mut self, id: TargetId, at: Option<Duration>) {
        if let Some(path) = self.paths.get_mut(id) {
            if let Some(before) = std::mem::replace(&mut path.due, at) {
                self.due.remove(&(before, id));
            }
            self.due.extend(at.map(|at| (at, id)));
        }
    }
}

impl Path {
    fn searching(&mut self) -> Option<&mut OngoingSearch> {
        self.look.as_mut()?.searching.as_mut()
    }
}
