//! The definitions of settings, for the generated documents.

use clap::{Arg, Command};
use serde_json::Value;

use super::form::{GROUPS, Kind, Live, is_list, kind, name, variable};
use super::range::{Range, range};
use super::value::value;

/// A group of settings.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// Its heading in the help.
    pub heading: &'static str,
    /// Its page in `docs/`.
    pub page: Option<&'static str>,
    /// Its settings, in order.
    pub settings: Vec<Definition<'a>>,
}

impl Group<'_> {
    /// Its key in settings files.
    pub fn key(&self) -> String {
        self.heading.to_lowercase()
    }
}

/// A setting.
#[derive(Clone, Debug)]
pub struct Definition<'a> {
    /// Its key in settings files, and its flag without the leading hyphens.
    pub name: &'a str,
    /// Its environment variable.
    pub variable: String,
    /// Its description in the help.
    pub help: String,
    /// Null if the setting has no default, or if the default depends on the machine.
    pub default: Value,
    /// The range of valid values, if the setting is a number or a duration.
    pub range: Option<&'a Range>,
    /// The valid words, if only certain words are valid.
    pub choices: Vec<String>,
    /// Whether a running agent applies a new value.
    pub is_live: bool,
    /// Whether it can have several values.
    pub is_list: bool,
    pub(super) kind: Kind,
}

impl<'a> Definition<'a> {
    fn new(arg: &'a Arg) -> Self {
        let possible = arg.get_possible_values().into_iter();
        let choices = possible.filter(|_| kind(arg) == Kind::Text);
        Self {
            name: name(arg),
            variable: variable(arg),
            help: arg.get_help().map(ToString::to_string).unwrap_or_default(),
            default: default(arg),
            range: range(arg),
            choices: choices.map(|value| value.get_name().to_owned()).collect(),
            is_live: arg.get::<Live>().is_some(),
            is_list: is_list(arg),
            kind: kind(arg),
        }
    }

    /// The default in words; empty if there is none.
    pub fn default_text(&self) -> String {
        match &self.default {
            Value::Null => String::new(),
            Value::Array(values) if values.is_empty() => String::new(),
            Value::String(text) => text.clone(),
            value => value.to_string(),
        }
    }

    /// The help text with the valid values.
    pub fn description(&self) -> String {
        let mut text = self.help.clone();
        if !self.choices.is_empty() {
            text = format!("{text}: {}", self.choices.join(", "));
        }
        match self.range {
            Some(range) => format!("{text} [range: {range}]"),
            None => text,
        }
    }
}

fn default(arg: &Arg) -> Value {
    let texts = arg.get_default_values().iter();
    let texts = texts.filter(|_| !arg.is_hide_default_value_set());
    value(
        arg,
        texts
            .map(|text| text.to_string_lossy().into_owned())
            .collect(),
    )
}

/// The settings of a command, by group.
pub fn groups(run: &Command) -> impl Iterator<Item = Group<'_>> {
    GROUPS.into_iter().map(|(heading, page)| {
        let of_group = |arg: &&Arg| arg.get_help_heading() == Some(heading);
        let settings = run.get_arguments().filter(of_group);
        Group {
            heading,
            page,
            settings: settings.map(Definition::new).collect(),
        }
    })
}
