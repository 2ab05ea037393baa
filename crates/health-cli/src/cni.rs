//! `health-agent cni`: the CNI plugin, called by container runtimes, and its installation.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use health_cni::install::Installation;
use health_model::settings::Location;
use serde::Serialize;

use super::output::OutputArgs;

const HELP: &str = "\
Container runtimes call this command without a subcommand, with parameters in the environment and on
stdin as in the CNI specification. `install` puts the plugin and a network configuration where they
look for both.

Examples:
  health-agent cni install
  health-agent cni install --bin-dir /host/opt/cni/bin --config-dir /host/etc/cni/net.d
  health-agent cni uninstall
  echo '{\"cniVersion\": \"1.0.0\"}' | CNI_COMMAND=VERSION health-agent cni";

const INSTALL_HELP: &str = "\
Copies this program to the plugins as health-agent-cni, then writes the network configuration. Both
replace earlier ones.

Examples:
  health-agent cni install
  health-agent cni install --bin-dir /host/opt/cni/bin --config-dir /host/etc/cni/net.d";

const UNINSTALL_HELP: &str = "\
Remove the containers first: without the plugin, runtimes cannot disconnect them.

Examples:
  health-agent cni uninstall";

/// The CNI plugin; has no flags of its own.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct CniArgs {
    #[command(subcommand)]
    command: Option<CniCommand>,
}

#[derive(Debug, Subcommand)]
enum CniCommand {
    /// Install the plugin for this host's container runtimes
    #[command(after_help = INSTALL_HELP)]
    Install {
        #[command(flatten)]
        folders: Folders,
        /// Connect new containers instead of the plugin that is configured here; it connects them again after
        /// `uninstall`
        #[arg(long)]
        before_others: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Remove what `install` installed
    #[command(after_help = UNINSTALL_HELP)]
    Uninstall {
        #[command(flatten)]
        folders: Folders,
        #[command(flatten)]
        output: OutputArgs,
    },
}

/// Where container runtimes look.
#[derive(Args, Debug)]
struct Folders {
    /// Folder of the plugins
    #[arg(long, value_name = "DIR", default_value = "/opt/cni/bin")]
    bin_dir: PathBuf,
    /// Folder of the network configurations
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    config_dir: PathBuf,
}

impl From<Folders> for Installation {
    fn from(folders: Folders) -> Self {
        Self {
            bin_dir: folders.bin_dir,
            config_dir: folders.config_dir,
        }
    }
}

impl CniArgs {
    pub(super) async fn execute(self, location: &Location) -> anyhow::Result<ExitCode> {
        match self.command {
            None => return Ok(health_cni::run(location).await),
            Some(CniCommand::Install {
                folders,
                before_others,
                output,
            }) => {
                let program =
                    std::env::current_exe().context("cannot find this program's own file")?;
                let files = Installation::from(folders).install(&program, before_others)?;
                print_files("installed", files, &output)?;
            }
            Some(CniCommand::Uninstall { folders, output }) => {
                print_files("removed", Installation::from(folders).uninstall()?, &output)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// A file that was installed or removed.
#[derive(Debug, Serialize)]
struct FileRow {
    file: PathBuf,
}

fn print_files(done: &str, files: Vec<PathBuf>, output: &OutputArgs) -> anyhow::Result<()> {
    let rows: Vec<_> = files.into_iter().map(|file| FileRow { file }).collect();
    output.output.print_rows(&rows, |rows| {
        let lines = rows
            .iter()
            .map(|row| format!("{done} {}\n", row.file.display()));
        lines.collect()
    })
}
