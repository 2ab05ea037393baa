//! Lists whose members are read individually: a member of the wrong type does not affect the others.

use std::fmt;

use health_model::manifest::Problem;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::spec::{Extent, Kind, SpecError};

/// A list with the result of reading each member.
#[derive(Debug)]
pub(super) struct Members<T>(Vec<Result<T, WrongType>>);

/// Why a member has no value.
#[derive(Debug)]
struct WrongType {
    /// The path within the member; empty for the member itself.
    path: String,
    /// The reader's message.
    problem: String,
}

impl<T> Default for Members<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Members<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let members = Vec::<Value>::deserialize(from)?.into_iter();
        let read = |member: Value| {
            serde_path_to_error::deserialize(&member).map_err(|error| WrongType {
                path: match error.path().to_string() {
                    // The deserializer's name for the member as a whole.
                    path if path == "." => String::new(),
                    path => path,
                },
                problem: error.into_inner().to_string(),
            })
        };
        Ok(Self(members.map(read).collect()))
    }
}

impl<T: Default> Members<T> {
    /// Maps each member, together with its path. A member of the wrong type is recorded and replaced by its default, so
    /// that the other members keep their paths.
    pub(super) fn each<R>(
        self,
        wrong: &mut WrongTypes,
        path: &str,
        become_of: impl Fn(&str, T, &mut WrongTypes) -> R,
    ) -> Vec<R> {
        let members = self.0.into_iter().enumerate();
        members
            .map(|(i, member)| {
                let path = format!("{path}[{i}]");
                let member = member.unwrap_or_else(|error| {
                    wrong.0.push((path.clone(), error));
                    T::default()
                });
                become_of(&path, member, wrong)
            })
            .collect()
    }
}

/// The members of the wrong type, with their paths.
#[derive(Debug, Default)]
pub(super) struct WrongTypes(Vec<(String, WrongType)>);

impl WrongTypes {
    /// Replaces each error about a member's missing value with the reason why the value is missing.
    pub(super) fn in_place_of(
        self,
        mut errors: Vec<SpecError>,
        kind: Kind,
        object: &impl fmt::Display,
    ) -> Vec<SpecError> {
        for (
            path,
            WrongType {
                path: inner,
                problem,
            },
        ) in self.0
        {
            let is_about = |error: &SpecError| {
                let rest = error.path.strip_prefix(&path);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            let first = errors.iter().position(is_about);
            let error = SpecError {
                kind,
                object: object.to_string(),
                path: match &*inner {
                    "" => path.clone(),
                    inner => format!("{path}.{inner}"),
                },
                problem: Problem::WrongType(problem),
                // If the list ends up empty, the missing value is not only an error of the member.
                extent: first.map_or(Extent::Member, |first| errors[first].extent),
            };
            errors.retain(|error| !is_about(error));
            errors.insert(first.unwrap_or(errors.len()), error);
        }
        errors
    }
}
