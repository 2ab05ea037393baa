//! Rereads the settings when a settings file changes and on SIGHUP. Some settings take effect at once; the others are
//! reported as requiring a restart.

use std::future::pending;
use std::time::Duration;

use health_settings::{Settings, SettingsFiles};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Interval, MissedTickBehavior, interval};

/// How often the files are polled. They are read once two polls in a row agree, so that a half-written file is not
/// read.
const POLL_PERIOD: Duration = Duration::from_secs(1);
/// After this many consecutive polls that found changes, the files are read although they keep changing.
const MAX_UNSETTLED: u32 = 5;

/// Rereads all settings, as at startup. An error says what is wrong and where.
pub type Reread = fn() -> Result<Settings, String>;

/// An agent's settings, and everything needed to reread them.
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
                look: None,
                is_due: false,
                read: settings.files.clone(),
                last: settings.files.clone(),
                unsettled: 0,
            },
            settings,
            reread,
        })
    }
}

/// Requests to reread the settings.
pub(super) struct ReloadRequests {
    /// Installed before the start, because SIGHUP terminates a process that does not handle it.
    hangups: Signal,
    polls: Interval,
    /// The poll of the files in progress. It may hang, so at most one runs at a time.
    look: Option<JoinHandle<SettingsFiles>>,
    /// Whether a SIGHUP is pending.
    is_due: bool,
    /// The files as they were last read.
    read: SettingsFiles,
    /// The files at the last poll.
    last: SettingsFiles,
    /// Number of consecutive polls that found changes since the poll before.
    unsettled: u32,
}

impl ReloadRequests {
    /// Waits for the next request. Cancelling the wait loses no request.
    pub(super) async fn next(&mut self) {
        loop {
            tokio::select! {
                hangup = self.hangups.recv() => match hangup {
                    Some(()) => self.is_due = true,
                    None => pending().await,
                },
                _ = self.polls.tick(), if self.look.is_none() => self.begin_look(),
                found = looked(&mut self.look) => {
                    self.look = None;
                    if let Some(found) = found
                        && self.is_request(found)
                    {
                        return;
                    }
                }
            }
            if self.is_due && self.look.is_none() {
                self.begin_look();
            }
        }
    }

    fn begin_look(&mut self) {
        let before = self.last.clone();
        self.look = Some(spawn_blocking(move || before.find_again()));
    }

    /// Whether the settings must be reread after a poll with this result.
    fn is_request(&mut self, found: SettingsFiles) -> bool {
        self.unsettled = match found == self.last {
            true => 0,
            false => self.unsettled + 1,
        };
        self.last = found;
        let is_settled = self.unsettled == 0 || self.unsettled >= MAX_UNSETTLED;
        let is_request = self.is_due || (is_settled && self.last != self.read);
        if is_request {
            (self.is_due, self.unsettled) = (false, 0);
            self.read = self.last.clone();
        }
        is_request
    }
}

/// Waits for the poll in progress and returns its result; `None` if it failed. Waits forever if no poll is in progress.
async fn looked(look: &mut Option<JoinHandle<SettingsFiles>>) -> Option<SettingsFiles> {
    match look {
        Some(look) => look.await.ok(),
        None => pending().await,
    }
}
