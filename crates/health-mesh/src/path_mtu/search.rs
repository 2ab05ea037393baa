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
    /// The MTU of the sender's next hop in bytes; 0 from routers older than RFC 1191.
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
        notice: Option<TooBig>,
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
    notice: Option<TooBig>,
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
    /// The last error about this size.
    notice: Option<TooBig>,
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
            notice: None,
            control: false,
            lost: false,
            controls_lost: 0,
        }
    }
}

impl Search {
    /// Creates a search within `limits`, whose probes wait for at most `timeout`. `before` is the reduced MTU found by
    /// the previous search.
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
            notice: None,
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
                self.trial.notice = Some(error);
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

    /// Handles a size that gets through.
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

    /// Handles another failure of the size being tried; after `enough` failures it is too large.
    fn failed(&mut self, enough: u32, now: Duration) {
        self.trial.failures += 1;
        if self.trial.failures < enough {
            return;
        }
        self.fails = self.trial.size;
        self.notice = self.trial.notice;
        if self.stage == Stage::Confirm {
            self.end(Verdict::Reduced {
                mtu: self.fits,
                notice: self.notice,
            });
            return;
        }
        let between = self.fits + 1..self.fails;
        let hint = self.notice.map(|notice| notice.next_hop_mtu);
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
                    notice: self.notice,
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
mod tests;
