//! Finds where echo probes to a peer are lost: on the way there, in the peer's host, on the way back or in this host.
//!
//! The peer's programs count the probes of this agent that arrive and the replies that leave; its agent reports the
//! counts in its answers to `GET /hello`. Between two such *exchanges*, the probes sent here are compared with those
//! that arrived there. Packets in flight while counts are read are covered by bounds: the real loss is at least as
//! large as the reported one. Contradictory counts are ignored.
//!
//! The peer counts packets, not probes, so a duplicate looks like one more reply that may still be on its way back. The
//! number of duplicates is known only once they have arrived. An exchange therefore ends an interval only when a later
//! exchange shows what arrived after it.
//!
//! A *way* is a path by one IP version. Ways are followed from their first exchange after a loss for as long as there
//! are losses. Pure: times are durations since the mesh's start.

use std::collections::VecDeque;
use std::time::Duration;

use health_common::arrivals::WayCounts;
use slotmap::SparseSecondaryMap;

use super::target::TargetId;

/// The windows in which losses are looked for, longest first.
pub(super) const WINDOWS: [Duration; 2] = [Duration::from_secs(600), Duration::from_secs(60)];

/// Maximum number of ways followed at a time. If more ways lose probes, the location of the other losses is not
/// reported.
const MOST_TRACKS: usize = 2048;
/// Maximum number of exchanges kept per way, about 72 bytes each.
const MOST_POINTS: usize = 20;
/// If three exchanges lie closer together than this, the middle one is dropped.
const DENSE: Duration = Duration::from_secs(2);
/// A reply that has left the peer arrives within this time, or counts as lost.
const SETTLING: Duration = Duration::from_secs(1);

/// This side's counts of a way's echo probes. The counts wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnCounts {
    /// Probes that were answered or given up.
    pub(super) settled: u32,
    /// Probes still waiting for an answer.
    pub(super) in_flight: u32,
    /// Replies that came back to the uplink: in time, late or duplicate.
    pub(super) returned: u32,
    /// Replies among these for which no probe waited: late or duplicate.
    pub(super) surplus: u32,
}

/// The counts of both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange {
    /// When the peer was asked.
    pub(super) asked: Duration,
    /// This side's counts at that time.
    pub(super) before: OwnCounts,
    /// When its answer arrived.
    pub(super) told: Duration,
    /// This side's counts at that time.
    pub(super) after: OwnCounts,
    /// When the peer's counts started, by the peer's clock.
    pub(super) since_ns: u64,
    /// The peer's counts at some moment in between.
    pub(super) counts: WayCounts,
}

/// What happened to a way's probes between two exchanges. Losses are lower bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Passage {
    /// Time between the exchanges.
    pub(super) time: Duration,
    /// Probes that left this host.
    pub(super) sent: u32,
    /// Probes that arrived at the peer's host.
    pub(super) arrived: u32,
    /// Replies that left the peer's host.
    pub(super) replied: u32,
    /// Replies that came back to this host.
    pub(super) returned: u32,
    /// Probes lost on the way there.
    pub(super) lost_there: u32,
    /// Probes lost in the peer's host.
    pub(super) lost_in_peer: u32,
    /// Replies lost on the way back.
    pub(super) lost_back: u32,
    /// Replies that came back but did not reach the agent in time.
    pub(super) lost_here: u32,
}

/// The followed ways, each keyed by its first target.
#[derive(Debug, Default)]
pub(super) struct Ways(SparseSecondaryMap<TargetId, Track>);

/// A followed way.
#[derive(Debug, Default)]
struct Track {
    /// Probes that this host failed to send.
    unsent: u32,
    /// Replies that the uplink saw but the agent did not.
    unseen: u32,
    /// In time order, further apart the older they are.
    points: VecDeque<Point>,
}

/// An exchange. This side's counts are bounds: minimum, maximum.
#[derive(Clone, Copy, Debug)]
struct Point {
    asked: Duration,
    told: Duration,
    since_ns: u64,
    counts: WayCounts,
    sent: (u32, u32),
    returned: (u32, u32),
    /// Replies for which no probe was waiting, when the peer was asked.
    surplus: u32,
    unseen: u32,
}

impl Ways {
    /// Whether no way is followed.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a way is followed.
    pub(super) fn is_followed(&self, way: TargetId) -> bool {
        self.0.contains_key(way)
    }

    /// Starts to follow a way, unless too many are followed already.
    pub(super) fn follow(&mut self, way: TargetId) {
        if self.0.len() < MOST_TRACKS && !self.0.contains_key(way) {
            self.0.insert(way, Track::default());
        }
    }

    /// Stops following a way.
    pub(super) fn forget(&mut self, way: TargetId) {
        self.0.remove(way);
    }

    /// Records a probe that this host failed to send.
    pub(super) fn unsent(&mut self, way: TargetId) {
        if let Some(track) = self.0.get_mut(way) {
            track.unsent = track.unsent.wrapping_add(1);
        }
    }

    /// Records a reply that reached the uplink but not the agent.
    pub(super) fn unseen(&mut self, way: TargetId) {
        if let Some(track) = self.0.get_mut(way) {
            track.unseen = track.unseen.wrapping_add(1);
        }
    }

    /// Records an exchange about a followed way.
    pub(super) fn exchanged(&mut self, way: TargetId, exchange: &Exchange) {
        if let Some(track) = self.0.get_mut(way) {
            track.exchanged(exchange);
        }
    }

    /// What happened to the probes since the first exchange after `from`; `None` if unknown.
    pub(super) fn passage(&self, way: TargetId, from: Duration) -> Option<Passage> {
        self.0.get(way)?.passage(from)
    }
}

impl Track {
    fn passage(&self, from: Duration) -> Option<Passage> {
        let first = self.points.iter().find(|p| p.asked >= from)?;
        let later = self.points.back()?;
        let is_settled = |p: &&Point| p.told + SETTLING <= later.asked;
        let last = self.points.iter().rev().find(is_settled)?;
        first.passage(last, later)
    }

    fn exchanged(&mut self, exchange: &Exchange) {
        let Exchange {
            asked,
            before,
            told,
            after,
            ..
        } = *exchange;
        let point = Point {
            asked,
            told,
            since_ns: exchange.since_ns,
            counts: exchange.counts,
            sent: (
                before.settled.wrapping_sub(self.unsent),
                after
                    .settled
                    .wrapping_add(after.in_flight)
                    .wrapping_sub(self.unsent),
            ),
            returned: (
                before.returned,
                after.returned.wrapping_add(after.in_flight),
            ),
            surplus: before.surplus,
            unseen: self.unseen,
        };
        if let Some(last) = self.points.back() {
            // For two concurrent exchanges it is unknown whose counts are older.
            if asked < last.told {
                return;
            }
            // One of the two sides restarted its counts.
            if !last.precedes(&point) {
                self.points.clear();
            }
        }
        self.points.push_back(point);
        self.thin_out(told);
    }

    /// Drops exchanges that are outside all windows or too close together for their age.
    fn thin_out(&mut self, now: Duration) {
        let points = &mut self.points;
        while points.len() > MOST_POINTS
            || points
                .front()
                .is_some_and(|p| p.asked + WINDOWS[0] < now && points.len() > 1)
        {
            points.pop_front();
        }
        let mut middle = points.len().saturating_sub(2);
        while middle > 0 {
            let (older, newer) = (points[middle - 1].asked, points[middle + 1].asked);
            let gap = newer.saturating_sub(older);
            if gap < DENSE || gap * 3 < now.saturating_sub(older) * 2 {
                points.remove(middle);
            }
            middle -= 1;
        }
    }
}

impl Point {
    /// Whether all counts continue from this exchange to a later one.
    fn precedes(&self, later: &Self) -> bool {
        self.since_ns == later.since_ns
            && increase(self.counts.arrived, later.counts.arrived).is_some()
            && increase(self.counts.replied, later.counts.replied).is_some()
            && increase(self.sent.0, later.sent.0).is_some()
            && increase(self.returned.0, later.returned.0).is_some()
            && increase(self.surplus, later.surplus).is_some()
    }

    /// What happened to the probes between this exchange and `last`; `None` if the counts contradict each other. All
    /// replies in flight at `last` have arrived by the time `later` starts.
    fn passage(&self, last: &Self, later: &Self) -> Option<Passage> {
        if last.asked < self.told || !self.precedes(last) {
            return None;
        }
        let arrived = increase(self.counts.arrived, last.counts.arrived)?;
        let replied = increase(self.counts.replied, last.counts.replied)?;
        let sent_most = increase(self.sent.0, last.sent.1)?;
        let sent_least = increase(self.sent.1, last.sent.0).unwrap_or(0);
        // Any reply that arrived after the last exchange may have left the peer before it.
        let surplus = increase(last.surplus, later.surplus)?;
        let returned_most = increase(self.returned.0, last.returned.1)?.saturating_add(surplus);
        let returned_least = increase(self.returned.1, last.returned.0).unwrap_or(0);
        // At each step there cannot be more packets than at the step before, except for duplicates, which show up as
        // surplus.
        let duplicates = increase(self.surplus, later.surplus)?;
        let unsure = self.unsure().saturating_add(duplicates);
        if arrived > sent_most.saturating_add(duplicates)
            || replied > arrived.saturating_add(unsure)
            || returned_least > replied.saturating_add(unsure)
        {
            return None;
        }
        Some(Passage {
            time: last.told.saturating_sub(self.asked),
            sent: sent_least.max(arrived),
            arrived,
            replied,
            returned: returned_most.min(replied),
            lost_there: sent_least.saturating_sub(arrived),
            lost_in_peer: arrived
                .saturating_sub(replied + last.unsure())
                .saturating_sub(surplus),
            lost_back: replied.saturating_sub(returned_most),
            lost_here: increase(self.unseen, last.unseen)?,
        })
    }

    /// Number of probes that may lie on either side of the exchange.
    fn unsure(&self) -> u32 {
        self.sent.1.wrapping_sub(self.sent.0)
    }
}

/// Increase of a wrapping count; `None` if it decreased.
fn increase(before: u32, after: u32) -> Option<u32> {
    let increase = after.wrapping_sub(before);
    (increase <= u32::MAX / 2).then_some(increase)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// The final fate of a probe.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fate {
        LostThere,
        LostInPeer,
        LostBack,
        Returned,
        /// Arrives after it was given up.
        Late,
        /// Duplicated on the way there.
        DuplicatedThere,
        /// Duplicated in the peer's host.
        DuplicatedInPeer,
        /// Duplicated on the way back.
        DuplicatedBack,
        /// Never reaches the agent.
        Unseen,
        /// This host did not send it.
        Unsent,
    }
    use Fate::{
        DuplicatedBack, DuplicatedInPeer, DuplicatedThere, Late, LostBack, LostInPeer, LostThere,
        Returned, Unseen, Unsent,
    };

    const TIMEOUT: u64 = 1000;
    const _: () = assert!(TIMEOUT as u128 == SETTLING.as_millis());

    #[derive(Clone, Copy, Debug)]
    struct Probe {
        /// Time of sending, in milliseconds.
        sent: u64,
        /// One-way delay, in milliseconds. This and the next two are below a quarter of the time-out.
        delay: u64,
        /// Time spent in the peer's host.
        stay: u64,
        /// How much later a duplicate follows.
        lag: u64,
        fate: Fate,
    }

    impl Probe {
        /// A probe that spends no time in the peer's host.
        fn new(sent: u64, delay: u64, fate: Fate) -> Self {
            Self {
                sent,
                delay,
                stay: 0,
                lag: delay,
                fate,
            }
        }

        fn arrived(&self, at: u64) -> bool {
            !matches!(self.fate, LostThere | Unsent) && at >= self.sent + self.delay
        }

        fn arrived_again(&self, at: u64) -> bool {
            self.fate == DuplicatedThere && self.arrived(at.saturating_sub(self.lag))
        }

        fn replied(&self, at: u64) -> bool {
            self.arrived(at.saturating_sub(self.stay)) && self.fate != LostInPeer
        }

        fn replied_again(&self, at: u64) -> bool {
            matches!(self.fate, DuplicatedThere | DuplicatedInPeer)
                && self.replied(at.saturating_sub(self.lag))
        }

        fn returned(&self, at: u64) -> bool {
            let delay = if self.fate == Late {
                TIMEOUT
            } else {
                self.delay
            };
            self.replied(at.saturating_sub(delay)) && self.fate != LostBack
        }

        fn returned_again(&self, at: u64) -> bool {
            let is_twice = matches!(
                self.fate,
                DuplicatedThere | DuplicatedInPeer | DuplicatedBack
            );
            is_twice && self.returned(at.saturating_sub(self.lag))
        }

        fn is_settled(&self, at: u64) -> bool {
            at >= self.sent
                && (self.returned(at) || self.fate == Unsent || at >= self.sent + TIMEOUT)
        }
    }

    /// Two agents and everything sent between them.
    #[derive(Debug)]
    struct Model {
        probes: Vec<Probe>,
        /// When the peer's counts restart.
        restarts: Vec<u64>,
        /// Initial value of the counts: close to the maximum, they wrap.
        base: u32,
    }

    impl Model {
        fn count(&self, is: impl Fn(&Probe) -> bool) -> u32 {
            self.probes.iter().filter(|probe| is(probe)).count() as u32
        }

        fn own(&self, at: u64) -> OwnCounts {
            let surplus = self.count(|p| p.returned_again(at))
                + self.count(|p| p.fate == Late && p.returned(at));
            let answered = self.count(|p| p.fate != Late && p.returned(at));
            OwnCounts {
                settled: self.base.wrapping_add(self.count(|p| p.is_settled(at))),
                in_flight: self.count(|p| p.sent <= at && !p.is_settled(at)),
                returned: self.base.wrapping_add(answered + surplus),
                surplus: self.base.wrapping_add(surplus),
            }
        }

        fn exchange(&self, asked: u64, read: u64, told: u64) -> Exchange {
            let since = self.restarts.iter().copied().filter(|&at| at <= read).max();
            let since = since.unwrap_or(0);
            let base = if since == 0 { self.base } else { 0 };
            let counted = |is: &dyn Fn(&Probe, u64) -> bool| {
                self.count(|p| is(p, read)) - self.count(|p| since > 0 && is(p, since))
            };
            let arrived = counted(&Probe::arrived) + counted(&Probe::arrived_again);
            let replied = counted(&Probe::replied) + counted(&Probe::replied_again);
            Exchange {
                asked: millis(asked),
                before: self.own(asked),
                told: millis(told),
                after: self.own(told),
                since_ns: since,
                counts: WayCounts {
                    arrived: base.wrapping_add(arrived),
                    replied: base.wrapping_add(replied),
                },
            }
        }

        /// Follows the way through exchanges with these times of request, reading and answer, recorded in the given
        /// order.
        fn track(&self, exchanges: &[(u64, u64, u64)]) -> Track {
            let mut track = Track::default();
            let mut until = 0;
            for &(asked, read, told) in exchanges {
                for probe in &self.probes {
                    let at = match probe.fate {
                        Unsent => probe.sent,
                        Unseen => probe.sent + TIMEOUT,
                        _ => continue,
                    };
                    if (until..=told).contains(&at) && until < told {
                        match probe.fate {
                            Unsent => track.unsent += 1,
                            _ => track.unseen += 1,
                        }
                    }
                }
                until = until.max(told + 1);
                track.exchanged(&self.exchange(asked, read, told));
            }
            track
        }
    }

    /// One probe a second; one in `each` has this fate.
    fn regular(fate: Fate, each: usize) -> Model {
        let probe = |number: usize| {
            let is_one = number.is_multiple_of(each);
            Probe::new(
                number as u64 * 1000 + 100,
                20,
                if is_one { fate } else { Returned },
            )
        };
        Model {
            probes: (0..700).map(probe).collect(),
            restarts: Vec::new(),
            base: 0,
        }
    }

    fn passage(model: &Model, from: u64, until: u64) -> Option<Passage> {
        let exchanges: Vec<_> = (from..until)
            .step_by(5)
            .map(|second| {
                (
                    second * 1000 + 500,
                    second * 1000 + 503,
                    second * 1000 + 506,
                )
            })
            .collect();
        let mut ways = Ways::default();
        let way = slotmap::SlotMap::<TargetId, ()>::with_key().insert(());
        ways.follow(way);
        *ways.0.get_mut(way).unwrap() = model.track(&exchanges);
        ways.passage(way, millis(from * 1000))
    }

    #[test]
    fn a_loss_is_told_where_it_is() {
        type Of = fn(&Passage) -> u32;
        let parts: [(Fate, Of); 3] = [
            (LostThere, |p| p.lost_there),
            (LostInPeer, |p| p.lost_in_peer),
            (LostBack, |p| p.lost_back),
        ];
        for (fate, of) in parts {
            let passage = passage(&regular(fate, 4), 60, 600).unwrap();
            let all = passage.lost_there + passage.lost_in_peer + passage.lost_back;
            assert_eq!(all, of(&passage), "{fate:?}: {passage:?}");
            let share = f64::from(all) / f64::from(passage.sent);
            assert!((0.23..0.26).contains(&share), "{fate:?}: {passage:?}");
            assert!(passage.sent > 300, "{fate:?}: {passage:?}");
        }
        let none = passage(&regular(Returned, 4), 60, 600).unwrap();
        assert_eq!((none.sent, none.arrived), (none.replied, none.returned));
        let own = passage(&regular(Unsent, 4), 60, 600).unwrap();
        assert_eq!((own.lost_there, own.sent), (0, own.arrived));
        let late = passage(&regular(Late, 4), 60, 600).unwrap();
        assert_eq!((late.sent, late.arrived), (late.replied, late.returned));
    }

    #[test]
    fn a_restart_of_the_peer_begins_anew() {
        let mut model = regular(LostThere, 4);
        model.restarts = vec![400_200];
        let after = passage(&model, 60, 600).unwrap();
        assert!(after.time < Duration::from_secs(200), "{after:?}");
        assert!(after.lost_there > 0, "{after:?}");
        model.restarts = vec![594_000];
        assert_eq!(passage(&model, 60, 600), None);
    }

    #[test]
    fn what_cannot_be_tells_nothing() {
        let exchange = |second: u32, arrived, replied, own: u32| {
            let own = OwnCounts {
                settled: own,
                in_flight: 0,
                returned: own,
                surplus: 0,
            };
            Exchange {
                asked: Duration::from_secs(1) * second,
                before: own,
                told: Duration::from_secs(1) * second + millis(1),
                after: own,
                since_ns: 1,
                counts: WayCounts { arrived, replied },
            }
        };
        // More arrivals than probes sent, more replies than requests, more answers than replies.
        for (arrived, replied) in [(61, 60), (50, 55), (50, 50), (0, 0), (u32::MAX, 60)] {
            let mut track = Track::default();
            track.exchanged(&exchange(1, 0, 0, 0));
            track.exchanged(&exchange(60, arrived, replied, 60));
            track.exchanged(&exchange(65, arrived, replied, 60));
            assert_eq!(track.passage(millis(0)), None, "{arrived} {replied}");
        }
    }

    /// Whatever is in flight at the middle exchange has arrived by the last one.
    #[test]
    fn a_duplicate_on_its_way_is_no_loss() {
        for duplicated in [DuplicatedThere, DuplicatedInPeer, DuplicatedBack] {
            let model = |duplicated| Model {
                probes: vec![
                    Probe::new(4184, 0, LostThere),
                    Probe::new(95_470, 225, duplicated),
                ],
                restarts: Vec::new(),
                base: 0,
            };
            let exchanges = [
                (4513, 4514, 4514),
                (95_332, 95_695, 95_695),
                (97_000, 97_000, 97_000),
            ];
            let of = |fate, count| {
                let passage = model(fate).track(&exchanges[..count]).passage(millis(0));
                passage.map(|p| (p.lost_there, p.lost_in_peer, p.lost_back))
            };
            // Not reported before it is known.
            assert_eq!(of(duplicated, 2), None);
            assert_eq!(of(duplicated, 3), Some((0, 0, 0)), "{duplicated:?}");
            // A reply that does not arrive is a loss, even though its probe is no longer waited for.
            assert_eq!(of(LostBack, 3), Some((0, 0, 0)));
        }
    }

    #[test]
    fn duplicates_hide_no_losses_elsewhere() {
        for duplicated in [DuplicatedThere, DuplicatedInPeer, DuplicatedBack] {
            let mut model = regular(LostThere, 4);
            for probe in model.probes.iter_mut().skip(1).step_by(40) {
                probe.fate = duplicated;
            }
            let passage = passage(&model, 60, 600).unwrap();
            assert!(passage.lost_there > 100, "{duplicated:?}: {passage:?}");
            let elsewhere = (passage.lost_in_peer, passage.lost_back);
            assert_eq!(elsewhere, (0, 0), "{duplicated:?}: {passage:?}");
        }
    }

    #[test]
    fn a_duplicate_that_waits_in_the_peers_host_is_no_loss() {
        let duplicate = Probe {
            stay: 200,
            lag: 10,
            ..Probe::new(95_470, 100, DuplicatedThere)
        };
        let model = Model {
            probes: vec![duplicate],
            restarts: Vec::new(),
            base: 0,
        };
        // When the counts are read, both have arrived and neither has been answered.
        let exchanges = [
            (4513, 4514, 4514),
            (95_332, 95_695, 95_695),
            (97_000, 97_000, 97_000),
        ];
        let passage = model.track(&exchanges).passage(millis(0)).unwrap();
        assert_eq!((passage.arrived, passage.replied), (2, 0));
        assert_eq!(passage.lost_in_peer, 0, "{passage:?}");
    }

    #[test]
    fn probes_that_this_host_did_not_send_hide_no_losses() {
        let mut model = regular(LostThere, 4);
        for probe in model.probes.iter_mut().skip(1).step_by(4) {
            probe.fate = Unsent;
        }
        let passage = passage(&model, 60, 600).unwrap();
        // One in three of the probes that were sent.
        let share = f64::from(passage.lost_there) / f64::from(passage.sent);
        assert!((0.31..0.35).contains(&share), "{passage:?}");
    }

    #[test]
    fn replies_that_the_agent_did_not_see_are_told_of_their_time_alone() {
        let model = regular(Returned, 4);
        let exchange = |second: u64| {
            let at = second * 1000 + 500;
            model.exchange(at, at + 1, at + 2)
        };
        let mut track = Track::default();
        for (second, unseen) in [(1, 4), (60, 2), (65, 3)] {
            track.unseen += unseen;
            track.exchanged(&exchange(second));
        }
        let passage = track.passage(millis(0)).unwrap();
        assert_eq!(passage.time, millis(59_002));
        assert_eq!(passage.lost_here, 2);
    }

    #[test]
    fn what_is_followed_is_bounded() {
        assert!(size_of::<Point>() <= 72);
        let model = regular(LostThere, 4);
        let exchanges: Vec<_> = (0..6000)
            .map(|n| (n * 100, n * 100 + 1, n * 100 + 2))
            .collect();
        let track = model.track(&exchanges);
        assert!(track.points.len() <= MOST_POINTS);
        // It still reaches far back.
        let covered = track.points[track.points.len() - 1].told - track.points[0].asked;
        assert!(covered > Duration::from_secs(300), "{covered:?}");
        let mut ways = Ways::default();
        let mut ids = slotmap::SlotMap::<TargetId, ()>::with_key();
        for _ in 0..=MOST_TRACKS {
            ways.follow(ids.insert(()));
        }
        assert_eq!(ways.0.len(), MOST_TRACKS);
    }

    fn any_fate() -> impl Strategy<Value = Fate> {
        prop::sample::select(vec![
            LostThere,
            LostInPeer,
            LostBack,
            Returned,
            Late,
            DuplicatedThere,
            DuplicatedInPeer,
            DuplicatedBack,
            Unseen,
            Unsent,
        ])
    }

    proptest! {
        /// Whatever is lost or duplicated elsewhere, whichever side restarts, wherever the counts wrap and in whatever
        /// order answers arrive: no part of the way is reported to lose more than it did.
        #[test]
        fn no_loss_is_told_where_there_is_none(
            probes in prop::collection::vec(
                (1_u64..100_000, prop::array::uniform3(0_u64..TIMEOUT / 4), any_fate()),
                0..150,
            ),
            spared in any_fate(),
            restarts in prop::collection::vec(1_u64..100_000, 0..3),
            base in prop_oneof![Just(0_u32), u32::MAX - 150..=u32::MAX],
            exchanges in prop::collection::vec((0_u64..100_000, 0_u64..1500, 0_u64..1500), 2..30),
            is_in_order: bool,
            from in 0_u64..50_000,
        ) {
            let probes = probes.into_iter().map(|(sent, [delay, stay, lag], fate)| Probe {
                sent,
                delay,
                stay,
                lag,
                fate: if fate == spared { Returned } else { fate },
            });
            let model = Model { probes: probes.collect(), restarts, base };
            let mut exchanges: Vec<_> = exchanges
                .into_iter()
                .map(|(asked, wait, more)| (asked, asked + wait, asked + wait + more))
                .collect();
            if is_in_order {
                exchanges.sort_by_key(|&(_, _, told)| told);
            }
            if let Some(passage) = model.track(&exchanges).passage(millis(from)) {
                let most = |is: Fate| model.count(|p| p.fate == is);
                prop_assert!(passage.lost_there <= most(LostThere), "{passage:?}");
                prop_assert!(passage.lost_in_peer <= most(LostInPeer), "{passage:?}");
                prop_assert!(passage.lost_back <= most(LostBack), "{passage:?}");
                prop_assert!(passage.lost_here <= most(Unseen), "{passage:?}");
            }
        }
    }
}
