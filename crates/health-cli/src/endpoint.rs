//! `health-agent endpoint`: the endpoints of this node, as the agent manages them.

mod change;
mod show;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum as _};
use health_api::client::Client;
use health_endpoint::log::LogEntry;
use health_model::api::{Endpoint, EndpointEvent, EndpointHealth, EndpointSettingsChange};
use health_model::labels::Label;
use health_model::policy::PolicyMode;
use health_settings::absolute_path;

use self::show::{endpoints_table, health_table, log_table};
use super::output::{Format, OutputArgs, print_more, write_json_line};

const EXAMPLES: &str = "\
Examples:
  health-agent endpoint list
  health-agent endpoint get 1017
  health-agent endpoint create --netns /run/netns/web --label app=web
  health-agent endpoint config 1017 enforcement=always
  health-agent endpoint delete 1017";

const LIST_EXAMPLES: &str = "\
Examples:
  health-agent endpoint list
  health-agent endpoint list -o json
  health-agent endpoint list --watch";

const GET_EXAMPLES: &str = "\
Examples:
  health-agent endpoint get 1017
  health-agent endpoint get 1017 | jq .repairs";

const CREATE_EXAMPLES: &str = "\
Examples:
  health-agent endpoint create --netns /run/netns/web --label app=web --label k8s:zone=a
  health-agent endpoint create --netns /proc/4711/ns/net --container-id 3f2a --ipv4 10.244.1.9";

const DELETE_EXAMPLES: &str = "\
Examples:
  health-agent endpoint delete 1017
  health-agent endpoint delete --container-id 3f2a
  health-agent endpoint delete --netns /run/netns/web";

const LOG_EXAMPLES: &str = "\
Examples:
  health-agent endpoint log 1017
  health-agent endpoint log 1017 -o json";

const HEALTH_EXAMPLES: &str = "\
Examples:
  health-agent endpoint health 1017";

const LABELS_EXAMPLES: &str = "\
Examples:
  health-agent endpoint labels 1017 --add app=web --remove canary";

const CONFIG_EXAMPLES: &str = "\
Without settings, shows those in force. A change regenerates the endpoint, and lasts until
the next one, also over restarts of the agent.

Settings:
  enforcement=default   enforce policy as --policy-mode says
  enforcement=always    drop everything that no rule allows, in both directions
  enforcement=never     let everything pass
  conntrack=on          an answer to an allowed packet passes
  conntrack=off         no conntrack entries; policy judges each packet by itself, answers too
  debug=on              `monitor` shows the packets that pass to the endpoint and from it
  debug=off             it does not

Examples:
  health-agent endpoint config 1017
  health-agent endpoint config 1017 enforcement=never
  health-agent endpoint config 1017 conntrack=off debug=on";

/// Commands of `endpoint`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum EndpointCommand {
    /// List all endpoints
    #[command(after_help = LIST_EXAMPLES)]
    List(ListArgs),
    /// Show everything about one endpoint
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
    /// Show the log of one endpoint
    #[command(after_help = LOG_EXAMPLES)]
    Log(ShowArgs),
    /// Show the health of one endpoint
    #[command(after_help = HEALTH_EXAMPLES)]
    Health(ShowArgs),
    /// Create an endpoint in a network namespace
    #[command(after_help = CREATE_EXAMPLES)]
    Create(CreateArgs),
    /// Delete endpoints; succeed if there are none
    #[command(after_help = DELETE_EXAMPLES)]
    Delete(DeleteArgs),
    /// Change the labels of an endpoint, and thereby its identity
    #[command(after_help = LABELS_EXAMPLES)]
    Labels(LabelsArgs),
    /// Show or change the settings of an endpoint
    #[command(after_help = CONFIG_EXAMPLES)]
    Config(ConfigArgs),
}

/// Flags of `endpoint list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// Omit the column names
    #[arg(long)]
    no_headers: bool,
    /// Keep showing changes of endpoints, one JSON object per line
    #[arg(long, conflicts_with_all = ["no_headers", "output"])]
    watch: bool,
    /// Output format
    #[command(flatten)]
    output: OutputArgs,
}

/// Flags of `endpoint get`.
#[derive(Args, Debug)]
pub struct GetArgs {
    /// Endpoint id
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4095))]
    id: u16,
    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "json")]
    output: Format,
}

/// Flags of `endpoint log` and `endpoint health`.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// Endpoint id
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4095))]
    id: u16,
    /// Output format
    #[command(flatten)]
    output: OutputArgs,
}

/// Flags of `endpoint create`.
#[derive(Args, Debug)]
pub struct CreateArgs {
    // Replaces the global option of this name, which is of no use to commands that talk to an agent.
    /// Path of the network namespace
    #[arg(long, value_name = "PATH", value_parser = absolute_path())]
    netns: PathBuf,
    /// Label as [SOURCE:]KEY[=VALUE] (repeatable)
    #[arg(long = "label", value_name = "LABEL")]
    labels: Vec<Label>,
    /// Name of the endpoint
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Container of the endpoint
    #[arg(long, value_name = "ID")]
    container_id: Option<String>,
    /// Name of the device in the namespace [default: eth0]
    #[arg(long, value_name = "NAME")]
    ifname: Option<String>,
    /// Route the namespace's outbound traffic through it [default: unless another endpoint does]
    #[arg(long, value_name = "BOOL", action = clap::ArgAction::Set)]
    default_route: Option<bool>,
    /// IPv4 address of the endpoint
    #[arg(long, value_name = "ADDRESS")]
    ipv4: Option<Ipv4Addr>,
    /// IPv6 address of the endpoint
    #[arg(long, value_name = "ADDRESS")]
    ipv6: Option<Ipv6Addr>,
    /// Output format
    #[command(flatten)]
    output: OutputArgs,
}

/// Flags of `endpoint delete`.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
pub struct DeleteArgs {
    /// Endpoint id
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4095))]
    id: Option<u16>,
    /// Delete the endpoint of this container
    #[arg(long, value_name = "ID")]
    container_id: Option<String>,
    /// Delete all endpoints created with this network namespace path
    #[arg(long, value_name = "PATH", value_parser = absolute_path())]
    netns: Option<PathBuf>,
}

/// Flags of `endpoint config`.
#[derive(Args, Debug)]
pub struct ConfigArgs {
    /// Endpoint id
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4095))]
    id: u16,
    /// Setting to change, NAME=VALUE
    #[arg(value_name = "SETTING", value_parser = parse_setting)]
    settings: Vec<EndpointSettingsChange>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Parses `enforcement=MODE`, `conntrack=on`, `debug=off` and the like.
fn parse_setting(text: &str) -> Result<EndpointSettingsChange, &'static str> {
    const EXPECTED: &str =
        "expected enforcement=default, always or never, conntrack=on or off, or debug=on or off";
    let (name, value) = text.split_once('=').ok_or(EXPECTED)?;
    let switch = || match value {
        "on" => Ok(Some(true)),
        "off" => Ok(Some(false)),
        _ => Err(EXPECTED),
    };
    let mut change = EndpointSettingsChange::default();
    match name {
        "enforcement" => {
            let mode = PolicyMode::from_str(value, false).map_err(|_| EXPECTED)?;
            change.enforcement = Some(mode);
        }
        "conntrack" => change.conntrack = switch()?,
        "debug" => change.debug = switch()?,
        _ => return Err(EXPECTED),
    }
    Ok(change)
}

/// Flags of `endpoint labels`.
#[derive(Args, Debug)]
pub struct LabelsArgs {
    /// Endpoint id
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4095))]
    id: u16,
    /// Label to add; replaces one with the same source and key (repeatable)
    #[arg(long = "add", value_name = "LABEL")]
    add: Vec<Label>,
    /// Label to remove, by source and key (repeatable)
    #[arg(long = "remove", value_name = "LABEL")]
    remove: Vec<Label>,
    /// Output format
    #[command(flatten)]
    output: OutputArgs,
}

impl EndpointCommand {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        match self {
            Self::List(args) => args.execute(client).await,
            Self::Get(args) => {
                let endpoint: Endpoint = client.get(&format!("/v1/endpoints/{}", args.id)).await?;
                args.output.print_object(&endpoint, |one| {
                    endpoints_table(std::slice::from_ref(one), true)
                })
            }
            Self::Log(args) => {
                let path = format!("/v1/endpoints/{}/log", args.id);
                let log: Vec<LogEntry> = client.get(&path).await?;
                args.output.output.print_rows(&log, log_table)
            }
            Self::Health(args) => {
                let path = format!("/v1/endpoints/{}/healthz", args.id);
                let health: EndpointHealth = client.get(&path).await?;
                args.output.output.print_object(&health, health_table)
            }
            Self::Create(args) => args.execute(client).await,
            Self::Delete(args) => args.execute(client).await,
            Self::Labels(args) => args.execute(client).await,
            Self::Config(args) => args.execute(client).await,
        }
    }
}

impl ListArgs {
    async fn execute(self, client: &Client) -> anyhow::Result<()> {
        if self.watch {
            return watch(client).await;
        }
        let endpoints: Vec<Endpoint> = client.get("/v1/endpoints").await?;
        let table = |rows: &[Endpoint]| endpoints_table(rows, !self.no_headers);
        self.output.output.print_rows(&endpoints, table)
    }
}

/// Prints endpoints as they change, until the reader goes away or the agent stops.
async fn watch(client: &Client) -> anyhow::Result<()> {
    let mut printed = Ok(());
    // The initial endpoints are collected, then printed together.
    let mut first = BTreeMap::new();
    let mut is_listed = false;
    let watched = client.watch("/v1/endpoints?watch=true", |event| {
        match event {
            EndpointEvent::Updated { endpoint } if !is_listed => {
                first.insert(endpoint.id, endpoint);
                return ControlFlow::Continue(());
            }
            EndpointEvent::Listed => is_listed = true,
            _ => {}
        }
        let wrote = print_more(|out| {
            for endpoint in std::mem::take(&mut first).into_values() {
                write_json_line(out, &EndpointEvent::Updated { endpoint })?;
            }
            write_json_line(out, &event)?;
            out.flush()
        });
        wrote.unwrap_or_else(|error| {
            printed = Err(error);
            ControlFlow::Break(())
        })
    });
    watched.await?;
    printed
}
