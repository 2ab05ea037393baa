//! `health-agent probe get`: everything about the probes of one pod.

use std::fmt::{self, Write};

use anyhow::bail;
use clap::Args;
use health_api::client::Client;
use health_model::api::{
    ContainerEvent, ContainerProbe, ContainerProbeSummary, ProbedContainer, ProbedPod, is_pod_named,
};
use health_model::duration::short_duration;
use jiff::Timestamp;
use serde::Serialize;

use super::Selection;
use super::events::events_table;
use super::list::{result, run, state, warn};
use crate::output::{NONE, OutputArgs, comma_separated, indent, printable};

const EXAMPLES: &str = "\
Examples:
  health-agent probe get web
  health-agent probe get shop/web --container app --type liveness
  health-agent probe get shop/web -o json | jq '.probes[].\"last-run\"'";

/// Flags of `probe get`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct GetArgs {
    /// NAMESPACE/NAME, a NAME that only one pod has, or a UID
    pod: String,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    output: OutputArgs,
}

/// Everything that is known about a pod.
#[derive(Debug, Serialize)]
struct PodDetails {
    pod: ProbedPod,
    probes: Vec<ContainerProbe>,
    events: Vec<ContainerEvent>,
}

impl GetArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let pods: Vec<ProbedPod> = client.get("/v1/pods").await?;
        if pods.is_empty() {
            let summary: ContainerProbeSummary = client.get("/v1/probes/summary").await?;
            if !summary.enabled {
                bail!("no pod {:?}: this agent probes no containers", self.pod);
            }
            warn(&summary);
        }
        let mut pod = find(&self.pod, pods)?;
        let path = self.selection.path(Some(&pod.pod), false);
        let mut probes: Vec<ContainerProbe> = client.get(&path).await?;
        probes.retain(|probe| (&probe.pod, &probe.pod_uid) == (&pod.pod, &pod.uid));
        let mut events: Vec<ContainerEvent> = client.get("/v1/pods/events").await?;
        events.retain(|event| event.pod == pod.pod);
        if let Some(wanted) = &self.selection.container {
            if !pod.containers.iter().any(|one| one.name == *wanted) {
                let there = comma_separated(pod.containers.iter().map(|one| &one.name));
                bail!(
                    "pod {} has no container {wanted:?}: it has {there}",
                    pod.pod
                );
            }
            pod.containers.retain(|one| one.name == *wanted);
            events.retain(|event| event.container == *wanted);
        }
        let details = PodDetails {
            pod,
            probes,
            events,
        };
        self.output
            .output
            .print_object(&details, |details| text(details, Timestamp::now()))
    }
}

/// The single pod that matches `wanted`.
fn find(wanted: &str, pods: Vec<ProbedPod>) -> anyhow::Result<ProbedPod> {
    let is_wanted = |pod: &ProbedPod| pod.uid == wanted || is_pod_named(&pod.pod, wanted);
    let mut found: Vec<_> = pods.into_iter().filter(is_wanted).collect();
    match (found.pop(), &found[..]) {
        (None, _) => {
            bail!("no probed pod {wanted:?}; `health-agent probe list` lists the existing ones")
        }
        (Some(pod), []) => Ok(pod),
        (Some(last), others) => {
            let all = || others.iter().chain([&last]);
            let is_one_name = all().all(|pod| pod.pod == last.pod);
            let names = all().map(|pod| if is_one_name { &pod.uid } else { &pod.pod });
            let names: Vec<&str> = names.map(String::as_str).collect();
            bail!(
                "several pods match {wanted:?}: give one of {}",
                names.join(", ")
            )
        }
    }
}

fn text(details: &PodDetails, now: Timestamp) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, details, now);
    text
}

fn write(out: &mut String, details: &PodDetails, now: Timestamp) -> fmt::Result {
    let PodDetails {
        pod,
        probes,
        events,
    } = details;
    for (label, value) in [
        ("Pod", pod.pod.clone()),
        ("UID", pod.uid.clone()),
        ("Source", pod.source.clone()),
        ("Phase", pod.phase.as_deref().unwrap_or(NONE).to_owned()),
        ("Ready", yes_or_no(pod.ready).to_owned()),
        ("Addresses", comma_separated(&pod.ips)),
        (
            "Endpoint",
            pod.endpoint.map_or(NONE.to_owned(), |id| id.to_string()),
        ),
    ] {
        writeln!(out, "{label}:   {}", printable(&value))?;
    }
    writeln!(out, "Containers:")?;
    for container in &pod.containers {
        writeln!(out, "  {}:", printable(&container.name))?;
        write_container(out, container, now)?;
        for probe in probes.iter().filter(|one| one.container == container.name) {
            write_probe(out, probe, now)?;
        }
    }
    if events.is_empty() {
        writeln!(out, "Events:   none")
    } else {
        writeln!(out, "Events:")?;
        out.push_str(&indent(2, &events_table(events)));
        Ok(())
    }
}

fn write_container(out: &mut String, container: &ProbedContainer, now: Timestamp) -> fmt::Result {
    let ProbedContainer {
        id,
        state,
        exit_code,
        ready,
        started,
        restarts,
        restart_at,
        ..
    } = container;
    write!(out, "    State:   {}", printable(state))?;
    if let Some(code) = exit_code {
        write!(out, " with exit code {code}")?;
    }
    write!(out, ", {}", if *ready { "ready" } else { "not ready" })?;
    if let Some(started) = started {
        write!(
            out,
            ", {}",
            if *started { "started" } else { "not started" }
        )?;
    }
    writeln!(out)?;
    if let Some(id) = id {
        writeln!(out, "    ID:   {}", printable(id))?;
    }
    write!(out, "    Restarts:   {restarts}")?;
    if let Some(at) = restart_at {
        let left = u64::try_from(at.duration_since(now).as_nanos()).unwrap_or(0);
        write!(out, ", the next in {}", short_duration(left))?;
    }
    writeln!(out)
}

fn write_probe(out: &mut String, probe: &ContainerProbe, now: Timestamp) -> fmt::Result {
    let (kind, target) = (printable(&probe.kind), printable(&probe.target));
    writeln!(out, "    {kind}:   {target}")?;
    writeln!(out, "      Result:   {}", result(probe))?;
    let run = run(probe).unwrap_or_else(|| NONE.to_owned());
    writeln!(out, "      Run:   {run}")?;
    if let Some(last) = &probe.last_run {
        let counted = last.counted.replace('_', " ");
        write!(out, "      Last run:   {counted} at {:.3}", last.at)?;
        match last.message.trim() {
            "" => writeln!(out)?,
            message => writeln!(out, ": {}", printable(message))?,
        }
    }
    writeln!(out, "      State:   {}", printable(&state(probe, now)))?;
    writeln!(
        out,
        "      Every {}, with a timeout of {}",
        short_duration(probe.period_ns),
        short_duration(probe.timeout_ns)
    )
}

const fn yes_or_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{killing, now, probe};
    use super::*;

    fn pod(name: &str, uid: &str) -> ProbedPod {
        ProbedPod {
            pod: name.into(),
            uid: uid.into(),
            source: "pods/web.yaml".into(),
            phase: Some("Running".into()),
            ready: false,
            ips: vec!["10.244.1.7".parse().unwrap()],
            endpoint: Some(1017),
            containers: vec![ProbedContainer {
                name: "app".into(),
                id: Some("3f2a".into()),
                state: "terminated".into(),
                exit_code: Some(137),
                ready: false,
                started: Some(true),
                restarts: 2,
                restart_at: Some("2026-11-21T03:00:20Z".parse().unwrap()),
            }],
        }
    }

    #[test]
    fn everything_about_the_pod_is_said() {
        let details = PodDetails {
            pod: pod("shop/web", "u-1"),
            probes: vec![probe()],
            events: vec![killing()],
        };
        assert_eq!(
            text(&details, now()),
            "\
Pod:   shop/web
UID:   u-1
Source:   pods/web.yaml
Phase:   Running
Ready:   no
Addresses:   10.244.1.7
Endpoint:   1017
Containers:
  app:
    State:   terminated with exit code 137, not ready, started
    ID:   3f2a
    Restarts:   2, the next in 20s
    liveness:   http://10.244.1.7:8080/alive
      Result:   success
      Run:   failure 1/3
      Last run:   failed at 2026-11-21T02:59:53.200Z: HTTP status 503
      State:   next in 3.2s
      Every 10s, with a timeout of 1s
Events:
  LAST SEEN              COUNT   TYPE     REASON    POD        CONTAINER   MESSAGE
  2026-11-21T02:59:53Z   2       Normal   Killing   shop/web   app         Container app failed liveness probe, will be restarted
"
        );
        let quiet = PodDetails {
            events: Vec::new(),
            ..details
        };
        assert!(text(&quiet, now()).ends_with("\nEvents:   none\n"));
    }

    #[test]
    fn a_name_means_one_pod() {
        let pods = || {
            vec![
                pod("shop/web", "u-1"),
                pod("test/web", "u-2"),
                pod("shop/db", "u-3"),
                pod("shop/db", "u-4"),
            ]
        };
        let find = |wanted| {
            let found = find(wanted, pods());
            found.map(|pod| pod.uid).map_err(|error| error.to_string())
        };
        assert_eq!(find("test/web").as_deref(), Ok("u-2"));
        assert_eq!(find("u-3").as_deref(), Ok("u-3"));
        assert_eq!(
            find("web").unwrap_err(),
            "several pods match \"web\": give one of shop/web, test/web"
        );
        assert_eq!(
            find("db").unwrap_err(),
            "several pods match \"db\": give one of u-3, u-4"
        );
        let unknown = find("app").unwrap_err();
        assert!(unknown.starts_with("no probed pod \"app\""), "{unknown}");
    }
}
