//! The policy table and Cilium's published examples with real packets: each case sends a packet from one network
//! namespace to another, which must arrive, or be counted as dropped on the side that must drop it.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_model::api::Endpoint;
use health_model::policy::{L4, PolicyMode, Protocol as Transport};
use health_net::netns::{self, NetNs};
use nix::sys::signal::Signal;
use nix::sys::socket::{MsgFlags, recv};
use socket2::{Domain, Protocol, Socket, Type};
use tests::bed::add_address;
use tests::packet::{Ipv4, Ipv6, echo, echo4};
use tests::policy::cases::{Case, ENDPOINTS, End, Outcome, SCENARIOS, Scenario};
use tests::policy::examples::{EXAMPLES, Example, Expected};
use tests::process::RunOutput;
use tests::{Bed, Node, PATIENCE, wait_for};

/// Raw socket protocol for packets with their own IP header (`IPPROTO_RAW`).
const RAW: i32 = 255;
/// How long to check that a packet that was counted as dropped does not arrive.
const SILENCE: Duration = Duration::from_millis(20);

/// A bed with the table's endpoints on its first node. The second node acts as another host of the cluster,
/// and also has the addresses that stand for the world outside the cluster.
struct Stand {
    endpoints: BTreeMap<&'static str, (NetNs, Endpoint)>,
    bed: Bed,
    documents: PathBuf,
    /// Number of packets sent, which makes each packet a separate flow.
    packets: u16,
}

impl Stand {
    /// Starts the bed. The names of the endpoints' namespaces begin with `prefix`: tests run at the same time.
    fn new(folder: &std::path::Path, prefix: &str) -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(2).ipv6(true).start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let (node, other) = (bed.node(1), bed.node(2));
        let mut endpoints = BTreeMap::new();
        for endpoint in ENDPOINTS {
            let name = format!("{prefix}-{}", endpoint.name);
            // Removes a leftover of a killed test.
            netns::remove(&name)?;
            let namespace = NetNs::create(&name)?;
            let labels: String = endpoint
                .labels
                .iter()
                .map(|label| format!(" --label {label}"))
                .collect();
            let made = node.cli(&format!(
                "endpoint create --netns {}{labels} -o json",
                namespace.path().display()
            ))?;
            let made = serde_json::from_str(&made.success()?)?;
            endpoints.insert(endpoint.name, (namespace, made));
        }
        for address in world()? {
            let via = match address {
                IpAddr::V4(_) => other.ipv4().to_string(),
                IpAddr::V6(_) => other.ipv6().context("no IPv6")?.to_string(),
            };
            add_address(other.name(), &address.to_string(), "lo")?;
            node.exec(&format!("ip route add {address} via {via}"))?;
        }
        Ok(Self {
            endpoints,
            bed,
            documents: folder.join("policy"),
            packets: 0,
        })
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// The namespace of an end, and its address of one IP version.
    fn end(&self, end: End, is_v6: bool) -> anyhow::Result<(NetNs, IpAddr)> {
        let of_node = |node: &Node| -> anyhow::Result<(NetNs, IpAddr)> {
            let address = match is_v6 {
                true => node.ipv6().context("no IPv6")?.into(),
                false => node.ipv4().into(),
            };
            Ok((NetNs::open(node.name())?, address))
        };
        match end {
            End::Endpoint(name) => {
                let (namespace, endpoint) = self.endpoints.get(name).context("no such endpoint")?;
                let address = if is_v6 { endpoint.ipv6 } else { endpoint.ipv4 };
                let name = namespace.path().file_name().and_then(|name| name.to_str());
                let namespace = NetNs::open(name.context("a namespace without a name")?)?;
                Ok((namespace, address.context("no address of this IP version")?))
            }
            End::Host => of_node(self.node()),
            End::RemoteNode => of_node(self.bed.node(2)),
            End::World(address) => Ok((NetNs::open(self.bed.node(2).name())?, address.parse()?)),
        }
    }

    /// Packets that the first node has counted, by reason and direction.
    fn drops(&self) -> anyhow::Result<BTreeMap<(String, String), u64>> {
        let listed = self.node().listing("bpf metrics list")?;
        let rows = listed.as_array().context("the metrics are no list")?;
        let text = |row: &serde_json::Value, field: &str| {
            row[field].as_str().unwrap_or_default().to_owned()
        };
        Ok(rows
            .iter()
            .map(|row| {
                let what = (text(row, "reason"), text(row, "direction"));
                (what, row["packets"].as_u64().unwrap_or_default())
            })
            .collect())
    }

    fn show(&mut self, case: &Case) -> anyhow::Result<()> {
        self.packets += 1;
        let is_v6 = case.l4.protocol == Transport::ICMPV6
            || [case.from, case.to]
                .iter()
                .any(|end| matches!(end, End::World(address) if address.contains(':')));
        let (from, source) = self.end(case.from, is_v6)?;
        let (to, destination) = self.end(case.to, is_v6)?;
        let marker = format!("case{:05}", self.packets).into_bytes();
        let packet = packet(source, destination, case.l4, self.packets, &marker)?;
        let domain = Domain::for_address(SocketAddr::new(destination, 0));
        let protocol = Protocol::from(i32::from(case.l4.protocol.0));
        let receiver = to.run_in(|| Socket::new(domain, Type::RAW, Some(protocol)))??;
        let sender = from.run_in(|| Socket::new(domain, Type::RAW, Some(RAW.into())))??;
        let send = || sender.send_to(&packet, &SocketAddr::new(destination, 0).into());
        let arrived = |patience: Duration| -> anyhow::Result<bool> {
            receiver.set_read_timeout(Some(patience))?;
            let mut bytes = [0; 256];
            loop {
                match recv(receiver.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
                    Ok(length) => {
                        let found = bytes[..length].windows(marker.len());
                        if found.into_iter().any(|part| part == marker) {
                            return Ok(true);
                        }
                    }
                    Err(error) if std::io::Error::from(error).kind() == ErrorKind::WouldBlock => {
                        return Ok(false);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        let (reason, direction) = match case.outcome {
            Outcome::Passes => {
                return wait_for("the packet to arrive", PATIENCE, || {
                    send()?;
                    Ok(arrived(SILENCE)?.then_some(()))
                });
            }
            // Directions as seen from the host.
            Outcome::EgressDrops => ("Policy denied", "INGRESS"),
            Outcome::EgressDenies => ("Policy denied by denylist", "INGRESS"),
            Outcome::IngressDrops => ("Policy denied", "EGRESS"),
            Outcome::IngressDenies => ("Policy denied by denylist", "EGRESS"),
        };
        let what = (reason.to_owned(), direction.to_owned());
        let count = |drops: BTreeMap<_, u64>| drops.get(&what).copied().unwrap_or_default();
        let before = count(self.drops()?);
        send()?;
        wait_for("the packet to be dropped", PATIENCE, || {
            Ok((count(self.drops()?) > before).then_some(()))
        })?;
        ensure!(!arrived(SILENCE)?, "it was dropped, and arrived");
        Ok(())
    }

    /// Applies a scenario's policies, after restarting the agent if the settings differ from the last scenario's.
    fn prepare(&self, scenario: &Scenario, last: Option<&Scenario>) -> anyhow::Result<()> {
        let settings = |one: &Scenario| (one.mode, one.allow_localhost);
        let node = self.node();
        if last.map(settings) != Some(settings(scenario)) {
            let mode = match scenario.mode {
                PolicyMode::Default => "default",
                PolicyMode::Always => "always",
                PolicyMode::Never => "never",
            };
            node.kill_agent(Signal::SIGTERM)?;
            node.start_agent_with(&format!(
                "--policy-mode {mode} --policy-allow-localhost {}",
                scenario.allow_localhost
            ))?;
        }
        wait_for("the endpoints to be ready", PATIENCE, || {
            let listed = node.listing("endpoint list")?;
            let endpoints = listed.as_array().context("no list")?;
            let is_ready = |one: &serde_json::Value| one["state"] == "ready";
            let all = endpoints.len() == ENDPOINTS.len() + 1 && endpoints.iter().all(is_ready);
            Ok(all.then_some(()))
        })?;
        node.cli("policy delete --all")?.success()?;
        for document in scenario.documents {
            let said = self.import(document)?.success()?;
            ensure!(said.contains("is in force after"), "{said}");
        }
        Ok(())
    }

    fn import(&self, document: &str) -> anyhow::Result<RunOutput> {
        fs::write(&self.documents, document)?;
        let command = format!("policy import {}", self.documents.display());
        self.node().cli(&command)
    }

    /// Shows the cases of a scenario. Restarts the agent if the settings differ from the last scenario's.
    fn show_all(&mut self, scenario: &Scenario, last: Option<&Scenario>) -> anyhow::Result<()> {
        self.prepare(scenario, last)
            .with_context(|| scenario.name)?;
        for case in scenario.cases {
            self.show(case)
                .with_context(|| format!("{}: {case:?}", scenario.name))?;
        }
        Ok(())
    }

    /// Shows that the import of a document fails with a message that contains these words, and changes nothing.
    fn show_refused(&self, document: &str, words: &str) -> anyhow::Result<()> {
        let before = self.node().listing("policy get")?;
        let refused = self.import(document)?;
        ensure!(refused.code != Some(0), "it was accepted");
        ensure!(refused.stderr.contains(words), "{}", refused.stderr);
        let after = self.node().listing("policy get")?;
        ensure!(before == after, "before: {before}, after: {after}");
        Ok(())
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        for (namespace, _) in self.endpoints.values() {
            let name = namespace.path().file_name().and_then(|name| name.to_str());
            if let Some(name) = name {
                let _ = netns::remove(name);
            }
        }
    }
}

/// All addresses outside the cluster that the cases use.
fn world() -> anyhow::Result<Vec<IpAddr>> {
    let examples = EXAMPLES.iter().filter_map(Example::scenario);
    let scenarios = SCENARIOS.into_iter().chain(examples);
    let ends = scenarios
        .flat_map(|scenario| scenario.cases)
        .flat_map(|case| [case.from, case.to]);
    let addresses = ends.filter_map(|end| match end {
        End::World(address) => Some(address.parse::<IpAddr>()),
        _ => None,
    });
    let mut addresses: Vec<IpAddr> = addresses.collect::<Result<_, _>>()?;
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses)
}

/// An IP packet in its own flow, with a marker in it.
fn packet(
    source: IpAddr,
    destination: IpAddr,
    l4: L4,
    flow: u16,
    marker: &[u8],
) -> anyhow::Result<Vec<u8>> {
    let source_port = 20_000 + flow;
    let ports = [source_port.to_be_bytes(), l4.port.to_be_bytes()].concat();
    let kind = || u8::try_from(l4.port).context("no type of ICMP");
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4 {
                protocol: l4.protocol.0,
                ..Ipv4::icmp(source, destination)
            };
            Ok(ip.packet(&match l4.protocol {
                Transport::ICMP => echo4(kind()?, 0, source_port, 1, marker),
                _ => transport(l4, &ports, marker),
            }))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6 {
                next_header: l4.protocol.0,
                ..Ipv6::icmp(source, destination)
            };
            Ok(ip.packet(&match l4.protocol {
                Transport::ICMPV6 => ip.with_checksum(echo(kind()?, 0, source_port, 1, marker)),
                _ => transport(l4, &ports, marker),
            }))
        }
        _ => anyhow::bail!("{source} and {destination} are of two IP versions"),
    }
}

/// A transport header with these ports, followed by the marker. Its checksum is not verified, as a raw socket receives
/// it.
fn transport(l4: L4, ports: &[u8], marker: &[u8]) -> Vec<u8> {
    let rest: &[u8] = match l4.protocol {
        // Sequence and acknowledgement number, header length of 20 bytes, SYN, window, checksum, urgent pointer.
        Transport::TCP => &[0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 16, 0, 0, 0, 0, 0],
        Transport::UDP => &[0, 17, 0, 0],
        // Verification tag and checksum.
        _ => &[0, 0, 0, 0, 0, 0, 0, 0],
    };
    [ports, rest, marker].concat()
}

#[test]
#[ignore = "needs root"]
fn every_case_of_the_table_comes_true_in_packets() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut stand = Stand::new(folder.path(), "hcase")?;
    let mut last = None;
    for scenario in &SCENARIOS {
        stand.show_all(scenario, last)?;
        last = Some(scenario);
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn each_published_example_is_in_force_or_refused_by_name() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut stand = Stand::new(folder.path(), "hexample")?;
    let mut last: Option<Scenario> = None;
    for example in EXAMPLES {
        if let Expected::Refused(words) = example.expected {
            stand
                .show_refused(example.document, words)
                .with_context(|| example.published)?;
        }
        if let Some(scenario) = example.scenario() {
            stand.show_all(&scenario, last.as_ref())?;
            last = Some(scenario);
        }
    }
    Ok(())
}
