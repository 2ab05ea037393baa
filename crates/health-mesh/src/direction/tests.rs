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
    /// One-way delay, in milliseconds. This and the next two fields are below a quarter of the time-out.
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
        at >= self.sent && (self.returned(at) || self.fate == Unsent || at >= self.sent + TIMEOUT)
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
        let surplus =
            self.count(|p| p.returned_again(at)) + self.count(|p| p.fate == Late && p.returned(at));
        let answered = self.count(|p| p.fate != Late && p.returned(at));
        OwnCounts {
            settled: self.base.wrapping_add(self.count(|p| p.is_settled(at))),
            in_flight: self.count(|p| p.sent <= at && !p.is_settled(at)),
            returned: self.base.wrapping_add(answered + surplus),
            surplus: self.base.wrapping_add(surplus),
        }
    }

    fn exchange(&self, asked: u64, read: u64, answered: u64) -> Exchange {
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
            answered: millis(answered),
            after: self.own(answered),
            since_ns: since,
            counts: WayCounts {
                arrived: base.wrapping_add(arrived),
                replied: base.wrapping_add(replied),
            },
        }
    }

    /// Follows the way through these exchanges (times of request, reading and answer), recorded in the given order.
    fn track(&self, exchanges: &[(u64, u64, u64)]) -> Track {
        let mut track = Track::default();
        let mut until = 0;
        for &(asked, read, answered) in exchanges {
            for probe in &self.probes {
                let at = match probe.fate {
                    Unsent => probe.sent,
                    Unseen => probe.sent + TIMEOUT,
                    _ => continue,
                };
                if (until..=answered).contains(&at) && until < answered {
                    match probe.fate {
                        Unsent => track.unsent += 1,
                        _ => track.unseen += 1,
                    }
                }
            }
            until = until.max(answered + 1);
            track.exchanged(&self.exchange(asked, read, answered));
        }
        track
    }
}

/// One probe a second; one in `each` meets this fate.
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
fn a_loss_is_reported_where_it_is() {
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
fn impossible_values_report_nothing() {
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
            answered: Duration::from_secs(1) * second + millis(1),
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
fn replies_that_the_agent_did_not_see_are_reported_with_their_time_alone() {
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
    // The track still reaches far back.
    let covered = track.points[track.points.len() - 1].answered - track.points[0].asked;
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
    fn no_loss_is_reported_where_there_is_none(
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
            exchanges.sort_by_key(|&(_, _, answered)| answered);
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
