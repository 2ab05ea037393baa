//! Tests how reports look in every possible state.

use std::collections::BTreeMap;
use std::net::IpAddr;

use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_ICMP, Reply, RttKey, RttRow, SOURCE_KERNEL, bucket};
use health_model::api::{
    AgentProblem, ContainerProbeSummary, FullMap, HistoryWindow, PolicyLag, TargetHistory,
};

use super::*;
use crate::status::figures::RttRows;
use crate::status::fixture::{degraded, failed, status};
use crate::status::view::Filter;

/// All nodes, without marks.
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
        containers: ContainerProbeSummary::default(),
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
    let reported = "Health endpoints:   not probed, this node has no pod CIDR\n";
    let text = full(&all(&status), &Detail::Normal, None);
    assert!(text.contains(reported), "{text}");
    assert_eq!(
        text.matches("    Endpoint connectivity:   Not probed\n")
            .count(),
        3
    );
    for verbose in [false, true] {
        let text = succinct(&all(&status), verbose, None);
        assert!(text.contains(reported), "{text}");
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
        containers: ContainerProbeSummary {
            enabled: true,
            pods: 12,
            ready_pods: 11,
            probes: 30,
            failing: 1,
            ..ContainerProbeSummary::default()
        },
    };
    let text = full(&all(&status), &Detail::Verbose(figures_of_one), None);
    assert_eq!(
            text,
            "\
Probe time:   2026-11-21T03:00:00Z
Cluster health:   0/1 reachable   (Probe interval: 10s)
Container probes:   12 pods, 11 ready; 30 probes, 1 failing
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
      ICMP to stack:   Connection timed out   (Last probed: 2026-11-21T02:59:58Z, unchanged since 2026-11-21T02:59:30Z, unanswered probes: 7)
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
    assert!(without.contains("RTT statistics:   unreadable (no maps are pinned)\n"));
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
        message: "this node isolated: no answer from 95 of 99 peers".into(),
        evidence: vec!["eth0 has no carrier".into()],
    });
    assert_eq!(
        full(&all(&status), &Detail::Verbose(figures()), None),
        "\
Probe time:   2026-11-21T03:00:00Z
Cluster health:   0/0 reachable   (Probe interval: 1m14.444s, set: 10s; limited by the probe rate)
Fault of this node:   this node isolated: no answer from 95 of 99 peers
  - eth0 has no carrier
Nodes:
"
    );
    assert_eq!(
        succinct(&all(&status), false, None),
        "\
Cluster health:   0/0 reachable   (2026-11-21T03:00:00Z)
Fault of this node:   this node isolated: no answer from 95 of 99 peers
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
