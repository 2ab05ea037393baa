//! The connectivity report as text, with Cilium's wording.

use std::fmt::{self, Write};
use std::time::Duration;

use health_model::api::{
    AddressGroupStatus, ConnectivityStatus, Diagnosis, HealthStatus, LargerPackets, NodeStatus,
    PathKind, PathMtuStatus, PathStatus, Protocol, Reachability, RttSource,
};
use health_model::duration::{duration_text, go_duration, parse_duration};

use super::figures::Figures;
use super::local;
use super::view::{Changes, Tally, Target, View};
use crate::output::{NONE, comma_separated, indent, printable, table};
use crate::path_mtu::larger as larger_packets;

const NOT_KNOWN: &str = "Unknown (not probed yet)";
/// The text for targets that are deliberately not probed.
const SWITCHED_OFF: &str = "Not probed";
/// Shown if only failing nodes are requested, and no node is failing.
const NONE_FAILING: &str = "none is failing";
/// Marks changes.
const CHANGED: char = '*';

/// The level of detail of the full report.
#[expect(
    clippy::large_enum_variant,
    reason = "a command makes one, and passes it by reference"
)]
pub(crate) enum Detail {
    /// Primary addresses, and whatever is unhealthy.
    Normal,
    /// Everything, including the figures.
    Verbose(Figures),
}

/// The report with a block for each address. Marks `changes`.
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

/// The section of the full report about one node.
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

/// The report with one line per node, with counts of addresses when `verbose`. Marks `changes`.
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
    text += &local::lines(status);
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

/// Addresses, and the state of the node and its health endpoint.
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
        self.out.push_str(&local::lines(status));
        if let Detail::Verbose(figures) = self.detail {
            self.out.push_str(&local::containers(&figures.containers));
        }
        if let Detail::Verbose(Figures {
            rtt: Err(reason), ..
        }) = self.detail
        {
            writeln!(self.out, "RTT statistics:   unreadable ({reason})")?;
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
            writeln!(
                self.out,
                "    {} {label}:   {}",
                mark(is_changed),
                printable(&text)
            )?;
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

/// Where the round trip was timestamped, and how long the connection and the reply took.
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

/// When the target was last probed, and since when it has been in this state.
fn times(result: &ConnectivityStatus) -> String {
    let mut text = format!("   (Last probed: {:.0}", result.last_probed);
    if let Some(at) = result.last_change {
        text += &format!(", unchanged since {at:.0}");
    }
    if result.consecutive_failures > 0 {
        text += &format!(", unanswered probes: {}", result.consecutive_failures);
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

/// The probe interval, and why it differs from the setting.
fn interval(status: &HealthStatus) -> String {
    let interval = readable(&status.probe_interval);
    match &status.configured_interval {
        Some(set) => {
            format!("Probe interval: {interval}, set: {set}; limited by the probe rate")
        }
        None => format!("Probe interval: {interval}"),
    }
}

/// Rounds an interval to a thousandth of its unit, to drop the digits that the probe rate causes.
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
    format!("Fault of this node:   {}\n", printable(&diagnosis.message))
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
mod tests;
