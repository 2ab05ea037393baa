//! What others see of the settings: their values in force, the JSON Schema, the example file and the reference.

use std::fmt::{self, Write as _};
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use health_model::settings::Location;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Settings;
use super::form::{GROUPS, Kind, group, is_list, kind, name, variable, variable_of};

/// Where the value of a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// A settings file.
    File {
        /// Its path.
        path: PathBuf,
        /// From 1.
        line: u64,
    },
    /// The environment.
    Environment {
        /// The variable.
        variable: String,
    },
    /// The command line.
    CommandLine,
}

impl Origin {
    /// Higher ones take precedence.
    pub(super) fn rank(&self) -> u8 {
        match self {
            Self::Default => 0,
            Self::File { .. } => 1,
            Self::Environment { .. } => 2,
            Self::CommandLine => 3,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment { variable } => f.write_str(variable),
            Self::CommandLine => f.write_str("command line"),
        }
    }
}

/// A setting in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SettingValue {
    /// The group, as in settings files.
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
pub struct SettingList {
    /// In the order of the groups.
    pub settings: Vec<SettingValue>,
}

impl SettingValue {
    /// Where an agent keeps its files: the only settings that all commands have, and that files do not.
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
        origin: impl Fn(&str, &str) -> Origin,
    ) -> Vec<Self> {
        let settings_of = run.get_arguments();
        let described = settings_of.filter_map(|arg| {
            let name = name(arg);
            let group = group(arg)?;
            let raw = matches.get_raw(arg.get_id().as_str());
            let texts = raw.into_iter().flatten();
            let texts: Vec<_> = texts
                .map(|text| text.to_string_lossy().into_owned())
                .collect();
            let value = match name {
                // What these are by default depends on others.
                "registry" => json!(settings.node.registry),
                "identity-store" => json!(settings.identity_store()),
                "conntrack-max-entries" => json!(settings.conntrack_max_entries()),
                _ => value(arg, texts),
            };
            Some(Self {
                group,
                name: name.to_owned(),
                value,
                origin: origin(arg.get_id().as_str(), name),
            })
        });
        described.collect()
    }

    /// The value as it would stand on the command line.
    pub fn text(&self) -> String {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        match &self.value {
            Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join(","),
            value => text(value),
        }
    }
}

/// A setting's value in JSON.
fn value(arg: &Arg, texts: Vec<String>) -> Value {
    let one = |text: String| match kind(arg) {
        Kind::Boolean => json!(matches!(text.as_str(), "true" | "on" | "yes")),
        Kind::Integer => text
            .parse::<u64>()
            .map_or_else(|_| json!(text), |number| json!(number)),
        Kind::Text => json!(text),
    };
    let mut values: Vec<Value> = texts.into_iter().map(one).collect();
    match is_list(arg) {
        true => Value::Array(values),
        false => values.pop().unwrap_or(Value::Null),
    }
}

/// The default of a setting; null if there is none, or if it depends on the machine.
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
fn by_group(run: &Command) -> impl Iterator<Item = (&'static str, Vec<&Arg>)> {
    GROUPS.into_iter().map(|(heading, _)| {
        let of_group = |arg: &&Arg| arg.get_help_heading() == Some(heading);
        (heading, run.get_arguments().filter(of_group).collect())
    })
}

fn help(arg: &Arg) -> String {
    arg.get_help().map(ToString::to_string).unwrap_or_default()
}

/// The JSON Schema of settings files (draft 2020-12).
pub fn schema(run: &Command) -> Value {
    let groups = by_group(run).map(|(heading, args)| {
        let settings: Map<String, Value> = args
            .into_iter()
            .map(|arg| (name(arg).to_owned(), setting_schema(arg)))
            .collect();
        let group = json!({
            "type": ["object", "null"],
            "additionalProperties": false,
            "properties": settings,
        });
        (heading.to_lowercase(), group)
    });
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of health-agent",
        "type": ["object", "null"],
        "additionalProperties": false,
        "properties": groups.collect::<Map<_, _>>(),
    })
}

fn setting_schema(arg: &Arg) -> Value {
    let possible: Vec<Value> = arg
        .get_possible_values()
        .iter()
        .map(|value| json!(value.get_name()))
        .collect();
    let mut schema = match kind(arg) {
        Kind::Boolean => json!({ "type": "boolean" }),
        Kind::Integer => json!({ "type": "integer", "minimum": 0 }),
        Kind::Text if possible.is_empty() => json!({ "type": "string" }),
        Kind::Text => json!({ "enum": possible }),
    };
    if is_list(arg) {
        schema = json!({ "anyOf": [schema, { "type": "array", "items": schema }] });
    }
    schema["description"] = json!(help(arg));
    let default = default(arg);
    if !default.is_null() {
        schema["default"] = default;
    }
    schema
}

/// A settings file with each setting and its default, commented out.
pub fn example(run: &Command) -> String {
    let mut text = String::from(
        "# Settings of health-agent. Flags and environment variables take precedence; so do the files in config.d beside\n\
         # this one. `health-agent config check FILE` checks a file, `health-agent config` shows the settings in force.\n",
    );
    for (heading, args) in by_group(run) {
        let _ = write!(text, "\n{}:\n", heading.to_lowercase());
        for arg in args {
            for line in wrapped(&help(arg), 100) {
                let _ = writeln!(text, "  # {line}");
            }
            let value = match default(arg) {
                Value::Null => String::new(),
                Value::String(text) => format!(" {text}"),
                value => format!(" {value}"),
            };
            let _ = writeln!(text, "  # {}:{value}\n", name(arg));
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// A text in lines of at most this many bytes, broken at spaces.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let is_full = lines
            .last()
            .is_some_and(|line| !line.is_empty() && line.len() + word.len() >= width);
        if is_full {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

/// The start of the reference.
const INTRODUCTION: &str = "\
# Settings

Each setting is a flag of `health-agent run`, an environment variable, and a key of a settings file:

```
health-agent run --probe-interval 5s
HEALTH_AGENT_PROBE_INTERVAL=5s health-agent run
```

```yaml
# /etc/health-agent/config.yaml
mesh:
  probe-interval: 5s
```

A flag takes precedence over a variable, a variable over a file, and a file over the default. The files are
`/etc/health-agent/config.yaml`, if it exists, or that of `--config FILE`, and `config.d/*.yaml` beside it. Of several files
that set the same, the last one by name counts. `deploy/config.yaml` is an example with all settings.

- Durations are written like `500ms`, `10s`, `1m30s` or `12h`.
- A boolean is `--x`, `--x=true` or `--x=false`; `on` and `off`, `yes` and `no` mean the same.
- A list is a repeated flag, or one value with commas; in files it may also be a YAML list. `--remote-cluster` is only
  repeated, since its values may have commas.
- The location of an agent's files (`--instance`, `--runtime-dir`, `--state-dir`, `--bpf-root`) and `--netns` are flags of
  all commands and environment variables (`HEALTH_AGENT_INSTANCE` and so on), but not in files: they say which agent is meant.

`health-agent config` shows the settings in force and where each comes from. `config check FILE` checks a file without an
agent, and names line, column and the nearest key. `config example` prints a file with all settings, commented out, `config
schema` its JSON Schema, and `config reference` this page.
";

/// The reference of all settings, `docs/settings.md`.
pub fn reference(run: &Command) -> String {
    let mut text = INTRODUCTION.to_owned();
    for ((heading, args), (_, page)) in by_group(run).zip(GROUPS) {
        let about = page.map(|page| format!("; about them: [{page}]({page})"));
        let _ = write!(
            text,
            "\n## {heading}\n\nIn files under `{}`{}.\n\n\
             | setting | environment variable | default | |\n| --- | --- | --- | --- |\n",
            heading.to_lowercase(),
            about.unwrap_or_default()
        );
        for arg in args {
            let default = match default(arg) {
                Value::Null => String::new(),
                Value::Array(values) if values.is_empty() => String::new(),
                Value::String(text) => format!("`{text}`"),
                value => format!("`{value}`"),
            };
            let possible = arg.get_possible_values();
            let choices: Vec<_> = possible
                .iter()
                .filter(|_| kind(arg) == Kind::Text)
                .map(|value| format!("`{}`", value.get_name()))
                .collect();
            let choices = match choices.is_empty() {
                true => String::new(),
                false => format!(": {}", choices.join(", ")),
            };
            let _ = writeln!(
                text,
                "| `{}` | `{}` | {default} | {}{choices} |",
                name(arg),
                variable(arg),
                help(arg).replace('|', "\\|").replace('\n', " ")
            );
        }
    }
    text
}
