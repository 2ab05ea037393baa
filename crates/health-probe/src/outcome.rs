//! The outcome of one attempt to probe a container.

/// A mechanism's verdict on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawResult {
    /// The target is healthy.
    Success,
    /// The target is healthy, but its response is unusual; counts as success.
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
    /// A message for events and `probe get`. Never contains any of a response's body.
    pub message: String,
    /// Whether the attempt itself went wrong. The attempt is then repeated, and no conclusion is drawn if the last
    /// attempt goes wrong too.
    pub errored: bool,
}
