//! Policy on real nodes, with real packets.

use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::Signal;
use tempfile::TempDir;
use tests::ping::{Pace, Pinging};
use tests::{Bed, Member, Node, PATIENCE, wait_for};

/// Drop reason for packets that no rule allows.
const POLICY_DENIED: &str = "Policy denied";

/// Documents with two rules: endpoints without known labels are reachable from the host and may send DNS queries, and a
/// service may answer these.
const INIT_YAML: &str = r#"
apiVersion: "cilium.io/v2"
kind: CiliumNetworkPolicy
metadata:
  name: init
specs:
- endpointSelector:
    matchLabels:
      "reserved:init": ""
  ingress:
  - fromEntities:
    - host
  egress:
  - toEntities:
    - all
    toPorts:
    - ports:
      - port: "53"
        protocol: UDP
---
apiVersion: "cilium.io/v2"
kind: CiliumNetworkPolicy
metadata:
  name: "from-init"
spec:
  endpointSelector:
    matchLabels:
      app: myService
  ingress:
  - fromEntities:
    - init
  - toPorts:
    - ports:
      - port: "53"
        protocol: UDP
"#;
const INIT_JSON: &str = r#"[
{"labels": [{"key": "name", "value": "init"}],
 "endpointSelector": {"matchLabels": {"reserved:init": ""}},
 "ingress": [{"fromEntities": ["host"]}],
 "egress": [{"toEntities": ["all"], "toPorts": [{"ports": [{"port": "53", "protocol": "UDP"}]}]}]},
{"labels": [{"key": "name", "value": "from-init"}],
 "endpointSelector": {"matchLabels": {"app": "myService"}},
 "ingress": [{"fromEntities": ["init"]}, {"toPorts": [{"ports": [{"port": "53", "protocol": "UDP"}]}]}]}
]"#;

/// A friend may send to a web server, and nothing else: both directions of their traffic are enforced in every mode but
/// `never`.
const FRIENDS_JSON: &str = r#"[
{"endpointSelector": {"matchLabels": {"app": "web"}},
 "ingress": [{"fromEndpoints": [{"matchLabels": {"role": "friend"}}]}]},
{"endpointSelector": {"matchLabels": {"role": "friend"}},
 "egress": [{"toEndpoints": [{"matchLabels": {"app": "web"}}]}]}
]"#;

fn socket(member: &Member, address: IpAddr, port: u16) -> anyhow::Result<UdpSocket> {
    let socket = member
        .netns
        .run_in(|| UdpSocket::bind(SocketAddr::new(address, port)))??;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    Ok(socket)
}

/// Checks that datagrams reach a port of `to` over each IP version.
pub(crate) fn reaches(from: &Member, to: &Member, port: u16) -> anyhow::Result<()> {
    for (source, target) in from.addresses().into_iter().zip(to.addresses()) {
        let listener = socket(to, target, port)?;
        let sender = socket(from, source, 0)?;
        wait_for("a datagram to arrive", PATIENCE, || {
            sender.send_to(b"passes", (target, port))?;
            Ok(listener.recv_from(&mut [0; 16]).ok())
        })
        .with_context(|| format!("{source} to {target}, port {port}"))?;
    }
    Ok(())
}

/// Checks that no datagram gets through, by sending until the node has counted enough policy drops.
pub(crate) fn is_kept_from(
    from: &Member,
    to: &Member,
    port: u16,
    counting: &Node,
) -> anyhow::Result<()> {
    const DATAGRAMS: u64 = 3;
    for (source, target) in from.addresses().into_iter().zip(to.addresses()) {
        let listener = socket(to, target, port)?;
        let sender = socket(from, source, 0)?;
        let before = denied(counting)?;
        for _ in 0..DATAGRAMS {
            sender.send_to(b"drops", (target, port))?;
        }
        wait_for("datagrams to be dropped", PATIENCE, || {
            Ok((denied(counting)? >= before + DATAGRAMS).then_some(()))
        })
        .with_context(|| format!("{source} to {target}, port {port}"))?;
        let arrived = listener.recv_from(&mut [0; 16]);
        assert!(arrived.is_err(), "{source} to {target}, port {port}");
    }
    Ok(())
}

/// Number of packets that policy has dropped so far.
fn denied(node: &Node) -> anyhow::Result<u64> {
    let listed = node.listing("bpf metrics list")?;
    let rows = listed.as_array().context("the metrics are no list")?;
    Ok(rows
        .iter()
        .filter(|row| row["reason"] == POLICY_DENIED)
        .filter_map(|row| row["packets"].as_u64())
        .sum())
}

/// A bed whose nodes share their identities, and a folder for policy documents.
fn bed(nodes: u8) -> anyhow::Result<(Bed, TempDir)> {
    let folder = tempfile::tempdir()?;
    let store = folder.path().join("identities.json");
    let bed = Bed::builder()
        .nodes(nodes)
        .ipv6(true)
        .agent_args(&format!("--identity-store file:{}", store.display()))
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    Ok((bed, folder))
}

pub(crate) fn import(node: &Node, folder: &Path, text: &str) -> anyhow::Result<String> {
    let file = folder.join("policy");
    fs::write(&file, text)?;
    let said = node
        .cli(&format!("policy import {}", file.display()))?
        .success()?;
    assert!(said.contains("is in force after"), "{said}");
    Ok(said)
}

#[test]
#[ignore = "needs root"]
fn endpoints_without_labels_ask_for_names_and_are_reached_by_the_host() -> anyhow::Result<()> {
    let (bed, folder) = bed(1)?;
    let node = bed.node(1);
    let init = Member::on(node, "init", "")?;
    let service = Member::on(node, "service", "--label app=myService")?;
    let other = Member::on(node, "other", "--label app=other")?;
    assert_eq!(init.endpoint.identity, 5);

    // Without rules, all traffic passes.
    reaches(&other, &init, 4000)?;
    reaches(&init, &service, 54)?;
    for (documents, form) in [(INIT_YAML, "YAML"), (INIT_JSON, "JSON")] {
        import(node, folder.path(), documents).context(form)?;
        reaches(&init, &service, 53)?;
        is_kept_from(&init, &service, 54, node)?;
        reaches(&other, &service, 53)?;
        is_kept_from(&other, &service, 54, node)?;
        is_kept_from(&other, &init, 4000, node)?;
        for address in init.addresses() {
            assert!(node.pings(address)?, "{form}: the host to {address}");
        }
        let trace = node
            .cli("policy trace --src app=other --dst app=myService --dport 54/UDP")?
            .success()?;
        assert!(trace.contains("Final verdict: dropped"), "{trace}");
        node.cli("policy delete --all")?.success()?;
        reaches(&other, &service, 54)?;
    }

    // With labels, the endpoint gets another identity, and other rules apply to it.
    import(node, folder.path(), INIT_YAML)?;
    node.cli(&format!(
        "endpoint labels {} --add app=known",
        init.endpoint.id
    ))?
    .success()?;
    reaches(&other, &init, 4000)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn rules_hold_for_endpoints_of_other_nodes_and_without_an_agent() -> anyhow::Result<()> {
    const RULES: &str = r#"[{"labels": ["name=web"], "endpointSelector": {"matchLabels": {"app": "web"}},
        "ingress": [{"fromEndpoints": [{"matchLabels": {"role": "friend"}}],
                     "toPorts": [{"ports": [{"port": "8000", "endPort": 8999, "protocol": "UDP"}]}]}],
        "ingressDeny": [{"fromEndpoints": [{"matchLabels": {"role": "friend"}}],
                         "toPorts": [{"ports": [{"port": "8080", "protocol": "UDP"}]}]}]}]"#;
    let (bed, folder) = bed(2)?;
    let (here, there) = (bed.node(1), bed.node(2));
    let web = Member::on(here, "web", "--label app=web")?;
    let near = Member::on(here, "near", "--label role=friend")?;
    let far = Member::on(there, "far", "--label role=friend")?;
    let foe = Member::on(there, "foe", "--label role=foe")?;
    assert_eq!(near.endpoint.identity, far.endpoint.identity);
    import(here, folder.path(), RULES)?;
    let holds = || -> anyhow::Result<()> {
        for friend in [&near, &far] {
            reaches(friend, &web, 8000)?;
            reaches(friend, &web, 8999)?;
            is_kept_from(friend, &web, 9000, here)?;
            is_kept_from(friend, &web, 7999, here)?;
        }
        is_kept_from(&foe, &web, 8000, here)
    };
    holds()?;
    let table = here
        .cli(&format!("bpf policy get {}", web.endpoint.id))?
        .success()?;
    assert!(table.contains("8080"), "{table}");

    here.kill_agent(Signal::SIGKILL)?;
    holds().context("without an agent")?;
    here.start_agent()?;
    wait_for("the endpoint to be ready again", PATIENCE, || {
        let shown = here.listing(&format!("endpoint get {}", web.endpoint.id));
        Ok(shown.ok().filter(|shown| shown["state"] == "ready"))
    })?;
    holds().context("after a restart")?;
    assert!(here.pings(web.ipv4()?)?, "the host reaches its endpoints");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_is_not_supported_is_refused_by_name_and_changes_nothing() -> anyhow::Result<()> {
    let (bed, folder) = bed(1)?;
    let node = bed.node(1);
    import(node, folder.path(), INIT_JSON)?;
    let before = node.cli("policy get -o json")?.success()?;
    for (document, named) in [
        (
            r#"[{"labels": ["a"], "endpointSelector": {}, "egress": [{"toFQDNs": [{"matchName": "a.b"}]}]}]"#,
            "toFQDNs",
        ),
        (
            r#"[{"labels": ["a"], "endpointSelector": {}, "ingress": [{"toPorts": [{"ports": [{"port": "80"}],
                "rules": {"http": [{}]}}]}]}]"#,
            "rules",
        ),
        (
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\n\
             spec: {podSelector: {}, ingress: [{ports: [{port: 0}]}]}\n",
            "Invalid value: 0: must be between 1 and 65535, inclusive",
        ),
        ("{", "JSON"),
    ] {
        let file = folder.path().join("bad");
        fs::write(&file, document)?;
        let ran = node.cli(&format!("policy import {}", file.display()))?;
        assert_eq!(ran.code, Some(1), "{document}");
        assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
        assert!(
            ran.stderr.to_lowercase().contains(&named.to_lowercase()) || named == "JSON",
            "{}",
            ran.stderr
        );
    }
    assert_eq!(node.cli("policy get -o json")?.success()?, before);
    let missing = node.cli("policy delete nobody")?;
    assert_eq!(missing.code, Some(1), "{}", missing.stdout);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_file_of_many_kinds_gives_its_policies_and_names_the_rest() -> anyhow::Result<()> {
    let (bed, folder) = bed(1)?;
    let node = bed.node(1);
    let text = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
---
apiVersion: v1
kind: List
items:
- {apiVersion: apps/v1, kind: Deployment, metadata: {name: web, namespace: shop}}
- apiVersion: networking.k8s.io/v1
  kind: NetworkPolicy
  metadata: {name: web, namespace: shop}
  spec: {podSelector: {}}
---
- endpointSelector: {matchLabels: {app: web}}
  ingress: [{}]
";
    let imported = import(node, folder.path(), text)?;
    for line in [
        "added NetworkPolicy shop/web",
        "added rules [health-agent:rule=",
        "skipped Service shop/web: not a policy",
        "skipped Deployment shop/web: not a policy",
    ] {
        assert!(imported.contains(line), "{imported}");
    }
    let again = import(node, folder.path(), text)?;
    assert_eq!(again.matches("unchanged ").count(), 2, "{again}");
    Ok(())
}

/// A client and a server that have exchanged a question and an answer over UDP.
struct Talk {
    client: UdpSocket,
    server: UdpSocket,
    client_at: SocketAddr,
}

impl Talk {
    fn between(
        client: &Member,
        server: &Member,
        target: IpAddr,
        from: SocketAddr,
    ) -> anyhow::Result<Self> {
        let server = socket(server, target, 4000)?;
        let talk = Self {
            client: socket(client, from.ip(), from.port())?,
            client_at: from,
            server,
        };
        wait_for("a question to be answered", PATIENCE, || {
            talk.client.send_to(b"question", (target, 4000))?;
            if talk.server.recv_from(&mut [0; 16]).is_err() {
                return Ok(None);
            }
            talk.server.send_to(b"answer", talk.client_at)?;
            Ok(talk.client.recv_from(&mut [0; 16]).ok())
        })?;
        Ok(talk)
    }

    /// Checks that policy drops the server's packets and that none reaches the client.
    fn is_over(&self, client: &UdpSocket, node: &Node) -> anyhow::Result<()> {
        while client.recv_from(&mut [0; 16]).is_ok() {}
        let before = denied(node)?;
        for _ in 0..3 {
            self.server.send_to(b"more", self.client_at)?;
        }
        wait_for("datagrams to be dropped", PATIENCE, || {
            Ok((denied(node)? >= before + 3).then_some(()))
        })?;
        assert!(client.recv_from(&mut [0; 16]).is_err());
        Ok(())
    }
}

#[test]
#[ignore = "needs root"]
fn a_policy_ends_flows_for_those_who_answer_too() -> anyhow::Result<()> {
    const RULES: &str = r#"[{"labels": ["name=deny"], "endpointSelector": {"matchLabels": {"app": "client"}},
        "egress": [{}]}]"#;
    let (bed, folder) = bed(2)?;
    let (here, there) = (bed.node(1), bed.node(2));
    let client = Member::on(here, "asker", "--label app=client")?;
    let servers = [
        Member::on(here, "near", "--label app=server")?,
        Member::on(there, "far", "--label app=server")?,
    ];
    let mut talks = Vec::new();
    for (server, port) in servers.iter().zip([5000, 5001]) {
        for (from, to) in client.addresses().into_iter().zip(server.addresses()) {
            let from = SocketAddr::new(from, port);
            talks.push(Talk::between(&client, server, to, from)?);
        }
    }
    import(here, folder.path(), RULES)?;
    for talk in &talks {
        talk.is_over(&talk.client, here)
            .with_context(|| talk.client_at.to_string())?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_new_endpoint_hears_nothing_of_who_had_its_address_before() -> anyhow::Result<()> {
    const RULES: &str = r#"[{"labels": ["name=deny"], "endpointSelector": {"matchLabels": {"app": "late"}},
        "ingress": [{}]}]"#;
    let (bed, folder) = bed(1)?;
    let node = bed.node(1);
    import(node, folder.path(), RULES)?;
    let early = Member::on(node, "early", "--label app=early")?;
    let server = Member::on(node, "server", "--label app=server")?;
    let from = SocketAddr::new(early.ipv4()?, 5000);
    let talk = Talk::between(&early, &server, server.ipv4()?, from)?;
    node.cli(&format!("endpoint delete {}", early.endpoint.id))?
        .success()?;
    let flags = format!("--label app=late --ipv4 {}", from.ip());
    let late = Member::on(node, "late", &flags)?;
    let listener = socket(&late, from.ip(), from.port())?;
    talk.is_over(&listener, node)
}

/// Kills the agent, starts it with these flags, and waits until it has built an endpoint.
fn restart(node: &Node, flags: &str, endpoint: u16) -> anyhow::Result<()> {
    node.kill_agent(Signal::SIGKILL)?;
    node.start_agent_with(flags)?;
    wait_for("the endpoint to be ready again", PATIENCE, || {
        let shown = node.listing(&format!("endpoint get {endpoint}"));
        Ok(shown.ok().filter(|shown| shown["state"] == "ready"))
    })?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_enforcement_of_one_endpoint_changes_while_it_runs_and_lasts() -> anyhow::Result<()> {
    const RULES: &str = r#"[{"endpointSelector": {"matchLabels": {"app": "web"}},
        "ingress": [{"fromEndpoints": [{"matchLabels": {"role": "friend"}}]}]}]"#;
    let (bed, folder) = bed(1)?;
    let node = bed.node(1);
    let web = Member::on(node, "web", "--label app=web")?;
    let twin = Member::on(node, "twin", "--label app=web")?;
    let foe = Member::on(node, "foe", "--label role=foe")?;
    let other = Member::on(node, "other", "--label role=other")?;
    assert_eq!(web.endpoint.identity, twin.endpoint.identity);
    import(node, folder.path(), RULES)?;
    is_kept_from(&foe, &web, 8000, node)?;
    let id = web.endpoint.id;
    let config = |id: u16, setting: &str| {
        let said = node.cli(&format!("endpoint config {id} {setting}"))?;
        said.success()
    };
    let settings = |mode: &str| format!("enforcement={mode}\nconntrack=on\ndebug=off\n");
    assert_eq!(config(id, "")?, settings("default"));

    assert_eq!(config(id, "enforcement=never")?, settings("never"));
    reaches(&foe, &web, 8000)?;
    is_kept_from(&foe, &twin, 8000, node)?;
    let log = node.cli(&format!("endpoint log {id}"))?.success()?;
    assert!(log.contains("settings changed: enforcement=never"), "{log}");
    let trace = format!("policy trace --src role=foe --dst-endpoint {id} --dport 8000/UDP");
    let trace = node.cli(&trace)?.success()?;
    assert!(trace.contains("Final verdict: allowed"), "{trace}");

    restart(node, "", id)?;
    let shown = node.listing(&format!("endpoint get {id}"))?;
    assert_eq!(shown["settings"]["enforcement"], "never");
    reaches(&foe, &web, 8000)?;
    is_kept_from(&foe, &twin, 8000, node)?;
    config(id, "enforcement=default")?;
    is_kept_from(&foe, &web, 8000, node)?;

    // No rule selects this one.
    reaches(&foe, &other, 8000)?;
    config(other.endpoint.id, "enforcement=always")?;
    is_kept_from(&foe, &other, 8000, node)?;
    config(other.endpoint.id, "enforcement=default")?;
    reaches(&foe, &other, 8000)
}

#[test]
#[ignore = "needs root"]
fn a_commanded_mode_outranks_the_settings_until_it_is_withdrawn() -> anyhow::Result<()> {
    let (bed, folder) = bed(1)?;
    let node = bed.node(1);
    let web = Member::on(node, "web", "--label app=web")?;
    let friend = Member::on(node, "friend", "--label role=friend")?;
    let other = Member::on(node, "other", "--label role=other")?;
    let third = Member::on(node, "third", "--label role=third")?;
    import(node, folder.path(), FRIENDS_JSON)?;
    reaches(&third, &other, 8000)?;
    let said = node.cli("policy mode always")?.success()?;
    assert_eq!(said, "mode always, set by `policy mode`\n");
    is_kept_from(&third, &other, 8000, node)?;
    reaches(&friend, &web, 8000)?;

    restart(node, "--policy-mode never", web.endpoint.id)?;
    is_kept_from(&third, &other, 8000, node)?;
    reaches(&friend, &web, 8000)?;
    let said = node.cli("policy mode")?.success()?;
    assert_eq!(said, "mode always, set by `policy mode`\n");
    let said = node.cli("policy mode settings")?.success()?;
    assert_eq!(said, "mode never, as the settings say\n");
    reaches(&third, &other, 8000)?;
    reaches(&third, &web, 8000)
}

#[test]
#[ignore = "needs root"]
fn nothing_that_both_modes_allow_is_lost_while_the_mode_changes() -> anyhow::Result<()> {
    const ROUNDS: usize = 3;
    let (bed, folder) = bed(1)?;
    let node = bed.node(1);
    let web = Member::on(node, "web", "--label app=web")?;
    let friend = Member::on(node, "friend", "--label role=friend")?;
    let other = Member::on(node, "other", "--label role=other")?;
    let third = Member::on(node, "third", "--label role=third")?;
    import(node, folder.path(), FRIENDS_JSON)?;
    reaches(&friend, &web, 8000)?;
    let targets = web.addresses();
    let pinging: Vec<_> = targets
        .iter()
        .map(|address| Pinging::start(&friend.name, *address, Pace::DENSE))
        .collect();
    for _ in 0..ROUNDS {
        node.cli("policy mode always")?.success()?;
        is_kept_from(&third, &other, 8000, node)?;
        node.cli("policy mode default")?.success()?;
        reaches(&third, &other, 8000)?;
        is_kept_from(&third, &web, 8000, node)?;
        node.cli("policy mode never")?.success()?;
        reaches(&third, &web, 8000)?;
    }
    for (target, pinging) in targets.iter().zip(pinging) {
        let summary = pinging.end()?;
        assert!(summary.transmitted > 0, "{target}: {summary:?}");
        assert_eq!(summary.lost(), 0, "{target}: {summary:?}");
    }
    Ok(())
}

/// Number of conntrack entries that an endpoint's packets have created.
fn entries_of(node: &Node, member: &Member) -> anyhow::Result<usize> {
    let listed = node.listing("bpf ct list")?;
    let entries = listed.as_array().context("the entries are no list")?;
    let is_its = |entry: &&serde_json::Value| entry["ifindex"] == member.endpoint.ifindex;
    Ok(entries.iter().filter(is_its).count())
}

#[test]
#[ignore = "needs root"]
fn without_conntrack_each_direction_is_judged_by_itself_and_leaves_no_entries() -> anyhow::Result<()>
{
    const ANSWERS_JSON: &str = r#"[{"labels": ["name=answers"],
        "endpointSelector": {"matchLabels": {"app": "web"}},
        "egress": [{"toEndpoints": [{"matchLabels": {"role": "friend"}}]}]}]"#;
    let (bed, folder) = bed(1)?;
    let node = bed.node(1);
    let web = Member::on(node, "web", "--label app=web")?;
    let friend = Member::on(node, "friend", "--label role=friend")?;
    import(node, folder.path(), FRIENDS_JSON)?;
    node.cli("policy mode always")?.success()?;
    let talk = |port: u16| -> anyhow::Result<Vec<Talk>> {
        let ends = friend.addresses().into_iter().zip(web.addresses());
        ends.map(|(from, to)| Talk::between(&friend, &web, to, SocketAddr::new(from, port)))
            .collect()
    };
    let talks = talk(5000)?;
    assert!(entries_of(node, &web)? > 0);

    let id = web.endpoint.id;
    let said = node.cli(&format!("endpoint config {id} conntrack=off"))?;
    assert_eq!(
        said.success()?,
        "enforcement=default\nconntrack=off\ndebug=off\n"
    );
    let log = node.cli(&format!("endpoint log {id}"))?.success()?;
    assert!(log.contains("settings changed: conntrack=off"), "{log}");
    let is_judged_by_packet = || -> anyhow::Result<()> {
        node.cli("bpf ct flush global")?.success()?;
        reaches(&friend, &web, 8000)?;
        for talk in &talks {
            talk.is_over(&talk.client, node)
                .with_context(|| talk.client_at.to_string())?;
        }
        assert_eq!(entries_of(node, &web)?, 0);
        assert!(entries_of(node, &friend)? > 0);
        Ok(())
    };
    is_judged_by_packet()?;
    restart(node, "", id)?;
    let shown = node.listing(&format!("endpoint get {id}"))?;
    assert_eq!(shown["settings"]["conntrack"], false);
    is_judged_by_packet()?;
    drop(talks);

    import(node, folder.path(), ANSWERS_JSON)?;
    drop(talk(5001)?);
    assert_eq!(entries_of(node, &web)?, 0);
    node.cli(&format!("endpoint config {id} conntrack=on"))?
        .success()?;
    drop(talk(5002)?);
    assert!(entries_of(node, &web)? > 0);
    Ok(())
}
