//! Request bodies.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use health_model::labels::{LABEL_MAX, LABELS_MAX};
use serde::de::DeserializeOwned;

use super::answer::{Refusal, bad};

/// Maximum size of a JSON body in bytes: the maximum number of labels of maximum length, plus the rest.
pub(super) const MAX_JSON: usize = LABEL_MAX * LABELS_MAX * 5 / 4;
/// Time limit for receiving a JSON body.
const JSON_TIMEOUT: Duration = Duration::from_secs(5);

/// A JSON body.
pub(super) struct JsonBody<T>(pub(super) T);

impl<S: Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let bytes = receive(request, MAX_JSON, JSON_TIMEOUT).await?;
        let mut text = serde_json::Deserializer::from_slice(&bytes);
        let parsed = serde_path_to_error::deserialize(&mut text).map_err(|error| {
            let path = error.path().to_string();
            let what = error.into_inner();
            match path.as_str() {
                "." => bad(format!("the body: {what}")),
                _ => bad(format!("{path}: {what}")),
            }
        })?;
        text.end()
            .map_err(|error| bad(format!("the body: {error}")))?;
        Ok(Self(parsed))
    }
}

/// Receives a body of at most `longest` bytes, within `limit`.
pub(super) async fn receive(
    request: Request,
    longest: usize,
    limit: Duration,
) -> Result<Bytes, Refusal> {
    let read = axum::body::to_bytes(request.into_body(), longest);
    tokio::time::timeout(limit, read)
        .await
        .map_err(|_| {
            Refusal(
                StatusCode::REQUEST_TIMEOUT,
                "the body took too long to arrive".to_owned(),
            )
        })?
        .map_err(|_| {
            Refusal(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the body cannot be read, or is longer than {longest} bytes"),
            )
        })
}
