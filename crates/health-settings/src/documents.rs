//! Documents generated from the definitions: the JSON Schema, the example file and the reference.

use std::fmt::Write as _;

use clap::Command;
use serde_json::{Map, Value, json};

use super::definition::{Definition, groups};
use super::form::Kind;
use super::range::Amount;

/// The JSON Schema of settings files (draft 2020-12). Its keywords `minimum` and `maximum` apply only to numbers;
/// durations have `x-minimum` and `x-maximum`.
pub fn schema(run: &Command) -> Value {
    let groups = groups(run).map(|group| {
        let settings = group.settings.iter();
        let settings = settings.map(|setting| (setting.name.to_owned(), setting_schema(setting)));
        let schema = json!({
            "type": ["object", "null"],
            "additionalProperties": false,
            "properties": settings.collect::<Map<_, _>>(),
        });
        (group.key(), schema)
    });
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of health-agent",
        "type": ["object", "null"],
        "additionalProperties": false,
        "properties": groups.collect::<Map<_, _>>(),
    })
}

fn setting_schema(setting: &Definition<'_>) -> Value {
    let mut value = match setting.kind {
        Kind::Boolean => json!({ "type": "boolean" }),
        Kind::Integer => json!({ "type": "integer" }),
        Kind::Path | Kind::Text if setting.choices.is_empty() => json!({ "type": "string" }),
        Kind::Path | Kind::Text => json!({ "enum": setting.choices }),
    };
    let limits = setting
        .range
        .map(|range| [("minimum", range.min), ("maximum", range.max)]);
    for (keyword, limit) in limits.into_iter().flatten() {
        match (setting.kind, limit) {
            (Kind::Integer, Amount::Number(number)) => value[keyword] = json!(number),
            (_, limit) => value[format!("x-{keyword}")] = json!(limit.to_string()),
        }
    }
    let mut schema = match setting.is_list {
        true => {
            json!({ "anyOf": [value, { "type": "array", "items": value }, { "type": "null" }] })
        }
        false => json!({ "anyOf": [value, { "type": "null" }] }),
    };
    schema["description"] = json!(match setting.range {
        Some(range) => format!("{} [range: {range}]", setting.help),
        None => setting.help.clone(),
    });
    if !setting.default.is_null() {
        schema["default"] = setting.default.clone();
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
    for group in groups(run) {
        let _ = write!(text, "\n{}:\n", group.key());
        for setting in group.settings {
            for line in wrapped(&setting.description(), 100) {
                let _ = writeln!(text, "  # {line}");
            }
            let value = match setting.default {
                Value::Null => String::new(),
                Value::String(text) if YAML_WORDS.contains(&text.as_str()) => {
                    format!(" \"{text}\"")
                }
                Value::String(text) => format!(" {text}"),
                value => format!(" {value}"),
            };
            let _ = writeln!(text, "  # {}:{value}\n", setting.name);
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// Wraps a text at spaces into lines of at most `width` bytes.
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

/// The introduction to the reference: how settings are written, read and changed. In Markdown, without links.
pub const INTRODUCTION: &str = "\
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
- A value outside its range is an error, wherever it comes from. The error names the setting, the value, the range, and the flag,
  the variable, or the line and column of the file. If two settings contradict each other, it says where each comes from.
- A boolean is `--x`, `--x=true` or `--x=false`; `on` and `off`, `yes` and `no` mean the same.
- A list is a repeated flag, or one value with commas; in files it may also be a YAML list. `--remote-cluster` does not split
  at commas: repeat the flag or use a YAML list; a variable holds one cluster.
- `--pods-from-kubernetes`, `--services-from-kubernetes` and `--services-from-etcd` need no value. In files and variables,
  write `default` instead.
- In files, null resets a setting to its default, whatever files before set. An empty variable does not count.
- Maps keep their entries when a setting `...-max-entries` or `service-maglev-tables` changes.
- The location of an agent's files (`--instance`, `--runtime-dir`, `--state-dir`, `--bpf-root`) and `--netns` are flags of
  all commands and environment variables (`HEALTH_AGENT_INSTANCE` and so on), but not in files: they say which agent is meant.

A running agent reads the files again within three seconds of a change, and at SIGHUP (`systemctl reload`) at once; signals
that arrive during a reload count as one. New values of settings marked `live` take effect. Flags and variables keep their values,
and still take precedence; the log names new values in files that they override. Other changes are logged, and `status` warns
that a restart is due. If anything is invalid, the previous settings stay in force, and `status` shows the error. If the kernel
refuses a value, the agent reloads again every second. An agent that still waits for its node's entry reloads too; most
settings then take effect once it has started.

`health-agent config` shows the settings in force and where each comes from. `config check FILE` checks a file without an
agent, and names the line and the nearest key; with `--nodes`, `--policy`, `--services` and `--pods` it checks the other files
that an agent reads. `config example` prints a file with all settings, commented out, `config schema` its JSON Schema, and
`config reference` a page of all settings in Markdown.
";

/// The reference of all settings, `docs/settings.md`.
pub fn reference(run: &Command) -> String {
    let mut text = INTRODUCTION.to_owned();
    for group in groups(run) {
        let about = group.page.map(|page| {
            let file = page.split('#').next().unwrap_or_default();
            format!("; see [{file}]({page})")
        });
        let _ = write!(
            text,
            "\n## {}\n\nIn files under `{}`{}.\n\n\
             | setting | environment variable | default | range | change | meaning |\n\
             | --- | --- | --- | --- | --- | --- |\n",
            group.heading,
            group.key(),
            about.unwrap_or_default()
        );
        for setting in &group.settings {
            text.push_str(&row(setting));
        }
    }
    text
}

/// A setting's row in the reference.
fn row(setting: &Definition<'_>) -> String {
    let code = |text: &String| format!("`{text}`");
    let default = Some(setting.default_text()).filter(|text| !text.is_empty());
    let choices: Vec<_> = setting.choices.iter().map(code).collect();
    let choices = match choices.is_empty() {
        true => String::new(),
        false => format!(": {}", choices.join(", ")),
    };
    format!(
        "| `{}` | `{}` | {} | {} | {} | {}{choices} |\n",
        setting.name,
        setting.variable,
        default.as_ref().map(code).unwrap_or_default(),
        setting.range.map(ToString::to_string).unwrap_or_default(),
        if setting.is_live { "live" } else { "restart" },
        setting.help.replace('|', "\\|").replace('\n', " ")
    )
}
