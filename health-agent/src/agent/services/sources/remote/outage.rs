//! Describes outages of sources outside this node.

use health_model::api::ServiceProblem;
use health_registry::nodes::Staleness;

/// The problem that a source's outage causes for `objects`; `None` without an outage.
pub(super) fn outage(
    source: &str,
    objects: &str,
    stale: Option<&Staleness>,
) -> Option<ServiceProblem> {
    stale.map(|stale| ServiceProblem {
        subject: source.to_owned(),
        problem: stale.using(objects),
    })
}
