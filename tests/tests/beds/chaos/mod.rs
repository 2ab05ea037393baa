//! Faults at random moments, from a seed. After each one, all views agree, packets get the policy's verdicts, and
//! nothing remains of whatever was removed.

mod fault;
mod maps;
mod process;
mod world;

use std::net::Ipv4Addr;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use tests::bed::Etcd;
use tests::{Bed, Node, PATIENCE, Snapshot, is_long, seed, wait_for};

use self::fault::{Fault, SmallDisk};
use self::world::World;
use crate::endpoint_report::rows;

const STORE: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 254);
/// Longest duration of a fault.
const FAULT: Duration = Duration::from_secs(2);
/// Number of faults in a long run, which takes about half an hour.
const LONG_RUN: usize = 30 * Fault::ALL.len();

/// Number of faults, injected one after another. Each kind occurs equally often.
fn rounds() -> usize {
    if is_long() {
        LONG_RUN
    } else {
        3 * Fault::ALL.len()
    }
}

/// Number of files, sockets and maps that each agent has open.
fn open_files(bed: &Bed) -> anyhow::Result<Vec<usize>> {
    bed.nodes().iter().map(Node::open_files).collect()
}

#[test]
#[ignore = "needs root"]
fn after_each_fault_views_agree_and_packets_get_the_policys_verdicts() -> anyhow::Result<()> {
    let seed = seed();
    println!("the faults of seed {seed}");
    let mut random = Rng::with_seed(seed);
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .agent_args(&format!("--identity-store etcd:http://{STORE}:2379"))
        .own_clocks()
        .without_agents()
        .start()?;
    let mut store = Etcd::start(&bed, STORE, "")?;
    let disks = bed.nodes().iter().map(SmallDisk::of);
    let disks: Vec<SmallDisk> = disks.collect::<anyhow::Result<_>>()?;
    for node in bed.nodes() {
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    let nodes = bed.nodes().iter();
    let before: Vec<Snapshot> = nodes
        .map(Snapshot::settled)
        .collect::<anyhow::Result<_>>()?;
    let files = open_files(&bed)?;

    let mut world = World::new(&bed)?;
    world.populate()?;
    world.wait_true().context("before any fault")?;
    // All kinds in random order, again and again.
    let mut kinds = Vec::new();
    for round in 0..rounds() {
        if kinds.is_empty() {
            kinds = Fault::ALL.to_vec();
            random.shuffle(&mut kinds);
        }
        let fault = kinds.pop().context("there are kinds of faults")?;
        let at = random.usize(..bed.nodes().len());
        println!("round {round}: {fault:?} at {}", bed.node(at + 1).name());
        let mut end = || -> anyhow::Result<()> {
            let mut broken = fault.begin(&mut world, at, &mut store, &disks[at], &mut random)?;
            let changes = world.begin_changes(&mut random)?;
            // The aim is to interrupt work at a random moment, so there is no condition to wait for.
            thread::sleep(FAULT.mul_f64(random.f64()));
            broken.end()?;
            drop(broken);
            world.finish(changes)?;
            world.wait_true()
        };
        let ended = end();
        ended.with_context(|| format!("round {round} of seed {seed}, {fault:?}"))?;
    }

    world.clear()?;
    for (node, before) in bed.nodes().iter().zip(&before) {
        wait_for("no identity to be referred to", PATIENCE, || {
            let listed = node.listing("identity list")?;
            let is_used = rows(&listed).any(|one| rows(&one["references"]).next().is_some());
            ensure!(!is_used, "{listed}");
            Ok(Some(()))
        })?;
        before.wait_nothing_left(node)?;
    }
    wait_for("files to be closed", PATIENCE, || {
        let now = open_files(&bed)?;
        let is_as_before = now.iter().zip(&files).all(|(now, before)| now <= before);
        ensure!(is_as_before, "{now:?} open, before it were {files:?}");
        Ok(Some(()))
    })
}
