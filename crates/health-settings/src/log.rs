//! The agent's log.

use clap::{Args, ValueEnum};

use super::form::{Common, Live};

/// The log.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Log")]
pub struct LogSettings {
    /// Format of the log on stderr
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Minimum severity of logged events
    #[arg(
        long, value_enum, value_name = "LEVEL", default_value = "info",
        add = Common, add = Live
    )]
    pub log_level: LogLevel,
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Human-readable text
    Text,
    /// One JSON object per line
    Json,
}

/// How severe an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Failures that need attention
    Error,
    /// Failures that were worked around
    Warn,
    /// Changes
    Info,
    /// What the agent does and why
    Debug,
    /// Every probe and packet
    Trace,
}
