//! The API over its socket, held against its own OpenAPI document.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use common::Agent;
use serde_json::Value;

const METHODS: [&str; 5] = ["get", "put", "post", "delete", "patch"];

/// Status code and body, null if it is empty.
fn request(agent: &Agent, method: &str, path: &str) -> (u64, Value) {
    let mut stream = UnixStream::connect(agent.dir().join("health.sock")).unwrap();
    let method = method.to_uppercase();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = match body {
        "" => Value::Null,
        body => serde_json::from_str(body).unwrap(),
    };
    (code, body)
}

fn document(agent: &Agent) -> Value {
    let (code, document) = request(agent, "get", "/v1/openapi.json");
    assert_eq!(code, 200);
    document
}

/// Follows `$ref`, which names a place in the document.
fn resolve<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str() {
        Some(reference) => {
            let pointer = reference.strip_prefix('#').expect("a reference within");
            document.pointer(pointer).expect(reference)
        }
        None => value,
    }
}

/// Checks what the document's schemas make use of; where it breaks a rule, the error says.
fn conforms(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let schema = resolve(document, schema);
    if let Some(schemas) = schema["anyOf"].as_array() {
        return schemas
            .iter()
            .any(|schema| conforms(document, schema, value).is_ok())
            .then_some(())
            .ok_or_else(|| format!("{value} is none of {schemas:?}"));
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let kinds = &schema["type"];
    if kinds != kind && !kinds.as_array().is_some_and(|k| k.contains(&kind.into())) {
        return Err(format!("{value} is {kind}, not {kinds}"));
    }
    if let Some(values) = schema["enum"].as_array()
        && !values.contains(value)
    {
        return Err(format!("{value} is not one of {values:?}"));
    }
    for item in value.as_array().into_iter().flatten() {
        conforms(document, &schema["items"], item)?;
    }
    let Some(fields) = value.as_object() else {
        return Ok(());
    };
    for required in schema["required"].as_array().into_iter().flatten() {
        if !fields.contains_key(required.as_str().unwrap()) {
            return Err(format!("{value} lacks {required}"));
        }
    }
    for (name, field) in fields {
        let property = match schema["properties"].get(name) {
            Some(property) => property,
            None if schema["additionalProperties"].is_object() => &schema["additionalProperties"],
            None if schema["additionalProperties"] == false => {
                return Err(format!("{name} is not documented"));
            }
            None => continue,
        };
        conforms(document, property, field).map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

/// Whether an answer is as an operation of the document says.
fn assert_documented(document: &Value, operation: &Value, code: u64, body: &Value) {
    let responses = &operation["responses"];
    let response = responses
        .get(code.to_string())
        .unwrap_or(&responses["default"]);
    let schema = &resolve(document, response)["content"]["application/json"]["schema"];
    if schema.is_null() {
        assert_eq!(*body, Value::Null, "{operation}");
    } else if let Err(error) = conforms(document, schema, body) {
        panic!("{} answers {code}: {error}", operation["operationId"]);
    }
}

#[test]
fn every_documented_operation_answers_as_documented_and_no_other_does() {
    let agent = Agent::start(|_| {});
    let document = document(&agent);
    for (path, operations) in document["paths"].as_object().unwrap() {
        let real_path = path.replace("{id}", "1017");
        for method in METHODS {
            let (code, body) = request(&agent, method, &real_path);
            match operations.get(method) {
                Some(operation) => {
                    assert_eq!(code, 200, "{method} {path}");
                    assert_documented(&document, operation, code, &body);
                }
                None => {
                    assert_eq!(code, 405, "{method} {path}");
                    assert!(body["error"].as_str().unwrap().contains(&real_path));
                }
            }
        }
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
