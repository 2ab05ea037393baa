//! `health-agent probe`: container probes.

mod events;
mod list;
mod show;
mod trial;
mod watch;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use health_api::client::Client;
use health_model::settings::Location;
use health_probe::spec::ProbeType;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

const EXAMPLES: &str = "\
Examples:
  health-agent probe list --failing
  health-agent probe list --watch
  health-agent probe get shop/web
  health-agent probe events --pod web
  health-agent probe try pod.yaml --address 10.244.1.7";

/// Commands of `probe`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum ProbeCommand {
    /// List the probes of this node's containers
    List(list::ListArgs),
    /// Show everything about the probes of one pod
    Get(show::GetArgs),
    /// List the events of containers
    Events(events::EventsArgs),
    /// Run the probes of a manifest once, without an agent, and show what the kubelet would do
    Try(trial::TryArgs),
}

impl ProbeCommand {
    pub(super) async fn execute(
        self,
        client: &Client,
        location: &Location,
    ) -> anyhow::Result<ExitCode> {
        match self {
            Self::List(args) => args.execute(client).await?,
            Self::Get(args) => args.execute(client).await?,
            Self::Events(args) => args.execute(client).await?,
            Self::Try(args) => return args.execute(location).await,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Flags that select probes of a pod.
#[derive(Args, Clone, Debug, Default)]
struct Selection {
    /// Only probes of the container of this name
    #[arg(long, value_name = "NAME")]
    container: Option<String>,
    /// Only probes of this type: startup, readiness or liveness
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<ProbeType>,
}

impl Selection {
    /// The API path that lists these probes, for one pod or for all.
    fn path(&self, pod: Option<&str>, watch: bool) -> String {
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let parameters = [
            pod.map(|pod| format!("pod={}", encoded(pod))),
            self.container
                .as_deref()
                .map(|name| format!("container={}", encoded(name))),
            self.kind.map(|kind| format!("type={kind}")),
            watch.then(|| "watch=true".to_owned()),
        ];
        let parameters: Vec<_> = parameters.into_iter().flatten().collect();
        match &parameters[..] {
            [] => "/v1/probes".to_owned(),
            some => format!("/v1/probes?{}", some.join("&")),
        }
    }
}

#[cfg(test)]
mod fixture {
    use health_model::api::{ContainerEvent, ContainerProbe, ProbeRun, ProbeVerdict};

    /// A liveness probe that failed one of three times.
    pub(super) fn probe() -> ContainerProbe {
        ContainerProbe {
            pod: "shop/web".into(),
            pod_uid: "u-1".into(),
            container: "app".into(),
            container_id: Some("3f2a".into()),
            kind: "liveness".into(),
            target: "http://10.244.1.7:8080/alive".into(),
            result: Some(ProbeVerdict::Success),
            last: Some(ProbeVerdict::Failure),
            run: 1,
            threshold: 3,
            on_hold: false,
            waiting: None,
            in_flight: false,
            period_ns: 10_000_000_000,
            timeout_ns: 1_000_000_000,
            next: Some("2026-11-21T03:00:03.2Z".parse().unwrap()),
            overdue_ns: None,
            last_run: Some(ProbeRun {
                at: "2026-11-21T02:59:53.2Z".parse().unwrap(),
                counted: "failed".into(),
                message: "HTTP status 503".into(),
            }),
        }
    }

    /// The event that the probe's container was killed for the second time.
    pub(super) fn killing() -> ContainerEvent {
        ContainerEvent {
            number: 7,
            first: "2026-11-21T02:00:00Z".parse().unwrap(),
            last: "2026-11-21T02:59:53.5Z".parse().unwrap(),
            count: 2,
            kind: "Normal".into(),
            reason: "Killing".into(),
            pod: "shop/web".into(),
            container: "app".into(),
            message: "Container app failed liveness probe, will be restarted".into(),
        }
    }

    pub(super) fn now() -> jiff::Timestamp {
        "2026-11-21T03:00:00Z".parse().unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_holds_what_is_meant() {
        assert_eq!(Selection::default().path(None, false), "/v1/probes");
        let one = Selection {
            container: Some("a&b".into()),
            kind: Some(ProbeType::Liveness),
        };
        assert_eq!(
            one.path(Some("shop/web"), true),
            "/v1/probes?pod=shop%2Fweb&container=a%26b&type=liveness&watch=true"
        );
    }
}
