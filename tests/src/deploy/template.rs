//! Renders the templates of the chart: the few constructs of Helm that they have. Anything else is an error with its line,
//! and so is a value that does not exist, for which Helm would write nothing.

use std::iter::Peekable;
use std::vec::IntoIter;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::yaml;

/// A part of a template.
#[derive(Debug)]
enum Token {
    Text(String),
    Action { line: usize, words: String },
}

type Tokens = Peekable<IntoIter<Token>>;

/// Renders the template with this name. `values` are what templates call `.Values`.
pub(super) fn render(name: &str, template: &str, values: &Value) -> anyhow::Result<String> {
    let mut tokens = tokens(template).with_context(|| name.to_owned())?;
    let mut out = String::new();
    let end = body(&mut tokens, values, true, &mut out).with_context(|| name.to_owned())?;
    match end {
        None => Ok(out),
        Some(End { line, word }) => bail!("{name}: line {line}: `{word}` without `if`"),
    }
}

/// Splits a template at its actions. `{{-` and `-}}` remove white space before and after.
fn tokens(template: &str) -> anyhow::Result<Tokens> {
    let mut tokens = Vec::new();
    let mut rest = template;
    let mut is_trimmed = false;
    let at = |rest: &str| {
        template[..template.len() - rest.len()]
            .lines()
            .count()
            .max(1)
    };
    while let Some((text, from)) = rest.split_once("{{") {
        let line = at(from);
        let (action, after) = from
            .split_once("}}")
            .with_context(|| format!("line {line}: `{{{{` without `}}}}`"))?;
        let (before, action) = match action.strip_prefix('-') {
            Some(action) => (text.trim_end(), action),
            None => (text, action),
        };
        let before = if is_trimmed {
            before.trim_start()
        } else {
            before
        };
        tokens.push(Token::Text(before.to_owned()));
        is_trimmed = action.ends_with('-');
        let words = action.strip_suffix('-').unwrap_or(action).trim().to_owned();
        tokens.push(Token::Action { line, words });
        rest = after;
    }
    let last = if is_trimmed { rest.trim_start() } else { rest };
    tokens.push(Token::Text(last.to_owned()));
    Ok(tokens.into_iter().peekable())
}

/// The action that ended a body.
struct End {
    line: usize,
    word: &'static str,
}

/// Renders up to the end of the template, or to an `else` or `end` that belongs to an enclosing `if`.
fn body(
    tokens: &mut Tokens,
    values: &Value,
    is_wanted: bool,
    out: &mut String,
) -> anyhow::Result<Option<End>> {
    while let Some(token) = tokens.next() {
        let (line, words) = match token {
            Token::Text(text) => {
                if is_wanted {
                    out.push_str(&text);
                }
                continue;
            }
            Token::Action { line, words } => (line, words),
        };
        let context = || format!("line {line}: {words}");
        match words.as_str() {
            "else" => return Ok(Some(End { line, word: "else" })),
            "end" => return Ok(Some(End { line, word: "end" })),
            _ => {}
        }
        if let Some(condition) = words.strip_prefix("if ") {
            let holds = is_true(value(condition.trim(), values).with_context(context)?);
            branches(tokens, values, (is_wanted, holds), out).with_context(context)?;
        } else {
            let text = pipeline(&words, values).with_context(context)?;
            if is_wanted {
                out.push_str(&text);
            }
        }
    }
    Ok(None)
}

/// Renders both branches of an `if`, one of them for its errors alone.
fn branches(
    tokens: &mut Tokens,
    values: &Value,
    (is_wanted, holds): (bool, bool),
    out: &mut String,
) -> anyhow::Result<()> {
    let mut end = body(tokens, values, is_wanted && holds, out)?;
    if matches!(end, Some(End { word: "else", .. })) {
        end = body(tokens, values, is_wanted && !holds, out)?;
    }
    ensure!(
        matches!(end, Some(End { word: "end", .. })),
        "`if` without `end`"
    );
    Ok(())
}

/// `PATH`, `toYaml PATH`, and these with functions behind them.
fn pipeline(words: &str, values: &Value) -> anyhow::Result<String> {
    let mut parts = words.split('|').map(str::trim);
    let first = parts.next().unwrap_or_default();
    let mut text = match first.strip_prefix("toYaml ") {
        Some(path) => yaml::block(value(path.trim(), values)?, 0)
            .trim_end()
            .to_owned(),
        None => match value(first, values)? {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        },
    };
    for function in parts {
        let words: Vec<_> = function.split_whitespace().collect();
        text = match words.as_slice() {
            ["quote"] => Value::from(text).to_string(),
            ["nindent", spaces] => format!("\n{}", indented(&text, spaces.parse()?)),
            _ => bail!("unsupported function `{function}`"),
        };
    }
    Ok(text)
}

/// As Helm does it: each line is indented, also an empty one.
fn indented(text: &str, spaces: usize) -> String {
    let indent = " ".repeat(spaces);
    let lines = text.split('\n').map(|line| format!("{indent}{line}"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The value of `.Values.a.b`.
fn value<'a>(path: &str, values: &'a Value) -> anyhow::Result<&'a Value> {
    let names = path
        .strip_prefix(".Values.")
        .with_context(|| format!("unsupported action `{path}`"))?;
    let found = names.split('.').try_fold(values, |at, name| at.get(name));
    found.with_context(|| format!("no value {path}"))
}

/// As in Go's templates.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}
