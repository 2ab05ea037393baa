//! Which probes between which nodes were answered, according to the agents' reports.

use std::fmt;
use std::net::IpAddr;

use health_model::api::{AddressGroupStatus, ConnectivityStatus, HealthStatus, PathStatus};

/// A probe without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnansweredProbe {
    /// The probing node.
    pub from: String,
    /// The probed node.
    pub to: String,
    /// Which probe it was, and its outcome.
    pub what: String,
}

impl fmt::Display for UnansweredProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}: {}", self.from, self.to, self.what)
    }
}

/// A node that must be in every report.
pub(super) struct ExpectedNode {
    /// `cluster/node`.
    pub(super) name: String,
    /// The node's own addresses. Its health endpoint has equally many.
    pub(super) addresses: Vec<IpAddr>,
}

/// The unanswered probes in a node's report; empty if all were answered.
pub(super) fn unanswered(report: &HealthStatus, expected: &[ExpectedNode]) -> Vec<UnansweredProbe> {
    let from = &report.local.name;
    expected
        .iter()
        .flat_map(|node| {
            problems(report, node)
                .into_iter()
                .map(|what| UnansweredProbe {
                    from: from.clone(),
                    to: node.name.clone(),
                    what,
                })
        })
        .collect()
}

fn problems(report: &HealthStatus, expected: &ExpectedNode) -> Vec<String> {
    let Some(node) = report.nodes.iter().find(|node| node.name == expected.name) else {
        return vec!["is not in the report".to_owned()];
    };
    let mut problems = Vec::new();
    for address in &expected.addresses {
        if !node.host.paths().any(|path| path.ip == *address) {
            problems.push(format!("host {address} is not in the report"));
        }
    }
    problems.extend(failures("host", &node.host));
    match &node.health_endpoint {
        None if node.hosts_only => {}
        None => problems.push("the address of its health endpoint is not known".to_owned()),
        Some(endpoint) => {
            if endpoint.paths().count() < expected.addresses.len() {
                problems.push("an address of its health endpoint is not known".to_owned());
            }
            problems.extend(failures("endpoint", endpoint));
        }
    }
    problems
}

fn failures(role: &str, group: &AddressGroupStatus) -> Vec<String> {
    group
        .paths()
        .flat_map(|PathStatus { ip, icmp, http, .. }| {
            [("ICMP", icmp), ("HTTP", http)]
                .into_iter()
                .filter_map(move |(protocol, result)| {
                    let why = failure(result.as_ref())?;
                    Some(format!("{protocol} to {role} {ip}: {why}"))
                })
        })
        .collect()
}

fn failure(result: Option<&ConnectivityStatus>) -> Option<&str> {
    match result {
        None => Some("no answer yet"),
        Some(result) if result.is_ok() => None,
        Some(result) => Some(&result.status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(json: &str) -> HealthStatus {
        serde_json::from_str(json).unwrap()
    }

    fn expected() -> [ExpectedNode; 1] {
        [ExpectedNode {
            name: "default/hnode2".to_owned(),
            addresses: vec!["172.30.0.2".parse().unwrap()],
        }]
    }

    #[test]
    fn all_answered_is_empty_and_each_lack_is_named() {
        let ok = r#"{"latency": 1, "status": "", "lastProbed": "2026-01-01T00:00:00Z"}"#;
        let bad = r#"{"latency": 0, "status": "Connection timed out",
                      "lastProbed": "2026-01-01T00:00:00Z"}"#;
        let with = |http: &str| {
            report(&format!(
                r#"{{"probeInterval": "10s", "local": {{"name": "default/hnode1"}}, "nodes": [
                    {{"name": "default/hnode2",
                      "host": {{"primary-address":
                        {{"ip": "172.30.0.2", "icmp": {ok}, "http": {http}}}}},
                      "health-endpoint": {{"primary-address":
                        {{"ip": "10.244.2.7", "icmp": {ok}, "http": {ok}}}}}}}]}}"#
            ))
        };
        assert_eq!(unanswered(&with(ok), &expected()), []);
        assert_eq!(
            unanswered(&with(bad), &expected())[0].to_string(),
            "default/hnode1 -> default/hnode2: HTTP to host 172.30.0.2: Connection timed out"
        );
        let empty =
            report(r#"{"probeInterval": "10s", "local": {"name": "default/hnode1"}, "nodes": []}"#);
        assert_eq!(unanswered(&empty, &expected()).len(), 1);
    }
}
