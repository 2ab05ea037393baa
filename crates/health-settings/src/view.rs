//! What others see of the settings: their values in force, the JSON Schema, the example file and the reference.

use std::fmt::{self, Write as _};
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use health_model::settings::Location;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Settings;
use super::form::{
    GROUPS, Kind, boolean, group, is_list, is_live, kind, name, variable, variable_of,
};

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
            Self::File { path, line } => write!(f, "{path}:{line}"),
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
        source: impl Fn(&str) -> (usize, Origin),
    ) -> Vec<Self> {
        let settings_of = run.get_arguments();
        let described = settings_of.filter_map(|arg| {
            let name = name(arg);
            let group = group(arg)?;
            let id = arg.get_id().as_str();
            let texts: Vec<_> = match kind(arg) {
                // As parsed: absolute.
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
                    "registry" if settings.node.nodes_file.is_some() => source("nodes-file").1,
                    _ => source(name).1,
                },
            })
        });
        described.collect()
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

/// A setting's value in JSON.
fn value(arg: &Arg, texts: Vec<String>) -> Value {
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

/// The words that a setting may have, if only certain ones.
fn choices(arg: &Arg) -> Vec<String> {
    let possible = arg.get_possible_values().into_iter();
    let texts = possible.filter(|_| kind(arg) == Kind::Text);
    texts.map(|value| value.get_name().to_owned()).collect()
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
    let possible = choices(arg);
    let mut schema = match kind(arg) {
        Kind::Boolean => json!({ "type": "boolean" }),
        Kind::Integer => json!({ "type": "integer", "minimum": 0 }),
        Kind::Path | Kind::Text if possible.is_empty() => json!({ "type": "string" }),
        Kind::Path | Kind::Text => json!({ "enum": possible }),
    };
    if is_list(arg) {
        schema =
            json!({ "anyOf": [schema, { "type": "array", "items": schema }, { "type": "null" }] });
    } else {
        schema = json!({ "anyOf": [schema, { "type": "null" }] });
    }
    schema["description"] = json!(help(arg));
    let default = default(arg);
    if !default.is_null() {
        schema["default"] = default;
    }
    schema
}

/// Words that YAML 1.1 reads as booleans.
const YAML_WORDS: [&str; 4] = ["off", "on", "no", "yes"];

/// A settings file with each setting and its default, commented out.
pub fn example(run: &Command) -> String {
    let mut text = String::from(
        "# Settings of health-agent. Flags and environment variables take precedence; so do the files in config.d beside\n\
         # this one. `health-agent config check FILE` checks a file, `health-agent config` shows the settings in force.\n",
    );
    for (heading, args) in by_group(run) {
        let _ = write!(text, "\n{}:\n", heading.to_lowercase());
        for arg in args {
            let choices = choices(arg);
            let words = match choices.is_empty() {
                true => help(arg),
                false => format!("{}: {}", help(arg), choices.join(", ")),
            };
            for line in wrapped(&words, 100) {
                let _ = writeln!(text, "  # {line}");
            }
            let value = match default(arg) {
                Value::Null => String::new(),
                Value::String(text) if YAML_WORDS.contains(&text.as_str()) => {
                    format!(" \"{text}\"")
                }
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

A flag takes precedence over a variable, a variable over a file, and a file over the default. The agent reads
`/etc/health-agent/config.yaml` if it exists, or the file that `--config` or `HEALTH_AGENT_CONFIG` names. Then it reads `*.yaml`
and `*.yml` in `config.d` beside it, in order of name; later values override earlier ones, and lists replace each other.
`deploy/config.yaml` is an example with all settings.

- Durations are written like `500ms`, `10s`, `1m30s` or `12h`.
- A boolean is `--x`, `--x=true` or `--x=false`; `on` and `off`, `yes` and `no` mean the same.
- A list is a repeated flag, or one value with commas; in files it may also be a YAML list. `--remote-cluster` does not split
  at commas: repeat the flag or use a YAML list; a variable holds one cluster.
- `--pods-from-kubernetes`, `--services-from-kubernetes` and `--services-from-etcd` need no value. In files and variables,
  write `default` instead.
- In files, null resets a setting to its default, whatever files before set. An empty variable does not count.
- Maps keep their entries when a setting `...-max-entries` or `service-maglev-tables` changes.
- The location of an agent's files (`--instance`, `--runtime-dir`, `--state-dir`, `--bpf-root`) and `--netns` are flags of
  all commands and environment variables (`HEALTH_AGENT_INSTANCE` and so on), but not in files: they say which agent is meant.

A running agent reads the files again within three seconds of a change, and at SIGHUP (`systemctl reload`) at once. New values
of settings marked `live` take effect. Flags and variables keep their values, and still take precedence. Other changes are logged,
and `status` warns that a restart is due. If anything is invalid, the former settings stay in force, and `status` shows the error.

`health-agent config` shows the settings in force and where each comes from. `config check FILE` checks a file without an
agent, and names the line and the nearest key; with `--nodes`, `--policy`, `--services` and `--pods` it checks the other files
that an agent reads. `config example` prints a file with all settings, commented out, `config
schema` its JSON Schema, and `config reference` this page.
";

/// The reference of all settings, `docs/settings.md`.
pub fn reference(run: &Command) -> String {
    let mut text = INTRODUCTION.to_owned();
    for ((heading, args), (_, page)) in by_group(run).zip(GROUPS) {
        let about = page.map(|page| {
            let file = page.split('#').next().unwrap_or_default();
            format!("; see [{file}]({page})")
        });
        let _ = write!(
            text,
            "\n## {heading}\n\nIn files under `{}`{}.\n\n\
             | setting | environment variable | default | change | meaning |\n| --- | --- | --- | --- | --- |\n",
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
            let choices: Vec<_> = choices(arg).iter().map(|one| format!("`{one}`")).collect();
            let choices = match choices.is_empty() {
                true => String::new(),
                false => format!(": {}", choices.join(", ")),
            };
            let _ = writeln!(
                text,
                "| `{}` | `{}` | {default} | {} | {}{choices} |",
                name(arg),
                variable(arg),
                if is_live(name(arg)) {
                    "live"
                } else {
                    "restart"
                },
                help(arg).replace('|', "\\|").replace('\n', " ")
            );
        }
    }
    text
}
