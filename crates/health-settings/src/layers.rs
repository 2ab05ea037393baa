//! The values of settings from files and from the environment, below those of the command line.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use health_model::settings::{InvalidSetting, Location};

use super::file::{self, FileError};
use super::form::{check, group, is_list, name, variable};
use super::view::{Origin, SettingValue};
use super::{RegistrySpec, Settings};

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// In a file.
    #[error(transparent)]
    File(#[from] FileError),
    /// In the environment.
    #[error("{variable} '{value}': {reason}")]
    Variable {
        /// The variable's name.
        variable: String,
        /// Its value.
        value: String,
        /// Why it is invalid, and what is valid.
        reason: String,
    },
    /// By itself valid, but not within bounds or not with other settings.
    #[error("{}: {invalid}", .origin)]
    Elsewhere {
        /// What is invalid.
        invalid: InvalidSetting,
        /// Where it stands.
        origin: Origin,
    },
    /// The same, on the command line.
    #[error(transparent)]
    CommandLine(InvalidSetting),
}

/// The values of settings in files and in the environment, by name.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    values: BTreeMap<String, (Vec<String>, Origin)>,
}

impl Layers {
    /// Reads the values for a command with the arguments of [`Settings`]: from `path`, or the default file if it exists, and
    /// from the environment.
    pub fn read(run: &Command, path: Option<&Path>) -> Result<Self, SettingsError> {
        Self::of_files(run, path)?.with_variables(run, |name| env::var_os(name))
    }

    /// Adds the values of environment variables.
    pub(super) fn with_variables(
        self,
        run: &Command,
        variables: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, SettingsError> {
        let Self { mut values } = self;
        for arg in run.get_arguments().filter(|arg| group(arg).is_some()) {
            let variable = variable(arg);
            let Some(value) = variables(&variable) else {
                continue;
            };
            let value = value.to_string_lossy().into_owned();
            let texts: Vec<String> = match arg.get_value_delimiter().filter(|_| is_list(arg)) {
                Some(between) => value.split(between).map(str::to_owned).collect(),
                None => vec![value],
            };
            for text in &texts {
                check(arg, text).map_err(|reason| SettingsError::Variable {
                    variable: variable.clone(),
                    value: text.escape_debug().to_string(),
                    reason,
                })?;
            }
            values.insert(
                name(arg).to_owned(),
                (texts, Origin::Environment { variable }),
            );
        }
        Ok(Self { values })
    }

    /// Like [`read`](Self::read), without the environment.
    pub fn of_files(run: &Command, path: Option<&Path>) -> Result<Self, SettingsError> {
        let mut values = BTreeMap::new();
        for setting in file::read(run, path)? {
            let origin = Origin::File {
                path: setting.path,
                line: setting.line,
            };
            values.insert(setting.name, (setting.values, origin));
        }
        Ok(Self { values })
    }

    /// Makes these values the defaults of the command's arguments.
    pub fn apply(&self, run: Command) -> Command {
        run.mut_args(|arg| match self.values.get(name(&arg)) {
            Some((values, _)) if group(&arg).is_some() => arg.default_values(values.clone()),
            _ => arg,
        })
    }

    /// Where the value of a setting stands, given the command's matches.
    pub(super) fn origin(&self, matches: &ArgMatches, id: &str, name: &str) -> Origin {
        match (matches.value_source(id), self.values.get(name)) {
            (Some(ValueSource::CommandLine), _) => Origin::CommandLine,
            (_, Some((_, origin))) => origin.clone(),
            _ => Origin::Default,
        }
    }

    /// Completes parsed settings: the agent's location, and `--nodes-file`, which is another form of `--registry`. Checks
    /// all settings together.
    pub fn settle(
        &self,
        run: &Command,
        matches: &ArgMatches,
        settings: Settings,
        location: Location,
    ) -> Result<Settings, SettingsError> {
        let origin = |name: &str| {
            let arg = run.get_arguments().find(|arg| arg.get_long() == Some(name));
            arg.map_or(Origin::Default, |arg| {
                self.origin(matches, arg.get_id().as_str(), name)
            })
        };
        let at = |invalid: InvalidSetting| match origin(invalid.flag.trim_start_matches('-')) {
            Origin::Default | Origin::CommandLine => SettingsError::CommandLine(invalid),
            origin => SettingsError::Elsewhere { invalid, origin },
        };
        let mut settings = Settings {
            location,
            ..settings
        };
        if let Some(file) = &settings.node.nodes_file {
            let (short, long) = (origin("nodes-file"), origin("registry"));
            if short.rank() == long.rank() {
                let why = "cannot be used with --registry, of which it is a short form";
                return Err(at(InvalidSetting::new("--nodes-file", file.display(), why)));
            }
            if short.rank() > long.rank() {
                settings.node.registry = RegistrySpec::File(file.clone());
            }
        }
        let mut settings = settings.validated().map_err(at)?;
        let mut values = SettingValue::of_location(&settings.location, matches);
        values.extend(SettingValue::all(run, matches, &settings, |id, name| {
            self.origin(matches, id, name)
        }));
        settings.values = values.into();
        Ok(settings)
    }
}
