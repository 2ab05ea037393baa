//! A report that the rendering tests share.

use health_model::api::{
    AddressGroupStatus, ConnectivityStatus, HealthStatus, NodeStatus, PathStatus, SelfStatus,
};

/// A reply after `latency` nanoseconds.
pub(super) fn ok(latency: i64) -> Option<ConnectivityStatus> {
    Some(ConnectivityStatus {
        latency,
        status: String::new(),
        last_probed: "2026-11-21T02:59:58.7Z".parse().unwrap(),
        rtt_source: None,
        connect_latency: None,
        total_latency: None,
        consecutive_failures: 0,
        last_change: None,
        degraded: None,
    })
}

/// No reply, for the reason `status`.
pub(super) fn failed(status: &str) -> Option<ConnectivityStatus> {
    ok(0).map(|result| ConnectivityStatus {
        status: status.to_owned(),
        ..result
    })
}

/// A reply that is degraded for `reason`.
pub(super) fn degraded(reason: &str) -> Option<ConnectivityStatus> {
    ok(9_000).map(|result| ConnectivityStatus {
        degraded: Some(reason.to_owned()),
        ..result
    })
}

fn path(
    ip: &str,
    icmp: Option<ConnectivityStatus>,
    http: Option<ConnectivityStatus>,
) -> PathStatus {
    PathStatus {
        ip: ip.parse().unwrap(),
        icmp,
        http,
        off: Vec::new(),
        path_mtu: None,
    }
}

fn group(primary: PathStatus, secondary: Vec<PathStatus>) -> AddressGroupStatus {
    AddressGroupStatus {
        primary_address: primary,
        secondary_addresses: secondary,
    }
}

/// Three nodes, seen from the second: the first is unreachable, and the third is not known yet.
pub(super) fn status() -> HealthStatus {
    HealthStatus {
        timestamp: Some("2026-11-21T03:00:00.25Z".parse().unwrap()),
        probe_interval: "10s".into(),
        configured_interval: None,
        local: SelfStatus {
            name: "default/hnode2".into(),
            diagnosis: None,
            public_mesh_key: false,
            hosts_only_reason: None,
            full_maps: Vec::new(),
            policy_lag: None,
            problems: Vec::new(),
        },
        nodes: vec![
            NodeStatus {
                name: "default/hnode1".into(),
                host: group(
                    path("172.30.0.1", ok(21_300), ok(405_072)),
                    vec![path("fd00:30::1", failed("Connection timed out"), ok(1))],
                ),
                health_endpoint: None,
                hosts_only: false,
                diagnosis: None,
            },
            NodeStatus {
                name: "default/hnode2".into(),
                host: group(
                    path("172.30.0.2", ok(1_000), ok(2_000)),
                    vec![path("fd00:30::2", ok(3_000), ok(4_000))],
                ),
                health_endpoint: Some(group(path("10.244.2.7", ok(5_000), ok(6_000)), vec![])),
                hosts_only: false,
                diagnosis: None,
            },
            NodeStatus {
                name: "default/hnode3".into(),
                host: group(path("172.30.0.3", ok(7_000), None), vec![]),
                health_endpoint: Some(group(path("10.244.3.7", None, None), vec![])),
                hosts_only: false,
                diagnosis: None,
            },
        ],
    }
}
