//! Services in the API.

use serde_json::json;

use super::common::Agent;
use super::{assert_documented, document, request, troubled};

#[test]
fn services_are_reported_as_they_are_asked_for() {
    let agent = Agent::start(troubled);
    let document = document(&agent);
    let operation = &document["paths"]["/v1/services"]["get"];
    for (query, code, services) in [
        ("", 200, Some(3)),
        ("?service=web", 200, Some(2)),
        ("?service=shop%2Fweb", 200, Some(1)),
        ("?namespace=shop", 200, Some(2)),
        ("?service=web&namespace=test", 200, Some(1)),
        ("?service=shop", 200, Some(0)),
        ("?name=web", 400, None),
    ] {
        let (answered, body) = request(&agent, "get", &format!("/v1/services{query}"));
        assert_eq!(answered, code, "{query}: {body}");
        assert_eq!(body.as_array().map(Vec::len), services, "{query}");
        assert_documented(&document, operation, code, &body);
    }
    let (_, services) = request(&agent, "get", "/v1/services?service=shop/web");
    let web = &services[0];
    assert_eq!(web["algorithm"], "maglev");
    assert_eq!(web["affinity-ns"], 10_800_000_000_000_u64);
    let frontends = web["ports"][0]["frontends"].as_array().unwrap();
    let frontends: Vec<_> = frontends.iter().map(|one| &one["listen"]).collect();
    assert_eq!(frontends, ["10.96.0.1:80", "node port 30080"]);
    let backends = web["ports"][0]["backends"].as_array().unwrap();
    let reported =
        |field: &str| -> Vec<_> { backends.iter().map(|one| one[field].clone()).collect() };
    assert_eq!(reported("probed"), [json!(true), json!(false), json!(null)]);
    assert_eq!(reported("ready"), [true, false, false]);
    assert_eq!(reported("in-cluster-list"), [true, false, false]);
    assert_eq!(reported("lingering"), [false, false, true]);
}

#[test]
fn a_summary_reports_what_is_wrong_with_services() {
    let agent = Agent::start(troubled);
    let (_, summary) = request(&agent, "get", "/v1/services/summary");
    assert_eq!(
        (&summary["enabled"], &summary["synced"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(summary["services"], 3);
    assert_eq!(summary["error"], json!(null));
    assert_eq!(summary["conflicts"][0]["service"], "shop/web");
    assert_eq!(summary["conflicts"][0]["port"], "dns");
    let problems = summary["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 2, "{problems:?}");
    let without = Agent::start(|_| {});
    let (_, summary) = request(&without, "get", "/v1/services/summary");
    assert_eq!(summary["enabled"], false);
}

#[test]
fn a_trace_is_refused_by_the_end_that_is_wrong() {
    let agent = Agent::start(troubled);
    let document = document(&agent);
    let operation = &document["paths"]["/v1/services/trace"]["get"];
    for (query, code, naming) in [
        ("", 400, "missing field `source`"),
        ("?source=host", 400, "missing field `destination`"),
        (
            "?source=host&destination=shop/db:80",
            404,
            "no service \"shop/db\"; `health-agent service list`",
        ),
        (
            "?source=host&destination=web:80",
            400,
            "give one of shop/web, test/web",
        ),
        (
            "?source=host&destination=shop/web:81",
            404,
            "it has http 80/TCP, dns 53/UDP",
        ),
        (
            "?source=host&destination=shop/web",
            400,
            "shop/web has several ports",
        ),
        ("?source=host&destination=10.96.0.1", 400, "has no port"),
        (
            "?source=host:x&destination=shop/web:80",
            400,
            "source: invalid port \"x\"",
        ),
        (
            "?source=db&destination=shop/web:80",
            404,
            "source: no endpoint \"db\" on this node",
        ),
        (
            "?source=fd00::1&destination=10.96.0.1:80",
            400,
            "has no IPv4 address",
        ),
        (
            "?source=fd00::1&destination=shop/web:80",
            404,
            "has no address that the source can reach",
        ),
        (
            "?source=host&destination=shop/web:80&protocol=icmp",
            400,
            "expected TCP, UDP or SCTP",
        ),
        (
            "?source=host&destination=shop/web:http",
            503,
            "no maps are pinned",
        ),
    ] {
        let (answered, body) = request(&agent, "get", &format!("/v1/services/trace{query}"));
        assert_eq!(answered, code, "{query}: {body}");
        let error = body["error"].as_str().unwrap();
        assert!(error.contains(naming), "{query}: {error}");
        assert_documented(&document, operation, code, &body);
    }
}
