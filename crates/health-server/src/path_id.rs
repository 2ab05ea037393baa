//! Ids in paths.

use std::fmt::Display;
use std::str::FromStr;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;

use super::answer::{Refusal, bad};

/// The `{id}` of a path.
pub(super) struct PathId<T>(pub(super) T);

impl<S: Send + Sync, T: FromStr<Err: Display>> FromRequestParts<S> for PathId<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let text = Path::<String>::from_request_parts(parts, state).await;
        let Path(text) = text.map_err(|rejection| bad(rejection.body_text()))?;
        let id = text.parse();
        id.map(Self).map_err(|error: T::Err| bad(error.to_string()))
    }
}
