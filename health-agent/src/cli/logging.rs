//! The daemon's log: `tracing` events on stderr, for people or as JSON.

use std::io::{self, IsTerminal};

use clap::{Args, ValueEnum};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Flags of the log.
#[derive(Args, Clone, Copy, Debug)]
pub struct LogArgs {
    /// Form of the log lines on stderr
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Least severe events that are logged
    #[arg(long, value_enum, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// How severe an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Something failed and needs attention
    Error,
    /// Something failed and was worked around
    Warn,
    /// Something changed
    Info,
    /// What the agent does and why
    Debug,
    /// Every probe and packet
    Trace,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}

impl LogArgs {
    /// Sends the events of this process to stderr, those of the eBPF programs (through `log`)
    /// included. Does nothing the second time.
    pub fn init(&self) {
        let lines = fmt::layer().with_writer(io::stderr);
        let lines = match self.log_format {
            LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
            LogFormat::Json => lines.json().boxed(),
        };
        // Only the first call finds no subscriber.
        let _ = tracing_subscriber::registry()
            .with(lines)
            .with(self.targets())
            .try_init();
    }

    /// Ours as asked for; of the libraries only what went wrong.
    fn targets(&self) -> Targets {
        let level = LevelFilter::from(self.log_level);
        Targets::new()
            .with_default(level.min(LevelFilter::WARN))
            // Its watcher logs every failure, with the whole answer; the registry logs each reason once.
            .with_target("kube_client", LevelFilter::OFF)
            .with_target("kube_runtime", LevelFilter::OFF)
            // All crates of the agent, and the eBPF programs.
            .with_target("health_", level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn libraries_are_quiet_and_never_louder_than_asked() {
        let targets = |log_level| {
            LogArgs {
                log_format: LogFormat::Text,
                log_level,
            }
            .targets()
        };
        let debug = targets(LogLevel::Debug);
        assert!(debug.would_enable("health_mesh::engine", &Level::DEBUG));
        assert!(!debug.would_enable("health_mesh::engine", &Level::TRACE));
        assert!(debug.would_enable("hyper", &Level::WARN));
        assert!(!debug.would_enable("hyper", &Level::INFO));
        let error = targets(LogLevel::Error);
        assert!(!error.would_enable("hyper", &Level::WARN));
        assert!(!error.would_enable("health_ebpf", &Level::WARN));
    }
}
