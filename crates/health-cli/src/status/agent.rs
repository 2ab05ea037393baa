//! The agent's own part of the report: its state, registries, programs and controllers, and the addresses it assigned.

use std::collections::BTreeSet;

use health_model::api::{
    AgentReport, ControllerStatus, HealthStatus, ProgramStatus, RegistryState, TakenAddress,
};
use jiff::Timestamp;
use serde::Serialize;

use crate::node::registries;
use crate::output::{NONE, comma_separated, indent, printable, table};

/// Maximum number of devices that the line about the programs names.
const SHOWN_DEVICES: usize = 8;

/// The parts of the report that concern only the agent.
#[derive(Debug)]
pub(super) struct OwnReport {
    pub(super) agent: AgentReport,
    /// The assigned addresses, or why there are none; `None` if they were not requested.
    pub(super) addresses: Option<Result<Vec<TakenAddress>, String>>,
    /// Whether the text lists all controllers instead of the failing ones.
    pub(super) has_all_controllers: bool,
}

/// The whole report as JSON.
#[derive(Serialize)]
pub(super) struct WholeReport<'a> {
    #[serde(flatten)]
    pub(super) status: &'a HealthStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<&'a AgentReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    addresses: Option<&'a [TakenAddress]>,
}

impl<'a> WholeReport<'a> {
    /// Joins the report about the nodes with that about the agent, if that is needed.
    pub(super) fn new(status: &'a HealthStatus, own: Option<&'a OwnReport>) -> Self {
        let addresses = own.and_then(|own| own.addresses.as_ref());
        Self {
            status,
            agent: own.map(|own| &own.agent),
            addresses: addresses.map(|found| found.as_deref().unwrap_or_default()),
        }
    }
}

impl OwnReport {
    /// The lines of the text; with every attachment of the programs if `verbose`.
    pub(super) fn text(&self, verbose: bool, now: Timestamp) -> String {
        let AgentReport {
            state,
            version,
            uptime,
            kernel,
            registries,
            programs,
            programs_error,
            controllers,
            starting,
        } = &self.agent;
        let state = starting.as_ref().unwrap_or(&state.state);
        let mut text = format!(
            "Agent:   {}, version {version}, up {uptime}\nKernel:   {}\n",
            printable(state),
            printable(kernel)
        );
        text += &registry_lines(registries, now);
        text += &program_lines(programs, programs_error.as_deref(), verbose);
        text += &self.controller_lines(controllers, now);
        text + &self.address_lines()
    }

    fn controller_lines(&self, all: &[ControllerStatus], now: Timestamp) -> String {
        let is_failing = |one: &&ControllerStatus| one.consecutive_failures > 0;
        let failing = all.iter().filter(is_failing).count();
        let mut text = format!("Controllers:   {}, {failing} failing\n", all.len());
        let shown = all
            .iter()
            .filter(|one| self.has_all_controllers || is_failing(one));
        let rows: Vec<_> = shown.map(|one| controller_row(one, now)).collect();
        if !rows.is_empty() {
            let header = [
                "NAME",
                "INTERVAL",
                "LAST SUCCESS",
                "LAST FAILURE",
                "SUCCESSES",
                "FAILURES",
                "IN A ROW",
                "LAST ERROR",
            ];
            text += &indent(2, &table(header, rows));
        }
        text
    }

    fn address_lines(&self) -> String {
        match &self.addresses {
            None => String::new(),
            Some(Err(reason)) => format!("Addresses:   none ({})\n", printable(reason)),
            Some(Ok(addresses)) => {
                let rows = addresses.iter().map(|taken| {
                    [
                        taken.address.to_string(),
                        taken.endpoint.to_string(),
                        taken.name.clone(),
                    ]
                });
                let table = table(["ADDRESS", "ENDPOINT", "NAME"], rows);
                format!("Addresses:   {}\n{}", addresses.len(), indent(2, &table))
            }
        }
    }
}

/// `Registries:` and one line for each: `file:/etc/nodes.yaml (cluster default):   ok, read 1s ago`.
fn registry_lines(registries: &[RegistryState], now: Timestamp) -> String {
    if registries.is_empty() {
        return "Registries:   not read yet\n".to_owned();
    }
    let lines = registries.iter().map(|one| {
        let RegistryState {
            registry, cluster, ..
        } = one;
        let age = registries::age(one.last_read, now);
        let left_out = match one.rejected.len() {
            0 => String::new(),
            count => format!(", {count} left out"),
        };
        let state = match &one.stale {
            Some(reason) => format!("stale, read {age} ago{left_out}: {}", printable(reason)),
            None => format!("ok, read {age} ago{left_out}"),
        };
        let registry = printable(registry);
        format!("  {registry} (cluster {}):   {state}\n", printable(cluster))
    });
    format!("Registries:\n{}", lines.collect::<String>())
}

/// `Programs:   21 loaded, attached to eth0, lxc_health`; with a table of the programs if `verbose`.
fn program_lines(programs: &[ProgramStatus], error: Option<&str>, verbose: bool) -> String {
    if let Some(reason) = error {
        return format!("Programs:   unreadable ({})\n", printable(reason));
    }
    let attached = programs.iter().flat_map(|program| &program.attached);
    let devices: BTreeSet<&str> = attached
        .map(|hook| {
            hook.rsplit_once('/')
                .map_or(hook.as_str(), |(device, _)| device)
        })
        .collect();
    let shown: Vec<&str> = devices.iter().copied().take(SHOWN_DEVICES).collect();
    let more = match devices.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let places = if shown.is_empty() {
        "nothing".to_owned()
    } else {
        shown.join(", ")
    };
    let mut text = format!(
        "Programs:   {} loaded, attached to {}{more}\n",
        programs.len(),
        printable(&places)
    );
    if verbose {
        let rows = programs
            .iter()
            .map(|program| [program.name.clone(), comma_separated(&program.attached)]);
        text += &indent(2, &table(["NAME", "ATTACHED"], rows));
    }
    text
}

fn controller_row(one: &ControllerStatus, now: Timestamp) -> [String; 8] {
    let ago = |time: Option<Timestamp>| {
        let text = time.map(|time| format!("{} ago", registries::age(time, now)));
        text.unwrap_or_else(|| "never".to_owned())
    };
    let none = || NONE.to_owned();
    [
        one.name.clone(),
        one.interval.clone().unwrap_or_else(none),
        ago(one.last_success),
        ago(one.last_failure),
        one.successes.to_string(),
        one.failures.to_string(),
        one.consecutive_failures.to_string(),
        one.last_error.clone().unwrap_or_else(none),
    ]
}

#[cfg(test)]
mod tests {
    use health_model::api::AgentState;

    use super::*;

    fn controller(name: &str, consecutive_failures: u64) -> ControllerStatus {
        ControllerStatus {
            name: name.into(),
            interval: None,
            successes: 4,
            failures: consecutive_failures,
            consecutive_failures,
            last_success: Some("2026-11-21T03:00:00Z".parse().unwrap()),
            last_failure: None,
            last_error: (consecutive_failures > 0).then(|| "connection refused".into()),
        }
    }

    fn report() -> OwnReport {
        OwnReport {
            agent: AgentReport {
                state: AgentState {
                    state: "Ok".into(),
                    msg: String::new(),
                },
                starting: None,
                version: "0.1.0".into(),
                uptime: "1m1s".into(),
                kernel: "6.12.0".into(),
                registries: vec![RegistryState {
                    registry: "etcd:http://192.0.2.1:2379".into(),
                    cluster: "west".into(),
                    last_read: "2026-11-21T03:00:00Z".parse().unwrap(),
                    stale: None,
                    stale_since: None,
                    rejected: vec![],
                }],
                programs: vec![
                    ProgramStatus {
                        name: "ct_collect".into(),
                        attached: vec![],
                    },
                    ProgramStatus {
                        name: "to_netdev".into(),
                        attached: vec!["eth0/egress".into(), "eth1/egress".into()],
                    },
                ],
                programs_error: None,
                controllers: vec![controller("node-registry", 3), controller("routes", 0)],
            },
            addresses: None,
            has_all_controllers: false,
        }
    }

    fn now() -> Timestamp {
        "2026-11-21T03:00:05Z".parse().unwrap()
    }

    #[test]
    fn registries_programs_and_failing_controllers_are_shown() {
        assert_eq!(
            report().text(false, now()),
            "\
Agent:   Ok, version 0.1.0, up 1m1s
Kernel:   6.12.0
Registries:
  etcd:http://192.0.2.1:2379 (cluster west):   ok, read 5s ago
Programs:   2 loaded, attached to eth0, eth1
Controllers:   2, 1 failing
  NAME            INTERVAL   LAST SUCCESS   LAST FAILURE   SUCCESSES   FAILURES   IN A ROW   LAST ERROR
  node-registry   -          5s ago         never          4           3          3          connection refused
"
        );
    }

    #[test]
    fn all_controllers_all_attachments_and_all_addresses_are_shown_on_request() {
        let report = OwnReport {
            addresses: Some(Ok(vec![TakenAddress {
                address: "10.244.1.7".parse().unwrap(),
                endpoint: 1017,
                name: "health".into(),
            }])),
            has_all_controllers: true,
            ..report()
        };
        let text = report.text(true, now());
        assert!(
            text.contains("  to_netdev    eth0/egress,eth1/egress\n"),
            "{text}"
        );
        assert!(
            text.contains("  routes          -          5s ago "),
            "{text}"
        );
        let addresses =
            "Addresses:   1\n  ADDRESS      ENDPOINT   NAME\n  10.244.1.7   1017       health\n";
        assert!(text.ends_with(addresses), "{text}");
    }
}
