//! `health-agent identity`: the security identities that this node knows.

use clap::{Args, Subcommand};
use health_api::client::Client;
use health_model::api::IdentityEntry;
use health_model::identity::Identity;

use super::output::{Cell, Format, OutputArgs, comma_separated, table};

const EXAMPLES: &str = "\
Examples:
  health-agent identity list
  health-agent identity get 30217
  health-agent identity get reserved:health";

const LIST_EXAMPLES: &str = "\
Examples:
  health-agent identity list
  health-agent identity list -o jsonl | jq -r 'select(.references == []) | .id'";

const GET_EXAMPLES: &str = "\
Examples:
  health-agent identity get 30217
  health-agent identity get reserved:health -o table";

/// Commands of `identity`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum IdentityCommand {
    /// List all identities: reserved ones, the cluster's, and this node's own for CIDRs
    #[command(after_help = LIST_EXAMPLES)]
    List(OutputArgs),
    /// Show one identity
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
}

/// Flags of `identity get`.
#[derive(Args, Debug)]
pub struct GetArgs {
    /// Number of the identity, or the name of a reserved one
    #[arg(value_name = "ID")]
    id: Identity,
    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "json")]
    output: Format,
}

impl IdentityCommand {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        match self {
            Self::List(args) => {
                let identities: Vec<IdentityEntry> = client.get("/v1/identities").await?;
                args.output.print_rows(&identities, identities_table)
            }
            Self::Get(args) => {
                let path = format!("/v1/identities/{}", args.id);
                let identity: IdentityEntry = client.get(&path).await?;
                args.output
                    .print_object(&identity, |one| identities_table(std::slice::from_ref(one)))
            }
        }
    }
}

/// Formats identities with one label per line. The users of an identity are left blank if they are not counted.
fn identities_table(identities: &[IdentityEntry]) -> String {
    let rows = identities.iter().map(|identity| {
        let references = identity.references.as_ref();
        [
            Cell::from(identity.id.to_string()),
            Cell::of_lines(&identity.labels),
            references.map(comma_separated).unwrap_or_default().into(),
        ]
    });
    table(["ID", "LABELS", "REFERENCES"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_takes_a_line_a_label() {
        let entry = |id, labels: &[&str], references: Option<&[&str]>| IdentityEntry {
            id,
            labels: labels.iter().map(ToString::to_string).collect(),
            references: references.map(|all| all.iter().map(ToString::to_string).collect()),
        };
        let shown = identities_table(&[
            entry(4, &["reserved:health"], None),
            entry(
                30_217,
                &["k8s:app=dns", "k8s:tier=infra"],
                Some(&["a", "b"]),
            ),
            entry(30_218, &["k8s:app=web"], Some(&[])),
        ]);
        assert_eq!(
            shown,
            "\
ID      LABELS            REFERENCES
4       reserved:health
30217   k8s:app=dns       a,b
        k8s:tier=infra
30218   k8s:app=web       -
"
        );
    }
}
