//! The part of an operation's description that follows from its handler's type.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query};
use axum::http::StatusCode;
use health_endpoint::health::ENDPOINT_IDS;
use health_model::api::ErrorBody;
use health_model::identity::Identity;
use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::schemas::Schemas;
use crate::answer::{Answer, AnswerOrLines, Lines, Refusal};
use crate::body::JsonBody;
use crate::endpoints::EndpointId;
use crate::pacing::Client;
use crate::path_id::PathId;
use crate::policies::{MAX_DOCUMENT, PolicyText};
use crate::server::Shared;
use crate::source::testing::Unasked;

/// The parts of an operation that follow from its handler's type.
#[derive(Default)]
pub(crate) struct Signature {
    pub(super) parameters: Vec<Value>,
    pub(super) body: Option<Value>,
    /// Status codes of the errors that the handler's extractors return.
    pub(super) refusals: BTreeSet<u16>,
    /// Response contents by status code and media type.
    pub(super) answers: BTreeMap<u16, Map<String, Value>>,
}

impl Signature {
    fn answer(&mut self, code: StatusCode, media_type: &str, schema: Value) {
        let contents = self.answers.entry(code.as_u16()).or_default();
        contents.insert(media_type.to_owned(), json!({ "schema": schema }));
    }

    fn id(&mut self, description: &str, schema: Value) {
        self.parameters.push(json!({
            "name": "id",
            "in": "path",
            "required": true,
            "description": description,
            "schema": schema,
        }));
        self.refuse(StatusCode::BAD_REQUEST);
    }

    fn take_body(&mut self, body: Value) {
        self.body = Some(body);
        self.refuse(StatusCode::BAD_REQUEST);
        self.refuse(StatusCode::PAYLOAD_TOO_LARGE);
    }

    fn refuse(&mut self, code: StatusCode) {
        self.refusals.insert(code.as_u16());
    }
}

/// A part of a request that handlers extract, or a response.
pub(crate) trait Described {
    fn describe(signature: &mut Signature, schemas: &mut Schemas);
}

/// A handler. Only its type matters.
pub(crate) struct Handler(pub(super) fn(&mut Signature, &mut Schemas));

impl Handler {
    pub(crate) fn of<P, H: HandlerOf<P>>(_: H) -> Self {
        Self(H::describe)
    }
}

/// A function that handles requests with the parts `P`.
pub(crate) trait HandlerOf<P> {
    fn describe(signature: &mut Signature, schemas: &mut Schemas);
}

macro_rules! handler_of {
    ($($part:ident)*) => {
        impl<H, F, A, $($part),*> HandlerOf<($($part,)*)> for H
        where
            H: Fn($($part),*) -> F,
            F: Future<Output = A>,
            A: Described,
            $($part: Described,)*
        {
            fn describe(signature: &mut Signature, schemas: &mut Schemas) {
                $($part::describe(signature, schemas);)*
                A::describe(signature, schemas);
            }
        }
    };
}

handler_of!();
handler_of!(P1);
handler_of!(P1 P2);
handler_of!(P1 P2 P3);

impl Described for Shared<Unasked> {
    fn describe(_: &mut Signature, _: &mut Schemas) {}
}

impl Described for Extension<Client> {
    fn describe(_: &mut Signature, _: &mut Schemas) {}
}

impl<T: JsonSchema> Described for Result<Query<T>, QueryRejection> {
    fn describe(signature: &mut Signature, schemas: &mut Schemas) {
        signature.parameters.extend(schemas.query::<T>());
        signature.refuse(StatusCode::BAD_REQUEST);
    }
}

impl Described for PathId<EndpointId> {
    fn describe(signature: &mut Signature, _: &mut Schemas) {
        let (first, last) = ENDPOINT_IDS.into_inner();
        let schema = json!({ "type": "integer", "minimum": first, "maximum": last });
        signature.id("Endpoint id.", schema);
    }
}

impl Described for PathId<Identity> {
    fn describe(signature: &mut Signature, _: &mut Schemas) {
        let description = "Its number, or the name of a reserved one, such as `reserved:host`.";
        signature.id(description, json!({ "type": "string" }));
    }
}

impl<T: JsonSchema> Described for JsonBody<T> {
    fn describe(signature: &mut Signature, schemas: &mut Schemas) {
        let content = json!({ "application/json": { "schema": schemas.request::<T>() } });
        signature.take_body(json!({ "required": true, "content": content }));
    }
}

impl Described for PolicyText {
    fn describe(signature: &mut Signature, _: &mut Schemas) {
        let description = format!("YAML or JSON, up to {} MiB.", MAX_DOCUMENT >> 20);
        let content = json!({ "application/yaml": { "schema": { "type": "string" } } });
        signature
            .take_body(json!({ "required": true, "description": description, "content": content }));
    }
}

impl<A: Described> Described for Result<A, Refusal> {
    fn describe(signature: &mut Signature, schemas: &mut Schemas) {
        A::describe(signature, schemas);
    }
}

impl Described for () {
    fn describe(signature: &mut Signature, _: &mut Schemas) {
        signature.answers.insert(200, Map::new());
    }
}

impl<T: JsonSchema> Described for Answer<T> {
    fn describe(signature: &mut Signature, schemas: &mut Schemas) {
        signature.answer(StatusCode::OK, "application/json", schemas.answer::<T>());
    }
}

impl<E: JsonSchema> Described for Lines<E> {
    fn describe(signature: &mut Signature, schemas: &mut Schemas) {
        signature.answer(StatusCode::OK, "application/jsonl", schemas.answer::<E>());
    }
}

impl<T: JsonSchema, E: JsonSchema> Described for AnswerOrLines<T, E> {
    fn describe(signature: &mut Signature, schemas: &mut Schemas) {
        Answer::<T>::describe(signature, schemas);
        Lines::<E>::describe(signature, schemas);
    }
}

/// The status code says whether the agent works.
impl<T: JsonSchema> Described for (StatusCode, Answer<T>) {
    fn describe(signature: &mut Signature, schemas: &mut Schemas) {
        Answer::<T>::describe(signature, schemas);
        let either = [schemas.answer::<T>(), schemas.answer::<ErrorBody>()];
        let failed = StatusCode::INTERNAL_SERVER_ERROR;
        signature.answer(failed, "application/json", json!({ "anyOf": either }));
    }
}
