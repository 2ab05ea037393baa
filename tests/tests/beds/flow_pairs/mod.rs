//! Pairs of flows that get the same tuple after translation. Each flow is answered by its own backend, from the address
//! that it was sent to, whatever else uses its port.
//!
//! The pairs are generated from a table of ways and clients. Each pair is tried with the agents and with the kernel's
//! own NAT.

mod flow;
mod kernel;
mod known;
mod run;
mod server;
mod side;
mod table;

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use anyhow::ensure;
use health_net::xdp;
use nix::net::if_::if_nametoindex;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tempfile::TempDir;
use tests::bed::FABRIC;
use tests::offload::{self, Offload};
use tests::outside::FAR;
use tests::served::Manifests;
use tests::{Bed, is_long, seed};

use self::known::Known;
use self::server::Server;
use self::side::Side;
use self::table::{Kind, Pair, State};

/// Maximum number of open files: the sockets of a batch and of its servers.
const OPEN_FILES: u64 = 8192;
/// How long to wait for pairs that have failed once.
const LONG_WAIT: Duration = Duration::from_secs(10);
/// Number of random pairs for each mode of the agents, in a short run and in a long run.
const RANDOM: [usize; 2] = [1500, 25_000];
/// Number of pairs to try for each rule of known failures.
const OF_A_RULE: usize = 40;
/// Destinations that the agents do not masquerade.
const MASQUERADING: &str =
    "--native-routing-cidr 10.244.0.0/16 --native-routing-cidr fd00:10:244::/48";

/// Two nodes with agents, two without, and a host outside.
struct Stand {
    agents: Side,
    _outside: Server,
    bed: Bed,
    _key: TempDir,
}

impl Stand {
    fn start(flags: &str) -> anyhow::Result<Self> {
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES.min(most), most)?;
        let manifests = Manifests::new()?;
        let folder = tempfile::tempdir()?;
        let key = folder.path().join("key");
        fs::write(&key, [7; 32])?;
        fs::set_permissions(&key, Permissions::from_mode(0o600))?;
        let bed = Bed::builder()
            .nodes(4)
            .ipv6(true)
            .agent_args(&manifests.agent_args())
            .agent_args(&format!("--mesh-key-file {} {flags}", key.display()))
            .without_agents()
            .start()?;
        bed.write_nodes_file(&tests::bed::registry(&bed.nodes()[..2]))?;
        for index in [1, 2] {
            bed.node(index).start_agent()?;
        }
        let outside = side::add_outside(&bed)?;
        let agents = Side::of_agents(&bed, manifests)?;
        // Senders compute their own checksums, because XDP cannot know that a device was supposed to. The other end of
        // a veth pair accepts packets that XDP sends back if it merges segments.
        for namespace in [
            FAR,
            "hnode1",
            "hnode2",
            "h-near",
            "h-far",
            "h-pod",
            "h-neighbour",
        ] {
            offload::set(namespace, "eth0", Offload::TxChecksums, false)?;
        }
        for index in [1, 2] {
            offload::set(FABRIC, bed.node(index).name(), Offload::Gro, true)?;
        }
        agents.serve(&bed)?;
        Ok(Self {
            agents,
            _outside: outside,
            bed,
            _key: folder,
        })
    }
}

/// The first rule of a list that matches a pair.
fn known<'a>(pair: &Pair, list: &'a [Known]) -> Option<&'a Known> {
    list.iter().find(|known| (known.has)(pair))
}

/// Tries pairs, except those that are known to fail.
fn judge(what: &str, side: &Side, pairs: &[Pair], list: &[Known]) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut others = pairs.to_vec();
    others.retain(|pair| known(pair, list).is_none());
    let failed: Vec<Pair> = run::run(side, &others, run::SOON)?.into_keys().collect();
    // On a busy machine, a few replies may have been late.
    let failed = run::run(side, &failed, LONG_WAIT)?;
    println!(
        "{what}: {} of {} pairs are answered, {} others are known to fail ({:.1} s)",
        others.len() - failed.len(),
        others.len(),
        pairs.len() - others.len(),
        start.elapsed().as_secs_f64()
    );
    let lines: Vec<String> = failed
        .iter()
        .map(|(pair, why)| format!("{pair:?}: {why}"))
        .collect();
    ensure!(
        lines.is_empty(),
        "{what}: {} are not answered, {:?}:\n{}",
        lines.len(),
        by_kind(&failed),
        lines.join("\n")
    );
    Ok(())
}

/// Checks that at least one pair fails for each rule of known failures.
fn judge_list(what: &str, side: &Side, pairs: &[Pair], list: &[Known]) -> anyhow::Result<()> {
    for rule in list {
        let mut known = pairs.to_vec();
        known.retain(|pair| known_by(pair, list, rule));
        let step = known.len().div_ceil(OF_A_RULE).max(1);
        let known: Vec<Pair> = known.into_iter().step_by(step).collect();
        let failed = run::run(side, &known, run::SOON)?;
        println!(
            "{what}: {} of {} fail: {}",
            failed.len(),
            known.len(),
            rule.why
        );
        ensure!(
            !failed.is_empty(),
            "{what}: all {} pairs are answered, and the rule is to go: {}",
            known.len(),
            rule.why
        );
    }
    Ok(())
}

fn known_by(pair: &Pair, list: &[Known], rule: &Known) -> bool {
    known(pair, list).is_some_and(|known| std::ptr::eq(known, rule))
}

/// Number of failures per protocol and state.
fn by_kind(failed: &BTreeMap<Pair, String>) -> BTreeMap<(Kind, State), usize> {
    let mut counts = BTreeMap::new();
    for pair in failed.keys() {
        *counts.entry((pair.kind, pair.state)).or_default() += 1;
    }
    counts
}

/// Each pair of open flows with one of the IP versions, and some pairs in other states.
fn regular() -> Vec<Pair> {
    let mut pairs = table::all();
    pairs.retain(|pair| {
        let [(client, way), (other_client, other_way)] = pair.flows;
        let clients = client as usize + other_client as usize;
        let ways = way as usize + 3 * other_way as usize;
        let mixed = clients + ways + pair.target as usize + pair.state as usize;
        let is_its_version = mixed.is_multiple_of(2) == pair.is_v4;
        is_its_version && (pair.state == State::Open || mixed.is_multiple_of(5))
    });
    pairs
}

/// Random pairs, different for each mode of the agents.
fn random(mode: u64) -> Vec<Pair> {
    let all = table::all();
    let mut random = fastrand::Rng::with_seed(seed().wrapping_add(mode));
    let count = RANDOM[usize::from(is_long())];
    println!("{count} of {} pairs, seed {}", all.len(), seed());
    (0..count).map(|_| all[random.usize(..all.len())]).collect()
}

#[test]
#[ignore = "needs root"]
fn pairs_are_answered_as_by_the_kernels_nat() -> anyhow::Result<()> {
    let stand = Stand::start("")?;
    let kernel = Side::of_kernel(&stand.bed)?;
    kernel.wait_served()?;
    let mut pairs = regular();
    if is_long() {
        pairs.extend(random(0));
    }
    let results = [
        judge("kernel", &kernel, &pairs, known::KERNEL),
        judge("agents", &stand.agents, &pairs, known::AGENTS),
        judge_list("kernel", &kernel, &pairs, known::KERNEL),
        judge_list("agents", &stand.agents, &pairs, known::AGENTS),
    ];
    let errors = results.into_iter().filter_map(Result::err);
    let errors: Vec<String> = errors.map(|error| error.to_string()).collect();
    ensure!(errors.is_empty(), "{}", errors.join("\n"));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn pairs_are_answered_by_nodes_that_masquerade() -> anyhow::Result<()> {
    let stand = Stand::start(MASQUERADING)?;
    judge("agents", &stand.agents, &random(1), known::AGENTS)
}

#[test]
#[ignore = "needs root"]
fn pairs_are_answered_through_the_hosts_stack() -> anyhow::Result<()> {
    let stand = Stand::start("--host-routing kernel")?;
    judge("agents", &stand.agents, &random(2), known::AGENTS)
}

#[test]
#[ignore = "needs root"]
fn pairs_are_answered_by_xdp() -> anyhow::Result<()> {
    // Only newer kernels report driver capabilities. On older ones, a program on a veth device forwards nothing.
    let mode = match xdp::sends(if_nametoindex("lo")?)? {
        Some(_) => "native",
        None => "generic",
    };
    let stand = Stand::start(&format!("{MASQUERADING} --service-xdp {mode}"))?;
    judge("agents", &stand.agents, &random(3), known::AGENTS)
}
