//! `health-agent cleanup`: removes what an agent left on this machine.

use clap::Args;
use health_model::settings::Location;
use serde::Serialize;

use super::output::OutputArgs;

const EXAMPLES: &str = "\
Examples:
  health-agent cleanup
  health-agent cleanup --instance hnode1 --runtime-dir /run/health-agent/hnode1";

/// Flags of `cleanup`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CleanupArgs {
    #[command(flatten)]
    output: OutputArgs,
}

impl CleanupArgs {
    pub(super) async fn execute(self, location: &Location) -> anyhow::Result<()> {
        let removed: Vec<RemovedRow> = crate::agent::cleanup(location)
            .await?
            .into_iter()
            .map(|removed| RemovedRow { removed })
            .collect();
        self.output.output.print_rows(&removed, removed_text)
    }
}

/// Something that is gone.
#[derive(Debug, Serialize)]
struct RemovedRow {
    removed: String,
}

fn removed_text(removed: &[RemovedRow]) -> String {
    if removed.is_empty() {
        return "nothing to remove\n".to_owned();
    }
    removed
        .iter()
        .map(|RemovedRow { removed }| format!("removed {removed}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_removed_is_named() {
        assert_eq!(removed_text(&[]), "nothing to remove\n");
        let removed = ["device lxc_health", "pins"].map(|what| RemovedRow {
            removed: what.to_owned(),
        });
        assert_eq!(
            removed_text(&removed),
            "removed device lxc_health\nremoved pins\n"
        );
    }
}
