//! Parses the command line. The settings of `run` also come from files and the environment.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Args as _, CommandFactory as _, FromArgMatches as _};
use health_model::settings::{InvalidSetting, Location};
use health_settings::{
    Layers, Settings, SettingsError, invalid_flag, with_one_form, with_ranges_in_help,
};

use super::{Cli, Command};

/// The name of the command with settings.
const RUN: &str = "run";

/// The command line is invalid, or only asks for help.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// An error or a help request that clap reports.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// A setting of `run` is invalid.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The agent's location is invalid.
    #[error(transparent)]
    Location(#[from] InvalidSetting),
}

/// The clap definition of the whole program.
pub fn command() -> clap::Command {
    Cli::command().mut_subcommand(RUN, |run| with_ranges_in_help(with_one_form(run)))
}

/// The `run` command with only its settings.
pub(super) fn run_command() -> clap::Command {
    with_one_form(Settings::augment_args(clap::Command::new(RUN)))
}

/// Checks only the settings in files, and ignores flags and the environment.
pub(super) fn check_files(file: Option<&Path>, location: Location) -> Result<Settings, ParseError> {
    let run = run_command();
    let layers = Layers::read_files(&run, file)?;
    let layered = layers.apply(run.clone()).no_binary_name(true);
    let matches = layered.try_get_matches_from([""; 0])?;
    let settings = Settings::from_arg_matches(&matches)?;
    Ok(layers.finish(&run, &matches, settings, location)?)
}

/// Reads the settings for this process's command line again.
pub fn reread() -> Result<Settings, String> {
    match parse(env::args_os().collect()) {
        Ok(Cli {
            command: Command::Run(args),
            ..
        }) => Ok(args.settings),
        Ok(_) => Err(format!("the command is not {RUN}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Converts clap's error. An invalid value for a setting of `run` is reported like one in a file.
fn refused(error: clap::Error, words: &[OsString]) -> ParseError {
    let lenient = command().ignore_errors(true).try_get_matches_from(words);
    let is_run = lenient.is_ok_and(|matches| matches.subcommand_name() == Some(RUN));
    match invalid_flag(&run_command(), &error).filter(|_| is_run) {
        Some(invalid) => SettingsError::Value(invalid).into(),
        None => error.into(),
    }
}

/// Parses a command line, starting with the program's name.
pub fn parse(words: Vec<OsString>) -> Result<Cli, ParseError> {
    // The first pass finds `--config`, and reports invalid flags before invalid files.
    let early = command().try_get_matches_from(&words);
    let early = early.map_err(|error| refused(error, &words))?;
    let Some((RUN, flags)) = early.subcommand() else {
        return Ok(Cli::from_arg_matches(&early)?);
    };
    let file = flags.get_one::<PathBuf>("config").map(PathBuf::as_path);
    let run = run_command();
    let layers = Layers::read(&run, file)?;
    let layered = command().mut_subcommand(RUN, |run| layers.apply(run));
    let matches = layered.try_get_matches_from(words)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    if let (Command::Run(args), Some((_, flags))) = (&mut cli.command, matches.subcommand()) {
        let location = cli.global.location()?;
        args.settings = layers.finish(&run, flags, args.settings.clone(), location)?;
    }
    Ok(cli)
}
