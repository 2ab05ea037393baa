//! Container probes in the API.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::json;

use super::common::Agent;
use super::{assert_conforms, assert_documented, document, request, troubled};

#[test]
fn container_probes_are_reported_as_they_are_asked_for() {
    let agent = Agent::start(troubled);
    let document = document(&agent);
    let operation = &document["paths"]["/v1/probes"]["get"];
    for (query, code, probes) in [
        ("", 200, Some(2)),
        ("?pod=web", 200, Some(2)),
        ("?pod=shop%2Fweb&container=app&type=liveness", 200, Some(1)),
        ("?pod=test/web", 200, Some(0)),
        ("?container=sidecar", 200, Some(0)),
        ("?type=liveliness", 400, None),
        ("?namespace=shop", 400, None),
    ] {
        let (answered, body) = request(&agent, "get", &format!("/v1/probes{query}"));
        assert_eq!(answered, code, "{query}: {body}");
        assert_eq!(body.as_array().map(Vec::len), probes, "{query}");
        assert_documented(&document, operation, code, &body);
    }
    let (_, probes) = request(&agent, "get", "/v1/probes?type=liveness");
    assert_eq!(probes[0]["target"], "tcp://127.0.0.1:1");
    assert_eq!(probes[0]["result"], "failure");
    assert_eq!(probes[0]["on-hold"], true);
    let (_, summary) = request(&agent, "get", "/v1/probes/summary");
    assert_eq!(summary["failing"], 2);
    assert_eq!(summary["problems"][0]["subject"], "pods/db.yaml");
    let (_, pods) = request(&agent, "get", "/v1/pods");
    assert_eq!(pods[0]["containers"][0]["id"], "test://3f2a");
    let (_, events) = request(&agent, "get", "/v1/pods/events");
    let numbers = events.as_array().unwrap().iter();
    let numbers: Vec<u64> = numbers.map(|one| one["number"].as_u64().unwrap()).collect();
    assert!(numbers.is_sorted() && !numbers.is_empty(), "{events}");
}

#[test]
fn a_watch_of_container_probes_reports_all_and_then_what_changes() {
    let agent = Agent::start(|fixture| fixture.probes_containers = true);
    let components = json!({ "components": document(&agent)["components"] });
    let schema = json!({ "$ref": "#/components/schemas/ContainerProbeEvent" });
    let mut stream = UnixStream::connect(agent.dir().join("health.sock")).unwrap();
    // Longer than any answer takes, even on a busy machine.
    let patience = Some(Duration::from_secs(60));
    stream.set_read_timeout(patience).unwrap();
    // With HTTP/1.0, there are no chunks to reassemble.
    let request = b"GET /v1/probes?watch=true&pod=web HTTP/1.0\r\nhost: localhost\r\n\r\n";
    stream.write_all(request).unwrap();
    let mut lines = BufReader::new(stream).lines();
    while lines.next().unwrap().unwrap() != "" {}
    let mut events_until = |last: &str| {
        let mut events = Vec::new();
        loop {
            let line = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            assert_conforms(&components, &schema, &line, "a line");
            let event = line["event"].as_str().unwrap().to_owned();
            let kind = line["probe"]["type"].as_str().or(line["type"].as_str());
            events.push(format!("{event} {}", kind.unwrap_or_default()));
            if events.last().unwrap() == last {
                return events;
            }
        }
    };
    assert_eq!(
        events_until("listed "),
        ["updated readiness", "updated liveness", "listed "]
    );
    agent.remove_pods();
    let gone = events_until("deleted readiness");
    assert!(gone.contains(&"deleted liveness".to_owned()), "{gone:?}");
}

#[test]
fn where_no_containers_are_probed_there_is_nothing_to_watch() {
    let agent = Agent::start(|_| {});
    let (_, summary) = request(&agent, "get", "/v1/probes/summary");
    assert_eq!(summary["enabled"], false);
    let (code, refusal) = request(&agent, "get", "/v1/probes?watch=true");
    assert_eq!(code, 503);
    assert_eq!(refusal["error"], "this agent probes no containers");
}
