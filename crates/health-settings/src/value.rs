//! The settings in force: their values, and where each comes from.

use std::fmt;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use health_model::settings::Location;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Settings;
use super::form::{Kind, boolean, group, is_list, kind, name, variable_of};

/// Where the value of a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Not set; the default applies.
    Default,
    /// A settings file.
    File {
        /// Its path, for people.
        path: String,
        /// From 1.
        #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
        line: u64,
        /// From 1.
        #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
        column: u64,
    },
    /// The environment.
    Environment {
        /// The variable.
        variable: String,
    },
    /// The command line.
    CommandLine,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line, column } => write!(f, "{path}:{line}:{column}"),
            Self::Environment { variable } => f.write_str(variable),
            Self::CommandLine => f.write_str("command line"),
        }
    }
}

/// A setting in force. `health-agent config schema` describes the settings of each group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct SettingValue {
    /// The group, as in settings files; `location` is only on the command line and in the environment.
    pub group: String,
    /// The name, as in settings files and, after `--`, on the command line.
    pub name: String,
    /// A boolean, a number, a text, a list of these, or null if it is not set.
    pub value: Value,
    /// Where it comes from.
    pub origin: Origin,
}

/// All settings in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct SettingList {
    /// In the order of the groups.
    pub settings: Vec<SettingValue>,
}

impl SettingValue {
    /// The settings of an agent's location: the only ones that all commands have but settings files do not.
    pub(super) fn of_location(location: &Location, matches: &ArgMatches) -> Vec<Self> {
        let is_known = |id: &&str| matches.try_contains_id(id).is_ok();
        let source = |id: &str| {
            Some(id)
                .filter(is_known)
                .and_then(|id| matches.value_source(id))
        };
        let values = [
            ("instance", location.instance.clone()),
            ("runtime-dir", location.runtime_dir.display().to_string()),
            ("state-dir", location.state_dir.display().to_string()),
            ("bpf-root", location.bpf_root.display().to_string()),
        ];
        let described = values.map(|(name, value)| Self {
            group: "location".to_owned(),
            name: name.to_owned(),
            value: json!(value),
            origin: match source(&name.replace('-', "_")) {
                Some(ValueSource::CommandLine) => Origin::CommandLine,
                Some(ValueSource::EnvVariable) => Origin::Environment {
                    variable: variable_of(name),
                },
                _ => Origin::Default,
            },
        });
        described.into()
    }

    /// All settings of a command, in order.
    pub(super) fn all(
        run: &Command,
        matches: &ArgMatches,
        settings: &Settings,
        source: impl Fn(&str) -> (usize, Origin),
    ) -> Vec<Self> {
        let settings_of = run.get_arguments();
        let described = settings_of.filter_map(|arg| {
            let name = name(arg);
            let group = group(arg)?;
            let id = arg.get_id().as_str();
            let texts: Vec<_> = match kind(arg) {
                // The parsed paths, which are absolute.
                Kind::Path => {
                    let paths = matches.get_many::<PathBuf>(id).into_iter().flatten();
                    paths.map(|path| path.display().to_string()).collect()
                }
                _ => {
                    let texts = matches.get_raw(id).into_iter().flatten();
                    texts
                        .map(|text| text.to_string_lossy().into_owned())
                        .collect()
                }
            };
            let value = match name {
                "nodes-file" => json!(settings.node.nodes_file),
                // Derived from other settings.
                "registry" => json!(settings.node.registry),
                "identity-store" => json!(settings.identity_store()),
                "conntrack-max-entries" => json!(settings.conntrack_max_entries()),
                _ => value(arg, texts),
            };
            Some(Self {
                group,
                name: name.to_owned(),
                value,
                origin: match name {
                    "registry" if source("nodes-file").0 > source(name).0 => source("nodes-file").1,
                    _ => source(name).1,
                },
            })
        });
        described.collect()
    }

    /// Whether the setting has a value.
    pub(super) fn is_set(&self) -> bool {
        match &self.value {
            Value::Array(values) => !values.is_empty(),
            value => !value.is_null(),
        }
    }

    /// The value in words.
    pub fn text(&self) -> String {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        match &self.value {
            Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join(", "),
            value => text(value),
        }
    }
}

/// Converts a setting's value to JSON.
pub(super) fn value(arg: &Arg, texts: Vec<String>) -> Value {
    let one = |text: String| match kind(arg) {
        Kind::Boolean => json!(boolean(&text) == Ok(true)),
        Kind::Integer => text
            .parse::<u64>()
            .map_or_else(|_| json!(text), |number| json!(number)),
        Kind::Path | Kind::Text => json!(text),
    };
    let mut values: Vec<Value> = texts.into_iter().map(one).collect();
    match is_list(arg) {
        true => Value::Array(values),
        false => values.pop().unwrap_or(Value::Null),
    }
}
