//! Neither `cleanup` nor a bed leaves anything behind, however the bed ends.

use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::bed::BedLock;
use tests::process::run;
use tests::{Bed, PATIENCE, Snapshot, wait_for};

#[test]
#[ignore = "needs root"]
fn a_bed_leaves_the_machine_as_it_was() -> anyhow::Result<()> {
    let lock = BedLock::acquire()?;
    let before = Snapshot::machine()?;
    let bed = Bed::builder().nodes(3).ipv6(true).start_with(lock)?;
    bed.wait_all_reachable(PATIENCE)?;
    assert!(Snapshot::machine()?.mentions("netns /run/netns/hnode3"));
    drop(bed);

    let _lock = BedLock::acquire()?;
    before.wait_same(Snapshot::machine)
}

#[test]
#[ignore = "needs root"]
fn a_bed_that_panics_leaves_the_machine_as_it_was() -> anyhow::Result<()> {
    let lock = BedLock::acquire()?;
    let before = Snapshot::machine()?;
    let test = std::thread::spawn(move || {
        let _bed = Bed::builder().nodes(1).start_with(lock).expect("a bed");
        panic!("on purpose");
    });
    assert!(test.join().is_err());

    let _lock = BedLock::acquire()?;
    before.wait_same(Snapshot::machine)
}

#[test]
#[ignore = "needs root"]
fn a_bed_that_was_killed_is_removed_by_the_next() -> anyhow::Result<()> {
    let before = machine_alone()?;
    let mut killed = bed_program()?;
    killed.kill()?;
    killed.wait()?;
    assert!(Snapshot::machine()?.mentions("netns /run/netns/hnode2"));

    let bed = Bed::builder().nodes(1).start()?;
    assert!(!Snapshot::machine()?.mentions("netns /run/netns/hnode2"));
    bed.wait_all_reachable(PATIENCE)?;
    drop(bed);
    let _lock = BedLock::acquire()?;
    before.wait_same(Snapshot::machine)
}

#[test]
#[ignore = "needs root"]
fn a_signal_ends_the_bed_program_and_all_it_made() -> anyhow::Result<()> {
    let before = machine_alone()?;
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut bed = bed_program()?;
        kill(Pid::from_raw(bed.id().cast_signed()), signal)?;
        assert_eq!(bed.wait()?.code(), Some(0), "after {signal}");
        let _lock = BedLock::acquire()?;
        before.wait_same(Snapshot::machine)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn cleanup_leaves_a_node_as_it_was() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .without_agents()
        .start()?;
    let node = bed.node(1);
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let before = Snapshot::node(node)?;
        for node in bed.nodes() {
            node.start_agent()?;
        }
        bed.wait_all_reachable(PATIENCE)?;
        assert!(Snapshot::node(node)?.mentions("lxc_health"));
        for node in bed.nodes() {
            node.kill_agent(signal)?;
        }
        // The bed owns the log, so `cleanup` keeps it.
        std::fs::remove_file(node.runtime_dir().join("agent.log"))?;
        node.cli("cleanup")?.success()?;
        let again = node.cli("cleanup")?.success()?;
        assert_eq!(again.trim_end(), "nothing to remove", "after {signal}");

        std::fs::create_dir_all(node.runtime_dir())?;
        before.wait_same(|| Snapshot::node(node))?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn cleanup_leaves_a_running_agent_alone() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let before = Snapshot::node(node)?;
    let ran = node.cli("cleanup")?;
    assert_eq!(ran.code, Some(1));
    assert!(
        ran.stderr.contains(&node.agent_pid()?.to_string()),
        "{}",
        ran.stderr
    );
    before.wait_same(|| Snapshot::node(node))
}

#[test]
#[ignore = "needs root"]
fn a_cleanup_that_stays_ends_at_a_signal() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    for end in [Signal::SIGTERM, Signal::SIGINT] {
        let mut cleanup = node.cli_command();
        let mut cleanup = cleanup
            .args(["cleanup", "--stay"])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut report = String::new();
        let stdout = cleanup.stdout.take().context("no output")?;
        BufReader::new(stdout).read_line(&mut report)?;
        assert!(report.contains("remove"), "{report}");
        assert_eq!(cleanup.try_wait()?, None, "it does not stay");
        kill(Pid::from_raw(cleanup.id().cast_signed()), end)?;
        assert!(cleanup.wait()?.success(), "{end}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_agent_cannot_start_before_a_cleanup_has_ended() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    node.kill_agent(Signal::SIGTERM)?;
    // The cleanup blocks on reading this file, as it would on an etcd that does not answer.
    let note = node.runtime_dir().join("state/registered.json");
    run(Command::new("mkfifo").arg(&note))?.success()?;
    let mut cleanup = node.cli_command().arg("cleanup").spawn()?;
    let mut reader = wait_for("the cleanup to read", PATIENCE, || {
        let opened = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&note);
        match opened {
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            opened => Ok(Some(opened?)),
        }
    })?;
    let refused = node.start_agent();
    let nowhere = r#"{"registry":"file:/nodes.yaml","cluster":"default","node":"hnode1"}"#;
    reader.write_all(nowhere.as_bytes())?;
    drop(reader);
    let ended = cleanup.wait()?;
    let refused = format!("{:#}", refused.expect_err("the cleanup goes on"));
    let holder = format!("pid {} and holds", cleanup.id());
    assert!(refused.contains(&holder), "{refused}");
    assert!(ended.success(), "{ended}");
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)
}

/// A snapshot of the machine while no bed runs. It includes the lock file, like all other snapshots.
fn machine_alone() -> anyhow::Result<Snapshot> {
    let _lock = BedLock::acquire()?;
    Snapshot::machine()
}

/// A running `bed` with two nodes, after it has reported that both are reachable.
fn bed_program() -> anyhow::Result<Child> {
    let mut bed = Command::new(env!("CARGO_BIN_EXE_bed"))
        .args(["--nodes", "2"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let stderr = bed.stderr.take().context("no standard error")?;
    let mut reported = Vec::new();
    for line in BufReader::new(stderr).lines() {
        let line = line?;
        if line.contains("start it again") {
            return Ok(bed);
        }
        reported.push(line);
    }
    bail!("the bed ended: {}", reported.join("\n"))
}
