//! Finds the MTU of one path with echo requests of different sizes, like RFC 4821 and RFC 8899. Pure: time is passed in
//! as the duration since the start.
//!
//! Sizes count whole IP packets, in bytes. A search sends one probe after another:
//!
//! 1. a *small* one, which shows that the path works at all;
//! 2. one *above* the device's MTU, which this host must refuse; otherwise the MTU has changed;
//! 3. one as large as the device or route allows. If it is answered, the search is done;
//! 4. sizes in between, first those that a router reports, until one fits and one byte more does not;
//! 5. after a pause, these two sizes alternately, until the larger one has failed several times.
//!
//! A packet without an answer may have been lost by chance, so it counts only if the largest size known to fit is
//! answered right after it. During the search an ICMP error counts by itself, but is not sufficient for a result: the
//! size that it reports must fit, and one byte more must not.

use std::net::IpAddr;
use std::time::Duration;

/// Size of the small probe: larger than a regular one, and smaller than any MTU in use.
pub(super) const SMALL: u32 = 100;
/// The largest IPv4 packet, and the largest length that an IPv6 header can express by itself.
const LARGEST: u32 = 65_535;

/// Number of counted failures after which a size is considered too large: during the search (`MAX_PROBES` of RFC 8899
/// section 5.1.2), and for confirmation.
const FAILURES: u32 = 3;
const CONFIRMING_FAILURES: u32 = 5;
/// Number of probes in a row of a size known to fit that may be lost before the search gives up.
const CONTROLS: u32 = 3;
/// Maximum number of reported next-hop MTUs tried per search: nested tunnels have one each, and a lying router could
/// name very many.
const HINTS: u32 = 4;
/// Number of times that the search restarts when a size turns out to fit after all.
const RESTARTS: u32 = 2;
/// Maximum number of probes per search; a path of any MTU needs fewer unless it loses many.
const MOST_PROBES: u32 = 250;
/// Pause before the result is confirmed: by then a queue that drops large packets has drained.
const CONFIRM_AFTER: Duration = Duration::from_secs(5);
/// During the search, a probe waits for this plus four round trips of the small probe.
const PATIENCE: Duration = Duration::from_millis(200);

/// Packet size limits of the outgoing route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Limit of device and route.
    pub(super) mtu: u32,
    /// Limit of the device alone.
    pub(super) device_mtu: u32,
}

/// An ICMP error that reports a packet as too big: destination unreachable with code 4 (RFC 1191 section 4), or ICMPv6
/// type 2 (RFC 4443 section 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooBig {
    /// The sender of the error.
    pub(crate) from: IpAddr,
    /// The MTU of the sender's next hop, bytes; 0 from routers older than RFC 1191.
    pub(crate) next_hop_mtu: u32,
}

/// Outcome of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The reply arrived after this time.
    Answered(Duration),
    /// A router refused to forward it.
    TooBig(TooBig),
    /// Nothing arrived.
    Lost,
    /// This host refused to send it (`EMSGSIZE`).
    Refused,
}

/// Result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Packets as large as the outgoing route allows get through.
    Full,
    /// Packets of `mtu` bytes get through, larger ones do not.
    Reduced {
        /// The path's MTU.
        mtu: u32,
        /// The router that reports it; `None` if packets vanish.
        told: Option<TooBig>,
    },
    /// Small packets do not get through reliably either, or the result did not hold.
    Inconclusive,
    /// The device's MTU differs from the one passed to the search.
    OtherMtu,
}

/// The next step of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Send a probe and wait for its answer. [`Search::note`] must follow.
    Send {
        /// Length of the IP packet.
        size: u32,
        /// Time to wait, from when it is sent.
        patience: Duration,
    },
    /// Do nothing before this time.
    Wait(Duration),
    /// The search is finished.
    End(Verdict),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Small,
    Above,
    Full,
    Between,
    Pause { until: Duration },
    Confirm,
    Over(Verdict),
}

/// A search for the MTU of one path.
#[derive(Debug)]
pub(super) struct Search {
    limits: Limits,
    stage: Stage,
    /// A probe's time-out, and its shortened value during the search.
    timeout: Duration,
    patience: Duration,
    /// The largest size that was answered.
    fits: u32,
    /// The smallest size that was not answered.
    fails: u32,
    /// The error that reported this size as too big.
    told: Option<TooBig>,
    /// The previous result.
    before: Option<u32>,
    /// A size that may be the path's MTU.
    guess: Option<u32>,
    hints: u32,
    restarts: u32,
    probes: u32,
    trial: Trial,
}

/// A size being tried.
#[derive(Clone, Copy, Debug)]
struct Trial {
    size: u32,
    failures: u32,
    /// The last error about it.
    told: Option<TooBig>,
    /// A size known to fit is probed instead.
    control: bool,
    /// Its last probe was lost, and counts as failed if the control is answered.
    lost: bool,
    /// Number of controls lost in a row.
    controls_lost: u32,
}

impl Trial {
    fn of(size: u32) -> Self {
        Self {
            size,
            failures: 0,
            told: None,
            control: false,
            lost: false,
            controls_lost: 0,
        }
    }
}

impl Search {
    /// A search within `limits`, whose probes wait for at most `timeout`. `before` is the reduced MTU found by the
    /// previous search.
    pub(super) fn new(limits: Limits, before: Option<u32>, timeout: Duration) -> Self {
        let limits = Limits {
            mtu: limits.mtu.min(LARGEST),
            ..limits
        };
        Self {
            limits,
            // Hosts with such a small MTU are not worth a search.
            stage: match limits.mtu > SMALL {
                true => Stage::Small,
                false => Stage::Over(Verdict::Inconclusive),
            },
            timeout,
            patience: timeout,
            fits: 0,
            fails: limits.mtu + 1,
            told: None,
            before,
            guess: before,
            hints: HINTS,
            restarts: RESTARTS,
            probes: 0,
            trial: Trial::of(SMALL),
        }
    }

    /// The next step.
    pub(super) fn step(&mut self, now: Duration) -> Step {
        if let Stage::Pause { until } = self.stage {
            if now < until {
                return Step::Wait(until);
            }
            self.stage = Stage::Confirm;
            // The smaller size first.
            self.trial = Trial {
                control: true,
                ..Trial::of(self.fails)
            };
        }
        if let Stage::Over(verdict) = self.stage {
            return Step::End(verdict);
        }
        Step::Send {
            size: match self.trial.control {
                true => self.fits,
                false => self.trial.size,
            },
            patience: match self.stage {
                Stage::Full | Stage::Between => self.patience,
                _ => self.timeout,
            },
        }
    }

    /// Records the outcome of the probe that [`Self::step`] requested.
    pub(super) fn note(&mut self, outcome: Outcome, now: Duration) {
        self.probes += 1;
        match (self.stage, outcome) {
            (Stage::Over(_) | Stage::Pause { .. }, _) => {}
            (Stage::Above, Outcome::Refused) => self.try_full(),
            (Stage::Above, _) | (_, Outcome::Refused) => self.end(Verdict::OtherMtu),
            _ if self.probes >= MOST_PROBES => self.end(Verdict::Inconclusive),
            (Stage::Small, Outcome::Answered(round_trip)) => {
                self.fits = SMALL;
                self.patience = self.timeout.min(PATIENCE + round_trip * 4);
                if self.limits.device_mtu < LARGEST {
                    self.stage = Stage::Above;
                    self.trial = Trial::of(self.limits.device_mtu + 1);
                } else {
                    self.try_full();
                }
            }
            (Stage::Small, _) => self.control_lost(),
            _ if self.trial.control => match outcome {
                Outcome::Answered(_) => self.control_answered(now),
                _ => self.control_lost(),
            },
            (_, Outcome::Answered(_)) => self.answered(now),
            (_, Outcome::TooBig(error)) => {
                self.trial.told = Some(error);
                let enough = match self.stage {
                    Stage::Confirm => CONFIRMING_FAILURES,
                    _ => 1,
                };
                self.failed(enough, now);
            }
            (_, Outcome::Lost) => {
                self.trial.lost = true;
                self.trial.control = true;
            }
        }
    }

    fn try_full(&mut self) {
        self.stage = Stage::Full;
        self.trial = Trial::of(self.limits.mtu);
    }

    fn control_lost(&mut self) {
        // The probe lost before it may have been lost for the same reason.
        self.trial.lost = false;
        self.trial.controls_lost += 1;
        if self.trial.controls_lost >= CONTROLS {
            self.end(Verdict::Inconclusive);
        }
    }

    fn control_answered(&mut self, now: Duration) {
        self.trial.controls_lost = 0;
        self.trial.control = false;
        if std::mem::take(&mut self.trial.lost) {
            let enough = match self.stage {
                Stage::Confirm => CONFIRMING_FAILURES,
                _ => FAILURES,
            };
            self.failed(enough, now);
        }
    }

    /// The size being tried gets through.
    fn answered(&mut self, now: Duration) {
        self.fits = self.trial.size;
        if self.fits == self.limits.mtu {
            self.end(Verdict::Full);
        } else if self.stage == Stage::Confirm {
            self.restart();
        } else {
            self.look_between(now);
        }
    }

    /// The size being tried has failed again; after `enough` failures it is too large.
    fn failed(&mut self, enough: u32, now: Duration) {
        self.trial.failures += 1;
        if self.trial.failures < enough {
            return;
        }
        self.fails = self.trial.size;
        self.told = self.trial.told;
        if self.stage == Stage::Confirm {
            self.end(Verdict::Reduced {
                mtu: self.fits,
                told: self.told,
            });
            return;
        }
        let between = self.fits + 1..self.fails;
        let hint = self.told.map(|told| told.next_hop_mtu);
        if let Some(hint) = hint.filter(|hint| between.contains(hint) && self.hints > 0) {
            self.hints -= 1;
            self.guess = Some(hint);
        }
        self.look_between(now);
    }

    fn look_between(&mut self, now: Duration) {
        self.stage = Stage::Between;
        if self.fails - self.fits == 1 {
            if self.before == Some(self.fits) {
                self.end(Verdict::Reduced {
                    mtu: self.fits,
                    told: self.told,
                });
            } else {
                let until = now + CONFIRM_AFTER;
                self.stage = Stage::Pause { until };
            }
            return;
        }
        let between = self.fits + 1..self.fails;
        let size = match self.guess {
            Some(guess) if between.contains(&guess) => guess,
            // It fits; is one byte more too much?
            Some(guess) if guess == self.fits => guess + 1,
            _ => self.fits + (self.fails - self.fits) / 2,
        };
        self.trial = Trial::of(size);
    }

    /// Restarts: the sizes that failed before were not too large.
    fn restart(&mut self) {
        if self.restarts == 0 {
            self.end(Verdict::Inconclusive);
            return;
        }
        self.restarts -= 1;
        self.fails = self.limits.mtu + 1;
        self.guess = None;
        self.try_full();
    }

    fn end(&mut self, verdict: Verdict) {
        self.stage = Stage::Over(verdict);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(1);
    const RTT: Duration = Duration::from_millis(2);
    const ROUTER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn limits(mtu: u32) -> Limits {
        Limits {
            mtu,
            device_mtu: mtu,
        }
    }

    /// Everything that a search did, and its cost.
    #[derive(Debug)]
    struct Trace {
        verdict: Verdict,
        probes: Vec<(u32, Outcome)>,
        time: Duration,
    }

    impl Trace {
        fn sizes(&self) -> Vec<u32> {
            self.probes.iter().map(|(size, _)| *size).collect()
        }
    }

    /// Runs a search to its end over a path, which is called with each size.
    fn run(mut search: Search, mut path: impl FnMut(u32) -> Outcome) -> Trace {
        let (mut probes, mut now) = (Vec::new(), Duration::ZERO);
        loop {
            match search.step(now) {
                Step::Send { size, patience } => {
                    let outcome = path(size);
                    now += match outcome {
                        Outcome::Lost => patience,
                        Outcome::Answered(rtt) => rtt,
                        Outcome::TooBig(_) | Outcome::Refused => Duration::ZERO,
                    };
                    search.note(outcome, now);
                    probes.push((size, outcome));
                }
                Step::Wait(until) => {
                    assert!(until > now);
                    now = until;
                }
                Step::End(verdict) => {
                    return Trace {
                        verdict,
                        probes,
                        time: now,
                    };
                }
            }
        }
    }

    fn search(mtu: u32) -> Search {
        Search::new(limits(mtu), None, TIMEOUT)
    }

    /// A path behind a device of `device_mtu` that lets packets of up to `mtu` bytes through, and answers larger ones
    /// with `error`.
    fn path(device_mtu: u32, mtu: u32, error: Outcome) -> impl Fn(u32) -> Outcome {
        move |size| match size {
            _ if size > device_mtu => Outcome::Refused,
            _ if size > mtu => error,
            _ => Outcome::Answered(RTT),
        }
    }

    fn too_big(next_hop_mtu: u32) -> Outcome {
        Outcome::TooBig(TooBig {
            from: ROUTER,
            next_hop_mtu,
        })
    }

    fn too_big_error(next_hop_mtu: u32) -> Option<TooBig> {
        match too_big(next_hop_mtu) {
            Outcome::TooBig(told) => Some(told),
            _ => None,
        }
    }

    #[test]
    fn a_full_path_takes_a_small_one_one_that_is_refused_and_a_full_one() {
        let trace = run(search(1500), path(1500, 1500, Outcome::Lost));
        assert_eq!(trace.verdict, Verdict::Full);
        assert_eq!(trace.sizes(), [SMALL, 1501, 1500]);
        // A route may allow less than its device.
        let limits = Limits {
            mtu: 1400,
            device_mtu: 1500,
        };
        let trace = run(
            Search::new(limits, None, TIMEOUT),
            path(1500, 1400, Outcome::Lost),
        );
        assert_eq!(trace.verdict, Verdict::Full);
        assert_eq!(trace.sizes(), [SMALL, 1501, 1400]);
    }

    #[test]
    fn a_router_that_tells_its_mtu_is_believed_once_that_is_confirmed() {
        let trace = run(search(1500), path(1500, 1400, too_big(1400)));
        let verdict = Verdict::Reduced {
            mtu: 1400,
            told: too_big_error(1400),
        };
        assert_eq!(trace.verdict, verdict);
        assert_eq!(trace.sizes()[2..5], [1500, 1400, 1401]);
        assert_eq!(trace.sizes()[5..], [1400, 1401, 1401, 1401, 1401, 1401]);
        assert!(trace.time >= CONFIRM_AFTER);
    }

    #[test]
    fn a_black_hole_is_found_without_a_word_from_anybody() {
        let trace = run(search(1500), path(1500, 1404, Outcome::Lost));
        let verdict = Verdict::Reduced {
            mtu: 1404,
            told: None,
        };
        assert_eq!(trace.verdict, verdict);
        assert!(trace.time < Duration::from_secs(20), "{:?}", trace.time);
    }

    #[test]
    fn what_was_found_before_is_seen_again_with_few_probes() {
        let before = |error| {
            let search = Search::new(limits(1500), Some(1400), TIMEOUT);
            run(search, path(1500, 1400, error))
        };
        let trace = before(too_big(1400));
        assert_eq!(trace.sizes(), [SMALL, 1501, 1500, 1400, 1401]);
        let trace = before(Outcome::Lost);
        assert_eq!(
            trace.verdict,
            Verdict::Reduced {
                mtu: 1400,
                told: None
            }
        );
        assert_eq!(trace.probes.len(), 15, "{:?}", trace.sizes());
        let search = Search::new(limits(1500), Some(1400), TIMEOUT);
        let trace = run(search, path(1500, 1500, Outcome::Lost));
        assert_eq!(trace.verdict, Verdict::Full);
    }

    #[test]
    fn an_error_about_a_size_that_fits_changes_nothing() {
        let mut forged = false;
        let trace = run(search(1500), |size| match size {
            1501 => Outcome::Refused,
            1500 if !std::mem::replace(&mut forged, true) => too_big(600),
            _ => Outcome::Answered(RTT),
        });
        assert_eq!(trace.verdict, Verdict::Full);
    }

    #[test]
    fn a_path_without_answers_tells_nothing() {
        let trace = run(search(1500), |_| Outcome::Lost);
        assert_eq!(trace.verdict, Verdict::Inconclusive);
        assert_eq!(trace.sizes(), [SMALL; 3]);
        // Nor does a path that breaks down midway.
        let mut probes = 0;
        let trace = run(search(1500), |size| {
            probes += 1;
            match size {
                1501 => Outcome::Refused,
                _ if probes < 3 => Outcome::Answered(RTT),
                _ => Outcome::Lost,
            }
        });
        assert_eq!(trace.verdict, Verdict::Inconclusive);
        assert_eq!(trace.sizes()[2..], [1500, SMALL, SMALL, SMALL]);
    }

    #[test]
    fn controls_that_are_lost_now_and_then_do_not_end_the_search() {
        // For every second packet that is too large, the control is lost too.
        let (mut tries, mut control_is_lost) = (0_u32, false);
        let trace = run(search(1500), |size| match size {
            1501 => Outcome::Refused,
            _ if size > 1404 => {
                tries += 1;
                control_is_lost = !tries.is_multiple_of(2);
                Outcome::Lost
            }
            _ if std::mem::take(&mut control_is_lost) => Outcome::Lost,
            _ => Outcome::Answered(RTT),
        });
        let verdict = Verdict::Reduced {
            mtu: 1404,
            told: None,
        };
        assert_eq!(trace.verdict, verdict);
    }

    #[test]
    fn what_is_lost_together_with_its_control_does_not_count() {
        let mut losses = 0;
        let trace = run(search(1500), |size| {
            let is_lost = match size {
                1501 => return Outcome::Refused,
                1500 => losses < 6,
                _ => losses % 2 == 1,
            };
            losses += u32::from(is_lost);
            match is_lost {
                true => Outcome::Lost,
                false => Outcome::Answered(RTT),
            }
        });
        assert_eq!(trace.verdict, Verdict::Full);
        let tries = [1500, SMALL, SMALL].repeat(3);
        assert_eq!(
            trace.sizes(),
            [&[SMALL, 1501], &tries[..], &[1500]].concat()
        );
    }

    #[test]
    fn a_device_with_another_mtu_ends_the_search() {
        // The MTU has grown in one case and shrunk in the other.
        for mtu in [9000, 1400] {
            let trace = run(search(1500), path(mtu, mtu, Outcome::Lost));
            assert_eq!(trace.verdict, Verdict::OtherMtu, "{mtu}");
        }
    }

    /// Uniform numbers from 0 to 99, reproducible from a seed (splitmix64).
    fn percents(mut seed: u64) -> impl FnMut() -> u64 {
        move || {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ (mixed >> 31)) % 100
        }
    }

    proptest! {
        #[test]
        fn the_mtu_of_any_path_is_found_to_the_byte(
            (device, mtu) in (SMALL + 1..=LARGEST).prop_flat_map(|d| (Just(d), SMALL..=d)),
            hint in prop_oneof![Just(None), (0_u32..70_000).prop_map(Some)],
            honest: bool,
        ) {
            let error = match hint {
                Some(hint) => too_big(if honest { mtu } else { hint }),
                None => Outcome::Lost,
            };
            let trace = run(search(device), path(device, mtu, error));
            let expected = match (mtu == device, hint) {
                (true, _) => Verdict::Full,
                (_, None) => Verdict::Reduced { mtu, told: None },
                (_, Some(hint)) => Verdict::Reduced {
                    mtu,
                    told: too_big_error(if honest { mtu } else { hint }),
                },
            };
            prop_assert_eq!(trace.verdict, expected);
            prop_assert!(trace.probes.len() <= 130, "{}", trace.probes.len());
        }

        #[test]
        fn any_search_ends_and_a_reduced_mtu_was_seen_to_fit_and_one_byte_more_to_fail(
            outcomes in prop::collection::vec((0_u8..8, 0_u32..2000), 1..400),
            before in prop::option::of(0_u32..2000),
        ) {
            let mut outcomes = outcomes.into_iter().cycle();
            let search = Search::new(limits(1500), before, TIMEOUT);
            let trace = run(search, |size| match outcomes.next() {
                _ if size == 1501 => Outcome::Refused,
                Some((0..4, _)) => Outcome::Answered(RTT),
                Some((4, mtu)) => too_big(mtu),
                _ => Outcome::Lost,
            });
            prop_assert!(trace.probes.len() <= MOST_PROBES as usize);
            if let Verdict::Reduced { mtu, .. } = trace.verdict {
                let count = |wanted: u32, answered: bool| {
                    let is = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_)) == answered;
                    let all = trace.probes.iter();
                    all.filter(|(size, outcome)| *size == wanted && is(outcome)).count()
                };
                prop_assert!(count(mtu, true) >= 1);
                prop_assert!(count(mtu + 1, false) >= 1);
                prop_assert!(before == Some(mtu) || count(mtu + 1, false) >= 5);
            }
        }

        #[test]
        fn chance_does_not_reduce_a_path(seed: u64, loss in 0_u64..10) {
            let mut percent = percents(seed);
            let trace = run(search(1500), |size| match size {
                1501 => Outcome::Refused,
                _ if percent() < loss => Outcome::Lost,
                _ => Outcome::Answered(RTT),
            });
            prop_assert!(!matches!(trace.verdict, Verdict::Reduced { .. }), "{:?}", trace);
        }

        #[test]
        fn chance_does_not_hide_a_reduced_path(seed: u64, mtu in 600_u32..1499) {
            let mut percent = percents(seed);
            let trace = run(search(1500), |size| match size {
                1501 => Outcome::Refused,
                _ if size > mtu || percent() < 2 => Outcome::Lost,
                _ => Outcome::Answered(RTT),
            });
            // Even a size that fits may be lost three times; then the result is inconclusive or correct.
            match trace.verdict {
                Verdict::Reduced { mtu: found, .. } => prop_assert_eq!(found, mtu),
                verdict => prop_assert_eq!(verdict, Verdict::Inconclusive),
            }
        }
    }
}
