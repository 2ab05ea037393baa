//! Computes a pod's status from results: `ready` and `started` of its containers.

use std::sync::Arc;

use jiff::Timestamp;

use super::machine::has_survived;
use super::{ContainerState, ContainerStatus, PodStatus, ProbeResult};
use crate::spec::{PodSpec, ProbeType, Role};

/// The knowledge that one probe provides about a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// The container has no such probe, or is no longer probed.
    Unprobed,
    /// The container has not been probed yet.
    Pending,
    /// The probe has this result.
    Result(ProbeResult),
}

/// Computes `ready` and `started` of each container, and returns the containers whose readiness must be probed at once.
///
/// `known` returns a probe's result for a container by its name, the probe type and the container ID.
pub(super) fn compute(
    pod: &PodSpec,
    status: &mut PodStatus,
    before: Option<&PodStatus>,
    agent_start: Timestamp,
    known: impl Fn(&Arc<str>, ProbeType, &str) -> Known,
) -> Vec<Arc<str>> {
    let mut to_probe = Vec::new();
    let is_pod_ready = status.ready;
    let all = status
        .containers
        .iter_mut()
        .chain(&mut status.init_containers);
    for container in all {
        let role = pod.container(&container.name).map(|spec| spec.role);
        let is_running = container.state.is_running();
        let id = container.id.as_deref().unwrap_or_default();
        let known = |kind| known(&container.name, kind, id);
        let is_started = is_running
            && match known(ProbeType::Startup) {
                Known::Result(result) => result == ProbeResult::Success,
                _ if was_started(before, container) => true,
                Known::Pending => false,
                Known::Unprobed => true,
            };
        container.started = Some(is_started);
        if role == Some(Role::Init) {
            container.ready = container.state == ContainerState::Terminated { exit_code: 0 };
            continue;
        }
        if !is_started {
            // A container that is not running is not ready, whatever was reported before.
            container.ready &= is_running;
            continue;
        }
        let readiness = known(ProbeType::Readiness);
        container.ready = match readiness {
            Known::Result(ProbeResult::Success) | Known::Unprobed => true,
            Known::Pending => is_pod_ready && has_survived(container.state, agent_start),
            Known::Result(_) => false,
        };
        if !matches!(
            readiness,
            Known::Result(ProbeResult::Success) | Known::Unprobed
        ) {
            to_probe.push(container.name.clone());
        }
    }
    to_probe
}

/// Whether the same container was reported as started before.
fn was_started(before: Option<&PodStatus>, container: &ContainerStatus) -> bool {
    let reported = before.and_then(|status| status.container(&container.name));
    reported
        .is_some_and(|(reported, _)| reported.id == container.id && reported.started == Some(true))
}
