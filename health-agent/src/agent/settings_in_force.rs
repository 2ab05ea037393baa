//! The settings in force: those of the start, with what reloads have changed.

use std::sync::{PoisonError, RwLock};

use health_settings::{ApiSettings, MeshSettings, SettingValue, Settings, is_live};
use tracing::{info, warn};

/// How much of a value the log shows, characters.
const MAX_SHOWN: usize = 200;

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
        let problem = format!("cannot reload: {error}; the previous settings stay in force");
        // Otherwise whoever sends signals fills the log.
        if self.problem().as_ref() != Some(&problem) {
            warn!(error, "cannot reload settings; keeping those in force");
        }
        self.set_problem(Some(problem));
    }

    /// Checks that new settings can replace those in force: the live ones also together with others that stay as they
    /// are until a restart.
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

    /// Notes which of these values are in force now, and which need a restart.
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
        *in_force = with_live(&in_force, new);
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

/// The start of a value, for the log.
fn shown(value: &SettingValue) -> String {
    let text = value.text();
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Settings in force, with the new values of those that need no restart.
fn with_live(in_force: &Settings, new: &Settings) -> Settings {
    let mut settings = in_force.clone();
    settings.files = new.files.clone();
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
