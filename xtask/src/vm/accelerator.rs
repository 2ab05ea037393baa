//! Finds out whether KVM works on this machine. Opening `/dev/kvm` proves little: in some clouds, virtual machines stop
//! at their first instructions, so only booting one shows whether KVM works.

use std::fs::{self, File, OpenOptions};
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::kernel::Kernel;
use super::machine::{Accelerator, Machine, MachineOutput};
use crate::workspace::Workspace;

const DEVICE: &str = "/dev/kvm";

/// How long a virtual machine may take to boot and power off. With KVM, this takes a second.
const PATIENCE: Duration = Duration::from_secs(10);

/// Finds the accelerator for a kernel. The result is cached until this machine reboots.
pub(crate) fn find(
    workspace: &Workspace,
    kernel: &Kernel,
    initramfs_of_init: impl FnOnce() -> anyhow::Result<File>,
) -> anyhow::Result<Accelerator> {
    let opened = OpenOptions::new().read(true).write(true).open(DEVICE);
    if opened.is_err() || !kernel.arch.is_own() {
        return Ok(Accelerator::Emulation);
    }
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .context("cannot read this machine's boot id")?;
    let answer = workspace.vm()?.join("kvm");
    if let Some((id, works)) = fs::read_to_string(&answer)
        .ok()
        .as_deref()
        .and_then(|answer| answer.split_once(' '))
        && id == boot_id.trim_end()
    {
        return Ok(accelerator(works == "works"));
    }
    eprintln!("trying KVM");
    let initramfs = initramfs_of_init()?;
    let machine = Machine {
        kernel,
        initramfs: &initramfs,
        accelerator: Accelerator::Kvm,
        limit: Some(PATIENCE),
        console: workspace.vm()?.join("console-kvm.log"),
    };
    let mut booted = false;
    let ran = machine.run(|said| {
        booted |= matches!(said, MachineOutput::Booted);
        Ok(())
    });
    match &ran {
        Ok(true) => {}
        Ok(false) => bail!("interrupted"),
        Err(error) => eprintln!("KVM does not work here: {error:#}"),
    }
    let works = booted && ran.is_ok();
    let word = if works { "works" } else { "fails" };
    fs::write(&answer, format!("{} {word}", boot_id.trim_end()))
        .with_context(|| format!("cannot write {}", answer.display()))?;
    Ok(accelerator(works))
}

fn accelerator(kvm_works: bool) -> Accelerator {
    if kvm_works {
        Accelerator::Kvm
    } else {
        Accelerator::Emulation
    }
}
