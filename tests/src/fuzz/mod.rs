//! Runs random and mutated packets through the datapath's programs (`BPF_PROG_TEST_RUN`), and checks invariants of each
//! packet and of the maps.

mod corpus;
mod maps;
mod mutate;
mod shape;
mod shrink;
mod verdicts;

use std::fmt;

use anyhow::Context as _;
use aya::programs::SchedClassifier;
use health_common::config::{DatapathConfig, PASSIVE_RTT};
use health_common::masquerade::MasqueradeConfig;
use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_ICMP, RttKey};
use health_datapath::rtt_store::RttStore as _;
use health_settings::MasqueradeSettings;

use self::corpus::{ENDPOINT, GATEWAY, HOST_MAC, MAC, NODE, PEER};
use self::maps::Ledger;
use crate::arguments::FuzzArgs;
use crate::testrun::{DROP, Outcome, REDIRECT, TestRun, marked, offloaded, run_program, stamped};

const KEY: [u64; 2] = [0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00];
const SESSION: u32 = 0x0102_0304;
const PROBE_ID: u16 = 0x4240;
/// TCP port of the agents' HTTP responders.
const HEALTH_PORT: u16 = 4240;
/// The mark by which `from_endpoint` recognises packets that `to_endpoint` has answered.
const MARK_ANSWERED: u32 = 0x6865_616c;

/// Number of runs between two checks of the maps.
const MAPS_EVERY: u64 = 20_000;

/// A program under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `to_endpoint`.
    ToEndpoint,
    /// `from_endpoint`.
    FromEndpoint,
    /// `to_netdev`.
    ToNetdev,
    /// `from_netdev`.
    FromNetdev,
}

impl Program {
    const ALL: [Self; 4] = [
        Self::ToEndpoint,
        Self::FromEndpoint,
        Self::ToNetdev,
        Self::FromNetdev,
    ];

    /// The program's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ToEndpoint => "to_endpoint",
            Self::FromEndpoint => "from_endpoint",
            Self::ToNetdev => "to_netdev",
            Self::FromNetdev => "from_netdev",
        }
    }
}

/// Metadata of a packet's buffer, part of `struct __sk_buff`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Context {
    Plain,
    /// A mark.
    Marked(u32),
    /// Receive time in nanoseconds since 1970.
    Stamped(u64),
    /// Bytes of data in each segment into which the device will split the packet (GSO).
    Offloaded(u32),
}

impl Context {
    fn bytes(self) -> Option<Vec<u8>> {
        match self {
            Self::Plain => None,
            Self::Marked(mark) => Some(marked(mark)),
            Self::Stamped(at_ns) => Some(stamped(at_ns)),
            Self::Offloaded(size) => Some(offloaded(size)),
        }
    }
}

/// One run: a packet and the program that sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Case {
    program: Program,
    context: Context,
    frame: Vec<u8>,
}

/// Totals of runs without a finding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FuzzTotals {
    /// Packets that a program processed.
    pub runs: u64,
    /// Packets that the kernel rejected for a test run.
    pub refused: u64,
    /// Packets that were dropped.
    pub dropped: u64,
    /// Requests that a program turned into their replies.
    pub answered: u64,
    /// Packets that a program modified and passed on.
    pub rewritten: u64,
}

impl fmt::Display for FuzzTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} runs: {} dropped, {} answered, {} rewritten; {} more packets unsuitable for test runs",
            self.runs, self.dropped, self.answered, self.rewritten, self.refused
        )
    }
}

/// A violation of an invariant.
#[derive(Clone, Debug)]
pub struct Finding {
    seed: u64,
    run: u64,
    what: String,
    /// The packet, and the shortest packet found that breaks any rule; `None` if the violation is in the maps.
    packets: Option<(Case, Case)>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seed, run, what, ..
        } = self;
        let Some((case, shortest)) = &self.packets else {
            return write!(
                f,
                "after run {run}: {what}\nto reproduce: cargo xtask fuzz --seed {seed} --runs {}",
                run + 1
            );
        };
        writeln!(f, "run {run}, {}: {what}", case.program.name())?;
        writeln!(f, "buffer: {:?}", case.context)?;
        writeln!(f, "packet: {}", hex(&case.frame))?;
        writeln!(f, "simplest failing packet: {}", hex(&shortest.frame))?;
        write!(
            f,
            "to reproduce: cargo xtask fuzz --seed {seed} --first {run} --runs 1\n\
             or, if it needs the earlier packets: cargo xtask fuzz --seed {seed} --runs {}",
            run + 1
        )
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Executes the runs, and stops at the first finding. Calls `progress` periodically with the totals.
pub fn fuzz(
    runs: FuzzArgs,
    mut progress: impl FnMut(&FuzzTotals),
) -> anyhow::Result<Result<FuzzTotals, Finding>> {
    let datapath = Loaded::load()?;
    let corpus = corpus::corpus();
    let mut ledger = Ledger::default();
    let mut done = FuzzTotals::default();
    for run in runs.first..runs.first.saturating_add(runs.count) {
        let finding = |what, packets| Finding {
            seed: runs.seed,
            run,
            what,
            packets,
        };
        let case = mutate::case(&corpus, runs.seed, run);
        match datapath.run(&case) {
            None => done.refused += 1,
            Some(outcome) => {
                if let Err(what) = verdicts::check(&case, &outcome) {
                    let shortest = shrink::shrink(&datapath, &case);
                    return Ok(Err(finding(what, Some((case, shortest)))));
                }
                done.note(&case, &outcome);
                ledger.note(&case, &outcome);
            }
        }
        let is_last = run - runs.first + 1 == runs.count;
        if (run + 1).is_multiple_of(MAPS_EVERY) || is_last {
            let checked =
                maps::check(&datapath.bed, &mut ledger).context("cannot read the maps")?;
            if let Err(what) = checked {
                return Ok(Err(finding(what, None)));
            }
            progress(&done);
        }
    }
    Ok(Ok(done))
}

impl FuzzTotals {
    fn note(&mut self, case: &Case, outcome: &Outcome) {
        self.runs += 1;
        match outcome.code {
            DROP => self.dropped += 1,
            REDIRECT => self.answered += 1,
            _ if outcome.bytes != case.frame => self.rewritten += 1,
            _ => {}
        }
    }
}

/// Loaded programs and maps.
struct Loaded {
    bed: TestRun,
    programs: Vec<(Program, SchedClassifier)>,
}

impl Loaded {
    /// Loads them, with an endpoint and a peer whose round-trip times are measured.
    fn load() -> anyhow::Result<Self> {
        let mut bed = TestRun::load();
        bed.set_health_endpoint(
            (ENDPOINT.v4, ENDPOINT.v6),
            MAC,
            HOST_MAC,
            DatapathConfig {
                icmp_id_be: PROBE_ID.to_be(),
                health_port_be: HEALTH_PORT.to_be(),
                probe_key: KEY,
                session: SESSION,
                gateway4: GATEWAY.v4.into(),
                gateway6: GATEWAY.v6.into(),
                flags: PASSIVE_RTT,
                ..DatapathConfig::default()
            },
        );
        bed.datapath.set_masquerade(masquerade()?)?;
        let rtt = bed.datapath.rtt()?;
        for peer in [PEER.v4.into(), PEER.v6.into()] {
            for path in [Path::Host, Path::Endpoint] {
                rtt.ensure(RttKey {
                    peer,
                    path: path as u8,
                    protocol: PROTOCOL_ICMP,
                    pad: 0,
                })?;
            }
            rtt.follow(peer.to_ip(), Path::Host)?;
        }
        let programs = Program::ALL.map(|program| (program, bed.program(program.name())));
        Ok(Self {
            bed,
            programs: programs.into(),
        })
    }

    fn run(&self, case: &Case) -> Option<Outcome> {
        let (_, program) = self
            .programs
            .iter()
            .find(|(program, _)| *program == case.program)?;
        run_program(program, &case.frame, case.context.bytes().as_deref())
    }
}

/// Masquerades traffic that leaves the cluster, with so few ports that they run out.
fn masquerade() -> anyhow::Result<MasqueradeConfig> {
    let settings = MasqueradeSettings {
        native_routing_cidrs: vec!["10.244.0.0/16".parse()?, "fd00:10:244::/48".parse()?],
        masquerade_excludes: vec!["198.51.100.0/24".parse()?],
        masquerade_ports: "40000-40063".parse()?,
        gateway_cidrs: vec!["192.168.77.0/24".parse()?, "fd00:77::/64".parse()?],
    };
    Ok(settings.of_node(&[NODE.v4.into(), NODE.v6.into()], &[])?)
}
