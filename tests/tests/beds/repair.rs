//! The agent reports and repairs damage to a health endpoint, and logs the cause. `cargo xtask bench damage` measures
//! how fast.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_common::identity;
use health_endpoint::log::{LogEntry, Status};
use health_model::api::{Endpoint, EndpointHealth, HealthState};
use nix::sys::signal::{Signal, kill};
use tests::attached;
use tests::liveness::liveness;
use tests::process::run_with_input;
use tests::{Bed, Node, PATIENCE, wait_for};

/// Time limit for a repair: ten times the promised 2 s, for busy machines.
const REPAIR: Duration = Duration::from_secs(20);

/// Two nodes, of which tests damage the first.
struct RepairBed {
    bed: Bed,
    endpoint: IpAddr,
    pins: Vec<PathBuf>,
}

impl RepairBed {
    fn start() -> anyhow::Result<Self> {
        Self::of(Bed::builder().nodes(2).start()?)
    }

    fn of(bed: Bed) -> anyhow::Result<Self> {
        bed.wait_all_reachable(PATIENCE)?;
        let endpoint = bed.node(1).health_ipv4()?;
        let pins = files(&bed.node(1).pins())?;
        Ok(Self {
            bed,
            endpoint,
            pins,
        })
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// Checks that all pins exist, that all programs are attached, and that the endpoint answers another node over ICMP
    /// and HTTP. The programs must answer the echo.
    fn is_healthy(&self) -> anyhow::Result<()> {
        ensure!(files(&self.node().pins())? == self.pins, "pins are missing");
        let attached = attachments(self.node())?;
        for hook in [
            "lxc_health/ingress",
            "lxc_health/egress",
            "eth0/ingress",
            "eth0/egress",
        ] {
            ensure!(attached.iter().any(|at| at == hook), "nothing at {hook}");
        }
        let answered = echoes_answered(self.node())?;
        ensure!(self.bed.node(2).pings(self.endpoint)?, "no echo");
        ensure!(
            echoes_answered(self.node())? > answered,
            "the echo was not answered in the kernel"
        );
        ensure!(self.bed.node(2).hello(self.endpoint)? == 200, "no hello");
        Ok(())
    }

    /// Damages something, and waits for the repair and for a line in the log with `cause`.
    fn breaks(
        &self,
        cause: &str,
        fault: impl FnOnce(&Node) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.is_healthy().context("before the fault")?;
        let reported = self.node().logged(&[cause])?.len();
        fault(self.node()).context("making the fault")?;
        wait_for(&format!("the repair of: {cause}"), REPAIR, || {
            // Checks the log first, since some faults do not affect traffic at once.
            ensure!(
                self.node().logged(&[cause])?.len() > reported,
                "nothing in the log"
            );
            self.is_healthy().map(Some)
        })
        .with_context(|| format!("log: {}", self.node().log().unwrap_or_default()))
    }
}

fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?
    {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Places where programs are attached, from `bpf prog list`.
fn attachments(node: &Node) -> anyhow::Result<Vec<String>> {
    let programs = node.listing("bpf prog list")?;
    let programs = programs.as_array().context("not a list")?;
    Ok(programs
        .iter()
        .flat_map(|program| program["attached"].as_array().into_iter().flatten())
        .filter_map(|at| at.as_str().map(str::to_owned))
        .collect())
}

fn echoes_answered(node: &Node) -> anyhow::Result<u64> {
    let metrics = node.listing("bpf metrics list")?;
    let rows = metrics.as_array().context("not a list")?;
    Ok(rows
        .iter()
        .filter(|row| row["reason"] == "Echo answered")
        .filter_map(|row| row["packets"].as_u64())
        .sum())
}

/// The pin of the link with this name.
fn link_pin(node: &Node, name: &str) -> anyhow::Result<PathBuf> {
    files(&node.pins())?
        .into_iter()
        .find(|path| path.ends_with(name))
        .with_context(|| format!("no pin {name}"))
}

#[test]
#[ignore = "needs root"]
fn a_deleted_veth() -> anyhow::Result<()> {
    RepairBed::start()?.breaks("lxc_health was gone", |node| {
        node.exec("ip link delete lxc_health").map(drop)
    })
}

#[test]
#[ignore = "needs root"]
fn a_veth_set_down() -> anyhow::Result<()> {
    let broken = RepairBed::start()?;
    broken.breaks("lxc_health was down", |node| {
        node.exec("ip link set lxc_health down").map(drop)
    })?;
    broken.breaks("health0 was down", |node| {
        node.exec(&format!(
            "ip netns exec health-{} ip link set health0 down",
            node.name()
        ))
        .map(drop)
    })
}

#[test]
#[ignore = "needs root"]
fn a_removed_namespace() -> anyhow::Result<()> {
    RepairBed::start()?.breaks("was gone", |node| {
        node.exec(&format!("ip netns delete health-{}", node.name()))
            .map(drop)
    })
}

#[test]
#[ignore = "needs root"]
fn a_detached_link() -> anyhow::Result<()> {
    let broken = RepairBed::start()?;
    for (program, device) in [("to_endpoint", "lxc_health"), ("from_netdev", "eth0")] {
        broken.breaks(&format!("{program} at"), |node| {
            let pin = link_pin(node, &format!("{program}_{device}"))?;
            node.exec(&format!("bpftool link detach pinned {}", pin.display()))
                .map(drop)
        })?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_removed_pin_of_a_link() -> anyhow::Result<()> {
    RepairBed::start()?.breaks("the pinned link of program to_endpoint", |node| {
        fs::remove_file(link_pin(node, "to_endpoint_lxc_health")?).context("cannot remove a pin")
    })
}

#[test]
#[ignore = "needs root"]
fn removed_pins() -> anyhow::Result<()> {
    let broken = RepairBed::start()?;
    broken.breaks("the pin of HEALTH_CT4 was removed", |node| {
        fs::remove_file(link_pin(node, "HEALTH_CT4")?).context("cannot remove a pin")
    })?;
    broken.breaks("was removed", |node| {
        for pin in files(&node.pins())? {
            fs::remove_file(pin).context("cannot remove a pin")?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn changed_settings() -> anyhow::Result<()> {
    let broken = RepairBed::start()?;
    broken.breaks("rp_filter", |node| {
        let setting = "/proc/sys/net/ipv4/conf/lxc_health/rp_filter";
        node.run_in(|| fs::write(setting, "1"))?
            .with_context(|| format!("cannot write {setting}"))
    })?;
    broken.breaks("route", |node| {
        node.exec(&format!("ip route delete {}", node.health_ipv4()?))
            .map(drop)
    })
}

#[test]
#[ignore = "needs root"]
fn the_removed_folder_of_links() -> anyhow::Result<()> {
    RepairBed::start()?.breaks("the pinned link of program to_endpoint", |node| {
        fs::remove_dir_all(node.pins().join("links")).context("cannot remove the folder")
    })
}

#[test]
#[ignore = "needs root"]
fn all_pins_with_the_veth() -> anyhow::Result<()> {
    RepairBed::start()?.breaks("lxc_health was gone", |node| {
        fs::remove_dir_all(node.pins()).context("cannot remove the folder")?;
        node.exec("ip link delete lxc_health").map(drop)
    })
}

/// What the agent reports about the health endpoint: in the list of endpoints, in its health, and in its log.
#[derive(Debug)]
struct HealthReports {
    endpoint: Endpoint,
    health: EndpointHealth,
    log: Vec<LogEntry>,
}

impl HealthReports {
    fn by(node: &Node) -> anyhow::Result<Self> {
        let all: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
        let endpoint = all.into_iter().find(|one| one.identity == identity::HEALTH);
        let endpoint = endpoint.context("no health endpoint")?;
        let of_it = |what: &str| node.listing(&format!("endpoint {what} {}", endpoint.id));
        Ok(Self {
            health: serde_json::from_value(of_it("health")?)?,
            log: serde_json::from_value(of_it("log")?)?,
            endpoint,
        })
    }

    /// Number of failures in the log.
    fn failures(&self) -> usize {
        let lines = self.log.iter();
        lines.filter(|line| line.status == Status::Failure).count()
    }

    /// Checks that the endpoint is healthy, and that the last log entry names the earlier fault.
    fn is_well_again(&self, words: &str) -> anyhow::Result<()> {
        let last = self.log.last().context("no log")?;
        let is_well = self.endpoint.state == "ready"
            && self.health.overall_health == HealthState::Ok
            && self.health.bpf == HealthState::Ok
            && self.health.connected;
        ensure!(is_well && last.message.contains(words), "{self:?}");
        Ok(())
    }

    /// Checks that the endpoint is reported as broken for the given reason.
    fn is_broken(&self, words: &str) -> anyhow::Result<()> {
        let failure = self.log.iter().rfind(|line| line.status == Status::Failure);
        let is_broken = self.endpoint.state == "waiting-to-regenerate"
            && self.health.overall_health == HealthState::Failure
            && !self.health.connected;
        let is_reported = failure.is_some_and(|line| line.message.contains(words));
        ensure!(is_broken && is_reported, "{self:?}");
        Ok(())
    }
}

#[test]
#[ignore = "needs root"]
fn what_is_wrong_with_the_health_endpoint_is_reported_in_each_place() -> anyhow::Result<()> {
    let broken = RepairBed::start()?;
    let node = broken.node();
    let namespace = format!("health-{}", node.name());
    HealthReports::by(node)?.is_well_again("")?;
    // Damage that the agent repairs at once.
    for (words, harm) in [
        (
            "lxc_health was gone",
            "ip link delete lxc_health".to_owned(),
        ),
        (
            "health0 was down",
            format!("ip netns exec {namespace} ip link set health0 down"),
        ),
        (
            "dev lxc_health was missing",
            format!("ip route delete {}", node.health_ipv4()?),
        ),
        ("network namespace", format!("ip netns delete {namespace}")),
    ] {
        let failures = HealthReports::by(node)?.failures();
        let begun = Instant::now();
        node.exec(&harm)?;
        wait_for(&format!("the log of: {words}"), REPAIR, || {
            let reported = HealthReports::by(node)?;
            reported.is_well_again(words)?;
            // The failure must be reported before the repair.
            ensure!(reported.failures() > failures, "{reported:?}");
            Ok(Some(()))
        })?;
        println!("{harm}: reported after {:?}", begun.elapsed());
    }
    // The agent leaves devices that others created alone, and cannot repair the endpoint until these are gone.
    let agent = node.agent_pid()?;
    kill(agent, Signal::SIGSTOP)?;
    let harmed = ip(
        node,
        &[
            "link delete lxc_health",
            "link add lxc_health type veth peer name foreign0",
        ],
    );
    let begun = Instant::now();
    kill(agent, Signal::SIGCONT)?;
    harmed?;
    let words = "device lxc_health exists and is not this agent's";
    wait_for("all to report the foreign device", REPAIR, || {
        HealthReports::by(node)?.is_broken(words)?;
        let (code, liveness) = liveness(node)?;
        ensure!(
            code == 503 && liveness.failing == ["datapath"],
            "{liveness:?}"
        );
        Ok(Some(()))
    })?;
    println!("a foreign device: reported after {:?}", begun.elapsed());
    node.exec("ip link delete lxc_health")?;
    wait_for("all to be well again", REPAIR, || {
        HealthReports::by(node)?
            .is_well_again("regenerated")
            .map(Some)
    })?;
    broken.is_healthy()
}

/// A link stays with its device when the device is renamed, so the name does not identify the link's device.
#[test]
#[ignore = "needs root"]
fn an_uplink_whose_name_another_device_has_now() -> anyhow::Result<()> {
    let broken = RepairBed::start()?;
    let node = broken.node();
    node.kill_agent(Signal::SIGKILL)?;
    for command in [
        "ip link set eth0 down",
        "ip link set eth0 name up0",
        "ip link set up0 up",
        "ip link add eth0 type veth peer name peer0",
        "ip link set eth0 up",
        &format!("ip address add {}/32 dev eth0", node.ipv4()),
    ] {
        node.exec(command)?;
    }
    node.start_agent()?;
    wait_for("programs on both devices", REPAIR, || {
        ensure!(programs(node, "eth0")? == 2 && programs(node, "up0")? == 2);
        Ok(Some(()))
    })
}

/// Number of programs on a device.
fn programs(node: &Node, device: &str) -> anyhow::Result<usize> {
    Ok(attached::programs(node, device)?.iter().map(Vec::len).sum())
}

/// Runs `ip` commands.
fn ip(node: &Node, commands: &[&str]) -> anyhow::Result<()> {
    commands
        .iter()
        .try_for_each(|command| node.exec(&format!("ip {command}")).map(drop))
}

#[test]
#[ignore = "needs root"]
fn a_missing_uplink_keeps_nothing_else_from_repair() -> anyhow::Result<()> {
    let make = "link add name up1 type veth peer name peer1";
    let bed = Bed::builder()
        .nodes(2)
        .without_agents()
        .agent_args("--device eth0 --device up1")
        .start()?;
    for node in bed.nodes() {
        ip(node, &[make])?;
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    assert_eq!(programs(node, "up1")?, 2);
    ip(node, &["link delete up1"])?;
    wait_for("the missing uplink to be reported", REPAIR, || {
        Ok((!node.logged(&["uplink up1 does not exist"])?.is_empty()).then_some(()))
    })?;

    let broken = RepairBed::of(bed)?;
    broken.breaks("lxc_health was gone", |node| {
        ip(node, &["link delete lxc_health"])
    })?;
    let node = broken.node();
    ip(node, &[make])?;
    wait_for("programs on the new device", REPAIR, || {
        Ok((programs(node, "up1")? == 2).then_some(()))
    })?;
    broken.bed.wait_all_reachable(PATIENCE)
}

#[test]
#[ignore = "needs root"]
fn a_device_of_somebody_else_gets_no_programs() -> anyhow::Result<()> {
    let broken = RepairBed::start()?;
    let node = broken.node();
    let foreign = "link delete lxc_health\nlink add lxc_health type bridge\n";
    // The agent may recreate its own device first.
    wait_for("the name to be taken", REPAIR, || {
        run_with_input(node.command("ip").args(["-batch", "-"]), foreign)?.success()?;
        Ok(Some(()))
    })?;
    wait_for("the repair to fail", REPAIR, || {
        Ok((!node.logged(&["is not this agent's"])?.is_empty()).then_some(()))
    })?;
    // The device may get programs if the agent is still repairing an earlier fault.
    wait_for("its programs to go", REPAIR, || {
        ensure!(programs(node, "lxc_health")? == 0, "{}", node.log()?);
        Ok(Some(()))
    })?;
    ip(node, &["link delete lxc_health"])?;
    // By now, the delay between retries has grown.
    wait_for("the endpoint", PATIENCE, || broken.is_healthy().map(Some))
}

#[test]
#[ignore = "needs root"]
fn uplinks_are_the_devices_that_have_the_nodes_address_now() -> anyhow::Result<()> {
    let broken = RepairBed::start()?;
    let node = broken.node();
    let address = node.ipv4();
    let (delete, add) = (
        format!("address delete {address}/24 dev eth0"),
        format!("address add {address}/24 dev br0"),
    );
    let bridge = [
        "link add name br0 type bridge",
        "link set eth0 master br0",
        "link set br0 up",
        &add,
    ];
    ip(node, &[&delete])?;
    ip(node, &bridge)?;
    wait_for("programs on the bridge alone", REPAIR, || {
        ensure!(programs(node, "br0")? == 2 && programs(node, "eth0")? == 0);
        Ok(Some(()))
    })?;
    broken.bed.wait_all_reachable(PATIENCE)?;

    ip(node, &["link delete br0"])?;
    let missing = format!("no device has this node's address {address}");
    wait_for("the missing address to be reported", REPAIR, || {
        Ok((!node.logged(&[&missing])?.is_empty()).then_some(()))
    })?;
    ip(node, &["link delete lxc_health"])?;
    wait_for("the endpoint without an uplink", REPAIR, || {
        ensure!(
            // The log names whichever end of the veth the agent missed first.
            !node.logged(&["veth", "was gone"])?.is_empty(),
            "{}",
            node.log()?
        );
        Ok((programs(node, "lxc_health")? == 2).then_some(()))
    })?;
    // Creates another device with the same name.
    ip(node, &bridge)?;
    wait_for("programs on the new bridge", REPAIR, || {
        Ok((programs(node, "br0")? == 2).then_some(()))
    })?;
    broken.bed.wait_all_reachable(PATIENCE)
}
