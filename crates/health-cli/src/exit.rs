//! How the program exits: its exit codes, and the one-line error message.

use std::io::Write as _;
use std::process::ExitCode;

use health_model::causes::with_causes;
use health_model::settings::InvalidSetting;
use health_net::stdout::stdout;
use health_settings::SettingsError;

use super::ParseError;
use super::output::{finish, printable};

/// A failure.
const FAILED: u8 = 1;
/// Bad usage.
const USAGE: u8 = 2;
/// `status --brief`: something is wrong.
pub(super) const WRONG: u8 = 1;
/// `status --brief`: not everything is known yet.
pub(super) const NOT_KNOWN: u8 = 3;
/// `status`: something is unreachable.
pub(super) const UNREACHABLE: u8 = 3;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A flag has an invalid value.
    #[error(transparent)]
    Usage(#[from] InvalidSetting),
    /// A setting is invalid.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Anything else.
    #[error("{}", with_causes(.0.as_ref()))]
    Failed(#[from] anyhow::Error),
}

impl Failure {
    /// Prints the failure on stderr, in one line, and returns its exit code.
    pub fn report(&self) -> ExitCode {
        eprintln!("error: {}", one_line(&self.to_string()));
        ExitCode::from(match self {
            Self::Usage(_) | Self::Settings(_) => USAGE,
            Self::Failed(_) => FAILED,
        })
    }
}

/// Reports why a command line was not parsed, or prints the requested help.
pub fn usage(error: ParseError) -> ExitCode {
    let error = match error {
        ParseError::Usage(error) => error,
        ParseError::Settings(error) => return Failure::Settings(error).report(),
        ParseError::Location(error) => return Failure::Usage(error).report(),
    };
    if error.use_stderr() {
        // If stderr is closed, only the exit code can report the error.
        let _ = error.print();
        return ExitCode::from(USAGE);
    }
    let printed = stdout().and_then(|mut out| {
        error.print()?;
        out.flush()
    });
    match finish(printed) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failure) => Failure::from(failure).report(),
    }
}

fn one_line(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    printable(&line).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open {path}: {source}; try it as root")]
    struct Quoting {
        path: &'static str,
        source: std::io::Error,
    }

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::from(anyhow!("line 3:\n   bad indent")).to_string();
        assert_eq!(one_line(&failure), "line 3: bad indent");
        assert_eq!(one_line("no pod \u{1b}[1m"), "no pod \\u{1b}[1m");
    }

    #[test]
    fn every_cause_is_reported_once() {
        let silent = anyhow!("no such file").context("cannot read nodes.yaml");
        assert_eq!(
            Failure::from(silent).to_string(),
            "cannot read nodes.yaml: no such file"
        );
        let quoting = Quoting {
            path: "health.sock",
            source: std::io::ErrorKind::PermissionDenied.into(),
        };
        let failure = Failure::from(anyhow::Error::from(quoting).context("no status"));
        assert_eq!(
            failure.to_string(),
            "no status: cannot open health.sock: permission denied; try it as root"
        );
    }
}
