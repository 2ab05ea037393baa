//! Many containers at once with different lives, and an agent that is killed in between: restarts, readiness and events
//! of each container match the specification.

use std::collections::BTreeMap;

use anyhow::ensure;
use health_model::api::{ContainerEvent, ProbedContainer};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::containerd::Container;
use tests::is_long;

use super::Stand;

/// The life of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// It is killed from outside, and exits.
    Killed,
    /// It hangs, so its liveness probe causes a restart.
    Hangs,
    /// It starts slowly; until then, only its startup probe runs.
    Slow,
    /// It is temporarily unable to serve.
    Flaps,
}

const LIVES: [Life; 4] = [Life::Killed, Life::Hangs, Life::Slow, Life::Flaps];

impl Life {
    fn script(self, port: u32) -> String {
        let wait = match self {
            Self::Slow => "until test -e /tmp/go; do sleep 1; done; ",
            _ => "",
        };
        format!("touch /tmp/ready; {wait}exec httpd -f -p {port} -h /tmp")
    }

    fn probes(self, port: u32) -> String {
        let get = format!("httpGet: {{path: /ready, port: {port}}}, periodSeconds: 1");
        let patient = "timeoutSeconds: 60";
        match self {
            Self::Killed => format!("    readinessProbe: {{{get}, {patient}}}\n"),
            Self::Hangs => {
                format!("    livenessProbe: {{{get}, timeoutSeconds: 5, failureThreshold: 3}}\n")
            }
            Self::Slow => format!(
                "    startupProbe: {{{get}, {patient}, failureThreshold: 100000}}\n    \
                 readinessProbe: {{{get}, {patient}}}\n    livenessProbe: {{{get}, {patient}}}\n"
            ),
            Self::Flaps => {
                format!("    readinessProbe: {{{get}, {patient}, failureThreshold: 2}}\n")
            }
        }
    }

    /// The reasons that must have been reported at the end, and those that may have been.
    const fn reasons(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            // It may be probed before the agent sees its exit.
            Self::Killed => (&["Started"], &["Unhealthy"]),
            Self::Hangs => (&["Killing", "Started", "Unhealthy"], &[]),
            // Reports of an earlier agent are lost with it.
            Self::Slow => (&[], &["Unhealthy"]),
            Self::Flaps => (&["Unhealthy"], &[]),
        }
    }
}

struct Living {
    name: String,
    life: Life,
    first: Container,
}

impl Living {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.first.pid.cast_signed())
    }
}

#[test]
#[ignore = "needs root"]
fn many_containers_live_as_the_specification_says_while_the_agent_is_killed() -> anyhow::Result<()>
{
    let count = if is_long() { 100 } else { 8 };
    let mut stand = Stand::start()?;
    stand.start_agent()?;
    let mut all = Vec::new();
    for (i, life) in LIVES.into_iter().cycle().take(count).enumerate() {
        let port = 9000 + u32::try_from(i)?;
        let name = format!("{life:?}-{i}").to_lowercase();
        let script = life.script(port);
        let first = stand.run(&name, &script, &life.probes(port))?;
        all.push(Living { name, life, first });
    }
    for one in &all {
        stand.wait("it to live", &one.name, |container| match one.life {
            Life::Slow => container.started == Some(false) && !container.ready,
            _ => container.ready && container.started == Some(true),
        })?;
    }

    let ready = all.iter().filter(|one| one.life != Life::Slow);
    stand.wait_saved(
        all.iter().map(|one| &*one.first.id),
        ready.map(|one| &*one.name),
    )?;
    stand.node().kill_agent(Signal::SIGKILL)?;
    stand.start_agent()?;
    for one in &all {
        let container = stand.wait("it to be known again", &one.name, |container| {
            container.id.is_some()
        })?;
        ensure!(
            container.id.as_deref() == Some(&*one.first.id),
            "{}",
            one.name
        );
        ensure!(
            container.ready == (one.life != Life::Slow),
            "{}: {container:?}",
            one.name
        );
    }

    for one in &all {
        match one.life {
            Life::Killed => kill(one.pid(), Signal::SIGKILL)?,
            Life::Hangs => kill(one.pid(), Signal::SIGSTOP)?,
            Life::Slow => stand
                .containerd
                .exec(&one.first.id, &["touch", "/tmp/go"])?,
            Life::Flaps => stand
                .containerd
                .exec(&one.first.id, &["rm", "/tmp/ready"])?,
        }
    }
    for one in all.iter().filter(|one| one.life == Life::Flaps) {
        stand.wait("it to be unready", &one.name, |container| !container.ready)?;
        stand
            .containerd
            .exec(&one.first.id, &["touch", "/tmp/ready"])?;
    }
    for one in &all {
        let restarts = u32::from(matches!(one.life, Life::Killed | Life::Hangs));
        let ended_well = |container: &ProbedContainer| {
            container.ready && container.started == Some(true) && container.restarts == restarts
        };
        let container = stand.wait("it to live on", &one.name, ended_well)?;
        let is_first = container.id.as_deref() == Some(&*one.first.id);
        ensure!(is_first == (restarts == 0), "{}: {container:?}", one.name);
    }
    check_events(&stand, &all)
}

/// Compares the reported events with the expected ones.
fn check_events(stand: &Stand, all: &[Living]) -> anyhow::Result<()> {
    let listed = stand.node().listing("probe events")?;
    let events: Vec<ContainerEvent> = serde_json::from_value(listed)?;
    let mut by_container = BTreeMap::<&str, Vec<&ContainerEvent>>::new();
    for event in &events {
        by_container
            .entry(&event.container)
            .or_default()
            .push(event);
    }
    for one in all {
        let reported = by_container.remove(&*one.name).unwrap_or_default();
        let (must, may) = one.life.reasons();
        let mut reasons: Vec<&str> = reported.iter().map(|event| &*event.reason).collect();
        reasons.sort_unstable();
        reasons.dedup();
        reasons.retain(|reason| !may.contains(reason));
        ensure!(reasons == must, "{}: {reported:?}", one.name);
    }
    Ok(())
}
