//! Workload endpoints on real nodes: created, reached, restored and deleted without leftovers.

use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use health_common::identity;
use health_model::api::{Endpoint, EndpointHealth, HealthState};
use health_net::netns::NetNs;
use nix::sys::signal::{Signal, kill};
use tests::process::{RunOutput, run};
use tests::{Bed, Node, PATIENCE, Snapshot, wait_for};

/// A workload's network namespace, removed on drop.
struct Workload {
    name: String,
}

impl Workload {
    fn new(name: &str) -> anyhow::Result<Self> {
        let name = format!("life-{name}");
        // A killed test may have left a namespace behind.
        let _ = run(Command::new("ip").args(["netns", "delete", &name]));
        run(Command::new("ip").args(["netns", "add", &name]))?.success()?;
        Ok(Self { name })
    }

    fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    fn exec(&self, words: &str) -> anyhow::Result<RunOutput> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]);
        run(command.args(words.split_whitespace()))
    }

    fn pings(&self, address: IpAddr) -> anyhow::Result<()> {
        let ran = self.exec(&format!("ping -n -q -c 2 -i 0.01 -W 2 {address}"))?;
        anyhow::ensure!(
            ran.code == Some(0),
            "{} to {address}: {}",
            self.name,
            ran.stdout
        );
        Ok(())
    }

    fn endpoint_on(&self, node: &Node, flags: &str) -> anyhow::Result<Endpoint> {
        let path = self.path();
        let text = node
            .cli(&format!(
                "endpoint create --netns {} {flags} -o json",
                path.display()
            ))?
            .success()?;
        serde_json::from_str(&text).context("what create says is no endpoint")
    }

    /// The line that states why there is no endpoint.
    fn refusal_on(&self, node: &Node, flags: &str) -> anyhow::Result<String> {
        refusal(
            node,
            &format!("endpoint create --netns {} {flags}", self.path().display()),
        )
    }

    fn delete(self) -> anyhow::Result<()> {
        run(Command::new("ip").args(["netns", "delete", &self.name]))?.success()?;
        Ok(())
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // The namespace may already have been deleted.
        let _ = run(Command::new("ip").args(["netns", "delete", &self.name]));
    }
}

fn refusal(node: &Node, words: &str) -> anyhow::Result<String> {
    let ran = node.cli(words)?;
    assert_eq!(ran.code, Some(1), "{words}: {} {}", ran.stdout, ran.stderr);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    Ok(ran.stderr)
}

fn addresses(endpoint: &Endpoint) -> Vec<IpAddr> {
    endpoint.ipv4.into_iter().chain(endpoint.ipv6).collect()
}

/// The live endpoints of workloads.
fn endpoints(node: &Node) -> anyhow::Result<Vec<Endpoint>> {
    let mut all: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
    all.retain(|one| one.identity != 4 && one.state != "disconnected");
    Ok(all)
}

fn wait_endpoints(node: &Node, count: usize) -> anyhow::Result<Vec<Endpoint>> {
    wait_for("the endpoints to be ready", PATIENCE, || {
        let all = endpoints(node)?;
        let ready = all.iter().all(|one| one.state == "ready");
        anyhow::ensure!(ready && all.len() == count, "there are {all:?}");
        Ok(Some(all))
    })
}

/// Queries a UDP responder at `address` from a namespace, like a DNS lookup.
fn asks(from: &Workload, to: &Workload, address: IpAddr) -> anyhow::Result<()> {
    let server = NetNs::open(&to.name)?.run_in(|| UdpSocket::bind((address, 53)))??;
    server.set_read_timeout(Some(PATIENCE))?;
    let any = match address {
        IpAddr::V4(_) => "0.0.0.0:0",
        IpAddr::V6(_) => "[::]:0",
    };
    let client = NetNs::open(&from.name)?.run_in(|| UdpSocket::bind(any))??;
    client.set_read_timeout(Some(PATIENCE))?;
    client.send_to(b"question", (address, 53))?;
    let mut buffer = [0; 64];
    let (length, asker) = server.recv_from(&mut buffer)?;
    server.send_to(&buffer[..length], asker)?;
    let length = client.recv(&mut buffer)?;
    anyhow::ensure!(&buffer[..length] == b"question", "another answer");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn endpoints_reach_each_other_on_and_across_nodes_and_leave_nothing() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (here, there) = (bed.node(1), bed.node(2));
    let before = [Snapshot::node(here)?, Snapshot::node(there)?];
    let (a, b, c) = (
        Workload::new("a")?,
        Workload::new("b")?,
        Workload::new("c")?,
    );
    let first = a.endpoint_on(here, "--label app=web --name a --container-id c-a")?;
    let second = b.endpoint_on(here, "--ifname net0")?;
    let third = c.endpoint_on(there, "")?;
    assert_eq!(
        (first.state.as_str(), first.labels[0].as_str()),
        ("ready", "unspec:app=web")
    );
    assert_eq!(second.inner_interface, "net0");

    for (from, to) in [(&a, &second), (&b, &first), (&a, &third), (&c, &second)] {
        for address in addresses(to) {
            from.pings(address)?;
        }
    }
    for address in addresses(&first) {
        asks(&c, &a, address)?;
        asks(&b, &a, address)?;
        anyhow::ensure!(here.pings(address)?, "the host does not reach {address}");
    }
    // The gateway addresses do not belong to the host: it forwards packets sent to them, so rules for the host do not
    // apply.
    for gateway in [first.gateway4, first.gateway6].into_iter().flatten() {
        let known = here.listing(&format!("bpf ipcache get {gateway}"))?;
        let entry = known.get(0).unwrap_or(&known);
        assert_eq!(entry["identity"], identity::WORLD, "{known}");
    }
    // Packets with a source address other than the endpoint's own do not leave.
    a.exec("ip address add 10.99.0.1/32 dev eth0")?.success()?;
    let other = second.ipv4.context("an IPv4 address")?;
    let spoofed = a.exec(&format!("ping -n -q -c 1 -W 1 -I 10.99.0.1 {other}"))?;
    assert_ne!(spoofed.code, Some(0), "{}", spoofed.stdout);

    let id = first.id;
    let log = here.cli(&format!("endpoint log {id}"))?.success()?;
    assert!(
        log.contains("created") && log.contains("regenerated"),
        "{log}"
    );
    let health = here.cli(&format!("endpoint health {id}"))?.success()?;
    assert!(health.contains("Overall Health:   OK"), "{health}");
    here.cli(&format!(
        "endpoint labels {id} --add k8s:tier=1 --remove app"
    ))?
    .success()?;
    let changed = wait_endpoints(here, 2)?;
    let labels = &changed
        .iter()
        .find(|one| one.id == id)
        .context("it")?
        .labels;
    assert_eq!(labels, &["k8s:tier=1"]);

    let deleted = here.cli("endpoint delete --container-id c-a")?.success()?;
    assert_eq!(deleted, format!("endpoint {id} deleted\n"));
    let shown: Endpoint =
        serde_json::from_str(&here.cli(&format!("endpoint get {id}"))?.success()?)?;
    assert_eq!(shown.state, "disconnected");
    let log = here.cli(&format!("endpoint log {id}"))?.success()?;
    let last = log.lines().last().unwrap_or_default();
    assert!(last.contains("disconnected"), "{log}");
    for words in ["--container-id c-a".to_owned(), id.to_string()] {
        let again = here.cli(&format!("endpoint delete {words}"))?.success()?;
        assert_eq!(again, "no such endpoint; nothing to delete\n");
    }
    here.cli(&format!("endpoint delete --netns {}", b.path().display()))?
        .success()?;
    there
        .cli(&format!("endpoint delete {}", third.id))?
        .success()?;
    for (node, before) in [here, there].into_iter().zip(&before) {
        before.wait_nothing_left(node)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_whose_programs_cannot_be_attached_is_not_reported_as_well() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let workload = Workload::new("bare")?;
    let Endpoint { id, interface, .. } = workload.endpoint_on(node, "")?;
    let health = || -> anyhow::Result<EndpointHealth> {
        let reported = node.listing(&format!("endpoint health {id}"))?;
        Ok(serde_json::from_value(reported)?)
    };
    let is_well =
        || anyhow::Ok(health()?.bpf == HealthState::Ok && endpoints(node)?[0].state == "ready");
    wait_for("the endpoint to be well", PATIENCE, || {
        Ok(is_well()?.then_some(()))
    })?;
    // Replaces the qdisc that holds the programs with another one.
    let agent = node.agent_pid()?;
    kill(agent, Signal::SIGSTOP)?;
    let replaced = ["delete dev {} clsact", "add dev {} ingress"]
        .iter()
        .try_for_each(|change| {
            let change = change.replace("{}", &interface);
            node.exec(&format!("tc qdisc {change}")).map(drop)
        });
    kill(agent, Signal::SIGCONT)?;
    replaced?;
    wait_for("the endpoint not to be well", PATIENCE, || {
        let log = node.cli(&format!("endpoint log {id}"))?.success()?;
        let is_reported = log.contains("Failure") && log.contains("its programs were detached");
        Ok((is_reported && !is_well()?).then_some(()))
    })?;
    node.exec(&format!("tc qdisc delete dev {interface} ingress"))?;
    wait_for("the endpoint to be well again", PATIENCE, || {
        Ok(is_well()?.then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn a_killed_agent_s_endpoints_go_on_and_are_taken_over() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let (a, b, gone) = (
        Workload::new("a")?,
        Workload::new("b")?,
        Workload::new("gone")?,
    );
    let first = a.endpoint_on(node, "--label app=web")?;
    let second = b.endpoint_on(node, "")?;
    let third = gone.endpoint_on(node, "")?;

    let target = second.ipv4.context("an IPv4 address")?;
    let mut ping = Command::new("ip");
    ping.args([
        "netns", "exec", &a.name, "ping", "-n", "-q", "-i", "0.01", "-c", "400",
    ]);
    let pinging = ping
        .arg(target.to_string())
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    node.kill_agent(Signal::SIGKILL)?;
    gone.delete()?;
    node.take_over(None)?;
    let restored = wait_endpoints(node, 2)?;
    let pinged = pinging.wait_with_output()?;
    let reported = String::from_utf8_lossy(&pinged.stdout);
    assert!(
        reported.contains("400 received, 0% packet loss"),
        "{reported}"
    );

    for before in [&first, &second] {
        let after = restored.iter().find(|one| one.id == before.id);
        let after = after.with_context(|| format!("endpoint {} is gone", before.id))?;
        assert_eq!((after, &addresses(after)), (before, &addresses(before)));
    }
    let log = node.cli(&format!("endpoint log {}", first.id))?.success()?;
    assert!(log.contains("restored"), "{log}");
    let again = Workload::new("again")?;
    let freed = third.ipv4.context("an IPv4 address")?;
    let heir = again.endpoint_on(node, &format!("--ipv4 {freed}"))?;
    assert_eq!(heir.ipv4, Some(freed));
    for address in addresses(&heir) {
        a.pings(address)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_agent_killed_while_it_makes_endpoints_leaves_no_half_ones() -> anyhow::Result<()> {
    const ROUNDS: u64 = 6;
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let before = Snapshot::node(node)?;
    for round in 0..ROUNDS {
        let workloads = (0..4)
            .map(|n| Workload::new(&format!("k{n}")))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let creations: Vec<_> = workloads
            .iter()
            .map(|workload| {
                let mut create = node.cli_command();
                create
                    .args(["endpoint", "create", "--netns"])
                    .arg(workload.path());
                create
                    .stdout(std::process::Stdio::null())
                    .stderr(std::process::Stdio::null())
                    .spawn()
            })
            .collect::<Result<_, _>>()?;
        // A different moment each time: the aim is to interrupt work, so there is no condition to wait for.
        std::thread::sleep(Duration::from_millis(4 + round * 7));
        node.kill_agent(Signal::SIGKILL)?;
        for mut creation in creations {
            creation.wait()?;
        }
        node.take_over(None)?;
        let restored = wait_for("the endpoints to be ready", PATIENCE, || {
            let all = endpoints(node)?;
            Ok(all.iter().all(|one| one.state == "ready").then_some(all))
        })?;
        let devices = node.exec("ip -o link show type veth")?;
        let ours = devices
            .lines()
            .filter(|line| line.contains(": lxc") && !line.contains("lxc_health"));
        assert_eq!(ours.count(), restored.len(), "{devices}");
        for endpoint in &restored {
            for address in addresses(endpoint) {
                anyhow::ensure!(node.pings(address)?, "{address} does not answer");
            }
            node.cli(&format!("endpoint delete {}", endpoint.id))?
                .success()?;
        }
        before.wait_nothing_left(node)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn endpoints_follow_the_mtu_of_the_uplink() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let (a, b) = (Workload::new("a")?, Workload::new("b")?);
    let first = a.endpoint_on(node, "")?;
    let has = |workload: &Workload, endpoint: &Endpoint, mtu: u32| -> anyhow::Result<()> {
        let word = format!("mtu {mtu} ");
        let outer = node.exec(&format!("ip -o link show {}", endpoint.interface))?;
        let inner = workload.exec("ip -o link show eth0")?.stdout;
        let routes = workload.exec("ip route show default")?.stdout
            + &workload.exec("ip -6 route show default")?.stdout;
        let routes_follow = routes.matches(&word).count() == 2;
        anyhow::ensure!(
            outer.contains(&word) && inner.contains(&word) && routes_follow,
            "{outer}{inner}{routes}"
        );
        Ok(())
    };
    has(&a, &first, 1500)?;
    node.exec("ip link set eth0 mtu 1400")?;
    wait_for("the endpoint to follow", PATIENCE, || {
        has(&a, &first, 1400).map(Some)
    })?;
    let second = b.endpoint_on(node, "")?;
    has(&b, &second, 1400)?;
    for address in addresses(&second) {
        a.pings(address)?;
    }

    node.kill_agent(Signal::SIGKILL)?;
    node.exec("ip link set eth0 mtu 1500")?;
    node.take_over(None)?;
    wait_for("both to follow", PATIENCE, || {
        has(&a, &first, 1500)?;
        has(&b, &second, 1500).map(Some)
    })
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_is_refused_in_a_line_that_says_why() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(1)
        .agent_args(
            "--ipam-exclude 10.244.1.0-10.244.1.99 --ipam-exclude 10.244.1.105-10.244.1.255",
        )
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let (a, b, c) = (
        Workload::new("a")?,
        Workload::new("b")?,
        Workload::new("c")?,
    );
    let made = a.endpoint_on(node, "--container-id c-a")?;
    let of_another = made.ipv4.context("an IPv4 address")?;
    let of_another = format!("--ifname net0 --ipv4 {of_another}");
    let before = Snapshot::settled(node)?;
    let own = node.netns();
    for (words, naming) in [
        (
            "--netns /run/netns/no-such".to_owned(),
            "/run/netns/no-such",
        ),
        ("--netns /dev/null".to_owned(), "not a network namespace"),
        (format!("--netns {}", own.display()), "agent's own"),
    ] {
        let reported = refusal(node, &format!("endpoint create {words}"))?;
        assert!(reported.contains(naming), "{reported}");
    }
    b.exec("ip link add eth0 type bridge")?.success()?;
    for (workload, flags, naming) in [
        (&b, "", "already has a device eth0"),
        (
            &b,
            "--ifname net0 --container-id c-a",
            "eth0 of container c-a is already endpoint",
        ),
        (&a, "", "already belongs to endpoint"),
        (&b, of_another.as_str(), "belongs to endpoint"),
        (
            &b,
            "--ifname net0 --ipv4 10.9.9.9",
            "none of this node's pod CIDRs",
        ),
        (&b, "--ifname net0 --ipv4 10.244.1.9", "exclude"),
        (&b, "--ifname net0 --ipv6 fd00::9", "no IPv6 pod CIDR"),
        (&b, "--ifname a/b", "ifname"),
    ] {
        let reported = workload.refusal_on(node, flags)?;
        assert!(reported.contains(naming), "{flags}: {reported}");
    }
    let health = node.health_ipv4()?;
    let reported = b.refusal_on(node, &format!("--ifname net0 --ipv4 {health}"))?;
    assert!(reported.contains("(health)"), "{reported}");
    before.wait_same(|| Snapshot::node(node))?;

    // There are five addresses: the health endpoint has one, and another one is taken.
    for number in 0..3 {
        b.endpoint_on(node, &format!("--ifname net{number}"))?;
    }
    let reported = c.refusal_on(node, "")?;
    assert!(
        reported.contains("no free address in pod CIDR 10.244.1.0/24"),
        "{reported}"
    );
    node.cli(&format!("endpoint delete {}", made.id))?
        .success()?;
    c.endpoint_on(node, "")?;
    Ok(())
}
