//! `health-agent completion`: completion scripts.

use clap::Args;
use clap_complete::Shell;

use super::output::print;

const EXAMPLES: &str = "\
Examples:
  source <(health-agent completion bash)
  health-agent completion zsh > ~/.zfunc/_health-agent
  health-agent completion fish > ~/.config/fish/completions/health-agent.fish";

/// Flags of `completion`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CompletionArgs {
    /// Shell to print the script for
    shell: Shell,
}

impl CompletionArgs {
    pub(super) fn execute(self) -> anyhow::Result<()> {
        let mut script = Vec::new();
        let mut command = super::command();
        let name = command.get_name().to_owned();
        clap_complete::generate(self.shell, &mut command, name, &mut script);
        print(|out| out.write_all(&script))
    }
}
