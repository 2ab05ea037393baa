//! The daemon's log: `tracing` events on stderr, for people or as JSON.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use health_settings::{LogFormat, LogLevel, LogSettings};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer as _, Registry, fmt, reload};

/// Sends this process's events to stderr, including those of the eBPF programs (through `log`). Later calls have no
/// effect.
pub fn init(settings: &LogSettings) {
    let lines = fmt::layer().with_writer(|| OneLine(io::stderr()));
    let lines = match settings.log_format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let (filter, level) = reload::Layer::new(targets(settings.log_level));
    let subscriber = tracing_subscriber::registry().with(filter).with(lines);
    // Only the first call succeeds, since later ones find a subscriber.
    if subscriber.try_init().is_ok() {
        let _ = LEVEL.set(level);
    }
}

/// Changes the least severe level that is logged.
pub fn set_level(level: LogLevel) {
    if let Some(handle) = LEVEL.get() {
        // This fails only without a subscriber.
        let _ = handle.reload(targets(level));
    }
}

/// Handle for changing the filter of this process's subscriber.
static LEVEL: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// Our own events at the chosen level; only warnings and errors from libraries.
fn targets(level: LogLevel) -> Targets {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    Targets::new()
        .with_default(level.min(LevelFilter::WARN))
        // kube's watcher logs every failure with the whole response; the registry logs each reason once.
        .with_target("kube_client", LevelFilter::OFF)
        .with_target("kube_runtime", LevelFilter::OFF)
        // All crates of the agent, and the eBPF programs.
        .with_target("health_", level)
}

/// Writes each event on one line, even if it contains external text. The layer passes each event as a whole, and
/// escapes other terminal control characters.
struct OneLine<W>(W);

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let is_break = |byte: &u8| matches!(byte, b'\n' | b'\r');
        let (event_line, end) = match event.strip_suffix(b"\n") {
            Some(line) => (line, &b"\n"[..]),
            None => (event, &b""[..]),
        };
        if !event_line.iter().any(is_break) {
            self.0.write_all(event)?;
            return Ok(event.len());
        }
        let mut line = Vec::with_capacity(event.len() + 8);
        for byte in event_line {
            match byte {
                b'\n' => line.extend(b"\\n"),
                b'\r' => line.extend(b"\\r"),
                byte => line.push(*byte),
            }
        }
        line.extend(end);
        self.0.write_all(&line)?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn an_event_is_one_line_whatever_is_in_it() {
        for (event, line) in [
            ("a b\n", "a b\n"),
            (
                "WARN x=1\n2026 ERROR false\r\n",
                "WARN x=1\\n2026 ERROR false\\r\n",
            ),
            ("no end", "no end"),
            ("\n", "\n"),
        ] {
            let mut written = OneLine(Vec::new());
            written.write_all(event.as_bytes()).unwrap();
            assert_eq!(String::from_utf8(written.0).unwrap(), line);
        }
    }

    #[test]
    fn libraries_are_quiet_and_never_louder_than_asked() {
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
