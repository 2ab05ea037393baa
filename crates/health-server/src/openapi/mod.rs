//! The OpenAPI document, generated from the table of operations and from the handlers' types with their doc comments.
//! Agents serve a copy, `openapi.json`, so that production code needs no schemas.

mod layout;
mod schemas;
mod signature;

use std::collections::BTreeMap;

use health_model::api::ErrorBody;
use serde_json::{Map, Value, json};

use self::schemas::Schemas;
pub(super) use self::signature::Handler;
use self::signature::Signature;
use crate::audience::Access;
use crate::body::MAX_JSON;
use crate::routes::operations;
use crate::server::ANSWERED_WHILE_STARTING;

/// A row of the table of operations.
pub(super) struct Operation {
    pub(super) id: &'static str,
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) access: Access,
    pub(super) summary: &'static str,
    /// Meanings of status codes.
    pub(super) meanings: &'static [(u16, &'static str)],
    pub(super) handler: Handler,
}

impl Operation {
    fn document(&self, schemas: &mut Schemas) -> Value {
        let mut signature = Signature::default();
        (self.handler.0)(&mut signature, schemas);
        let mut document = json!({
            "operationId": self.id,
            "summary": self.summary,
            "x-access": self.access.word(),
            "responses": self.responses(&mut signature),
        });
        if !signature.parameters.is_empty() {
            document["parameters"] = signature.parameters.into();
        }
        if let Some(body) = signature.body {
            document["requestBody"] = body;
        }
        document
    }

    fn responses(&self, signature: &mut Signature) -> Map<String, Value> {
        let error = json!({ "$ref": "#/components/responses/Error" });
        let refusals = signature.refusals.iter().map(u16::to_string);
        let refusals = refusals.chain(["default".to_owned()]);
        let mut responses: Map<_, _> = refusals.map(|code| (code, error.clone())).collect();
        for (code, meaning) in self.meanings {
            let response = match signature.answers.remove(code) {
                Some(contents) if contents.is_empty() => json!({ "description": meaning }),
                Some(contents) => json!({ "description": meaning, "content": contents }),
                None => json!({ "$ref": error["$ref"], "description": meaning }),
            };
            responses.insert(code.to_string(), response);
        }
        let unlisted: Vec<_> = signature.answers.keys().collect();
        assert!(unlisted.is_empty(), "{}: {unlisted:?}", self.id);
        responses
    }
}

fn document() -> Value {
    let mut schemas = Schemas::default();
    let mut paths: BTreeMap<_, Map<_, _>> = BTreeMap::new();
    for operation in operations() {
        let document = operation.document(&mut schemas);
        let path = paths.entry(operation.path).or_default();
        path.insert(operation.method.to_owned(), document);
    }
    let error = schemas.answer::<ErrorBody>();
    let error = json!({ "application/json": { "schema": error } });
    json!({
        "openapi": "3.1.0",
        "info": { "title": "health-agent", "version": "1", "description": description() },
        "servers": [{
            "url": "http://localhost",
            "description": "The unix socket; the host name does not matter.",
        }],
        "paths": paths,
        "components": {
            "responses": { "Error": { "description": "What failed.", "content": error } },
            "schemas": schemas.definitions(),
        },
    })
}

fn description() -> String {
    format!(
        "The API of an agent, on the unix socket health.sock in its runtime folder. If the agent's settings say so, it \
         is also on reader.sock beside it, for operations whose x-access is read only, and on TCP ports over TLS. A \
         connection carries one request. \
         Only operations that say so take a body; others answer 413 to one. A body of JSON may have up to {} KiB. While the agent \
         starts, all paths except {} answer 503 with an error that says what the start is waiting for. Everything \
         under /v1beta except status/path-mtu has the paths and fields of Cilium's health API; fields that Cilium \
         lacks are optional additions.",
        MAX_JSON >> 10,
        ANSWERED_WHILE_STARTING.join(", "),
    )
}

#[cfg(test)]
mod tests {
    use std::{env, fs};

    use axum::http::Method;

    use super::*;
    use crate::routes::takes_body;
    use crate::server::OPENAPI;

    const FILE: &str = include_str!("../openapi.json");
    /// Set by `cargo xtask openapi`.
    const WRITE: &str = "HEALTH_AGENT_WRITE_OPENAPI";

    #[test]
    fn the_document_is_that_of_the_handlers_and_their_types() {
        let text = layout::text(&document());
        if env::var_os(WRITE).is_some() {
            let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/openapi.json");
            fs::write(file, text).unwrap();
            return;
        }
        let differing = FILE.lines().zip(text.lines()).find(|(old, new)| old != new);
        assert!(
            FILE == text,
            "openapi.json is old; run `cargo xtask openapi`: {differing:?}"
        );
        assert_eq!(serde_json::from_str::<Value>(OPENAPI).unwrap(), document());
    }

    fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(members) => {
                found.extend(members.get("$ref").and_then(Value::as_str));
                members
                    .values()
                    .for_each(|member| references(member, found));
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_of_the_document_leads_into_it() {
        let document = document();
        let mut found = Vec::new();
        references(&document, &mut found);
        found.sort_unstable();
        found.dedup();
        assert!(found.len() > 50, "{found:?}");
        found.retain(|reference| document.pointer(&reference[1..]).is_none());
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn requests_may_have_the_bodies_that_handlers_take() {
        for operation in operations() {
            let mut signature = Signature::default();
            (operation.handler.0)(&mut signature, &mut Schemas::default());
            let method: Method = operation.method.to_uppercase().parse().unwrap();
            assert_eq!(
                takes_body(&method, operation.path),
                signature.body.is_some(),
                "{}",
                operation.id
            );
        }
    }
}
