//! What one check of the endpoint and the datapath has found, and what it has repaired.

use std::collections::BTreeSet;

use health_model::causes::with_causes;

/// A completed repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CompletedRepair {
    /// A short fixed word to count by.
    pub(super) cause: &'static str,
    /// What was wrong, in words.
    pub(super) what: String,
}

/// The part of an outcome that concerns the health endpoint.
#[derive(Debug, Default)]
pub(super) struct EndpointOutcome {
    /// What was repaired, in words.
    pub(super) repaired: Vec<String>,
    /// Why its devices or their configuration are not in order.
    pub(super) connection_problem: Option<String>,
    /// What is wrong with its programs.
    pub(super) program_problem: Option<String>,
}

/// The outcome of one check.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// The part that concerns the health endpoint.
    pub(super) endpoint: EndpointOutcome,
    /// What was repaired.
    pub(super) repaired: Vec<CompletedRepair>,
    /// Workload endpoints with programs that are not attached and could not be.
    pub(super) without_programs: BTreeSet<u16>,
    /// Why something could not be repaired.
    pub(super) failure: Option<String>,
    /// Things that others removed and have to restore.
    pub(super) missing: Vec<String>,
    /// What is served without programs that would make it faster, in words.
    pub(super) slower: Option<String>,
}

impl Outcome {
    /// Records something that could not be repaired.
    pub(super) fn fail(&mut self, error: anyhow::Error) {
        let failure = self.failure.get_or_insert_default();
        let text = with_causes(error.as_ref());
        // If the same attempt is made in two places, it fails in both.
        if failure.contains(&text) {
            return;
        }
        if !failure.is_empty() {
            failure.push_str("; ");
        }
        failure.push_str(&text);
    }

    /// Everything that is not in order, in words.
    pub(super) fn problem(&self) -> Option<String> {
        let problems: Vec<&str> = self
            .missing
            .iter()
            .chain(&self.failure)
            .map(String::as_str)
            .collect();
        (!problems.is_empty()).then(|| problems.join("; "))
    }
}
