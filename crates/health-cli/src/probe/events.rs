//! `health-agent probe events`: events of containers.

use clap::Args;
use health_api::client::Client;
use health_model::api::{ContainerEvent, is_pod_named};

use crate::output::{OutputArgs, printable, table};

const EXAMPLES: &str = "\
Examples:
  health-agent probe events
  health-agent probe events --pod shop/web
  health-agent probe events -o jsonl | jq -r 'select(.type == \"Warning\") | .message'";

/// Flags of `probe events`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct EventsArgs {
    /// Only events of this pod, as NAME or NAMESPACE/NAME
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

impl EventsArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let mut events: Vec<ContainerEvent> = client.get("/v1/pods/events").await?;
        if let Some(wanted) = &self.pod {
            events.retain(|event| is_pod_named(&event.pod, wanted));
        }
        self.output.output.print_rows(&events, events_table)
    }
}

/// One event per line.
pub(super) fn events_table(events: &[ContainerEvent]) -> String {
    let rows = events.iter().map(|event| {
        [
            format!("{:.0}", event.last),
            event.count.to_string(),
            event.kind.clone(),
            event.reason.clone(),
            event.pod.clone(),
            event.container.clone(),
            printable(event.message.trim_end()).into_owned(),
        ]
    });
    let header = [
        "LAST SEEN",
        "COUNT",
        "TYPE",
        "REASON",
        "POD",
        "CONTAINER",
        "MESSAGE",
    ];
    table(header, rows)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::killing;
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_its_message() {
        let odd = ContainerEvent {
            count: 1,
            message: "Liveness probe failed: exit code 1: \u{1b}[2J\nfake/pod   line\n".into(),
            reason: "Unhealthy".into(),
            kind: "Warning".into(),
            ..killing()
        };
        assert_eq!(
            events_table(&[odd, killing()]),
            "\
LAST SEEN              COUNT   TYPE      REASON      POD        CONTAINER   MESSAGE
2026-11-21T02:59:53Z   1       Warning   Unhealthy   shop/web   app         Liveness probe failed: exit code 1: \\u{1b}[2J\\nfake/pod   line
2026-11-21T02:59:53Z   2       Normal    Killing     shop/web   app         Container app failed liveness probe, will be restarted
"
        );
    }
}
