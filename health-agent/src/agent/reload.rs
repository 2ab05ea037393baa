//! SIGHUP: the agent reads its settings again. Some take effect at once; the others are named.

use std::sync::{Arc, PoisonError, RwLock};

use health_settings::{MeshSettings, Settings};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

/// Reads all settings again, as at the start. An error says what is wrong, and where.
pub type Reread = fn() -> Result<Settings, String>;

/// The settings of an agent, and what it needs to read them again.
pub(super) struct Reloadable {
    pub(super) settings: Settings,
    pub(super) reread: Reread,
    /// Requests to do so. Taken over before the start, since SIGHUP ends a process that does not wait for it.
    pub(super) requests: Signal,
}

impl Reloadable {
    pub(super) fn new(settings: Settings, reread: Reread) -> std::io::Result<Self> {
        Ok(Self {
            settings,
            reread,
            requests: signal(SignalKind::hangup())?,
        })
    }
}

/// Settings that take effect without a restart, besides those of conntrack timeouts.
const LIVE: [&str; 7] = [
    "log-level",
    "loss-threshold",
    "passive-relief",
    "probe",
    "probe-interval",
    "probe-rate",
    "probe-timeout",
];

fn is_live(name: &str) -> bool {
    LIVE.contains(&name) || name.starts_with("conntrack-timeout-")
}

/// The settings of the start, and what reloads have made of them.
pub(super) struct SettingsInForce {
    at_start: Settings,
    in_force: RwLock<Settings>,
    /// The names of changed settings that need a restart.
    restart_due: RwLock<Vec<String>>,
}

impl SettingsInForce {
    pub(super) fn new(at_start: Settings) -> Self {
        Self {
            in_force: RwLock::new(at_start.clone()),
            restart_due: RwLock::default(),
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

    /// Notes which of these values are in force now, and which need a restart.
    pub(super) fn take(&self, new: Settings) {
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
        in_force.values = Arc::from(values);
        in_force.conntrack.timeouts = new.conntrack.timeouts;
        in_force.log.log_level = new.log.log_level;
        in_force.mesh = MeshSettings {
            probe_interval: new.mesh.probe_interval,
            probes: new.mesh.probes,
            probe_rate: new.mesh.probe_rate,
            probe_timeout: new.mesh.probe_timeout,
            loss_threshold: new.mesh.loss_threshold,
            passive_relief: new.mesh.passive_relief,
            ..in_force.mesh.clone()
        };
        *self
            .restart_due
            .write()
            .unwrap_or_else(PoisonError::into_inner) = due;
        info!("settings reloaded");
    }

    /// Which changed settings need a restart, in words.
    pub(super) fn restart_due(&self) -> Option<String> {
        let due = self
            .restart_due
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        (!due.is_empty()).then(|| format!("restart the agent to apply {}", due.join(", ")))
    }
}
