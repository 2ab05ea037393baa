//! The MTU of the paths to other nodes' addresses: which of them are looked at when, and what comes out.
//!
//! A path is looked at once an interval, at a phase of its own, and on request. `search` says which
//! sizes to send; this is the side that looks up the way out, sends and receives. Its probes take a
//! small part of the probe rate, and wait where it is used up.

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

/// The part of the probe rate that this may take: one in so many.
const SHARE: u32 = 10;
/// Paths are looked at first within this part of the interval.
const FIRST_DIVISOR: u32 = 10;
/// One whose MTU is reduced is looked at again after this time, so that its end is told soon.
const RECHECK: Duration = Duration::from_secs(60);
/// Probes that a path takes when nothing is wrong with it.
const USUAL_PROBES: u32 = 2;
/// Searches that one look takes at most: each ends early when the device's MTU has changed.
const SEARCHES: u32 = 3;
/// Pause before a probe that found no room in the socket is tried again.
const DEFERRED_RETRY: Duration = Duration::from_millis(10);
/// Times that one is tried again. After that it counts as lost: the lack may last, and larger packets may need more.
const DEFERRALS: u32 = 10;

/// The MTU of a path as it was seen last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PathMtu {
    /// The largest packet that gets through, bytes of IP.
    pub(super) mtu: u32,
    /// The way out of this host.
    pub(super) way: Arc<WayOut>,
    /// The router that says so, where `mtu` is less than the way out takes; `None` where packets vanish.
    pub(super) told: Option<TooBig>,
    /// When that was seen.
    pub(super) probed: Timestamp,
}

impl PathMtu {
    /// Whether packets that this host sends are too large for the path.
    pub(super) fn is_reduced(&self) -> bool {
        self.mtu < self.way.mtu
    }
}

/// A path has been looked at.
#[derive(Clone, Debug)]
pub(super) struct PathMtuOutcome {
    /// The target whose path it is.
    pub(super) id: TargetId,
    /// What was seen, if it is certain.
    pub(super) found: Option<PathMtu>,
}

/// How paths are looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathMtuOptions {
    /// Time between two looks; `None`: on request alone.
    pub(super) interval: Option<Duration>,
    /// Most probes a second of all kinds.
    pub(super) rate: u32,
    /// How long a probe waits for its answer.
    pub(super) timeout: Duration,
}

/// A way out that was looked up.
type Lookup = (TargetId, Result<Option<WayOut>, KernelError>);

/// Finds the MTU of paths.
pub(super) struct PathMtuProber {
    /// Full name of this node.
    agent: String,
    options: PathMtuOptions,
    /// What its own probes may take.
    share: Budget,
    sockets: SizedSockets,
    netlink: netlink::Handle,
    /// Tells what becomes of devices.
    devices: Pin<Box<dyn Stream<Item = DeviceMtu> + Send>>,
    /// Whether a device that paths lead through has another MTU than before.
    mtu_has_changed: bool,
    lookups: JoinSet<Lookup>,
    /// Lookups that have ended and were not taken in yet.
    looked_up: Vec<Result<Lookup, JoinError>>,
    /// Few of all targets.
    paths: SparseSecondaryMap<TargetId, Path>,
    /// Those found, each once: nearly all paths go out the same way.
    ways: Vec<Arc<WayOut>>,
    /// When something is to be done for a path.
    due: BTreeSet<(Duration, TargetId)>,
    /// Probes that wait for their answer, by sequence number.
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
    /// The MTU found last, if it is reduced.
    reduced: Option<u32>,
    /// What is being done; nothing most of the time.
    look: Option<Box<Look>>,
}

/// A look at a path under way.
#[derive(Debug)]
struct Look {
    /// Searches that it has begun.
    searches: u32,
    /// The search; `None` while the way out is looked up.
    searching: Option<OngoingSearch>,
}

#[derive(Debug)]
struct OngoingSearch {
    way: Arc<WayOut>,
    search: Search,
    /// Sequence number and time of sending of the probe that waits for its answer.
    waits: Option<(u16, Duration)>,
    /// How often the probe that is to be sent found no room.
    deferrals: u32,
}

/// Somebody who asked for looks at paths.
#[derive(Debug)]
struct Waiter {
    awaited: HashSet<TargetId>,
    /// Dropped when all have been looked at.
    _done: oneshot::Sender<()>,
}

impl PathMtuProber {
    /// Opens the sockets, with ICMP identifier `id` in host byte order. What is
    /// received and no probe waits for is counted in `ignored`. Must be called inside a tokio runtime.
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

    /// Makes the paths to exactly these targets the ones to look at.
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
            let phase = self.phase(address);
            let spread = self.options.interval.map(|i| i / FIRST_DIVISOR);
            self.set_due(id, spread.map(|spread| now + fraction(spread, phase)));
        }
    }

    /// Whether the path to a target is one of them.
    pub(super) fn has(&self, id: TargetId) -> bool {
        self.paths.contains_key(id)
    }

    /// Looks at paths now, as soon as the rate allows. `done` is dropped when that has been done.
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

    /// Waits until something has come; [`Self::turn`] must follow.
    pub(super) async fn ready(&mut self) {
        tokio::select! {
            _ = self.sockets.readable() => {}
            Some(lookup) = self.lookups.join_next() => self.looked_up.push(lookup),
            Some(device) = self.devices.next() => self.note_mtu(&device),
        }
    }

    /// Takes in what the MTU of a device is now.
    fn note_mtu(&mut self, now: &DeviceMtu) {
        let before = self.ways.len();
        self.ways
            .retain(|way| way.device != now.device || way.device_mtu == now.mtu);
        self.mtu_has_changed |= self.ways.len() < before;
    }

    /// When something is to be done, the budget permitting.
    pub(super) fn next_due(&self, budget: &Budget) -> Option<Duration> {
        let &(at, _) = self.due.first()?;
        Some(at.max(budget.ready()).max(self.share.ready()))
    }

    /// Takes in what has come and does what is due. Returns what came out; [`Self::end_wait`] must follow for
    /// each path, when that can be read.
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
            tracing::warn!(%error, "cannot receive the replies to probes of path MTUs");
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

    /// Does what is due for a path.
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
            // The kernel has not answered.
            return self.end(id, Verdict::Inconclusive, now);
        };
        if let Some((sequence, _)) = searching.waits.take() {
            self.sent.remove(&sequence);
            searching.search.note(Outcome::Lost, now);
        }
        self.step(id, now, budget)
    }

    /// Begins a look, or a search anew, by looking up the way out.
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

    /// Takes in the way out to an address, and begins to search.
    fn found_way(
        &mut self,
        lookup: Result<Lookup, JoinError>,
        now: Duration,
    ) -> Option<PathMtuOutcome> {
        let (id, way) = match lookup {
            Ok(lookup) => lookup,
            Err(error) => {
                tracing::error!(%error, "a route was not looked up");
                return None;
            }
        };
        let path = self.paths.get_mut(id)?;
        // It may have come too late.
        let look = path.look.as_mut()?;
        if look.searching.is_some() {
            return None;
        }
        let way = match way {
            Ok(Some(way)) => way,
            Ok(None) => return self.end(id, Verdict::Inconclusive, now),
            Err(error) => {
                tracing::debug!(address = %path.address, %error, "the device's MTU is not known");
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

    /// Does what the search wants.
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
                    // It may have used the device.
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
                // As regular probes, which tell of it.
                Err(_) => return self.end(id, Verdict::Inconclusive, now),
            }
        }
    }

    /// A search has ended.
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
            Verdict::Reduced { mtu, told } => way.map(|way| (mtu, way, told)),
            Verdict::Inconclusive | Verdict::OtherMtu => None,
        };
        let found = seen.map(|(mtu, way, told)| PathMtu {
            mtu,
            way,
            told,
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

    /// Nobody need wait for a path any longer: what came out can be read, or it has gone.
    pub(super) fn end_wait(&mut self, id: TargetId) {
        self.waiters.retain_mut(|waiter| {
            waiter.awaited.remove(&id);
            !waiter.awaited.is_empty()
        });
    }

    /// When in the interval a path is looked at.
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
