//! Tests of the settings as the arguments of a command.

mod files;
mod invalid_values;
mod ranges;
mod sources;
mod validity;

use std::fs;
use std::path::Path;

use clap::Arg;

use super::*;

/// The `run` command, with only its settings.
fn run() -> Command {
    with_one_form(Settings::augment_args(
        Command::new("run").no_binary_name(true),
    ))
}

fn settings_of(run: &Command) -> Vec<&Arg> {
    let settings = run.get_arguments().filter(|arg| form::group(arg).is_some());
    settings.collect()
}

/// The settings in force, given a settings file and command-line words.
fn loaded(file: &Path, words: &[&str]) -> Result<Settings, SettingsError> {
    let layers = Layers::read_files(&run(), Some(file))?;
    let layered = layers.apply(run());
    let matches = layered.try_get_matches_from(words).expect("valid words");
    let settings = Settings::from_arg_matches(&matches).expect("valid settings");
    let location = Location::default();
    layers.finish(&run(), &matches, settings, location)
}

/// Where a test writes a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Flag,
    Variable,
    File,
    DropIn,
}

const SOURCES: [Source; 4] = [Source::Flag, Source::Variable, Source::File, Source::DropIn];

/// A folder with the settings files written so far, and the flags and variables set so far.
struct Written {
    folder: tempfile::TempDir,
    words: Vec<String>,
    variables: Vec<(String, String)>,
}

impl Written {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("config.d")).expect("a folder");
        fs::write(folder.path().join("config.yaml"), "").expect("a file");
        Self {
            folder,
            words: Vec::new(),
            variables: Vec::new(),
        }
    }

    /// Writes a value. In files, it is on the second line, and each drop-in file holds one value.
    fn write(&mut self, source: Source, name: &str, value: &str) {
        let run = run();
        let arg = settings_of(&run).into_iter();
        let arg = arg.clone().find(|arg| form::name(arg) == name).expect(name);
        let group = form::group(arg).expect("a group");
        let text = format!("{group}:\n  {name}: \"{value}\"\n");
        match source {
            Source::Flag => self.words.push(format!("--{name}={value}")),
            Source::Variable => self.variables.push((form::variable(arg), value.to_owned())),
            Source::File => {
                fs::write(self.folder.path().join("config.yaml"), text).expect("a file")
            }
            Source::DropIn => fs::write(self.drop_in(name), text).expect("a file"),
        }
    }

    fn drop_in(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(format!("config.d/{name}.yaml"))
    }

    /// The origin of a value that was written.
    fn origin(&self, source: Source, name: &str) -> Origin {
        let file = |path: &Path| Origin::File {
            path: path.display().to_string(),
            line: 2,
            column: 3,
        };
        match source {
            Source::Flag => Origin::CommandLine,
            Source::Variable => Origin::Environment {
                variable: form::variable_of(name),
            },
            Source::File => file(&self.folder.path().join("config.yaml")),
            Source::DropIn => file(&self.drop_in(name)),
        }
    }

    /// The settings in force, or the error as `health-agent run` prints it.
    fn load(&self) -> Result<Settings, String> {
        let run = run();
        let file = self.folder.path().join("config.yaml");
        let find = |wanted: &str| {
            let mut variables = self.variables.iter();
            variables
                .find(|(name, _)| name == wanted)
                .map(|(_, value)| value.into())
        };
        let layers = Layers::read_files(&run, Some(&file))
            .and_then(|layers| layers.with_environment(&run, find))
            .map_err(|error| error.to_string())?;
        let matches = layers.apply(run.clone()).try_get_matches_from(&self.words);
        let matches = matches.map_err(|error| {
            invalid_flag(&run, &error).map_or_else(|| error.to_string(), |error| error.to_string())
        })?;
        let settings = Settings::from_arg_matches(&matches).expect("valid settings");
        layers
            .finish(&run, &matches, settings, Location::default())
            .map_err(|error| error.to_string())
    }
}
