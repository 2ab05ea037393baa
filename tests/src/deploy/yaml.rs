//! Writes values as YAML in block style. Strings that could be read as something else are quoted as in JSON.

use serde_json::Value;

/// Words that YAML 1.1 or 1.2 reads as something other than a string.
const WORDS: [&str; 9] = ["true", "false", "yes", "no", "on", "off", "null", "y", "n"];

/// The value as lines, indented by `indent` spaces. The first line begins with the indent as well.
pub(super) fn block(value: &Value, indent: usize) -> String {
    let spaces = " ".repeat(indent);
    match value {
        Value::Object(map) if !map.is_empty() => map
            .iter()
            .map(|(key, value)| entry(&format!("{spaces}{}:", scalar_text(key)), value, indent + 2))
            .collect(),
        Value::Array(items) if !items.is_empty() => items
            .iter()
            .map(|item| listed(&block(item, indent + 2), indent))
            .collect(),
        scalar => format!("{spaces}{}\n", flow(scalar)),
    }
}

/// A key or dash with its value: on the same line, or on lines below.
fn entry(head: &str, value: &Value, indent: usize) -> String {
    match is_nested(value) {
        true => format!("{head}\n{}", block(value, indent)),
        false => format!("{head} {}\n", flow(value)),
    }
}

/// Lines of an item, indented by `indent + 2`, with the dash of a list in front.
pub(super) fn listed(lines: &str, indent: usize) -> String {
    let content = lines.get(indent + 2..).unwrap_or_default();
    format!("{}- {content}", " ".repeat(indent))
}

/// Whether a value takes lines of its own.
pub(super) fn is_nested(value: &Value) -> bool {
    match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => false,
    }
}

/// A scalar or an empty collection.
pub(super) fn flow(value: &Value) -> String {
    match value {
        Value::String(text) => scalar_text(text),
        other => other.to_string(),
    }
}

pub(super) fn scalar_text(text: &str) -> String {
    let is_plain = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        && text
            .chars()
            .all(|one| one.is_ascii_alphanumeric() || "_./-".contains(one))
        && !WORDS.contains(&text.to_ascii_lowercase().as_str());
    match is_plain {
        true => text.to_owned(),
        false => Value::from(text).to_string(),
    }
}
