//! Tests the mesh on real networks, in its own network namespaces.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use health_common::probe::Path;
use health_common::rtt::RttKey;
use health_datapath::rtt_store::RttStore;
use health_model::activity::Severity;
use health_model::api::{
    ConnectivityStatus, HealthStatus, NodeStatus, PathStatus, Reachability, RttSource,
};
use health_registry::nodes::{Node, NodeSet};
use health_settings::ProbeIntervals;
use tokio::sync::watch;
use tokio::time::Instant;

use super::hello::{self, Identity, Responder};
use super::mesh_key::MeshKeys;
use super::target::{Protocol, TargetKey};
use super::testing::{EchoResponder, MemoryStore, Namespace, NoArrivals, PATIENCE, slowness};
use super::{Mesh, MeshHandle, MeshOptions, Tuning};

const PORT: u16 = 4240;
const TIMEOUT: Duration = Duration::from_millis(400);
/// An interval longer than any test: anything that arrives regardless is early.
const ENDLESS: Duration = Duration::from_secs(24 * 3600);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn ips(list: &[&str]) -> Vec<IpAddr> {
    list.iter().map(|text| ip(text)).collect()
}

fn node(name: &str, addresses: &[&str]) -> Node {
    Node {
        name: name.to_owned(),
        cluster: "default".to_owned(),
        addresses: ips(addresses),
        secondary_addresses: Vec::new(),
        pod_cidrs: Vec::new(),
        health_addresses: Vec::new(),
        labels: BTreeMap::new(),
    }
}

fn key(address: &str, path: Path, protocol: Protocol) -> TargetKey {
    TargetKey {
        address: ip(address),
        path,
        protocol,
    }
}

/// A mesh and its inputs.
struct Bed {
    mesh: MeshHandle,
    store: Arc<MemoryStore>,
    nodes: watch::Sender<Arc<NodeSet>>,
    local_health: watch::Sender<Vec<IpAddr>>,
    state_dir: tempfile::TempDir,
}

fn options(state_dir: &std::path::Path) -> MeshOptions {
    MeshOptions {
        local: "default/a".to_owned(),
        local_addresses: ips(&["172.30.0.1", "fd00:30::1"]),
        uplinks: vec!["eth0".to_owned()],
        tuning: Tuning {
            intervals: ProbeIntervals::all(Duration::from_secs(10)),
            rate: 10_000,
            timeout: TIMEOUT,
            loss_threshold: 0.05,
            passive_relief: 1,
            path_mtu_interval: None,
        },
        passive_rtt: true,
        port: PORT,
        icmp_id: rand::random(),
        session: 7,
        keys: MeshKeys::default(),
        one_way: false,
        hosts_only: None,
        state_dir: state_dir.to_owned(),
        full_maps: watch::channel(Vec::new()).1,
        policy_lag: watch::channel(None).1,
        problems: watch::channel(Vec::new()).1,
    }
}

fn node_set(nodes: Vec<Node>) -> Arc<NodeSet> {
    Arc::new(NodeSet {
        nodes,
        sources: Vec::new(),
    })
}

impl Bed {
    fn start(nodes: Vec<Node>) -> Self {
        Self::start_with(nodes, |_| {})
    }

    fn start_with(nodes: Vec<Node>, adjust: impl FnOnce(&mut MeshOptions)) -> Self {
        let state_dir = tempfile::tempdir().unwrap();
        let store = Arc::new(MemoryStore::default());
        let (nodes, watch_nodes) = watch::channel(node_set(nodes));
        let (local_health, watch_health) = watch::channel(Vec::new());
        let mut options = options(state_dir.path());
        adjust(&mut options);
        let mesh = Mesh::start(options, watch_nodes, store.clone(), watch_health).unwrap();
        Self {
            mesh,
            store,
            nodes,
            local_health,
            state_dir,
        }
    }

    /// Like [`Self::start`], without regular probes after the first ones.
    fn start_endless(nodes: Vec<Node>) -> Self {
        Self::start_with(nodes, |options| {
            options.tuning.intervals = ProbeIntervals::all(ENDLESS);
        })
    }

    /// Waits until the report satisfies `wanted`.
    async fn until(&self, what: &str, wanted: impl Fn(&HealthStatus) -> bool) -> HealthStatus {
        let deadline = Instant::now() + PATIENCE * slowness();
        loop {
            let report = self.mesh.report();
            if wanted(&report) {
                return report;
            }
            assert!(Instant::now() < deadline, "never {what}: {report:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn path<'a>(report: &'a HealthStatus, address: &str) -> &'a PathStatus {
    let address = ip(address);
    let groups = report.nodes.iter().flat_map(|node| {
        let endpoint = node.health_endpoint.iter();
        std::iter::once(&node.host).chain(endpoint)
    });
    let mut paths = groups.flat_map(|group| group.paths());
    paths.find(|path| path.ip == address).unwrap()
}

fn is_complete(report: &HealthStatus) -> bool {
    let mut paths = report.nodes.iter().flat_map(|node| {
        let endpoint = node.health_endpoint.iter();
        std::iter::once(&node.host)
            .chain(endpoint)
            .flat_map(|group| group.paths())
    });
    paths.all(|path| path.icmp.is_some() && path.http.is_some())
}

fn icmp_text<'a>(report: &'a HealthStatus, address: &str) -> &'a str {
    &path(report, address).icmp.as_ref().unwrap().status
}

fn http_text<'a>(report: &'a HealthStatus, address: &str) -> &'a str {
    &path(report, address).http.as_ref().unwrap().status
}

/// The node's identity, with the key from [`options`].
fn identity(node: &str) -> Identity {
    Identity {
        node: format!("default/{node}"),
        keys: Arc::default(),
        hosts_only: false,
    }
}

/// Answers `/hello` as a node on addresses inside a namespace, and reports `health_endpoint`.
fn respond(
    namespace: &Namespace,
    name: &str,
    addresses: &[&str],
    health_endpoint: &[&str],
) -> Responder {
    let addresses = ips(addresses);
    let listeners = namespace.enter(|| hello::bind(&addresses, PORT).unwrap());
    Responder::start(
        identity(name),
        listeners,
        watch::channel(ips(health_endpoint)).1,
        Arc::new(NoArrivals),
    )
    .unwrap()
}

/// The prober's namespace, and another one that is both its peer and its router.
fn two_namespaces() -> Option<(Namespace, Namespace)> {
    let here = Namespace::new()?;
    let there = Namespace::new()?;
    here.join(&there);
    here.ip("addr add 172.30.0.1/24 dev eth0");
    here.ip("addr add fd00:30::1/64 dev eth0 nodad");
    for address in ["172.30.0.2/24", "172.30.0.3/24"] {
        there.ip(&format!("addr add {address} dev eth0"));
    }
    there.ip("addr add fd00:30::2/64 dev eth0 nodad");
    there.sysctl("ipv4/ip_forward", "1");
    there.sysctl("ipv6/conf/all/forwarding", "1");
    // Every probe must get its error.
    there.sysctl("ipv4/icmp_ratelimit", "0");
    there.sysctl("ipv6/icmp/ratelimit", "0");
    here.ip("route add default via 172.30.0.2");
    here.ip("route add default via fd00:30::2");
    Some((here, there))
}

#[test]
fn an_http_probe_shows_the_handshake_that_the_kernel_timed() {
    const HANDSHAKE_NS: u64 = 1234;
    let Some(here) = Namespace::new() else { return };
    here.ip("addr add 172.30.0.2/32 dev lo");
    here.block_on(async || {
        let _responder = respond(&here, "b", &["172.30.0.2"], &[]);
        let bed = Bed::start(vec![node("b", &["172.30.0.2"])]);
        let timed = &bed.store.handshake_ns;
        timed.store(HANDSHAKE_NS, Ordering::Relaxed);
        let report = bed.mesh.probe_now().await;
        let http = path(&report, "172.30.0.2").http.as_ref().unwrap();
        assert_eq!(http.rtt_source, Some(RttSource::Kernel));
        assert_eq!(http.latency, HANDSHAKE_NS as i64);
        assert!(http.connect_latency.unwrap() < http.total_latency.unwrap());
        let row = bed
            .store
            .get(key("172.30.0.2", Path::Host, Protocol::Http))
            .unwrap();
        assert_eq!(row.last_ns, HANDSHAKE_NS);
        // Connections to the address are followed for as long as it is probed.
        assert_eq!(bed.store.followed().unwrap(), ips(&["172.30.0.2"]));
        bed.nodes.send_replace(node_set(Vec::new()));
        bed.until("without nodes", |report| report.nodes.is_empty())
            .await;
        assert!(bed.store.followed().unwrap().is_empty());
    });
}

#[test]
fn the_local_node_is_probed_at_the_socket() {
    let Some(here) = Namespace::new() else { return };
    for address in ["172.30.0.1/32", "10.244.1.7/32"] {
        here.ip(&format!("addr add {address} dev lo"));
    }
    here.ip("addr add fd00:30::1/128 dev lo nodad");
    here.block_on(async || {
        let _responder = respond(&here, "a", &["172.30.0.1", "fd00:30::1", "10.244.1.7"], &[]);
        let bed = Bed::start(vec![node("a", &["172.30.0.1", "fd00:30::1"])]);
        let report = bed.mesh.report();
        assert_eq!(report.nodes[0].reachability(), Reachability::Unknown);
        bed.local_health.send_replace(ips(&["10.244.1.7"]));
        let report = bed
            .until("all reachable", |report| {
                report.nodes[0].reachability() == Reachability::Reachable
            })
            .await;
        for address in ["172.30.0.1", "fd00:30::1", "10.244.1.7"] {
            let path = path(&report, address);
            let icmp = path.icmp.as_ref().unwrap();
            assert_eq!(icmp.rtt_source, Some(RttSource::Socket));
            assert!(icmp.latency > 0, "{icmp:?}");
            let http = path.http.as_ref().unwrap();
            assert_eq!(http.connect_latency, Some(http.latency));
            assert!(http.latency < http.total_latency.unwrap(), "{http:?}");
        }
        for protocol in [Protocol::Icmp, Protocol::Http] {
            let row = bed
                .store
                .get(key("172.30.0.1", Path::Host, protocol))
                .unwrap();
            assert_eq!((row.samples, row.lost), (1, 0));
        }
        assert!(report.timestamp.is_some());
        for table in ["tcp", "tcp6"] {
            let sockets =
                std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap();
            let states = sockets
                .lines()
                .skip(1)
                .filter_map(|line| line.split_whitespace().nth(3));
            // TIME_WAIT, include/net/tcp_states.h.
            assert_eq!(
                states.filter(|&state| state == "06").count(),
                0,
                "{sockets}"
            );
        }
        let listed = bed.mesh.nodes();
        assert!(listed.nodes[0].local);
        assert_eq!(listed.nodes[0].health_addresses, ips(&["10.244.1.7"]));
        bed.mesh.shutdown().await;
    });
}

#[test]
fn each_failure_says_what_is_broken() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    there.ip("route add blackhole 172.31.0.4");
    there.ip("route add unreachable 172.31.0.5");
    there.ip("route add prohibit 172.31.0.6");
    here.ip("route add unreachable 172.31.0.7");
    there.ip("route add unreachable fd00:31::5");
    there.ip("route add prohibit fd00:31::6");
    here.block_on(async || {
        let _responder = respond(&there, "b", &["172.30.0.2", "fd00:30::2"], &[]);
        let nodes = [
            ("b", &["172.30.0.2", "fd00:30::2"][..]),
            ("refused", &["172.30.0.3"]),
            ("silent", &["172.31.0.4"]),
            ("unreachable", &["172.31.0.5", "fd00:31::5"]),
            ("prohibited", &["172.31.0.6", "fd00:31::6"]),
            ("unroutable", &["172.31.0.7"]),
        ];
        let nodes = nodes.iter().map(|(name, ips)| node(name, ips));
        let bed = Bed::start_endless(nodes.collect());
        // On a busy machine a first answer may arrive after its probe has timed out.
        let report = bed
            .until("complete, and what answers reachable", |report| {
                let answering = ["172.30.0.2", "fd00:30::2"].map(|address| path(report, address));
                is_complete(report)
                    && answering
                        .iter()
                        .all(|path| path.reachability() == Reachability::Reachable)
            })
            .await;
        assert_eq!(icmp_text(&report, "172.30.0.3"), "");
        assert_eq!(http_text(&report, "172.30.0.3"), "Connection refused");
        let expected = [
            ("172.31.0.4", "Connection timed out"),
            ("172.31.0.5", "No route to host (from 172.30.0.2)"),
            ("fd00:31::5", "No route to host (from fd00:30::2)"),
            ("172.31.0.6", "Communication prohibited (from 172.30.0.2)"),
            ("fd00:31::6", "Communication prohibited (from fd00:30::2)"),
            ("172.31.0.7", "No route to host"),
        ];
        // On a busy machine an error may arrive after its probe has timed out.
        bed.until("what is broken", |report| {
            expected.iter().all(|(address, text)| {
                icmp_text(report, address) == *text && http_text(report, address) == *text
            })
        })
        .await;
        let lost = bed
            .store
            .get(key("172.31.0.5", Path::Host, Protocol::Icmp))
            .unwrap();
        assert!(lost.lost >= 1 && lost.samples == 0);
        bed.mesh.shutdown().await;
    });
}

#[test]
fn a_prober_that_cannot_send_says_so() {
    let Some(here) = Namespace::new() else {
        return;
    };
    here.block_on(async || {
        // No device has a route there.
        let bed = Bed::start(vec![node("a", &["172.30.0.1"])]);
        bed.until("the results", is_complete).await;
        let reported = bed.mesh.prober();
        let problem = reported.problem.as_ref().expect("a problem");
        assert_eq!(problem.severity, Severity::Warning);
        let words = "ICMP probes could be sent: Network is unreachable";
        assert!(problem.reason.contains(words), "{reported:?}");
    });
}

#[test]
fn a_failure_and_a_recovery_are_seen_early() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    here.block_on(async || {
        let _responder = respond(&there, "b", &["172.30.0.2"], &[]);
        let bed = Bed::start_endless(vec![node("b", &["172.30.0.2"])]);
        let is =
            |wanted| move |report: &HealthStatus| report.nodes[0].host.reachability() == wanted;
        bed.until("reachable", is(Reachability::Reachable)).await;
        there.ip("link set eth0 down");
        bed.mesh.probe_now().await;
        assert_eq!(
            bed.mesh.report().nodes[0].host.reachability(),
            Reachability::Unreachable
        );
        there.ip("link set eth0 up");
        bed.until("reachable again", is(Reachability::Reachable))
            .await;
        bed.mesh.shutdown().await;
    });
}

#[test]
fn a_node_that_is_cut_off_blames_itself_and_names_the_device() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    there.ip("addr add 172.30.0.4/24 dev eth0");
    let peers = ["172.30.0.2", "172.30.0.3", "172.30.0.4"];
    here.block_on(async || {
        let peers = || ["b", "c", "d"].into_iter().zip(peers);
        let responders = peers().map(|(name, address)| respond(&there, name, &[address], &[]));
        let _responders: Vec<_> = responders.collect();
        let nodes = peers();
        let nodes = nodes.map(|(name, address)| node(name, &[address]));
        let bed = default_bed(nodes.collect(), Duration::from_millis(200)).await;
        assert_eq!(bed.mesh.report().local.diagnosis, None);
        there.ip("link set eth0 down");
        let report = bed
            .until("isolated for want of a carrier", |report| {
                // On a busy machine, HTTP may time out before the echoes do.
                let reported = report.local.diagnosis.as_ref();
                reported.is_some_and(|reported| reported.message.contains("no carrier on eth0"))
            })
            .await;
        assert_eq!(report.local.diagnosis.unwrap().cause, "this-node-isolated");
        there.ip("link set eth0 up");
        bed.until("back", |report| {
            report.local.diagnosis.is_none() && all_hosts_are(report, Reachability::Reachable)
        })
        .await;
        bed.mesh.shutdown().await;
    });
}

#[test]
fn a_reload_keeps_what_is_known_of_addresses_that_stay() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    here.block_on(async || {
        let _responders = [("b", "172.30.0.2"), ("c", "172.30.0.3")]
            .map(|(name, address)| respond(&there, name, &[address], &[]));
        let bed = Bed::start(vec![node("b", &["172.30.0.2"]), node("c", &["172.30.0.3"])]);
        let before = bed.until("complete", is_complete).await;
        bed.nodes.send_replace(node_set(vec![
            node("b", &["172.30.0.2"]),
            node("d", &["172.30.0.9"]),
        ]));
        let after = bed
            .until("reloaded", |report| report.nodes[1].name == "default/d")
            .await;
        assert_eq!(path(&after, "172.30.0.2"), path(&before, "172.30.0.2"));
        assert_eq!(
            path(&after, "172.30.0.9").reachability(),
            Reachability::Unknown
        );
        assert!(
            bed.store
                .get(key("172.30.0.2", Path::Host, Protocol::Icmp))
                .is_some()
        );
        assert!(
            bed.store
                .get(key("172.30.0.3", Path::Host, Protocol::Icmp))
                .is_none()
        );
        assert!(
            bed.store
                .get(key("172.30.0.9", Path::Host, Protocol::Http))
                .is_some()
        );
        bed.mesh.shutdown().await;
    });
}

#[test]
fn rows_of_peers_that_went_meanwhile_are_removed_at_the_start() {
    let Some(here) = Namespace::new() else { return };
    here.block_on(async || {
        let state_dir = tempfile::tempdir().unwrap();
        let store = Arc::new(MemoryStore::default());
        let gone = RttKey::from(key("172.30.0.9", Path::Host, Protocol::Icmp));
        let stays = RttKey::from(key("172.30.0.1", Path::Host, Protocol::Icmp));
        for key in [gone, stays] {
            store.ensure(key).unwrap();
        }
        store.sample(stays, 7).unwrap();
        let (_nodes, nodes) = watch::channel(node_set(vec![node("a", &["172.30.0.1"])]));
        let (_health, health) = watch::channel(Vec::new());
        let options = options(state_dir.path());
        let mesh = Mesh::start(options, nodes, store.clone(), health).unwrap();
        assert!(store.get(gone).is_none());
        assert_eq!(store.get(stays).unwrap().samples, 1);
        mesh.shutdown().await;
    });
}

#[test]
fn a_peer_reports_its_health_endpoint_and_that_is_remembered() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    there.ip("addr add 10.244.2.17/32 dev lo");
    here.block_on(async || {
        let mut peer = node("b", &["172.30.0.2"]);
        peer.pod_cidrs = vec!["10.244.2.0/24".parse().unwrap()];
        let bed = Bed::start(vec![peer.clone()]);
        let hello = respond(&there, "b", &["172.30.0.2"], &["10.244.2.17"]);
        let endpoint = respond(&there, "b", &["10.244.2.17"], &[]);
        bed.until("learned", |report| {
            report.nodes[0].reachability() == Reachability::Reachable
        })
        .await;
        hello.shutdown().await;
        endpoint.shutdown().await;
        let report = bed.mesh.probe_now().await;
        assert_eq!(http_text(&report, "10.244.2.17"), "Connection refused");
        assert_eq!(icmp_text(&report, "10.244.2.17"), "");
        bed.mesh.shutdown().await;

        let (_nodes, nodes) = watch::channel(node_set(vec![peer.clone()]));
        let (_health, health) = watch::channel(Vec::new());
        let options = options(bed.state_dir.path());
        let mesh = Mesh::start(options, nodes, bed.store.clone(), health).unwrap();
        assert_eq!(
            mesh.nodes().nodes[0].health_addresses,
            ips(&["10.244.2.17"])
        );
        mesh.shutdown().await;
    });
}

/// Probes on request until a single request yields a new result for each target: on a busy machine a probe may be sent
/// too late for its request.
async fn probed_anew(bed: &Bed) -> HealthStatus {
    let deadline = Instant::now() + PATIENCE * slowness();
    loop {
        let asked = jiff::Timestamp::now();
        let report = bed.mesh.probe_now().await;
        let is_new = |status: &ConnectivityStatus| status.last_probed >= asked;
        let of_node = |node| host_statuses(node).into_iter().all(is_new);
        if report.nodes.iter().all(of_node) {
            return report;
        }
        assert!(Instant::now() < deadline, "never all anew: {report:#?}");
    }
}

fn host_statuses(node: &NodeStatus) -> [&ConnectivityStatus; 2] {
    let path = &node.host.primary_address;
    [path.icmp.as_ref().unwrap(), path.http.as_ref().unwrap()]
}

#[test]
fn probing_on_request_ends_and_distinguishes_the_dead_from_the_living() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    there.ip("route add blackhole 172.31.0.0/16");
    // No more than can be probed at once.
    let all_dead = 100 / slowness().pow(2);
    here.block_on(async || {
        let _responder = respond(&there, "b", &["172.30.0.2"], &[]);
        let mut nodes = vec![node("b", &["172.30.0.2"])];
        for dead in 1..=all_dead {
            nodes.push(node(
                &format!("dead{dead:03}"),
                &[&format!("172.31.0.{dead}")],
            ));
        }
        let bed = Bed::start(nodes);
        bed.until("complete", is_complete).await;
        let (first, second) = tokio::join!(probed_anew(&bed), probed_anew(&bed));
        for report in [&first, &second] {
            for node in &report.nodes {
                for status in host_statuses(node) {
                    assert_eq!(status.is_ok(), node.name == "default/b");
                }
            }
        }
        bed.mesh.shutdown().await;
        // A report of the last known state is still available.
        let nodes = bed.mesh.probe_now().await.nodes;
        assert_eq!(nodes.len(), 1 + all_dead as usize);
    });
}

#[test]
fn probing_on_request_has_a_new_result_of_each_of_few_targets() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    there.ip("route add blackhole 172.31.0.0/16");
    here.block_on(async || {
        let names = (1..=10).map(|dead| (format!("dead{dead}"), format!("172.31.0.{dead}")));
        let bed = Bed::start(names.map(|(name, ip)| node(&name, &[&ip])).collect());
        bed.until("complete", is_complete).await;
        for _ in 0..10 {
            let report = probed_anew(&bed).await;
            assert_eq!(report.nodes.len(), 10);
        }
        bed.mesh.shutdown().await;
    });
}

#[test]
fn a_target_that_stays_silent_is_probed_less_and_less_often() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    there.sysctl("ipv4/icmp_echo_ignore_all", "1");
    here.block_on(async || {
        let bed = Bed::start_endless(vec![node("b", &["172.30.0.2"])]);
        let target = key("172.30.0.2", Path::Host, Protocol::Icmp);
        let lost = || bed.store.get(target).map_or(0, |row| row.lost);
        // Each failure is detected one time-out after its probe. None of them makes the next probe earlier.
        let pause = TIMEOUT * 3;
        let last = Cell::new((0, Instant::now()));
        bed.until("pausing", |_| {
            let (count, since) = last.get();
            if lost() != count {
                last.set((lost(), Instant::now()));
            }
            count >= 3 && since.elapsed() >= pause
        })
        .await;
        bed.mesh.shutdown().await;
    });
}

#[test]
fn late_and_duplicate_replies_change_nothing() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    let late = TIMEOUT + Duration::from_millis(100);
    let _echo = EchoResponder::start(&there, move |to, _| {
        if to == ip("172.30.0.2") {
            vec![late, late]
        } else {
            vec![Duration::ZERO; 3]
        }
    });
    here.block_on(async || {
        let bed = Bed::start_endless(vec![node("b", &["172.30.0.2"]), node("c", &["172.30.0.3"])]);
        bed.until("complete", is_complete).await;
        // Two duplicates from one peer, and at least two late replies.
        let ignored = || bed.mesh.ignored_replies().unexpected;
        bed.until("late", |_| ignored() >= 4).await;
        let report = bed.mesh.probe_now().await;
        assert_eq!(icmp_text(&report, "172.30.0.2"), "Connection timed out");
        assert_eq!(icmp_text(&report, "172.30.0.3"), "");
        let late = bed
            .store
            .get(key("172.30.0.2", Path::Host, Protocol::Icmp))
            .unwrap();
        assert!(late.samples == 0 && late.lost >= 2, "{late:?}");
        let twice = bed
            .store
            .get(key("172.30.0.3", Path::Host, Protocol::Icmp))
            .unwrap();
        assert_eq!((twice.samples, twice.lost), (2, 0));
        bed.mesh.shutdown().await;
    });
}

#[test]
fn a_reply_that_waits_for_a_busy_agent_is_neither_late_nor_slow() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    let asked = Arc::new(AtomicBool::new(false));
    let (delay, noted) = (Duration::from_millis(20), asked.clone());
    let _echo = EchoResponder::start(&there, move |_, _| {
        noted.store(true, Ordering::Relaxed);
        vec![delay]
    });
    here.block_on(async || {
        let bed = Bed::start(vec![node("b", &["172.30.0.2"])]);
        while !asked.load(Ordering::Relaxed) {
            tokio::task::yield_now().await;
        }
        // The mesh blocks as soon as it has a result to store, the HTTP result.
        let held = bed.mesh.shared.results();
        std::thread::sleep(TIMEOUT * 2);
        drop(held);
        let report = bed.until("complete", is_complete).await;
        let icmp = path(&report, "172.30.0.2").icmp.as_ref().unwrap();
        assert_eq!(icmp.status, "");
        let rtt = Duration::from_nanos(icmp.latency as u64);
        // By the agent's own clock it would be twice the time-out.
        assert!(rtt >= delay && rtt < TIMEOUT, "{rtt:?}");
        bed.mesh.shutdown().await;
    });
}

#[test]
fn the_kernels_round_trip_is_taken_where_it_measured_one() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    here.block_on(async || {
        let bed = Bed::start(vec![node("b", &["172.30.0.2"]), node("c", &["172.30.0.3"])]);
        let store = bed.store.clone();
        let _echo = EchoResponder::start(&there, move |to, sequence| {
            let measured = key("172.30.0.2", Path::Host, Protocol::Icmp);
            if to == measured.address {
                store.stamp(measured, 12_345, sequence);
            }
            vec![Duration::ZERO]
        });
        let ok = |report: &HealthStatus, address| {
            path(report, address)
                .icmp
                .as_ref()
                .is_some_and(|icmp| icmp.is_ok())
        };
        let both = |report: &HealthStatus| ok(report, "172.30.0.2") && ok(report, "172.30.0.3");
        bed.until("answered", both).await;
        let report = bed.mesh.probe_now().await;
        let icmp = path(&report, "172.30.0.2").icmp.as_ref().unwrap();
        assert_eq!(
            (icmp.latency, icmp.rtt_source),
            (12_345, Some(RttSource::Kernel))
        );
        let icmp = path(&report, "172.30.0.3").icmp.as_ref().unwrap();
        assert_eq!(icmp.rtt_source, Some(RttSource::Socket));
        bed.mesh.shutdown().await;
    });
}

/// A mesh with the default time-out, with all hosts known to be reachable.
async fn default_bed(nodes: Vec<Node>, interval: Duration) -> Bed {
    let bed = Bed::start_with(nodes, |options| {
        options.tuning.intervals = ProbeIntervals::all(interval);
        options.tuning.timeout = Duration::from_secs(1);
    });
    bed.until("reachable", |report| {
        all_hosts_are(report, Reachability::Reachable)
    })
    .await;
    bed
}

fn no_host_is_unreachable(report: &HealthStatus) -> bool {
    let mut nodes = report.nodes.iter();
    nodes.all(|node| node.host.reachability() != Reachability::Unreachable)
}

fn all_hosts_are(report: &HealthStatus, wanted: Reachability) -> bool {
    let mut nodes = report.nodes.iter();
    nodes.all(|node| node.host.reachability() == wanted)
}

#[test]
fn outages_are_confirmed_and_recoveries_seen() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    let interval = Duration::from_millis(100);
    let responder = there.enter(|| hello::bind(&ips(&["172.30.0.2"]), PORT).unwrap());
    here.block_on(async || {
        let reported = watch::channel(Vec::new()).1;
        let responder =
            Responder::start(identity("b"), responder, reported, Arc::new(NoArrivals)).unwrap();
        let bed = default_bed(vec![node("b", &["172.30.0.2"])], interval).await;
        let faults: [(&str, &str); 3] = [
            ("link set eth0 down", "link set eth0 up"),
            (
                "route add blackhole 172.30.0.1",
                "route del blackhole 172.30.0.1",
            ),
            (
                "route add unreachable 172.30.0.1",
                "route del unreachable 172.30.0.1",
            ),
        ];
        for (fault, repair) in faults {
            let change = |report: &HealthStatus| {
                let icmp = path(report, "172.30.0.2").icmp.as_ref().unwrap();
                (icmp.is_ok(), icmp.last_change, icmp.consecutive_failures)
            };
            there.ip(fault);
            let report = bed.until(fault, |report| !change(report).0).await;
            let (_, since, failures) = change(&report);
            assert!(since.is_some() && failures >= 2, "{report:#?}");
            bed.until(fault, |report| {
                !path(report, "172.30.0.2").http.as_ref().unwrap().is_ok()
            })
            .await;
            there.ip(repair);
            let report = bed
                .until(repair, |report| {
                    all_hosts_are(report, Reachability::Reachable)
                })
                .await;
            assert!(change(&report).1 > since && change(&report).2 == 0);
        }
        responder.shutdown().await;
        let report = bed
            .until("refused", |report| {
                all_hosts_are(report, Reachability::Unreachable)
            })
            .await;
        assert_eq!(http_text(&report, "172.30.0.2"), "Connection refused");
        assert_eq!(icmp_text(&report, "172.30.0.2"), "");
        bed.mesh.shutdown().await;
    });
}

#[test]
fn lost_probes_and_a_restart_of_the_agent_are_no_outage() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    let requests = Arc::new(AtomicUsize::new(0));
    let seen = requests.clone();
    let _echo = EchoResponder::start(&there, move |_, _| {
        if seen.fetch_add(1, Ordering::Relaxed) % 20 == 19 {
            Vec::new()
        } else {
            vec![Duration::ZERO]
        }
    });
    here.block_on(async || {
        let mut hello = respond(&there, "b", &["172.30.0.2"], &[]);
        let interval = Duration::from_millis(10);
        let bed = default_bed(vec![node("b", &["172.30.0.2"])], interval).await;
        let requests = || requests.load(Ordering::Relaxed) as u64;
        let until_requests = async |count: u64| {
            bed.until("requests", |report| {
                assert!(no_host_is_unreachable(report), "{report:#?}");
                requests() >= count
            })
            .await;
        };
        let refused = || {
            let row = bed.store.get(key("172.30.0.2", Path::Host, Protocol::Http));
            row.unwrap().lost
        };
        for restart in 1..=3 {
            until_requests(restart * 100).await;
            let before = refused();
            hello.shutdown().await;
            bed.until("refused", |_| refused() > before).await;
            hello = respond(&there, "b", &["172.30.0.2"], &[]);
        }
        until_requests(400).await;
        // Each loss counts once, when its probe is given up.
        let row = || {
            let row = bed.store.get(key("172.30.0.2", Path::Host, Protocol::Icmp));
            row.unwrap()
        };
        let lost = requests() / 20;
        bed.until("counted losses", |_| row().lost >= lost).await;
        let (row, requests) = (row(), requests());
        assert!(row.lost <= requests / 20, "{requests}: {row:?}");
        assert!(
            row.samples <= requests - requests / 20,
            "{requests}: {row:?}"
        );
        bed.mesh.shutdown().await;
    });
}

#[test]
fn a_peer_that_starts_later_is_found_and_heard_early() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    there.ip("addr add 10.244.2.17/32 dev lo");
    here.block_on(async || {
        let mut peer = node("b", &["172.30.0.2"]);
        peer.pod_cidrs = vec!["10.244.2.0/24".parse().unwrap()];
        let bed = Bed::start_endless(vec![peer]);
        bed.until("complete", is_complete).await;
        // It answers before it knows its health endpoint, which answers last.
        let listeners = there.enter(|| hello::bind(&ips(&["172.30.0.2"]), PORT).unwrap());
        let (endpoint, reported) = watch::channel(Vec::new());
        let _hello =
            Responder::start(identity("b"), listeners, reported, Arc::new(NoArrivals)).unwrap();
        bed.until("answered", |report| {
            all_hosts_are(report, Reachability::Reachable)
        })
        .await;
        endpoint.send_replace(ips(&["10.244.2.17"]));
        bed.until("learned", |report| {
            report.nodes[0].health_endpoint.is_some() && is_complete(report)
        })
        .await;
        let _endpoint = respond(&there, "b", &["10.244.2.17"], &[]);
        bed.until("reachable", |report| {
            report.nodes[0].reachability() == Reachability::Reachable
        })
        .await;
        bed.mesh.shutdown().await;
    });
}

#[test]
fn a_peer_without_a_health_endpoint_is_probed_at_its_host_alone() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    here.block_on(async || {
        // One node cannot have an endpoint, and one reports that it has none.
        let without_addresses = node("b", &["172.30.0.2"]);
        let mut without_endpoint = node("c", &["172.30.0.3"]);
        without_endpoint.pod_cidrs = vec!["10.244.3.0/24".parse().unwrap()];
        let bed = Bed::start(vec![without_addresses, without_endpoint]);
        let _b = respond(&there, "b", &["172.30.0.2"], &[]);
        let listeners = there.enter(|| hello::bind(&ips(&["172.30.0.3"]), PORT).unwrap());
        let of_c = Identity {
            hosts_only: true,
            ..identity("c")
        };
        let unreported = watch::channel(Vec::new()).1;
        let _c = Responder::start(of_c, listeners, unreported, Arc::new(NoArrivals)).unwrap();
        bed.until("reachable", |report| {
            let mut nodes = report.nodes.iter();
            nodes.all(|node| node.hosts_only && node.reachability() == Reachability::Reachable)
        })
        .await;
        bed.mesh.shutdown().await;
    });
}

#[test]
fn an_agent_that_takes_no_part_in_the_health_of_endpoints_probes_hosts_only() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    here.block_on(async || {
        let mut local = node("a", &["172.30.0.1"]);
        local.pod_cidrs = vec!["10.244.1.0/24".parse().unwrap()];
        local.health_addresses = ips(&["10.244.1.7"]);
        let mut peer = node("b", &["172.30.0.2"]);
        peer.pod_cidrs = vec!["10.244.2.0/24".parse().unwrap()];
        let why = Some("this node has no pod CIDR".to_owned());
        let bed = Bed::start_with(vec![local, peer], |options| {
            options.hosts_only.clone_from(&why);
        });
        let _a = respond(&here, "a", &["172.30.0.1"], &[]);
        let _b = respond(&there, "b", &["172.30.0.2"], &["10.244.2.17"]);
        let report = bed
            .until("reachable", |report| {
                let mut nodes = report.nodes.iter();
                nodes.all(|node| node.reachability() == Reachability::Reachable)
            })
            .await;
        assert_eq!(report.local.hosts_only_reason, why);
        assert!(report.nodes.iter().all(|node| node.hosts_only));
        assert!(report.nodes.iter().all(|node| node.diagnosis.is_none()));
        bed.mesh.shutdown().await;
    });
}

#[test]
fn random_loss_is_no_outage() {
    let Some((here, there)) = two_namespaces() else {
        return;
    };
    let rules = "table inet loss { chain input { type filter hook input priority 0; \
                 meta l4proto icmp numgen random mod 100 < 5 drop; \
                 tcp flags syn numgen random mod 100 < 5 drop; }; }";
    let nft = || std::process::Command::new("nft").arg(rules).status();
    if !there.enter(nft).is_ok_and(|status| status.success()) {
        eprintln!("skipped: nft is missing or does not know numgen");
        return;
    }
    here.block_on(async || {
        let _responder = respond(&there, "b", &["172.30.0.2"], &[]);
        let interval = Duration::from_millis(10);
        let bed = default_bed(vec![node("b", &["172.30.0.2"])], interval).await;
        let row = |protocol| {
            let row = bed.store.get(key("172.30.0.2", Path::Host, protocol));
            row.unwrap()
        };
        let is_enough = |protocol| {
            let row = row(protocol);
            row.lost > 0 && row.samples + row.lost >= 200
        };
        bed.until("losses of both kinds", |report| {
            assert!(no_host_is_unreachable(report), "{report:#?}");
            is_enough(Protocol::Icmp) && is_enough(Protocol::Http)
        })
        .await;
        bed.mesh.shutdown().await;
    });
}
