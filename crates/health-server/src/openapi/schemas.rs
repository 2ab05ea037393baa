//! Schemas of the API's types.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

/// The schemas of the types that agents write and read.
pub(crate) struct Schemas {
    answers: SchemaGenerator,
    requests: SchemaGenerator,
}

impl Default for Schemas {
    fn default() -> Self {
        let settings = SchemaSettings::draft2020_12()
            .with(|settings| settings.definitions_path = "/components/schemas".into());
        Self {
            answers: settings.clone().for_serialize().into_generator(),
            requests: settings.for_deserialize().into_generator(),
        }
    }
}

impl Schemas {
    /// The schema of a type in a response.
    pub(super) fn answer<T: JsonSchema>(&mut self) -> Value {
        tidied(self.answers.subschema_for::<T>())
    }

    /// The schema of a type in a request body.
    pub(super) fn request<T: JsonSchema>(&mut self) -> Value {
        tidied(self.requests.subschema_for::<T>())
    }

    /// The parameters of a query string, one for each field of `T`.
    pub(super) fn query<T: JsonSchema>(&mut self) -> Vec<Value> {
        let mut fields = tidied(T::json_schema(&mut self.requests));
        let required = fields["required"].take();
        let Value::Object(fields) = fields["properties"].take() else {
            return Vec::new();
        };
        let is_required = |name: &String| {
            let required = required.as_array();
            required.is_some_and(|names| names.iter().any(|one| one == name))
        };
        let parameter = |(name, mut schema): (String, Value)| {
            let mut parameter = json!({ "name": name, "in": "query" });
            if is_required(&name) {
                parameter["required"] = true.into();
            }
            let description = schema
                .as_object_mut()
                .and_then(|schema| schema.remove("description"));
            parameter["description"] = description.unwrap_or_default();
            parameter["schema"] = schema;
            parameter
        };
        fields.into_iter().map(parameter).collect()
    }

    /// The schemas of all named types used so far.
    pub(super) fn definitions(&mut self) -> Map<String, Value> {
        let mut all = self.answers.take_definitions(false);
        for (name, schema) in self.requests.take_definitions(false) {
            let known = all.insert(name.clone(), schema.clone());
            assert!(
                known.is_none_or(|known| known == schema),
                "two types {name}"
            );
        }
        all.values_mut().for_each(tidy);
        all
    }
}

fn tidied(schema: Schema) -> Value {
    let mut schema = schema.into();
    tidy(&mut schema);
    schema
}

/// Makes a schema as strict as the API: objects have only the members of their type, and a member that may be absent is
/// never null.
fn tidy(schema: &mut Value) {
    let members = match schema {
        Value::Object(members) => members,
        Value::Array(items) => return items.iter_mut().for_each(tidy),
        Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => return,
    };
    if let Some(Value::String(description)) = members.get_mut("description") {
        *description = paragraph(description);
    }
    // These defaults only say that the member may be absent.
    members.retain(|name, value| name != "default" || !value.is_null() && *value != json!([]));
    let required = members.get("required").cloned().unwrap_or_default();
    let required = required.as_array().map_or(&[][..], Vec::as_slice);
    if let Some(Value::Object(properties)) = members.get_mut("properties") {
        let optional = properties
            .iter_mut()
            .filter(|(name, _)| !required.contains(&json!(name)));
        optional.for_each(|(_, property)| remove_null(property));
        let others = members.entry("additionalProperties");
        others.or_insert(Value::Bool(false));
    }
    members.values_mut().for_each(tidy);
}

/// The text of a doc comment on one line, without links.
fn paragraph(comment: &str) -> String {
    let words: Vec<_> = comment.split_whitespace().collect();
    words.join(" ").replace("[`", "`").replace("`]", "`")
}

/// Removes null from the schema of an optional type.
fn remove_null(schema: &mut Value) {
    let Value::Object(members) = schema else {
        return;
    };
    if let Some(Value::Array(types)) = members.get_mut("type") {
        types.retain(|one| one != "null");
        if let [only] = &types[..] {
            let only = only.clone();
            members.insert("type".to_owned(), only);
        }
    }
    if let Some(Value::Array(values)) = members.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    if let Some(Value::Array(mut choices)) = members.remove("anyOf") {
        choices.retain(|choice| *choice != json!({ "type": "null" }));
        match &choices[..] {
            [Value::Object(only)] => members.extend(only.clone()),
            _ => {
                members.insert("anyOf".to_owned(), choices.into());
            }
        }
    }
}
