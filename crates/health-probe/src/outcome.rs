//! The outcome of one attempt to probe a container.

/// A mechanism's verdict on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawResult {
    /// The target is healthy.
    Success,
    /// The target is healthy, but its answer is odd; counts as success.
    Warning,
    /// The target is unhealthy.
    Failure,
    /// The target's state is unknown.
    Unknown,
}

/// The outcome of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The mechanism's verdict on the target.
    pub result: RawResult,
    /// A message for events and `probe get`. Never taken from the body of an answer.
    pub message: String,
    /// Whether the attempt itself went wrong. It is then repeated, and if the last attempt errs too, no conclusion is
    /// drawn.
    pub errored: bool,
}
