//! Reads the settings again when a settings file changes, and at SIGHUP. Some take effect at once; the others are named
//! as due for a restart.

use std::future::pending;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use health_settings::{ApiSettings, MeshSettings, Settings, SettingsFiles, is_live};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::spawn_blocking;
use tokio::time::{Interval, MissedTickBehavior, interval};
use tracing::{info, warn};

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

/// The settings of the start, and what reloads have made of them.
pub(super) struct SettingsInForce {
    at_start: Settings,
    in_force: RwLock<Settings>,
    /// What the last reload left open, in words.
    problem: RwLock<Option<String>>,
}

impl SettingsInForce {
    pub(super) fn new(at_start: Settings) -> Self {
        Self {
            in_force: RwLock::new(at_start.clone()),
            problem: RwLock::default(),
            at_start,
        }
    }

    /// The settings of the start.
    pub(super) fn at_start(&self) -> &Settings {
        &self.at_start
    }

    /// The settings in force: those of the start, and what a reload has changed.
    pub(super) fn now(&self) -> Settings {
        let in_force = self.in_force.read();
        in_force.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that new settings are invalid.
    pub(super) fn refuse(&self, error: &str) {
        warn!(error, "cannot reload settings; keeping those in force");
        self.set_problem(Some(format!(
            "cannot reload: {error}; the former settings stay in force"
        )));
    }

    /// Notes which of these values are in force now, and which need a restart.
    pub(super) fn take(&self, new: &Settings) {
        let mut in_force = self
            .in_force
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let mut values = in_force.values.to_vec();
        let mut due = Vec::new();
        for value in &mut values {
            let Some(new) = new.values.iter().find(|new| new.name == value.name) else {
                continue;
            };
            let (setting, from, to) = (&value.name, value.text(), new.text());
            if is_live(setting) {
                if value.value != new.value {
                    info!(setting, from, to, "setting changed");
                }
                *value = new.clone();
            } else if value.value != new.value {
                warn!(
                    setting,
                    from, to, "setting changed; restart the agent to apply it"
                );
                due.push(setting.clone());
            }
        }
        *in_force = Settings {
            values: Arc::from(values),
            ..with_live(&in_force, new)
        };
        drop(in_force);
        self.set_problem(
            (!due.is_empty()).then(|| format!("restart the agent to apply {}", due.join(", "))),
        );
        info!("settings reloaded");
    }

    /// What the last reload left open: an error, or changed settings that need a restart.
    pub(super) fn problem(&self) -> Option<String> {
        let problem = self.problem.read();
        problem.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_problem(&self, problem: Option<String>) {
        *self.problem.write().unwrap_or_else(PoisonError::into_inner) = problem;
    }
}

/// Settings in force, with the new values of those that need no restart.
fn with_live(in_force: &Settings, new: &Settings) -> Settings {
    let mut settings = in_force.clone();
    settings.conntrack.timeouts = new.conntrack.timeouts;
    settings.log.log_level = new.log.log_level;
    settings.policy.policy_mode = new.policy.policy_mode;
    settings.api = ApiSettings {
        metrics_per_target: new.api.metrics_per_target,
        ..settings.api
    };
    settings.mesh = MeshSettings {
        probe_interval: new.mesh.probe_interval,
        probes: new.mesh.probes.clone(),
        probe_rate: new.mesh.probe_rate,
        probe_timeout: new.mesh.probe_timeout,
        path_mtu_interval: new.mesh.path_mtu_interval,
        loss_threshold: new.mesh.loss_threshold,
        passive_relief: new.mesh.passive_relief,
        ..settings.mesh
    };
    settings
}
