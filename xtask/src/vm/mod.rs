//! Virtual machines: a kernel, an initramfs with the programs to run, and qemu.

mod accelerator;
mod archive;
mod bench;
mod cross;
mod guest;
mod kernel;
mod machine;
mod modules;
mod needs;
mod root;
mod suite;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use vm_init::{PlannedCommand, ProgramExit};

use self::guest::{CommandOutput, Guest, Outcome};
use self::kernel::{Kernel, TESTED};
use crate::arch::Arch;
use crate::process::run as run_command;
use crate::workspace::Workspace;
use crate::{packages, setup};

pub(crate) use self::bench::bench;
pub(crate) use self::suite::{Share, test};

/// The guest's folder for this workspace's programs.
const PROGRAMS: &str = "/usr/bin";

/// Arguments that select virtual machines, if any.
#[derive(clap::Args)]
pub(crate) struct Choice {
    /// Use a virtual machine with this Debian kernel, such as 6.1
    #[arg(long, value_name = "KERNEL")]
    vm: Option<String>,
    /// Processor architecture of the virtual machine
    #[arg(long, requires = "vm")]
    arch: Option<Arch>,
    #[command(flatten)]
    image: Image,
}

/// Arguments for a kernel from a file and for limits.
#[derive(clap::Args)]
pub(crate) struct Image {
    /// Use a virtual machine with the kernel in this file (bzImage)
    #[arg(long, value_name = "PATH", conflicts_with = "vm")]
    kernel_image: Option<PathBuf>,
    /// Folder with the modules of that kernel [default: next to it]
    #[arg(long, value_name = "DIR", requires = "kernel_image")]
    kernel_modules: Option<PathBuf>,
    /// Stop a virtual machine that takes longer than this
    #[arg(long, value_name = "SECONDS")]
    vm_limit: Option<u64>,
}

impl Choice {
    /// The selected kernels; empty without a virtual machine.
    pub(crate) fn kernels(&self, workspace: &Workspace) -> anyhow::Result<Vec<Kernel>> {
        if let Some(image) = &self.image.kernel_image {
            let modules = self.image.kernel_modules.as_deref();
            return Ok(vec![Kernel::of_image(image, modules)?]);
        }
        let versions = match self.vm.as_deref() {
            None => &[],
            Some("all") => &TESTED[..],
            Some(version) => &[version],
        };
        let arch = self.arch()?;
        versions
            .iter()
            .map(|version| Kernel::of_debian(workspace, version, arch))
            .collect()
    }

    pub(crate) fn wanted(&self) -> bool {
        self.vm.is_some() || self.image.kernel_image.is_some()
    }

    /// The selected architecture; by default this machine's. Images are for one architecture only.
    fn arch(&self) -> anyhow::Result<Arch> {
        match self.arch {
            Some(arch) => Ok(arch),
            None if self.image.kernel_image.is_some() => Ok(Arch::X86_64),
            None => Arch::own(),
        }
    }

    /// The selected time limit.
    pub(crate) fn limit(&self) -> Option<Duration> {
        self.image.vm_limit.map(Duration::from_secs)
    }
}

/// `cargo xtask vm`: any command in a virtual machine.
#[derive(clap::Args)]
pub(crate) struct CommandArgs {
    #[command(flatten)]
    choice: Choice,
    /// Leave out health-agent and bed, and do not build them
    #[arg(long)]
    tools_only: bool,
    /// Command to run, with the tools of the tests, health-agent and bed in its PATH
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<String>,
}

pub(crate) fn command(workspace: &Workspace, args: &CommandArgs) -> anyhow::Result<ExitCode> {
    if !args.choice.wanted() {
        bail!("which kernel? give --vm or --kernel-image");
    }
    let command = PlannedCommand::new(&args.command);
    let programs: &[&str] = if args.tools_only { &[] } else { CLUSTER };
    in_each(workspace, &args.choice, programs, &command)
}

/// The programs of a cluster. They are always built together, because cargo builds different dependencies for other
/// selections.
const CLUSTER: &[&str] = &["health-agent", "bed"];

/// Maximum time until a cluster gives its first answers. Under software emulation, the kernel's verifier alone takes
/// ten seconds per agent, and half a minute if the emulator shares its CPU.
const PATIENCE: Duration = Duration::from_secs(300);

/// `cargo xtask run` in virtual machines, with arguments for the bed.
pub(crate) fn run(
    workspace: &Workspace,
    choice: &Choice,
    words: &[String],
) -> anyhow::Result<ExitCode> {
    let patience = format!("--patience={}", PATIENCE.as_secs());
    let bed = [format!("{PROGRAMS}/bed"), patience]
        .into_iter()
        .chain(words.iter().cloned());
    in_each(workspace, choice, CLUSTER, &PlannedCommand::new(bed))
}

/// Runs a command in one virtual machine per kernel. Returns the first exit code that is not 0.
fn in_each(
    workspace: &Workspace,
    choice: &Choice,
    programs: &[&str],
    command: &PlannedCommand,
) -> anyhow::Result<ExitCode> {
    let arch = choice.arch()?;
    packages::require(&[packages::emulator(arch)])?;
    packages::require(packages::VM)?;
    if arch.is_own() {
        packages::require(packages::TESTS)?;
    }
    let kernels = choice.kernels(workspace)?;
    build_static(workspace, arch, programs)?;
    let mut code = 0;
    for kernel in &kernels {
        let mut guest = Guest::new(
            workspace,
            kernel,
            choice.limit(),
            workspace.static_binary(arch, "vm-init"),
        )?;
        guest.root.tools(SMALL_TOOLS.iter().copied())?;
        for program in programs {
            guest.root.program_at(
                &Path::new(PROGRAMS).join(program),
                &workspace.static_binary(arch, program),
            )?;
        }
        let probe = programs.contains(&"health-agent");
        let outcome = guest.run(probe, std::slice::from_ref(command), |_, heard| {
            pass_on(heard)
        })?;
        match code_of(outcome)? {
            Ended::InOrder(next) => code = first_failure(code, next),
            Ended::Interrupted(code) => return Ok(ExitCode::from(code)),
        }
    }
    Ok(ExitCode::from(code))
}

/// The exit code of a guest's commands: the first one that is not 0.
enum Ended {
    InOrder(u8),
    Interrupted(u8),
}

fn code_of(outcome: Outcome) -> anyhow::Result<Ended> {
    match outcome {
        Outcome::Done(ended) => {
            let codes = ended.into_iter().map(ProgramExit::exit_code);
            Ok(Ended::InOrder(codes.fold(0, first_failure)))
        }
        Outcome::Interrupted(Some(ended)) => Ok(Ended::Interrupted(ended.exit_code())),
        Outcome::Interrupted(None) => bail!("interrupted"),
    }
}

/// Prints a guest's output.
fn pass_on(heard: CommandOutput) -> anyhow::Result<()> {
    let printed = match heard {
        CommandOutput::Stdout(bytes) => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(bytes).and_then(|()| stdout.flush())
        }
        CommandOutput::Stderr(bytes) => io::stderr().write_all(bytes),
        CommandOutput::Ended(_) => Ok(()),
    };
    printed.context("cannot print")
}

/// Those of the tests' tools that are useful in interactive work.
const SMALL_TOOLS: &[&str] = &[
    "nsenter",
    "setpriv",
    "ping",
    "nft",
    "bpftool",
    "ss",
    "iperf3",
    "traceroute",
    "dig",
    "dnsmasq",
    "nginx",
    "curl",
];

fn first_failure(first: u8, next: u8) -> u8 {
    if first == 0 { next } else { first }
}

/// Builds the first process of guests and the given programs, each as a static binary.
fn build_static(workspace: &Workspace, arch: Arch, programs: &[&str]) -> anyhow::Result<()> {
    setup::static_target(workspace, arch)?;
    if !programs.is_empty() {
        setup::setup(workspace)?;
    }
    let mut cargo = workspace.cargo()?;
    if !arch.is_own() {
        cross::environment(workspace, arch, &mut cargo)?;
    }
    cargo.args(["build", "--release", "--target", arch.static_target()]);
    cargo.args(["--package=vm-init", "--bin=vm-init"]);
    for program in programs {
        let package = if *program == "bed" { "tests" } else { program };
        cargo.args(["--package", package, "--bin", program]);
    }
    run_command(&mut cargo).context("cannot build the programs of the virtual machine")
}
