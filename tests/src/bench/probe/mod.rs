//! Container probes of one agent: the cost of very many probes, how late they start, what they leave behind, and the
//! cost of a probe compared with the blackbox exporter; also, the client of gRPC probes compared with `h2`.

mod exporter;
mod floor;
mod grpc;
mod targets;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use health_model::api::ContainerProbeSummary;
use serde_json::{Value, json};
use tempfile::TempDir;

use self::exporter::Exporter;
use self::targets::Targets;
use super::usage::{ResidentMemory, cpu_time};
use super::{Figure, Findings, MIB, Options, Report, Target};
use crate::bed::ip;
use crate::{Bed, Node, PATIENCE, wait_for};

/// Prefix of the probed addresses, which are on the second node.
const PREFIX: &str = "10.99.0.0/16";
/// Duration of a measurement.
const WINDOW: Duration = Duration::from_secs(20);
/// Limits: CPU in percent of a core, memory, and the 99th percentile of the start delay.
const CPU_LIMIT: f64 = 60.0;
const MEMORY_LIMIT_MIB: f64 = 128.0;
const DELAY_LIMIT_MS: f64 = 20.0;
/// Limit for our CPU time per probe relative to that of the necessary system calls.
const FLOOR_RATIO: f64 = 1.5;
/// Limit for our CPU time per probe relative to the exporter's.
const EXPORTER_RATIO: f64 = 1.0 / 3.0;
/// The agent's rate limit relative to the rate at which probes are due.
const SPARE_RATE: f64 = 1.1;
/// Number of probes per second with one mechanism in the comparison with the exporter.
const BESIDE: u32 = 1000;

/// The mechanism of a container probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mechanism {
    Http,
    Tcp,
    Grpc,
}

impl Mechanism {
    const ALL: [Self; 3] = [Self::Http, Self::Tcp, Self::Grpc];

    const fn name(self) -> &'static str {
        match self {
            Self::Http => "HTTP",
            Self::Tcp => "TCP",
            Self::Grpc => "gRPC",
        }
    }

    const fn port(self) -> u16 {
        match self {
            Self::Http => 8080,
            Self::Tcp => 8081,
            Self::Grpc => 8082,
        }
    }

    fn handler(self) -> (&'static str, Value) {
        let port = self.port();
        match self {
            Self::Http => ("httpGet", json!({ "port": port })),
            Self::Tcp => ("tcpSocket", json!({ "port": port })),
            Self::Grpc => ("grpc", json!({ "port": port })),
        }
    }
}

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    let wanted =
        |part: &str| options.parts.is_empty() || options.parts.iter().any(|one| one == part);
    let parts = ["many", "fast", "exporter", "grpc"];
    ensure!(
        parts.into_iter().any(wanted),
        "the parts are {}",
        parts.join(", ")
    );
    let mut findings = Findings::default();
    for (part, name, count, period) in [
        ("many", "10,000 at 1 s", 10_000, Duration::from_secs(1)),
        ("fast", "1,000 at 50 ms", 1000, Duration::from_millis(50)),
    ] {
        if wanted(part) {
            let found = many(name, count, period, &mut findings);
            findings.measured(name, found);
        }
    }
    if wanted("exporter") {
        for mechanism in Mechanism::ALL {
            let name = format!("CPU per probe by {}", mechanism.name());
            let found = beside_exporter(mechanism);
            if let Some(figure) = findings.measured(&name, found) {
                findings.add(figure);
            }
        }
    }
    if wanted("grpc")
        && let Some(figure) = findings.measured("CPU per gRPC probe", grpc::beside_h2())
    {
        findings.add(figure);
    }
    findings.report(1)
}

/// An agent on the first node and its targets on the second.
struct Stand {
    bed: Bed,
    _targets: Targets,
    manifests: TempDir,
}

impl Stand {
    fn new() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(2).without_agents().start()?;
        let (prober, probed) = (bed.node(1), bed.node(2));
        ip(probed.name(), &format!("route add local {PREFIX} dev lo"))?;
        let gateway = probed.ipv4();
        ip(prober.name(), &format!("route add {PREFIX} via {gateway}"))?;
        Ok(Self {
            _targets: Targets::start(probed)?,
            manifests: tempfile::tempdir().context("cannot create a folder for manifests")?,
            bed,
        })
    }

    fn prober(&self) -> &Node {
        self.bed.node(1)
    }

    /// Starts probing this many containers with this period, alternating between the mechanisms, and waits until all of
    /// them have answered.
    fn probe(&self, count: u32, period: Duration, mechanisms: &[Mechanism]) -> anyhow::Result<()> {
        let kinds = mechanisms.iter().cycle();
        let pods: Vec<Value> = (0..count)
            .zip(kinds)
            .map(|(i, kind)| pod(i, period, *kind))
            .collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": pods });
        let path = self.manifests.path().join("pods.json");
        fs::write(&path, list.to_string())
            .with_context(|| format!("cannot write {}", path.display()))?;
        let node = self.prober();
        node.start_agent_with(&format!(
            "--pod-manifests {} --container-probe-rate {:.0}",
            self.manifests.path().display(),
            // The agent spreads probes that start together over nearly a period.
            f64::from(count) / period.as_secs_f64() * SPARE_RATE,
        ))?;
        wait_for("all containers to have answered", PATIENCE, || {
            let summary = self.summary()?;
            Ok((summary.ready_pods == u64::from(count)).then_some(()))
        })
    }

    /// The agent's own summary of its probes.
    fn summary(&self) -> anyhow::Result<ContainerProbeSummary> {
        let mut stream = UnixStream::connect(self.prober().socket())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /v1/probes/summary HTTP/1.0\r\nHost: agent\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer
            .split_once("\r\n\r\n")
            .context("the answer is not HTTP")?;
        serde_json::from_str(body).with_context(|| body.to_owned())
    }

    /// Number of connections in TIME_WAIT on both nodes.
    fn time_wait(&self) -> anyhow::Result<u64> {
        let of = |node: &Node| -> anyhow::Result<u64> {
            let text = node.run_in(|| fs::read_to_string("/proc/thread-self/net/sockstat"))??;
            let mut words = text.lines().find_map(|line| line.strip_prefix("TCP: "));
            let mut words = words.take().context("no TCP in sockstat")?.split(' ');
            words
                .find(|word| *word == "tw")
                .context("no tw in sockstat")?;
            Ok(words.next().context("no tw in sockstat")?.parse()?)
        };
        Ok(of(self.bed.node(1))? + of(self.bed.node(2))?)
    }
}

/// The changes between two summaries.
struct Between<'a> {
    before: &'a ContainerProbeSummary,
    after: &'a ContainerProbeSummary,
}

impl Between<'_> {
    fn successful(&self) -> f64 {
        let of = |summary: &ContainerProbeSummary| summary.runs.get("successful").copied();
        (of(self.after).unwrap_or_default() - of(self.before).unwrap_or_default()) as f64
    }

    fn others(&self) -> f64 {
        let of = |summary: &ContainerProbeSummary| summary.runs.values().sum::<u64>();
        (of(self.after) - of(self.before)) as f64 - self.successful()
    }

    /// 99th percentile of the start delay in ms, rounded up to the upper bound of its bucket.
    fn delay_p99(&self) -> anyhow::Result<f64> {
        let rows = self
            .after
            .start_delays
            .iter()
            .zip(&self.before.start_delays);
        let rows: Vec<(Option<u64>, u64)> = rows
            .map(|(now, then)| (now.at_most_ns, now.count - then.count))
            .collect();
        let all: u64 = rows.iter().map(|(_, count)| count).sum();
        let mut within = 0;
        for (bound, count) in rows {
            within += count;
            if within * 100 >= all * 99 {
                return Ok(bound.map_or(f64::INFINITY, |bound| bound as f64 / 1e6));
            }
        }
        bail!("the agent reports no delays")
    }
}

fn pod(i: u32, period: Duration, mechanism: Mechanism) -> Value {
    let [_, _, high, low] = i.to_be_bytes();
    let (handler, target) = mechanism.handler();
    let period = period.as_millis();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": format!("pod-{i}"),
            "uid": format!("uid-{i}"),
            "annotations": { "probe.health-agent.io/app.readiness.period": format!("{period}ms") },
        },
        "spec": { "containers": [{ "name": "app", "readinessProbe": { handler: target, "timeoutSeconds": 5 } }] },
        "status": {
            "phase": "Running",
            "podIP": format!("10.99.{high}.{low}"),
            "containerStatuses": [{
                "name": "app",
                "containerID": format!("id-{i}"),
                "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
            }],
        },
    })
}

/// Measures an agent with very many probes.
fn many(name: &str, count: u32, period: Duration, findings: &mut Findings) -> anyhow::Result<()> {
    let stand = Stand::new()?;
    stand.probe(count, period, &Mechanism::ALL)?;
    let pid = stand.prober().agent_pid()?;
    let before = (stand.summary()?, stand.time_wait()?);
    let used = cpu_time(pid)?;
    // The measurement covers this window; there is nothing else to wait for.
    thread::sleep(WINDOW);
    let used = (cpu_time(pid)? - used).as_secs_f64();
    let after = (stand.summary()?, stand.time_wait()?);
    let resident = ResidentMemory::of(pid)?.now;
    let between = Between {
        before: &before.0,
        after: &after.0,
    };
    stand
        .prober()
        .kill_agent(nix::sys::signal::Signal::SIGTERM)?;
    let per_second = f64::from(count) / period.as_secs_f64();
    let floor = floor::cost(stand.prober(), count, per_second, WINDOW);
    let floor = findings.measured(&format!("{name}: bare system calls"), floor);
    let (sent, others) = (between.successful(), between.others());
    let wanted = f64::from(count) * WINDOW.as_secs_f64() / period.as_secs_f64();
    let row = |what: &str, unit, ours, other, target| Figure {
        name: format!("{name}: {what}"),
        unit,
        ours,
        other,
        target,
    };
    let limited = Some(Target::RatioAtMost(1.0));
    let rows = [
        row(
            "probes that succeeded (other: as many as were due)",
            "",
            sent,
            Some(wanted),
            Some(Target::RatioAtLeast(0.98)),
        ),
        row(
            "probes that failed",
            "",
            others,
            Some(0.0),
            Some(Target::Equal),
        ),
        row(
            "CPU (other: the limit)",
            "% of a core",
            used / WINDOW.as_secs_f64() * 100.0,
            Some(CPU_LIMIT),
            limited,
        ),
        row(
            "CPU per probe (other: bare system calls)",
            "us",
            used * 1e6 / (sent + others),
            floor,
            Some(Target::RatioAtMost(FLOOR_RATIO)),
        ),
        row(
            "resident memory",
            MIB,
            resident,
            None,
            Some(Target::MibAtMost(MEMORY_LIMIT_MIB)),
        ),
        row(
            "delay of a start, p99 (other: the limit)",
            "ms",
            between.delay_p99()?,
            Some(DELAY_LIMIT_MS),
            limited,
        ),
        row(
            "connections that entered TIME_WAIT",
            "",
            after.1 as f64 - before.1 as f64,
            Some(0.0),
            Some(Target::Equal),
        ),
    ];
    rows.into_iter().for_each(|row| findings.add(row));
    Ok(())
}

/// Compares a probe of the agent with a probe of the exporter.
fn beside_exporter(mechanism: Mechanism) -> anyhow::Result<Figure> {
    let stand = Stand::new()?;
    stand.probe(BESIDE, Duration::from_secs(1), &[mechanism])?;
    let pid = stand.prober().agent_pid()?;
    let (before, used) = (stand.summary()?, cpu_time(pid)?);
    // The measurement covers this window, too.
    thread::sleep(WINDOW);
    let (used, after) = (cpu_time(pid)? - used, stand.summary()?);
    let between = Between {
        before: &before,
        after: &after,
    };
    let ours = used.as_secs_f64() * 1e6 / between.successful();
    stand
        .prober()
        .kill_agent(nix::sys::signal::Signal::SIGTERM)?;

    let exporter = Exporter::start(stand.prober())?;
    let theirs = exporter.cost(mechanism, BESIDE, WINDOW)?;
    Ok(Figure {
        name: format!(
            "CPU per probe by {} (other: blackbox exporter)",
            mechanism.name()
        ),
        unit: "us",
        ours,
        other: Some(theirs),
        target: Some(Target::RatioAtMost(EXPORTER_RATIO)),
    })
}
