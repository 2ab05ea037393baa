use std::time::Duration;

use health_model::ipam::Family::{V4, V6};
use jiff::Timestamp;
use serde_json::json;

use super::*;
use crate::spec::ServiceName;
use crate::state::{HealthCheck, HealthChecks};

const TIMEOUT: Duration = Duration::from_secs(60);

fn at(seconds: u64) -> (Duration, Timestamp) {
    let wall = Timestamp::from_second(1_800_000_000 + seconds as i64).unwrap();
    (Duration::from_secs(seconds), wall)
}

fn codes(health: &ProxyHealth, seconds: u64) -> (u16, u16) {
    let (now, wall) = at(seconds);
    (
        health.healthz(now, wall).code(),
        health.livez(now, wall).code(),
    )
}

#[test]
fn a_proxy_that_was_never_updated_or_has_nothing_to_do_is_healthy() {
    let mut health = ProxyHealth::new(TIMEOUT);
    assert_eq!(codes(&health, 0), (200, 200));
    health.queued(V4, at(0).0);
    assert_eq!(codes(&health, 1000), (200, 200));
    health.updated(V4, at(1000).0, at(1000).1);
    assert_eq!(codes(&health, 100_000), (200, 200));
}

#[test]
fn a_family_is_unhealthy_while_its_oldest_change_waits_for_the_timeout() {
    let mut health = ProxyHealth::new(TIMEOUT);
    health.updated(V4, at(0).0, at(0).1);
    health.updated(V6, at(0).0, at(0).1);
    health.queued(V6, at(10).0);
    // Neither a later change nor a change of the other family resets the age of the first one.
    health.queued(V6, at(60).0);
    health.queued(V4, at(60).0);
    health.updated(V4, at(61).0, at(61).1);
    assert_eq!(codes(&health, 69), (200, 200));
    assert!(health.is_healthy(at(69).0));
    assert_eq!(codes(&health, 70), (503, 503));
    assert!(!health.is_healthy(at(70).0));
    health.updated(V6, at(71).0, at(71).1);
    assert_eq!(codes(&health, 71), (200, 200));
}

#[test]
fn a_change_that_comes_during_a_sync_waits_still() {
    let mut health = ProxyHealth::new(TIMEOUT);
    health.updated(V4, at(0).0, at(0).1);
    health.queued(V4, at(10).0);
    health.queued(V4, at(12).0);
    health.updated(V4, at(11).0, at(13).1);
    assert_eq!(codes(&health, 70), (200, 200));
    assert_eq!(codes(&health, 71), (503, 503));
}

#[test]
fn a_node_that_goes_is_alive_but_not_eligible() {
    let mut health = ProxyHealth::new(TIMEOUT);
    let standing = |is_deleting, taints| NodeStanding {
        is_deleting,
        taints,
    };
    for (node, code) in [
        (standing(false, &[][..]), 200),
        (standing(true, &[]), 503),
        (standing(false, &["other"]), 200),
        (
            standing(false, &["other", "ToBeDeletedByClusterAutoscaler"]),
            503,
        ),
        (standing(false, &[]), 200),
    ] {
        health.node(node);
        assert_eq!(codes(&health, 0), (code, 200), "{node:?}");
    }
}

#[test]
fn answers_have_the_fields_of_kube_proxy() {
    let mut health = ProxyHealth::new(TIMEOUT);
    health.updated(V4, at(0).0, at(0).1);
    health.updated(V6, at(5).0, at(5).1);
    let (now, wall) = at(30);
    assert_eq!(
        serde_json::to_value(health.healthz(now, wall)).unwrap(),
        json!({
            "lastUpdated": "2027-01-15T08:00:30Z",
            "currentTime": "2027-01-15T08:00:30Z",
            "nodeEligible": true,
            "healthy": true,
            "status": {
                "IPv4": { "lastUpdated": "2027-01-15T08:00:00Z", "healthy": true },
                "IPv6": { "lastUpdated": "2027-01-15T08:00:05Z", "healthy": true },
            },
        })
    );
    health.queued(V4, at(10).0);
    let (now, wall) = at(70);
    assert_eq!(
        serde_json::to_value(health.livez(now, wall)).unwrap(),
        json!({
            "lastUpdated": "2027-01-15T08:00:05Z",
            "currentTime": "2027-01-15T08:01:10Z",
            "healthy": false,
            "status": {
                "IPv4": { "lastUpdated": "2027-01-15T08:00:00Z", "healthy": false },
                "IPv6": { "lastUpdated": "2027-01-15T08:00:05Z", "healthy": true },
            },
        })
    );
}

fn checks(all: &[(&str, u16, usize)]) -> HealthChecks {
    let check = |&(name, port, local_endpoints): &(&str, u16, usize)| {
        let check = HealthCheck {
            port,
            local_endpoints,
        };
        (ServiceName::new("shop", name), check)
    };
    all.iter().map(check).collect()
}

#[test]
fn listeners_follow_the_services_and_one_that_failed_is_tried_again() {
    let name = |name| ServiceName::new("shop", name);
    let mut health = ServiceHealth::default();
    let listeners = health.sync(&checks(&[("a", 1, 0), ("b", 2, 0)]));
    assert_eq!(listeners.open, [(name("a"), 1), (name("b"), 2)]);
    assert_eq!(listeners.close, []);
    assert_eq!(
        health.sync(&checks(&[("a", 1, 3), ("b", 2, 0)])),
        Listeners::default()
    );
    let listeners = health.sync(&checks(&[("b", 9, 0), ("c", 3, 0)]));
    assert_eq!(listeners.close, [(name("a"), 1), (name("b"), 2)]);
    assert_eq!(listeners.open, [(name("b"), 9), (name("c"), 3)]);
    health.failed(&name("c"));
    assert_eq!(health.answer(&name("c"), true), None);
    let listeners = health.sync(&checks(&[("b", 9, 0), ("c", 3, 0)]));
    assert_eq!(listeners.open, [(name("c"), 3)]);
}

#[test]
fn a_node_with_local_endpoints_and_a_healthy_proxy_is_a_success() {
    let name = ServiceName::new("shop", "a");
    let mut health = ServiceHealth::default();
    assert_eq!(health.answer(&name, true), None);
    for (count, is_proxy_healthy, code) in [(0, true, 503), (2, true, 200), (2, false, 503)] {
        health.sync(&checks(&[("a", 1, count)]));
        let answer = health.answer(&name, is_proxy_healthy).unwrap();
        assert_eq!(answer.code(), code);
        assert_eq!(
            serde_json::to_value(answer).unwrap(),
            json!({
                "service": { "namespace": "shop", "name": "a" },
                "localEndpoints": count,
                "serviceProxyHealthy": is_proxy_healthy,
            })
        );
    }
}
