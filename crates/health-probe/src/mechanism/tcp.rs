//! TCP probes: whether a connection is accepted.

use super::connect::{Ending, Usage, connect};
use super::{Deadline, Target, success};
use crate::Outcome;

/// Connects to a target, and closes the connection at once.
pub async fn probe(target: &Target, deadline: Deadline) -> Outcome {
    let usage = Usage {
        ending: Ending::Fin,
        read_max: 0,
        writes_first: false,
        no_delay: false,
    };
    match connect(target, usage, deadline).await {
        Ok(_) => success("connected"),
        Err(error) => error.outcome(target, deadline),
    }
}

#[cfg(test)]
mod tests;
