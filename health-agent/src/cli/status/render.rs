//! The connectivity report as text, worded like Cilium's.

use std::fmt::{self, Write};
use std::time::Duration;

use health_model::api::{
    AddressGroupStatus, AgentProblem, ConnectivityStatus, Diagnosis, FullMap, HealthStatus,
    LargerPackets, NodeStatus, PathKind, PathMtuStatus, PathStatus, PolicyLag, Protocol,
    Reachability, RttSource,
};
use health_model::duration::{duration_text, go_duration, parse_duration};

use super::figures::Figures;
use super::view::{Changes, Tally, Target, View};
use crate::cli::output::{NONE, comma_separated, indent, table};
use crate::cli::path_mtu::larger as larger_packets;

const NOT_KNOWN: &str = "Unknown (not probed yet)";
/// What is not probed on purpose.
const SWITCHED_OFF: &str = "Not probed";
/// What is left of a report in which the failing nodes alone are asked for, and none is.
const NONE_FAILING: &str = "none is failing";
/// In front of what changed.
const CHANGED: char = '*';

/// How much the full report says.
pub(crate) enum Detail {
    /// Primary addresses, and whatever is unhealthy.
    Normal,
    /// Everything, the figures included.
    Verbose(Figures),
}

/// The report with a block for each address. What is in `changes` is marked.
pub(super) fn full(view: &View, detail: &Detail, changes: Option<&Changes>) -> String {
    let mut text = String::new();
    let mut report = Report {
        status: view.status,
        detail,
        changes,
        out: &mut text,
    };
    // Writing to a string cannot fail.
    let _ = report.write(view);
    text
}

/// What the full report says about one node.
pub(crate) fn node(status: &HealthStatus, node: &NodeStatus, detail: &Detail) -> String {
    let mut text = String::new();
    let mut report = Report {
        status,
        detail,
        changes: None,
        out: &mut text,
    };
    // Writing to a string cannot fail.
    let _ = report.node(node);
    text
}

/// The report with a line for each node; with counts of addresses when `verbose`. What is in
/// `changes` is marked.
pub(super) fn succinct(view: &View, verbose: bool, changes: Option<&Changes>) -> String {
    let status = view.status;
    let has_diagnosis = view.nodes.iter().any(|node| node.diagnosis.is_some());
    let rows = view.nodes.iter().map(|node| {
        let cells = if verbose { counts(node) } else { words(node) };
        let cause = node.diagnosis.as_ref().map(|d| d.cause.as_str());
        let mut row = vec![display_name(status, node)];
        row.extend(cells);
        row.extend(has_diagnosis.then(|| cause.unwrap_or(NONE).to_owned()));
        row
    });
    let mut header = vec!["Name", "IP", "Node", "Endpoints"];
    header.extend(has_diagnosis.then_some("Diagnosis"));
    let marks = view.nodes.iter().map(|node| {
        let is_changed = changes.is_some_and(|changes| changes.has_node(&node.name));
        mark(is_changed)
    });

    let mut text = format!(
        "Cluster health:   {}   ({})\n",
        Tally::of_nodes(status).headline(),
        probe_time(status)
    );
    if let Some(diagnosis) = &status.local.diagnosis {
        text += &local_fault(diagnosis);
    }
    text += public_mesh_key(status);
    text += &hosts_only(status);
    text += &full_maps(status);
    text += &policy_lag(status);
    text += &agent_problems(status);
    if view.has_none_of_many() {
        text += &format!("  {NONE_FAILING}\n");
    } else {
        let table = table(header, rows);
        for (line, mark) in table.lines().zip([' '].into_iter().chain(marks)) {
            text += &format!("{mark} {line}\n");
        }
    }
    for name in changes.iter().flat_map(|changes| &changes.gone) {
        text += &format!("{CHANGED} {name}   gone\n");
    }
    text
}

/// Addresses, and what is known of the node and its health endpoint.
fn words(node: &NodeStatus) -> [String; 3] {
    let endpoint = node.endpoint_reachability();
    [
        node.host.primary_address.ip.to_string(),
        word(node.host.reachability()).to_owned(),
        endpoint.map_or(NONE, word).to_owned(),
    ]
}

/// All addresses, and how many of them are reachable.
fn counts(node: &NodeStatus) -> [String; 3] {
    let endpoint = match &node.health_endpoint {
        None if node.hosts_only => NONE.to_owned(),
        None => Tally::default().to_string(),
        Some(endpoint) => Tally::of_addresses(endpoint).to_string(),
    };
    [
        comma_separated(node.host.paths().map(|path| path.ip)),
        Tally::of_addresses(&node.host).to_string(),
        endpoint,
    ]
}

struct Report<'a> {
    status: &'a HealthStatus,
    detail: &'a Detail,
    changes: Option<&'a Changes<'a>>,
    out: &'a mut String,
}

impl Report<'_> {
    fn write(&mut self, view: &View) -> fmt::Result {
        let status = self.status;
        writeln!(self.out, "Probe time:   {}", probe_time(status))?;
        writeln!(
            self.out,
            "Cluster health:   {}   ({})",
            Tally::of_nodes(status).headline(),
            interval(status)
        )?;
        if let Some(diagnosis) = &status.local.diagnosis {
            self.out.push_str(&local_fault(diagnosis));
            self.evidence(2, diagnosis)?;
        }
        self.out.push_str(public_mesh_key(status));
        self.out.push_str(&hosts_only(status));
        self.out.push_str(&full_maps(status));
        self.out.push_str(&policy_lag(status));
        self.out.push_str(&agent_problems(status));
        if let Detail::Verbose(Figures {
            rtt: Err(reason), ..
        }) = self.detail
        {
            writeln!(self.out, "RTT statistics:   not readable ({reason})")?;
        }
        match view.has_none_of_many() {
            true => writeln!(self.out, "Nodes:   {NONE_FAILING}")?,
            false => writeln!(self.out, "Nodes:")?,
        }
        view.nodes.iter().try_for_each(|node| self.node(node))?;
        for name in self.changes.iter().flat_map(|changes| &changes.gone) {
            writeln!(self.out, "{CHANGED} {name}: gone")?;
        }
        Ok(())
    }

    fn node(&mut self, node: &NodeStatus) -> fmt::Result {
        let is_changed = self
            .changes
            .is_some_and(|changes| changes.has_node(&node.name));
        let mark = mark(is_changed);
        writeln!(self.out, "{mark} {}:", display_name(self.status, node))?;
        if let Some(diagnosis) = &node.diagnosis {
            writeln!(self.out, "    Diagnosis:   {}", diagnosis.message)?;
            self.evidence(6, diagnosis)?;
        }
        self.group(node, &node.host, PathKind::Host, ["Host", "Secondary"])?;
        match &node.health_endpoint {
            Some(endpoint) => {
                let titles = ["Endpoint", "Secondary endpoint"];
                self.group(node, endpoint, PathKind::Endpoint, titles)
            }
            None if node.hosts_only => {
                writeln!(self.out, "    Endpoint connectivity:   {SWITCHED_OFF}")
            }
            None => writeln!(
                self.out,
                "    Endpoint connectivity:   Unknown (address not known yet)"
            ),
        }
    }

    fn evidence(&mut self, spaces: usize, diagnosis: &Diagnosis) -> fmt::Result {
        if matches!(self.detail, Detail::Verbose(_)) {
            for fact in &diagnosis.evidence {
                writeln!(self.out, "{:spaces$}- {fact}", "")?;
            }
        }
        Ok(())
    }

    fn group(
        &mut self,
        node: &NodeStatus,
        group: &AddressGroupStatus,
        kind: PathKind,
        [primary, secondary]: [&str; 2],
    ) -> fmt::Result {
        self.address(node, &group.primary_address, kind, primary)?;
        for address in &group.secondary_addresses {
            let shown = matches!(self.detail, Detail::Verbose(_))
                || matches!(
                    address.reachability(),
                    Reachability::Unreachable | Reachability::Degraded
                );
            if shown {
                self.address(node, address, kind, secondary)?;
            }
        }
        Ok(())
    }

    fn address(
        &mut self,
        node: &NodeStatus,
        address: &PathStatus,
        kind: PathKind,
        title: &str,
    ) -> fmt::Result {
        writeln!(self.out, "    {title} connectivity to {}:", address.ip)?;
        for (label, protocol, result) in [
            ("ICMP to stack", Protocol::Icmp, &address.icmp),
            ("HTTP to agent", Protocol::Http, &address.http),
        ] {
            let target: Target = (address.ip, kind, protocol);
            let is_changed = self
                .changes
                .is_some_and(|changes| changes.has_target(&node.name, target));
            let text = match result {
                _ if address.off.contains(&protocol) => SWITCHED_OFF.to_owned(),
                None => NOT_KNOWN.to_owned(),
                Some(result) => self.result(result),
            };
            writeln!(self.out, "    {} {label}:   {text}", mark(is_changed))?;
            if let Detail::Verbose(figures) = self.detail {
                let lines = figures.lines(&node.name, target).join("\n");
                self.out.push_str(&indent(8, &lines));
            }
        }
        if let (Detail::Verbose(figures), PathKind::Host) = (self.detail, kind)
            && let Some(seen) = figures.path_mtus.get(&address.ip)
        {
            writeln!(self.out, "      {}", path_mtu(seen))?;
        }
        Ok(())
    }

    fn result(&self, result: &ConnectivityStatus) -> String {
        let mut text = if result.is_ok() {
            format!("OK, RTT={}", go_duration(result.latency))
        } else {
            result.status.clone()
        };
        if let (true, Some(reason)) = (result.is_ok(), &result.degraded) {
            text += &format!(", degraded: {reason}");
        }
        if matches!(self.detail, Detail::Verbose(_)) {
            text += &origin(result);
            text += &times(result);
        }
        text
    }
}

/// Where the round trip was stamped, and when connection and answer were there.
fn origin(result: &ConnectivityStatus) -> String {
    let source = result.rtt_source.map(|source| match source {
        RttSource::Kernel => "kernel".to_owned(),
        RttSource::Socket => "socket".to_owned(),
    });
    let connect = result
        .connect_latency
        .map(|ns| format!("connected in {}", go_duration(ns)));
    let total = result
        .total_latency
        .map(|ns| format!("answered in {}", go_duration(ns)));
    let notes: Vec<String> = source.into_iter().chain(connect).chain(total).collect();
    if notes.is_empty() || !result.is_ok() {
        String::new()
    } else {
        format!(" ({})", notes.join(", "))
    }
}

/// When it was probed, and since when it is like that.
fn times(result: &ConnectivityStatus) -> String {
    let mut text = format!("   (Last probed: {:.0}", result.last_probed);
    if let Some(at) = result.last_change {
        text += &format!(", unchanged since {at:.0}");
    }
    if result.consecutive_failures > 0 {
        text += &format!(
            ", probes without an answer: {}",
            result.consecutive_failures
        );
    }
    text.push(')');
    text
}

/// `Path MTU:   1400, larger packets vanish; eth0: 1500   (Last probed: ...)`.
fn path_mtu(seen: &PathMtuStatus) -> String {
    let larger = match seen.larger {
        LargerPackets::None => String::new(),
        _ => format!(", larger packets {}", larger_packets(seen)),
    };
    format!(
        "Path MTU:   {}{larger}; {}: {}   (Last probed: {:.0})",
        seen.mtu, seen.device, seen.local_mtu, seen.last_probed
    )
}

fn probe_time(status: &HealthStatus) -> String {
    match status.timestamp {
        Some(at) => format!("{at:.0}"),
        None => NOT_KNOWN.to_owned(),
    }
}

/// How often is probed, and why that is not what was set.
fn interval(status: &HealthStatus) -> String {
    let interval = readable(&status.probe_interval);
    match &status.configured_interval {
        Some(set) => {
            format!("Probe interval: {interval}, set: {set}; limited by the probe rate")
        }
        None => format!("Probe interval: {interval}"),
    }
}

/// An interval without the digits that the probe rate brings about: to a thousandth of its unit.
fn readable(interval: &str) -> String {
    let Ok(exact) = parse_duration(interval) else {
        return interval.to_owned();
    };
    let unit = if exact < Duration::from_secs(1) {
        Duration::from_micros(1)
    } else {
        Duration::from_millis(1)
    };
    let units = (exact + unit / 2).as_nanos() / unit.as_nanos();
    duration_text(unit * u32::try_from(units).unwrap_or(u32::MAX))
}

fn local_fault(diagnosis: &Diagnosis) -> String {
    format!("Fault of this node:   {}\n", diagnosis.message)
}

/// A warning if everybody knows the mesh key.
fn public_mesh_key(status: &HealthStatus) -> &'static str {
    if status.local.public_mesh_key {
        "Mesh key:   the public default, anyone can answer for a peer (see --mesh-key-file)\n"
    } else {
        ""
    }
}

/// `Health endpoints:   not probed, this node has no pod CIDR`, if that is so.
fn hosts_only(status: &HealthStatus) -> String {
    match &status.local.hosts_only_reason {
        Some(why) => format!("Health endpoints:   not probed, {why}\n"),
        None => String::new(),
    }
}

/// `Nearly full maps:   HEALTH_CT4 (60000 of 65536 entries)`, if there are any.
fn full_maps(status: &HealthStatus) -> String {
    let maps = &status.local.full_maps;
    if maps.is_empty() {
        return String::new();
    }
    let shown: Vec<String> = maps.iter().map(full_map).collect();
    format!("Nearly full maps:   {}\n", shown.join(", "))
}

/// `Policy:   not in force for 2 endpoints: WHY`, if there are any.
fn policy_lag(status: &HealthStatus) -> String {
    let lag = status.local.policy_lag.as_ref();
    lag.map_or_else(String::new, |PolicyLag { endpoints, reason }| {
        let plural = if *endpoints == 1 { "" } else { "s" };
        format!("Policy:   not in force for {endpoints} endpoint{plural}: {reason}\n")
    })
}

/// `Agent warning:   registry: WHY`, a line for each check that is not in order.
fn agent_problems(status: &HealthStatus) -> String {
    // That has a line of its own, which says more.
    let has_lag = status.local.policy_lag.is_some();
    let is_lag = |one: &AgentProblem| has_lag && one.check == "policy" && !one.is_failure;
    let problems = status.local.problems.iter();
    let problems = problems.filter(|problem| !is_lag(problem));
    let lines = problems.map(|problem| {
        let AgentProblem {
            check,
            is_failure,
            message,
        } = problem;
        let what = if *is_failure { "failure" } else { "warning" };
        format!("Agent {what}:   {check}: {message}\n")
    });
    lines.collect()
}

fn full_map(full: &FullMap) -> String {
    let FullMap {
        map,
        entries,
        capacity,
    } = full;
    format!("{map} ({entries} of {capacity} entries)")
}

fn mark(is_changed: bool) -> char {
    if is_changed { CHANGED } else { ' ' }
}

fn display_name(status: &HealthStatus, node: &NodeStatus) -> String {
    let local = if node.name == status.local.name {
        " (localhost)"
    } else {
        ""
    };
    format!("{}{local}", node.name)
}

pub(crate) fn word(reachability: Reachability) -> &'static str {
    match reachability {
        Reachability::Reachable => "reachable",
        Reachability::Degraded => "degraded",
        Reachability::Unreachable => "unreachable",
        Reachability::Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::IpAddr;

    use health_common::probe::Path;
    use health_common::rtt::{PROTOCOL_ICMP, Reply, RttKey, RttRow, SOURCE_KERNEL, bucket};
    use health_model::api::{HistoryWindow, TargetHistory};

    use super::*;
    use crate::cli::status::figures::RttRows;
    use crate::cli::status::fixture::{degraded, failed, status};
    use crate::cli::status::view::Filter;

    /// Everything, with nothing marked.
    fn all(status: &HealthStatus) -> View<'_> {
        Filter::default().apply(status).unwrap()
    }

    fn diagnosis() -> Option<Diagnosis> {
        Some(Diagnosis {
            cause: "agent-down".into(),
            message: "agent down: the node answers".into(),
            evidence: vec!["ICMP is answered".into(), "HTTP: connection refused".into()],
        })
    }

    fn figures() -> Figures {
        Figures {
            rtt: Ok(RttRows::new()),
            history: BTreeMap::new(),
            last_results: 0,
            path_mtus: BTreeMap::new(),
        }
    }

    #[test]
    fn maps_that_are_nearly_full_have_a_line() {
        let mut status = status();
        status.local.full_maps = ["HEALTH_CT4", "HEALTH_NAT4"]
            .map(|map| FullMap {
                map: map.into(),
                entries: 60_000,
                capacity: 65_536,
            })
            .into();
        let line = "Nearly full maps:   HEALTH_CT4 (60000 of 65536 entries), \
                    HEALTH_NAT4 (60000 of 65536 entries)\n";
        let view = all(&status);
        assert!(full(&view, &Detail::Normal, None).contains(line));
        assert!(succinct(&view, false, None).contains(line));
    }

    #[test]
    fn policy_that_is_not_in_force_has_a_line() {
        let mut status = status();
        status.local.policy_lag = Some(PolicyLag {
            endpoints: 2,
            reason: "there is no room".into(),
        });
        let line = "Policy:   not in force for 2 endpoints: there is no room\n";
        let view = all(&status);
        assert!(full(&view, &Detail::Normal, None).contains(line));
        assert!(succinct(&view, false, None).contains(line));
    }

    #[test]
    fn what_is_not_in_order_with_the_agent_has_a_line_each() {
        let mut status = status();
        status.local.problems = [("registry", false), ("routes", true)]
            .map(|(check, is_failure)| AgentProblem {
                check: check.into(),
                is_failure,
                message: "why".into(),
            })
            .into();
        let lines = "Agent warning:   registry: why\nAgent failure:   routes: why\n";
        let view = all(&status);
        assert!(full(&view, &Detail::Normal, None).contains(lines));
        assert!(succinct(&view, false, None).contains(lines));
    }

    #[test]
    fn a_mesh_key_that_everybody_knows_has_a_line() {
        let mut status = status();
        let line = "Mesh key:   the public default, anyone can answer for a peer";
        let shown = |status: &HealthStatus| {
            let view = all(status);
            [
                full(&view, &Detail::Normal, None),
                succinct(&view, false, None),
            ]
        };
        assert!(shown(&status).iter().all(|text| !text.contains("Mesh key")));
        status.local.public_mesh_key = true;
        assert!(shown(&status).iter().all(|text| text.contains(line)));
    }

    #[test]
    fn a_node_that_is_probed_at_its_host_alone_is_not_unknown() {
        let mut status = status();
        status.local.hosts_only_reason = Some("this node has no pod CIDR".to_owned());
        for node in &mut status.nodes {
            node.health_endpoint = None;
            node.hosts_only = true;
        }
        let told = "Health endpoints:   not probed, this node has no pod CIDR\n";
        let text = full(&all(&status), &Detail::Normal, None);
        assert!(text.contains(told), "{text}");
        assert_eq!(
            text.matches("    Endpoint connectivity:   Not probed\n")
                .count(),
            3
        );
        for verbose in [false, true] {
            let text = succinct(&all(&status), verbose, None);
            assert!(text.contains(told), "{text}");
            let of_local = text.lines().find(|line| line.contains("hnode2"));
            assert!(of_local.unwrap().trim_end().ends_with(NONE), "{text}");
        }
        assert_eq!(status.nodes[1].reachability(), Reachability::Reachable);
    }

    #[test]
    fn the_local_node_comes_first_and_unhealthy_secondaries_show() {
        assert_eq!(
            full(&all(&status()), &Detail::Normal, None),
            "\
Probe time:   2026-11-21T03:00:00Z
Cluster health:   1/3 reachable, 1 unknown   (Probe interval: 10s)
Nodes:
  default/hnode2 (localhost):
    Host connectivity to 172.30.0.2:
      ICMP to stack:   OK, RTT=1µs
      HTTP to agent:   OK, RTT=2µs
    Endpoint connectivity to 10.244.2.7:
      ICMP to stack:   OK, RTT=5µs
      HTTP to agent:   OK, RTT=6µs
  default/hnode1:
    Host connectivity to 172.30.0.1:
      ICMP to stack:   OK, RTT=21.3µs
      HTTP to agent:   OK, RTT=405.072µs
    Secondary connectivity to fd00:30::1:
      ICMP to stack:   Connection timed out
      HTTP to agent:   OK, RTT=1ns
    Endpoint connectivity:   Unknown (address not known yet)
  default/hnode3:
    Host connectivity to 172.30.0.3:
      ICMP to stack:   OK, RTT=7µs
      HTTP to agent:   Unknown (not probed yet)
    Endpoint connectivity to 10.244.3.7:
      ICMP to stack:   Unknown (not probed yet)
      HTTP to agent:   Unknown (not probed yet)
"
        );
    }

    #[test]
    fn verbose_adds_times_sources_and_statistics() {
        let mut status = status();
        status.nodes.drain(..1);
        status.nodes.truncate(1);
        let host = &mut status.nodes[0].host.primary_address;
        if let Some(icmp) = &mut host.icmp {
            icmp.rtt_source = Some(RttSource::Kernel);
            icmp.last_change = "2026-11-20T07:00:00Z".parse().ok();
        }
        if let Some(http) = &mut host.http {
            http.rtt_source = Some(RttSource::Socket);
            http.connect_latency = Some(900);
        }
        let secondary = &mut status.nodes[0].host.secondary_addresses[0];
        secondary.icmp = failed("Connection timed out").map(|result| ConnectivityStatus {
            consecutive_failures: 7,
            last_change: "2026-11-21T02:59:30Z".parse().ok(),
            degraded: None,
            ..result
        });
        let mut row = RttRow::EMPTY;
        row.record(1_000, 1, 1, SOURCE_KERNEL);
        let reply = Reply {
            remote_ns: 600,
            ..Reply::new(3_000)
        };
        assert!(row.record_reply(bucket(reply.rtt_ns), &reply, 2, 2, SOURCE_KERNEL));
        row.lost = 1;
        let ip: IpAddr = "172.30.0.2".parse().unwrap();
        let key = RttKey {
            peer: ip.into(),
            path: Path::Host as u8,
            protocol: PROTOCOL_ICMP,
            pad: 0,
        };
        let history = TargetHistory {
            node: "default/hnode2".into(),
            ip,
            path: PathKind::Host,
            protocol: Protocol::Icmp,
            windows: vec![HistoryWindow {
                length_ns: 60_000_000_000,
                covered_ns: 60_000_000_000,
                probes: 6,
                lost: 0,
                p50_ns: Some(1_000),
                p90_ns: None,
                p99_ns: None,
                max_ns: Some(3_000),
                jitter_ns: None,
            }],
            last_results_ns: vec![Some(1_000), None],
        };
        let seen = |mtu, larger| PathMtuStatus {
            mtu,
            local_mtu: 1500,
            device: "eth0".into(),
            larger,
            rejected_by: (mtu < 1500).then(|| "10.0.0.9".parse().unwrap()),
            last_probed: "2026-11-21T02:50:00.7Z".parse().unwrap(),
        };
        let figures_of_one = Figures {
            rtt: Ok([(key, row)].into()),
            history: [("default/hnode2".to_owned(), vec![history])].into(),
            last_results: 0,
            path_mtus: [
                (ip, seen(1400, LargerPackets::Rejected)),
                (
                    "fd00:30::2".parse().unwrap(),
                    seen(1500, LargerPackets::None),
                ),
            ]
            .into(),
        };
        let text = full(&all(&status), &Detail::Verbose(figures_of_one), None);
        assert_eq!(
            text,
            "\
Probe time:   2026-11-21T03:00:00Z
Cluster health:   0/1 reachable   (Probe interval: 10s)
Nodes:
  default/hnode2 (localhost):
    Host connectivity to 172.30.0.2:
      ICMP to stack:   OK, RTT=1µs (kernel)   (Last probed: 2026-11-21T02:59:58Z, unchanged since 2026-11-20T07:00:00Z)
        samples=2 lost=1 min=1µs mean=2µs p50=1µs p90=2.94µs p99=2.94µs max=3µs jitter=125ns
        network 80%, in the peer's host mean=600ns last=600ns max=600ns
        1m: 6 probes, 0 lost, p50=1µs max=3µs
      HTTP to agent:   OK, RTT=2µs (socket, connected in 900ns)   (Last probed: 2026-11-21T02:59:58Z)
      Path MTU:   1400, larger packets rejected by 10.0.0.9; eth0: 1500   (Last probed: 2026-11-21T02:50:00Z)
    Secondary connectivity to fd00:30::2:
      ICMP to stack:   Connection timed out   (Last probed: 2026-11-21T02:59:58Z, unchanged since 2026-11-21T02:59:30Z, probes without an answer: 7)
      HTTP to agent:   OK, RTT=4µs   (Last probed: 2026-11-21T02:59:58Z)
      Path MTU:   1500; eth0: 1500   (Last probed: 2026-11-21T02:50:00Z)
    Endpoint connectivity to 10.244.2.7:
      ICMP to stack:   OK, RTT=5µs   (Last probed: 2026-11-21T02:59:58Z)
      HTTP to agent:   OK, RTT=6µs   (Last probed: 2026-11-21T02:59:58Z)
"
        );
        let without = Detail::Verbose(Figures {
            rtt: Err("no maps are pinned".into()),
            ..figures()
        });
        let without = full(&all(&status), &without, None);
        assert!(without.contains("RTT statistics:   not readable (no maps are pinned)\n"));
    }

    #[test]
    fn succinct_takes_a_line_a_node() {
        assert_eq!(
            succinct(&all(&status()), false, None),
            "\
Cluster health:   1/3 reachable, 1 unknown   (2026-11-21T03:00:00Z)
  Name                         IP           Node          Endpoints
  default/hnode2 (localhost)   172.30.0.2   reachable     reachable
  default/hnode1               172.30.0.1   unreachable   unknown
  default/hnode3               172.30.0.3   unknown       unknown
"
        );
        assert_eq!(
            succinct(&all(&status()), true, None),
            "\
Cluster health:   1/3 reachable, 1 unknown   (2026-11-21T03:00:00Z)
  Name                         IP                      Node              Endpoints
  default/hnode2 (localhost)   172.30.0.2,fd00:30::2   2/2               1/1
  default/hnode1               172.30.0.1,fd00:30::1   1/2               0/0
  default/hnode3               172.30.0.3              0/1 (1 unknown)   0/1 (1 unknown)
"
        );
    }

    #[test]
    fn nothing_known_yet_is_said() {
        let status = HealthStatus {
            probe_interval: "10s".into(),
            configured_interval: None,
            ..HealthStatus::default()
        };
        assert_eq!(
            full(&all(&status), &Detail::Normal, None),
            "Probe time:   Unknown (not probed yet)\n\
             Cluster health:   0/0 reachable   (Probe interval: 10s)\nNodes:\n"
        );
    }

    #[test]
    fn a_diagnosis_stands_under_the_name_and_its_evidence_with_verbose() {
        let mut status = status();
        status.nodes.truncate(1);
        status.nodes[0].diagnosis = diagnosis();
        let normal = full(&all(&status), &Detail::Normal, None);
        assert!(
            normal.contains(
                "
  default/hnode1:
    Diagnosis:   agent down: the node answers
    Host connectivity to 172.30.0.1:
"
            ),
            "{normal}"
        );
        let verbose = full(&all(&status), &Detail::Verbose(figures()), None);
        assert!(
            verbose.contains(
                " agent down: the node answers
      - ICMP is answered
      - HTTP: connection refused
    Host connectivity to 172.30.0.1:
"
            ),
            "{verbose}"
        );
    }

    #[test]
    fn succinct_names_causes_in_a_column() {
        let mut status = status();
        status.nodes[0].diagnosis = diagnosis();
        status.nodes[1].host.primary_address.icmp = degraded("lossy");
        assert_eq!(
            succinct(&all(&status), false, None),
            "\
Cluster health:   1/3 reachable, 1 degraded, 1 unknown   (2026-11-21T03:00:00Z)
  Name                         IP           Node          Endpoints   Diagnosis
  default/hnode2 (localhost)   172.30.0.2   degraded      reachable   -
  default/hnode1               172.30.0.1   unreachable   unknown     agent-down
  default/hnode3               172.30.0.3   unknown       unknown     -
"
        );
    }

    #[test]
    fn a_fault_of_this_node_stands_under_the_headline() {
        let mut status = status();
        status.nodes.clear();
        status.configured_interval = Some("10s".into());
        status.probe_interval = "1m14.444444444s".into();
        status.local.diagnosis = Some(Diagnosis {
            cause: "this-node-isolated".into(),
            message: "this node isolated: nothing is heard of 95 of 99 peers".into(),
            evidence: vec!["eth0 has no carrier".into()],
        });
        assert_eq!(
            full(&all(&status), &Detail::Verbose(figures()), None),
            "\
Probe time:   2026-11-21T03:00:00Z
Cluster health:   0/0 reachable   (Probe interval: 1m14.444s, set: 10s; limited by the probe rate)
Fault of this node:   this node isolated: nothing is heard of 95 of 99 peers
  - eth0 has no carrier
Nodes:
"
        );
        assert_eq!(
            succinct(&all(&status), false, None),
            "\
Cluster health:   0/0 reachable   (2026-11-21T03:00:00Z)
Fault of this node:   this node isolated: nothing is heard of 95 of 99 peers
  Name   IP   Node   Endpoints
"
        );
    }

    #[test]
    fn degraded_and_switched_off_results_say_so() {
        let mut status = status();
        status.nodes.drain(..1);
        status.nodes.truncate(1);
        let node = &mut status.nodes[0];
        node.host.secondary_addresses[0].icmp = degraded("3 of 20 probes lost");
        node.health_endpoint.as_mut().unwrap().primary_address.off = vec![Protocol::Http];
        let text = full(&all(&status), &Detail::Normal, None);
        assert!(
            text.ends_with(
                "
    Secondary connectivity to fd00:30::2:
      ICMP to stack:   OK, RTT=9µs, degraded: 3 of 20 probes lost
      HTTP to agent:   OK, RTT=4µs
    Endpoint connectivity to 10.244.2.7:
      ICMP to stack:   OK, RTT=5µs
      HTTP to agent:   Not probed
"
            ),
            "{text}"
        );
    }

    #[test]
    fn that_no_node_is_failing_is_said() {
        let mut status = status();
        status.nodes.retain(|node| node.name == "default/hnode2");
        let failing = Filter {
            failing: true,
            ..Filter::default()
        };
        let view = failing.apply(&status).unwrap();
        let text = full(&view, &Detail::Normal, None);
        assert!(text.ends_with("\nNodes:   none is failing\n"), "{text}");
        assert_eq!(
            succinct(&view, false, None),
            "\
Cluster health:   1/1 reachable   (2026-11-21T03:00:00Z)
  none is failing
"
        );
    }

    #[test]
    fn changes_are_marked_and_what_is_gone_is_named() {
        let mut before = status();
        let mut now = status();
        before.nodes.remove(0);
        now.nodes.drain(..2);
        now.nodes[0].host.primary_address.icmp = failed("No route to host");
        let changes = Changes::between(&before, &now);
        assert_eq!(
            full(&all(&now), &Detail::Normal, Some(&changes)),
            "\
Probe time:   2026-11-21T03:00:00Z
Cluster health:   0/1 reachable   (Probe interval: 10s)
Nodes:
* default/hnode3:
    Host connectivity to 172.30.0.3:
    * ICMP to stack:   No route to host
      HTTP to agent:   Unknown (not probed yet)
    Endpoint connectivity to 10.244.3.7:
      ICMP to stack:   Unknown (not probed yet)
      HTTP to agent:   Unknown (not probed yet)
* default/hnode2: gone
"
        );
        assert_eq!(
            succinct(&all(&now), true, Some(&changes)),
            "\
Cluster health:   0/1 reachable   (2026-11-21T03:00:00Z)
  Name             IP           Node   Endpoints
* default/hnode3   172.30.0.3   0/1    0/1 (1 unknown)
* default/hnode2   gone
"
        );
    }
}
