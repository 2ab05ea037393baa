//! Reads the settings again when a settings file changes, and at SIGHUP. Some take effect at once; the others are named
//! as due for a restart.

use std::future::pending;
use std::time::Duration;

use health_settings::{Settings, SettingsFiles};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::spawn_blocking;
use tokio::time::{Interval, MissedTickBehavior, interval};

/// How often the files are polled. They are read once two polls in a row agree, so that a half-written file is not
/// read.
const POLL_PERIOD: Duration = Duration::from_secs(1);

/// Reads all settings again, as at the start. An error says what is wrong, and where.
pub type Reread = fn() -> Result<Settings, String>;

/// The settings of an agent, and what it needs to read them again.
pub(super) struct Reloadable {
    pub(super) settings: Settings,
    pub(super) reread: Reread,
    pub(super) requests: ReloadRequests,
}

impl Reloadable {
    pub(super) fn new(settings: Settings, reread: Reread) -> std::io::Result<Self> {
        let mut polls = interval(POLL_PERIOD);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self {
            requests: ReloadRequests {
                hangups: signal(SignalKind::hangup())?,
                polls,
                is_due: false,
                read: settings.files.clone(),
                last: settings.files.clone(),
            },
            settings,
            reread,
        })
    }
}

/// Requests to read the settings again.
pub(super) struct ReloadRequests {
    /// Taken over before the start, since SIGHUP ends a process that does not wait for it.
    hangups: Signal,
    polls: Interval,
    /// Whether a SIGHUP waits to be served.
    is_due: bool,
    /// The files as they were last read.
    read: SettingsFiles,
    /// The files at the last poll.
    last: SettingsFiles,
}

impl ReloadRequests {
    /// Waits for the next request. Cancellation loses none.
    pub(super) async fn next(&mut self) {
        loop {
            tokio::select! {
                hangup = self.hangups.recv() => match hangup {
                    Some(()) => self.is_due = true,
                    None => pending().await,
                },
                _ = self.polls.tick() => {}
            }
            let before = self.last.clone();
            let Ok(now) = spawn_blocking(move || before.find_again()).await else {
                continue;
            };
            let is_settled = now == self.last;
            self.last = now;
            if self.is_due || (is_settled && self.last != self.read) {
                self.is_due = false;
                self.read = self.last.clone();
                return;
            }
        }
    }
}
