//! Cost of the mesh for one agent with a hundred to fifty thousand peers, and compared with other probers: time to the
//! first report, API latency, memory, and CPU time per probe.

mod cost;
mod rivals;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use nix::sys::signal::Signal;

use self::cost::Cost;
use super::bare::Bare;
use super::cluster::{Cluster, DeadPeers};
use super::requests::{Asker, get, quantile};
use super::usage::ResidentMemory;
use super::{Figure, Findings, MIB, Options, Report, Target};
use crate::process::print_line;

/// Numbers of peers.
const SIZES: [u32; 4] = [100, 1_000, 10_000, 50_000];
/// Number of peers up to which the targets are promised, and with which the probers are compared.
const RATED: u32 = 10_000;

/// Maximum number of probes per second that the agent may send.
const PROBE_RATE: u32 = 10_000;
/// The agent's default probe interval and timeout.
const INTERVAL: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_secs(1);
/// How much longer the first report may take than the rate and the timeout imply.
const REPORT_SLACK: Duration = Duration::from_millis(500);

const STATUS: &str = "/v1beta/status";
const HEALTHZ: &str = "/v1beta/healthz";
/// Pause between the requests whose latency is measured.
const STATUS_PAUSE: Duration = Duration::from_millis(100);
const HEALTHZ_PAUSE: Duration = Duration::from_millis(20);
/// How long to wait for the first report before the measurement is pointless.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time from the first report until all probes are on schedule: by then, the pause between re-probes of dead peers has
/// grown to the interval.
const SETTLING: Duration = Duration::from_secs(16);
/// CPU time is measured over one interval, in which every target is probed once.
const WINDOW: Duration = INTERVAL;
/// Number of measurements per side of a comparison, alternating between the sides.
const ROUNDS: u32 = 3;

/// Limits of latencies (p99) relative to a bare server that responds with the same body.
const STATUS_RATIO: f64 = 5.0;
const HEALTHZ_RATIO: f64 = 5.0;
const MEMORY_LIMIT_MIB: f64 = 96.0;
const FPING_RATIO: f64 = 1.0;
const BLACKBOX_RATIO: f64 = 1.0 / 3.0;

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    let sizes = match options.peers.as_slice() {
        [] => &SIZES,
        some => some,
    };
    let mut findings = Findings::default();
    let mut smaller = None;
    for &peers in sizes {
        let found = Scale::measure(peers).and_then(|scale| {
            let figures = scale.figures(smaller.as_ref())?;
            Ok((scale, figures))
        });
        if let Some((scale, figures)) = findings.measured(&format!("{peers} peers"), found) {
            figures.into_iter().for_each(|figure| findings.add(figure));
            smaller = Some(scale);
        }
    }
    if let Some(peers) = sizes.iter().copied().filter(|&size| size <= RATED).max() {
        side_by_side(peers, &mut findings);
    }
    findings.report(1)
}

/// Cost of an agent that probes this many peers, three in ten of which are dead.
struct Scale {
    peers: u32,
    /// Time from the agent's start until every target had a result.
    first_report: Duration,
    /// Times of an `fping` pass over all peers at the same rate, before and after the agent's run.
    fping: [Duration; 2],
    status: Latencies,
    healthz: Latencies,
    memory: ResidentMemory,
    cost: Cost,
}

/// Latencies of the agent and, for comparison, of a bare server, in ascending order.
struct Latencies {
    agent: Vec<Duration>,
    bare: Vec<Duration>,
}

impl Scale {
    fn measure(peers: u32) -> anyhow::Result<Self> {
        print_line(format_args!("{peers} peers"));
        let cluster = Cluster::new(peers, DeadPeers::ThreeOfTen, &Probes::All.flags())?;
        let results = 2 * cluster.probed_addresses() as usize;
        let pass = || rivals::fping_once(&cluster, probing_time(peers), TIMEOUT);
        let before = pass()?;
        let bare = [Bare::start()?, Bare::start()?].map(Arc::new);
        let [bare_status, bare_healthz] = bare.clone();
        let start = Instant::now();
        cluster.node().start_agent()?;
        let (complete, first_complete) = mpsc::channel();
        let status = Asker::start(cluster.node().socket(), STATUS, STATUS_PAUSE, {
            move |report, answered| {
                if count_results(report) >= results {
                    // Only the first complete report matters, so the receiver may be gone.
                    let _ = complete.send(answered);
                }
                bare_status.ask(report)
            }
        });
        let healthz = Asker::start(cluster.node().socket(), HEALTHZ, HEALTHZ_PAUSE, {
            move |health, _| bare_healthz.ask(health)
        });
        let first_report = match first_complete.recv_timeout(PATIENCE) {
            Ok(at) => at - start,
            Err(_) => {
                status.finish()?;
                bail!("no report with {results} results within {PATIENCE:?}");
            }
        };
        thread::sleep(SETTLING);
        let [status, healthz] = [(status, &bare[0]), (healthz, &bare[1])].map(|(asker, bare)| {
            anyhow::Ok(Latencies {
                agent: asker.finish()?,
                bare: bare.latencies(),
            })
        });
        let pid = cluster.node().agent_pid()?;
        let memory = ResidentMemory::of(pid)?;
        let cost = Cost::measure(&cluster, pid, WINDOW)?;
        cluster.node().kill_agent(Signal::SIGTERM)?;
        Ok(Self {
            peers,
            first_report,
            fping: [before, pass()?],
            status: status?,
            healthz: healthz?,
            memory,
            cost,
        })
    }

    fn figures(&self, smaller: Option<&Self>) -> anyhow::Result<Vec<Figure>> {
        let beside = |name: &str, unit, ours, other, target: Option<Target>| Figure {
            name: format!("{} peers: {name}", self.peers),
            unit,
            ours,
            other,
            target,
        };
        let figure = |name: &str, unit, ours| beside(name, unit, ours, None, None);
        let promised = |target| Some(target).filter(|_| self.peers <= RATED);
        let floor = probing_time(self.peers) + TIMEOUT;
        let slack = (floor + REPORT_SLACK).as_secs_f64() / floor.as_secs_f64();
        let [before, after] = self.fping;
        let mut figures = vec![beside(
            "start to the first complete report (other: fping, once all in the same time)",
            "s",
            self.first_report.as_secs_f64(),
            Some(((before + after) / 2).as_secs_f64()),
            Some(Target::RatioAtMost(slack)),
        )];
        for (path, latencies, limit) in [
            (STATUS, &self.status, STATUS_RATIO),
            (HEALTHZ, &self.healthz, HEALTHZ_RATIO),
        ] {
            for (name, part, target) in [
                ("p50", 0.5, None),
                ("p99", 0.99, promised(Target::RatioAtMost(limit))),
            ] {
                let millis = |of: &[Duration]| anyhow::Ok(quantile(of, part)?.as_secs_f64() * 1e3);
                figures.push(beside(
                    &format!("GET {path}, {name} (other: a bare server)"),
                    "ms",
                    millis(&latencies.agent)?,
                    Some(millis(&latencies.bare)?),
                    target,
                ));
            }
        }
        let ResidentMemory { now, peak } = self.memory;
        figures.push(beside(
            "resident memory",
            MIB,
            now,
            None,
            promised(Target::MibAtMost(MEMORY_LIMIT_MIB)),
        ));
        figures.push(figure("resident memory at its peak", MIB, peak));
        if let Some(smaller) = smaller {
            let peers = f64::from(self.peers) - f64::from(smaller.peers);
            let kib = (now - smaller.memory.now) * 1024.0 / peers;
            let name = format!("memory per peer beyond {}", smaller.peers);
            figures.push(figure(&name, "KiB", kib));
        }
        let rate = self.cost.sent.total() as f64 / WINDOW.as_secs_f64();
        figures.push(figure("probes a second", "/s", rate));
        figures.push(figure(
            "CPU per probe, both sides",
            "us",
            self.cost.micros_a_probe(),
        ));
        figures.push(figure(
            "CPU per probe, the agent's part",
            "us",
            self.cost.own_micros_a_probe(),
        ));
        Ok(figures)
    }
}

/// Time to probe every target once at the agent's rate.
fn probing_time(peers: u32) -> Duration {
    let targets = 4 * (peers + 1);
    Duration::from_secs(targets.into()) / PROBE_RATE
}

/// Compares CPU time per probe of the agent and of another prober, with the same peers, all of them alive.
fn side_by_side(peers: u32, findings: &mut Findings) {
    for (probes, other, limit) in [
        (Probes::Icmp, "fping", FPING_RATIO),
        (Probes::Http, "prometheus-blackbox-exporter", BLACKBOX_RATIO),
    ] {
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for round in 1..=ROUNDS {
            print_line(format_args!(
                "{peers} peers: {other}, round {round} of {ROUNDS}"
            ));
            let name =
                format!("{peers} peers: CPU per probe by {probes:?} beside {other}, round {round}");
            let costs = findings.measured(&name, compare(peers, probes));
            if let Some((own, others_cost)) = costs {
                ours.push(own);
                others.push(others_cost);
            }
        }
        let [Some(total), Some(own)] = [Cost::micros_a_probe, Cost::own_micros_a_probe]
            .map(|figure| Some((median(&ours, figure)?, median(&others, figure)?)))
        else {
            continue;
        };
        let rounds = ours.len();
        findings.add(Figure {
            name: format!(
                "{peers} peers: CPU per probe by {probes:?} alone, both sides, median of {rounds} (other: {other})"
            ),
            unit: "us",
            ours: total.0,
            other: Some(total.1),
            target: Some(Target::RatioAtMost(limit)),
        });
        findings.add(Figure {
            name: format!("{peers} peers: the prober's own part of it"),
            unit: "us",
            ours: own.0,
            other: Some(own.1),
            target: None,
        });
    }
}

/// Cost of the agent and of another prober of the same kind.
fn compare(peers: u32, probes: Probes) -> anyhow::Result<(Cost, Cost)> {
    let cluster = Cluster::new(peers, DeadPeers::None, &probes.flags())?;
    let other = match probes {
        Probes::Http => {
            let rate = cluster.peers_addresses().len() as f64 / INTERVAL.as_secs_f64();
            rivals::blackbox(&cluster, rate, WINDOW)?
        }
        _ => rivals::fping(&cluster, INTERVAL, WINDOW)?,
    };
    Ok((agent_alone(&cluster)?, other))
}

/// Cost of an agent that only probes, with peers that all answer.
fn agent_alone(cluster: &Cluster) -> anyhow::Result<Cost> {
    cluster.node().start_agent()?;
    thread::sleep(SETTLING);
    let pid = cluster.node().agent_pid()?;
    let cost = Cost::measure(cluster, pid, WINDOW)?;
    let report = get(&cluster.node().socket(), STATUS)?;
    let answered = report.matches("\"status\":\"\"").count();
    ensure!(
        answered == count_results(&report),
        "of {} targets, only {answered} answer: the machine is too busy or too slow for {PROBE_RATE} probes per second",
        count_results(&report)
    );
    Ok(cost)
}

/// Number of results in a report. Each has the time of its probe.
fn count_results(report: &str) -> usize {
    report.matches("\"lastProbed\":").count()
}

/// The median of a figure; `None` if there are no costs.
fn median(costs: &[Cost], figure: fn(&Cost) -> f64) -> Option<f64> {
    let mut values: Vec<f64> = costs.iter().map(figure).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// The protocols with which an agent probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probes {
    All,
    Icmp,
    Http,
}

impl Probes {
    /// Flags for `health-agent run`.
    fn flags(self) -> String {
        let switch = match self {
            Self::All => "",
            Self::Icmp => "--probe http=off",
            Self::Http => "--probe icmp=off",
        };
        format!("--probe-rate {PROBE_RATE} {switch}")
    }
}
