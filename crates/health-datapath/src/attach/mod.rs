//! Attaches programs to devices by TCX and XDP links or by clsact filters, replaces them in place, checks them, and
//! reattaches them. Does the same for the programs of the host's own sockets, at the root cgroup.

mod attacher;
mod clsact;
mod hook;
mod sockets;
mod tcx;
mod xdp;
mod xdp_devices;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::{fmt, fs, io};

use aya::programs::links::PinnedLink;
use health_model::settings::ServiceXdp;
use health_net::xdp::Mode;
use tracing::info;

use crate::error::{DatapathError, file_error};
use crate::pin_folder::LINK_PINS;
use crate::program::{AttachPoint, DatapathProgram};
use crate::programs::Programs;

pub(crate) use attacher::Attacher;
pub(crate) use clsact::Clsact;
pub use hook::{Hook, HookFault};
pub use sockets::SocketFault;
pub(crate) use sockets::SocketHooks;

/// What holds programs on their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// Pinned TCX links, from Linux 6.6 on.
    Tcx,
    /// Filters of clsact qdiscs.
    Clsact,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        })
    }
}

/// What holds the programs on the node's own devices, and on those of endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachments {
    /// On uplinks and on the health endpoint's device, which are attached once.
    pub node: Attachment,
    /// On workload devices, which come and go. A TCX link costs an RCU grace period in the kernel; a clsact qdisc and
    /// its first filters cost none.
    pub endpoints: Attachment,
}

impl Attachments {
    /// Uses the same attachment on all devices.
    pub const fn all(attachment: Attachment) -> Self {
        Self {
            node: attachment,
            endpoints: attachment,
        }
    }
}

/// What holds an attached program.
#[derive(Debug)]
enum ProgramHolder {
    /// A link, kept open so that removing its pin does not detach the program.
    Link(PinnedLink),
    /// A filter, which needs no handle to persist.
    Filter,
}

/// How a program is attached to its device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Means {
    Tc(Attachment),
    Xdp,
}

/// Where this agent's programs are attached, and where they must be.
pub(crate) struct Hooks {
    /// Where programs must be attached, apart from workloads.
    wanted: Vec<Hook>,
    attachments: Attachments,
    /// How XDP programs run at their hooks.
    xdp: ServiceXdp,
    attached: HashMap<Hook, ProgramHolder>,
    clsact: Clsact,
    pub(crate) sockets: SocketHooks,
    /// Why optional programs could not be attached.
    refused: Vec<DatapathError>,
    /// Whether a former agent's clsact filters may be present where links are wanted now: until all programs have been
    /// attached for the first time, and while the former agent's programs serve endpoints.
    may_have_filters: bool,
}

impl Hooks {
    /// Returns the hooks of the instance with this pin folder; nothing is attached yet.
    pub(crate) fn of(pins: &Path) -> Self {
        Self {
            wanted: Vec::new(),
            attachments: Attachments::all(Attachment::Tcx),
            xdp: ServiceXdp::default(),
            attached: HashMap::new(),
            clsact: Clsact::of(pins),
            sockets: SocketHooks::default(),
            refused: Vec::new(),
            may_have_filters: true,
        }
    }

    /// Whether nothing was attached or chosen.
    pub(crate) fn are_as_loaded(&self) -> bool {
        // Names all fields, so that a new field must be considered here.
        let Self {
            wanted,
            attachments,
            xdp: _,
            attached,
            clsact: _,
            sockets,
            refused: _,
            may_have_filters,
        } = self;
        wanted.is_empty()
            && *attachments == Attachments::all(Attachment::Tcx)
            && attached.is_empty()
            && sockets.are_as_loaded()
            && *may_have_filters
    }

    /// Chooses what holds the programs.
    pub(crate) fn set_attachments(&mut self, attachments: Attachments) {
        self.attachments = attachments;
    }

    /// Chooses how XDP programs run at their hooks.
    pub(crate) fn set_xdp(&mut self, wanted: ServiceXdp) {
        self.xdp = wanted;
    }

    /// Sets where programs must be attached, apart from workloads.
    pub(crate) fn want(&mut self, hooks: &[Hook]) {
        self.wanted = hooks.to_vec();
    }

    /// Where programs must be attached, apart from workloads.
    pub(crate) fn wanted(&self) -> &[Hook] {
        &self.wanted
    }

    /// Why optional programs could not be attached.
    pub(crate) fn refused(&self) -> &[DatapathError] {
        &self.refused
    }

    pub(crate) fn is_attached(&self, hook: &Hook) -> bool {
        self.attached.contains_key(hook)
    }

    /// Whether this instance has a filter at a hook, with any program.
    pub(crate) fn has_filter(&self, hook: &Hook) -> bool {
        matches!(self.clsact.filter(hook), Ok(Some(_)))
    }

    const fn xdp_mode(&self) -> Mode {
        match self.xdp {
            ServiceXdp::Native => Mode::Native,
            ServiceXdp::Off | ServiceXdp::Generic => Mode::Generic,
        }
    }

    fn means_at(&self, hook: &Hook) -> Means {
        match self.wanted.contains(hook) {
            _ if hook.program.attach_point() == AttachPoint::Xdp => Means::Xdp,
            true => Means::Tc(self.attachments.node),
            false => Means::Tc(self.attachments.endpoints),
        }
    }

    /// Returns the fault of a hook where a program must be attached, if it has one.
    pub(crate) fn fault(&self, hook: &Hook, programs: &Programs, pins: &Path) -> Option<HookFault> {
        let means = self.means_at(hook);
        let program = match means {
            Means::Tc(_) => {
                let program = programs.classifier(hook.program).ok();
                program.map(|program| program.info())
            }
            Means::Xdp => programs.xdp().map(|program| program.info()),
        };
        let Some(program) = program else {
            return Some(HookFault::Detached(hook.clone()));
        };
        let program = program.ok()?.id();
        let is_there = match means {
            Means::Tc(Attachment::Tcx) => tcx::has_program(hook, program),
            Means::Tc(Attachment::Clsact) => self.clsact.has_program(hook, program),
            Means::Xdp => xdp::has_program(hook, self.xdp_mode(), program),
        };
        match self.attached.get(hook) {
            Some(ProgramHolder::Link(_)) if is_there && !hook.link_pin(pins).exists() => {
                Some(HookFault::PinLost(hook.clone()))
            }
            Some(_) if is_there => None,
            _ => Some(HookFault::Detached(hook.clone())),
        }
    }

    /// Detaches a program from its device.
    pub(crate) fn detach(&mut self, hook: &Hook, pins: &Path) -> Result<(), DatapathError> {
        match self.means_at(hook) {
            Means::Tc(Attachment::Tcx) | Means::Xdp => {
                self.attached.remove(hook);
                let pin = hook.link_pin(pins);
                // Removing the pin ends the link: the hook is no longer wanted.
                match fs::remove_file(&pin) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        Err(file_error("remove", &pin)(error))
                    }
                    _ => Ok(()),
                }
            }
            Means::Tc(Attachment::Clsact) => {
                self.clsact.detach(hook)?;
                self.attached.remove(hook);
                Ok(())
            }
        }
    }

    /// Detaches this instance's programs from all hooks that neither the node nor a workload (`of_workloads`) wants any
    /// more. Hooks that are `held_back` keep a former agent's filters.
    pub(crate) fn remove_others(
        &mut self,
        pins: &Path,
        of_workloads: impl Iterator<Item = Hook>,
        held_back: &[Hook],
    ) -> Result<(), DatapathError> {
        let wanted: HashSet<Hook> = self.wanted.iter().cloned().chain(of_workloads).collect();
        self.attached.retain(|hook, _| wanted.contains(hook));
        let (links, mut filters): (Vec<Hook>, Vec<Hook>) = wanted
            .into_iter()
            .partition(|hook| self.means_at(hook) != Means::Tc(Attachment::Clsact));
        filters.extend_from_slice(held_back);
        remove_other_links(pins, &links)?;
        for removed in self.clsact.remove_others(&filters)? {
            info!(%removed, "removed unused programs");
        }
        self.may_have_filters = !held_back.is_empty();
        Ok(())
    }
}

/// Removes the link pins of other hooks, which detaches their programs.
fn remove_other_links(pins: &Path, wanted: &[Hook]) -> Result<(), DatapathError> {
    let folder = pins.join(LINK_PINS);
    let of_sockets = DatapathProgram::FOR_SOCKETS.map(|program| program.name().to_owned());
    let names = wanted.iter().map(Hook::pin_name).chain(of_sockets);
    let names: HashSet<String> = names.collect();
    for entry in fs::read_dir(&folder).map_err(file_error("read", &folder))? {
        let path = entry.map_err(file_error("read", &folder))?.path();
        let known = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| names.contains(name));
        if !known {
            // No wanted hook's link is pinned here: all of them have been attached and are pinned under their own
            // names.
            fs::remove_file(&path).map_err(file_error("remove", &path))?;
        }
    }
    Ok(())
}
