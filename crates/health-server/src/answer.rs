//! Responses of the API: JSON, JSON lines, and errors.

use std::fmt::Display;
use std::io;
use std::marker::PhantomData;

use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, TryStreamExt as _};
use health_model::api::ErrorBody;
use serde::Serialize;

/// An error response.
pub(super) struct Refusal(pub(super) StatusCode, pub(super) String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(code, error) = self;
        let body = serde_json::to_vec(&ErrorBody { error }).unwrap_or_default();
        (code, Answer::<ErrorBody>::of_json(body)).into_response()
    }
}

impl From<QueryRejection> for Refusal {
    fn from(rejection: QueryRejection) -> Self {
        Self(StatusCode::BAD_REQUEST, rejection.body_text())
    }
}

/// A JSON response that holds a `T`.
pub(super) struct Answer<T>(Body, PhantomData<fn() -> T>);

impl<T> Answer<T> {
    pub(super) fn of_json(json: impl Into<Body>) -> Self {
        Self(json.into(), PhantomData)
    }
}

impl<T> IntoResponse for Answer<T> {
    fn into_response(self) -> Response {
        with_type("application/json", self.0)
    }
}

/// A response of JSON lines that are sent as they are produced. Each line is an `E`.
pub(super) struct Lines<E>(Body, PhantomData<fn() -> E>);

impl<E> Lines<E> {
    pub(super) fn of_stream(
        batches: impl Stream<Item = io::Result<Batch<E>>> + Send + 'static,
    ) -> Self {
        let body = Body::from_stream(batches.map_ok(|batch| batch.0));
        Self(body, PhantomData)
    }
}

impl<E> IntoResponse for Lines<E> {
    fn into_response(self) -> Response {
        with_type("application/jsonl", self.0)
    }
}

/// The response of an operation that can also be watched.
pub(super) enum AnswerOrLines<T, E> {
    Answer(Answer<T>),
    Lines(Lines<E>),
}

impl<T, E> IntoResponse for AnswerOrLines<T, E> {
    fn into_response(self) -> Response {
        match self {
            Self::Answer(answer) => answer.into_response(),
            Self::Lines(lines) => lines.into_response(),
        }
    }
}

fn with_type(media_type: &'static str, body: Body) -> Response {
    ([(header::CONTENT_TYPE, media_type)], body).into_response()
}

/// Computes a response and its JSON outside the serving threads: with ten thousand nodes, this takes tens of
/// milliseconds.
pub(super) async fn answer<T: Serialize>(
    make: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<Answer<T>, Refusal> {
    let make = move || serde_json::to_vec(&make()?).map_err(cannot_write);
    let body = tokio::task::spawn_blocking(make).await.map_err(|error| {
        Refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot prepare the answer: {error}"),
        )
    })??;
    Ok(Answer::of_json(body))
}

pub(super) fn bad(reason: String) -> Refusal {
    Refusal(StatusCode::BAD_REQUEST, reason)
}

pub(super) fn cannot_write(error: impl Display) -> Refusal {
    Refusal(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("cannot write the answer: {error}"),
    )
}

/// Lines that are sent together.
pub(super) struct Batch<E>(Bytes, PhantomData<fn() -> E>);

impl<E: Serialize> Batch<E> {
    pub(super) fn write(events: &[E]) -> io::Result<Self> {
        let mut lines = Vec::new();
        for event in events {
            serde_json::to_writer(&mut lines, event)?;
            lines.push(b'\n');
        }
        Ok(Self(lines.into(), PhantomData))
    }
}
