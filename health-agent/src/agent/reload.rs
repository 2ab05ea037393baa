//! Rereads the settings when a settings file changes and on SIGHUP. Some settings take effect at once; the others are
//! reported as requiring a restart.

use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use health_settings::{Settings, SettingsFiles};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::settings_in_force::SettingsInForce;
use super::source::AgentSource;
use crate::logging;

/// How often the files are polled. They are read once two polls in a row agree, so that a half-written file is not
/// read.
const POLL_PERIOD: Duration = Duration::from_secs(1);
/// After this many consecutive polls that found changes, the files are read although they keep changing.
const MAX_UNSETTLED: u32 = 5;
/// Longest wait for the settings files: reading may hang, and nothing else is supervised meanwhile.
const READ_PATIENCE: Duration = Duration::from_secs(5);

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
                is_retry: false,
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
    /// Whether the next poll reads the files even if they are unchanged.
    is_retry: bool,
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
                _ = self.polls.tick(), if self.look.is_none() => {
                    self.is_due |= std::mem::take(&mut self.is_retry);
                    self.begin_look();
                }
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

    /// Makes the next poll request another reload.
    pub(super) fn retry(&mut self) {
        self.is_retry = true;
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
            (self.is_due, self.is_retry, self.unsettled) = (false, false, 0);
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

/// Rereads the settings and checks that they can replace those in force.
pub(super) async fn read(in_force: &SettingsInForce, reread: Reread) -> Result<Settings, String> {
    let new = match timeout(READ_PATIENCE, spawn_blocking(reread)).await {
        Ok(Ok(read)) => read?,
        Ok(Err(error)) => return Err(error.to_string()),
        Err(_) => return Err(format!("reading them took longer than {READ_PATIENCE:?}")),
    };
    in_force.check(&new)?;
    Ok(new)
}

/// Reloads the settings on request while the start waits for this node's entry. Settings that a waiting agent does not
/// use take effect after the start.
pub(super) async fn reload_while_waiting(
    source: &AgentSource,
    reread: Reread,
    requests: &mut ReloadRequests,
) -> Infallible {
    loop {
        source.until_waiting().await;
        requests.next().await;
        // The start may end, and this task with it, before the settings have been read.
        requests.retry();
        match read(&source.settings, reread).await {
            Ok(new) => {
                logging::set_level(new.log.log_level);
                source.settings.take(&new);
            }
            Err(error) => source.settings.refuse(&error),
        }
        requests.is_retry = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unused() -> Result<Settings, String> {
        unreachable!("nothing reads settings here")
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_reload_is_requested_again_although_no_file_has_changed() {
        let settings = Settings::default();
        let settings = Settings {
            files: settings.files.find_again(),
            ..settings
        };
        let mut requests = Reloadable::new(settings, unused).unwrap().requests;
        for _ in 0..3 {
            requests.retry();
            requests.next().await;
        }
        let further = timeout(10 * POLL_PERIOD, requests.next()).await;
        assert!(further.is_err(), "a request without a reason");
    }
}
