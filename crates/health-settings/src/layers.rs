//! The values of settings from files and the environment. Values on the command line take precedence over them.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use health_model::settings::{InvalidSetting, Location};

use super::check::Invalid;
use super::file::{self, FileError, SettingsFiles};
use super::form::{group, name, split, variable};
use super::invalid::{InvalidValue, check_value};
use super::range::outside;
use super::value::{Origin, SettingValue};
use super::{RegistrySpec, Settings};

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// An error in a file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A value that is invalid by itself or together with those of other settings.
    #[error(transparent)]
    Value(#[from] InvalidValue),
}

/// The values of settings in files and in the environment, by name.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    values: BTreeMap<String, LayerValue>,
    /// The values in files that variables override.
    overridden: BTreeMap<String, LayerValue>,
    files: SettingsFiles,
}

/// The values of a setting that override its default.
#[derive(Clone, Debug)]
struct LayerValue {
    values: Vec<String>,
    origin: Origin,
    /// Higher layers take precedence: the files in order, then the environment.
    layer: usize,
}

/// A value in a file, overridden by a flag or an environment variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverriddenValue {
    /// The setting's name.
    pub name: String,
    /// The value as written in the file; several values for a list.
    pub values: Vec<String>,
    /// The location of the value in the file.
    pub file: Origin,
    /// The overriding flag or variable.
    pub by: String,
}

/// The layers of the environment and the command line, above all files.
const ENVIRONMENT: usize = usize::MAX - 1;
const COMMAND_LINE: usize = usize::MAX;

impl Layers {
    /// Reads the settings for `run`, a command that takes the arguments of [`Settings`]: from `path` (or else the
    /// default file, if it exists) and from the environment.
    pub fn read(run: &Command, path: Option<&Path>) -> Result<Self, SettingsError> {
        Self::read_files(run, path)?.with_environment(run, |name| env::var_os(name))
    }

    /// Like [`read`](Self::read), without the environment.
    pub fn read_files(run: &Command, path: Option<&Path>) -> Result<Self, SettingsError> {
        // Before the files are read, so that a change in between is noticed later.
        let files = SettingsFiles::find(path);
        let mut values = BTreeMap::new();
        let mut layer = 0;
        let mut former = PathBuf::new();
        for setting in file::read(run, path)? {
            if setting.path != former {
                layer += 1;
                former = setting.path.clone();
            }
            if setting.values.is_empty() {
                values.remove(&setting.name);
                continue;
            }
            let origin = Origin::File {
                path: setting.path.display().to_string(),
                line: setting.line,
                column: setting.column,
            };
            let value = LayerValue {
                values: setting.values,
                origin,
                layer,
            };
            values.insert(setting.name, value);
        }
        Ok(Self {
            values,
            files,
            ..Self::default()
        })
    }

    /// Adds the values of environment variables. Ignores empty variables.
    pub(super) fn with_environment(
        self,
        run: &Command,
        variables: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, SettingsError> {
        let Self {
            mut values,
            mut overridden,
            files,
        } = self;
        for arg in run.get_arguments().filter(|arg| group(arg).is_some()) {
            let variable = variable(arg);
            let Some(value) = variables(&variable).filter(|value| !value.is_empty()) else {
                continue;
            };
            let origin = Origin::Environment { variable };
            let invalid = |value: &str, reason: String| {
                InvalidValue::new(name(arg), value, reason, origin.clone())
            };
            let value = value
                .into_string()
                .map_err(|value| invalid(&value.to_string_lossy(), "not UTF-8".to_owned()))?;
            let texts = split(arg, &value);
            for text in &texts {
                check_value(arg, text).map_err(|reason| invalid(text, reason))?;
            }
            let value = LayerValue {
                values: texts,
                origin,
                layer: ENVIRONMENT,
            };
            let former = values.insert(name(arg).to_owned(), value);
            overridden.extend(former.map(|former| (name(arg).to_owned(), former)));
        }
        Ok(Self {
            values,
            overridden,
            files,
        })
    }

    /// Makes these values the defaults of the command's arguments.
    pub fn apply(&self, run: Command) -> Command {
        run.mut_args(|arg| match self.values.get(name(&arg)) {
            Some(value) if group(&arg).is_some() => arg.default_values(value.values.clone()),
            _ => arg,
        })
    }

    /// The layer of a setting's value (0 for a default) and its origin, given the command's matches.
    pub(super) fn source(&self, matches: &ArgMatches, arg: &Arg) -> (usize, Origin) {
        let given = matches.value_source(arg.get_id().as_str());
        match (given, self.values.get(name(arg))) {
            (Some(ValueSource::CommandLine), _) => (COMMAND_LINE, Origin::CommandLine),
            (_, Some(value)) => (value.layer, value.origin.clone()),
            _ => (0, Origin::Default),
        }
    }

    /// The values in files that have no effect because a flag or a variable overrides them.
    fn overridden(&self, run: &Command, matches: &ArgMatches) -> Vec<OverriddenValue> {
        let overridden = run.get_arguments().filter_map(|arg| {
            let by = match self.source(matches, arg).1 {
                Origin::CommandLine => format!("--{}", name(arg)),
                Origin::Environment { variable } => variable,
                Origin::File { .. } | Origin::Default => return None,
            };
            let values = [&self.overridden, &self.values].map(|values| values.get(name(arg)));
            let mut values = values.into_iter().flatten();
            let found = values.find(|value| matches!(value.origin, Origin::File { .. }))?;
            Some(OverriddenValue {
                name: name(arg).to_owned(),
                values: found.values.clone(),
                file: found.origin.clone(),
                by,
            })
        });
        overridden.collect()
    }

    /// Completes parsed settings: sets the agent's location, and resolves `--nodes-file`, which is a short form of
    /// `--registry`. Checks all settings together.
    pub fn finish(
        &self,
        run: &Command,
        matches: &ArgMatches,
        settings: Settings,
        location: Location,
    ) -> Result<Settings, SettingsError> {
        let source = |wanted: &str| {
            let arg = run.get_arguments().find(|arg| name(arg) == wanted);
            arg.map_or((0, Origin::Default), |arg| self.source(matches, arg))
        };
        for arg in run.get_arguments() {
            if let Some((value, reason)) = outside(arg, matches) {
                let origin = self.source(matches, arg).1;
                return Err(InvalidValue::new(name(arg), &value, reason, origin).into());
            }
        }
        let mut settings = Settings {
            location,
            files: self.files.clone(),
            overridden: self.overridden(run, matches).into(),
            ..settings
        };
        let values = |settings: &Settings| {
            let mut values = SettingValue::of_location(&settings.location, matches);
            values.extend(SettingValue::all(run, matches, settings, source));
            values
        };
        if let Some(file) = settings.node.nodes_file.clone() {
            match source("nodes-file").0.cmp(&source("registry").0) {
                Ordering::Greater => settings.node.registry = RegistrySpec::File(file),
                Ordering::Less => settings.node.nodes_file = None,
                Ordering::Equal => {
                    let why = "cannot be used with --registry, for which it is shorthand";
                    let invalid = InvalidSetting::new("--nodes-file", file.display(), why);
                    let invalid = Invalid::with(invalid, ["--registry"]);
                    return Err(InvalidValue::among(invalid, &values(&settings)).into());
                }
            }
        }
        settings.values = values(&settings).into();
        Ok(settings.validated()?)
    }
}
