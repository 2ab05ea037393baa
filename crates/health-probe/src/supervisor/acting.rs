//! Acting on containers: stops those whose probes fail, and restarts those that have exited.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::Restarts;
use super::events::Level;
use super::pod_events::KILLING;
use super::refresh::observed_pod;
use super::restarts::{Acted, Restart};
use super::task::{LOOK_PERIOD, Task};
use crate::runtime::{RuntimeContainer, RuntimePod};
use crate::source::Keeper;
use crate::spec::{PodSpec, Role};
use crate::worker::ContainerState;
use crate::worker::restart::{Kill, restarts};

/// How long after its creation a container should be started.
const UNSTARTED_PATIENCE: Duration = Duration::from_secs(10);

impl Task {
    /// Stops a container whose probe failed, unless it is already being stopped. If the container must not be stopped,
    /// reports why.
    pub(super) fn kill(&mut self, kill: &Kill) {
        let Some(pod) = self.spec(&kill.pod_uid) else {
            return;
        };
        let container = &kill.container;
        let is_kubelets = self.is_kubelets(&kill.pod_uid);
        let (level, why) = match (&self.parts.runtime, self.parts.restarts) {
            // The kubelet stops the container.
            (_, Restarts::None | Restarts::Own) if is_kubelets => {
                (Level::Normal, "its restart is left to the kubelet")
            }
            (Some(_), Restarts::Own | Restarts::All) => {
                if self.actions.kill(kill, Instant::now()) {
                    self.note_event(&pod, container, Level::Normal, KILLING, kill.message());
                    self.report_kill(&pod, kill);
                }
                return;
            }
            (Some(_), Restarts::None) => (Level::Normal, "--container-restarts is off"),
            (None, _) => (Level::Warning, "this agent has no container runtime"),
        };
        if self.actions.spare(kill) {
            let kind = kill.kind;
            let message = format!("Container {container} failed {kind} probe; not killed: {why}");
            self.note_event(&pod, container, level, "NotKilled", message);
        }
    }

    /// Restarts exited containers, and drops restarts that are no longer needed.
    pub(super) fn find_ended(&mut self) {
        let restarts = self.parts.restarts;
        if self.parts.runtime.is_none() || restarts == Restarts::None || !self.is_observed {
            return;
        }
        let observation = self.observation.clone();
        let mut wanted = HashSet::new();
        let uids = self.shared.state().pods.uids();
        for uid in uids {
            if restarts == Restarts::Own && self.is_kubelets(&uid) {
                continue;
            }
            let Some(spec) = self.spec(&uid) else {
                continue;
            };
            let is_kept = |pod: &&RuntimePod| {
                pod.is_ready && !self.observed_status(&spec, pod).phase.is_final()
            };
            let Some(running) = observed_pod(&observation, &spec).filter(is_kept) else {
                continue;
            };
            for container in &running.containers {
                if self.consider(&spec, container) {
                    wanted.insert(&*container.id);
                }
            }
        }
        let given_up = self.actions.give_up_restarts(|id| wanted.contains(id));
        let mut state = self.shared.state();
        for restart in given_up {
            if let Some(tracked) = state.pods.get_mut(&restart.pod_uid) {
                tracked.restart_at.remove(&restart.container);
            }
        }
    }

    /// Whether a kubelet runs a pod.
    fn is_kubelets(&self, uid: &str) -> bool {
        let state = self.shared.state();
        let pod = state.pods.get(uid);
        pod.is_some_and(|pod| pod.sourced.keeper != Keeper::Agent)
    }

    /// Restarts a container if it has exited and should run. Returns whether it should be restarted.
    fn consider(&mut self, pod: &Arc<PodSpec>, ended: &RuntimeContainer) -> bool {
        let Some(spec) = pod.container(&ended.name) else {
            return false;
        };
        if self.actions.is_restarting(&pod.uid, &ended.name) {
            // The outcome of the current restart decides how long the next one waits.
            return true;
        }
        let exit_code = match ended.state {
            ContainerState::Terminated { exit_code } => exit_code,
            ContainerState::Waiting => return self.start_unstarted(pod, &spec.name, ended),
            ContainerState::Running { .. } => {
                if let Some(tracked) = self.shared.state().pods.get_mut(&pod.uid) {
                    tracked.restart_at.remove(&spec.name);
                }
                return false;
            }
        };
        let killed = self.killed(pod, &ended.id);
        let is_wanted = match &killed {
            Some(kill) => kill.restart,
            None => spec.role != Role::Init && restarts(pod, spec.role, exit_code),
        };
        if !is_wanted {
            return false;
        }
        let now = self.began.elapsed();
        let at = self.ends.of(&ended.id).unwrap_or(now);
        let mut ready = self.parts.backoffs.ready(&pod.uid, &ended.name, at);
        if killed.is_none() {
            // The pod may be about to finish, which the next look will show.
            ready = ready.max(now + LOOK_PERIOD);
        }
        let restart = Restart {
            pod_uid: pod.uid.clone(),
            container: spec.name.clone(),
            container_id: Arc::from(&*ended.id),
            ended: at,
        };
        let is_news = self.actions.restart(restart, self.began + ready);
        if !is_news || ready <= now + LOOK_PERIOD {
            return true;
        }
        let wait = ready - now;
        if let Some(tracked) = self.shared.state().pods.get_mut(&pod.uid) {
            let at = Timestamp::now().checked_add(wait);
            tracked
                .restart_at
                .insert(spec.name.clone(), at.unwrap_or(Timestamp::MAX));
        }
        let message = format!("Back-off restarting failed container {}", spec.name);
        self.note_event(pod, &spec.name, Level::Warning, "BackOff", message);
        self.shared.note_change();
        true
    }

    /// Returns the kill of a container that was killed because a probe failed, possibly by an earlier agent.
    pub(super) fn killed(&self, pod: &PodSpec, container_id: &str) -> Option<Kill> {
        let killed = self.actions.killed(container_id).cloned();
        killed.or_else(|| self.shared.prober.condemned(&pod.uid, container_id))
    }

    /// Starts a container that has been created but not started for a while, because an agent was killed in between.
    /// Returns whether the container should be started.
    fn start_unstarted(
        &mut self,
        pod: &PodSpec,
        name: &Arc<str>,
        container: &RuntimeContainer,
    ) -> bool {
        if container.attempt == 0 {
            // Whoever created the pod starts the container.
            return false;
        }
        let now = self.began.elapsed();
        let ready = self.parts.backoffs.ready(&pod.uid, name, now);
        let restart = Restart {
            pod_uid: pod.uid.clone(),
            container: name.clone(),
            container_id: Arc::from(&*container.id),
            ended: now,
        };
        let ready = ready.max(now + UNSTARTED_PATIENCE);
        self.actions.restart(restart, self.began + ready);
        true
    }

    /// Records the result of an action.
    pub(super) fn acted(&mut self, acted: Acted) {
        // Checks the effect at once.
        self.next_look = Instant::now();
        match acted {
            Acted::Killed(_, Ok(())) => {}
            Acted::Killed(kill, Err(error)) => {
                if let Some(pod) = self.spec(&kill.pod_uid) {
                    let message = format!("cannot stop container {}: {error}", kill.container);
                    let reason = "FailedKillContainer";
                    self.note_event(&pod, &kill.container, Level::Warning, reason, message);
                }
            }
            Acted::Restarted(restart, result) => {
                let Some(pod) = self.spec(&restart.pod_uid) else {
                    return;
                };
                let name = &restart.container;
                if !matches!(result, Ok(None)) {
                    // Whatever the result, the next restart waits.
                    let now = self.began.elapsed();
                    self.parts
                        .backoffs
                        .restarted(&pod.uid, name, restart.ended, now);
                }
                match result {
                    Ok(Some(_)) => {}
                    Ok(None) => return,
                    Err(error) => {
                        let message = format!("cannot restart container {name}: {error}");
                        self.note_event(&pod, name, Level::Warning, "Failed", message);
                        return;
                    }
                }
                self.parts.backoffs.count(&pod.uid, name);
                if let Some(tracked) = self.shared.state().pods.get_mut(&pod.uid) {
                    tracked.restarts = self.parts.backoffs.restarts(&pod.uid);
                    tracked.restart_at.remove(name);
                }
                let message = format!("Started container {name}");
                self.note_event(&pod, name, Level::Normal, "Started", message);
                self.save_soon();
            }
        }
        self.shared.note_change();
    }
}
