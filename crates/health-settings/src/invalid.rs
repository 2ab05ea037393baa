//! The error for an invalid setting. It names the setting, and the origins of its value and of the values that it
//! contradicts.

use std::error::Error;
use std::ffi::OsString;
use std::fmt;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};

use super::check::Invalid;
use super::form::{Kind, group, kind, name};
use super::range::{outside, range};
use super::value::{Origin, SettingValue};

/// A value that is invalid by itself or together with those of other settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidValue {
    /// The setting's name.
    pub name: Box<str>,
    /// The value, in one line.
    pub value: Box<str>,
    /// Why it is invalid, and what is valid.
    pub reason: Box<str>,
    /// Where the value comes from; `None` if unknown.
    pub origin: Option<Origin>,
    /// The values that it contradicts.
    pub others: Vec<SettingValue>,
}

impl InvalidValue {
    /// A value that is invalid by itself.
    pub(super) fn new(name: &str, value: &str, reason: String, origin: Origin) -> Self {
        Self {
            name: name.into(),
            value: shown(value).into(),
            reason: reason.into(),
            origin: Some(origin),
            others: Vec::new(),
        }
    }

    /// Adds the origins of an invalid setting and of the settings involved, given all settings.
    pub(super) fn among(invalid: Invalid, values: &[SettingValue]) -> Self {
        let find = |flag: &str| {
            let name = flag.trim_start_matches('-');
            values.iter().find(|value| value.name == name)
        };
        let Invalid { setting, others } = invalid;
        let others = others.iter().filter_map(|flag| find(flag));
        Self {
            name: setting.flag.trim_start_matches('-').into(),
            origin: find(setting.flag).map(|value| value.origin.clone()),
            value: setting.value.into(),
            reason: setting.reason.into(),
            others: others.filter(|other| other.is_set()).cloned().collect(),
        }
    }
}

impl fmt::Display for InvalidValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            value,
            reason,
            ..
        } = self;
        match &self.origin {
            None | Some(Origin::CommandLine) => write!(f, "--{name} '{value}'")?,
            Some(Origin::Default) => write!(f, "{name} '{value}' (default)")?,
            Some(Origin::Environment { variable }) => write!(f, "{variable} '{value}'")?,
            Some(file @ Origin::File { .. }) => write!(f, "{file}: {name} '{value}'")?,
        }
        write!(f, ": {reason}")?;
        self.others.iter().try_for_each(|other| {
            let value = other.text();
            write!(
                f,
                "; {} is '{}' ({})",
                other.name,
                shown(&value),
                other.origin
            )
        })
    }
}

impl Error for InvalidValue {}

/// Checks a value as if it were given on the command line. The error says what is wrong.
pub(super) fn check_value(arg: &Arg, text: &str) -> Result<(), String> {
    let word = OsString::from(format!("--{}={text}", name(arg)));
    let command = Command::new("setting")
        .no_binary_name(true)
        .disable_help_flag(true)
        .arg(arg.clone());
    match command.try_get_matches_from([word]) {
        Ok(matches) => outside(arg, &matches).map_or(Ok(()), |(_, reason)| Err(reason)),
        Err(error) => Err(reason(arg, text, &error)),
    }
}

/// Why clap rejects a value, in one line.
fn reason(arg: &Arg, text: &str, error: &clap::Error) -> String {
    match (Error::source(error), range(arg)) {
        // A number that its type cannot hold is outside its range, too.
        (Some(_), Some(range)) if kind(arg) == Kind::Integer => return range.reason(),
        (Some(reason), Some(range)) => return format!("{reason}; {}", range.reason()),
        (Some(reason), None) => return reason.to_string(),
        (None, _) => {}
    }
    match error.kind() {
        ErrorKind::InvalidValue if !text.is_empty() => {
            let Some(ContextValue::Strings(words)) = error.get(ContextKind::ValidValue) else {
                return "expected another value".to_owned();
            };
            let nearest = match error.get(ContextKind::SuggestedValue) {
                Some(ContextValue::String(nearest)) => format!("; did you mean {nearest}?"),
                _ => String::new(),
            };
            format!("expected {}{nearest}", words.join(", "))
        }
        _ => "expected a value".to_owned(),
    }
}

/// Converts clap's error about the value of a setting; returns `None` for other errors.
pub fn invalid_flag(run: &Command, error: &clap::Error) -> Option<InvalidValue> {
    let word = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word),
        _ => None,
    };
    // Like `--probe-interval <DURATION>`.
    let flag = word(ContextKind::InvalidArg)?.strip_prefix("--")?;
    let end = flag.find([' ', '=', '[']).unwrap_or(flag.len());
    let value = word(ContextKind::InvalidValue)?;
    let mut settings = run.get_arguments().filter(|arg| group(arg).is_some());
    let arg = settings.find(|arg| name(arg) == &flag[..end])?;
    let reason = reason(arg, value, error);
    Some(InvalidValue::new(
        name(arg),
        value,
        reason,
        Origin::CommandLine,
    ))
}

/// Maximum number of characters of a key or value that an error shows.
pub(super) const MAX_SHOWN: usize = 80;

/// Shortens a key or value for an error message, and escapes it to fit in one line.
pub(super) fn shown(text: &str) -> String {
    let start: String = text.chars().take(MAX_SHOWN).collect();
    let rest = if start.len() < text.len() { "..." } else { "" };
    format!("{}{rest}", start.escape_debug())
}
