//! Formats the document. Whatever fits on one line is written on one line.

use std::iter::repeat_n;

use serde_json::{Map, Value};

/// Maximum line length, unless a single part is longer.
const WIDTH: usize = 120;

/// Members that come first, in this order; all others follow, sorted by name.
const FIRST: [&str; 21] = [
    "openapi",
    "info",
    "title",
    "servers",
    "paths",
    "operationId",
    "summary",
    "x-access",
    "$ref",
    "name",
    "in",
    "type",
    "const",
    "description",
    "parameters",
    "requestBody",
    "responses",
    "required",
    "content",
    "schema",
    "additionalProperties",
];

/// Formats a value as JSON, with a final newline.
pub(super) fn text(value: &Value) -> String {
    let mut text = String::new();
    write(&mut text, 0, value, &FIRST);
    text.push('\n');
    text
}

/// Appends a value to the current line, which is indented by `indent`. Members in `first` come first.
fn write(text: &mut String, indent: usize, value: &Value, first: &[&str]) {
    let parts = parts(value, first);
    let line = line(value, first);
    let column = text.len() - text.rfind('\n').map_or(0, |end| end + 1);
    if parts.is_empty() || column + line.len() < WIDTH {
        text.push_str(&line);
        return;
    }
    let (begin, end) = (&line[..1], &line[line.len() - 1..]);
    text.push_str(begin);
    let mut separator = "\n";
    for part in parts {
        text.push_str(separator);
        text.extend(repeat_n(' ', indent + 2));
        text.push_str(&part.name);
        write(text, indent + 2, part.value, &part.first);
        separator = ",\n";
    }
    text.push('\n');
    text.extend(repeat_n(' ', indent));
    text.push_str(end);
}

fn line(value: &Value, first: &[&str]) -> String {
    let parts = parts(value, first).into_iter();
    let parts = parts.map(|part| part.name + &line(part.value, &part.first));
    let parts = parts.collect::<Vec<_>>().join(", ");
    match value {
        Value::Object(_) if !parts.is_empty() => format!("{{ {parts} }}"),
        Value::Array(_) => format!("[{parts}]"),
        _ => value.to_string(),
    }
}

/// An item of an array, or a member of an object.
struct Part<'a> {
    /// Name and colon of a member; empty in an array.
    name: String,
    value: &'a Value,
    /// Members of `value` to write first.
    first: Vec<&'a str>,
}

fn parts<'a>(value: &'a Value, first: &[&str]) -> Vec<Part<'a>> {
    match value {
        Value::Array(items) => items.iter().map(item).collect(),
        Value::Object(members) => {
            let mut sorted: Vec<_> = members.iter().collect();
            sorted.sort_by_key(|(name, _)| {
                let rank = first.iter().position(|first| first == name);
                (rank.unwrap_or(first.len()), *name)
            });
            let parts = sorted.into_iter();
            parts
                .map(|(name, value)| member(members, name, value))
                .collect()
        }
        _ => Vec::new(),
    }
}

fn item(value: &Value) -> Part<'_> {
    Part {
        name: String::new(),
        value,
        first: FIRST.to_vec(),
    }
}

/// Keeps properties in the order of their type's fields.
fn member<'a>(members: &'a Map<String, Value>, name: &str, value: &'a Value) -> Part<'a> {
    let required = members.get("required").and_then(Value::as_array);
    let required = required.into_iter().flatten().filter_map(Value::as_str);
    Part {
        name: format!("{}: ", Value::from(name)),
        value,
        first: match name {
            "properties" => required.collect(),
            _ => FIRST.to_vec(),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_fits_on_a_line_is_on_one() {
        let long = "x".repeat(WIDTH);
        let value = json!({
            "additionalProperties": false,
            "properties": { "a": { "enum": [1, {}] }, "name": {}, "type": [long, 2] },
            "required": ["type", "name"],
            "type": "object",
        });
        let lines = [
            "{",
            "  \"type\": \"object\",",
            "  \"required\": [\"type\", \"name\"],",
            "  \"additionalProperties\": false,",
            "  \"properties\": {",
            "    \"type\": [",
            &format!("      \"{long}\","),
            "      2",
            "    ],",
            "    \"name\": {},",
            "    \"a\": { \"enum\": [1, {}] }",
            "  }",
            "}",
            "",
        ];
        assert_eq!(text(&value), lines.join("\n"));
    }
}
