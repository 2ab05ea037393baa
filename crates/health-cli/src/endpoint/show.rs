//! Tables of endpoints.

use health_endpoint::log::LogEntry;
use health_model::api::{Endpoint, EndpointHealth};

use crate::output::{Cell, table};

/// Formats endpoints like `cilium endpoint list`, one label per line.
pub(super) fn endpoints_table(endpoints: &[Endpoint], has_headers: bool) -> String {
    let address = |ip: Option<std::net::IpAddr>| ip.map(|ip| ip.to_string()).unwrap_or_default();
    let rows = endpoints.iter().map(|endpoint| {
        [
            Cell::from(endpoint.id.to_string()),
            endpoint.policy_ingress.text().into(),
            endpoint.policy_egress.text().into(),
            endpoint.identity.to_string().into(),
            Cell::of_lines(&endpoint.labels),
            address(endpoint.ipv6).into(),
            address(endpoint.ipv4).into(),
            state(endpoint),
        ]
    });
    let headers = [
        Cell::from("ENDPOINT"),
        Cell::of_lines(["POLICY (ingress)", "ENFORCEMENT"]),
        Cell::of_lines(["POLICY (egress)", "ENFORCEMENT"]),
        "IDENTITY".into(),
        "LABELS".into(),
        "IPv6".into(),
        "IPv4".into(),
        "STATUS".into(),
    ];
    let text = table(headers, rows);
    match has_headers {
        true => text,
        // The header is two lines high. The column widths stay the same without it.
        false => text
            .lines()
            .skip(2)
            .map(|line| format!("{line}\n"))
            .collect(),
    }
}

/// The state, with the problem below it.
fn state(endpoint: &Endpoint) -> Cell {
    let reason = endpoint.reason.as_deref();
    Cell::of_lines([endpoint.state.as_str()].into_iter().chain(reason))
}

/// Formats a log like `cilium endpoint log`.
pub(super) fn log_table(log: &[LogEntry]) -> String {
    let rows = log.iter().map(|entry| {
        [
            entry.timestamp.to_string(),
            entry.status.text().to_owned(),
            entry.state.to_string(),
            entry.message.clone(),
        ]
    });
    table(["Timestamp", "Status", "State", "Message"], rows)
}

/// Formats health like `cilium endpoint health`.
pub(super) fn health_table(health: &EndpointHealth) -> String {
    let connected = if health.connected { "yes" } else { "no" };
    let lines = [
        ("Overall Health:", health.overall_health.text()),
        ("BPF Health:", health.bpf.text()),
        ("Policy Health:", health.policy.text()),
        ("Connected:", connected),
    ];
    lines
        .map(|(what, how)| format!("{what:<18}{how}\n"))
        .concat()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use health_model::api::{EndpointSettings, Enforcement, HealthState};

    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            id: 1017,
            name: None,
            container_id: None,
            pod: None,
            network: None,
            identity: 4,
            labels: vec!["reserved:health".into(), "node:zone=a".into()],
            policy_ingress: Enforcement::Enabled,
            policy_egress: Enforcement::Unknown,
            settings: EndpointSettings::default(),
            ipv4: Some("10.244.1.7".parse().unwrap()),
            ipv6: None,
            ready: None,
            gateway4: None,
            gateway6: None,
            state: "ready".into(),
            reason: None,
            interface: "lxc_health".into(),
            ifindex: 5,
            inner_interface: "health0".into(),
            mac: "0a:00:00:00:00:01".into(),
            host_mac: "0a:00:00:00:00:02".into(),
            netns: "/run/netns/health".into(),
            repairs: BTreeMap::new(),
        }
    }

    #[test]
    fn an_endpoint_takes_a_line_a_label() {
        assert_eq!(
            endpoints_table(&[endpoint()], true),
            "\
ENDPOINT   POLICY (ingress)   POLICY (egress)   IDENTITY   LABELS            IPv6   IPv4         STATUS
           ENFORCEMENT        ENFORCEMENT
1017       Enabled            Unknown           4          reserved:health          10.244.1.7   ready
                                                           node:zone=a
"
        );
        let without = endpoints_table(&[endpoint()], false);
        assert!(without.starts_with("1017 "), "{without}");
    }

    #[test]
    fn what_is_wrong_with_an_endpoint_is_below_its_state() {
        let waiting = Endpoint {
            state: "waiting-for-identity".into(),
            reason: Some("the store is away".into()),
            ..endpoint()
        };
        let text = endpoints_table(&[waiting], false);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].ends_with("10.244.1.7   waiting-for-identity"),
            "{text}"
        );
        assert!(lines[1].ends_with("   the store is away"), "{text}");
    }

    #[test]
    fn health_takes_four_lines() {
        let health = EndpointHealth {
            overall_health: HealthState::Ok,
            bpf: HealthState::Pending,
            policy: HealthState::Disabled,
            connected: true,
        };
        assert_eq!(
            health_table(&health),
            "\
Overall Health:   OK
BPF Health:       Pending
Policy Health:    Disabled
Connected:        yes
"
        );
    }
}
