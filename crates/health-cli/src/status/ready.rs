//! `status --brief` and `status --wait`: whether all is well, and what readiness still lacks.

use std::process::ExitCode;
use std::time::Duration;

use health_api::client::{Client, ClientError};
use health_model::api::{AgentReport, HealthStatus, Reachability};
use health_model::duration::duration_text;
use tokio::time::{Instant, sleep};

use super::view::{Tally, View};
use crate::exit::{NOT_KNOWN, WRONG};
use crate::output::printable;

/// Pause between two looks at an agent that is not ready.
const PAUSE: Duration = Duration::from_millis(200);

/// Whether all is well with the agent and the nodes shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Well,
    Wrong,
    /// Nothing is known to be wrong, but not everything is known yet.
    Unknown,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Well => Self::SUCCESS,
            Verdict::Wrong => Self::from(WRONG),
            Verdict::Unknown => Self::from(NOT_KNOWN),
        }
    }
}

/// The verdict on the agent and the nodes shown, and a line that explains it.
pub(super) fn brief(view: &View, agent: &AgentReport) -> (Verdict, String) {
    let tally: Tally = view.nodes.iter().map(|node| node.reachability()).collect();
    let headline = tally.headline();
    if let Some(starting) = &agent.starting {
        return (
            Verdict::Unknown,
            format!("Unknown: {}\n", printable(starting)),
        );
    }
    let is_well = agent.state.state == "Ok";
    if !is_well || view.has_unreachable() {
        let reason = if is_well {
            String::new()
        } else {
            format!("; {}", printable(&agent.state.msg))
        };
        return (Verdict::Wrong, format!("Failing: {headline}{reason}\n"));
    }
    match lacking(view.status, agent) {
        Some(lacking) => (Verdict::Unknown, format!("Unknown: {lacking}\n")),
        None => (Verdict::Well, format!("Ok: {headline}\n")),
    }
}

/// What the agent does not know yet: registries that it never read, nodes that it has not probed. A mesh that is known
/// to be empty lacks nothing.
fn lacking(status: &HealthStatus, agent: &AgentReport) -> Option<String> {
    let stale = agent.registries.iter().find_map(|registry| {
        let reason = registry.stale.as_ref()?;
        Some(format!("{}: {reason}", registry.registry))
    });
    if status.nodes.is_empty() && (stale.is_some() || agent.registries.is_empty()) {
        let reason = stale.unwrap_or_else(|| "no registry was read yet".to_owned());
        return Some(printable(&reason).into_owned());
    }
    let nodes = status.nodes.iter();
    let unknown = nodes.filter(|node| node.reachability() == Reachability::Unknown);
    match unknown.count() {
        0 => None,
        count => Some(format!(
            "{count} of {} nodes not probed yet",
            status.nodes.len()
        )),
    }
}

/// What an agent lacks until it is ready: it has started, has no failing check, reads its registries, and has probed
/// every node.
fn awaited(status: &HealthStatus, agent: &AgentReport) -> Option<String> {
    if let Some(starting) = &agent.starting {
        return Some(starting.clone());
    }
    if agent.state.state == "Failure" {
        return Some(agent.state.msg.clone());
    }
    let mut registries = agent.registries.iter();
    let stale = registries.find_map(|registry| {
        let reason = registry.stale.as_ref()?;
        Some(format!("{}: {reason}", registry.registry))
    });
    stale.or_else(|| lacking(status, agent))
}

/// Waits until the agent is ready, and says on stderr what it waits for. Fails after `limit`.
pub(super) async fn wait(client: &Client, limit: Duration) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut said = None;
    loop {
        let missing = match look(client).await {
            Ok((status, agent)) => awaited(&status, &agent),
            Err(error) => Some(error.to_string()),
        };
        let Some(missing) = missing else {
            return Ok(());
        };
        anyhow::ensure!(
            begun.elapsed() < limit,
            "not ready after {}: {missing}",
            duration_text(limit)
        );
        if said.as_ref() != Some(&missing) {
            eprintln!("waiting: {}", printable(&missing));
            said = Some(missing);
        }
        sleep(PAUSE).await;
    }
}

async fn look(client: &Client) -> Result<(HealthStatus, AgentReport), ClientError> {
    let agent = client.get("/v1/agent").await?;
    Ok((client.get("/v1beta/status").await?, agent))
}

#[cfg(test)]
mod tests {
    use health_model::api::{AgentState, RegistryState};

    use super::super::fixture;
    use super::super::view::Filter;
    use super::*;

    fn agent(state: &str, stale: Option<&str>) -> AgentReport {
        AgentReport {
            state: AgentState {
                state: state.into(),
                msg: "datapath: no device".into(),
            },
            starting: None,
            version: String::new(),
            uptime: String::new(),
            kernel: String::new(),
            registries: vec![RegistryState {
                registry: "etcd:http://192.0.2.1:2379".into(),
                cluster: "default".into(),
                last_read: "2026-11-21T03:00:00Z".parse().unwrap(),
                stale: stale.map(str::to_owned),
                stale_since: None,
                rejected: vec![],
            }],
            programs: vec![],
            programs_error: None,
            controllers: vec![],
        }
    }

    fn verdict_of(status: &HealthStatus, agent: &AgentReport) -> (Verdict, String) {
        brief(&Filter::default().apply(status).unwrap(), agent)
    }

    #[test]
    fn an_empty_mesh_is_fine_only_once_its_registry_was_read() {
        let empty = HealthStatus {
            nodes: vec![],
            ..fixture::status()
        };
        let read = verdict_of(&empty, &agent("Ok", None));
        assert_eq!(read, (Verdict::Well, "Ok: 0/0 reachable\n".into()));
        let unread = verdict_of(&empty, &agent("Ok", Some("not connected yet")));
        let line = "Unknown: etcd:http://192.0.2.1:2379: not connected yet\n";
        assert_eq!(unread, (Verdict::Unknown, line.into()));
        let starting = AgentReport {
            starting: Some("the agent is starting".into()),
            ..agent("Warning", None)
        };
        let line = "Unknown: the agent is starting\n";
        assert_eq!(
            verdict_of(&empty, &starting),
            (Verdict::Unknown, line.into())
        );
    }

    #[test]
    fn what_is_known_to_be_wrong_outweighs_what_is_not_known() {
        let mut status = fixture::status();
        let (verdict, line) = verdict_of(&status, &agent("Ok", None));
        assert_eq!(verdict, Verdict::Wrong, "{line}");
        status.nodes.remove(0);
        let line = "Unknown: 1 of 2 nodes not probed yet\n";
        assert_eq!(
            verdict_of(&status, &agent("Ok", None)),
            (Verdict::Unknown, line.into())
        );
        let line = "Failing: 1/2 reachable, 1 unknown; datapath: no device\n";
        assert_eq!(
            verdict_of(&status, &agent("Failure", None)),
            (Verdict::Wrong, line.into())
        );
        status.nodes.pop();
        let line = "Ok: 1/1 reachable\n";
        assert_eq!(
            verdict_of(&status, &agent("Ok", None)),
            (Verdict::Well, line.into())
        );
    }

    #[test]
    fn readiness_needs_checks_registries_and_probes() {
        let mut status = fixture::status();
        let awaited = |status: &HealthStatus, agent| awaited(status, &agent);
        let missing = awaited(&status, agent("Ok", None)).unwrap();
        assert_eq!(missing, "1 of 3 nodes not probed yet");
        status.nodes.retain(|node| node.name == "default/hnode2");
        assert_eq!(awaited(&status, agent("Warning", None)), None);
        let missing = awaited(&status, agent("Failure", None)).unwrap();
        assert_eq!(missing, "datapath: no device");
        let missing = awaited(&status, agent("Ok", Some("refused"))).unwrap();
        assert_eq!(missing, "etcd:http://192.0.2.1:2379: refused");
    }
}
