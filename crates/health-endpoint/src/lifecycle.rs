//! The states of an endpoint and the transitions between them: one state machine, with one setter for the code that
//! manages endpoints and one for the code that builds their datapath.

use std::fmt;

use health_model::api::Endpoint;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::log::{Log, LogEntry, Status};

/// The state of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(rename = "EndpointState")
)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The endpoint existed before this agent, and still uses the programs of the previous agent.
    Restoring,
    /// The endpoint waits for the identity of its labels.
    WaitingForIdentity,
    /// The endpoint has an identity, and waits for its datapath to be built.
    WaitingToRegenerate,
    /// The endpoint's datapath is being built.
    Regenerating,
    /// The endpoint's datapath is up to date.
    Ready,
    /// The endpoint is being deleted.
    Disconnecting,
    /// The endpoint was deleted.
    Disconnected,
}

impl State {
    /// All states.
    pub const ALL: [Self; 7] = [
        Self::Restoring,
        Self::WaitingForIdentity,
        Self::WaitingToRegenerate,
        Self::Regenerating,
        Self::Ready,
        Self::Disconnecting,
        Self::Disconnected,
    ];

    /// Returns the state's name for listings.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Restoring => "restoring",
            Self::WaitingForIdentity => "waiting-for-identity",
            Self::WaitingToRegenerate => "waiting-to-regenerate",
            Self::Regenerating => "regenerating",
            Self::Ready => "ready",
            Self::Disconnecting => "disconnecting",
            Self::Disconnected => "disconnected",
        }
    }

    /// Returns the state that an endpoint shows, or `None` for a state that only later versions know.
    pub fn of(endpoint: &Endpoint) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|state| state.text() == endpoint.state)
    }

    /// Whether the endpoint is deleted or being deleted.
    pub(crate) const fn is_ending(self) -> bool {
        matches!(self, Self::Disconnecting | Self::Disconnected)
    }

    /// Judges whether `side` may change the state from `self` to `to`.
    pub const fn judge(self, side: Side, to: Self) -> Judgement {
        use Judgement::{Allowed, Forbidden, Superseded};
        use State::{
            Disconnected, Disconnecting, Ready, Regenerating, Restoring, WaitingForIdentity,
            WaitingToRegenerate,
        };
        match (side, self, to) {
            (
                Side::Manager,
                Restoring | WaitingForIdentity | WaitingToRegenerate | Regenerating | Ready,
                Disconnecting,
            )
            | (Side::Manager, Disconnecting, Disconnected)
            | (
                Side::Manager,
                WaitingToRegenerate | Regenerating | Ready,
                WaitingForIdentity,
            )
            | (
                Side::Manager,
                WaitingForIdentity | Regenerating | Ready,
                WaitingToRegenerate,
            )
            // The identity did not change.
            | (Side::Manager, WaitingForIdentity, Ready)
            | (Side::Builder, Restoring | WaitingToRegenerate, Regenerating)
            | (Side::Builder, Regenerating, Ready) => Allowed,
            // The endpoint is already waiting.
            (Side::Manager, WaitingToRegenerate, WaitingToRegenerate)
            | (Side::Manager, WaitingForIdentity, WaitingForIdentity)
            // Another build will follow, possibly after a new identity.
            | (Side::Builder, WaitingForIdentity | WaitingToRegenerate, Ready)
            | (Side::Builder, WaitingForIdentity, Regenerating) => Superseded,
            _ => Forbidden,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.text())
    }
}

/// The part of the code that changes a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Creation, deletion, and changes of identity, policy or settings.
    Manager,
    /// Building of the datapath.
    Builder,
}

/// The decision on a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// The transition is made.
    Allowed,
    /// The transition is no longer needed, which is normal.
    Superseded,
    /// The transition would be an error.
    Forbidden,
}

/// A refused transition. The state is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an endpoint that is {from} cannot become {to}")]
pub struct RefusedTransition {
    /// The current state.
    pub from: State,
    /// The requested state.
    pub to: State,
    /// Whether the refusal is normal and harmless. If not, the endpoint's log records the refusal.
    pub is_superseded: bool,
}

/// An endpoint's state and log.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    state: State,
    since: Timestamp,
    log: Log,
}

impl Lifecycle {
    /// Creates the lifecycle of an endpoint that is being created.
    pub fn created(now: Timestamp, message: impl Into<String>) -> Self {
        Self::begun(State::WaitingForIdentity, now, message)
    }

    /// Creates the lifecycle of an endpoint that existed before this agent.
    pub fn restored(now: Timestamp, message: impl Into<String>) -> Self {
        Self::begun(State::Restoring, now, message)
    }

    fn begun(state: State, now: Timestamp, message: impl Into<String>) -> Self {
        let mut begun = Self {
            state,
            since: now,
            log: Log::default(),
        };
        begun.note(now, Status::Ok, message);
        begun
    }

    /// Returns the current state.
    pub const fn state(&self) -> State {
        self.state
    }

    /// Returns the time of the last state change.
    pub const fn since(&self) -> Timestamp {
        self.since
    }

    /// Returns the log.
    pub const fn log(&self) -> &Log {
        &self.log
    }

    /// Adds a line to the log.
    pub fn note(&mut self, now: Timestamp, status: Status, message: impl Into<String>) {
        self.log.add(LogEntry {
            timestamp: now,
            status,
            state: self.state,
            message: message.into(),
        });
    }

    /// Changes the state, and logs the reason. Also logs the refusal of a forbidden transition.
    pub fn set(
        &mut self,
        side: Side,
        to: State,
        now: Timestamp,
        reason: &str,
    ) -> Result<(), RefusedTransition> {
        let refused = |is_superseded| RefusedTransition {
            from: self.state,
            to,
            is_superseded,
        };
        match self.state.judge(side, to) {
            Judgement::Allowed => {
                self.state = to;
                self.since = now;
                self.note(now, Status::Ok, reason);
                Ok(())
            }
            Judgement::Superseded => Err(refused(true)),
            Judgement::Forbidden => {
                let refused = refused(false);
                self.note(now, Status::Warning, format!("{refused}: {reason}"));
                Err(refused)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    /// One row per old state, one column per new state, both in the order of [`State::ALL`]: `+` allowed, `.`
    /// superseded, `-` forbidden.
    const MANAGER: [&str; 7] = [
        "-----+-", // restoring
        "-.+-++-", // waiting-for-identity
        "-+.--+-", // waiting-to-regenerate
        "-++--+-", // regenerating
        "-++--+-", // ready
        "------+", // disconnecting
        "-------", // disconnected
    ];
    const BUILDER: [&str; 7] = [
        "---+---", // restoring
        "---..--", // waiting-for-identity
        "---+.--", // waiting-to-regenerate
        "----+--", // regenerating
        "-------", // ready
        "-------", // disconnecting
        "-------", // disconnected
    ];

    fn expected(side: Side, from: State, to: State) -> char {
        let table = match side {
            Side::Manager => MANAGER,
            Side::Builder => BUILDER,
        };
        let place = |state| State::ALL.iter().position(|s| *s == state).unwrap();
        table[place(from)].chars().nth(place(to)).unwrap()
    }

    fn at(state: State) -> Lifecycle {
        Lifecycle::begun(state, NOW, "begun")
    }

    #[test]
    fn every_pair_of_states_is_allowed_superseded_or_forbidden_as_the_table_says() {
        for side in [Side::Manager, Side::Builder] {
            for from in State::ALL {
                for to in State::ALL {
                    let what = format!("{side:?}: {from} to {to}");
                    let mut lifecycle = at(from);
                    let done = lifecycle.set(side, to, NOW, "why");
                    let last = lifecycle.log().iter().last().unwrap().clone();
                    let lines = lifecycle.log().iter().len();
                    match expected(side, from, to) {
                        '+' => {
                            assert_eq!(done, Ok(()), "{what}");
                            assert_eq!(lifecycle.state(), to, "{what}");
                            assert_eq!(
                                (last.status, last.state, last.message.as_str(), lines),
                                (Status::Ok, to, "why", 2),
                                "{what}"
                            );
                        }
                        '.' => {
                            assert!(done.unwrap_err().is_superseded, "{what}");
                            assert_eq!((lifecycle.state(), lines), (from, 1), "{what}");
                        }
                        _ => {
                            assert!(!done.unwrap_err().is_superseded, "{what}");
                            assert_eq!((lifecycle.state(), lines), (from, 2), "{what}");
                            assert_eq!(
                                (last.status, last.state, last.message),
                                (
                                    Status::Warning,
                                    from,
                                    format!("an endpoint that is {from} cannot become {to}: why")
                                ),
                                "{what}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn an_endpoint_becomes_disconnecting_from_any_state_that_is_not_the_end() {
        for from in State::ALL.into_iter().filter(|state| !state.is_ending()) {
            let judged = from.judge(Side::Manager, State::Disconnecting);
            assert_eq!(judged, Judgement::Allowed, "{from}");
        }
    }

    fn side() -> impl Strategy<Value = Side> {
        prop_oneof![Just(Side::Manager), Just(Side::Builder)]
    }

    proptest! {
        #[test]
        fn any_sequence_of_requests_follows_the_table(
            is_restored: bool,
            requests in proptest::collection::vec(
                (side(), proptest::sample::select(State::ALL.to_vec())), 0..200),
        ) {
            let mut lifecycle = match is_restored {
                true => Lifecycle::restored(NOW, "restored"),
                false => Lifecycle::created(NOW, "created"),
            };
            let mut model = lifecycle.state();
            let mut lines = 1;
            let mut ended = false;
            for (side, to) in requests {
                let verdict = expected(side, model, to);
                let done = lifecycle.set(side, to, NOW, "request");
                prop_assert_eq!(done.is_ok(), verdict == '+');
                if verdict == '+' {
                    model = to;
                }
                lines += usize::from(verdict != '.');
                prop_assert_eq!(lifecycle.state(), model);
                prop_assert_eq!(
                    lifecycle.log().iter().len(),
                    lines.min(crate::log::LOG_ENTRIES)
                );
                // No transition leads back from the end or to the beginning.
                prop_assert!(!ended || model.is_ending());
                ended |= model.is_ending();
                prop_assert!(model != State::Restoring || is_restored);
            }
        }
    }
}
