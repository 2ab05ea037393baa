//! What all settings have in common: their form on the command line, and their names elsewhere.

use std::any::TypeId;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::OnceLock;

use clap::builder::{ArgExt, ValueParser};
use clap::{Arg, ArgAction, Args as _, Command};

use super::Settings;
use super::range::range;

/// The groups, each with its heading in the help and its page in `docs/`. Settings files use the heading in lower case.
pub(super) const GROUPS: [(&str, Option<&str>); 11] = [
    ("Node", Some("registries.md")),
    ("Mesh", Some("diagnoses.md")),
    ("Endpoints", Some("endpoints.md")),
    ("Policy", Some("policy.md")),
    ("Conntrack", Some("conntrack.md")),
    ("Masquerading", Some("conntrack.md#translation")),
    ("Containers", Some("probes.md")),
    ("Services", Some("services.md")),
    ("IPVS", Some("services-ipvs.md")),
    ("API", Some("api.md")),
    ("Log", None),
];

/// Marks the definition of a setting that most users need. `-h` shows only these settings; `--help` shows all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Common;

impl ArgExt for Common {}

/// Marks the definition of a setting whose changes a running agent applies at once. Other settings need a restart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live;

impl ArgExt for Live {}

/// Whether a running agent applies a new value of this setting without a restart.
pub fn is_live(name: &str) -> bool {
    static LIVE: OnceLock<BTreeSet<String>> = OnceLock::new();
    let live = LIVE.get_or_init(|| {
        let run = Settings::augment_args(Command::new("run"));
        let live = run
            .get_arguments()
            .filter(|arg| arg.get::<Live>().is_some());
        live.map(|arg| self::name(arg).to_owned()).collect()
    });
    live.contains(name)
}

/// Prefix of the names of environment variables.
const VARIABLE: &str = "HEALTH_AGENT_";

/// Gives the settings of a command a uniform form: each boolean is `--x`, `--x=true` or `--x=false`, and `-h` shows
/// only common settings.
pub fn with_one_form(command: Command) -> Command {
    command.mut_args(|arg| {
        if group(&arg).is_none() {
            return arg;
        }
        let is_common = arg.get::<Common>().is_some();
        let arg = arg.hide_short_help(!is_common);
        if kind(&arg) != Kind::Boolean {
            return arg;
        }
        let default = match arg.get_default_values() {
            [default] => default.to_string_lossy().into_owned(),
            _ => false.to_string(),
        };
        arg.action(ArgAction::Set)
            .num_args(0..=1)
            .default_value(default)
            .default_missing_value("true")
            .value_name("BOOL")
            .value_parser(ValueParser::from(boolean))
    })
}

/// Adds the range to the help of each setting of a command.
pub fn with_ranges_in_help(command: Command) -> Command {
    command.mut_args(|arg| match (range(&arg), arg.get_help()) {
        (Some(range), Some(help)) => {
            let help = format!("{help} [range: {range}]");
            arg.help(help)
        }
        _ => arg,
    })
}

/// Parses a boolean. Besides `true` and `false`, accepts other common words.
pub(super) fn boolean(text: &str) -> Result<bool, &'static str> {
    match text {
        "true" | "on" | "yes" => Ok(true),
        "false" | "off" | "no" => Ok(false),
        _ => Err("expected true or false"),
    }
}

/// The group of a setting in files; `None` for arguments that are not settings.
pub(super) fn group(arg: &Arg) -> Option<String> {
    let heading = arg.get_help_heading()?;
    let is_group = GROUPS.iter().any(|(group, _)| *group == heading);
    is_group.then(|| heading.to_lowercase())
}

/// A setting's name: its flag without the leading hyphens.
pub(super) fn name(arg: &Arg) -> &str {
    arg.get_long().unwrap_or_default()
}

/// The environment variable of a setting.
pub(super) fn variable(arg: &Arg) -> String {
    variable_of(name(arg))
}

/// The environment variable of the setting with this name.
pub(super) fn variable_of(name: &str) -> String {
    VARIABLE.to_owned() + &name.replace('-', "_").to_uppercase()
}

/// Splits a text into values if the setting takes a list.
pub(super) fn split(arg: &Arg, text: &str) -> Vec<String> {
    match arg.get_value_delimiter().filter(|_| is_list(arg)) {
        Some(between) => text
            .split(between)
            .map(|one| one.trim().to_owned())
            .collect(),
        None => vec![text.to_owned()],
    }
}

/// Whether a setting can have several values.
pub(super) fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// The JSON type of a setting's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Boolean,
    Integer,
    Path,
    Text,
}

pub(super) fn kind(arg: &Arg) -> Kind {
    let is_any = |types: &[TypeId]| {
        let parsed = arg.get_value_parser().type_id();
        types.iter().any(|one| parsed == *one)
    };
    if is_any(&[TypeId::of::<bool>()]) {
        Kind::Boolean
    } else if is_any(&[TypeId::of::<u8>(), TypeId::of::<u16>(), TypeId::of::<u32>()]) {
        Kind::Integer
    } else if is_any(&[TypeId::of::<PathBuf>()]) {
        Kind::Path
    } else {
        Kind::Text
    }
}
