//! The settings in force: the initial settings with the changes made by reloads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use health_metrics::ReloadCounts;
use health_settings::{ApiSettings, MeshSettings, SettingValue, Settings, is_live};
use tracing::{info, warn};

/// Maximum number of characters of a value that the log shows.
const MAX_SHOWN: usize = 200;

/// The initial settings, and those in force after reloads.
pub(super) struct SettingsInForce {
    at_start: Settings,
    in_force: RwLock<Settings>,
    /// The problem that the last reload left, in words.
    problem: RwLock<Option<String>>,
    succeeded: AtomicU64,
    failed: AtomicU64,
}

impl SettingsInForce {
    pub(super) fn new(at_start: Settings) -> Self {
        Self {
            in_force: RwLock::new(at_start.clone()),
            problem: RwLock::default(),
            succeeded: AtomicU64::default(),
            failed: AtomicU64::default(),
            at_start,
        }
    }

    /// The settings with which the agent started.
    pub(super) fn at_start(&self) -> &Settings {
        &self.at_start
    }

    /// The settings in force, including the changes made by reloads.
    pub(super) fn now(&self) -> Settings {
        let in_force = self.in_force.read();
        in_force.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Number of reloads since the start, by result.
    pub(super) fn reloads(&self) -> ReloadCounts {
        ReloadCounts {
            succeeded: self.succeeded.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }

    /// Whether a reload has changed settings in force.
    pub(super) fn has_changed(&self) -> bool {
        self.now() != self.at_start
    }

    /// Records that new settings cannot be put in force.
    pub(super) fn refuse(&self, error: &str) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        let problem = format!("cannot reload: {error}; the previous settings stay in force");
        // Logged once: otherwise, repeated signals would fill the log.
        if self.problem().as_ref() != Some(&problem) {
            warn!(error, "cannot reload settings; keeping those in force");
        }
        self.set_problem(Some(problem));
    }

    /// Checks that new settings can replace those in force. The live settings must also be valid together with the
    /// others, which keep their values until a restart.
    pub(super) fn check(&self, new: &Settings) -> Result<(), String> {
        let in_force = self.now();
        if let Some(path) = new.files.emptied_since(&in_force.files) {
            return Err(format!("{} is empty", path.display()));
        }
        match with_live(&in_force, new).validated() {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("{error}; restart the agent to apply all changes")),
        }
    }

    /// Puts the new values of live settings in force, and records which other changes need a restart.
    pub(super) fn take(&self, new: &Settings) {
        let mut in_force = self
            .in_force
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let mut due = Vec::new();
        for value in in_force.values.iter() {
            let new = new.values.iter().find(|new| new.name == value.name);
            let Some(new) = new.filter(|new| new.value != value.value) else {
                continue;
            };
            let (setting, from, to) = (&value.name, shown(value), shown(new));
            if is_live(setting) {
                info!(setting, from, to, "setting changed");
            } else {
                warn!(
                    setting,
                    from, to, "setting changed; restart the agent to apply it"
                );
                due.push(setting.clone());
            }
        }
        log_overridden(&in_force, new);
        *in_force = with_live(&in_force, new);
        drop(in_force);
        self.succeeded.fetch_add(1, Ordering::Relaxed);
        self.set_problem(
            (!due.is_empty()).then(|| format!("restart the agent to apply {}", due.join(", "))),
        );
        info!("settings reloaded");
    }

    /// The problem that the last reload left: an error, or changed settings that need a restart.
    pub(super) fn problem(&self) -> Option<String> {
        let problem = self.problem.read();
        problem.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_problem(&self, problem: Option<String>) {
        *self.problem.write().unwrap_or_else(PoisonError::into_inner) = problem;
    }
}

/// Logs new values in files that have no effect because a flag or a variable overrides them.
fn log_overridden(in_force: &Settings, new: &Settings) {
    for overridden in new.overridden.iter() {
        let mut known = in_force.overridden.iter();
        if known.any(|known| known.name == overridden.name && known.values == overridden.values) {
            continue;
        }
        let value = start_of(overridden.values.join(", "));
        let (setting, file, by) = (&overridden.name, &overridden.file, &overridden.by);
        info!(setting, value, %file, "value in a file has no effect; overridden by {by}");
    }
}

/// The beginning of a value, for the log.
fn shown(value: &SettingValue) -> String {
    start_of(value.text())
}

fn start_of(text: String) -> String {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The settings in force, with the new values of settings that need no restart.
fn with_live(in_force: &Settings, new: &Settings) -> Settings {
    let mut settings = in_force.clone();
    settings.files = new.files.clone();
    settings.overridden = new.overridden.clone();
    let values = in_force.values.iter().map(|value| {
        let new = new.values.iter().find(|new| new.name == value.name);
        let new = new.filter(|new| is_live(&new.name) || new.value == value.value);
        new.unwrap_or(value).clone()
    });
    settings.values = values.collect();
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

#[cfg(test)]
mod tests {
    use health_cli::{Command, parse};

    use super::*;

    /// The settings of `run` with these flags.
    fn settings(flags: &[String]) -> Settings {
        let words = ["health-agent", "run"].map(str::to_owned).into_iter();
        let words = words.chain(flags.iter().cloned()).map(Into::into);
        match parse(words.collect()).unwrap().command {
            Command::Run(args) => args.settings,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_live_setting_is_in_force_after_a_reload_and_no_other() {
        let before = settings(&[]);
        let candidates = ["true", "always", "debug", "7s", "3", "icmp=30s"];
        for value in before.values.iter() {
            let name = &value.name;
            if !is_live(name) {
                continue;
            }
            let changed = candidates.iter().find_map(|text| {
                let flags = [format!("--{name}={text}")];
                let words = ["health-agent", "run", &flags[0]].map(Into::into);
                let is_valid = parse(words.to_vec()).is_ok();
                let settings = is_valid.then(|| settings(&flags))?;
                (settings != before).then_some(settings)
            });
            let changed = changed.unwrap_or_else(|| panic!("no other value of {name}"));
            let in_force = SettingsInForce::new(before.clone());
            in_force.take(&changed);
            let Settings { values, files, .. } = in_force.now();
            assert_eq!(
                in_force.now(),
                Settings {
                    values,
                    files,
                    ..changed
                },
                "{name}"
            );
            assert_eq!(in_force.problem(), None, "{name}");
        }

        let restart = settings(&["--health-port=4241".to_owned(), "--probe-rate=7".to_owned()]);
        let in_force = SettingsInForce::new(before.clone());
        in_force.take(&restart);
        assert_eq!(in_force.now().mesh.health_port, before.mesh.health_port);
        assert_eq!(in_force.now().mesh.probe_rate, 7);
        assert_eq!(
            in_force.problem().as_deref(),
            Some("restart the agent to apply health-port")
        );
    }

    #[test]
    fn a_new_value_that_contradicts_one_in_force_is_refused_with_both_origins() {
        let in_force = SettingsInForce::new(settings(&["--passive-rtt=off".to_owned()]));
        let new = settings(&["--passive-relief=2".to_owned()]);
        assert_eq!(
            in_force.check(&new),
            Err(
                "--passive-relief '2': needs --passive-rtt on, which detects traffic; passive-rtt is 'false' \
                 (command line); restart the agent to apply all changes"
                    .to_owned()
            )
        );
    }
}
