//! Answers of the API: JSON, JSON lines, and refusals.

use std::fmt::Display;
use std::io;

use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use health_model::api::ErrorBody;
use serde::Serialize;

/// An unsuccessful answer.
pub(super) struct Refusal(pub(super) StatusCode, pub(super) String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(code, error) = self;
        let body = serde_json::to_vec(&ErrorBody { error }).unwrap_or_default();
        json(code, body)
    }
}

impl From<QueryRejection> for Refusal {
    fn from(rejection: QueryRejection) -> Self {
        Self(StatusCode::BAD_REQUEST, rejection.body_text())
    }
}

pub(super) fn json(code: StatusCode, body: Vec<u8>) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Produces an answer and its JSON outside the serving threads: with ten thousand nodes, that takes tens of
/// milliseconds.
pub(super) async fn answer<T: Serialize>(
    make: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<Response, Refusal> {
    let make = move || serde_json::to_vec(&make()?).map_err(cannot_write);
    let body = tokio::task::spawn_blocking(make).await.map_err(|error| {
        Refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot make the answer: {error}"),
        )
    })??;
    Ok(json(StatusCode::OK, body))
}

pub(super) fn cannot_write(error: impl Display) -> Refusal {
    Refusal(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("cannot write the answer: {error}"),
    )
}

/// An answer of JSON lines, sent as they are produced.
pub(super) fn as_lines(lines: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Response {
    let content_type = [(header::CONTENT_TYPE, "application/jsonl")];
    (content_type, Body::from_stream(lines)).into_response()
}

pub(super) fn write_lines<T: Serialize>(events: &[T]) -> io::Result<Bytes> {
    let mut lines = Vec::new();
    for event in events {
        serde_json::to_writer(&mut lines, event)?;
        lines.push(b'\n');
    }
    Ok(lines.into())
}
