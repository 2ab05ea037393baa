//! `health-agent cleanup`: removes what an agent left on this machine.

use clap::Args;

use super::output::OutputArgs;
use crate::config::Location;

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
        let removed = crate::agent::cleanup(location).await?;
        self.output.output.print_rows(&removed, removed_text)
    }
}

fn removed_text(removed: &[String]) -> String {
    if removed.is_empty() {
        return "nothing to remove\n".to_owned();
    }
    removed
        .iter()
        .map(|what| format!("removed {what}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_removed_is_named() {
        assert_eq!(removed_text(&[]), "nothing to remove\n");
        let removed = ["device lxc_health".to_owned(), "pins".to_owned()];
        assert_eq!(
            removed_text(&removed),
            "removed device lxc_health\nremoved pins\n"
        );
    }
}
