//! `health-agent probe try`: the probes of a manifest, run once without an agent.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use futures_util::future::join_all;
use health_model::address::parse_ip;
use health_model::api::is_pod_named;
use health_model::duration::{duration_text, short_duration};
use health_model::settings::Location;
use health_net::netns::NetNs;
use health_probe::prober::{Containers, Execution, Trial, Tried};
use health_probe::spec::{self, PodSpec, ProbeType};
use health_probe::worker::{ProbeResult, restart};
use health_probe::{Outcome, RawResult};
use serde::Serialize;

use crate::exit::UNREACHABLE;
use crate::output::{OutputArgs, printable, table};

const EXAMPLES: &str = "\
Exit codes: 0 if all probes succeed, 3 if one does not, 1 if the manifest cannot be used.

Examples:
  kubectl get pod web -o yaml | health-agent probe try -
  health-agent probe try deployment.yaml --address 10.244.1.7
  health-agent probe try pod.yaml --address 10.244.1.7 --container app
  health-agent probe try pod.yaml --pid 4711 -o json | jq -r '.[].event.message'";

/// Flags of `probe try`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct TryArgs {
    /// Manifest with pods or pod templates (Deployments, Jobs and so on), in YAML or JSON; - for stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Only this pod, as NAME or NAMESPACE/NAME
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    /// Only the container of this name
    #[arg(long, value_name = "NAME")]
    container: Option<String>,
    /// Only probes of this type: startup, readiness or liveness
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<ProbeType>,
    /// Address of the pod, instead of the one in its status
    #[arg(long, value_name = "IP", value_parser = parse_ip)]
    address: Option<IpAddr>,
    /// Process of the container, whose namespaces commands and `from: pod` use
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Folder of the certificates and keys that annotations name [default: certificates in the state folder]
    #[arg(long, value_name = "DIR")]
    certificates: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

impl TryArgs {
    pub(super) async fn execute(self, location: &Location) -> anyhow::Result<ExitCode> {
        let trials = self.trials()?;
        let process = Process::open(self.pid)?;
        let certificates = match &self.certificates {
            Some(folder) => folder.clone(),
            None => location.certificates(),
        };
        let runs = trials
            .into_iter()
            .map(|trial| run(trial, &process, &certificates));
        let tried: Vec<TriedProbe> = join_all(runs).await;
        self.output.output.print_rows(&tried, tried_table)?;
        Ok(match tried.iter().all(|probe| probe.is_success) {
            true => ExitCode::SUCCESS,
            false => ExitCode::from(UNREACHABLE),
        })
    }

    /// The requested probes.
    fn trials(&self) -> anyhow::Result<Vec<Trial>> {
        let from = self.file.display();
        let manifest = spec::read(&self.text()?);
        if !manifest.errors.is_empty() {
            let errors: Vec<_> = manifest.errors.iter().map(ToString::to_string).collect();
            bail!("{from} cannot be used: {}", errors.join("; "));
        }
        for other in &manifest.skipped {
            eprintln!("warning: skipped {}: it has no pods", printable(other));
        }
        let is_wanted = |pod: &PodSpec| {
            let pod = format!("{}/{}", pod.namespace, pod.name);
            let is_named = |wanted: &str| is_pod_named(&pod, wanted);
            self.pod.as_deref().is_none_or(is_named)
        };
        let pods: Vec<_> = manifest.pods.into_iter().filter(is_wanted).collect();
        if pods.is_empty() {
            bail!(
                "{from} has no pod {}",
                self.pod.as_deref().unwrap_or_default()
            );
        }
        if let ([_, _, ..], true) = (&*pods, self.address.is_some() || self.pid.is_some()) {
            bail!(
                "--address and --pid apply to one pod, but {from} has {}; choose one with --pod",
                pods.len()
            );
        }
        let mut trials = Vec::new();
        for mut pod in pods {
            if let Some(address) = self.address {
                pod.ips = vec![address];
            }
            trials.extend(Trial::all(&Arc::new(pod)));
        }
        if let Some(wanted) = &self.container
            && !trials.iter().any(|trial| *trial.container == **wanted)
        {
            bail!("{from} has no container {wanted} with probes");
        }
        trials.retain(|trial| {
            let is_container = |wanted: &String| *trial.container == **wanted;
            self.container.as_ref().is_none_or(is_container)
                && self.kind.is_none_or(|kind| kind == trial.kind)
        });
        if trials.is_empty() {
            bail!("{from} has no such probes");
        }
        Ok(trials)
    }

    fn text(&self) -> anyhow::Result<String> {
        let text = if self.file.as_os_str() == "-" {
            io::read_to_string(io::stdin().lock())
        } else {
            fs::read_to_string(&self.file)
        };
        text.with_context(|| format!("cannot read {}", self.file.display()))
    }
}

/// The container's process, as given on the command line.
struct Process {
    pid: Option<u32>,
    netns: Option<Arc<NetNs>>,
}

impl Process {
    fn open(pid: Option<u32>) -> anyhow::Result<Self> {
        let open = |pid: u32| {
            let path = PathBuf::from(format!("/proc/{pid}/ns/net"));
            NetNs::at(&path).with_context(|| format!("--pid {pid}"))
        };
        Ok(Self {
            pid,
            netns: pid.map(open).transpose()?.map(Arc::new),
        })
    }
}

impl Containers for Process {
    fn netns(&self, _: &PodSpec) -> Option<Arc<NetNs>> {
        self.netns.clone()
    }

    fn execution(&self, _: &PodSpec, _: &str) -> Option<Execution> {
        let pid = self.pid?;
        Some(Execution::Direct { pid, started: None })
    }
}

/// A tried probe as shown.
#[derive(Debug, Serialize)]
struct TriedProbe {
    pod: String,
    container: String,
    #[serde(rename = "type")]
    kind: ProbeType,
    target: String,
    result: TriedResult,
    message: String,
    attempts: u32,
    took_ns: u64,
    /// The event that the kubelet would record.
    event: Option<TriedEvent>,
    /// The result that counts towards the threshold; `None` if the run is inconclusive.
    counts_as: Option<ProbeResult>,
    /// Number of consecutive results that trigger the consequence.
    threshold: Option<u32>,
    /// What the kubelet does at the threshold.
    consequence: String,
    #[serde(skip)]
    is_success: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum TriedResult {
    Success,
    Warning,
    Failure,
    Error,
    NotObserved,
}

#[derive(Debug, Serialize)]
struct TriedEvent {
    reason: &'static str,
    message: String,
}

async fn run(trial: Trial, process: &Process, certificates: &Path) -> TriedProbe {
    let tried = trial.clone().run(process, certificates).await;
    let pod = &trial.pod;
    let container = pod.container(&trial.container);
    let target = container.map(|container| trial.probe.target(pod, container));
    let target = match &target {
        Some(Ok(target)) => target.action.to_string(),
        _ => trial.probe.handler.name().to_owned(),
    };
    let is_success = tried.is_success();
    let (result, message) = result(&tried);
    let event = tried
        .judgement
        .as_ref()
        .and_then(|judged| judged.event.as_ref());
    let event = event.map(|event| TriedEvent {
        reason: event.reason,
        message: event.message.clone(),
    });
    let counts_as = tried.judgement.as_ref().and_then(|judged| judged.result);
    let threshold = counts_as.map(|result| match result {
        ProbeResult::Success => trial.probe.success_threshold,
        ProbeResult::Failure | ProbeResult::Unknown => trial.probe.failure_threshold,
    });
    TriedProbe {
        pod: format!("{}/{}", pod.namespace, pod.name),
        container: trial.container.to_string(),
        kind: trial.kind,
        target,
        result,
        message,
        attempts: tried.attempts,
        took_ns: u64::try_from(tried.took.as_nanos()).unwrap_or(u64::MAX),
        event,
        counts_as,
        threshold,
        consequence: consequence(&trial, counts_as),
        is_success,
    }
}

fn result(tried: &Tried) -> (TriedResult, String) {
    let Some(Outcome {
        result,
        message,
        errored,
    }) = &tried.outcome
    else {
        let late = "this host was too busy to read the answer in time";
        return (TriedResult::NotObserved, late.to_owned());
    };
    let result = match result {
        _ if *errored => TriedResult::Error,
        RawResult::Success => TriedResult::Success,
        RawResult::Warning => TriedResult::Warning,
        RawResult::Failure | RawResult::Unknown => TriedResult::Failure,
    };
    (result, message.clone())
}

/// What the kubelet does once the threshold is reached.
fn consequence(trial: &Trial, counts_as: Option<ProbeResult>) -> String {
    let Trial {
        pod, kind, probe, ..
    } = trial;
    let is_success = match counts_as {
        None => return "no conclusion".to_owned(),
        Some(result) => result == ProbeResult::Success,
    };
    match (kind, is_success) {
        (ProbeType::Readiness, true) => "ready".to_owned(),
        (ProbeType::Readiness, false) => "not ready".to_owned(),
        (ProbeType::Startup, true) => "started".to_owned(),
        (ProbeType::Liveness, true) => "lives on".to_owned(),
        (ProbeType::Startup | ProbeType::Liveness, false) => {
            let Some(container) = pod.container(&trial.container) else {
                return "killed".to_owned();
            };
            let (grace, restarts) = restart::consequence(pod, container, probe);
            let then = if restarts {
                "restarted"
            } else {
                "not restarted"
            };
            format!(
                "killed with a grace period of {}, and {then}",
                duration_text(grace)
            )
        }
    }
}

fn tried_table(tried: &[TriedProbe]) -> String {
    let rows = tried.iter().map(|probe| {
        let result = match probe.result {
            TriedResult::Success => "success",
            TriedResult::Warning => "warning",
            TriedResult::Failure => "failure",
            TriedResult::Error => "error",
            TriedResult::NotObserved => "not observed",
        };
        [
            probe.pod.clone(),
            probe.container.clone(),
            probe.kind.to_string(),
            probe.target.clone(),
            result.to_owned(),
            short_duration(probe.took_ns),
            meaning(probe),
        ]
    });
    let header = [
        "POD",
        "CONTAINER",
        "TYPE",
        "TARGET",
        "RESULT",
        "TOOK",
        "MEANING",
    ];
    table(header, rows)
}

/// Describes the event and its consequence.
fn meaning(probe: &TriedProbe) -> String {
    let follows = match probe.threshold {
        None | Some(1) => probe.consequence.clone(),
        Some(many) => format!("after {many} in a row: {}", probe.consequence),
    };
    let reported = match &probe.event {
        Some(event) => &event.message,
        None => &probe.message,
    };
    match reported.trim() {
        "" => follows,
        reported => format!("{reported}\n{follows}"),
    }
}
