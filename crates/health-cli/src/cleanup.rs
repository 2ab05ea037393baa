//! `health-agent cleanup`: removes what an agent left on this machine.

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use health_model::settings::Location;
use health_settings::ServiceProxyMode;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use super::Daemon;
use super::output::OutputArgs;

const EXAMPLES: &str = "\
Examples:
  health-agent cleanup
  health-agent cleanup --services ipvs
  health-agent cleanup --stay
  health-agent cleanup --instance hnode1 --runtime-dir /run/health-agent/hnode1";

/// Flags of `cleanup`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CleanupArgs {
    /// Remove only the services of this proxy mode; connections of ebpf continue, those of ipvs end
    #[arg(long, value_enum, value_name = "MODE")]
    services: Option<ServiceRules>,
    /// Do not exit after the removal, but at SIGTERM or SIGINT, like a pod of a DaemonSet
    #[arg(long)]
    stay: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// The proxy modes whose services are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ServiceRules {
    /// Frontends, backends and source ranges in the maps
    Ebpf,
    /// Virtual servers, sets, rules and the device with the service addresses
    Ipvs,
    /// Both
    All,
}

impl ServiceRules {
    const fn modes(self) -> &'static [ServiceProxyMode] {
        match self {
            Self::Ebpf => &[ServiceProxyMode::Ebpf],
            Self::Ipvs => &[ServiceProxyMode::Ipvs],
            Self::All => &[ServiceProxyMode::Ebpf, ServiceProxyMode::Ipvs],
        }
    }
}

impl CleanupArgs {
    pub(super) async fn execute(
        self,
        location: &Location,
        daemon: &dyn Daemon,
    ) -> anyhow::Result<()> {
        let removed = match self.services {
            None => daemon.cleanup(location).await?,
            Some(rules) => daemon.cleanup_services(location, rules.modes()).await?,
        };
        let removed: Vec<RemovedRow> = removed
            .into_iter()
            .map(|removed| RemovedRow { removed })
            .collect();
        // Before the report, after which callers may end this process.
        let ended = self.stay.then(until_ended).transpose()?;
        self.output.output.print_rows(&removed, removed_text)?;
        if let Some(ended) = ended {
            ended.await;
        }
        Ok(())
    }
}

/// Handles SIGINT and SIGTERM, which the first process of a container ignores otherwise, and waits for one of them.
fn until_ended() -> anyhow::Result<impl Future<Output = ()>> {
    let mut interrupted =
        signal(SignalKind::interrupt()).context("cannot install the SIGINT handler")?;
    let mut terminated =
        signal(SignalKind::terminate()).context("cannot install the SIGTERM handler")?;
    Ok(async move {
        tokio::select! {
            _ = interrupted.recv() => {}
            _ = terminated.recv() => {}
        }
    })
}

/// A removed item.
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
