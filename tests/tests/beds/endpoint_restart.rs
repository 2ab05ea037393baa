//! Restarts that go unnoticed: endpoint traffic continues while agents are killed, restarted and upgraded, and policy
//! holds throughout.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use aya::maps::MapInfo;
use health_common::LAYOUT_VERSION;
use health_datapath::layout::{self, MapLayout};
use health_model::api::{AgentProblem, Endpoint};
use health_net::netns;
use health_registry::identity::LOCK_SUFFIX;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;
use tests::attached::{self, AttachedProgram};
use tests::bed::command_in;
use tests::ping::{Pace, Pinging, Summary, is_answered};
use tests::process::{Running, run};
use tests::upgrade::{pretend_layout, with_other_programs};
use tests::{Bed, Member, Node, PATIENCE, slowness, wait_for};

/// Only clients may reach the server, by echo requests and by iperf3, and they may reach nothing else.
const POLICY: &str = r#"
apiVersion: "cilium.io/v2"
kind: CiliumNetworkPolicy
metadata:
  name: restart
specs:
- endpointSelector:
    matchLabels:
      app: server
  ingress:
  - fromEndpoints:
    - matchLabels:
        app: client
    toPorts:
    - ports:
      - port: "5201"
        protocol: TCP
  - fromEndpoints:
    - matchLabels:
        app: client
    icmps:
    - fields:
      - family: IPv4
        type: 8
      - family: IPv6
        type: 128
- endpointSelector:
    matchLabels:
      app: client
  egress:
  - toEndpoints:
    - matchLabels:
        app: server
"#;

fn pings(from: &Member, address: IpAddr) -> anyhow::Result<bool> {
    is_answered(&from.name, address)
}

/// A client and a stranger on the first node, and a server on the second, with the policy in force.
struct Stand {
    client: Member,
    stranger: Member,
    server: Member,
    bed: Bed,
    folder: TempDir,
}

impl Stand {
    fn new() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let store = folder.path().join("identities.json");
        let bed = Bed::builder()
            .nodes(2)
            .ipv6(true)
            .agent_args(&format!("--identity-store file:{}", store.display()))
            .start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let stand = Self {
            client: Member::on(bed.node(1), "client", "--label app=client")?,
            stranger: Member::on(bed.node(1), "stranger", "--label app=stranger")?,
            server: Member::on(bed.node(2), "server", "--label app=server")?,
            bed,
            folder,
        };
        let document = stand.folder.path().join("policy.yaml");
        fs::write(&document, POLICY)?;
        for node in stand.bed.nodes() {
            let import = format!("policy import {}", document.display());
            let said = node.cli(&import)?.success()?;
            ensure!(said.contains("is in force after"), "{said}");
        }
        for address in stand.server.addresses() {
            wait_for("the client to reach the server", PATIENCE, || {
                Ok(pings(&stand.client, address)?.then_some(()))
            })?;
            ensure!(!pings(&stand.stranger, address)?, "a stranger is let in");
        }
        Ok(stand)
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("identities.json")
    }

    /// While a process holds the lock on this file, agents cannot read the store.
    fn store_lock(&self) -> PathBuf {
        let name = format!("identities.json{LOCK_SUFFIX}");
        self.folder.path().join(name)
    }

    /// Each node, with its endpoint that policy applies to.
    fn protected(&self) -> [(&Node, &Endpoint); 2] {
        [
            (self.bed.node(1), &self.client.endpoint),
            (self.bed.node(2), &self.server.endpoint),
        ]
    }
}

/// Starts an agent and waits until it has rebuilt all endpoints.
fn start(node: &Node, binary: Option<&Path>) -> anyhow::Result<()> {
    node.take_over(binary)?;
    wait_ready(node)
}

fn wait_ready(node: &Node) -> anyhow::Result<()> {
    wait_for("the endpoints to be ready", PATIENCE, || {
        let all: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
        ensure!(all.iter().all(|one| one.state == "ready"), "{all:?}");
        Ok(Some(()))
    })
}

/// The programs at the hooks of an endpoint and of the node.
fn programs(node: &Node, endpoint: &Endpoint) -> anyhow::Result<Vec<AttachedProgram>> {
    let mut found = Vec::new();
    for device in [&endpoint.interface, "lxc_health", "eth0"] {
        for mut there in attached::programs(node, device)? {
            ensure!(there.len() == 1, "{there:?} at a hook of {device}");
            found.append(&mut there);
        }
    }
    Ok(found)
}

/// An iperf3 connection from an endpoint to an address, with data in both directions until it is stopped.
struct Transfer(Child);

impl Transfer {
    fn start(from: &Member, to: IpAddr) -> anyhow::Result<Self> {
        let mbits = 100 / slowness();
        let words = format!("-J -t 3600 --bidir -b {mbits}M -c {to}");
        let mut client = command_in(&from.name, "iperf3");
        client.args(words.split(' ')).stdout(Stdio::piped());
        Ok(Self(client.spawn()?))
    }

    /// Stops the transfer and returns its report.
    fn end(mut self) -> anyhow::Result<Value> {
        let ended = self.0.try_wait()?;
        let pid = Pid::from_raw(self.0.id().cast_signed());
        if ended.is_none() {
            kill(pid, Signal::SIGINT)?;
        }
        let output = self.0.wait_with_output()?;
        let report: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(
            ended.is_none(),
            "ended by itself: {} {}",
            report["error"],
            report["end"]["sum_received"]
        );
        Ok(report)
    }
}

/// Pace of echo requests that are refused.
const REFUSED: Pace = Pace {
    interval: 2,
    flow: 500,
    patience: Duration::from_secs(1),
};

/// Traffic between the endpoints while the agents are disturbed.
struct Traffic {
    echoes: Vec<Pinging>,
    /// From a stranger to the server, and from the client to a stranger.
    refused: Vec<Pinging>,
    transfers: Vec<Transfer>,
    _servers: Vec<Running>,
}

impl Traffic {
    fn start(stand: &Stand) -> anyhow::Result<Self> {
        let Stand {
            client,
            stranger,
            server,
            ..
        } = stand;
        let addresses = server.addresses();
        let mut servers = Vec::new();
        let mut transfers = Vec::new();
        for address in &addresses {
            let mut command = command_in(&server.name, "iperf3");
            command.args(["-s", "-B", &address.to_string()]);
            servers.push(Running::start(&mut command)?);
        }
        wait_for("the servers to listen", PATIENCE, || {
            let mut ss = command_in(&server.name, "ss");
            let listening = run(ss.args(["-Hlnt", "sport", "=", ":5201"]))?.success()?;
            Ok((listening.lines().count() == addresses.len()).then_some(()))
        })?;
        for address in &addresses {
            transfers.push(Transfer::start(client, *address)?);
        }
        let echoes = addresses
            .iter()
            .map(|address| Pinging::start(&client.name, *address, Pace::DENSE));
        let strange = addresses.iter().map(|address| (stranger, *address));
        let to_strangers = stranger.addresses();
        let to_strangers = to_strangers.iter().map(|address| (client, *address));
        let refused = strange
            .chain(to_strangers)
            .map(|(from, to)| Pinging::start(&from.name, to, REFUSED));
        Ok(Self {
            echoes: echoes.collect(),
            refused: refused.collect(),
            transfers,
            _servers: servers,
        })
    }

    /// Stops the traffic and checks that no connection broke or stalled for a second, and that nothing passed that
    /// policy refuses. Returns the results of the other echo requests.
    fn end(self) -> anyhow::Result<Vec<Summary>> {
        for transfer in self.transfers {
            let report = transfer.end()?;
            let error = report["error"].as_str().unwrap_or_default();
            ensure!(
                error.starts_with("interrupt - the client has terminated"),
                "{error}"
            );
            let intervals = report["intervals"].as_array().context("no intervals")?;
            // The last interval is cut short.
            let whole = &intervals[..intervals.len().saturating_sub(1)];
            ensure!(!whole.is_empty(), "no whole interval: {report:#}");
            for interval in whole {
                for direction in ["sum", "sum_bidir_reverse"] {
                    let bytes = interval[direction]["bytes"].as_u64();
                    ensure!(bytes > Some(0), "{direction} stood still: {interval:#}");
                }
            }
        }
        for pinging in self.refused {
            let summary = pinging.end()?;
            ensure!(
                summary.transmitted > 0 && summary.received == 0,
                "what is refused: {summary:?}"
            );
        }
        self.echoes.into_iter().map(Pinging::end).collect()
    }
}

#[test]
#[ignore = "needs root"]
fn no_packet_is_lost_through_kills_restarts_and_upgrades() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let other = stand.folder.path().join("health-agent");
    let changed = with_other_programs(&other)?;
    let traffic = Traffic::start(&stand)?;
    let mut former = Vec::new();
    for (signal, binary) in [
        (Signal::SIGKILL, None),
        (Signal::SIGTERM, None),
        (Signal::SIGKILL, Some(other.as_path())),
        (Signal::SIGTERM, None),
    ] {
        for (node, endpoint) in stand.protected() {
            let before = programs(node, endpoint)?;
            node.kill_agent(signal)?;
            ensure!(programs(node, endpoint)? == before, "a dead agent's serve");
            start(node, binary)?;
            let after = programs(node, endpoint)?;
            for (before, after) in before.iter().zip(&after) {
                ensure!(before.id != after.id, "{before:?} and {after:?}");
                // These programs differ from those of the previous binary, in both directions.
                let is_other_version = binary.is_some() || former.contains(&before.tag);
                ensure!((before.tag != after.tag) == is_other_version, "{former:?}");
                if binary.is_some() {
                    former.push(after.tag.clone());
                }
            }
        }
    }
    // Both nodes at once, upgrading from a version with other settings.
    for (node, _) in stand.protected() {
        node.kill_agent(Signal::SIGKILL)?;
        pretend_layout(node, LAYOUT_VERSION - 1)?;
    }
    for (node, endpoint) in stand.protected() {
        let before = programs(node, endpoint)?;
        let flows = map_id(node, &layout::CT4)?;
        let settings = map_id(node, &layout::CONFIG)?;
        start(node, None)?;
        let after = programs(node, endpoint)?;
        let mut pairs = before.iter().zip(&after);
        ensure!(pairs.all(|(before, after)| before.id != after.id));
        ensure!(map_id(node, &layout::CT4)? == flows, "conntrack is another");
        ensure!(
            map_id(node, &layout::CONFIG)? != settings,
            "no other settings"
        );
        wait_for_former_maps_to_go(node)?;
    }
    let echoes = traffic.end()?;
    println!("{changed} instructions differed; echoes: {echoes:?}");
    for summary in echoes {
        ensure!(
            summary.transmitted > 1000 && summary.lost() == 0,
            "{summary:?}"
        );
    }
    Ok(())
}

/// Kernel ID of the pinned map.
fn map_id(node: &Node, map: &MapLayout) -> anyhow::Result<u32> {
    Ok(MapInfo::from_pin(node.pins().join(map.name))?.id())
}

fn wait_for_former_maps_to_go(node: &Node) -> anyhow::Result<()> {
    let aside = node.pins().with_file_name(format!("{}_old", node.name()));
    wait_for("the former maps to go", PATIENCE, || {
        Ok((!aside.exists()).then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn policy_holds_while_the_layout_of_its_maps_changes() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let traffic = Traffic::start(&stand)?;
    for (node, endpoint) in stand.protected() {
        let before = programs(node, endpoint)?;
        node.kill_agent(Signal::SIGKILL)?;
        pretend_layout(node, layout::POLICY.since - 1)?;
        // Until the store replies, the meaning of each identity is unknown.
        let lock = fs::File::create(stand.store_lock())?;
        lock.lock()?;
        // The second start finds the layout change half finished.
        for is_killed_too in [true, false] {
            node.start_agent()?;
            wait_for("the endpoint to wait", PATIENCE, || {
                let log = node.cli(&format!("endpoint log {}", endpoint.id))?;
                let waits = log
                    .stdout
                    .contains("identities of the cluster are not known");
                Ok(waits.then_some(()))
            })?;
            let meanwhile = programs(node, endpoint)?;
            ensure!(
                meanwhile[..2] == before[..2],
                "the endpoint's own were kept"
            );
            ensure!(meanwhile[2..] != before[2..], "the node's own were not");
            ensure!(pings(&stand.client, stand.server.addresses()[0])?);
            if is_killed_too {
                node.kill_agent(Signal::SIGKILL)?;
            }
        }
        let reported = node.logged(&["pinned maps have a different layout", "HEALTH_POLICY"])?;
        ensure!(reported.len() == 1, "{reported:?}");

        drop(lock);
        wait_ready(node)?;
        let after = programs(node, endpoint)?;
        ensure!(
            before
                .iter()
                .zip(&after)
                .all(|(before, after)| before != after),
            "{after:?}"
        );
        wait_for_former_maps_to_go(node)?;
    }
    let echoes = traffic.end()?;
    println!("echoes: {echoes:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn endpoints_and_their_peers_follow_when_the_store_loses_an_identity() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let (node, peer) = (stand.bed.node(1), stand.bed.node(2));
    let client = &stand.client.endpoint;
    let now = || -> anyhow::Result<Endpoint> {
        let all: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
        let found = all.into_iter().find(|one| one.id == client.id);
        found.context("the client is gone")
    };
    // The agent rewrites the file without changing its content.
    fs::remove_file(stand.store())?;
    wait_for("the file to be back", PATIENCE, || {
        let text = fs::read_to_string(stand.store())?;
        Ok(text.contains("app=client").then_some(()))
    })?;
    ensure!(now()?.identity == client.identity, "{:?}", now()?);

    // By the time the file is back, its number belongs to other labels. An agent that is about to rewrite the file
    // waits for the lock.
    let lock = fs::File::open(stand.store_lock())?;
    lock.lock()?;
    let text = fs::read_to_string(stand.store())?;
    let fresh = stand.folder.path().join("other.json");
    fs::write(&fresh, text.replace("app=client", "app=usurper"))?;
    fs::rename(&fresh, stand.store())?;
    drop(lock);
    let identity = wait_for("another identity", PATIENCE, || {
        let now = now()?;
        let is_other = now.state == "ready" && now.identity != client.identity;
        Ok(is_other.then_some(now.identity))
    })?;
    let log = node.cli(&format!("endpoint log {}", client.id))?;
    let words = "waiting-for-identity    the identity of its labels has changed";
    ensure!(log.stdout.contains(words), "{}", log.stdout);
    for address in stand.client.addresses() {
        wait_for("the peer to know", PATIENCE, || {
            let known = peer.listing(&format!("bpf ipcache get {address}"))?;
            let entry = known.get(0).unwrap_or(&known);
            ensure!(entry["identity"] == identity, "{known}");
            Ok(Some(()))
        })?;
    }
    for address in stand.server.addresses() {
        wait_for("the client to be let in", PATIENCE, || {
            Ok(pings(&stand.client, address)?.then_some(()))
        })?;
        ensure!(!pings(&stand.stranger, address)?, "a stranger is let in");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn restored_endpoints_wait_for_the_store_out_of_the_way_of_new_ones() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let node = stand.bed.node(1);
    let more = (0..6).map(|n| Member::on(node, &format!("more{n}"), "--label app=more"));
    let more: Vec<Member> = more.collect::<Result<_, _>>()?;
    node.kill_agent(Signal::SIGKILL)?;
    let lock = fs::File::create(stand.store_lock())?;
    lock.lock()?;
    node.take_over(None)?;
    // The endpoint's labels have no identity: nothing passes, although no rule selects the endpoint.
    let new = Member::on(node, "new", "--label app=new")?;
    let state = &new.endpoint.state;
    ensure!(state == "waiting-for-identity", "{:?}", new.endpoint);
    let reason = new.endpoint.reason.as_deref().unwrap_or_default();
    ensure!(
        reason.contains("have no identity yet"),
        "{:?}",
        new.endpoint
    );
    let listed = node.cli("endpoint list")?.success()?;
    ensure!(listed.contains(reason), "{listed}");
    for (from, to) in [(&new, &stand.stranger), (&stand.stranger, &new)] {
        ensure!(
            !pings(from, to.addresses()[0])?,
            "an endpoint without an identity is open"
        );
    }
    wait_for("status to name it", PATIENCE, || {
        let problems = node.status()?.local.problems;
        let id = new.endpoint.id.to_string();
        let is_reported =
            |one: &AgentProblem| one.check == "endpoints" && one.message.contains(&id);
        ensure!(problems.iter().any(is_reported), "{problems:?}");
        Ok(Some(()))
    })?;
    let restored: Vec<u16> = [&stand.client, &stand.stranger]
        .into_iter()
        .chain(&more)
        .map(|one| one.endpoint.id)
        .collect();
    for id in &restored {
        wait_for("the endpoint to say what it waits for", PATIENCE, || {
            let log = node.cli(&format!("endpoint log {id}"))?.success()?;
            ensure!(!log.contains("regenerating"), "{log}");
            let words = "the identities of the cluster are not known yet";
            Ok(log.contains(words).then_some(()))
        })?;
    }
    ensure!(pings(&stand.client, stand.server.addresses()[0])?);
    drop(lock);
    wait_ready(node)?;
    wait_for("the new endpoint to be open", PATIENCE, || {
        Ok(pings(&new, stand.stranger.addresses()[0])?.then_some(()))
    })
}

/// Like an agent in a container without access to the folder where its runtime mounts namespaces.
#[test]
#[ignore = "needs root"]
fn endpoints_live_on_where_the_agent_finds_no_file_of_their_namespace() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let members = (0..7).map(|n| Member::on(node, &format!("file{n}"), ""));
    let members: Vec<Member> = members.collect::<Result<_, _>>()?;
    node.kill_agent(Signal::SIGKILL)?;
    // The namespaces survive, since each member holds its own open.
    for member in &members {
        netns::remove(&member.name)?;
    }
    start(node, None)?;
    let all: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
    ensure!(all.len() == members.len() + 1, "{all:?}");
    for member in &members {
        for address in member.addresses() {
            ensure!(node.pings(address)?, "{address} does not answer");
        }
    }
    ensure!(node.logged(&["endpoint dropped"])?.is_empty());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn endpoints_that_lost_their_devices_together_are_kept_until_they_are_deleted() -> anyhow::Result<()>
{
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let members = (0..3).map(|n| Member::on(node, &format!("lost{n}"), ""));
    let members: Vec<Member> = members.collect::<Result<_, _>>()?;
    node.kill_agent(Signal::SIGKILL)?;
    for member in &members[..2] {
        node.exec(&format!("ip link delete {}", member.endpoint.interface))?;
    }
    node.take_over(None)?;
    let listed = || -> anyhow::Result<Vec<Endpoint>> {
        Ok(serde_json::from_value(node.listing("endpoint list")?)?)
    };
    wait_for("the one that lives to be ready", PATIENCE, || {
        let all = listed()?;
        let third = all.iter().find(|one| one.id == members[2].endpoint.id);
        Ok(third.is_some_and(|one| one.state == "ready").then_some(()))
    })?;
    let ids: Vec<u16> = members.iter().map(|member| member.endpoint.id).collect();
    for one in listed()?.iter().filter(|one| ids[..2].contains(&one.id)) {
        ensure!(one.state == "restoring", "{one:?}");
        let reason = one.reason.as_deref().unwrap_or_default();
        ensure!(reason.starts_with("its device is gone"), "{one:?}");
    }
    wait_for("status to name them", PATIENCE, || {
        let problems = node.status()?.local.problems;
        let is_reported = |one: &AgentProblem| {
            let names = |id: &u16| one.message.contains(&id.to_string());
            one.check == "endpoints" && ids[..2].iter().all(names)
        };
        ensure!(problems.iter().any(is_reported), "{problems:?}");
        Ok(Some(()))
    })?;
    for id in &ids[..2] {
        node.cli(&format!("endpoint delete {id}"))?.success()?;
    }
    wait_for("status to be in order", PATIENCE, || {
        let problems = node.status()?.local.problems;
        Ok((!problems.iter().any(|one| one.check == "endpoints")).then_some(()))
    })?;
    wait_ready_but_deleted(node)
}

fn wait_ready_but_deleted(node: &Node) -> anyhow::Result<()> {
    wait_for("the endpoints to be ready", PATIENCE, || {
        let all: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
        let mut living = all.iter().filter(|one| one.state != "disconnected");
        ensure!(living.all(|one| one.state == "ready"), "{all:?}");
        Ok(Some(()))
    })
}
