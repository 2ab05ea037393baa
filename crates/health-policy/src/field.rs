//! Reads a document's tree field by field, tracking the path of each field for errors.

use serde_json::{Map, Value};

use super::error::{Place, PolicyError, Problem};

/// Maximum number of items in a list without a limit of its own.
const ITEMS_MAX: usize = 10_000;

/// Cilium's fields that would change the meaning of a policy, with their effect.
const UNSUPPORTED: [(&str, &str); 19] = [
    ("nodeSelector", "host policy"),
    ("fromRequires", "a requirement on top of other rules"),
    ("toRequires", "a requirement on top of other rules"),
    ("fromGroups", "matching by a cloud provider's groups"),
    ("toGroups", "matching by a cloud provider's groups"),
    ("toFQDNs", "matching by DNS name"),
    ("auth", "mutual authentication"),
    ("authentication", "mutual authentication"),
    ("rules", "matching inside connections (L7)"),
    ("listener", "redirection to a proxy"),
    ("serverNames", "matching by TLS server name"),
    ("terminatingTLS", "TLS termination"),
    ("originatingTLS", "TLS origination"),
    ("cidrGroupRef", "a CIDR group"),
    ("cidrGroupSelector", "a CIDR group"),
    ("log", "logging per rule"),
    ("order", "rule order"),
    ("priority", "rule priority"),
    ("tier", "rule priority"),
];

/// A value and its path.
#[derive(Clone, Debug)]
pub(super) struct Field<'a> {
    value: &'a Value,
    path: String,
    is_stored: bool,
}

impl<'a> Field<'a> {
    /// Creates the root field of a document that is being imported.
    pub(super) fn root(value: &'a Value) -> Self {
        Self {
            value,
            path: String::new(),
            is_stored: false,
        }
    }

    /// Creates the root field of a document that was imported before, possibly by a less strict version.
    pub(super) fn stored(value: &'a Value) -> Self {
        Self {
            is_stored: true,
            ..Self::root(value)
        }
    }

    /// Whether the document is a stored one, which keeps the meaning that it had in earlier versions.
    pub(super) fn is_stored(&self) -> bool {
        self.is_stored
    }

    /// Returns the result of an import check on this field. Stored documents always pass.
    pub(super) fn check(&self, checked: Result<(), impl Into<Problem>>) -> Result<(), PolicyError> {
        match checked {
            Err(problem) if !self.is_stored => Err(self.error(problem)),
            _ => Ok(()),
        }
    }

    pub(super) fn value(&self) -> &'a Value {
        self.value
    }

    /// Returns the path, such as `spec.ingress[0]`.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Returns the same value at another path.
    pub(super) fn at_path(&self, path: String) -> Self {
        Self {
            value: self.value,
            path,
            is_stored: self.is_stored,
        }
    }

    /// Returns another value at the same path.
    pub(super) fn with_value<'b>(&self, value: &'b Value) -> Field<'b> {
        Field {
            value,
            path: self.path.clone(),
            is_stored: self.is_stored,
        }
    }

    pub(super) fn error(&self, problem: impl Into<Problem>) -> PolicyError {
        PolicyError {
            place: Place {
                policy: None,
                path: self.path.clone(),
            },
            problem: problem.into(),
        }
    }

    fn wrong_type(&self, expected: &'static str) -> PolicyError {
        let found = match self.value {
            Value::Null => "empty",
            Value::Bool(_) => "true or false",
            Value::Number(_) => "a number",
            Value::String(_) => "text",
            Value::Array(_) => "a list",
            Value::Object(_) => "a map",
        };
        self.error(Problem::WrongType { expected, found })
    }

    fn map(&self) -> Result<&'a Map<String, Value>, PolicyError> {
        self.value
            .as_object()
            .ok_or_else(|| self.wrong_type("a map"))
    }

    /// Returns the fields of a map. Fails if there are any besides the `known` ones.
    pub(super) fn fields(&self, known: &[&str]) -> Result<Fields<'a>, PolicyError> {
        let fields = self.any_fields()?;
        match fields.map.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(fields),
            Some(key) => {
                let unsupported = UNSUPPORTED.iter().find(|(name, _)| name == key);
                let problem = match unsupported {
                    Some((_, what)) => Problem::Unsupported(what),
                    None => Problem::UnknownField,
                };
                Err(fields.at(key, &Value::Null).error(problem))
            }
        }
    }

    /// Returns the fields of a map, whichever they are.
    pub(super) fn any_fields(&self) -> Result<Fields<'a>, PolicyError> {
        Ok(Fields {
            map: self.map()?,
            path: self.path.clone(),
            is_stored: self.is_stored,
        })
    }

    pub(super) fn list(&self) -> Result<Vec<Field<'a>>, PolicyError> {
        self.list_of_at_most(ITEMS_MAX)
    }

    pub(super) fn list_of_at_most(&self, max: usize) -> Result<Vec<Field<'a>>, PolicyError> {
        let list = self
            .value
            .as_array()
            .ok_or_else(|| self.wrong_type("a list"))?;
        if list.len() > max {
            let count = list.len();
            return Err(self.error(Problem::TooMany { count, max }));
        }
        let item = |(i, value)| Field {
            value,
            path: format!("{}[{i}]", self.path),
            is_stored: self.is_stored,
        };
        Ok(list.iter().enumerate().map(item).collect())
    }

    pub(super) fn text(&self) -> Result<&'a str, PolicyError> {
        self.value
            .as_str()
            .ok_or_else(|| self.wrong_type("text (in quotes, if it looks like something else)"))
    }

    pub(super) fn boolean(&self) -> Result<bool, PolicyError> {
        self.value
            .as_bool()
            .ok_or_else(|| self.wrong_type("true or false"))
    }

    pub(super) fn integer(&self) -> Result<i64, PolicyError> {
        self.value
            .as_i64()
            .ok_or_else(|| self.wrong_type("a whole number"))
    }

    /// Returns a number, which may also be written as a string.
    pub(super) fn text_or_number(&self) -> Result<String, PolicyError> {
        match self.value {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(number.to_string()),
            _ => Err(self.wrong_type("a number")),
        }
    }
}

/// The fields of a map.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
    is_stored: bool,
}

impl<'a> Fields<'a> {
    fn at(&self, name: &str, value: &'a Value) -> Field<'a> {
        let dot = if self.path.is_empty() { "" } else { "." };
        Field {
            value,
            path: format!("{}{dot}{name}", self.path),
            is_stored: self.is_stored,
        }
    }

    /// Returns the field of this name; null counts as absent.
    pub(super) fn get(&self, name: &str) -> Option<Field<'a>> {
        let value = self.map.get(name).filter(|value| !value.is_null())?;
        Some(self.at(name, value))
    }

    pub(super) fn required(&self, name: &str) -> Result<Field<'a>, PolicyError> {
        self.get(name)
            .ok_or_else(|| self.error_at(name, Problem::Missing))
    }

    /// Returns an error about the field of this name, which may be absent.
    pub(super) fn error_at(&self, name: &str, problem: impl Into<Problem>) -> PolicyError {
        self.at(name, &Value::Null).error(problem)
    }

    /// Returns all fields that are not null.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'a str, Field<'a>)> {
        let set = self.map.iter().filter(|(_, value)| !value.is_null());
        set.map(|(name, value)| (name.as_str(), self.at(name, value)))
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns the items of the list of this name; empty if the list is absent.
    pub(super) fn items(&self, name: &str) -> Result<Vec<Field<'a>>, PolicyError> {
        self.get(name).map_or(Ok(Vec::new()), |field| field.list())
    }
}
