//! Services through IPVS on a real kernel: `ipvsadm` and `ipset` listings, reachability for clients, and graceful
//! draining.

mod agents;
mod modes;
mod place;
mod policy;

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_model::ipam::Family;
use health_net::netlink::Handle;
use health_service::choice::Topology;
use health_service::provider::ipvs::netlink::server::{Client, Scheduler, Timeouts};
use health_service::provider::ipvs::plan::PlanSettings;
use health_service::provider::ipvs::rules::RuleSettings;
use health_service::provider::ipvs::{self, Ipvs, IpvsError};
use health_service::runner::Intervals;
use health_service::services::{Services, SyncSettings};
use health_service::source::Folder;
use health_service::spec::Selection;
use jiff::Timestamp;
use tempfile::TempDir;
use tests::process::run;
use tests::{PATIENCE, wait_for};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use place::{
    CLIENT, Connection, NODE, POD_NETWORKS, POD_PORT, PODS, Place, ask, ask_udp, command, exchange,
    pod, refusal, udp,
};

/// The service address with this index, in either family.
fn vip(service: u8, is_ipv6: bool) -> IpAddr {
    match is_ipv6 {
        false => [10, 96, 0, service].into(),
        true => [0xfd96, 0, 0, 0, 0, 0, 0, u16::from(service)].into(),
    }
}

const WEB: u8 = 10;
const HAIRPIN: u8 = 11;
const EMPTY: u8 = 12;
const BALANCED: u8 = 13;
/// Preserves the source, and has an endpoint on this node.
const LOCAL: u8 = 14;
/// Preserves the source, and only has endpoints on other nodes.
const DISTANT: u8 = 15;
/// Has session affinity.
const STICKY: u8 = 16;
/// Another program already has a virtual server at its IPv4 address.
const TAKEN: u8 = 17;
/// Has an external address that belongs to the node, with the same port as the next service's NodePort.
const EXTERNAL: u8 = 18;
/// Has no endpoints.
const VACANT: u8 = 19;
/// Clients send packets to it before it exists.
const EARLY: u8 = 20;
/// Address of the load balancer, which source ranges restrict.
const BALANCER: u8 = 200;

/// Manifests of a service and its endpoints, which are the pods with these indices on this node.
fn manifest(service: u8, name: &str, more: &str, pods: &[u8]) -> String {
    manifest_on("here", service, name, more, pods)
}

fn manifest_on(node: &str, service: u8, name: &str, more: &str, pods: &[u8]) -> String {
    let (v4, v6) = (vip(service, false), vip(service, true));
    let mut text = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{namespace: shop, name: {name}}}\n\
         spec: {{clusterIPs: [{v4}, '{v6}'], {more}}}\n"
    );
    for (family, is_ipv6) in [("IPv4", false), ("IPv6", true)] {
        let endpoints = pods.iter().map(|number| {
            let address = pod(*number, is_ipv6);
            format!("{{addresses: ['{address}'], nodeName: {node}, conditions: {{ready: true}}}}")
        });
        let endpoints: Vec<_> = endpoints.collect();
        text += &format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{namespace: shop, name: {name}-{}, labels: {{kubernetes.io/service-name: {name}}}}}\n\
             addressType: {family}\n\
             ports: [{{name: web, port: {POD_PORT}}}, {{name: dns, port: {POD_PORT}, protocol: UDP}}]\n\
             endpoints: [{}]\n",
            family.to_lowercase(),
            endpoints.join(", "),
        );
    }
    text
}

const PORTS: &str = "type: NodePort, ports: [{name: web, port: 80, nodePort: 30080}, \
                     {name: dns, port: 53, protocol: UDP}]";
const LOCAL_PORTS: &str = "type: NodePort, externalTrafficPolicy: Local, \
                           ports: [{name: web, port: 80, nodePort: 30081}]";
const DISTANT_PORTS: &str = "type: NodePort, externalTrafficPolicy: Local, \
                             ports: [{name: web, port: 80, nodePort: 30082}]";
const STICKY_PORT: &str = "sessionAffinity: ClientIP, ports: [{name: web, port: 80}]";
const PORT: &str = "ports: [{name: web, port: 80}]";

/// IPVS services from a folder of manifests.
struct Bed {
    // Must be dropped before the runtime on which they run.
    services: Option<Services>,
    folder: Option<Folder>,
    runtime: Runtime,
    manifests: TempDir,
    topology: watch::Sender<Topology>,
}

impl Bed {
    fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        let (topology, _) = watch::channel(Topology {
            node: "here".into(),
            zone: None,
        });
        Ok(Self {
            services: None,
            folder: None,
            runtime,
            manifests: tempfile::tempdir()?,
            topology,
        })
    }

    fn start(&mut self) -> anyhow::Result<()> {
        self.start_with(&Scheduler::RoundRobin)
    }

    fn start_with(&mut self, scheduler: &Scheduler) -> anyhow::Result<()> {
        let _entered = self.runtime.enter();
        let provider = Ipvs::open(ipvs::Settings {
            plan: PlanSettings {
                scheduler: scheduler.clone(),
                ..PlanSettings::default()
            },
            rules: RuleSettings {
                pod_networks: POD_NETWORKS
                    .iter()
                    .map(|net| net.parse())
                    .collect::<Result<_, _>>()?,
                ..RuleSettings::default()
            },
            drain_interval: Duration::from_millis(500),
            ..ipvs::Settings::default()
        })?;
        let settings = SyncSettings {
            intervals: Intervals {
                min: Duration::from_millis(10),
                retry: Duration::from_secs(1),
                max: Duration::from_secs(3600),
            },
            families: Family::ALL.to_vec(),
            health_timeout: Duration::from_secs(60),
            clock: Timestamp::now,
        };
        let folder = Folder::watch(self.manifests.path(), Selection::default());
        let sources = vec![folder.services()];
        let topology = self.topology.subscribe();
        self.services = Some(Services::start(settings, topology, sources, provider)?);
        self.folder = Some(folder);
        Ok(())
    }

    /// Stops the services as in a crash: nothing is removed.
    fn stop(&mut self) {
        if let Some(services) = self.services.take() {
            self.runtime.block_on(services.stop());
        }
        self.folder = None;
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        // Writes the file atomically.
        let part = self.manifests.path().join(format!(".{name}"));
        fs::write(&part, text)?;
        fs::rename(part, self.manifests.path().join(format!("{name}.yaml")))?;
        Ok(())
    }

    fn error(&self) -> Option<String> {
        let services = self.services.as_ref()?;
        let view = services.handle().view();
        let failure = view.borrow().failure.clone();
        failure.map(|failure| failure.error.clone())
    }

    /// Waits until the output of `ipvsadm` meets a condition. Returns the output.
    fn until(&self, what: &str, mut is_so: impl FnMut(&str) -> bool) -> anyhow::Result<String> {
        wait_for(what, PATIENCE, || {
            let listed = command("ipvsadm -Ln")?;
            if is_so(&listed) {
                return Ok(Some(listed));
            }
            anyhow::bail!("{:?}\n{listed}", self.error())
        })
    }
}

/// Weight and active connections of a real server under a virtual server, if the real server is listed.
fn real(listed: &str, server: SocketAddr, address: SocketAddr) -> Option<(u32, u32)> {
    let head = format!("TCP  {server} ");
    let below = listed.lines().skip_while(|line| !line.starts_with(&head));
    let mut below = below.skip(1).take_while(|line| line.starts_with("  ->"));
    let line = below.find(|line| line.contains(&format!("-> {address} ")))?;
    let mut words = line.split_whitespace().skip(3);
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

fn families() -> [bool; 2] {
    [false, true]
}

fn at(ip: &str, port: u16) -> anyhow::Result<SocketAddr> {
    Ok(SocketAddr::new(ip.parse()?, port))
}

fn pod_at(number: u8, is_ipv6: bool) -> anyhow::Result<SocketAddr> {
    at(&pod(number, is_ipv6), POD_PORT)
}

#[test]
fn services_are_reached_drained_adopted_and_removed() -> anyhow::Result<()> {
    let place = Place::new()?;
    for of_others in [
        "ipvsadm -A -t 192.0.2.1:9 -s wlc",
        "ipvsadm -a -t 192.0.2.1:9 -r 192.0.2.2:9 -m -w 0",
        "ipvsadm -A -f 7 -s rr",
        "ipvsadm -A -t 10.96.0.17:80 -s sed",
        "ipset create OTHERS hash:ip",
        "nft add table ip others",
    ] {
        command(of_others)?;
    }
    let mut bed = Bed::new()?;
    bed.write("web", &manifest(WEB, "web", PORTS, &[1, 2]))?;
    bed.write("hairpin", &manifest(HAIRPIN, "hairpin", PORT, &[1]))?;
    bed.write("empty", &manifest(EMPTY, "empty", PORT, &[]))?;
    let balanced = format!(
        "type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 30999, {PORT}, \
         loadBalancerSourceRanges: [{}/32, '{}/128']}}\nstatus: {{loadBalancer: {{ingress: [{{ip: {}}}, {{ip: '{}'}}]}}",
        "192.0.2.7",
        "2001:db8::7",
        vip(BALANCER, false),
        vip(BALANCER, true),
    );
    bed.write("balanced", &manifest(BALANCED, "balanced", &balanced, &[1]))?;
    bed.write("local", &manifest(LOCAL, "local", LOCAL_PORTS, &[1]))?;
    let distant = manifest_on("there", DISTANT, "distant", DISTANT_PORTS, &[2]);
    bed.write("distant", &distant)?;
    bed.write("sticky", &manifest(STICKY, "sticky", STICKY_PORT, &[1, 2]))?;
    bed.write("taken", &manifest(TAKEN, "taken", PORT, &[1]))?;
    bed.start()?;
    let last = SocketAddr::new(vip(BALANCED, true), 80);
    bed.until("all services", |listed| {
        real(listed, last, pod_at(1, true).unwrap()).is_some()
            && listed.contains("[fd96::11]:80")
            && listed.contains("[fd96::a]:80")
            && listed.contains("10.96.0.12:80")
            && listed.contains("192.168.77.1:30080")
    })?;
    ensure!(bed.error().is_none(), "{:?}", bed.error());
    {
        let _entered = bed.runtime.enter();
        let second = Ipvs::open(ipvs::Settings::default());
        ensure!(matches!(second, Err(IpvsError::InUse)), "{second:?}");
    }

    kernel_answers()?;
    for is_ipv6 in families() {
        reached(&place, is_ipv6).with_context(|| format!("IPv6: {is_ipv6}"))?;
        refused(&place, is_ipv6).with_context(|| format!("IPv6: {is_ipv6}"))?;
    }
    let listed = command("ipvsadm -Ln")?;
    ensure!(listed.contains("TCP  10.96.0.17:80 sed\n"), "{listed}");
    sets()?;
    sources()?;
    owned_address(&bed, &place)?;
    early_client(&bed, &place)?;
    other_address(&bed)?;
    put_back(&bed)?;
    drained(&mut bed, &place)?;
    schedulers(&mut bed, &place)?;

    bed.stop();
    let handle = {
        let _entered = bed.runtime.enter();
        health_net::netlink::open()?
    };
    let removed = bed.runtime.block_on(ipvs::cleanup(&handle))?;
    for what in [
        "ipv4 table",
        "ipv6 table",
        "virtual servers (",
        "sets HEALTH-*",
        "device health-ipvs0",
    ] {
        let is_reported = removed
            .iter()
            .any(|removed| removed.to_lowercase().contains(&what.to_lowercase()));
        ensure!(is_reported, "{what}: {removed:?}");
    }
    let again = bed.runtime.block_on(ipvs::cleanup(&handle))?;
    ensure!(again.is_empty(), "{again:?}");
    without_device(&mut bed, &handle)?;
    let left = command("ipvsadm -Ln")?;
    ensure!(
        left.contains("TCP  192.0.2.1:9 wlc") && left.contains("FWM  7 rr"),
        "{left}"
    );
    ensure!(
        left.contains("-> 192.0.2.2:9") && left.lines().count() == 7,
        "{left}"
    );
    assert_eq!(command("ipset list -n")?.trim(), "OTHERS");
    assert_eq!(command("nft list tables")?.trim(), "table ip others");
    ensure!(!Path::new("/sys/class/net").join(ipvs::DEVICE).exists());
    Client::open()?.flush()?;
    assert_eq!(Client::open()?.servers()?, []);
    Ok(())
}

/// The netlink client and `ipvsadm` must agree.
fn kernel_answers() -> anyhow::Result<()> {
    let mut client = Client::open()?;
    let info = client.info()?;
    let (major, minor, patch) = info.version;
    let listed = command("ipvsadm -Ln")?;
    let version = format!("version {major}.{minor}.{patch} (size={})", info.table_size);
    ensure!(listed.contains(&version), "{version}: {listed}");
    let before = client.timeouts()?;
    client.set_timeouts(Timeouts {
        tcp: 901,
        ..Timeouts::default()
    })?;
    let expected = Timeouts { tcp: 901, ..before };
    assert_eq!(client.timeouts()?, expected);
    client.set_timeouts(before)?;
    let servers = client.servers()?;
    let heads = listed.lines();
    let heads = heads.filter(|line| {
        ["TCP ", "UDP ", "FWM "]
            .iter()
            .any(|kind| line.starts_with(kind))
    });
    assert_eq!(servers.len(), heads.count());
    for server in servers {
        assert_eq!(client.server(server.id)?, Some(server));
    }
    Ok(())
}

fn reached(place: &Place, is_ipv6: bool) -> anyhow::Result<()> {
    let family = usize::from(is_ipv6);
    let (client, node): (IpAddr, _) = (CLIENT[family].parse()?, NODE[family]);
    let web = SocketAddr::new(vip(WEB, is_ipv6), 80);
    let mut servers = Vec::new();
    for _ in 0..4 {
        let reported = ask(Some(&place.client), web)?;
        ensure!(reported.client != client, "it is masqueraded: {reported:?}");
        servers.push(reported.server);
    }
    for pod in PODS {
        ensure!(servers.iter().any(|server| server == pod), "{servers:?}");
    }
    // Connects from the node itself, and from a pod, which is masqueraded only when it reaches itself.
    ask(None, web)?;
    let own: IpAddr = pod(2, is_ipv6).parse()?;
    for _ in 0..4 {
        let reported = ask(Some(&place.pods[1]), web)?;
        ensure!(
            (reported.client == own) == (reported.server == PODS[0]),
            "{reported:?}"
        );
    }
    let hairpin = SocketAddr::new(vip(HAIRPIN, is_ipv6), 80);
    assert_eq!(ask(Some(&place.pods[0]), hairpin)?.server, PODS[0]);
    let node_port = at(node, 30080)?;
    ensure!(ask(Some(&place.client), node_port)?.client != client);
    ask(None, node_port)?;
    ask_udp(&place.client, SocketAddr::new(vip(WEB, is_ipv6), 53))?;
    let local = ask(Some(&place.client), at(node, 30081)?)?;
    assert_eq!((local.server.as_str(), local.client), (PODS[0], client));
    // Pods may use endpoints on other nodes, which see the pod's own address.
    let distant = ask(Some(&place.pods[0]), at(node, 30082)?)?;
    assert_eq!(distant.server, PODS[1]);
    let sticky = SocketAddr::new(vip(STICKY, is_ipv6), 80);
    let first = ask(Some(&place.client), sticky)?;
    for _ in 0..3 {
        assert_eq!(ask(Some(&place.client), sticky)?.server, first.server);
    }
    Ok(())
}

fn refused(place: &Place, is_ipv6: bool) -> anyhow::Result<()> {
    let empty = SocketAddr::new(vip(EMPTY, is_ipv6), 80);
    for from in [Some(&place.client), Some(&place.pods[0]), None] {
        assert_eq!(refusal(from, empty)?, ErrorKind::ConnectionRefused);
    }
    // All endpoints are on other nodes, and load balancers are expected to find those nodes.
    let distant = at(NODE[usize::from(is_ipv6)], 30082)?;
    assert_eq!(refusal(Some(&place.client), distant)?, ErrorKind::TimedOut);
    // Other sockets that listen on the node are not reachable at service addresses.
    let any: IpAddr = if is_ipv6 { "::" } else { "0.0.0.0" }.parse()?;
    let listener = TcpListener::bind(SocketAddr::new(any, 9999))?;
    let unused = SocketAddr::new(vip(WEB, is_ipv6), 9999);
    assert_eq!(
        refusal(Some(&place.client), unused)?,
        ErrorKind::ConnectionRefused
    );
    Connection::open(Some(&place.client), at(NODE[usize::from(is_ipv6)], 9999)?)?;
    drop(listener);
    // The source ranges contain neither the client nor an address of the node.
    let balancer = SocketAddr::new(vip(BALANCER, is_ipv6), 80);
    assert_eq!(refusal(Some(&place.client), balancer)?, ErrorKind::TimedOut);
    assert_eq!(refusal(None, balancer)?, ErrorKind::TimedOut);
    Ok(())
}

/// Checks the contents of the sets against `ipset`.
fn sets() -> anyhow::Result<()> {
    for (set, entries) in [
        (
            "HEALTH-CLUSTER-IP",
            "10.96.0.10,tcp:80 10.96.0.10,udp:53 10.96.0.12,tcp:80",
        ),
        (
            "HEALTH-6-CLUSTER-IP",
            "fd96::a,tcp:80 fd96::a,udp:53 fd96::c,tcp:80",
        ),
        (
            "HEALTH-LOOP-BACK",
            "10.1.1.2,tcp:8080,10.1.1.2 10.1.2.2,udp:8080,10.1.2.2",
        ),
        ("HEALTH-NODE-PORT-TCP", "30080"),
        ("HEALTH-6-NODE-PORT-TCP", "30080"),
        ("HEALTH-CHECK-NODE-PORT", "30999"),
        ("HEALTH-LOAD-BALANCER-LOCAL", "10.96.0.200,tcp:80"),
        ("HEALTH-LOAD-BALANCER-FW", "10.96.0.200,tcp:80"),
        ("HEALTH-LB-SOURCE-CIDR", "10.96.0.200,tcp:80,192.0.2.7"),
        ("HEALTH-6-LB-SOURCE-CIDR", "fd96::c8,tcp:80,2001:db8::7"),
        ("HEALTH-IPVS-IPS", "10.96.0.10 10.96.0.13 10.96.0.200"),
        ("HEALTH-REJECT", "10.96.0.12,tcp:80"),
        (
            "HEALTH-IPVS-SERVERS",
            "10.96.0.10,tcp:80 192.168.77.1,tcp:30080",
        ),
    ] {
        let listed = command(&format!("ipset list {set}"))?;
        for entry in entries.split(' ') {
            ensure!(
                listed.lines().any(|line| line == entry),
                "{entry}: {listed}"
            );
        }
    }
    let bound = command(&format!("ip -br address show dev {}", ipvs::DEVICE))?;
    ensure!(
        bound.contains(" 10.96.0.200/32 ") && bound.contains(" fd96::c8/128 "),
        "{bound}"
    );
    Ok(())
}

/// A service address is never the source of packets from the node.
fn sources() -> anyhow::Result<()> {
    let listed = command(&format!("ip -j address show dev {}", ipvs::DEVICE))?;
    let listed: serde_json::Value = serde_json::from_str(&listed)?;
    let addresses = listed[0]["addr_info"].as_array().context("no addresses")?;
    ensure!(!addresses.is_empty(), "{listed}");
    for address in addresses {
        let is_kept_back = match address["family"].as_str() {
            Some("inet") => address["scope"] == "host",
            _ => address["deprecated"] == true,
        };
        ensure!(is_kept_back, "{address}");
    }
    Ok(())
}

/// The next sync restores what other programs have removed, without mistaking it for theirs.
fn put_back(bed: &Bed) -> anyhow::Result<()> {
    command("ipset flush")?;
    command(&format!("ip link delete {}", ipvs::DEVICE))?;
    bed.write("empty", &manifest(EMPTY, "empty", PORT, &[1]))?;
    let (empty, endpoint) = (SocketAddr::new(vip(EMPTY, false), 80), pod_at(1, false)?);
    bed.until("the change", |listed| {
        real(listed, empty, endpoint).is_some()
    })?;
    bed.write("empty", &manifest(EMPTY, "empty", PORT, &[]))?;
    wait_for("the sets to be as they were", PATIENCE, || sets().map(Some))
}

/// Without the device, everything else is still found and removed.
fn without_device(bed: &mut Bed, handle: &Handle) -> anyhow::Result<()> {
    ensure!(!bed.runtime.block_on(ipvs::is_present(handle))?);
    bed.start()?;
    bed.until("the services again", |listed| {
        listed.contains("10.96.0.10:80")
    })?;
    bed.stop();
    command(&format!("ip link delete {}", ipvs::DEVICE))?;
    ensure!(bed.runtime.block_on(ipvs::is_present(handle))?);
    bed.runtime.block_on(ipvs::cleanup(handle))?;
    ensure!(!bed.runtime.block_on(ipvs::is_present(handle))?);
    Ok(())
}

/// A NodePort without endpoints does not reject packets to an address and port that belong to another service.
fn owned_address(bed: &Bed, place: &Place) -> anyhow::Result<()> {
    let external = format!(
        "externalIPs: ['{}', '{}'], ports: [{{name: web, port: 30083}}]",
        NODE[0], NODE[1]
    );
    let vacant = "type: NodePort, ports: [{name: web, port: 80, nodePort: 30083}]";
    let listed = |is_ipv6: bool| at(NODE[usize::from(is_ipv6)], 30083);
    bed.write("vacant", &manifest(VACANT, "vacant", vacant, &[]))?;
    for is_ipv6 in families() {
        let server = listed(is_ipv6)?;
        bed.until("the NodePort", |all| all.contains(&server.to_string()))?;
        let refused = refusal(Some(&place.client), server)?;
        assert_eq!(refused, ErrorKind::ConnectionRefused);
    }
    bed.write("external", &manifest(EXTERNAL, "external", &external, &[1]))?;
    for is_ipv6 in families() {
        let (server, endpoint) = (listed(is_ipv6)?, pod_at(1, is_ipv6)?);
        bed.until("the external address", |all| {
            real(all, server, endpoint).is_some()
        })?;
        assert_eq!(ask(Some(&place.client), server)?.server, PODS[0]);
    }
    for name in ["external", "vacant"] {
        fs::remove_file(bed.manifests.path().join(format!("{name}.yaml")))?;
    }
    for is_ipv6 in families() {
        let server = listed(is_ipv6)?.to_string();
        bed.until("their end", |all| !all.contains(&server))?;
    }
    Ok(())
}

/// A UDP client that keeps sending from one port, starting before the service exists, gets answers as soon as the
/// service exists.
fn early_client(bed: &Bed, place: &Place) -> anyhow::Result<()> {
    let ports = "type: NodePort, ports: [{name: dns, port: 53, nodePort: 30084, protocol: UDP}]";
    let mut clients = Vec::new();
    for node in NODE {
        let socket = udp(&place.client, at(node, 30084)?)?;
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        // The datagram is rejected, but conntrack keeps its flow.
        ensure!(exchange(&socket).is_err());
        clients.push(socket);
    }
    bed.write("early", &manifest(EARLY, "early", ports, &[1]))?;
    for socket in &clients {
        let reported = wait_for("an answer", PATIENCE, || Ok(exchange(socket).ok()))?;
        assert_eq!(reported.server, PODS[0]);
    }
    fs::remove_file(bed.manifests.path().join("early.yaml"))?;
    bed.until("its end", |all| !all.contains(":30084"))?;
    Ok(())
}

/// The node gets another address, which serves NodePorts after the next change.
fn other_address(bed: &Bed) -> anyhow::Result<()> {
    command("ip address add 192.168.77.9/24 dev client")?;
    bed.write("empty", &manifest(EMPTY, "empty", PORT, &[1]))?;
    bed.until("the new address", |listed| {
        listed.contains("TCP  192.168.77.9:30080 rr")
    })?;
    bed.write("empty", &manifest(EMPTY, "empty", PORT, &[]))?;
    command("ip address delete 192.168.77.9/24 dev client")?;
    bed.until("its end", |listed| !listed.contains("192.168.77.9:30080"))?;
    Ok(())
}

/// Existing servers accept every scheduler that the kernel has, and it distributes connections.
fn schedulers(bed: &mut Bed, place: &Place) -> anyhow::Result<()> {
    let mut missing = Vec::new();
    for (scheduler, name) in Scheduler::KNOWN {
        bed.stop();
        bed.start_with(&scheduler)?;
        let has_it = wait_for("the scheduler", PATIENCE, || {
            let listed = command("ipvsadm -Ln")?;
            let mut servers = [WEB, STICKY].into_iter().flat_map(|service| {
                families().map(|is_ipv6| SocketAddr::new(vip(service, is_ipv6), 80))
            });
            let is_set = servers.all(|server| {
                let head = format!("TCP  {server} {name}");
                listed
                    .lines()
                    .any(|line| line == head || line.starts_with(&format!("{head} ")))
            });
            let error = bed.error();
            ensure!(is_set || error.is_some(), "{listed}");
            Ok(Some(is_set))
        })
        .with_context(|| name.to_owned())?;
        if !has_it {
            missing.push(name);
            continue;
        }
        for is_ipv6 in families() {
            let web = SocketAddr::new(vip(WEB, is_ipv6), 80);
            let reported = ask(Some(&place.client), web).with_context(|| name.to_owned())?;
            assert_eq!(reported.server, PODS[0], "{name}");
        }
    }
    for name in missing {
        let module = format!("ip_vs_{name}");
        let mut modprobe = Command::new("modprobe");
        let asked = run(modprobe.args(["--dry-run", "--quiet", &module]))?;
        ensure!(asked.code == Some(1), "{name} is not served: {asked:?}");
        println!("this kernel has no scheduler {name}");
    }
    bed.stop();
    bed.start()
}

/// A pod goes away while clients use it, and the provider restarts in the meantime.
fn drained(bed: &mut Bed, place: &Place) -> anyhow::Result<()> {
    let mut staying = Vec::new();
    for is_ipv6 in families() {
        let web = SocketAddr::new(vip(WEB, is_ipv6), 80);
        let used = wait_for("a connection to the pod", PATIENCE, || {
            let mut connection = Connection::open(Some(&place.client), web)?;
            let reported = connection.ask()?;
            Ok((reported.server == PODS[1]).then_some(connection))
        })?;
        staying.push((is_ipv6, web, used));
    }
    bed.write("web", &manifest(WEB, "web", PORTS, &[1]))?;
    // The whole service and its address go too, but its connection stays.
    let hairpin = SocketAddr::new(vip(HAIRPIN, false), 80);
    let mut left = Connection::open(Some(&place.client), hairpin)?;
    left.ask()?;
    fs::remove_file(bed.manifests.path().join("hairpin.yaml"))?;
    for (is_ipv6, web, used) in &mut staying {
        let gone = pod_at(2, *is_ipv6)?;
        bed.until("weight 0", |listed| {
            real(listed, *web, gone) == Some((0, 1))
        })?;
        assert_eq!(used.ask()?.server, PODS[1]);
        for _ in 0..4 {
            assert_eq!(ask(Some(&place.client), *web)?.server, PODS[0]);
        }
    }
    let used = pod_at(1, false)?;
    bed.until("weight 0", |listed| {
        real(listed, hairpin, used) == Some((0, 1))
    })?;
    left.ask()?;
    assert_eq!(
        refusal(Some(&place.client), hairpin)?,
        ErrorKind::ConnectionRefused
    );

    bed.stop();
    // A leftover of a crash: a wanted real server with weight 0.
    let web = SocketAddr::new(vip(WEB, false), 80);
    let leftover = pod_at(1, false)?;
    command(&format!("ipvsadm -e -t {web} -r {leftover} -m -w 0"))?;
    bed.start()?;
    bed.until("its weight", |listed| {
        real(listed, web, leftover).is_some_and(|(weight, _)| weight == 1)
    })?;
    for (is_ipv6, web, used) in &mut staying {
        let gone = pod_at(2, *is_ipv6)?;
        assert_eq!(real(&command("ipvsadm -Ln")?, *web, gone), Some((0, 1)));
        assert_eq!(used.ask()?.server, PODS[1]);
    }
    left.ask()?;

    left.reset()?;
    for (is_ipv6, web, used) in staying {
        used.reset()?;
        let gone = pod_at(2, is_ipv6)?;
        bed.until("the end of the real server", |listed| {
            real(listed, web, gone).is_none()
        })?;
    }
    bed.until("the end of the service", |listed| {
        !listed.contains(&hairpin.to_string())
    })?;
    wait_for("the end of its address", PATIENCE, || {
        let bound = command(&format!("ip -br address show dev {}", ipvs::DEVICE))?;
        Ok((!bound.contains(" 10.96.0.11/32 ")).then_some(()))
    })
}
