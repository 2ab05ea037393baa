//! Attaches programs, and reattaches programs that others have detached.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::{fs, slice};

use aya::programs::links::{FdLink, PinnedLink};

use super::sockets::SocketFault;
use super::{Attachment, Hook, HookFault, Hooks, Means, ProgramHolder, tcx, xdp};
use crate::error::{DatapathError, file_error};
use crate::link_pin;
use crate::maps::Maps;
use crate::pin_folder::{LINK_PINS, PinFolder, former_layout_pins, replace_pin};
use crate::programs::Programs;

/// The parts of a datapath that attaching involves.
pub(crate) struct Attacher<'a> {
    pub(crate) hooks: &'a mut Hooks,
    pub(crate) programs: &'a mut Programs,
    pub(crate) maps: &'a mut Maps,
    pub(crate) folder: &'a mut PinFolder,
}

impl Attacher<'_> {
    /// Loads the programs that only some hooks need, if one of `hooks` needs them and they are not loaded yet.
    pub(crate) fn load_for(&mut self, hooks: &[Hook]) -> Result<(), DatapathError> {
        let wanted = || hooks.iter().map(|hook| hook.program);
        let loaded = self.programs.load_ip_for(wanted(), self.folder, self.maps);
        loaded.and(self.programs.load_xdp_for(wanted(), self.folder, self.maps))
    }

    /// Attaches a program, or replaces a former one in place.
    pub(crate) fn attach(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        self.attach_hook(hook, tcx::pins_of_program)
    }

    /// Like [`attach`](Self::attach), but looks for a former agent's link only under the hook's own name: there may be
    /// very many endpoints.
    pub(crate) fn attach_to_own(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        self.attach_hook(hook, |hook, folder| vec![folder.join(hook.pin_name())])
    }

    /// Attaches optional programs. [`Hooks::refused`] lists the errors of those that could not be attached.
    pub(crate) fn attach_optional(&mut self, hooks: &[&Hook]) {
        self.hooks.refused.clear();
        for hook in hooks {
            if let Err(error) = self.attach(hook) {
                self.hooks.refused.push(error);
            }
        }
    }

    /// Attaches the programs for the host's own sockets to the root cgroup. Detaches them if no root cgroup is set.
    pub(crate) fn attach_sockets(&mut self) -> Result<(), DatapathError> {
        let sockets = &mut self.hooks.sockets;
        sockets.attach(&self.programs.sockets, self.folder.path())
    }

    fn attach_hook(
        &mut self,
        hook: &Hook,
        candidates: fn(&Hook, &Path) -> Vec<PathBuf>,
    ) -> Result<(), DatapathError> {
        self.maps.hold_flows()?;
        let pins = self.folder.path();
        let folders = [pins, &former_layout_pins(pins)].map(|pins| pins.join(LINK_PINS));
        let former = folders.iter().flat_map(|folder| candidates(hook, folder));
        let held = match self.hooks.means_at(hook) {
            Means::Xdp => {
                let former = former.collect();
                let (mode, program) = (self.hooks.xdp_mode(), self.programs.xdp());
                let program =
                    program.ok_or_else(|| DatapathError::Missing(hook.program.to_string()))?;
                let program = program.fd().map_err(hook.program_error("attach"))?;
                let link = xdp::attach(program.as_fd(), hook, mode, former)?;
                ProgramHolder::Link(pin_link(pins, hook, |path| link.pin(path))?)
            }
            Means::Tc(Attachment::Tcx) => {
                let program = self.programs.classifier_mut(hook.program)?;
                let link = tcx::attach(program, hook, former.collect())?;
                let link = pin_fd_link(pins, hook, link)?;
                // The filter goes last: meanwhile a packet may pass both programs, but never none.
                if self.hooks.may_have_filters {
                    self.hooks.clsact.detach(hook)?;
                }
                ProgramHolder::Link(link)
            }
            Means::Tc(Attachment::Clsact) => {
                let program = self.programs.classifier(hook.program)?;
                self.hooks.clsact.attach(hook, program)?;
                if let Some(pin) = tcx::pin_on_device(hook, former.collect()) {
                    // The link goes last: meanwhile a packet may pass both programs, but never none.
                    fs::remove_file(&pin).map_err(file_error("remove", &pin))?;
                }
                ProgramHolder::Filter
            }
        };
        self.hooks.attached.insert(hook.clone(), held);
        Ok(())
    }

    /// Repairs a hook.
    pub(crate) fn repair(&mut self, fault: &HookFault) -> Result<(), DatapathError> {
        // A link without a folder to pin it in would be closed, which detaches its program.
        self.folder.make_folders()?;
        match fault {
            HookFault::Detached(hook) => {
                self.hooks.attached.remove(hook);
                self.load_for(slice::from_ref(hook))?;
                self.attach(hook)
            }
            HookFault::PinLost(hook) => {
                let Some(ProgramHolder::Link(link)) = self.hooks.attached.remove(hook) else {
                    return Ok(());
                };
                let link = pin_fd_link(self.folder.path(), hook, FdLink::from(link))?;
                self.hooks
                    .attached
                    .insert(hook.clone(), ProgramHolder::Link(link));
                Ok(())
            }
        }
    }

    /// Repairs a socket hook.
    pub(crate) fn repair_sockets(&mut self, fault: SocketFault) -> Result<(), DatapathError> {
        self.folder.make_folders()?;
        let sockets = &mut self.hooks.sockets;
        sockets.repair(&self.programs.sockets, self.folder.path(), fault)
    }

    /// Detaches a program from its device.
    pub(crate) fn detach(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        self.hooks.detach(hook, self.folder.path())
    }
}

/// Pins a link under its hook's name, replacing an existing pin.
fn pin_fd_link(pins: &Path, hook: &Hook, link: FdLink) -> Result<PinnedLink, DatapathError> {
    pin_link(pins, hook, |path| {
        link.pin(path).map_err(|source| DatapathError::Pin {
            path: path.to_owned(),
            source,
        })
    })
}

/// Like [`pin_fd_link`], with a function that pins at a path.
fn pin_link(
    pins: &Path,
    hook: &Hook,
    pin: impl FnOnce(&Path) -> Result<PinnedLink, DatapathError>,
) -> Result<PinnedLink, DatapathError> {
    let path = hook.link_pin(pins);
    let fresh = path.with_file_name(link_pin::fresh(&hook.pin_name()));
    // The link is open, so its program stays attached even when its pins are replaced.
    replace_pin(&path, &fresh, pin)
}
