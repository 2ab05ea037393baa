//! Parses documents into trees of values, in bounded time and memory.

use std::cell::Cell;
use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use serde_saphyr::{MessageFormatter as _, UserMessageFormatter};

/// Maximum size of the input in bytes.
const TEXT_MAX: usize = 10 << 20;
/// Maximum number of values in a document, aliases expanded. Bounds the memory: a few hundred bytes per value.
const VALUES_MAX: usize = 500_000;

/// Why an input cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// Too large.
    #[error("the text has {bytes} bytes; at most {max} are allowed")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// Neither YAML nor JSON, or over a document limit. The parser's message names line and column.
    #[error("{0}")]
    Malformed(String),
}

/// Parses all documents in a string: one JSON document if it starts like JSON, else any number of YAML documents.
pub fn parse(text: &str) -> Result<Vec<Value>, DocumentError> {
    if text.len() > TEXT_MAX {
        let bytes = text.len();
        let max = TEXT_MAX;
        return Err(DocumentError::TooLarge { bytes, max });
    }
    if text.trim_start().starts_with(['{', '[']) {
        Ok(vec![json(text)?])
    } else {
        yaml(text)
    }
}

fn json(text: &str) -> Result<Value, DocumentError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let left = Cell::new(VALUES_MAX);
    let value = Seed(&left).deserialize(&mut deserializer);
    value
        .and_then(|value| deserializer.end().map(|()| value))
        .map_err(|error| DocumentError::Malformed(format!("not JSON: {error}")))
}

fn yaml(text: &str) -> Result<Vec<Value>, DocumentError> {
    let limits = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_nodes: 2 * VALUES_MAX,
            max_events: 4 * VALUES_MAX,
        },
        // Otherwise more than 32 comment lines in a row are an error.
        emit_comments: false,
    };
    let documents: Vec<Tree> =
        serde_saphyr::from_multiple_with_options(text, limits).map_err(|error| {
            let error = error.without_snippet();
            let message = UserMessageFormatter.format_message(error);
            let place = error.location().filter(|at| at.line() > 0);
            let place = place.map_or_else(String::new, |at| {
                format!("line {}, column {}: ", at.line(), at.column())
            });
            DocumentError::Malformed(format!("{place}{message}"))
        })?;
    Ok(documents.into_iter().map(|tree| tree.0).collect())
}

/// A YAML document.
struct Tree(Value);

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Seed(&Cell::new(VALUES_MAX))
            .deserialize(deserializer)
            .map(Self)
    }
}

/// Deserializes a value and counts it and every value in it against the limit. Unlike `Value`'s own deserializer,
/// rejects duplicate keys: of two rules with one key, the first must not vanish silently.
#[derive(Clone, Copy)]
struct Seed<'a>(&'a Cell<usize>);

impl Seed<'_> {
    fn count<E: de::Error>(self) -> Result<(), E> {
        let left = self.0.get().checked_sub(1).ok_or_else(|| {
            E::custom(format_args!(
                "the document has more than {VALUES_MAX} values"
            ))
        })?;
        self.0.set(left);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.count()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a document")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            self.count()?;
            let value = fields.next_value_seed(self)?;
            if map.contains_key(&key) {
                return Err(de::Error::custom(format_args!("key {key:?} appears twice")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::parse;

    #[test]
    fn comments_may_be_long() {
        let comments = "# a comment\n".repeat(100);
        let text = format!("{comments}list:\n{comments}- a: 1\n{comments}- b\n{comments}");
        let documents = parse(&text).ok();
        assert_eq!(documents, Some(vec![json!({ "list": [{ "a": 1 }, "b"] })]));
    }
}
