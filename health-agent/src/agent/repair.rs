//! Checks everything that other processes can break, and reports and repairs faults.

use health_endpoint::manager::Manager;
use health_model::causes::with_causes;
use tracing::warn;

use super::node::NodeDatapath;
use super::outcome::{CompletedRepair, EndpointOutcome, Outcome};
use super::source::AgentSource;

/// Checks and repairs everything. Reports new faults of the health endpoint first, because repairing them may take
/// seconds.
pub(super) async fn repair(
    node: &mut NodeDatapath,
    source: &AgentSource,
    manager: &Manager,
) -> Outcome {
    let mut outcome = Outcome::default();
    if let Err(error) = node.look_at_uplinks(&mut outcome).await {
        outcome.fail(error);
    }
    let faults = node.endpoint_faults().await;
    if let Ok(faults) = &faults
        && let Some(problem) = node.news_of(faults)
    {
        note_faults(node, source, manager, problem);
    }
    let repaired = match faults {
        Ok(faults) => node.repair_endpoint(faults, &mut outcome).await,
        Err(error) => Err(error),
    };
    if let Err(error) = repaired {
        outcome.endpoint.connection_problem = Some(with_causes(error.as_ref()));
        outcome.fail(error);
    }
    if let Err(error) = node.repair_datapath(&mut outcome) {
        outcome.fail(error);
    }
    let has_changed = !outcome.repaired.is_empty() || outcome.failure.is_some();
    if has_changed && let Err(error) = node.release_foreign_device().await {
        outcome.fail(error);
    }
    node.note_programs(&mut outcome);
    for CompletedRepair { cause, what } in &outcome.repaired {
        warn!(cause, "repaired: {what}");
        *node.repairs.entry((*cause).to_owned()).or_default() += 1;
    }
    outcome
}

/// Records faults of the health endpoint that are about to be repaired.
fn note_faults(node: &NodeDatapath, source: &AgentSource, manager: &Manager, problem: String) {
    source.note_faults(&problem);
    let found = EndpointOutcome {
        connection_problem: Some(problem),
        program_problem: node.left_program_problem(),
        ..EndpointOutcome::default()
    };
    note_health(node, manager, &found);
    source.begin_look();
}

/// Passes a check's findings about the health endpoint to the manager, which shows them.
pub(super) fn note_health(node: &NodeDatapath, manager: &Manager, found: &EndpointOutcome) {
    if let Some(report) = node.health_report(found)
        && let Err(error) = manager.note_health(report)
    {
        warn!(%error, "the health endpoint has an address outside this node's pod CIDRs");
    }
}
