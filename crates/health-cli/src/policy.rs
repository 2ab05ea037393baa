//! `health-agent policy`: network policy.

use std::fs;
use std::io::{self, Read as _};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use health_api::client::Client;
use health_model::api::{
    PolicyChange, PolicyDocument, PolicyList, PolicyModeChange, PolicyModeStatus, RefusedPolicy,
    TraceEndRequest, TraceQuery,
};
use health_model::policy::{Direction, L4, PolicyMode};
use jiff::Timestamp;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use super::output::{Format, OutputArgs, print, printable, table, write_yaml};

const EXAMPLES: &str = "\
Examples:
  health-agent policy import policies.yaml
  kubectl get cnp,netpol -A -o json | health-agent policy import -
  health-agent policy get
  health-agent policy delete shop/web
  health-agent policy mode always
  health-agent policy trace --src-endpoint 17 --dst k8s:app=web --dport 80/TCP";

const IMPORT_EXAMPLES: &str = "\
Imports all policies of the file, or none. Kinds: CiliumNetworkPolicy,
CiliumClusterwideNetworkPolicy, NetworkPolicy, lists of them, and a bare list of rules.
Skips objects of other kinds, and names them.

Examples:
  health-agent policy import policies.yaml
  health-agent policy import - < policies.json";

const GET_EXAMPLES: &str = "\
Examples:
  health-agent policy get
  health-agent policy get shop/web -o yaml
  health-agent policy get --labels team=a -o json";

const DELETE_EXAMPLES: &str = "\
Examples:
  health-agent policy delete \"CiliumNetworkPolicy shop/web\"
  health-agent policy delete --labels name=init
  health-agent policy delete --all";

const MODE_EXAMPLES: &str = "\
A mode that this command sets takes precedence over --policy-mode, wherever that comes from.
It lasts over reloads and restarts, until `policy mode settings` gives it back.

Examples:
  health-agent policy mode
  health-agent policy mode always
  health-agent policy mode settings";

/// The origin of a mode that a command has set.
const COMMANDED: &str = "set by `policy mode`";

const TRACE_EXAMPLES: &str = "\
Examples:
  health-agent policy trace --src-endpoint 17 --dst-endpoint 18 --dport 80/TCP
  health-agent policy trace --src k8s:app=web --dst reserved:world --dport 53/UDP
  health-agent policy trace --src-ip 192.0.2.7 --dst-identity 30217 --dport 8/ICMP \\
    --direction ingress";

/// Commands of `policy`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum PolicyCommand {
    /// Import policies from a file
    #[command(after_help = IMPORT_EXAMPLES)]
    Import(ImportArgs),
    /// Show policies as they were imported
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
    /// Delete policies
    #[command(after_help = DELETE_EXAMPLES)]
    Delete(DeleteArgs),
    /// Show or set when policy is enforced
    #[command(after_help = MODE_EXAMPLES)]
    Mode(ModeArgs),
    /// Explain whether a packet passes, and why
    #[command(after_help = TRACE_EXAMPLES)]
    Trace(TraceArgs),
}

/// Flags of `policy import`.
#[derive(Args, Debug)]
pub struct ImportArgs {
    /// File in YAML or JSON; - for stdin
    file: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
}

/// Flags of `policy get`.
#[derive(Args, Debug)]
pub struct GetArgs {
    /// Policy as namespace/name, or with its kind in front
    name: Option<String>,
    /// Only policies with a rule that has all of these labels
    #[arg(long, value_name = "LABEL,...", conflicts_with = "name")]
    labels: Option<String>,
    #[command(flatten)]
    output: OutputArgs<PolicyFormat>,
}

/// How policies are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum PolicyFormat {
    /// Names
    Table,
    /// Documents in YAML
    Yaml,
    /// One JSON document
    Json,
}

/// Flags of `policy delete`.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Which {
    /// Policy as namespace/name, or with its kind in front
    name: Option<String>,
    /// Delete policies with a rule that has all of these labels
    #[arg(long, value_name = "LABEL,...")]
    labels: Option<String>,
    /// Delete all policies
    #[arg(long)]
    all: bool,
}

/// Flags of `policy mode`.
#[derive(Args, Debug)]
pub struct ModeArgs {
    /// When policy is enforced
    #[arg(value_enum)]
    mode: Option<CommandedMode>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The mode to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CommandedMode {
    /// For the directions of an endpoint that a rule selects
    Default,
    /// For both directions of every endpoint
    Always,
    /// Only for endpoints whose labels are not known yet, if a rule selects them
    Never,
    /// As the settings say
    Settings,
}

impl From<CommandedMode> for Option<PolicyMode> {
    fn from(mode: CommandedMode) -> Self {
        match mode {
            CommandedMode::Default => Some(PolicyMode::Default),
            CommandedMode::Always => Some(PolicyMode::Always),
            CommandedMode::Never => Some(PolicyMode::Never),
            CommandedMode::Settings => None,
        }
    }
}

/// Flags of `policy trace`.
#[derive(Args, Debug)]
pub struct TraceArgs {
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    destination: DestinationArgs,
    /// Destination port and protocol; for ICMP the type
    #[arg(long, value_name = "PORT/PROTOCOL")]
    dport: L4,
    /// Check only one side: egress of the source, or ingress of the destination
    #[arg(long, value_enum)]
    direction: Option<Direction>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct SourceArgs {
    /// Labels of the source
    #[arg(long, value_name = "LABEL,...", value_delimiter = ',')]
    src: Vec<String>,
    /// Endpoint of this node as the source
    #[arg(long, value_name = "ID")]
    src_endpoint: Option<u16>,
    /// Identity of the source, by number or reserved name
    #[arg(long, value_name = "IDENTITY")]
    src_identity: Option<String>,
    /// Address of the source
    #[arg(long, value_name = "ADDRESS")]
    src_ip: Option<String>,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct DestinationArgs {
    /// Labels of the destination
    #[arg(long, value_name = "LABEL,...", value_delimiter = ',')]
    dst: Vec<String>,
    /// Endpoint of this node as the destination
    #[arg(long, value_name = "ID")]
    dst_endpoint: Option<u16>,
    /// Identity of the destination, by number or reserved name
    #[arg(long, value_name = "IDENTITY")]
    dst_identity: Option<String>,
    /// Address of the destination
    #[arg(long, value_name = "ADDRESS")]
    dst_ip: Option<String>,
}

impl PolicyCommand {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        match self {
            Self::Import(args) => args.execute(client).await,
            Self::Get(args) => args.execute(client).await,
            Self::Delete(args) => args.execute(client).await,
            Self::Mode(args) => args.execute(client).await,
            Self::Trace(args) => args.execute(client).await,
        }
    }
}

impl ImportArgs {
    async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let text = if self.file.as_os_str() == "-" {
            let mut text = Vec::new();
            io::stdin().lock().read_to_end(&mut text).map(|_| text)
        } else {
            fs::read(&self.file)
        };
        let text = text.with_context(|| format!("cannot read {}", self.file.display()))?;
        let change: PolicyChange = client.post_text("/v1/policies", text).await?;
        self.output.output.print_object(&change, change_text)
    }
}

impl GetArgs {
    async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let query = match (&self.name, &self.labels) {
            (Some(name), _) => format!("?name={}", escaped(name)),
            (None, Some(labels)) => format!("?labels={}", escaped(labels)),
            (None, None) => String::new(),
        };
        let list: PolicyList = client.get(&format!("/v1/policies{query}")).await?;
        match self.output.output {
            PolicyFormat::Table => print(|out| out.write_all(list_table(&list).as_bytes())),
            PolicyFormat::Yaml => print(|out| {
                for PolicyDocument { document, .. } in &list.policies {
                    out.write_all(b"---\n")?;
                    write_yaml(out, document)?;
                }
                Ok(())
            }),
            PolicyFormat::Json => Format::Json.print_object(&list, list_table),
        }
    }
}

impl DeleteArgs {
    async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let Which { name, labels, all } = &self.which;
        let query = match (name, labels) {
            (Some(name), _) => format!("name={}", escaped(name)),
            (None, Some(labels)) => format!("labels={}", escaped(labels)),
            (None, None) => format!("all={all}"),
        };
        let change: PolicyChange = client.delete(&format!("/v1/policies?{query}")).await?;
        self.output.output.print_object(&change, change_text)
    }
}

impl ModeArgs {
    async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let status = match self.mode {
            Some(mode) => {
                let change = PolicyModeChange { mode: mode.into() };
                client.patch("/v1/policies/mode", &change).await?
            }
            None => {
                let list: PolicyList = client.get("/v1/policies").await?;
                PolicyModeStatus {
                    mode: list.mode,
                    is_commanded: list.commanded_mode.is_some(),
                    is_in_force: true,
                }
            }
        };
        self.output.output.print_object(&status, status_text)
    }
}

/// The mode and its origin.
fn status_text(status: &PolicyModeStatus) -> String {
    let origin = match status.is_commanded {
        true => COMMANDED,
        false => "as the settings say",
    };
    let late = match status.is_in_force {
        true => "",
        false => "; not all endpoints follow it yet",
    };
    format!("mode {}, {origin}{late}\n", status.mode)
}

impl TraceArgs {
    async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let SourceArgs {
            src,
            src_endpoint,
            src_identity,
            src_ip,
        } = self.source;
        let DestinationArgs {
            dst,
            dst_endpoint,
            dst_identity,
            dst_ip,
        } = self.destination;
        let query = TraceQuery {
            source: end(src, src_endpoint, src_identity, src_ip),
            destination: end(dst, dst_endpoint, dst_identity, dst_ip),
            l4: self.dport,
            only: self.direction,
        };
        let answer: Value = client.post("/v1/policies/trace", &query).await?;
        let text = format!("{}\n", answer["text"].as_str().unwrap_or_default());
        self.output
            .output
            .print_object(&answer["trace"], |_| text.clone())
    }
}

fn end(
    labels: Vec<String>,
    endpoint: Option<u16>,
    identity: Option<String>,
    ip: Option<String>,
) -> TraceEndRequest {
    let endpoint = endpoint.map(TraceEndRequest::Endpoint);
    let identity = identity.map(TraceEndRequest::Identity);
    let ip = ip.map(TraceEndRequest::Ip);
    endpoint
        .or(identity)
        .or(ip)
        .unwrap_or(TraceEndRequest::Labels(labels))
}

/// Escapes a query value.
fn escaped(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

fn list_table(list: &PolicyList) -> String {
    let rows = list.policies.iter().map(|policy| {
        let since = policy.since.map_or_else(|| "-".to_owned(), to_the_second);
        [policy.name.clone(), policy.origin.to_string(), since]
    });
    let mut text = table(["POLICY", "ORIGIN", "SINCE"], rows);
    for RefusedPolicy {
        name,
        reason,
        since,
    } in &list.refused
    {
        let stays = list.policies.iter().any(|policy| policy.name == *name);
        text.push_str(&format!(
            "Refused since {}: {}: {}{}\n",
            to_the_second(*since),
            printable(name),
            printable(reason),
            if stays {
                "; the previous form stays in force"
            } else {
                ""
            }
        ));
    }
    text.push_str(&format!(
        "Revision {}, mode {}{}\n",
        list.revision,
        list.mode,
        match list.commanded_mode {
            Some(_) => format!(", {COMMANDED}"),
            None => String::new(),
        }
    ));
    text
}

fn to_the_second(time: Timestamp) -> String {
    format!("{time:.0}")
}

fn change_text(change: &PolicyChange) -> String {
    let lists = [
        ("added", &change.added),
        ("replaced", &change.replaced),
        ("unchanged", &change.unchanged),
        ("deleted", &change.deleted),
    ];
    let mut text = String::new();
    for (what, names) in lists {
        for name in names {
            text.push_str(&format!("{what} {}\n", printable(name)));
        }
    }
    if text.is_empty() {
        text.push_str("nothing to change\n");
    }
    for name in &change.skipped {
        text.push_str(&format!("skipped {name}: not a policy\n"));
    }
    let ms = change.took_ns as f64 / 1e6;
    text.push_str(&match change.is_in_force {
        true => format!("revision {} is in force after {ms:.0} ms\n", change.revision),
        false => format!(
            "revision {} is not in force everywhere after {ms:.0} ms; `health-agent status` shows why\n",
            change.revision
        ),
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_says_what_it_did_and_whether_it_is_in_force() {
        let change = PolicyChange {
            added: vec!["NetworkPolicy a/b".to_owned()],
            revision: 3,
            is_in_force: true,
            took_ns: 12_300_000,
            ..PolicyChange::default()
        };
        assert_eq!(
            change_text(&change),
            "added NetworkPolicy a/b\nrevision 3 is in force after 12 ms\n"
        );
        let skipping = PolicyChange {
            skipped: vec!["Service a/b".to_owned()],
            ..change
        };
        assert_eq!(
            change_text(&skipping).lines().nth(1),
            Some("skipped Service a/b: not a policy")
        );
        let nothing = change_text(&PolicyChange::default());
        assert!(nothing.starts_with("nothing to change\n"), "{nothing}");
        assert!(nothing.contains("not in force"), "{nothing}");
    }
}
