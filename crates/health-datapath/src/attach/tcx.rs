//! Attachment by TCX links, from Linux 6.6 on. A link is pinned so that its program stays attached when the agent
//! stops; the next agent opens the pin and swaps its own program into the link.

use std::fs;
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, LinkOrder, PinnedLink};
use aya::programs::tc::{SchedClassifierLink, TcAttachOptions, TcAttachType};
use aya::programs::{ProgramError, SchedClassifier};
use tracing::debug;

use super::Hook;
use crate::error::DatapathError;
use crate::program::Direction;
use crate::{link_pin, sys};

/// Attaches a program to its device. Reuses the link of a former program of the same name on this device, if `pins`
/// includes it.
pub(super) fn attach(
    program: &mut SchedClassifier,
    hook: &Hook,
    pins: Vec<PathBuf>,
) -> Result<FdLink, DatapathError> {
    if let Some(link) = take_over(program, hook, pins) {
        return Ok(link);
    }
    let failed = |error: ProgramError| hook.program_error("attach")(error);
    let is_there = || {
        hook.device_number()
            .map_err(|error| failed(ProgramError::IOError(error)))
    };
    is_there()?;
    let id = program
        .attach_with_options(
            &hook.device,
            attach_type(hook.direction()),
            TcAttachOptions::TcxOrder(LinkOrder::default()),
        )
        .map_err(failed)?;
    let link = program.take_link(id).map_err(failed)?;
    // The kernel looked the device up by name. If another device has that name by now, the link is dropped, which
    // detaches the program. The other device may even have the same ifindex, so the fault check looks again.
    is_there()?;
    FdLink::try_from(link)
        .map_err(|error| DatapathError::Missing(format!("link of {}: {error}", hook.program)))
}

/// Whether the program with this id is attached. `false` if the device is gone: its owner reports that.
pub(super) fn has_program(hook: &Hook, id: u32) -> bool {
    hook.device_number().is_ok()
        && SchedClassifier::query_tcx(&hook.device, attach_type(hook.direction()))
            .is_ok_and(|(_, programs)| programs.iter().any(|info| info.id() == id))
}

/// Returns all pins in the link folder for the hook's program. A pin's name does not identify the device: a link stays
/// with its device when the device is renamed, and another device may have the old name by now.
pub(super) fn pins_of_program(hook: &Hook, folder: &Path) -> Vec<PathBuf> {
    let of_program = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let program = name.and_then(link_pin::parse).map(|(program, _)| program);
        program == Some(hook.program)
    };
    let entries = fs::read_dir(folder).into_iter().flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(of_program).collect()
}

/// Finds the pin whose link is on the hook's device.
pub(super) fn pin_on_device(hook: &Hook, pins: Vec<PathBuf>) -> Option<PathBuf> {
    let device = hook.device_number().ok()?;
    let is_there =
        |path: &PathBuf| sys::device_of_link(path).is_ok_and(|found| found == Some(device));
    pins.into_iter().find(is_there)
}

fn attach_type(direction: Direction) -> TcAttachType {
    match direction {
        Direction::Ingress => TcAttachType::Ingress,
        Direction::Egress => TcAttachType::Egress,
    }
}

fn take_over(program: &mut SchedClassifier, hook: &Hook, pins: Vec<PathBuf>) -> Option<FdLink> {
    let path = pin_on_device(hook, pins)?;
    let former = FdLink::from(PinnedLink::from_pin(&path).ok()?);
    let attempt = || {
        let link = SchedClassifierLink::try_from(former).map_err(|error| error.to_string())?;
        // The kernel swaps the program, so the link is never without one.
        let id = program
            .attach_to_link(link)
            .map_err(|error| error.to_string())?;
        let link = program.take_link(id).map_err(|error| error.to_string())?;
        FdLink::try_from(link).map_err(|error| error.to_string())
    };
    attempt()
        .inspect_err(|error| debug!(pin = %path.display(), error, "cannot reuse a pinned link"))
        .ok()
}
