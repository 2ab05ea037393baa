//! The objects in a manifest.

use serde_json::Value;

use super::Problem;
use crate::document;

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectKind {
    /// Its name.
    pub name: &'static str,
    /// Name of its list kind.
    pub list: &'static str,
    /// The API version of both: only one is supported.
    pub versions: &'static [&'static str; 1],
}

/// The kinds that a manifest may contain.
#[derive(Clone, Copy, Debug)]
pub struct ObjectKinds {
    /// The kinds.
    pub kinds: &'static [ObjectKind],
    /// Names of all kinds and their list kinds, and `List`.
    pub names: &'static [&'static str],
    /// Names of all kinds.
    pub item_names: &'static [&'static str],
    /// What an empty manifest lacks, for the error message.
    pub noun: &'static str,
}

/// An object in a manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// Its kind.
    pub kind: ObjectKind,
    /// Prefix of paths in it: `items[2].`, or empty.
    pub prefix: String,
    /// The whole object.
    pub value: Value,
}

/// Something in a manifest that is not one of the wanted objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoObject {
    /// Its path; empty for the manifest as a whole.
    pub path: String,
    /// What is wrong.
    pub problem: Problem,
    /// Whether it is a well-formed object of an unwanted kind or version. Anything else may be a wanted kind with a
    /// typo.
    pub is_other_kind: bool,
    /// Kind and name of such an object, such as `Service shop/web`.
    pub name: Option<String>,
}

/// Extracts the objects of the given kinds from JSON, or from YAML with any number of documents. Returns single objects
/// and the items of lists, whether of one kind or mixed, in document order.
pub fn objects(text: &str, kinds: &ObjectKinds) -> Vec<Result<Object, NoObject>> {
    let mut found = Found {
        kinds,
        list: Vec::new(),
    };
    match document::parse(text) {
        Ok(documents) => {
            for document in documents.into_iter().filter(|document| !document.is_null()) {
                found.read_document(document);
            }
        }
        Err(error) => found.add("", Problem::Text(error)),
    }
    if found.list.is_empty() {
        found.add("", Problem::Empty(kinds.noun));
    }
    found.list
}

struct Found<'a> {
    kinds: &'a ObjectKinds,
    list: Vec<Result<Object, NoObject>>,
}

impl Found<'_> {
    fn add(&mut self, path: &str, problem: Problem) {
        self.list.push(Err(NoObject {
            path: path.to_owned(),
            problem,
            is_other_kind: false,
            name: None,
        }));
    }

    fn add_other(
        &mut self,
        path: &str,
        value: &str,
        supported: &'static [&'static str],
        name: Option<String>,
    ) {
        self.list.push(Err(NoObject {
            path: path.to_owned(),
            problem: Problem::not_supported(value, supported),
            is_other_kind: true,
            name,
        }));
    }

    fn read_document(&mut self, mut document: Value) {
        let kind = document.get("kind").and_then(Value::as_str);
        let implied = self.kinds.kinds.iter();
        let implied = implied.copied().find(|known| kind == Some(known.list));
        if implied.is_none() && kind != Some("List") {
            return self.read_object(document, "", self.kinds.names);
        }
        let versions = implied.map_or(&["v1"], |kind| kind.versions);
        if document.get("apiVersion").is_some() && !self.is_of(&document, "", versions) {
            return;
        }
        match document.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => {
                for (i, mut item) in items.into_iter().enumerate() {
                    if let (Some(kind), Value::Object(fields)) = (implied, &mut item) {
                        // The API omits both in a list of one kind.
                        fields.entry("kind").or_insert_with(|| kind.name.into());
                        let version = || kind.versions[0].into();
                        fields.entry("apiVersion").or_insert_with(version);
                    }
                    self.read_object(item, &format!("items[{i}]."), self.kinds.item_names);
                }
            }
            None | Some(Value::Null) => {}
            Some(_) => self.add("items", Problem::WrongType("must be a list".to_owned())),
        }
    }

    fn read_object(&mut self, value: Value, prefix: &str, names: &'static [&'static str]) {
        let Some(fields) = value.as_object() else {
            let path = prefix.trim_end_matches('.');
            return self.add(path, Problem::WrongType("must be an object".to_owned()));
        };
        let path = format!("{prefix}kind");
        let Some(Value::String(kind)) = fields.get("kind") else {
            return self.add(&path, Problem::Required(""));
        };
        let known = self.kinds.kinds.iter();
        let Some(kind) = known.copied().find(|known| known.name == kind) else {
            let name = Some(format!("{kind} {}", name_of(&value)));
            return self.add_other(&path, kind, names, name);
        };
        if self.is_of(&value, prefix, kind.versions) {
            self.list.push(Ok(Object {
                kind,
                prefix: prefix.to_owned(),
                value,
            }));
        }
    }

    fn is_of(&mut self, object: &Value, prefix: &str, versions: &'static [&'static str]) -> bool {
        let path = format!("{prefix}apiVersion");
        match object.get("apiVersion") {
            Some(Value::String(version)) if versions.contains(&version.as_str()) => return true,
            Some(Value::String(version)) => self.add_other(&path, version, versions, None),
            _ => self.add(&path, Problem::Required("")),
        }
        false
    }
}

/// `NAMESPACE/NAME` of an object, or just its name without a namespace.
fn name_of(object: &Value) -> String {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let name = text("/metadata/name").unwrap_or("without a name");
    match text("/metadata/namespace") {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: ObjectKinds = ObjectKinds {
        kinds: &[
            ObjectKind {
                name: "Low",
                list: "LowList",
                versions: &["v1"],
            },
            ObjectKind {
                name: "High",
                list: "HighList",
                versions: &["up.io/v1"],
            },
        ],
        names: &["Low", "High", "LowList", "HighList", "List"],
        item_names: &["Low", "High"],
        noun: "low or high thing",
    };

    /// Kind and path of objects; path and problem of anything else.
    fn found(text: &str) -> Vec<String> {
        let shown = |found| match found {
            Ok(Object { kind, prefix, .. }) => format!("{prefix}{}", kind.name),
            Err(NoObject {
                path,
                problem,
                is_other_kind,
                name,
            }) => {
                let mark = if is_other_kind { "other" } else { "wrong" };
                let name = name.map(|name| format!("({name}) ")).unwrap_or_default();
                format!("{mark} {name}{path}: {problem}")
            }
        };
        objects(text, &KINDS).into_iter().map(shown).collect()
    }

    #[test]
    fn objects_stand_alone_in_lists_and_in_documents_of_yaml_and_json() {
        let yaml = "\
apiVersion: v1
kind: Low
---
---
apiVersion: v1
kind: List
items:
- {apiVersion: up.io/v1, kind: High}
- {apiVersion: v1, kind: Low}
---
kind: HighList
apiVersion: up.io/v1
items: [{}, {kind: High}]
";
        assert_eq!(
            found(yaml),
            [
                "Low",
                "items[0].High",
                "items[1].Low",
                "items[0].High",
                "items[1].High"
            ]
        );
        let json = r#"{"kind": "LowList", "items": [{"metadata": {"name": "a"}}]}"#;
        assert_eq!(found(json), ["items[0].Low"]);
    }

    #[test]
    fn what_is_no_object_is_reported_in_its_place_and_the_others_are_there() {
        let yaml = "\
---
{apiVersion: apps/v1, kind: Deployment, metadata: {name: web, namespace: shop}}
---
{apiVersion: v1, kind: Low}
---
{apiVersion: v1, kind: High}
---
{kind: Low}
---
{apiVersion: v1}
---
[1]
---
kind: List
items: [{apiVersion: v1, kind: LowList}, 7]
---
kind: List
items: 7
";
        assert_eq!(
            found(yaml),
            [
                r#"other (Deployment shop/web) kind: Unsupported value: "Deployment": supported values: "Low", "High", "LowList", "HighList", "List""#,
                "Low",
                r#"other apiVersion: Unsupported value: "v1": supported values: "up.io/v1""#,
                "wrong apiVersion: Required value",
                "wrong kind: Required value",
                "wrong : Invalid value: must be an object",
                r#"other (LowList without a name) items[0].kind: Unsupported value: "LowList": supported values: "Low", "High""#,
                "wrong items[1]: Invalid value: must be an object",
                "wrong items: Invalid value: must be a list",
            ]
        );
        assert_eq!(found("# none"), ["wrong : no low or high thing found"]);
    }
}
