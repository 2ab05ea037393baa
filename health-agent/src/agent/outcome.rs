//! Findings and repairs of one check of the endpoint and the datapath.

use std::collections::BTreeSet;

use health_model::causes::with_causes;

/// A completed repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CompletedRepair {
    /// A short fixed keyword under which repairs are counted.
    pub(super) cause: &'static str,
    /// What was wrong, in words.
    pub(super) what: String,
}

/// The part of an outcome that concerns the health endpoint.
#[derive(Debug, Default)]
pub(super) struct EndpointOutcome {
    /// What was repaired, in words.
    pub(super) repaired: Vec<String>,
    /// What is wrong with its devices or their configuration.
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
    /// Workload endpoints with programs that could not be attached.
    pub(super) without_programs: BTreeSet<u16>,
    /// Why something could not be repaired.
    pub(super) failure: Option<String>,
    /// Missing objects that this agent does not own, so that others must restore them.
    pub(super) missing: Vec<String>,
    /// Why an optional program that would make serving faster is not attached, in words.
    pub(super) slower: Option<String>,
}

impl Outcome {
    /// Records something that could not be repaired.
    pub(super) fn fail(&mut self, error: anyhow::Error) {
        let failure = self.failure.get_or_insert_default();
        let text = with_causes(error.as_ref());
        // An attempt made in two places fails in both; record it only once.
        if failure.contains(&text) {
            return;
        }
        if !failure.is_empty() {
            failure.push_str("; ");
        }
        failure.push_str(&text);
    }

    /// Everything that is missing or failed, in words.
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
