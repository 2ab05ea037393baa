//! The API over its socket, checked against its own OpenAPI document.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

mod common;
#[path = "api/probes.rs"]
mod probes;
#[path = "api/remote.rs"]
mod remote;
#[path = "api/services.rs"]
mod services;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{Agent, Fixture};
use health_api::client::Client;
use health_model::api::ProbeEvent;
use serde_json::{Value, json};

const METHODS: [&str; 5] = ["get", "put", "post", "delete", "patch"];

/// A raw answer.
struct Answer {
    code: u64,
    media_type: Option<String>,
    body: String,
}

/// Sends `head`, a request's first line and headers, followed by `body`.
fn send(agent: &Agent, head: &str, body: &str) -> Answer {
    let mut stream = UnixStream::connect(agent.dir().join("health.sock")).unwrap();
    // The agent may answer before it has received everything.
    let _ = write!(stream, "{head}\r\nhost: localhost\r\n\r\n{body}");
    let mut answer = Vec::new();
    // If the agent closes the connection without reading everything, an error follows the answer.
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let media_type = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        (name == "content-type").then(|| value.to_owned())
    });
    Answer {
        code: head.split(' ').nth(1).unwrap().parse().unwrap(),
        body: body.to_owned(),
        media_type,
    }
}

/// The status code and body of an answer; the body is null if empty.
fn request(agent: &Agent, method: &str, path: &str) -> (u64, Value) {
    let method = method.to_uppercase();
    let answer = send(agent, &format!("{method} {path} HTTP/1.1"), "");
    let body = match answer.body.as_str() {
        "" => Value::Null,
        body => {
            assert_eq!(answer.media_type.as_deref(), Some("application/json"));
            serde_json::from_str(body).unwrap()
        }
    };
    (answer.code, body)
}

/// Like [`request`], but with a body.
fn request_with(agent: &Agent, method: &str, path: &str, body: &str) -> (u64, Value) {
    let (method, length) = (method.to_uppercase(), body.len());
    let head = format!("{method} {path} HTTP/1.1\r\ncontent-length: {length}");
    let answer = send(agent, &head, body);
    (answer.code, serde_json::from_str(&answer.body).unwrap())
}

#[test]
fn a_request_for_an_endpoint_that_is_wrong_is_refused_by_the_field() {
    let agent = Agent::start(|_| {});
    let long = "x".repeat(2000);
    for (body, naming) in [
        ("", "the body: EOF"),
        ("[]", "the body: "),
        ("{}", "missing field `netns`"),
        (r#"{"netns":7}"#, "netns: invalid type: integer"),
        (r#"{"netns":"a"}"#, "netns: \"a\" is not an absolute path"),
        (r#"{"netns":"/a","mtu":9000}"#, "unknown field `mtu`"),
        (
            r#"{"netns":"/a","labels":["a=1","=b"]}"#,
            "labels[1]: label \"unspec:=b\" has no key",
        ),
        (
            r#"{"netns":"/a","labels":["a=1","a=2"]}"#,
            "labels: label unspec:a appears twice",
        ),
        (
            r#"{"netns":"/a","labels":["reserved:host"]}"#,
            "labels[0]: reserved:host: endpoints cannot have labels from this source",
        ),
        (
            r#"{"netns":"/a","labels":["port:web=80/TCP"]}"#,
            "labels[0]: port:web=80/TCP: endpoints cannot have labels from this source",
        ),
        (
            r#"{"netns":"/a","labels":["cidr:10.0.0.0/8"]}"#,
            "labels[0]: cidr:10.0.0.0/8: endpoints cannot have labels from this source",
        ),
        (r#"{"netns":"/a","labels":[1]}"#, "labels[0]: invalid type"),
        (
            r#"{"netns":"/a","ipv4":"fd00::1"}"#,
            "ipv4: \"fd00::1\" is not an address",
        ),
        (
            r#"{"netns":"/a","ifname":"no such name"}"#,
            "ifname: must have 1 to 15",
        ),
        (r#"{"netns":"/a","name":""}"#, "name: must have 1 to 253"),
        (r#"{"netns":"/a"} x"#, "the body: trailing characters"),
        (
            &format!(r#"{{"netns":"/a","labels":["{long}"]}}"#),
            "labels[0]: the label that begins with",
        ),
    ] {
        let (code, answer) = request_with(&agent, "post", "/v1/endpoints", body);
        let error = answer["error"].as_str().unwrap();
        assert_eq!(code, 400, "{body}: {error}");
        assert!(error.contains(naming), "{body}: {error}");
    }
    let huge = format!(r#"{{"netns":"{}"}}"#, "x".repeat(400 << 10));
    assert_eq!(request_with(&agent, "post", "/v1/endpoints", &huge).0, 413);
    // Other paths accept no body.
    assert_eq!(request_with(&agent, "get", "/v1/endpoints", "{}").0, 413);
    let (code, answer) = request(&agent, "delete", "/v1/endpoints");
    assert_eq!(
        (code, answer["error"].as_str().unwrap()),
        (400, "expected either container-id=ID or netns=PATH")
    );
}

fn document(agent: &Agent) -> Value {
    let (code, document) = request(agent, "get", "/v1/openapi.json");
    assert_eq!(code, 200);
    document
}

/// Resolves a `$ref` within the document.
fn resolve<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str() {
        Some(reference) => {
            let pointer = reference.strip_prefix('#').expect("a reference within");
            document.pointer(pointer).expect(reference)
        }
        None => value,
    }
}

/// Checks a value against a schema whose references point into `root`.
fn assert_conforms(root: &Value, schema: &Value, value: &Value, what: &str) {
    let mut whole = root.clone();
    let schema = schema.as_object().unwrap().clone();
    whole.as_object_mut().unwrap().extend(schema);
    let validator = jsonschema::options()
        .should_validate_formats(true)
        .build(&whole)
        .unwrap();
    let errors: Vec<_> = validator
        .iter_errors(value)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{what}: {errors:#?}");
}

/// Checks an answer against an operation in the document.
fn assert_documented(document: &Value, operation: &Value, code: u64, body: &Value) {
    let responses = &operation["responses"];
    let response = responses
        .get(code.to_string())
        .unwrap_or(&responses["default"]);
    let schema = &resolve(document, response)["content"]["application/json"]["schema"];
    if schema.is_null() {
        assert_eq!(*body, Value::Null, "{operation}");
    } else {
        let what = format!("{} answers {code}", operation["operationId"]);
        let components = json!({ "components": document["components"] });
        assert_conforms(&components, schema, body, &what);
    }
}

/// Checks a value against Cilium's schema `name`.
fn assert_ciliums(name: &str, value: &Value) {
    let schemas: Value = serde_json::from_str(include_str!("common/cilium_health.json")).unwrap();
    let schema = json!({ "$ref": format!("#/$defs/{name}") });
    assert!(!value.is_null(), "{name} is there");
    assert_conforms(&schemas, &schema, value, name);
}

/// A report without problems, and one that contains everything that a report can.
const REPORTS: [fn(&mut Fixture); 2] = [|_| {}, troubled];

fn troubled(fixture: &mut Fixture) {
    fixture.is_troubled = true;
    fixture.probes_containers = true;
    fixture.serves_services = true;
    fixture.registered = 2;
    fixture.peer = Some("Connection timed out");
}

#[test]
fn every_documented_operation_answers_as_documented_and_no_other_does() {
    for change in REPORTS {
        let agent = Agent::start(change);
        let document = document(&agent);
        for (path, operations) in document["paths"].as_object().unwrap() {
            // The managed endpoint is a different one from the fixture's own.
            let is_managed = ["/labels", "/config", "/log", "/healthz"]
                .iter()
                .any(|end| path.ends_with(end));
            let id = if is_managed { "1018" } else { "1017" };
            let real_path = path.replace("{id}", id);
            for method in METHODS {
                if (path.as_str(), method) == ("/v1/monitor", "get") {
                    // Answers line by line; another test checks this.
                    continue;
                }
                let Some(operation) = operations.get(method) else {
                    let (code, body) = request(&agent, method, &real_path);
                    assert_eq!(code, 405, "{method} {path}");
                    assert!(body["error"].as_str().unwrap().contains(&real_path));
                    continue;
                };
                let (code, body) = match (path.as_str(), method) {
                    ("/v1/endpoints", "delete") => {
                        request(&agent, method, "/v1/endpoints?container-id=none")
                    }
                    ("/v1/endpoints", "post") => {
                        request_with(&agent, method, path, r#"{"netns":"/run/netns/a"}"#)
                    }
                    ("/v1/policies/trace", "post") => request_with(
                        &agent,
                        method,
                        path,
                        r#"{"source":{"endpoint":1018},"destination":{"ip":"10.0.0.1"},"l4":{"protocol":"TCP","port":80}}"#,
                    ),
                    ("/v1/services/trace", "get") => request(
                        &agent,
                        method,
                        "/v1/services/trace?source=192.0.2.1&destination=10.96.0.1:80",
                    ),
                    ("/v1/endpoints/{id}/config", "patch") => {
                        request_with(&agent, method, &real_path, r#"{"enforcement":"never"}"#)
                    }
                    ("/v1/policies/mode", "patch") => {
                        request_with(&agent, method, path, r#"{"mode":"always"}"#)
                    }
                    (_, "patch") => request_with(&agent, method, &real_path, r#"{"add":["a=b"]}"#),
                    _ => request(&agent, method, &real_path),
                };
                // Policy and traces need programs, which only bed tests have.
                let needs_programs =
                    path.starts_with("/v1/policies") || path == "/v1/services/trace";
                let expected = if needs_programs { 503 } else { 200 };
                assert_eq!(code, expected, "{method} {path}: {body}");
                assert_documented(&document, operation, code, &body);
            }
        }
    }
}

#[test]
fn everything_under_v1beta_has_ciliums_fields_and_types() {
    for change in REPORTS {
        let agent = Agent::start(change);
        let (_, healthz) = request(&agent, "get", "/v1beta/healthz");
        assert_ciliums("HealthResponse", &healthz);
        assert_ciliums("LoadResponse", &healthz["system-load"]);
        for (method, path) in [("get", "/v1beta/status"), ("put", "/v1beta/status/probe")] {
            let (_, status) = request(&agent, method, path);
            assert_ciliums("HealthStatusResponse", &status);
            assert_ciliums("SelfStatus", &status["local"]);
            for node in status["nodes"].as_array().unwrap() {
                assert_ciliums("NodeStatus", node);
                assert_ciliums("HostStatus", &node["host"]);
                assert_ciliums("EndpointStatus", &node["health-endpoint"]);
                let path = &node["host"]["primary-address"];
                assert_ciliums("PathStatus", path);
                assert_ciliums("ConnectivityStatus", &path["icmp"]);
                assert_ciliums("ConnectivityStatus", &path["http"]);
            }
        }
        let (_, nodes) = request(&agent, "get", "/v1beta/cluster/nodes?client-id=0");
        assert_ciliums("ClusterNodeStatus", &nodes);
        let node = &nodes["nodes-added"][0];
        assert_ciliums("NodeElement", node);
        assert_ciliums("NodeAddressing", &node["primary-address"]);
        assert_ciliums("NodeAddressing", &node["health-endpoint-address"]);
        assert_ciliums("NodeAddressingElement", &node["primary-address"]["ipv4"]);
        let (_, hello) = request(&agent, "get", "/v1beta/hello");
        assert_eq!(hello, Value::Null);
    }
}

/// The lines of an answer, each checked against the schema of this name.
fn lines(agent: &Agent, request: &str, schema: &str) -> Vec<Value> {
    // With HTTP/1.0, there are no chunks to reassemble.
    let answer = send(agent, &format!("{request} HTTP/1.0"), "");
    assert_eq!(answer.code, 200);
    assert_eq!(answer.media_type.as_deref(), Some("application/jsonl"));
    let components = json!({ "components": document(agent)["components"] });
    let schema = json!({ "$ref": format!("#/components/schemas/{schema}") });
    let read = |line| {
        let line = serde_json::from_str(line).unwrap();
        assert_conforms(&components, &schema, &line, "a line");
        line
    };
    answer.body.lines().map(read).collect()
}

#[test]
fn events_come_line_by_line_as_the_reader_wants_them() {
    let agent = Agent::start(|_| {});
    let types = |query: &str| -> Vec<String> {
        let lines = lines(&agent, &format!("GET /v1/monitor{query}"), "MonitorLine");
        let types = lines.iter().map(|line| line["type"].as_str().unwrap());
        types.map(str::to_owned).collect()
    };
    assert_eq!(types(""), ["drop", "ct", "lost", "end"]);
    assert_eq!(types("?type=ct&endpoint=1017"), ["ct", "lost", "end"]);
    assert_eq!(types("?proto=17&src=10.9.0.0/16"), ["drop", "lost", "end"]);
    assert_eq!(types("?type=drop,nat&proto=tcp"), ["lost", "end"]);
    let document = document(&agent);
    let operation = &document["paths"]["/v1/monitor"]["get"];
    for (query, named) in [
        ("type=all", "all"),
        ("port=70000", "70000"),
        ("dir=in", "dir"),
    ] {
        let (code, body) = request(&agent, "get", &format!("/v1/monitor?{query}"));
        assert_eq!(code, 400, "{query}");
        assert_documented(&document, operation, code, &body);
        assert!(body["error"].as_str().unwrap().contains(named), "{body}");
    }
}

#[test]
fn a_probe_can_be_watched_line_by_line() {
    let agent = Agent::start(troubled);
    let lines = lines(&agent, "PUT /v1beta/status/probe?stream=true", "ProbeEvent");
    let [node, progress, done] = &lines[..] else {
        panic!("{lines:?}");
    };
    assert_eq!(node["node"]["name"], "default/hnode1");
    assert_eq!(progress["progress"], json!({ "done": 4, "total": 8 }));
    assert_ciliums("HealthStatusResponse", &done["done"]);
}

#[tokio::test]
async fn the_client_sees_every_event_of_a_probe() {
    let agent = tokio::task::spawn_blocking(|| Agent::start(|_| {}))
        .await
        .unwrap();
    let client = Client::new(agent.dir().join("health.sock"));
    let mut events = Vec::new();
    client
        .stream_probe(|event| events.push(event))
        .await
        .unwrap();
    let [
        ProbeEvent::Node(_),
        ProbeEvent::Progress { .. },
        ProbeEvent::Done(done),
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!(done.nodes.len(), 2);
    tokio::task::spawn_blocking(|| drop(agent)).await.unwrap();
}

#[test]
fn history_is_reported_for_all_nodes_of_one_and_of_none_that_is_unknown() {
    let agent = Agent::start(|fixture| fixture.registered = 2);
    let document = document(&agent);
    let operation = &document["paths"]["/v1/history"]["get"];
    for (query, code, targets) in [
        ("", 200, Some(1)),
        ("?node=default/hnode1", 200, Some(1)),
        ("?node=default%2Fhnode2", 200, Some(0)),
        ("?node=default/hnode3", 404, None),
        ("?nod=default/hnode1", 400, None),
    ] {
        let (answered, body) = request(&agent, "get", &format!("/v1/history{query}"));
        assert_eq!(answered, code, "{query}");
        assert_eq!(body.as_array().map(Vec::len), targets, "{query}");
        assert_documented(&document, operation, code, &body);
        if code == 404 {
            assert!(body["error"].as_str().unwrap().contains("default/hnode3"));
        }
    }
}

#[test]
fn round_trip_times_are_rows_with_the_names_of_their_nodes() {
    let agent = Agent::start(|fixture| fixture.peer = Some(""));
    let (code, rows) = request(&agent, "get", "/v1/rtt");
    assert_eq!(code, 200);
    let [known, unknown] = &rows.as_array().unwrap()[..] else {
        panic!("{rows}");
    };
    assert_eq!(known["node"], "default/hnode1");
    assert_eq!(known["peer"], "172.30.0.1");
    assert_eq!(known["protocol"], "ICMP");
    assert_eq!(known["forward-last-ns"], -7);
    assert_eq!(
        known["histogram-ns"],
        json!([[20_480, 22_528, 1], [14_u64 << 32, null, 1]])
    );
    assert_eq!(unknown["node"], Value::Null);

    let agent = Agent::start(|fixture| fixture.peer = None);
    let (code, body) = request(&agent, "get", "/v1/rtt");
    assert_eq!(code, 503);
    assert!(
        body["error"]
            .as_str()
            .unwrap()
            .contains("no maps are pinned")
    );
}

#[test]
fn path_mtus_are_reported_for_all_nodes_of_one_and_of_none_that_is_unknown() {
    let agent = Agent::start(|fixture| fixture.registered = 3);
    let document = document(&agent);
    for method in ["get", "put"] {
        let operation = &document["paths"]["/v1beta/status/path-mtu"][method];
        for (query, code, paths) in [
            ("", 200, Some(2)),
            ("?node=default%2Fhnode3", 200, Some(1)),
            ("?node=default/hnode1", 200, Some(0)),
            ("?node=default/hnode4", 404, None),
            ("?nod=default/hnode2", 400, None),
        ] {
            let path = format!("/v1beta/status/path-mtu{query}");
            let (answered, body) = request(&agent, method, &path);
            assert_eq!(answered, code, "{method} {query}");
            assert_eq!(body.as_array().map(Vec::len), paths, "{method} {query}");
            assert_documented(&document, operation, code, &body);
        }
    }
}

#[test]
fn the_node_feed_sends_a_client_what_it_does_not_have_yet() {
    let agent = Agent::start(|fixture| fixture.registered = 2);
    let read = |query: &str| {
        let (code, body) = request(&agent, "get", &format!("/v1beta/cluster/nodes{query}"));
        assert_eq!(code, 200, "{query}");
        body
    };
    let all = read("");
    assert_eq!(all["client-id"], 0);
    assert_eq!(all["self"], "default/hnode1");
    let first = read("?client-id=0");
    assert_eq!(first["full"], true);
    assert_eq!(first["nodes-added"], all["nodes-added"]);
    assert_eq!(first["nodes-added"].as_array().unwrap().len(), 2);
    let (id, generation) = (&first["client-id"], &first["generation"]);
    let second = read(&format!("?client-id={id}&generation={generation}"));
    assert_eq!(second["client-id"], *id);
    assert_eq!(second["full"], false);
    assert_eq!(second["nodes-added"], json!([]));
    let (code, _) = request(&agent, "get", "/v1beta/cluster/nodes?client-id=x");
    assert_eq!(code, 400);
}

#[test]
fn requests_with_a_body_are_refused() {
    let agent = Agent::start(|_| {});
    for (header, body) in [
        ("content-length: 1", "x"),
        ("content-length: 10000000000", "x"),
        ("transfer-encoding: chunked", "1\r\nx\r\n0\r\n\r\n"),
    ] {
        let head = format!("PUT /v1beta/status/probe HTTP/1.1\r\n{header}");
        let answer = send(&agent, &head, body);
        assert_eq!(answer.code, 413, "{header}");
        assert!(answer.body.contains("/v1beta/status/probe"), "{header}");
    }
    let head = "PUT /v1beta/status/probe HTTP/1.1\r\ncontent-length: 0";
    assert_eq!(send(&agent, head, "").code, 200);
}

#[test]
fn a_flood_of_silent_connections_leaves_the_agent_answering() {
    let agent = Agent::start(|_| {});
    let connect = || UnixStream::connect(agent.dir().join("health.sock")).unwrap();
    let flood: Vec<_> = (0..150).map(|_| connect()).collect();
    assert_eq!(request(&agent, "get", "/v1beta/status").0, 200);
    drop(flood);
}

#[test]
fn idle_watchers_leave_room_for_changes() {
    const MOST: usize = 16;
    let agent = Agent::start(|_| {});
    let watch = || {
        let mut stream = UnixStream::connect(agent.dir().join("health.sock")).unwrap();
        // Longer than any answer takes, even on a busy machine.
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).unwrap();
        let request = b"GET /v1/endpoints?watch=true HTTP/1.1\r\nhost: localhost\r\n\r\n";
        stream.write_all(request).unwrap();
        stream
    };
    let code = |stream: &mut UnixStream| {
        let mut begin = [0; 12];
        stream.read_exact(&mut begin).unwrap();
        String::from_utf8_lossy(&begin[9..]).into_owned()
    };
    // All watchers connect before any is answered.
    let mut watchers: Vec<_> = (0..100).map(|_| watch()).collect();
    let mut change = UnixStream::connect(agent.dir().join("health.sock")).unwrap();
    let patience = Some(Duration::from_secs(60));
    change.set_read_timeout(patience).unwrap();
    let head = "PATCH /v1/endpoints/1018/labels HTTP/1.1\r\nhost: localhost";
    let body = r#"{"add":["a=b"]}"#;
    write!(
        change,
        "{head}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    assert_eq!(code(&mut change), "200");
    let codes: Vec<_> = watchers.iter_mut().map(code).collect();
    let served = codes.iter().filter(|code| *code == "200").count();
    let refused = codes.iter().filter(|code| *code == "503").count();
    assert_eq!((served, refused), (MOST, watchers.len() - MOST));
    let (_, refusal) = request(&agent, "get", "/v1/endpoints?watch=true");
    assert_eq!(
        refusal["error"],
        "16 watches of endpoints are already running; try again later"
    );
    // A client that disconnects frees its slot for another one.
    drop(watchers);
    let began = Instant::now();
    while code(&mut watch()) != "200" {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "no place is free"
        );
    }
}

#[test]
fn what_is_not_there_is_a_json_error() {
    let agent = Agent::start(|_| {});
    let document = document(&agent);
    let endpoint = &document["paths"]["/v1/endpoints/{id}"]["get"];
    for (path, expected) in [
        ("/v1/endpoints/1018", 404),
        ("/v1/endpoints/lxc_health", 400),
        ("/v1/endpoints/65536", 400),
        ("/v1/identities/30218", 404),
        ("/v1/identities/reserved:nobody", 400),
        ("/v1/nothing", 404),
        ("/", 404),
    ] {
        let (code, body) = request(&agent, "get", path);
        assert_eq!(code, expected, "{path}");
        assert_documented(&document, endpoint, code, &body);
    }
}

#[test]
fn a_failed_agent_answers_healthz_with_500() {
    for (state, expected) in [("Ok", 200), ("Warning", 200), ("Failure", 500)] {
        let agent = Agent::start(|fixture| fixture.state = state);
        let (code, body) = request(&agent, "get", "/v1beta/healthz");
        assert_eq!(code, expected);
        assert_eq!(body["cilium"]["state"], state);
        assert_eq!(body["uptime"], "1m1s");
        let document = document(&agent);
        let healthz = &document["paths"]["/v1beta/healthz"]["get"];
        assert_documented(&document, healthz, code, &body);
    }
}

#[test]
fn a_path_without_results_lacks_them_in_the_answer() {
    let agent = Agent::start(|fixture| fixture.peer = None);
    let (_, status) = request(&agent, "get", "/v1beta/status");
    let host = &status["nodes"][1]["host"]["primary-address"];
    assert_eq!(host.get("icmp"), None);
    assert_eq!(host["http"]["latency"], 21_300);
}
