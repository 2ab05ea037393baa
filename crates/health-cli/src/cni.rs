//! `health-agent cni`: the CNI plugin, called by container runtimes.

use std::process::ExitCode;

use clap::Args;
use health_model::settings::Location;

const HELP: &str = "\
Container runtimes call this command, with parameters in the environment and on stdin as in the
CNI specification. Link it into their plugin folder, and name the link in a network configuration.

Examples:
  ln -s /usr/local/bin/health-agent /opt/cni/bin/health-agent-cni
  cat /etc/cni/net.d/10-health-agent.conflist
    {\"cniVersion\": \"1.0.0\", \"name\": \"health\",
     \"plugins\": [{\"type\": \"health-agent-cni\", \"labels\": {\"k8s:app\": \"web\"}}]}
  echo '{\"cniVersion\": \"1.0.0\"}' | CNI_COMMAND=VERSION health-agent cni";

/// The CNI plugin; has no flags of its own.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct CniArgs {}

impl CniArgs {
    pub(super) async fn execute(self, location: &Location) -> ExitCode {
        health_cni::run(location).await
    }
}
