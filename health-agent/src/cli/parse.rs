//! Parses the command line. The settings of `run` also come from files and the environment.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{CommandFactory as _, FromArgMatches as _};
use health_model::settings::{InvalidSetting, Location};
use health_settings::{Layers, Settings, SettingsError, with_one_form};

use super::{Cli, Command};

/// The name of the command with settings.
const RUN: &str = "run";

/// The command line cannot be used, or asks for help only.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// As clap reports it.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// The settings of `run`.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The location of the agent.
    #[error(transparent)]
    Location(#[from] InvalidSetting),
}

/// The whole program, as clap knows it.
pub fn command() -> clap::Command {
    Cli::command().mut_subcommand(RUN, with_one_form)
}

/// The command `run`, whose arguments are the settings.
pub(super) fn run() -> clap::Command {
    let command = command();
    let run = command.find_subcommand(RUN).cloned();
    run.unwrap_or_else(|| unreachable!("the program has a command {RUN}"))
}

/// Checks the settings of a file by themselves: flags and the environment do not count.
pub(super) fn check(file: Option<&Path>, location: Location) -> Result<Settings, SettingsError> {
    let layers = Layers::of_files(&run(), file)?;
    let run = layers.apply(run()).no_binary_name(true);
    let matches = run.clone().get_matches_from([""; 0]);
    let settings = Settings::from_arg_matches(&matches);
    let settings = settings.unwrap_or_else(|error| error.exit());
    layers.settle(&run, &matches, settings, location)
}

/// Parses the words of a command line, the program's name first.
pub fn parse(words: Vec<OsString>) -> Result<Cli, ParseError> {
    let matches = command().try_get_matches_from(&words)?;
    let Some((RUN, first)) = matches.subcommand() else {
        return Ok(Cli::from_arg_matches(&matches)?);
    };
    let layers = Layers::read(
        &run(),
        first.get_one::<PathBuf>("config").map(PathBuf::as_path),
    )?;
    let layered = command().mut_subcommand(RUN, |run| layers.apply(run));
    let matches = layered.try_get_matches_from(words)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    if let (Command::Run(args), Some((_, second))) = (&mut cli.command, matches.subcommand()) {
        let location = cli.global.location()?;
        args.settings = layers.settle(&run(), second, args.settings.clone(), location)?;
    }
    Ok(cli)
}
