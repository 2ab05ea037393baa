//! Programs on their devices: attached by pinned TCX links, replaced in place, watched and put back.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, LinkOrder, PinnedLink};
use aya::programs::tc::{SchedClassifierLink, TcAttachOptions};
use aya::programs::{SchedClassifier, TcAttachType};
use nix::net::if_::if_nametoindex;
use tracing::debug;

use super::layout::LINK_PINS;
use super::loader::{classifier, file_error, program_error, set_aside};
use super::{Datapath, DatapathError, link_pin, sys};

/// Which way packets go that a program sees, from the device's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Received by the device.
    Ingress,
    /// Sent by the device.
    Egress,
}

impl Direction {
    pub(super) fn attach_type(self) -> TcAttachType {
        match self {
            Self::Ingress => TcAttachType::Ingress,
            Self::Egress => TcAttachType::Egress,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// One program on one device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hook {
    /// The program's name.
    pub program: &'static str,
    /// The device's name.
    pub device: String,
    /// Where on it.
    pub direction: Direction,
}

impl Hook {
    /// Both programs of an endpoint's device.
    pub fn endpoint(device: &str) -> [Self; 2] {
        Self::pair(device, "from_endpoint", "to_endpoint")
    }

    /// Both programs of an uplink.
    pub fn uplink(device: &str) -> [Self; 2] {
        Self::pair(device, "from_netdev", "to_netdev")
    }

    fn pair(device: &str, ingress: &'static str, egress: &'static str) -> [Self; 2] {
        [(ingress, Direction::Ingress), (egress, Direction::Egress)].map(|(program, direction)| {
            Self {
                program,
                device: device.to_owned(),
                direction,
            }
        })
    }

    /// Whether the program of this number is there. A device that is gone has none; its owner says so.
    fn has_program(&self, id: u32) -> bool {
        SchedClassifier::query_tcx(&self.device, self.direction.attach_type())
            .is_ok_and(|(_, programs)| programs.iter().any(|info| info.id() == id))
    }

    fn pin_name(&self) -> String {
        link_pin::name(self.program, &self.device)
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} at {} of {}",
            self.program, self.direction, self.device
        )
    }
}

/// What was wrong with a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookFault {
    /// The program was not on the device.
    Detached(Hook),
    /// The program was there, its link's pin was not.
    PinLost(Hook),
}

impl HookFault {
    /// A short fixed word, to count by.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Detached(_) => "program-detached",
            Self::PinLost(_) => "link-pin-lost",
        }
    }
}

impl fmt::Display for HookFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Detached(hook) => write!(f, "program {hook} was detached"),
            Self::PinLost(hook) => write!(f, "the pinned link of program {hook} was removed"),
        }
    }
}

/// The links held, so that a removed pin alone detaches nothing.
pub(super) type Links = HashMap<Hook, PinnedLink>;

impl Datapath {
    /// Puts this agent's programs on these hooks and on no others of this instance. Programs of a former
    /// agent are replaced in place, without a packet in between that meets none.
    ///
    /// Where one hook fails, the others are served all the same, and [`Datapath::hook_faults`] names it.
    pub fn attach(&mut self, hooks: &[Hook]) -> Result<(), DatapathError> {
        self.hooks = hooks.to_vec();
        self.make_folders()?;
        if let Some(resizing) = &mut self.resizing {
            resizing.carry_over()?;
            self.connect_programs()?;
        }
        let mut outcome = Ok(());
        for hook in hooks {
            outcome = outcome.and(self.take_over_or_attach(hook));
        }
        self.attach_adopted();
        outcome?;
        self.remove_other_links(hooks)?;
        if let Some(resizing) = self.resizing.take() {
            resizing.finish()?;
        }
        self.remove_set_aside()
    }

    /// The hooks of the last [`Datapath::attach`].
    pub fn hooks(&self) -> &[Hook] {
        &self.hooks
    }

    /// What is wrong with the hooks of the last [`Datapath::attach`].
    pub fn hook_faults(&self) -> Vec<HookFault> {
        self.hooks
            .iter()
            .filter_map(|hook| self.hook_fault(hook))
            .collect()
    }

    /// Puts right what [`Datapath::hook_faults`] found.
    pub fn repair_hook(&mut self, fault: &HookFault) -> Result<(), DatapathError> {
        // A link that cannot be pinned is closed, and its program with it off the device.
        self.make_folders()?;
        match fault {
            HookFault::Detached(hook) => {
                self.links.remove(hook);
                self.take_over_or_attach(hook)
            }
            HookFault::PinLost(hook) => {
                let Some(link) = self.links.remove(hook) else {
                    return Ok(());
                };
                let link = self.pin_link(hook, FdLink::from(link))?;
                self.links.insert(hook.clone(), link);
                Ok(())
            }
        }
    }

    pub(super) fn hook_fault(&self, hook: &Hook) -> Option<HookFault> {
        let program = self
            .ebpf
            .program(hook.program)
            .and_then(|program| program.info().ok())?
            .id();
        if !hook.has_program(program) || !self.links.contains_key(hook) {
            return Some(HookFault::Detached(hook.clone()));
        }
        (!self.link_pin(hook).exists()).then(|| HookFault::PinLost(hook.clone()))
    }

    fn take_over_or_attach(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        self.attach_hook(hook, pins_of_program)
    }

    /// As [`take_over_or_attach`](Self::take_over_or_attach), where a former agent's link is only looked for
    /// under the hook's own name: of endpoints there may be very many.
    pub(super) fn attach_to_own(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        self.attach_hook(hook, |hook, folder| vec![folder.join(hook.pin_name())])
    }

    fn attach_hook(
        &mut self,
        hook: &Hook,
        candidates: fn(&Hook, &Path) -> Vec<PathBuf>,
    ) -> Result<(), DatapathError> {
        let folders = [&self.pins, &set_aside(&self.pins)].map(|pins| pins.join(LINK_PINS));
        let on_device = |error| match program_error("attach", hook.program)(error) {
            DatapathError::Program {
                what,
                program,
                source,
                ..
            } => DatapathError::Program {
                what,
                program,
                on: format!(" on {}", hook.device),
                source,
            },
            other => other,
        };
        let program = classifier(&mut self.ebpf, hook.program)?;
        let former = folders
            .iter()
            .find_map(|folder| take_over(program, hook, candidates(hook, folder)));
        let link = match former {
            Some(link) => link,
            None => {
                let id = program
                    .attach_with_options(
                        &hook.device,
                        hook.direction.attach_type(),
                        TcAttachOptions::TcxOrder(LinkOrder::default()),
                    )
                    .map_err(on_device)?;
                let link = program
                    .take_link(id)
                    .map_err(program_error("attach", hook.program))?;
                fd_link(link, hook.program)?
            }
        };
        let link = self.pin_link(hook, link)?;
        self.links.insert(hook.clone(), link);
        Ok(())
    }

    /// Pins a link under its hook's name, in place of what stands there.
    fn pin_link(&self, hook: &Hook, link: FdLink) -> Result<PinnedLink, DatapathError> {
        let path = self.link_pin(hook);
        let fresh = path.with_file_name(link_pin::fresh(&hook.pin_name()));
        let _ = fs::remove_file(&fresh);
        let pinned = link.pin(&fresh).map_err(|source| DatapathError::Pin {
            path: fresh.clone(),
            source,
        })?;
        fs::rename(&fresh, &path).map_err(file_error("rename", &fresh))?;
        Ok(pinned)
    }

    /// Removes pinned links of hooks that are no longer wanted, which detaches them.
    fn remove_other_links(&mut self, wanted: &[Hook]) -> Result<(), DatapathError> {
        let wanted: HashSet<Hook> = wanted
            .iter()
            .cloned()
            .chain(self.workloads.hooks())
            .collect();
        self.links.retain(|hook, _| wanted.contains(hook));
        let folder = self.pins.join(LINK_PINS);
        let names: HashSet<String> = wanted.iter().map(Hook::pin_name).collect();
        for entry in fs::read_dir(&folder).map_err(file_error("read", &folder))? {
            let path = entry.map_err(file_error("read", &folder))?.path();
            let known = path
                .file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| names.contains(name));
            if !known {
                fs::remove_file(&path).map_err(file_error("remove", &path))?;
            }
        }
        Ok(())
    }

    pub(super) fn link_pin(&self, hook: &Hook) -> PathBuf {
        self.pins.join(LINK_PINS).join(hook.pin_name())
    }
}

/// All pins in the folder of links of the hook's program. A pin's name says nothing of the device: a link stays
/// with its device when that gets another name, and another device may have the old one by now.
fn pins_of_program(hook: &Hook, folder: &Path) -> Vec<PathBuf> {
    let of_program = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let program = name.and_then(link_pin::parse).map(|(program, _)| program);
        program == Some(hook.program)
    };
    let entries = fs::read_dir(folder).into_iter().flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(of_program).collect()
}

/// Gives this program to the link that a former one of its name has on the hook's device, if one is
/// among these pins.
fn take_over(program: &mut SchedClassifier, hook: &Hook, pins: Vec<PathBuf>) -> Option<FdLink> {
    let device = if_nametoindex(hook.device.as_str()).ok()?;
    let is_there =
        |path: &PathBuf| sys::device_of_link(path).is_ok_and(|found| found == Some(device));
    let path = pins.into_iter().find(is_there)?;
    let former = FdLink::from(PinnedLink::from_pin(&path).ok()?);
    let attempt = || {
        let link = SchedClassifierLink::try_from(former).map_err(|error| error.to_string())?;
        let id = program
            .attach_to_link(link)
            .map_err(|error| error.to_string())?;
        let link = program.take_link(id).map_err(|error| error.to_string())?;
        FdLink::try_from(link).map_err(|error| error.to_string())
    };
    attempt()
        .inspect_err(
            |error| debug!(pin = %path.display(), error, "a pinned link is of no use any more"),
        )
        .ok()
}

fn fd_link(link: SchedClassifierLink, program: &str) -> Result<FdLink, DatapathError> {
    FdLink::try_from(link)
        .map_err(|error| DatapathError::Missing(format!("link of {program}: {error}")))
}
