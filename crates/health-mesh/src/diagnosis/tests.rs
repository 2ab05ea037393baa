//! Which results lead to which diagnosis.

use std::sync::Arc;

use health_common::rtt::RemoteTime;
use health_net::mtu::WayOut;
use jiff::Timestamp;
use nix::errno::Errno;
use proptest::prelude::*;

use super::isolation::{Scope, Survey};
use super::*;
use crate::failure::IcmpError;
use crate::history::Latency;
use crate::path_mtu::TooBig;

const HOST4: &str = "172.30.0.3";
const ENDPOINT4: &str = "10.244.3.7";
const HOST6: &str = "fd00:30::3";
const ENDPOINT6: &str = "fd00:10:244:3::7";
const ROUTER: &str = "192.0.2.1";
const SELF4: &str = "172.30.0.1";
const SELF6: &str = "fd00:30::1";

#[derive(Clone, Debug)]
enum Given {
    Off,
    Unknown,
    Up,
    Down(Failure),
}
use Given::{Off, Unknown, Up};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn silent() -> Given {
    Given::Down(Failure::TimedOut)
}

fn os(errno: Errno) -> Given {
    Given::Down(Failure::Os(errno))
}

fn refused() -> Given {
    os(Errno::ECONNREFUSED)
}

fn hung() -> Given {
    Given::Down(Failure::ResponseTimedOut)
}

fn icmp(kind: u8, code: u8, from: &str) -> Given {
    let from = ip(from);
    Given::Down(Failure::Icmp(IcmpError { kind, code, from }))
}

/// Results of each address of a peer by ICMP and by HTTP. Addresses in 10/8 or fd00:10::/32 belong to an endpoint.
type Row<'a> = (&'a str, Given, Given);

fn targets<'a>(rows: &'a [Row<'a>]) -> Vec<TargetFacts<'a>> {
    let mut targets = Vec::new();
    for (address, icmp, http) in rows {
        let endpoint = address.starts_with("10.") || address.starts_with("fd00:10:");
        let path = if endpoint { Path::Endpoint } else { Path::Host };
        for (protocol, given) in [(Protocol::Icmp, icmp), (Protocol::Http, http)] {
            targets.push(TargetFacts {
                key: TargetKey {
                    address: ip(address),
                    path,
                    protocol,
                },
                verdict: match given {
                    Off => Verdict::Off,
                    Unknown => Verdict::Unknown,
                    Up => Verdict::Reachable,
                    Given::Down(failure) => Verdict::Unreachable(failure),
                },
                mesh_key: KeyAge::Current,
                trend: Trend::default(),
                passages: Default::default(),
                shift: None,
                path_mtu: None,
            });
        }
    }
    targets
}

fn with_context<T>(use_it: impl FnOnce(&Context<'_>) -> T) -> T {
    use_it(&Context {
        port: 4240,
        local_addresses: &[ip(SELF4), ip(SELF6)],
        thresholds: Thresholds::default(),
    })
}

fn peer<'a>(targets: &'a [TargetFacts<'a>]) -> PeerFacts<'a> {
    PeerFacts {
        name: "default/n3",
        local: false,
        endpoint_expected: true,
        targets,
    }
}

fn diagnose(rows: &[Row<'_>]) -> Option<Diagnosis> {
    with_context(|context| context.diagnose(&peer(&targets(rows)), None))
}

#[track_caller]
fn says(rows: &[Row<'_>], cause: Cause, message: &str) -> Diagnosis {
    let diagnosis = diagnose(rows).expect("a diagnosis");
    assert_eq!(
        (diagnosis.cause, diagnosis.message.as_str()),
        (cause, message)
    );
    diagnosis
}

#[track_caller]
fn is(rows: &[Row<'_>], cause: Cause, part: &str) {
    let diagnosis = diagnose(rows).expect("a diagnosis");
    assert_eq!(diagnosis.cause, cause, "{diagnosis:#?}");
    assert!(diagnosis.message.contains(part), "{}", diagnosis.message);
}

#[test]
fn a_healthy_peer_has_no_diagnosis() {
    assert_eq!(diagnose(&[(HOST4, Up, Up), (ENDPOINT4, Up, Up)]), None);
    assert_eq!(diagnose(&[(HOST4, Up, Off), (ENDPOINT4, Off, Up)]), None);
}

#[test]
fn while_anything_is_unknown_nothing_is_said() {
    for rows in [
        [(HOST4, Unknown, Unknown), (ENDPOINT4, Unknown, Unknown)],
        [(HOST4, silent(), Unknown), (ENDPOINT4, silent(), silent())],
        [(HOST4, Up, refused()), (ENDPOINT4, Up, Unknown)],
        [(HOST4, Up, Up), (ENDPOINT4, Up, Unknown)],
    ] {
        assert_eq!(diagnose(&rows), None, "{rows:?}");
    }
}

#[test]
fn a_node_is_down_when_nothing_is_heard_of_it() {
    let diagnosis = says(
        &[(HOST4, silent(), silent()), (ENDPOINT4, silent(), silent())],
        Cause::NodeDown,
        "node down: default/n3 answers neither ICMP nor HTTP on 172.30.0.3 and 10.244.3.7; check \
         its power, its kernel and its link",
    );
    assert_eq!(
        diagnosis.evidence,
        [
            "ICMP to 172.30.0.3 (host): Connection timed out",
            "HTTP to 172.30.0.3 port 4240 (host): Connection timed out",
            "ICMP to 10.244.3.7 (endpoint): Connection timed out",
            "HTTP to 10.244.3.7 port 4240 (endpoint): Connection timed out",
        ]
    );
    // Its endpoint is unknown.
    is(
        &[(HOST4, silent(), silent())],
        Cause::NodeDown,
        "on 172.30.0.3;",
    );
    // The neighbor does not answer ARP.
    let no_arp = || icmp(3, 1, SELF4);
    let rows = [
        (HOST4, no_arp(), no_arp()),
        (ENDPOINT4, silent(), os(Errno::EHOSTUNREACH)),
    ];
    is(
        &rows,
        Cause::NodeDown,
        "does not answer ARP or neighbor discovery",
    );
    assert_eq!(
        diagnose(&rows).unwrap().evidence[0],
        "ICMP to 172.30.0.3 (host): No route to host (from 172.30.0.1), this host: ARP is not \
         answered"
    );
    is(
        &[
            (HOST4, silent(), silent()),
            (HOST6, icmp(1, 3, SELF6), os(Errno::EHOSTUNREACH)),
            (ENDPOINT4, silent(), silent()),
        ],
        Cause::NodeDown,
        "on any of its addresses",
    );
    // The only family that has a route is silent.
    is(
        &[
            (HOST4, silent(), silent()),
            (HOST6, os(Errno::ENETUNREACH), os(Errno::ENETUNREACH)),
        ],
        Cause::NodeDown,
        "on 172.30.0.3;",
    );
}

#[test]
fn with_one_protocol_a_silent_node_may_be_a_filter() {
    is(
        &[(HOST4, silent(), Off), (ENDPOINT4, silent(), Off)],
        Cause::NodeDown,
        "HTTP is not probed, so an ICMP filter would look the same",
    );
    is(
        &[(HOST4, Off, silent()), (ENDPOINT4, Off, silent())],
        Cause::NodeDown,
        "ICMP is not probed, so a filter on port 4240 would look the same",
    );
    is(
        &[(HOST4, Off, icmp(3, 1, SELF4))],
        Cause::NodeDown,
        "does not answer HTTP on 172.30.0.3, and the next hop on the way to it does not answer ARP",
    );
    // If no host address is probed, the host may be fine.
    is(
        &[(ENDPOINT4, silent(), silent())],
        Cause::AddressUnreachable,
        "does not answer on 10.244.3.7;",
    );
}

#[test]
fn an_agent_is_down_when_its_host_is_up_and_no_http_is_answered() {
    says(
        &[(HOST4, Up, refused()), (ENDPOINT4, Up, refused())],
        Cause::AgentDown,
        "agent down: default/n3 answers ICMP on 172.30.0.3 and 10.244.3.7, but HTTP on port 4240 \
         is refused on both; check whether it runs, and its log",
    );
    says(
        &[(HOST4, Up, refused())],
        Cause::AgentDown,
        "agent down: default/n3 answers ICMP on 172.30.0.3, but HTTP on port 4240 is refused; \
         check whether it runs, and its log",
    );
    is(
        &[(HOST4, Off, refused()), (ENDPOINT4, Off, refused())],
        Cause::AgentDown,
        "default/n3 is up, but HTTP on port 4240 is refused on 172.30.0.3 and 10.244.3.7",
    );
    is(
        &[(HOST4, Up, hung()), (ENDPOINT4, Up, silent())],
        Cause::AgentDown,
        "accepted and never answered on 172.30.0.3 and dropped silently on 10.244.3.7",
    );
    // The endpoint went down with its agent.
    is(
        &[(HOST4, Up, refused()), (ENDPOINT4, silent(), silent())],
        Cause::AgentDown,
        "answers ICMP on 172.30.0.3, but",
    );
    is(
        &[
            (HOST4, Up, refused()),
            (HOST6, Up, refused()),
            (ENDPOINT4, Up, refused()),
            (ENDPOINT6, Up, refused()),
        ],
        Cause::AgentDown,
        "default/n3 answers ICMP on all its addresses, but HTTP on port 4240 is refused on all;",
    );
    // One family does not get through at all.
    is(
        &[
            (HOST4, Up, refused()),
            (HOST6, silent(), silent()),
            (ENDPOINT4, Up, refused()),
            (ENDPOINT6, silent(), silent()),
        ],
        Cause::AgentDown,
        "answers ICMP on 172.30.0.3 and 10.244.3.7, but HTTP on port 4240 is refused on both",
    );
}

#[test]
fn an_endpoint_is_down_when_its_host_is_up() {
    says(
        &[(HOST4, Up, Up), (ENDPOINT4, silent(), silent())],
        Cause::EndpointDatapathDown,
        "endpoint datapath down: the host of default/n3 answers on 172.30.0.3, but its health \
         endpoint on 10.244.3.7 is silent; check lxc_health and its programs there, and the \
         routes to its pod CIDRs",
    );
    is(
        &[
            (HOST4, Up, Up),
            (ENDPOINT4, icmp(3, 1, HOST4), os(Errno::EHOSTUNREACH)),
        ],
        Cause::EndpointDatapathDown,
        "is unreachable, says the node itself (172.30.0.3)",
    );
    is(
        &[(HOST4, silent(), Up), (ENDPOINT4, silent(), silent())],
        Cause::EndpointDatapathDown,
        "answers on 172.30.0.3",
    );
    // Over one family only.
    is(
        &[
            (HOST4, Up, Up),
            (HOST6, Up, Up),
            (ENDPOINT4, silent(), silent()),
            (ENDPOINT6, Up, Up),
        ],
        Cause::EndpointDatapathDown,
        "endpoint on 10.244.3.7 is silent",
    );
    is(
        &[
            (HOST4, Up, Up),
            (HOST6, silent(), silent()),
            (ENDPOINT4, silent(), silent()),
            (ENDPOINT6, silent(), silent()),
        ],
        Cause::EndpointDatapathDown,
        "endpoint on 10.244.3.7 is silent",
    );
    is(
        &[(HOST4, Up, Off), (ENDPOINT4, silent(), Off)],
        Cause::EndpointDatapathDown,
        "answers on 172.30.0.3",
    );
}

#[test]
fn icmp_is_filtered_where_http_is_answered() {
    says(
        &[(HOST4, silent(), Up), (ENDPOINT4, silent(), Up)],
        Cause::IcmpFiltered,
        "ICMP filtered: default/n3 answers HTTP, but not ICMP, on 172.30.0.3 and 10.244.3.7; \
         check for firewalls that drop echo requests or replies",
    );
    is(
        &[(HOST4, silent(), Up), (ENDPOINT4, Up, Up)],
        Cause::IcmpFiltered,
        "but not ICMP, on 172.30.0.3;",
    );
}

#[test]
fn a_port_is_filtered_where_icmp_is_answered() {
    says(
        &[(HOST4, Up, silent()), (ENDPOINT4, Up, silent())],
        Cause::PortFiltered,
        "port filtered: default/n3 answers ICMP on 172.30.0.3 and 10.244.3.7, but HTTP to port \
         4240 is dropped silently; check the firewalls on the way, and whether its agent hangs",
    );
    says(
        &[(HOST4, Up, silent()), (ENDPOINT4, Up, Up)],
        Cause::PortFiltered,
        "port filtered: HTTP to port 4240 of default/n3 is dropped silently on 172.30.0.3, though \
         answered on 10.244.3.7; check the firewalls and policies on the way",
    );
}

#[test]
fn a_port_is_refused_on_one_address() {
    says(
        &[(HOST4, Up, Up), (ENDPOINT4, Up, refused())],
        Cause::PortRefused,
        "port refused: HTTP on port 4240 of default/n3 is refused on 10.244.3.7, though answered \
         on 172.30.0.3; its listener is missing there, or a firewall rejects",
    );
    is(
        &[(HOST4, silent(), refused()), (ENDPOINT4, Up, Up)],
        Cause::PortRefused,
        "is refused on 172.30.0.3",
    );
}

#[test]
fn a_wrong_answer_is_reported() {
    let status = || Given::Down(Failure::UnexpectedStatus(503));
    is(
        &[(HOST4, Up, status()), (ENDPOINT4, Up, status())],
        Cause::BadAnswer,
        "(Unexpected status 503); check its log",
    );
    is(
        &[(HOST4, Up, hung()), (ENDPOINT4, Up, Up)],
        Cause::BadAnswer,
        "(Response timed out), though answered on 10.244.3.7",
    );
    is(
        &[(HOST4, Up, os(Errno::ECONNRESET)), (ENDPOINT4, Up, Up)],
        Cause::BadAnswer,
        "(Connection reset by peer)",
    );
}

#[test]
fn an_unproven_node_is_reported() {
    let down = |failure: &Failure| Given::Down(failure.clone());
    for (failure, cause, message) in [
        (
            Failure::NoProof,
            Cause::NoKey,
            "no key: HTTP on port 4240 of default/n3 is answered without proof of the mesh key on \
             172.30.0.3 and 10.244.3.7; something else listens there, or an agent that is too old \
             to prove its answers",
        ),
        (
            Failure::KeyRefused,
            Cause::WrongKey,
            "wrong key: default/n3 refuses this node's mesh key on 172.30.0.3 and 10.244.3.7; compare \
             the --mesh-key-file of both, and check what listens on port 4240",
        ),
        (
            Failure::WrongProof,
            Cause::WrongKey,
            "wrong key: HTTP on port 4240 of default/n3 is answered with a wrong proof of the mesh key \
             on 172.30.0.3 and 10.244.3.7; check what listens there",
        ),
        (
            Failure::Replayed,
            Cause::ReplayedAnswer,
            "replayed answer: HTTP on port 4240 of default/n3 is answered on 172.30.0.3 and \
             10.244.3.7 with an agent's answer to another request; check what listens there and on \
             the way",
        ),
        (
            Failure::WrongNode("default/n4".into()),
            Cause::WrongNode,
            "wrong node: HTTP to default/n3 on 172.30.0.3 and 10.244.3.7 is answered by default/n4; \
             check who has the address, and the names of both nodes and their clusters",
        ),
        (
            Failure::ClockDiffers { ahead: -86_400 },
            Cause::ClockDiffers,
            "clock differs: default/n3 does not answer HTTP on 172.30.0.3 and 10.244.3.7 (Refused: clock \
             is 24h0m0s behind this host's); set both clocks",
        ),
    ] {
        let both = [(HOST4, Up, down(&failure)), (ENDPOINT4, Up, down(&failure))];
        says(&both, cause, message);
        let one = [(HOST4, Up, down(&failure)), (ENDPOINT4, Up, Up)];
        is(&one, cause, ", though answered on 10.244.3.7");
        // A different listener on one address does not hide that the agent is gone.
        is(
            &[(HOST4, Up, down(&failure)), (ENDPOINT4, Up, refused())],
            Cause::AgentDown,
            "answered wrongly on 172.30.0.3",
        );
    }
}

#[test]
fn a_clock_that_differs_names_all_addresses_although_a_second_passed_between_two_probes() {
    let down = |ahead| Given::Down(Failure::ClockDiffers { ahead });
    let rows = [(HOST4, Up, down(600)), (ENDPOINT4, Up, down(601))];
    says(
        &rows,
        Cause::ClockDiffers,
        "clock differs: default/n3 does not answer HTTP on 172.30.0.3 and 10.244.3.7 (Refused: clock is \
         10m0s ahead of this host's); set both clocks",
    );
}

#[test]
fn an_old_key_is_reported_with_the_node_that_has_it() {
    let rows = [(HOST4, Up, Up), (ENDPOINT4, Up, Up)];
    let reported = |key| {
        let mut targets = targets(&rows);
        targets[1].mesh_key = key;
        with_context(|context| context.diagnose(&peer(&targets), None))
    };
    assert_eq!(reported(KeyAge::Current), None);
    for (key, message) in [
        (
            KeyAge::Next,
            "old key: default/n3 still signs with an older mesh key than this node; give it the \
             new --mesh-key-file and restart its agent",
        ),
        (
            KeyAge::Previous,
            "old key: this node still signs with an older mesh key than default/n3; give this node \
             the new --mesh-key-file and restart its agent",
        ),
    ] {
        let diagnosis = reported(key).unwrap();
        assert_eq!(diagnosis.cause, Cause::OldKey);
        assert_eq!(diagnosis.message, message);
    }
}

#[test]
fn a_missing_route_is_reported_with_its_sender() {
    let local = || os(Errno::ENETUNREACH);
    says(
        &[(HOST4, local(), local()), (ENDPOINT4, local(), local())],
        Cause::NoRoute,
        "no route: this host has no route for ICMP and HTTP to 172.30.0.3 and 10.244.3.7 of \
         default/n3: Network is unreachable; check `ip route get 172.30.0.3`",
    );
    let router = || icmp(3, 0, ROUTER);
    says(
        &[(HOST4, router(), silent()), (ENDPOINT4, silent(), silent())],
        Cause::NoRoute,
        "no route: 192.0.2.1 cannot deliver ICMP to 172.30.0.3 of default/n3: Network is \
         unreachable (from 192.0.2.1); check its routes and its link to that address",
    );
    is(
        &[(HOST4, Up, Up), (ENDPOINT4, local(), local())],
        Cause::NoRoute,
        "this host has no route for ICMP and HTTP to 10.244.3.7",
    );
    is(
        &[(HOST4, icmp(11, 0, ROUTER), silent())],
        Cause::NoRoute,
        "is caught in a routing loop",
    );
    is(
        &[(HOST6, icmp(3, 0, "2001:db8::1"), silent())],
        Cause::NoRoute,
        "is caught in a routing loop",
    );
    // Without ICMP, a connection's error is taken at face value.
    is(
        &[(HOST4, Off, os(Errno::EHOSTUNREACH))],
        Cause::NoRoute,
        "because of a missing route, an unanswered ARP request or a firewall",
    );
    is(
        &[(HOST4, os(Errno::EINVAL), os(Errno::EINVAL))],
        Cause::NoRoute,
        "blackhole route",
    );
}

#[test]
fn a_rejection_is_reported_with_its_sender() {
    says(
        &[
            (HOST4, icmp(3, 13, ROUTER), silent()),
            (ENDPOINT4, icmp(3, 13, ROUTER), silent()),
        ],
        Cause::Rejected,
        "rejected: 192.0.2.1 rejects ICMP to 172.30.0.3 and 10.244.3.7 of default/n3: \
         Communication prohibited (from 192.0.2.1); check its firewall and policies",
    );
    // A firewall's default `reject`, and one that sends resets.
    for http in [icmp(3, 3, HOST4), refused()] {
        is(
            &[
                (HOST4, icmp(3, 3, HOST4), http.clone()),
                (ENDPOINT4, icmp(3, 3, HOST4), http.clone()),
            ],
            Cause::Rejected,
            "the node itself (172.30.0.3) rejects ICMP and HTTP to 172.30.0.3 and 10.244.3.7",
        );
    }
    // One error is enough, even if everything else is silent.
    for (icmp, http) in [
        (icmp(3, 13, HOST4), silent()),
        (silent(), icmp(3, 13, HOST4)),
    ] {
        is(
            &[(HOST4, silent(), silent()), (ENDPOINT4, icmp, http)],
            Cause::Rejected,
            "the node itself (172.30.0.3) rejects",
        );
    }
    // Only the port.
    is(
        &[
            (HOST4, Up, icmp(3, 3, HOST4)),
            (ENDPOINT4, Up, icmp(3, 3, HOST4)),
        ],
        Cause::Rejected,
        "the node itself (172.30.0.3) rejects HTTP to 172.30.0.3 and 10.244.3.7",
    );
    is(
        &[(HOST4, Up, os(Errno::EHOSTUNREACH)), (ENDPOINT4, Up, Up)],
        Cause::Rejected,
        "a firewall rejects HTTP to 172.30.0.3 of default/n3 on port 4240: No route to host",
    );
    let prohibit = || os(Errno::EACCES);
    is(
        &[(HOST4, prohibit(), prohibit()), (ENDPOINT4, Up, Up)],
        Cause::Rejected,
        "this host refuses to send ICMP and HTTP to 172.30.0.3",
    );
    is(
        &[
            (HOST4, Up, Up),
            (HOST6, icmp(1, 1, SELF6), os(Errno::EACCES)),
        ],
        Cause::Rejected,
        "this host (fd00:30::1) rejects ICMP to fd00:30::3",
    );
}

#[test]
fn one_family_may_fail() {
    let rows = [
        (HOST4, Up, Up),
        (HOST6, icmp(1, 3, SELF6), os(Errno::EHOSTUNREACH)),
        (ENDPOINT4, Up, Up),
        (ENDPOINT6, silent(), silent()),
    ];
    says(
        &rows,
        Cause::OneFamilyOnly,
        "one family only: default/n3 answers over IPv4, but not over IPv6 on fd00:30::3 and \
         fd00:10:244:3::7; check its IPv6 addresses, and IPv6 routes and firewalls on the way",
    );
    is(
        &[(HOST4, silent(), silent()), (HOST6, Up, Up)],
        Cause::OneFamilyOnly,
        "over IPv6, but not over IPv4 on 172.30.0.3",
    );
    // A missing route says more than a failure.
    is(
        &[
            (HOST4, Up, Up),
            (HOST6, os(Errno::ENETUNREACH), os(Errno::ENETUNREACH)),
        ],
        Cause::NoRoute,
        "fd00:30::3",
    );
}

#[test]
fn a_secondary_address_may_fail() {
    is(
        &[
            (HOST4, Up, Up),
            ("172.31.0.3", silent(), silent()),
            (ENDPOINT4, Up, Up),
        ],
        Cause::AddressUnreachable,
        "does not answer on 172.31.0.3, though it is up on 172.30.0.3 and 10.244.3.7",
    );
    is(
        &[(HOST4, silent(), silent()), (ENDPOINT4, Up, Up)],
        Cause::AddressUnreachable,
        "does not answer on 172.30.0.3, though it is up on 10.244.3.7",
    );
}

#[test]
fn this_node_is_never_called_down_by_itself() {
    let rows = [(HOST4, silent(), silent())];
    let targets = targets(&rows);
    let own = PeerFacts {
        local: true,
        ..peer(&targets)
    };
    let diagnosis = with_context(|context| context.diagnose(&own, None)).unwrap();
    assert_eq!(diagnosis.cause, Cause::AddressUnreachable);
    assert!(diagnosis.message.contains("this node (default/n3)"));
}

#[test]
fn what_this_host_cannot_do_is_no_evidence() {
    let none = || Given::Down(Failure::NoFamily);
    is(
        &[(HOST4, Up, Up), (HOST6, none(), none())],
        Cause::LocalError,
        "ICMP to fd00:30::3 (host): Address family not supported on this host",
    );
    is(
        &[
            (HOST4, Up, os(Errno::EMFILE)),
            (ENDPOINT4, Up, os(Errno::EMFILE)),
        ],
        Cause::LocalError,
        "HTTP to 172.30.0.3 port 4240 (host): Too many open files",
    );
    is(
        &[
            (HOST4, Up, Up),
            (HOST6, none(), none()),
            (ENDPOINT4, silent(), silent()),
        ],
        Cause::EndpointDatapathDown,
        "10.244.3.7",
    );
}

#[test]
fn an_endpoint_that_nobody_reports_is_queried() {
    is(
        &[(HOST4, Up, Up)],
        Cause::EndpointAddressUnknown,
        "172.30.0.3",
    );
    assert_eq!(diagnose(&[(HOST4, Up, Off)]), None);
    let rows = [(HOST4, Up, Up)];
    let targets = targets(&rows);
    let without = PeerFacts {
        endpoint_expected: false,
        ..peer(&targets)
    };
    assert_eq!(
        with_context(|context| context.diagnose(&without, None)),
        None
    );
}

fn lost(lost: u32, probes: u32) -> Trend {
    let window = Duration::from_secs(600);
    Trend {
        loss: [Loss {
            probes,
            lost,
            window,
        }; 2],
        ..Trend::default()
    }
}

fn latency(us: u64, samples: u32) -> Latency {
    Latency {
        samples,
        p25: Duration::from_micros(us * 9 / 10),
        p50: Duration::from_micros(us),
        p90: Duration::from_micros(us * 11 / 10),
    }
}

fn shifted(recent_us: u64, usual_us: u64) -> Trend {
    Trend {
        recent: Some(latency(recent_us, 8)),
        usual: Some(latency(usual_us, 60)),
        ..Trend::default()
    }
}

#[test]
fn a_degraded_target_is_reported() {
    let rows = [(HOST4, Up, Up), (ENDPOINT4, Up, Up)];
    let mut facts = targets(&rows);
    facts[2].trend = shifted(4000, 1200);
    with_context(|context| {
        let diagnosis = context.diagnose(&peer(&facts), None).unwrap();
        assert_eq!(diagnosis.cause, Cause::LatencyShift);
        assert_eq!(
            diagnosis.message,
            "latency shift: ICMP to 10.244.3.7 (endpoint) of default/n3 takes 4.0ms now, 1.2ms \
             before"
        );
        facts[3].trend = lost(14, 60);
        let diagnosis = context.diagnose(&peer(&facts), None).unwrap();
        assert_eq!(diagnosis.cause, Cause::Loss);
        assert_eq!(
            diagnosis.message,
            "loss: default/n3 lost 14 of 60 probes in the last 10 min (23 %) of HTTP to \
             10.244.3.7 port 4240 (endpoint); 1 other target is degraded as well"
        );
        assert_eq!(diagnosis.evidence.len(), 2);
    });
}

/// A passage of 60 probes in ten minutes, with the given numbers at each segment.
fn passage(arrived: u32, replied: u32, returned: u32, lost_here: u32) -> Option<Passage> {
    Some(Passage {
        time: Duration::from_secs(590),
        sent: 60,
        arrived,
        replied,
        returned,
        lost_there: 60 - arrived,
        lost_in_peer: arrived - replied,
        lost_back: replied - returned,
        lost_here,
    })
}

#[test]
fn a_loss_is_reported_with_its_place() {
    let rows = [(HOST4, Up, Up), (ENDPOINT4, Up, Up)];
    let loss = |passages| {
        let mut facts = targets(&rows);
        facts[0].trend = lost(14, 60);
        facts[0].passages = passages;
        let diagnosis = with_context(|context| context.diagnose(&peer(&facts), None)).unwrap();
        let on = "loss: default/n3 lost 14 of 60 probes in the last 10 min (23 %) of ICMP to \
                  172.30.0.3 (host)";
        let place = diagnosis.message.strip_prefix(on).unwrap().to_owned();
        (place, diagnosis.evidence.concat())
    };
    for (passage, place) in [
        (
            passage(46, 46, 46, 0),
            ", all on the way there: 46 of 60 arrived",
        ),
        (
            passage(60, 46, 46, 0),
            ", all in the peer's host: 46 of 60 that arrived were answered",
        ),
        (
            passage(60, 60, 46, 0),
            ", all on the way back: 46 of 60 replies came back",
        ),
        (
            passage(60, 60, 60, 14),
            ", all in this host: 14 of 60 replies that came back did not reach the agent",
        ),
        (
            passage(46, 46, 45, 0),
            ", most on the way there: 46 of 60 arrived",
        ),
        (
            passage(40, 40, 20, 0),
            ", on the way there (40 of 60 arrived) and on the way back (20 of 40 replies came back)",
        ),
        // No more than chance would explain.
        (passage(58, 57, 56, 1), ""),
        (None, ""),
    ] {
        assert_eq!(loss([passage, None]).0, place, "{passage:?}");
        // The shorter window is reported if the longer one shows nothing.
        assert_eq!(loss([None, passage]).0, place, "{passage:?}");
    }
    let (_, evidence) = loss([passage(46, 46, 46, 0), None]);
    assert_eq!(
        evidence,
        "ICMP to 172.30.0.3 (host): lost 14 of 60 probes in the last 10 min (23 %); 60 sent, 46 \
         arrived there, 46 replies left there, 46 came back (in 590.0s, by both agents' counts)"
    );
}

#[test]
fn silence_is_reported_with_what_arrives() {
    let rows = [(HOST4, silent(), Up), (ENDPOINT4, Up, Up)];
    for (passage, place) in [
        (
            passage(60, 60, 0, 0),
            "; echo requests arrive there (60 of 60), replies do not come back",
        ),
        (
            passage(0, 0, 0, 0),
            "; echo requests do not arrive there (0 of 60 did)",
        ),
        (
            passage(60, 0, 0, 0),
            "; echo requests arrive there (60 of 60), but 0 replies left through its uplinks: \
             check",
        ),
        (passage(60, 60, 60, 60), "replies come back to this host"),
    ] {
        let mut facts = targets(&rows);
        facts[0].passages = [None, passage];
        let diagnosis = with_context(|context| context.diagnose(&peer(&facts), None)).unwrap();
        assert_eq!(diagnosis.cause, Cause::IcmpFiltered);
        assert!(diagnosis.message.contains(place), "{diagnosis:#?}");
        assert!(diagnosis.evidence[0].contains("60 sent"), "{diagnosis:#?}");
    }
}

/// A row's values after the given numbers of round trips, with these round-trip times and times in the peer's host.
fn remote_time(trips: &[(u64, u64, u64)]) -> RemoteTime {
    let mut row = RemoteTime::default();
    for &(samples, rtt_ns, remote_ns) in trips {
        row.samples += samples;
        row.sum_ns += samples * remote_ns;
        row.rtt_sum_ns += samples * rtt_ns;
        row.smoothed_ns = remote_ns;
    }
    row
}

#[test]
fn a_shift_is_reported_with_where_the_time_goes() {
    let (usual, slow) = (300_000, 4_000_000);
    let shift = |remote_ns: u64, more: u64| {
        let since = "2026-11-21T10:02:11.7Z".parse().unwrap();
        let mut watch = ShiftWatch::new(since, Duration::ZERO, latency(usual / 1000, 60));
        watch.note(remote_time(&[(100, usual, 20_000), (8, slow, remote_ns)]));
        watch.note(remote_time(&[
            (100, usual, 20_000),
            (8 + more, slow, remote_ns),
        ]));
        watch.shift()
    };
    let reported = |shift, endpoint: Trend| {
        let rows = [(HOST4, Up, Up), (ENDPOINT4, Up, Up)];
        let mut facts = targets(&rows);
        facts[0].trend = shifted(4000, 300);
        facts[0].shift = Some(shift);
        facts[2].trend = endpoint;
        let diagnosis = with_context(|context| context.diagnose(&peer(&facts), None)).unwrap();
        assert_eq!(diagnosis.cause, Cause::LatencyShift);
        let on = "latency shift: ICMP to 172.30.0.3 (host) of default/n3 takes 4.0ms now, \
                  300.0µs before, since 2026-11-21T10:02:1";
        diagnosis.message.strip_prefix(on).unwrap()[2..].to_owned()
    };
    let others = "; 1 other target is degraded as well";
    let slow_too = shifted(4000, 300);
    assert_eq!(
        reported(shift(3_000_000, 4), slow_too),
        format!("; 3.0ms of the increase in the peer's host{others}")
    );
    assert_eq!(
        reported(shift(20_000, 4), slow_too),
        format!("; 3.7ms of the increase in the network{others}")
    );
    // Too few round trips since then; the endpoint is slow too.
    assert_eq!(reported(shift(3_000_000, 3), slow_too), others);
    assert_eq!(reported(shift(3_000_000, 3), Trend::default()), "");
    // The endpoint on the same host is as fast as before.
    let suspect = "; its health endpoint, for which eBPF answers, is as fast as before: suspect the \
                   network stack and the interrupt load of the peer's host";
    assert_eq!(
        reported(shift(3_000_000, 4), Trend::default()),
        format!("; 3.0ms of the increase in the peer's host{suspect}")
    );
    assert_eq!(
        reported(shift(20_000, 4), Trend::default()),
        "; 3.7ms of the increase in the network"
    );
}

#[test]
fn http_shifts_name_the_part_that_takes_longer() {
    let ms = Duration::from_millis;
    let reported = |handshake, connect, total, requests| {
        let since = "2026-11-21T10:02:11Z".parse().unwrap();
        let mut watch = ShiftWatch::new(since, Duration::ZERO, latency(2000, 60));
        for _ in 0..requests {
            watch.note_request(ms(handshake), ms(connect), ms(total));
        }
        let rows = [(HOST4, Up, Up)];
        let mut facts = targets(&rows);
        facts[1].trend = shifted(total * 1000, 2000);
        facts[1].shift = Some(watch.shift());
        let diagnosis = with_context(|context| context.diagnose(&peer(&facts), None)).unwrap();
        let on = "latency shift: HTTP to 172.30.0.3 port 4240 (host) of default/n3 takes 62.0ms now, \
                  2.0ms before, since 2026-11-21T10:02:11Z";
        diagnosis.message.strip_prefix(on).unwrap().to_owned()
    };
    assert_eq!(
        reported(0, 30, 62, 4),
        "; 60.0ms of the increase in this host, between uplink and agent: suspect its own network stack \
         and load"
    );
    assert_eq!(
        reported(30, 30, 62, 4),
        "; 60.0ms of the increase in the network or the network stack of the peer's host"
    );
    assert_eq!(
        reported(0, 1, 62, 4),
        "; 60.0ms of the increase after the handshake: suspect the peer's agent and the load of its host"
    );
    assert_eq!(reported(0, 1, 62, 3), "");
    // No part accounts for more than the whole increase.
    assert_eq!(
        reported(31, 31, 62, 4),
        "; 60.0ms of the increase in the network or the network stack of the peer's host"
    );
}

proptest! {
    #[test]
    fn of_a_shift_the_host_makes_no_more_than_its_time(
        usual in 1_u64..1_000_000,
        rows in prop::collection::vec((0_u64..1000, 0_u64..1_000_000_000, 0_u64..1_000_000_000), 0..6),
    ) {
        let mut watch = ShiftWatch::new(Timestamp::UNIX_EPOCH, Duration::ZERO, latency(usual, 60));
        for (samples, rtt_ns, remote_ns) in rows {
            watch.note(remote_time(&[(samples, rtt_ns, remote_ns.min(rtt_ns))]));
        }
        if let Some(growth) = watch.shift().growth {
            prop_assert!(growth.in_host <= growth.remote, "{growth:?}");
        }
    }
}

#[test]
fn a_shift_is_a_multiple_and_more_than_noise() {
    let rows = [(HOST4, Up, Up)];
    let degraded = |index: usize, trend| {
        let mut facts = targets(&rows);
        facts[index].trend = trend;
        with_context(|context| context.degraded(&facts[index])).is_some()
    };
    assert!(degraded(0, shifted(2400, 1200)));
    assert!(!degraded(0, shifted(2300, 1200)));
    assert!(!degraded(0, shifted(900, 100)));
    assert!(!degraded(1, shifted(15_000, 1000)));
    assert!(degraded(1, shifted(30_000, 1000)));
    // A known shift is measured against the time before it.
    let mut facts = targets(&rows);
    facts[0].trend = shifted(9000, 9000);
    let known = ShiftWatch::new(Timestamp::UNIX_EPOCH, Duration::ZERO, latency(1000, 60));
    facts[0].shift = Some(known.shift());
    assert!(with_context(|context| context.degraded(&facts[0])).is_some());
    facts[0].trend = shifted(1000, 9000);
    assert!(with_context(|context| context.degraded(&facts[0])).is_none());
    let mut few = shifted(9000, 1000);
    few.usual.as_mut().unwrap().samples = 19;
    assert!(!degraded(0, few));
    let mut alternating = shifted(9000, 1000);
    alternating.usual.as_mut().unwrap().p90 = Duration::from_millis(9);
    assert!(!degraded(0, alternating));
}

fn reduced(mtu: u32, reported_by: Option<&str>) -> PathMtu {
    PathMtu {
        mtu,
        way: Arc::new(WayOut {
            device: "eth0".to_owned(),
            device_mtu: 1500,
            mtu: 1500,
        }),
        notice: reported_by.map(|from| TooBig {
            from: ip(from),
            next_hop_mtu: mtu,
        }),
        probed: Timestamp::UNIX_EPOCH,
    }
}

/// The diagnosis of a peer with such paths, and with a target degraded by `trend`.
fn diagnose_paths(paths: [Option<&PathMtu>; 2], trend: Trend) -> Option<Diagnosis> {
    let rows = [(HOST4, Up, Up), (HOST6, Up, Up), (ENDPOINT4, Up, Up)];
    let mut targets = targets(&rows);
    targets[0].path_mtu = paths[0];
    targets[2].path_mtu = paths[1];
    targets[0].trend = trend;
    with_context(|context| context.diagnose(&peer(&targets), None))
}

#[test]
fn a_path_that_takes_less_than_this_host_sends_is_said() {
    let full = reduced(1500, None);
    assert_eq!(diagnose_paths([Some(&full), None], Trend::default()), None);

    let (reported, silent) = (reduced(1400, Some(ROUTER)), reduced(1404, None));
    let diagnosis = diagnose_paths([Some(&reported), None], Trend::default()).unwrap();
    assert_eq!(diagnosis.cause, Cause::PathMtu);
    assert_eq!(
        diagnosis.message,
        "path MTU: 192.0.2.1 accepts packets of at most 1400 bytes to default/n3 on 172.30.0.3, \
         though eth0 allows 1500; each connection must discover this limit on its own; correct the \
         MTU on the way, or set the route's MTU to 1400"
    );
    assert_eq!(
        diagnosis.evidence,
        [
            "path to 172.30.0.3: packets of 1400 bytes are answered, packets of 1401 bytes are \
             rejected by 192.0.2.1: packet too big, next-hop MTU 1400; eth0 allows 1500"
        ]
    );

    // A black hole is worse.
    let diagnosis = diagnose_paths([Some(&reported), Some(&silent)], Trend::default()).unwrap();
    assert_eq!(
        diagnosis.message,
        "path MTU: packets larger than 1404 bytes to default/n3 on fd00:30::3 vanish without an \
         ICMP error, though eth0 allows 1500; connections that carry a lot of data hang; correct \
         the MTU on the way, or let ICMP \"packet too big\" pass"
    );
    assert_eq!(diagnosis.evidence.len(), 2);
    assert_eq!(
        diagnosis.evidence[1],
        "path to fd00:30::3: packets of 1404 bytes are answered, packets of 1405 bytes are lost \
         without an ICMP error; eth0 allows 1500"
    );

    // If two faults are of the same kind, the smaller MTU is reported.
    let smaller = reduced(1280, None);
    for paths in [[&smaller, &silent], [&silent, &smaller]] {
        let diagnosis = diagnose_paths(paths.map(Some), Trend::default()).unwrap();
        let said = "path MTU: packets larger than 1280 bytes";
        assert!(diagnosis.message.starts_with(said), "{diagnosis:?}");
    }
}

#[test]
fn loss_is_worse_than_a_black_hole_and_that_than_a_shift_and_that_than_a_known_mtu() {
    let (reported, silent) = (reduced(1400, Some(ROUTER)), reduced(1404, None));
    let cause = |path, trend| diagnose_paths([Some(path), None], trend).unwrap().cause;
    let shift = shifted(9000, 1000);
    assert_eq!(cause(&silent, lost(30, 60)), Cause::Loss);
    assert_eq!(cause(&silent, shift), Cause::PathMtu);
    assert_eq!(cause(&reported, shift), Cause::LatencyShift);
    // A failure is worse than all of them.
    let rows = [(HOST4, Up, refused()), (ENDPOINT4, Up, refused())];
    let mut targets = targets(&rows);
    targets[0].path_mtu = Some(&silent);
    let diagnosis = with_context(|context| context.diagnose(&peer(&targets), None));
    assert_eq!(diagnosis.unwrap().cause, Cause::AgentDown);
}

#[test]
fn chance_is_no_loss() {
    let exceeds = |lost, probes, threshold| {
        let window = Duration::from_secs(600);
        exceeds_loss_threshold(
            &Loss {
                probes,
                lost,
                window,
            },
            threshold,
        )
    };
    // Right after a start: the first probe and its confirming probes were lost.
    assert!(!exceeds(0, 0, 0.05));
    assert!(!exceeds(1, 1, 0.05));
    assert!(!exceeds(3, 4, 0.05));
    // R: pbinom(c(10, 11), 60, 0.05, lower = F) is 1.9e-4 and 4.5e-5.
    assert!(!exceeds(11, 60, 0.05));
    assert!(exceeds(12, 60, 0.05));
    assert!(exceeds(60, 60, 0.05));
    assert!(exceeds(2000, 4000, 0.05));
    assert!(!exceeds(200, 4000, 0.05));
    assert!(exceeds(1, 60, 0.0));
    assert!(!exceeds(60, 60, 1.0));
}

/// Survey in which `failing` of `peers` peers have this row, and the others are up.
fn survey(failing: usize, peers: usize, row: &[Row<'_>]) -> Option<Isolation> {
    let up: Vec<Row<'_>> = row.iter().map(|r| (r.0, Up, Up)).collect();
    let (failed, up) = (targets(row), targets(&up));
    with_context(|context| {
        let mut survey = Survey::default();
        for number in 0..peers {
            let targets = if number < failing { &failed } else { &up };
            survey.add(context, &peer(targets));
        }
        survey.diagnose(context, "default/n1", &[])
    })
}

#[test]
fn when_most_peers_refuse_its_clock_or_key_it_is_this_node() {
    for (failure, cause, message) in [
        (
            Failure::ClockDiffers { ahead: 86_400 },
            Cause::ClockDiffers,
            "clock differs: default/n1: its clock differs from the clocks of 9 of 10 peers; set it",
        ),
        (
            Failure::KeyRefused,
            Cause::WrongKey,
            "wrong key: default/n1: 9 of 10 peers refuse its mesh key; compare its --mesh-key-file \
             with theirs",
        ),
    ] {
        let refused = Given::Down(failure);
        let row = [
            (HOST4, Up, refused.clone()),
            (ENDPOINT4, Up, refused.clone()),
        ];
        let reported = survey(9, 10, &row).unwrap().diagnosis;
        assert_eq!(
            (reported.cause, reported.message.as_str()),
            (cause, message)
        );
        assert!(survey(7, 10, &row).is_none());
        // An endpoint that answers properly proves that this node is fine.
        let one_answers = [(HOST4, Up, refused), (ENDPOINT4, Up, Up)];
        assert!(survey(9, 10, &one_answers).is_none());
    }
}

#[test]
fn when_most_peers_fail_it_is_this_node() {
    let down = [(HOST4, silent(), silent()), (ENDPOINT4, silent(), silent())];
    let isolation = survey(9, 10, &down).unwrap();
    assert_eq!(isolation.scope, Scope::Everything);
    assert_eq!(isolation.diagnosis.cause, Cause::ThisNodeIsolated);
    assert_eq!(
        isolation.diagnosis.message,
        "this node isolated: default/n1: no answer from 9 of 10 peers: check its uplink and \
         firewall"
    );
    assert!(survey(7, 10, &down).is_none());
    assert!(survey(2, 2, &down).is_none());
    assert!(survey(3, 3, &down).is_some());

    let no_route = || os(Errno::ENETUNREACH);
    let isolation = survey(4, 4, &[(HOST4, no_route(), no_route())]).unwrap();
    assert_eq!(
        isolation.diagnosis.message,
        "this node isolated: default/n1: no answer from 4 of 4 peers: Network is unreachable; \
         check its routes"
    );
    let no_arp = [(HOST4, icmp(3, 1, SELF4), os(Errno::EHOSTUNREACH))];
    let isolation = survey(4, 4, &no_arp).unwrap();
    assert!(
        isolation
            .diagnosis
            .message
            .ends_with("check its link and gateway"),
        "{isolation:?}"
    );
}

#[test]
fn agents_that_are_down_are_not_this_nodes_fault() {
    assert!(survey(9, 9, &[(HOST4, Up, refused()), (ENDPOINT4, Up, refused())]).is_none());
    assert!(
        survey(9, 9, &[(HOST4, silent(), refused())])
            .is_none_or(|isolation| { isolation.scope == Scope::Icmp })
    );
    assert!(survey(9, 9, &[(HOST4, silent(), Unknown)]).is_none());
}

#[test]
fn this_node_may_be_cut_off_in_part() {
    for (row, scope) in [
        (
            [(HOST4, silent(), Up), (ENDPOINT4, silent(), Up)],
            Scope::Icmp,
        ),
        (
            [(HOST4, Up, silent()), (ENDPOINT4, Up, silent())],
            Scope::Http,
        ),
        (
            [(HOST4, Up, Up), (ENDPOINT4, silent(), silent())],
            Scope::Endpoints,
        ),
        ([(HOST4, Up, Up), (HOST6, silent(), silent())], Scope::Ipv6),
        ([(HOST4, silent(), silent()), (HOST6, Up, Up)], Scope::Ipv4),
    ] {
        let isolation = survey(8, 10, &row).unwrap();
        assert_eq!(isolation.scope, scope, "{isolation:?}");
        with_context(|context| {
            let blamed = context
                .diagnose(&peer(&targets(&row)), Some(&isolation))
                .unwrap();
            assert_eq!(blamed.cause, Cause::ThisNodeIsolated);
            assert!(
                blamed
                    .message
                    .starts_with("default/n3 is not diagnosed: this node is isolated")
            );
            // A peer with a problem of its own keeps its own diagnosis.
            let mut own = row.clone();
            for (_, icmp, http) in &mut own {
                (*icmp, *http) = (Up, refused());
            }
            let own = context
                .diagnose(&peer(&targets(&own)), Some(&isolation))
                .unwrap();
            assert_eq!(own.cause, Cause::AgentDown);
        });
    }
}

#[test]
fn a_lost_carrier_is_named() {
    let row = [(HOST4, os(Errno::ENETDOWN), os(Errno::ENETDOWN))];
    let facts = targets(&row);
    with_context(|context| {
        let mut survey = Survey::default();
        for _ in 0..3 {
            survey.add(context, &peer(&facts));
        }
        let isolation = survey.diagnose(context, "default/n1", &["eth0"]).unwrap();
        assert!(isolation.diagnosis.message.contains("no carrier on eth0"));
    });
}

#[test]
fn causes_are_kebab_case() {
    let json = serde_json::to_string(&Cause::EndpointDatapathDown).unwrap();
    assert_eq!(json, "\"endpoint-datapath-down\"");
}

fn any_failure() -> impl Strategy<Value = Failure> {
    let from = prop::sample::select(vec![
        HOST4,
        ENDPOINT4,
        ROUTER,
        SELF4,
        HOST6,
        ENDPOINT6,
        SELF6,
        "2001:db8::1",
    ]);
    prop_oneof![
        Just(Failure::TimedOut),
        Just(Failure::ResponseTimedOut),
        Just(Failure::Closed),
        Just(Failure::NoFamily),
        (1..134).prop_map(|errno| Failure::Os(Errno::from_raw(errno))),
        (0_u8..16, 0_u8..16, from).prop_map(|(kind, code, from)| {
            let from = ip(from);
            Failure::Icmp(IcmpError { kind, code, from })
        }),
    ]
}

fn any_given() -> impl Strategy<Value = Given> {
    prop_oneof![
        1 => Just(Off),
        3 => Just(Up),
        2 => Just(silent()),
        1 => Just(refused()),
        3 => any_failure().prop_map(Given::Down),
    ]
}

proptest! {
    #[test]
    fn every_failure_has_a_diagnosis_of_one_line(
        given in prop::collection::vec((any_given(), any_given()), 1..=5),
    ) {
        let addresses = [HOST4, ENDPOINT4, HOST6, ENDPOINT6, "172.31.0.3"];
        let rows: Vec<Row<'_>> = addresses
            .into_iter()
            .zip(given)
            .map(|(address, (icmp, http))| (address, icmp, http))
            .collect();
        let down: fn(&Given) -> bool = |given| matches!(given, Given::Down(_));
        let up: fn(&Given) -> bool = |given| matches!(given, Up);
        let any = |is: fn(&Given) -> bool| rows.iter().any(|r| is(&r.1) || is(&r.2));
        let diagnosis = diagnose(&rows);
        if any(down) {
            let diagnosis = diagnosis.unwrap();
            let probed = rows.iter().flat_map(|r| [&r.1, &r.2]);
            let probed = probed.filter(|given| !matches!(given, Off)).count();
            prop_assert_eq!(diagnosis.evidence.len(), probed);
            let mut lines = diagnosis.evidence.iter().chain([&diagnosis.message]);
            prop_assert!(lines.all(|line| !line.contains('\n') && !line.contains("  ")));
            prop_assert!(!diagnosis.message.contains(" on ,"), "{}", diagnosis.message);
            prop_assert!(!diagnosis.message.contains(" on ;"), "{}", diagnosis.message);
            if diagnosis.cause == Cause::NodeDown {
                prop_assert!(!any(up), "{rows:?}");
            }
        } else {
            prop_assert!(diagnosis.is_none_or(|d| d.cause == Cause::EndpointAddressUnknown));
        }
        let unknown: Vec<Row<'_>> =
            rows.iter().map(|r| (r.0, r.1.clone(), Unknown)).collect();
        prop_assert_eq!(self::diagnose(&unknown), None);
    }
}
