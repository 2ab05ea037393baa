//! The connectivity report as text, worded like Cilium's.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, RttKey, RttRow};

use super::super::output::{comma_separated, indent, table};
use crate::api::types::{
    AddressGroupStatus, ConnectivityStatus, HealthStatus, NodeStatus, PathStatus, Reachability,
    RttSource, go_duration,
};
use crate::cli::bpf::rtt::RttStatistics;

const NOT_PROBED: &str = "Unknown (not probed yet)";

/// Rows of `HEALTH_RTT`.
pub(super) type RttRows = BTreeMap<RttKey, RttRow>;

/// How much the full report says.
pub(super) enum Detail {
    /// Primary addresses, and whatever is unhealthy.
    Normal,
    /// Everything; with the statistics, or why there are none.
    Verbose(Result<RttRows, String>),
}

/// The report with a block for each address.
pub(super) fn full(status: &HealthStatus, detail: &Detail) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = Report {
        status,
        detail,
        out: &mut text,
    }
    .write();
    text
}

/// The report with a line for each node; with counts of addresses when `verbose`.
pub(super) fn succinct(status: &HealthStatus, verbose: bool) -> String {
    let at = probe_time(status);
    let rows = local_first(status).map(|node| {
        let host = &node.host;
        let endpoint = node.health_endpoint.as_ref();
        let name = display_name(status, node);
        if verbose {
            [
                name,
                comma_separated(host.paths().map(|path| path.ip)),
                counts(host),
                endpoint.map_or_else(|| "0/0".to_owned(), counts),
            ]
        } else {
            let endpoint = endpoint.map_or(Reachability::Unknown, AddressGroupStatus::reachability);
            [
                name,
                host.primary_address.ip.to_string(),
                word(host.reachability()).to_owned(),
                word(endpoint).to_owned(),
            ]
        }
    });
    let nodes = indent(2, &table(["Name", "IP", "Node", "Endpoints"], rows));
    format!("Cluster health:   {}   ({at})\n{nodes}", headline(status))
}

struct Report<'a> {
    status: &'a HealthStatus,
    detail: &'a Detail,
    out: &'a mut String,
}

impl Report<'_> {
    fn write(&mut self) -> fmt::Result {
        let status = self.status;
        writeln!(self.out, "Probe time:   {}", probe_time(status))?;
        writeln!(
            self.out,
            "Cluster health:   {}   (Probe interval: {})",
            headline(status),
            status.probe_interval
        )?;
        if let Detail::Verbose(Err(reason)) = self.detail {
            writeln!(self.out, "RTT statistics:   not readable ({reason})")?;
        }
        writeln!(self.out, "Nodes:")?;
        local_first(status).try_for_each(|node| self.node(node))
    }

    fn node(&mut self, node: &NodeStatus) -> fmt::Result {
        writeln!(self.out, "  {}:", display_name(self.status, node))?;
        self.group(&node.host, Path::Host, "Host", "Secondary")?;
        match &node.health_endpoint {
            Some(endpoint) => {
                self.group(endpoint, Path::Endpoint, "Endpoint", "Secondary endpoint")
            }
            None => writeln!(
                self.out,
                "    Endpoint connectivity:   Unknown (address not known yet)"
            ),
        }
    }

    fn group(
        &mut self,
        group: &AddressGroupStatus,
        path: Path,
        primary: &str,
        secondary: &str,
    ) -> fmt::Result {
        self.address(&group.primary_address, path, primary)?;
        for address in &group.secondary_addresses {
            let shown = matches!(self.detail, Detail::Verbose(_))
                || address.reachability() == Reachability::Unreachable;
            if shown {
                self.address(address, path, secondary)?;
            }
        }
        Ok(())
    }

    fn address(&mut self, address: &PathStatus, path: Path, title: &str) -> fmt::Result {
        writeln!(self.out, "    {title} connectivity to {}:", address.ip)?;
        for (label, result, protocol) in [
            ("ICMP to stack", &address.icmp, PROTOCOL_ICMP),
            ("HTTP to agent", &address.http, PROTOCOL_HTTP),
        ] {
            let result = self.result(result.as_ref());
            writeln!(self.out, "      {label}:   {result}")?;
            let key = RttKey {
                peer: address.ip.into(),
                path: path as u8,
                protocol,
                pad: 0,
            };
            if let Detail::Verbose(Ok(rows)) = self.detail
                && let Some(row) = rows.get(&key)
            {
                writeln!(self.out, "        {}", RttStatistics::from(row))?;
            }
        }
        Ok(())
    }

    fn result(&self, result: Option<&ConnectivityStatus>) -> String {
        let Some(result) = result else {
            return NOT_PROBED.to_owned();
        };
        let verbose = matches!(self.detail, Detail::Verbose(_));
        let mut text = if result.is_ok() {
            format!("OK, RTT={}", go_duration(result.latency))
        } else {
            result.status.clone()
        };
        if verbose && result.is_ok() {
            let source = result.rtt_source.map(|source| match source {
                RttSource::Kernel => "kernel".to_owned(),
                RttSource::Socket => "socket".to_owned(),
            });
            let connect = result
                .connect_latency
                .map(|ns| format!("connected in {}", go_duration(ns)));
            let notes: Vec<String> = source.into_iter().chain(connect).collect();
            if !notes.is_empty() {
                text += &format!(" ({})", notes.join(", "));
            }
        }
        if verbose {
            text += &format!("   (Last probed: {:.0}", result.last_probed);
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
        }
        text
    }
}

fn probe_time(status: &HealthStatus) -> String {
    match status.timestamp {
        Some(at) => format!("{at:.0}"),
        None => NOT_PROBED.to_owned(),
    }
}

/// `2/3 reachable`, and how many are not known to be either.
fn headline(status: &HealthStatus) -> String {
    let count = |wanted| {
        status
            .nodes
            .iter()
            .filter(|node| node.reachability() == wanted)
            .count()
    };
    let total = status.nodes.len();
    let reachable = count(Reachability::Reachable);
    match count(Reachability::Unknown) {
        0 => format!("{reachable}/{total} reachable"),
        unknown => format!("{reachable}/{total} reachable, {unknown} unknown"),
    }
}

/// `reachable/total` addresses, and how many are not known to be either.
fn counts(group: &AddressGroupStatus) -> String {
    let count = |wanted| {
        group
            .paths()
            .filter(|path| path.reachability() == wanted)
            .count()
    };
    let total = group.paths().count();
    let reachable = count(Reachability::Reachable);
    match count(Reachability::Unknown) {
        0 => format!("{reachable}/{total}"),
        unknown => format!("{reachable}/{total} ({unknown} unknown)"),
    }
}

fn local_first(status: &HealthStatus) -> impl Iterator<Item = &NodeStatus> {
    let mut nodes: Vec<&NodeStatus> = status.nodes.iter().collect();
    nodes.sort_by_key(|node| (node.name != status.local.name, &node.name));
    nodes.into_iter()
}

fn display_name(status: &HealthStatus, node: &NodeStatus) -> String {
    let local = if node.name == status.local.name {
        " (localhost)"
    } else {
        ""
    };
    format!("{}{local}", node.name)
}

fn word(reachability: Reachability) -> &'static str {
    match reachability {
        Reachability::Reachable => "reachable",
        Reachability::Degraded => "degraded",
        Reachability::Unreachable => "unreachable",
        Reachability::Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::types::SelfStatus;
    use health_common::rtt::SOURCE_KERNEL;
    use std::net::IpAddr;

    fn ok(latency: i64) -> Option<ConnectivityStatus> {
        Some(ConnectivityStatus {
            latency,
            status: String::new(),
            last_probed: "2026-11-21T02:59:58.7Z".parse().unwrap(),
            rtt_source: None,
            connect_latency: None,
            consecutive_failures: 0,
            last_change: None,
            degraded: None,
        })
    }

    fn failed(status: &str) -> Option<ConnectivityStatus> {
        ok(0).map(|result| ConnectivityStatus {
            status: status.to_owned(),
            ..result
        })
    }

    fn path(
        ip: &str,
        icmp: Option<ConnectivityStatus>,
        http: Option<ConnectivityStatus>,
    ) -> PathStatus {
        PathStatus {
            ip: ip.parse().unwrap(),
            icmp,
            http,
            off: Vec::new(),
        }
    }

    fn group(primary: PathStatus, secondary: Vec<PathStatus>) -> AddressGroupStatus {
        AddressGroupStatus {
            primary_address: primary,
            secondary_addresses: secondary,
        }
    }

    fn status() -> HealthStatus {
        HealthStatus {
            timestamp: Some("2026-11-21T03:00:00.25Z".parse().unwrap()),
            probe_interval: "10s".into(),
            configured_interval: None,
            local: SelfStatus {
                name: "default/hnode2".into(),
                diagnosis: None,
            },
            nodes: vec![
                NodeStatus {
                    name: "default/hnode1".into(),
                    host: group(
                        path("172.30.0.1", ok(21_300), ok(405_072)),
                        vec![path("fd00:30::1", failed("Connection timed out"), ok(1))],
                    ),
                    health_endpoint: None,
                    diagnosis: None,
                },
                NodeStatus {
                    name: "default/hnode2".into(),
                    host: group(
                        path("172.30.0.2", ok(1_000), ok(2_000)),
                        vec![path("fd00:30::2", ok(3_000), ok(4_000))],
                    ),
                    health_endpoint: Some(group(path("10.244.2.7", ok(5_000), ok(6_000)), vec![])),
                    diagnosis: None,
                },
                NodeStatus {
                    name: "default/hnode3".into(),
                    host: group(path("172.30.0.3", ok(7_000), None), vec![]),
                    health_endpoint: Some(group(path("10.244.3.7", None, None), vec![])),
                    diagnosis: None,
                },
            ],
        }
    }

    #[test]
    fn the_local_node_comes_first_and_unhealthy_secondaries_show() {
        assert_eq!(
            full(&status(), &Detail::Normal),
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
        row.record(3_000, 2, 2, SOURCE_KERNEL);
        row.lost = 1;
        let ip: IpAddr = "172.30.0.2".parse().unwrap();
        let key = RttKey {
            peer: ip.into(),
            path: Path::Host as u8,
            protocol: PROTOCOL_ICMP,
            pad: 0,
        };
        let text = full(&status, &Detail::Verbose(Ok([(key, row)].into())));
        assert_eq!(
            text,
            "\
Probe time:   2026-11-21T03:00:00Z
Cluster health:   0/1 reachable   (Probe interval: 10s)
Nodes:
  default/hnode2 (localhost):
    Host connectivity to 172.30.0.2:
      ICMP to stack:   OK, RTT=1µs (kernel)   (Last probed: 2026-11-21T02:59:58Z, unchanged since 2026-11-20T07:00:00Z)
        samples=2 lost=1 min=1µs mean=2µs p50=1µs p99=2.944µs max=3µs jitter=125ns
      HTTP to agent:   OK, RTT=2µs (socket, connected in 900ns)   (Last probed: 2026-11-21T02:59:58Z)
    Secondary connectivity to fd00:30::2:
      ICMP to stack:   Connection timed out   (Last probed: 2026-11-21T02:59:58Z, unchanged since 2026-11-21T02:59:30Z, probes without an answer: 7)
      HTTP to agent:   OK, RTT=4µs   (Last probed: 2026-11-21T02:59:58Z)
    Endpoint connectivity to 10.244.2.7:
      ICMP to stack:   OK, RTT=5µs   (Last probed: 2026-11-21T02:59:58Z)
      HTTP to agent:   OK, RTT=6µs   (Last probed: 2026-11-21T02:59:58Z)
"
        );
        let without = full(&status, &Detail::Verbose(Err("no maps are pinned".into())));
        assert!(without.contains("RTT statistics:   not readable (no maps are pinned)\n"));
    }

    #[test]
    fn succinct_takes_a_line_a_node() {
        assert_eq!(
            succinct(&status(), false),
            "\
Cluster health:   1/3 reachable, 1 unknown   (2026-11-21T03:00:00Z)
  Name                         IP           Node          Endpoints
  default/hnode2 (localhost)   172.30.0.2   reachable     reachable
  default/hnode1               172.30.0.1   unreachable   unknown
  default/hnode3               172.30.0.3   unknown       unknown
"
        );
        assert_eq!(
            succinct(&status(), true),
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
            full(&status, &Detail::Normal),
            "Probe time:   Unknown (not probed yet)\n\
             Cluster health:   0/0 reachable   (Probe interval: 10s)\nNodes:\n"
        );
    }
}
