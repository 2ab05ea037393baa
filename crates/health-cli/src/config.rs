//! `health-agent config`: the agent's settings, settings files, and the kernel's features.

use clap::{Args, Subcommand};
use health_api::client::Client;
use health_datapath::features::{Need, Report};
use health_datapath::kernel::{UnmetRequirement, choose};
use health_model::settings::{AttachMode, Location};
use health_settings::SettingList;
use nix::unistd::Uid;

use super::config_check::CheckArgs;
use super::exit::Failure;
use super::output::{OutputArgs, print, table};
use super::parse::run_command;

const EXAMPLES: &str = "\
Examples:
  health-agent config
  health-agent config -o json | jq '.settings[] | select(.name == \"probe-interval\").value'
  health-agent config check /etc/health-agent/config.yaml
  health-agent config example > /etc/health-agent/config.yaml
  health-agent config schema > config.schema.json
  health-agent config --probe-kernel";

/// Flags of `config`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct ConfigArgs {
    #[command(subcommand)]
    files: Option<FileCommand>,
    /// Test as root which features of an agent the kernel supports; needs no agent
    #[arg(long)]
    probe_kernel: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// Commands about settings files. They need no agent.
#[derive(Debug, Subcommand)]
enum FileCommand {
    /// Check settings files, node registries, policies, and manifests of services and pods, without an agent
    Check(CheckArgs),
    /// Print a settings file with all settings and their defaults, commented out
    #[command(after_help = "\
Examples:
  health-agent config example > /etc/health-agent/config.yaml")]
    Example,
    /// Print the JSON Schema of settings files
    #[command(after_help = "\
Examples:
  health-agent config schema > config.schema.json")]
    Schema,
    /// Print the reference of all settings, in Markdown
    #[command(after_help = "\
Examples:
  health-agent config reference > settings.md")]
    Reference,
}

impl FileCommand {
    fn execute(self, location: Location) -> Result<(), Failure> {
        let text = match self {
            Self::Check(args) => args.execute(location)?,
            Self::Example => health_settings::example(&run_command()),
            Self::Schema => format!("{:#}\n", health_settings::schema(&run_command())),
            Self::Reference => health_settings::reference(&run_command()),
        };
        Ok(print(|out| out.write_all(text.as_bytes()))?)
    }
}

impl ConfigArgs {
    pub(super) async fn execute(self, client: &Client, location: Location) -> Result<(), Failure> {
        if let Some(command) = self.files {
            return command.execute(location);
        }
        Ok(self.show(client, &location).await?)
    }

    async fn show(self, client: &Client, location: &Location) -> anyhow::Result<()> {
        if self.probe_kernel {
            anyhow::ensure!(Uid::effective().is_root(), UnmetRequirement::NotRoot);
            let report = Report::of_this_kernel(&location.bpf_root);
            self.output.output.print_object(&report, report_table)?;
            // Lets scripts check whether an agent would start.
            choose(&report, &location.bpf_root, AttachMode::Auto)?;
            return Ok(());
        }
        let settings: SettingList = client.get("/v1/config").await?;
        self.output.output.print_object(&settings, config_table)
    }
}

/// One feature per line.
fn report_table(report: &Report) -> String {
    let rows = report.features.iter().map(|feature| {
        let need = match feature.need {
            Need::Required => "required",
            Need::OneOfTwo => "one of two",
            Need::Optional => "optional",
        };
        let available = if feature.available { "yes" } else { "no" };
        [feature.name, available, need, feature.without]
    });
    let features = table(["FEATURE", "AVAILABLE", "NEED", "WITHOUT IT"], rows);
    format!("kernel {}\n\n{features}", report.kernel)
}

/// One setting per line.
fn config_table(list: &SettingList) -> String {
    let rows = list.settings.iter().map(|setting| {
        [
            setting.group.clone(),
            setting.name.clone(),
            setting.text(),
            setting.origin.to_string(),
        ]
    });
    table(["GROUP", "SETTING", "VALUE", "FROM"], rows)
}
