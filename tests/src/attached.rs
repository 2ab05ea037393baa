//! Programs attached to a device with TCX links or clsact filters.

use std::fs;

use anyhow::Context as _;
use aya::programs::{ProgramError, SchedClassifier, TcAttachType};
use nix::errno::Errno;
use serde_json::Value;

use crate::{Node, PATIENCE, wait_for};

/// A program attached to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedProgram {
    /// The program's ID in the kernel.
    pub id: u32,
    /// The program's tag, a hash of its instructions, as `bpftool prog` prints it.
    pub tag: String,
}

/// The programs on a node's device: those at ingress, then those at egress.
pub fn programs(node: &Node, device: &str) -> anyhow::Result<[Vec<AttachedProgram>; 2]> {
    Ok([
        at_hook(node, device, TcAttachType::Ingress, "ingress")?,
        at_hook(node, device, TcAttachType::Egress, "egress")?,
    ])
}

/// Whether this kernel has TCX.
pub fn has_tcx() -> anyhow::Result<bool> {
    Ok(tcx("lo", TcAttachType::Ingress)?.is_some())
}

/// Detaches the programs that `--attach-mode auto` attached to a device, by TCX where the kernel supports it. The agent
/// must be stopped, or it would reattach them.
pub fn take_off(node: &Node, device: &str) -> anyhow::Result<()> {
    if !has_tcx()? {
        node.exec(&format!("tc qdisc delete dev {device} clsact"))?;
        return Ok(());
    }
    let folder = node.pins().join("links");
    let of_device = format!("_{device}");
    let attached = || anyhow::Ok(programs(node, device)?.iter().map(Vec::len).sum::<usize>());
    let mut left = attached()?;
    for entry in
        fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?
    {
        let pin = entry?.path();
        if pin.to_string_lossy().ends_with(&of_device) {
            fs::remove_file(&pin).with_context(|| format!("cannot remove {}", pin.display()))?;
            left -= 1;
        }
    }
    // The kernel detaches a program some time after the last reference to its link is gone (kernel/bpf/syscall.c,
    // bpf_link_put).
    wait_for("the programs to be detached", PATIENCE, || {
        Ok((attached()? == left).then_some(()))
    })
}

fn at_hook(
    node: &Node,
    device: &str,
    attach_type: TcAttachType,
    direction: &str,
) -> anyhow::Result<Vec<AttachedProgram>> {
    let mut found = node
        .run_in(|| tcx(device, attach_type))??
        .unwrap_or_default();
    let filters = node.exec(&format!("tc -j filter show dev {device} {direction}"))?;
    let filters: Value = serde_json::from_str(&filters)
        .with_context(|| format!("tc at {direction} of {device}: {filters}"))?;
    for filter in filters.as_array().into_iter().flatten() {
        let program = &filter["options"]["prog"];
        if let (Some(id), Some(tag)) = (program["id"].as_u64(), program["tag"].as_str()) {
            found.push(AttachedProgram {
                id: id.try_into()?,
                tag: tag.to_owned(),
            });
        }
    }
    Ok(found)
}

/// The TCX programs on a device of this network namespace; `None` if the kernel has no TCX.
fn tcx(device: &str, attach_type: TcAttachType) -> anyhow::Result<Option<Vec<AttachedProgram>>> {
    match SchedClassifier::query_tcx(device, attach_type) {
        Ok((_, programs)) => Ok(Some(
            programs
                .iter()
                .map(|program| AttachedProgram {
                    id: program.id(),
                    tag: format!("{:016x}", program.tag()),
                })
                .collect(),
        )),
        Err(ProgramError::SyscallError(error))
            if error.io_error.raw_os_error() == Some(Errno::EINVAL as i32) =>
        {
            Ok(None)
        }
        Err(error) => Err(error).with_context(|| format!("cannot query {device}")),
    }
}
