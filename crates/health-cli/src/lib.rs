//! The command line: one file per command, plus shared code. Commands query an agent through `health-api`, or read the
//! pinned maps themselves. The binary passes in the daemon as [`Daemon`].

#![forbid(unsafe_code)]

mod api;
mod bpf;
mod cleanup;
mod cni;
mod completion;
mod config;
mod config_check;
mod daemon;
mod endpoint;
pub mod exit;
mod identity;
mod monitor;
mod node;
mod output;
mod parse;
mod path_mtu;
mod policy;
mod probe;
pub mod run;
mod screen;
mod service;
mod status;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use exit::Failure;
use health_model::settings::{InvalidSetting, Location};
use health_settings::absolute_path;

pub use self::api::ApiArgs;
pub use self::daemon::{Daemon, Task};
pub use self::parse::{ParseError, command, parse, reread};

const EXAMPLES: &str = "\
Examples:
  health-agent run                    Run the daemon
  health-agent status                 Show the connectivity to all nodes
  health-agent status --watch         Keep showing it, and what changes
  health-agent node get host2         Show everything about a node
  health-agent monitor --type drop    Show packets as they are dropped
  health-agent bpf rtt list -o json   Show round-trip times as the kernel measured them
  health-agent help status            Explain a command";

/// Report the connectivity and health of Linux hosts
#[derive(Debug, Parser)]
#[command(name = "health-agent", version, after_help = EXAMPLES)]
pub struct Cli {
    /// Selects the agent.
    #[command(flatten)]
    pub global: GlobalArgs,
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command. The daemon and the other commands take the same ones, so that they find each other.
#[derive(Args, Debug)]
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Name that distinguishes several agents on one machine
    #[arg(
        long,
        global = true,
        env = "HEALTH_AGENT_INSTANCE",
        value_name = "NAME",
        default_value = Location::INSTANCE
    )]
    pub instance: String,
    /// Folder of the agent's socket and pid file
    #[arg(
        long,
        global = true,
        env = "HEALTH_AGENT_RUNTIME_DIR",
        value_name = "DIR",
        default_value = Location::RUNTIME_DIR
    )]
    pub runtime_dir: PathBuf,
    /// Folder of state that survives a reboot
    #[arg(
        long,
        global = true,
        env = "HEALTH_AGENT_STATE_DIR",
        value_name = "DIR",
        default_value = Location::STATE_DIR
    )]
    pub state_dir: PathBuf,
    /// Mounted bpffs; maps and programs are pinned in health/<INSTANCE>
    #[arg(
        long,
        global = true,
        env = "HEALTH_AGENT_BPF_ROOT",
        value_name = "DIR",
        default_value = Location::BPF_ROOT
    )]
    pub bpf_root: PathBuf,
    /// Use the network namespace at PATH instead of the current one
    #[arg(long, global = true, env = "HEALTH_AGENT_NETNS", value_name = "PATH", value_parser = absolute_path())]
    pub netns: Option<PathBuf>,
    /// How to reach the agent's API.
    #[command(flatten)]
    pub api: ApiArgs,
}

impl GlobalArgs {
    /// The location of the selected agent's files.
    pub fn location(&self) -> Result<Location, InvalidSetting> {
        Location {
            instance: self.instance.clone(),
            runtime_dir: self.runtime_dir.clone(),
            state_dir: self.state_dir.clone(),
            bpf_root: self.bpf_root.clone(),
        }
        .validated()
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon until SIGINT or SIGTERM
    ///
    /// Each setting is a flag, an environment variable (HEALTH_AGENT_PROBE_INTERVAL for --probe-interval) and a key of
    /// the settings file. A flag takes precedence over a variable, and a variable over a file. `health-agent config`
    /// shows the settings in force and where each comes from.
    Run(Box<run::RunArgs>),
    /// Show the connectivity to all nodes
    Status(status::StatusArgs),
    /// Probe the path MTU to other nodes
    PathMtu(path_mtu::PathMtuArgs),
    /// Show the nodes and their registries
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// Show, create and delete endpoints of this node
    #[command(subcommand)]
    Endpoint(endpoint::EndpointCommand),
    /// Show the security identities that this node knows
    #[command(subcommand)]
    Identity(identity::IdentityCommand),
    /// Manage and trace network policy
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Show container probes, and try those of a manifest
    #[command(subcommand)]
    Probe(probe::ProbeCommand),
    /// Show the services that this node serves
    #[command(subcommand)]
    Service(service::ServiceCommand),
    /// Show the pinned maps and programs, with or without an agent
    #[command(subcommand)]
    Bpf(bpf::BpfCommand),
    /// Connect containers as a CNI plugin
    Cni(cni::CniArgs),
    /// Show drops and flows as they happen
    Monitor(monitor::MonitorArgs),
    /// Show the agent's settings, check settings files, or show what the kernel supports
    Config(config::ConfigArgs),
    /// Remove everything that an agent left on this machine, or only its services
    Cleanup(cleanup::CleanupArgs),
    /// Print a shell completion script
    Completion(completion::CompletionArgs),
}

impl Command {
    /// Runs the command for the agent at `location`, or for the one that `api` names. Returns exit code 0, or one
    /// specific to the command.
    pub fn execute<'a>(
        self,
        location: Location,
        api: &'a ApiArgs,
        daemon: &'a dyn Daemon,
    ) -> Task<'a, ExitCode, Failure> {
        Box::pin(self.execute_with(location, api, daemon))
    }

    async fn execute_with(
        self,
        location: Location,
        api: &ApiArgs,
        daemon: &dyn Daemon,
    ) -> Result<ExitCode, Failure> {
        if let Some(what) = self.local_part() {
            api.require_local(what)?;
        }
        let client = || api.client(&location);
        match self {
            Self::Run(args) => daemon.run(args.settings).await?,
            Self::Status(args) => return Ok(args.execute(&client()?, &location).await?),
            Self::PathMtu(args) => args.execute(&client()?).await?,
            Self::Node(command) => command.execute(&client()?, &location).await?,
            Self::Endpoint(command) => command.execute(&client()?).await?,
            Self::Identity(command) => command.execute(&client()?).await?,
            Self::Policy(command) => command.execute(&client()?).await?,
            Self::Probe(command) => return Ok(command.execute(&client()?, &location).await?),
            Self::Service(command) => return Ok(command.execute(&client()?).await?),
            Self::Bpf(command) => command.execute(&client()?, &location).await?,
            Self::Cni(args) => return Ok(args.execute(&location).await?),
            Self::Monitor(args) => args.execute(&client()?).await?,
            Self::Config(args) => args.execute(&client()?, location).await?,
            Self::Cleanup(args) => args.execute(&location, daemon).await?,
            Self::Completion(args) => args.execute()?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// What the command needs on this machine besides the agent's API, if anything.
    const fn local_part(&self) -> Option<&'static str> {
        match self {
            Self::Bpf(_) => Some("reads the maps of this machine"),
            Self::Cni(_) => Some("connects containers of this machine"),
            Self::Cleanup(_) => Some("removes what agents left on this machine"),
            _ => None,
        }
    }
}
