//! The CNI plugin: its replies to runtimes, and real podman containers.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::bed::agent_binary;
use tests::namespace::Namespace;
use tests::plugin::{Answer, NOT_AVAILABLE, Plugin, TRY_AGAIN_LATER};
use tests::podman::Podman;
use tests::process::run;
use tests::{Bed, Node, PATIENCE, Snapshot, is_long, wait_for};

struct Stand {
    // Fields are dropped in this order.
    namespace: Namespace,
    plugin: Plugin,
    _folder: TempDir,
    bed: Bed,
}

impl Stand {
    fn new() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(2).ipv6(true).start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let folder = tempfile::tempdir()?;
        Ok(Self {
            namespace: Namespace::new("hcni1")?,
            plugin: Plugin::of(bed.node(1), folder.path())?,
            _folder: folder,
            bed,
        })
    }

    fn call(&self, command: &str) -> anyhow::Result<Answer> {
        self.plugin.call(command, "c1", &self.namespace.path())
    }

    fn check_after(&self, added: &Answer) -> anyhow::Result<Answer> {
        self.plugin.with("prevResult", added.json.clone()).call(
            "CHECK",
            "c1",
            &self.namespace.path(),
        )
    }
}

/// The live endpoints.
fn living(node: &Node) -> anyhow::Result<Vec<Value>> {
    let listed = node.listing("endpoint list")?;
    let listed = listed.as_array().context("the list is no array")?;
    let living = listed.iter().filter(|one| one["state"] != "disconnected");
    Ok(living.cloned().collect())
}

fn endpoints(node: &Node) -> anyhow::Result<usize> {
    living(node).map(|living| living.len())
}

#[test]
#[ignore = "needs root"]
fn a_container_is_added_checked_and_deleted() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let node = stand.bed.node(1);
    let before = Snapshot::node(node)?;

    let added = stand.call("ADD")?;
    assert!(added.is_success, "{}", added.json);
    assert_eq!(added.json["cniVersion"], "1.1.0");
    assert_eq!(added.json["interfaces"][1]["name"], "eth0");
    assert_eq!(
        added.json["interfaces"][1]["sandbox"],
        stand.namespace.path()
    );
    let addresses: Vec<&str> = added.json["ips"]
        .as_array()
        .context("no addresses")?
        .iter()
        .filter_map(|ip| ip["address"].as_str())
        .collect();
    assert_eq!(addresses.len(), 2, "{}", added.json);
    for address in &addresses {
        let (address, _) = address.split_once('/').context("no prefix length")?;
        stand
            .bed
            .node(2)
            .exec(&format!("ping -n -q -c 1 -W 2 {address}"))?;
        let other = match address.contains(':') {
            true => stand.bed.node(2).ipv6().context("no IPv6")?.to_string(),
            false => stand.bed.node(2).ipv4().to_string(),
        };
        stand
            .namespace
            .command(&format!("ping -n -q -c 1 -W 2 {other}"))?;
    }
    assert!(stand.check_after(&added)?.is_success);

    let twice = stand.call("ADD")?;
    assert!(!twice.is_success);
    assert!(twice.code() >= 100, "{}", twice.json);
    assert!(
        stand.check_after(&added)?.is_success,
        "the first one stands"
    );

    assert!(stand.call("DEL")?.is_success);
    before.wait_nothing_left(node)?;
    assert_eq!(
        stand.namespace.command("ip -o link show")?.lines().count(),
        1
    );
    assert!(stand.call("DEL")?.is_success, "nothing is left to delete");
    let nowhere = stand.plugin.call("DEL", "c1", "/run/netns/hcni-gone")?;
    assert!(nowhere.is_success, "{}", nowhere.json);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn damage_is_found_by_check() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let added = stand.call("ADD")?;
    let address = added.json["ips"][0]["address"]
        .as_str()
        .context("no address")?
        .to_owned();
    let mac = added.json["interfaces"][1]["mac"]
        .as_str()
        .context("no mac")?;
    let gateway = added.json["ips"][0]["gateway"]
        .as_str()
        .context("no gateway")?;
    let words = |words: &str| {
        let words = words.replace("ADDRESS", &address).replace("MAC", mac);
        words.replace("GATEWAY", gateway)
    };
    for (damage, mended, word) in [
        (
            "ip route del default via GATEWAY",
            "ip route add default via GATEWAY",
            "lost the route to 0.0.0.0/0",
        ),
        ("ip addr del ADDRESS dev eth0", "", "lost address"),
        // Removing the last IPv4 address also removed its routes.
        (
            "ip addr add ADDRESS dev eth0",
            "ip route add GATEWAY dev eth0\nip route add default via GATEWAY",
            "lost the route to 0.0.0.0/0",
        ),
        (
            "ip link set eth0 address 02:00:00:00:00:07",
            "ip link set eth0 address MAC",
            "02:00:00:00:00:07",
        ),
        // This also removes the IPv6 addresses, so it comes last.
        ("ip link set eth0 down", "", "down"),
    ] {
        stand.namespace.command(&words(damage))?;
        let checked = stand.check_after(&added)?;
        assert!(!checked.is_success, "{damage}");
        assert!(checked.message().contains(word), "{}", checked.json);
        if !mended.is_empty() {
            for mended in words(mended).lines() {
                stand.namespace.command(mended)?;
            }
            let checked = stand.check_after(&added)?;
            assert!(checked.is_success, "{mended}: {}", checked.json);
        }
    }
    stand.namespace.command("ip link del eth0")?;
    assert!(!stand.check_after(&added)?.is_success);
    let unknown = stand.plugin.with("prevResult", added.json.clone()).call(
        "CHECK",
        "c2",
        &stand.namespace.path(),
    )?;
    assert!(unknown.message().contains("c2"), "{}", unknown.json);
    assert!(stand.call("DEL")?.is_success, "also what is damaged goes");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn errors_have_the_codes_of_the_specification() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let netns = stand.namespace.path();
    let Stand { plugin, .. } = &stand;
    let add = |changed: &[(&'static str, &'static str)]| {
        let mut environment = vec![
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", netns.as_str()),
            ("CNI_IFNAME", "eth0"),
        ];
        environment.retain(|(key, _)| !changed.iter().any(|(other, _)| other == key));
        environment.extend(changed);
        plugin.call_with(&environment)
    };
    for (environment, code) in [
        (("CNI_COMMAND", "UPDATE"), 4),
        (("CNI_COMMAND", ""), 4),
        (("CNI_CONTAINERID", ""), 4),
        (("CNI_CONTAINERID", "../c1"), 4),
        (("CNI_IFNAME", "a/b"), 4),
        (("CNI_NETNS", ""), 4),
        (("CNI_NETNS", "netns"), 4),
        (("CNI_NETNS", "/run/netns/hcni-gone"), 4),
        (("CNI_NETNS", "/etc/hostname"), 4),
        (("CNI_ARGS", "NOBODY=knows"), 4),
        (("CNI_ARGS", "IP=192.0.2.1"), 4),
    ] {
        let answer = add(&[environment])?;
        assert!(!answer.is_success, "{environment:?}");
        assert_eq!(answer.code(), code, "{environment:?}: {}", answer.json);
        assert!(answer.json["cniVersion"].is_string(), "{}", answer.json);
    }
    for (key, value, code) in [
        ("cniVersion", json!("9.9.9"), 1),
        ("cniVersion", json!("0.2.0"), 1),
        ("ipam", json!({"type": "host-local"}), 2),
        ("bridge", json!("cni0"), 2),
        ("name", json!("../x"), 7),
        ("labels", json!({"": "x"}), 7),
        ("prevResult", json!({}), 7),
    ] {
        let answer = plugin.with(key, value.clone()).call("ADD", "c1", &netns)?;
        assert_eq!(answer.code(), code, "{key} {value}: {}", answer.json);
    }
    let environment = [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c1")];
    assert_eq!(plugin.call_raw(&environment, b"{\"name\":")?.code(), 6);
    assert_eq!(plugin.call_raw(&environment, b"")?.code(), 6);
    assert_eq!(
        endpoints(stand.bed.node(1))?,
        1,
        "nothing was made besides the health endpoint"
    );
    let version = plugin.call_raw(&[("CNI_COMMAND", "VERSION")], br#"{"cniVersion":"0.4.0"}"#)?;
    assert_eq!(
        version.json,
        json!({"cniVersion": "0.4.0", "supportedVersions": ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]})
    );
    let old = plugin.with("cniVersion", json!("0.4.0"));
    let added = old.call("ADD", "c1", &netns)?;
    assert_eq!(added.json["ips"][0]["version"], "4", "{}", added.json);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn without_an_agent_runtimes_are_asked_to_try_again() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let node = stand.bed.node(1);
    assert!(stand.call("STATUS")?.is_success);
    let added = stand.call("ADD")?;
    assert!(added.is_success, "{}", added.json);
    node.kill_agent(Signal::SIGKILL)?;
    assert_eq!(stand.call("ADD")?.code(), TRY_AGAIN_LATER);
    assert_eq!(stand.check_after(&added)?.code(), TRY_AGAIN_LATER);
    let status = stand.call("STATUS")?;
    assert_eq!(status.code(), NOT_AVAILABLE, "{}", status.json);
    // Traffic continues in the meantime.
    let peer = stand.bed.node(2).ipv4();
    stand
        .namespace
        .command(&format!("ping -n -q -c 1 -W 2 {peer}"))?;
    node.start_agent()?;
    wait_for("STATUS to be good again", PATIENCE, || {
        Ok(stand.call("STATUS")?.is_success.then_some(()))
    })?;
    assert!(stand.check_after(&added)?.is_success);
    assert!(stand.call("DEL")?.is_success);
    Ok(())
}

/// Whether the container reaches the other node over both IP versions.
fn reaches_out(stand: &Stand) -> anyhow::Result<()> {
    let peer = stand.bed.node(2);
    for address in peer.addresses() {
        let ping = format!("ping -n -q -c 1 -W 2 {address}");
        stand.namespace.command(&ping)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_second_device_of_a_container_takes_no_routes_of_the_first() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let node = stand.bed.node(1);
    let netns = stand.namespace.path();
    let first = stand.call("ADD")?;
    assert!(first.is_success, "{}", first.json);
    let routes = || -> anyhow::Result<String> {
        let of = |family: &str| {
            stand
                .namespace
                .command(&format!("ip {family} route show default"))
        };
        Ok(of("-4")? + &of("-6")?)
    };
    let before = routes()?;
    let asked = stand.plugin.with("defaultRoute", json!(true));
    let refused = asked.call_for("ADD", "c1", "net1", &netns)?;
    assert_eq!(refused.code(), 101, "{}", refused.json);
    assert!(refused.message().contains("eth0"), "{}", refused.json);

    let second = stand.plugin.call_for("ADD", "c1", "net1", &netns)?;
    assert!(second.is_success, "{}", second.json);
    assert_eq!(second.json["routes"], json!([]), "{}", second.json);
    assert_eq!(second.json["ips"][0]["gateway"], Value::Null);
    assert_eq!(routes()?, before);
    reaches_out(&stand)?;
    assert!(stand.check_after(&first)?.is_success);
    let reported = stand.plugin.with("prevResult", second.json.clone());
    let checked = reported.call_for("CHECK", "c1", "net1", &netns)?;
    assert!(checked.is_success, "{}", checked.json);
    let deleted = stand.plugin.call_for("DEL", "c1", "net1", &netns)?;
    assert!(deleted.is_success, "{}", deleted.json);
    assert_eq!(routes()?, before);
    reaches_out(&stand)?;
    assert!(stand.check_after(&first)?.is_success);
    assert_eq!(endpoints(node)?, 2);

    // If the first interface asks for no default route, the second one gets it.
    assert!(stand.call("DEL")?.is_success);
    let none = stand.plugin.with("defaultRoute", json!(false));
    assert!(none.call("ADD", "c1", &netns)?.is_success);
    assert_eq!(routes()?, "");
    assert!(
        stand
            .plugin
            .call_for("ADD", "c1", "net1", &netns)?
            .is_success
    );
    assert!(routes()?.contains("dev net1"), "{}", routes()?);
    reaches_out(&stand)
}

#[test]
#[ignore = "needs root"]
fn what_later_plugins_of_a_chain_added_is_none_of_its_own_to_check() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let added = stand.call("ADD")?;
    assert!(added.is_success, "{}", added.json);
    for words in [
        "ip link add later1 type veth peer name later2",
        "ip addr add 192.0.2.9/24 dev later1",
        "ip link set later1 up",
        "ip addr add 198.51.100.9/32 dev eth0",
    ] {
        stand.namespace.command(words)?;
    }
    let mut chained = added.clone();
    let push = |list: &mut Value, one: Value| -> anyhow::Result<()> {
        list.as_array_mut().context("no list")?.push(one);
        Ok(())
    };
    let sandbox = stand.namespace.path();
    let device = json!({"name": "later1", "mac": "02:00:00:00:00:09", "sandbox": sandbox});
    push(&mut chained.json["interfaces"], device)?;
    for (address, interface) in [("192.0.2.9/24", 2), ("198.51.100.9/32", 1)] {
        push(
            &mut chained.json["ips"],
            json!({"address": address, "interface": interface}),
        )?;
    }
    let gateway = added.json["ips"][0]["gateway"].clone();
    let routes = [
        json!({"dst": "203.0.113.0/24"}),
        json!({"dst": "203.0.113.0/25", "gw": gateway}),
    ];
    for route in routes {
        push(&mut chained.json["routes"], route)?;
    }
    let checked = stand.check_after(&chained)?;
    assert!(checked.is_success, "{}", checked.json);
    // The container's own addresses are still checked.
    let own = added.json["ips"][0]["address"]
        .as_str()
        .context("no address")?;
    stand
        .namespace
        .command(&format!("ip addr del {own} dev eth0"))?;
    assert_eq!(stand.check_after(&chained)?.code(), 102);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_deletion_waits_for_no_agent_and_is_carried_out_by_the_next() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let node = stand.bed.node(1);
    let namespaces = ["hcni2", "hcni3", "hcni4"].map(Namespace::new);
    let [second, third, fourth] = namespaces;
    let (second, third, fourth) = (second?, third?, fourth?);
    assert!(stand.call("ADD")?.is_success);
    for (name, namespace) in [("c2", &second), ("c3", &third), ("c4", &fourth)] {
        assert!(
            stand
                .plugin
                .call("ADD", name, &namespace.path())?
                .is_success
        );
    }
    node.kill_agent(Signal::SIGKILL)?;
    // DEL is called twice, as runtimes do, and with a configuration that ADD would no longer accept.
    for _ in 0..2 {
        let deleted = stand.call("DEL")?;
        assert!(deleted.is_success, "{}", deleted.json);
    }
    let changed = stand
        .plugin
        .with("cniVersion", json!("9.9.9"))
        .with("ipam", json!({"type": "host-local"}))
        .with("capabilities", json!({"portMappings": true}));
    let deleted = changed.call("DEL", "c2", "/run/netns/hcni-gone")?;
    assert!(deleted.is_success, "{}", deleted.json);
    // Without the recorded deletion, the agent would doubt that so many devices are missing at once.
    drop(second);
    stand.namespace.command("ip link delete eth0")?;
    node.start_agent()?;
    wait_for("STATUS to be good again", PATIENCE, || {
        Ok(stand.call("STATUS")?.is_success.then_some(()))
    })?;
    let containers = |node: &Node| -> anyhow::Result<Vec<String>> {
        let mut found: Vec<String> = living(node)?
            .iter()
            .filter_map(|one| one["container-id"].as_str().map(str::to_owned))
            .collect();
        found.sort();
        Ok(found)
    };
    assert_eq!(containers(node)?, ["c3", "c4"], "before it serves");

    // A deletion that is recorded while the agent is unresponsive must not remove a later endpoint.
    node.kill_agent(Signal::SIGKILL)?;
    assert!(stand.plugin.call("DEL", "c3", &third.path())?.is_success);
    node.start_agent()?;
    wait_for("the container to be added again", PATIENCE, || {
        let again = stand.plugin.call("ADD", "c3", &third.path())?;
        anyhow::ensure!(again.is_success, "{}", again.json);
        Ok(Some(()))
    })?;
    node.kill_agent(Signal::SIGKILL)?;
    node.start_agent()?;
    wait_for("STATUS to be good again", PATIENCE, || {
        Ok(stand.call("STATUS")?.is_success.then_some(()))
    })?;
    assert_eq!(containers(node)?, ["c3", "c4"]);
    let waiting = node.runtime_dir().join("deletions").read_dir()?;
    let waiting: Vec<_> = waiting
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".json"))
        .collect();
    assert_eq!(waiting, [""; 0]);
    Ok(())
}

/// While the agent is slow to start, the plugin reports that nothing is known yet, and never that there are no
/// endpoints.
#[test]
#[ignore = "needs root"]
fn while_the_agent_starts_nothing_is_said_of_endpoints() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let node = stand.bed.node(1);
    let added = stand.call("ADD")?;
    assert!(added.is_success, "{}", added.json);
    let mut early = 0;
    for _ in 0..5 {
        node.kill_agent(Signal::SIGKILL)?;
        node.start_agent()?;
        let mut is_known = false;
        while !is_known {
            let checked = stand.check_after(&added)?;
            let listed = node.cli("endpoint list -o json")?;
            match listed.code {
                Some(0) => {
                    anyhow::ensure!(listed.stdout.contains("c1"), "{}", listed.stdout);
                    is_known = true;
                }
                _ => early += 1,
            }
            anyhow::ensure!(
                [0, TRY_AGAIN_LATER].contains(&checked.code()),
                "{}",
                checked.json
            );
        }
        wait_for("the endpoint to be as it was", PATIENCE, || {
            Ok(stand.check_after(&added)?.is_success.then_some(()))
        })?;
    }
    anyhow::ensure!(early > 0, "each start was over before anybody asked");
    let known = json!([{"containerID": "c1", "ifname": "eth0"}]);
    let reported = stand.plugin.with("cni.dev/valid-attachments", known);
    assert!(reported.call_with(&[("CNI_COMMAND", "GC")])?.is_success);
    assert_eq!(endpoints(node)?, 2);
    Ok(())
}

/// Passes a path with a symlink that the agent's container may lack, as containerd does.
#[test]
#[ignore = "needs root"]
fn links_on_the_way_to_the_namespace_are_followed_where_the_runtime_is() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let folder = tempfile::tempdir()?;
    let link = folder.path().join("var");
    std::os::unix::fs::symlink("/run", &link)?;
    let path = link.join("netns/hcni1").display().to_string();
    let added = stand.plugin.call("ADD", "c1", &path)?;
    assert!(added.is_success, "{}", added.json);
    assert_eq!(added.json["interfaces"][1]["sandbox"], path);
    let listed = living(stand.bed.node(1))?;
    let found = listed.iter().find(|one| one["container-id"] == "c1");
    assert_eq!(
        found.context("no endpoint")?["netns"],
        stand.namespace.path()
    );
    let reported = stand.plugin.with("prevResult", added.json.clone());
    let checked = reported.call("CHECK", "c1", &path)?;
    assert!(checked.is_success, "{}", checked.json);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn gc_removes_what_the_runtime_does_not_know_of_its_own_network() -> anyhow::Result<()> {
    let stand = Stand::new()?;
    let node = stand.bed.node(1);
    let second = Namespace::new("hcni2")?;
    let third = Namespace::new("hcni3")?;
    assert!(stand.call("ADD")?.is_success);
    assert!(stand.plugin.call("ADD", "c2", &second.path())?.is_success);
    let other = stand.plugin.with("name", json!("other"));
    assert!(other.call("ADD", "c3", &third.path())?.is_success);
    let unreported = stand.plugin.call_with(&[("CNI_COMMAND", "GC")])?;
    assert_eq!(unreported.code(), 7, "{}", unreported.json);
    let known = json!([{"containerID": "c1", "ifname": "eth0"}]);
    let reported = stand.plugin.with("cni.dev/valid-attachments", known);
    let collected = reported.call_with(&[("CNI_COMMAND", "GC")])?;
    assert!(collected.is_success, "{}", collected.json);
    let listed = living(node)?;
    let containers: Vec<&str> = listed
        .iter()
        .filter_map(|endpoint| endpoint["container-id"].as_str())
        .collect();
    assert_eq!(containers.len(), 2, "{containers:?}");
    assert!(!containers.contains(&"c2"), "{containers:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn many_containers_of_podman_come_and_go() -> anyhow::Result<()> {
    let containers = if is_long() { 100 } else { 25 };
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let podman = Podman::of(node)?;
    let before = Snapshot::node(node)?;
    let names: Vec<String> = (0..containers).map(|i| format!("hcni-{i}")).collect();
    for name in &names {
        podman.start(name)?;
    }
    assert_eq!(endpoints(node)?, containers + 1);
    let listed = node.listing("endpoint list")?;
    let addresses: Vec<String> = listed
        .as_array()
        .context("no list")?
        .iter()
        .filter(|endpoint| endpoint["container-id"].is_string())
        .filter_map(|endpoint| endpoint["ipv4"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(addresses.len(), containers);
    for address in &addresses {
        bed.node(2)
            .exec(&format!("ping -n -q -c 1 -W 2 {address}"))
            .with_context(|| format!("{address} is not reached from the other node"))?;
    }
    let (first, last) = (&names[0], &addresses[containers - 1]);
    podman
        .exec(first, &["ping", "-c", "1", "-W", "2", last])?
        .success()
        .context("containers do not reach each other")?;
    podman.remove(&names)?;
    assert_eq!(endpoints(node)?, 1);
    before.wait_nothing_left(node)?;
    Ok(())
}

/// The calls of a traced command that change or sync names in folders, as `NAME PATH`, in order.
fn traced(words: &str, folder: &Path) -> anyhow::Result<Vec<String>> {
    let trace = folder.join("trace");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-y", "-e", "trace=fsync,rename,unlink,mkdir", "-o"]);
    strace.arg(&trace).arg(agent_binary()?);
    run(strace.args(words.split_whitespace()))?.success()?;
    let trace = fs::read_to_string(trace)?;
    let calls = trace.lines().filter(|line| line.ends_with(" = 0"));
    let calls = calls.filter_map(|line| {
        let (_, call) = line.split_once(' ')?;
        let (name, arguments) = call.trim().split_once('(')?;
        // The path of a file descriptor is in angle brackets; of a rename, the last path counts.
        let paths = arguments.split(['"', '<', '>']).skip(1).step_by(2);
        let path = paths.last()?.strip_prefix(folder.to_str()?)?;
        Some(format!("{name} {path}"))
    });
    Ok(calls.collect())
}

#[test]
#[ignore = "needs root"]
fn an_installation_and_its_removal_are_on_the_disk_when_they_are_reported() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let at = folder.path().display();
    let folders = format!("--bin-dir {at}/opt/bin --config-dir {at}/net.d");
    let installed = traced(&format!("cni install {folders}"), folder.path())?;
    assert_eq!(
        installed,
        [
            "mkdir /opt",
            "mkdir /opt/bin",
            "fsync ",
            "fsync /opt",
            "mkdir /net.d",
            "fsync ",
            "fsync /opt/bin/health-agent-cni.new",
            "rename /opt/bin/health-agent-cni",
            "fsync /opt/bin",
            "fsync /net.d/10-health-agent.conflist.new",
            "rename /net.d/10-health-agent.conflist",
            "fsync /net.d",
        ]
    );
    let removed = traced(&format!("cni uninstall {folders}"), folder.path())?;
    assert_eq!(
        removed,
        [
            "unlink /net.d/10-health-agent.conflist",
            "fsync /net.d",
            "unlink /opt/bin/health-agent-cni",
            "fsync /opt/bin",
        ]
    );
    Ok(())
}
