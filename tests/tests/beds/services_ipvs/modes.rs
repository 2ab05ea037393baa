//! Switching modes back and forth: existing connections stay, new clients are served, and nothing remains of the old
//! mode.

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use tests::served::Connection;
use tests::{Node, PATIENCE, wait_for};

use crate::services::load::Load;
use crate::services::{Mode, Stand, targets, wait_answered_by};

const ALL: [&str; 3] = ["web-1", "web-2", "web-3"];

/// Settings and objects of other programs, each with the command that shows it and the expected output.
const FOREIGN: [(&str, &str, &str); 4] = [
    (
        "ipvsadm --set 0 100 0",
        "ipvsadm -L --timeout",
        "Timeout (tcp tcpfin udp): 900 100 300",
    ),
    (
        "ipvsadm -A -t 192.0.2.1:9 -s wlc",
        "ipvsadm -Ln",
        "TCP  192.0.2.1:9 wlc",
    ),
    ("ipset create OTHERS hash:ip", "ipset list -n", "OTHERS"),
    (
        "nft add table ip others",
        "nft list tables",
        "table ip others",
    ),
];

/// Connections to all addresses of a service that are used from time to time, each with the name of its backend.
struct Established(Vec<(Connection, String)>);

impl Established {
    fn open(stand: &Stand, service: &tests::served::ServiceManifest) -> anyhow::Result<Self> {
        let [client, _] = &stand.clients;
        let mut all = Vec::new();
        for target in targets(service) {
            let mut connection = Connection::open(&client.name, target)?;
            let backend = connection.ask()?.backend;
            all.push((connection, backend));
        }
        Ok(Self(all))
    }

    fn go_on(&mut self, when: &str) -> anyhow::Result<()> {
        for (connection, backend) in &mut self.0 {
            let answer = connection.ask().with_context(|| when.to_owned())?;
            ensure!(
                answer.backend == *backend,
                "{when}: {answer:?}, before by {backend}"
            );
        }
        Ok(())
    }

    /// Closes the connections at once on both sides.
    fn reset(self) -> anyhow::Result<()> {
        for (connection, _) in self.0 {
            let socket = socket2::SockRef::from(connection.stream());
            socket.set_linger(Some(std::time::Duration::ZERO))?;
        }
        Ok(())
    }
}

/// Number of frontends in the programs' maps.
fn frontends(node: &Node) -> anyhow::Result<usize> {
    let listed = node.listing("bpf lb list")?;
    Ok(listed.as_array().context("no list of frontends")?.len())
}

fn has_ipvs(node: &Node) -> anyhow::Result<bool> {
    let devices = node.exec("ip -br link")?;
    Ok(devices.contains("health-ipvs0"))
}

/// Waits until this mode serves. For IPVS, the maps must also be empty.
fn wait_served_by(node: &Node, mode: Mode) -> anyhow::Result<()> {
    wait_for("the other mode to take over", PATIENCE, || {
        let (frontends, has_ipvs) = (frontends(node)?, has_ipvs(node)?);
        let is_so = match mode {
            Mode::Ebpf => frontends > 0,
            Mode::Ipvs => frontends == 0 && has_ipvs,
        };
        ensure!(is_so, "{frontends} frontends, IPVS: {has_ipvs}");
        Ok(Some(()))
    })
}

fn change(node: &Node, mode: Mode, signal: Signal) -> anyhow::Result<()> {
    node.kill_agent(signal)?;
    node.take_over_with(mode.flags())?;
    wait_served_by(node, mode).with_context(|| format!("to {mode:?}"))
}

#[test]
#[ignore = "needs root"]
fn connections_outlive_changes_of_the_mode_and_nothing_is_left() -> anyhow::Result<()> {
    let stand = Stand::start_with(Mode::Ebpf, ["", ""], "")?;
    let service = stand.service("busy", 1);
    stand.write(&service)?;
    let [client, other] = &stand.clients;
    for target in targets(&service) {
        for client in &stand.clients {
            wait_answered_by(&client.name, target, &ALL)?;
        }
    }
    let node = stand.node_of(client);
    for (make, _, _) in FOREIGN {
        node.exec(make)?;
    }
    let mut by_ebpf = Established::open(&stand, &service)?;
    let load = Load::default();
    let user = (
        Load::connect as _,
        client.name.as_str(),
        targets(&service)[0],
    );
    let by_ipvs = load.during(&[user], || {
        change(node, Mode::Ipvs, Signal::SIGTERM)?;
        by_ebpf.go_on("from ebpf to ipvs")?;
        let mut by_ipvs = Established::open(&stand, &service)?;
        load.goes_on("from ebpf to ipvs".to_owned())?;
        change(node, Mode::Ebpf, Signal::SIGKILL)?;
        by_ipvs.go_on("from ipvs to ebpf")?;
        load.goes_on("from ipvs to ebpf".to_owned())?;
        // The next agent also finds the leftovers of IPVS.
        node.kill_agent(Signal::SIGKILL)?;
        node.take_over_with(Mode::Ebpf.flags())?;
        load.goes_on("killed and back".to_owned())?;
        by_ebpf.go_on("and back")?;
        by_ipvs.go_on("after another start")?;
        ensure!(has_ipvs(node)?, "IPVS is gone, and its connections are not");
        Ok(by_ipvs)
    })?;
    by_ipvs.reset()?;
    wait_for("nothing to be left of IPVS", PATIENCE, || {
        let is_listed = node
            .exec("ipvsadm -Ln")?
            .contains(&targets(&service)[0].to_string());
        let sets = node.exec("ipset list -n")?;
        let tables = node.exec("nft list tables")?;
        let left = has_ipvs(node)?
            || is_listed
            || sets.contains("HEALTH-")
            || tables.contains("health-agent");
        ensure!(!left, "{sets}{tables}");
        Ok(Some(()))
    })?;
    by_ebpf.go_on("at last")?;
    for (_, list, made) in FOREIGN {
        let listed = node.exec(list)?;
        ensure!(listed.contains(made), "{made}: {listed}");
    }

    // Leftovers of one mode can be removed separately, but only while no agent runs.
    change(node, Mode::Ipvs, Signal::SIGTERM)?;
    let refused = node.cli("cleanup --services all")?;
    assert_eq!(refused.code, Some(1));
    node.kill_agent(Signal::SIGKILL)?;
    let nothing = node.cli("cleanup --services ebpf")?.success()?;
    assert_eq!(nothing, "nothing to remove\n");
    wait_answered_by(&client.name, targets(&service)[0], &ALL)?;
    let removed = node.cli("cleanup --services ipvs")?.success()?;
    for what in [
        "IPv4 table health-agent-services",
        "virtual servers (",
        "sets HEALTH-* (42)",
        "device health-ipvs0",
    ] {
        ensure!(removed.contains(&format!("removed {what}")), "{removed}");
    }
    assert_eq!(node.cli("cleanup --services all")?.success()?, nothing);
    for (_, list, made) in FOREIGN {
        let listed = node.exec(list)?;
        ensure!(listed.contains(made), "{made}: {listed}");
    }
    // The other node's services must not be affected.
    wait_answered_by(&other.name, targets(&service)[0], &ALL)?;
    Ok(())
}
