//! The report's lines about the reporting agent itself, one for each condition worth reporting.

use health_model::api::{
    AgentProblem, ContainerProbeSummary, FullMap, HealthStatus, PodProblem, PolicyLag,
};

use crate::output::printable;

/// All these lines.
pub(super) fn lines(status: &HealthStatus) -> String {
    [
        public_mesh_key(status).to_owned(),
        hosts_only(status),
        full_maps(status),
        policy_lag(status),
        agent_problems(status),
    ]
    .concat()
}

/// A warning if the mesh key is public.
fn public_mesh_key(status: &HealthStatus) -> &'static str {
    if status.local.public_mesh_key {
        "Mesh key:   the public default, anyone can answer for a peer (see --mesh-key-file)\n"
    } else {
        ""
    }
}

/// `Health endpoints:   not probed, this node has no pod CIDR`, if they are not probed.
fn hosts_only(status: &HealthStatus) -> String {
    match &status.local.hosts_only_reason {
        Some(why) => format!("Health endpoints:   not probed, {}\n", printable(why)),
        None => String::new(),
    }
}

/// `Nearly full maps:   HEALTH_CT4 (60000 of 65536 entries)`, if there are any.
fn full_maps(status: &HealthStatus) -> String {
    let maps = &status.local.full_maps;
    if maps.is_empty() {
        return String::new();
    }
    let shown: Vec<String> = maps.iter().map(full_map).collect();
    format!("Nearly full maps:   {}\n", shown.join(", "))
}

/// `Policy:   not in force for 2 endpoints: WHY`, if there are any.
fn policy_lag(status: &HealthStatus) -> String {
    let lag = status.local.policy_lag.as_ref();
    lag.map_or_else(String::new, |PolicyLag { endpoints, reason }| {
        let plural = if *endpoints == 1 { "" } else { "s" };
        format!(
            "Policy:   not in force for {endpoints} endpoint{plural}: {}\n",
            printable(reason)
        )
    })
}

/// `Agent warning:   registry: WHY`, one line for each check with a problem.
fn agent_problems(status: &HealthStatus) -> String {
    // The policy lag has its own, more detailed line.
    let has_lag = status.local.policy_lag.is_some();
    let is_lag = |one: &AgentProblem| has_lag && one.check == "policy" && !one.is_failure;
    let problems = status.local.problems.iter();
    let problems = problems.filter(|problem| !is_lag(problem));
    let lines = problems.map(|problem| {
        let AgentProblem {
            check,
            is_failure,
            message,
        } = problem;
        let what = if *is_failure { "failure" } else { "warning" };
        format!("Agent {what}:   {check}: {}\n", printable(message))
    });
    lines.collect()
}

/// `Container probes:   12 pods, 11 ready; 30 probes, 1 failing`, and one line for each problem, if containers are
/// probed.
pub(super) fn containers(summary: &ContainerProbeSummary) -> String {
    let ContainerProbeSummary {
        enabled,
        pods,
        ready_pods,
        probes,
        failing,
        errored,
        overdue,
        problems,
        ..
    } = summary;
    if !enabled {
        return String::new();
    }
    let plural = |count: &u64| if *count == 1 { "" } else { "s" };
    let mut text = format!(
        "Container probes:   {pods} pod{}, {ready_pods} ready; {probes} probe{}, {failing} failing",
        plural(pods),
        plural(probes)
    );
    if *errored > 0 {
        text += &format!(", {errored} errored");
    }
    if *overdue > 0 {
        text += &format!(", {overdue} overdue");
    }
    text.push('\n');
    for PodProblem { subject, problem } in problems {
        text += &format!("  - {}: {}\n", printable(subject), printable(problem));
    }
    text
}

fn full_map(full: &FullMap) -> String {
    let FullMap {
        map,
        entries,
        capacity,
    } = full;
    format!("{map} ({entries} of {capacity} entries)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_probes_are_summed_up_where_there_are_any() {
        assert_eq!(containers(&ContainerProbeSummary::default()), "");
        let summary = ContainerProbeSummary {
            enabled: true,
            pods: 12,
            ready_pods: 11,
            probes: 30,
            failing: 1,
            ..ContainerProbeSummary::default()
        };
        assert_eq!(
            containers(&summary),
            "Container probes:   12 pods, 11 ready; 30 probes, 1 failing\n"
        );
        let troubled = ContainerProbeSummary {
            pods: 1,
            errored: 2,
            overdue: 3,
            problems: vec![PodProblem {
                subject: "pods/\u{1b}web.yaml".into(),
                problem: "pod shop/web: spec.containers: Required value".into(),
            }],
            ..summary
        };
        assert_eq!(
            containers(&troubled),
            "Container probes:   1 pod, 11 ready; 30 probes, 1 failing, 2 errored, 3 overdue\n  \
             - pods/\\u{1b}web.yaml: pod shop/web: spec.containers: Required value\n"
        );
    }
}
