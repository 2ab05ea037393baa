//! What one attempt to probe a container came to.

/// What a mechanism makes of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawResult {
    /// The target is well.
    Success,
    /// The target is well, and something is odd about its answer: counts as success.
    Warning,
    /// The target is not well.
    Failure,
    /// Nothing is known of the target.
    Unknown,
}

/// What one attempt came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What the mechanism makes of the target.
    pub result: RawResult,
    /// What to tell of it, for events and `probe get`. Never from the body of an answer.
    pub message: String,
    /// Whether the attempt itself went wrong: it is repeated, and in the end nothing is concluded from it.
    pub errored: bool,
}
