//! A guest: its root folder, its plan and its output.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Deserialize;
use vm_init::{PLAN, Plan, PlannedCommand, ProgramExit};

use super::accelerator;
use super::archive::Archive;
use super::kernel::Kernel;
use super::machine::{Accelerator, Machine, MachineOutput};
use super::root::{Origin, Root};
use crate::workspace::Workspace;

/// Command with which the agent probes the kernel's features.
const KERNEL_PROBE: &[&str] = &["health-agent", "config", "--probe-kernel", "--output=json"];

/// The part of the agent's kernel report that is shown.
#[derive(Deserialize)]
struct Probe {
    features: Vec<Feature>,
}

#[derive(Deserialize)]
struct Feature {
    name: String,
    available: bool,
    without: String,
}

/// A guest in preparation.
pub(crate) struct Guest<'a> {
    pub(crate) root: Root<BufWriter<File>>,
    /// The program of the first process.
    init: PathBuf,
    workspace: &'a Workspace,
    kernel: &'a Kernel,
    limit: Option<Duration>,
    initramfs: File,
}

/// A command's output or exit.
pub(crate) enum CommandOutput<'a> {
    Stdout(&'a [u8]),
    Stderr(&'a [u8]),
    Ended(ProgramExit),
}

/// Result of a guest that shut down normally.
pub(crate) enum Outcome {
    /// All commands exited, with these results.
    Done(Vec<ProgramExit>),
    /// This process received a signal. The command that was running, if any, then exited with this result.
    Interrupted(Option<ProgramExit>),
}

impl<'a> Guest<'a> {
    /// Creates a guest with the first process, the kernel's modules and the tools that shell scripts need.
    pub(crate) fn new(
        workspace: &'a Workspace,
        kernel: &'a Kernel,
        limit: Option<Duration>,
        init: PathBuf,
    ) -> anyhow::Result<Self> {
        let origin = Origin::new(workspace, kernel.arch)?;
        let (mut root, initramfs) = begin(workspace, &init, origin)?;
        root.base()?;
        if let Some(modules) = &kernel.modules {
            root.modules(modules, &kernel.release)?;
        }
        Ok(Self {
            root,
            init,
            workspace,
            kernel,
            limit,
            initramfs,
        })
    }

    /// Boots the guest, reports the kernel's missing features if `probe` is set, and runs the commands. Passes their
    /// output and exit codes to `heard`, with the index of the command.
    pub(crate) fn run(
        self,
        probe: bool,
        commands: &[PlannedCommand],
        mut heard: impl FnMut(usize, CommandOutput) -> anyhow::Result<()>,
    ) -> anyhow::Result<Outcome> {
        let mut all = vec![PlannedCommand::new(["ip", "link", "set", "lo", "up"])];
        let probing = probe.then_some(all.len());
        if probe {
            all.push(PlannedCommand::new(KERNEL_PROBE.iter().copied()));
        }
        let first = all.len();
        all.extend(commands.iter().cloned());
        finish(self.root, &Plan { commands: all })?;

        let Self {
            workspace, kernel, ..
        } = self;
        let accelerator = accelerator::find(workspace, kernel, || {
            let (root, initramfs) = begin(workspace, &self.init, Origin::Machine)?;
            finish(root, &Plan::default())?;
            Ok(initramfs)
        })?;
        print_boot(kernel, accelerator, &self.initramfs)?;
        let console = format!("console-{}.log", kernel.name);
        let machine = Machine {
            kernel,
            initramfs: &self.initramfs,
            accelerator,
            limit: self.limit,
            console: workspace.vm()?.join(console),
        };
        let start = Instant::now();
        let mut all_ended = Vec::new();
        let mut running = 0;
        let mut probed = Vec::<u8>::new();
        let in_order = machine.run(|said| {
            match said {
                MachineOutput::Booted => {
                    eprintln!("booted after {:.1} s", start.elapsed().as_secs_f64());
                }
                MachineOutput::Stdout(bytes) if probing == Some(running) => probed.extend(bytes),
                MachineOutput::Stderr(_) if probing == Some(running) => {}
                MachineOutput::Stdout(bytes) if running >= first => {
                    heard(running - first, CommandOutput::Stdout(bytes))?;
                }
                MachineOutput::Stderr(bytes) if running >= first => {
                    heard(running - first, CommandOutput::Stderr(bytes))?;
                }
                MachineOutput::Stdout(bytes) | MachineOutput::Stderr(bytes) => {
                    io::stderr().write_all(bytes).context("cannot print")?;
                }
                MachineOutput::Ended(index, ended) => {
                    if probing == Some(index) {
                        say_what_is_missing(&probed);
                    }
                    running = index + 1;
                    if index >= first {
                        heard(index - first, CommandOutput::Ended(ended))?;
                        all_ended.push(ended);
                    }
                }
            }
            Ok(())
        })?;
        Ok(if in_order {
            Outcome::Done(all_ended)
        } else {
            Outcome::Interrupted(all_ended.pop())
        })
    }
}

fn print_boot(kernel: &Kernel, by: Accelerator, initramfs: &File) -> anyhow::Result<()> {
    let size = initramfs.metadata();
    let size = size.context("cannot read the initramfs")?;
    eprintln!(
        "booting Linux {} with {} and {} MiB of initramfs",
        kernel.release,
        match by {
            Accelerator::Kvm => "KVM",
            Accelerator::Emulation => "software emulation",
        },
        size.len() >> 20
    );
    Ok(())
}

/// Prints a line for each feature that the guest's kernel lacks.
fn say_what_is_missing(probed: &[u8]) {
    let Ok(probe) = serde_json::from_slice::<Probe>(probed) else {
        eprintln!("health-agent did not report what this kernel lacks");
        return;
    };
    for feature in probe.features.iter().filter(|feature| !feature.available) {
        eprintln!("this kernel lacks {}: {}", feature.name, feature.without);
    }
}

/// Adds the plan to a root folder and completes the folder.
fn finish(mut root: Root<BufWriter<File>>, plan: &Plan) -> anyhow::Result<()> {
    let json = serde_json::to_vec(plan).context("cannot write the plan")?;
    root.file(PLAN.as_ref(), &json)?;
    root.finish()
}

/// Creates a root folder with only the first process. Returns it with the file that it is written to. The file has no
/// name, so it disappears with this process, however that ends.
fn begin(
    workspace: &Workspace,
    init: &Path,
    origin: Origin,
) -> anyhow::Result<(Root<BufWriter<File>>, File)> {
    let folder = workspace.vm()?;
    let open = || {
        let initramfs = tempfile::tempfile_in(&folder)?;
        io::Result::Ok((initramfs.try_clone()?, initramfs))
    };
    let (writer, initramfs) =
        open().with_context(|| format!("cannot create a file in {}", folder.display()))?;
    let archive = Archive::new(BufWriter::new(writer));
    let root = Root::new(archive, init, origin)?;
    Ok((root, initramfs))
}
