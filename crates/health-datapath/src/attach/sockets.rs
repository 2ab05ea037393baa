//! The hooks for the host's own sockets: their programs are attached to the root cgroup by pinned links, replaced in
//! place, watched and reattached. Foreign programs at the same hooks stay.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::{fmt, io};

use aya_obj::generated::bpf_attach_type;
use tracing::debug;

use crate::error::{DatapathError, file_error};
use crate::link_pin;
use crate::pin_folder::{LINK_PINS, former_layout_pins, remove_tree, replace_pin};
use crate::program::{AttachPoint, DatapathProgram};
use crate::programs::{SocketProgram, SocketPrograms};
use crate::sys::{self, LinkTarget};

/// Where the programs are attached.
#[derive(Debug, Default)]
pub(crate) struct SocketHooks {
    /// Where to attach them; `None`: nowhere.
    root: Option<CgroupRoot>,
    /// By program; kept open so that removing a pin does not detach the program.
    links: BTreeMap<DatapathProgram, OwnedFd>,
}

/// The root cgroup (version 2).
#[derive(Debug)]
struct CgroupRoot {
    path: PathBuf,
    folder: File,
}

/// A fault at a socket hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketFault {
    /// The program was not attached.
    Detached(DatapathProgram),
    /// The program was attached, but its link's pin was missing.
    PinLost(DatapathProgram),
}

impl SocketFault {
    /// A short fixed word, for counters; the same as for [`HookFault`](super::HookFault).
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Detached(_) => "program-detached",
            Self::PinLost(_) => "link-pin-lost",
        }
    }
}

impl fmt::Display for SocketFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Detached(program) => {
                write!(f, "program {program} at the root cgroup was detached")
            }
            Self::PinLost(program) => {
                write!(f, "the pinned link of program {program} was removed")
            }
        }
    }
}

impl SocketHooks {
    /// Whether nothing was attached or chosen.
    pub(super) fn are_as_loaded(&self) -> bool {
        self.root.is_none() && self.links.is_empty()
    }

    /// Sets the root cgroup by its mount point; `None` for no hooks.
    pub(crate) fn set_root(&mut self, root: Option<&Path>) -> Result<(), DatapathError> {
        self.root = match root {
            Some(path) => Some(CgroupRoot {
                path: path.to_owned(),
                folder: File::open(path).map_err(file_error("open", path))?,
            }),
            None => None,
        };
        Ok(())
    }

    /// Attaches the programs to the root cgroup. Detaches them if no root cgroup is set.
    pub(super) fn attach(
        &mut self,
        programs: &SocketPrograms,
        pins: &Path,
    ) -> Result<(), DatapathError> {
        if self.root.is_none() {
            return self.detach(pins);
        }
        for (name, program) in programs.all() {
            if !self.is_attached(name, program) {
                self.attach_program(pins, name, program)?;
            }
        }
        Ok(())
    }

    fn attach_program(
        &mut self,
        pins: &Path,
        name: DatapathProgram,
        program: &SocketProgram,
    ) -> Result<(), DatapathError> {
        let (Some(root), AttachPoint::Cgroup(hook)) = (&self.root, name.attach_point()) else {
            return Ok(());
        };
        let former =
            [pins.to_owned(), former_layout_pins(pins)].map(|pins| link_pin_of(&pins, name));
        let mut taken = former
            .iter()
            .filter_map(|pin| take_over(pin, hook, program));
        let link = match taken.next() {
            Some(link) => link,
            None => {
                let target = LinkTarget::Cgroup {
                    group: root.folder.as_fd(),
                    hook,
                };
                sys::create_link(program.fd.as_fd(), &target).map_err(|source| {
                    DatapathError::Filter {
                        what: "attach",
                        hook: format!("program {name} at {}", root.path.display()),
                        source,
                    }
                })?
            }
        };
        pin(link.as_fd(), pins, name)?;
        self.links.insert(name, link);
        Ok(())
    }

    /// Detaches the programs, including a former agent's.
    fn detach(&mut self, pins: &Path) -> Result<(), DatapathError> {
        self.links.clear();
        for program in DatapathProgram::FOR_SOCKETS {
            for pins in [pins.to_owned(), former_layout_pins(pins)] {
                // Removing the pin ends the link: host sockets must not reach services any more.
                remove_tree(&link_pin_of(&pins, program))?;
            }
        }
        Ok(())
    }

    fn is_attached(&self, name: DatapathProgram, program: &SocketProgram) -> bool {
        let Some(link) = self.links.get(&name) else {
            return false;
        };
        sys::cgroup_link(link.as_fd())
            .is_ok_and(|found| found.is_attached && found.program == program.id)
    }

    /// The faults of the programs.
    pub(crate) fn faults(&self, programs: &SocketPrograms, pins: &Path) -> Vec<SocketFault> {
        if self.root.is_none() {
            return Vec::new();
        }
        let fault = |(name, program): (DatapathProgram, &SocketProgram)| {
            if !self.is_attached(name, program) {
                Some(SocketFault::Detached(name))
            } else if !link_pin_of(pins, name).exists() {
                Some(SocketFault::PinLost(name))
            } else {
                None
            }
        };
        programs.all().filter_map(fault).collect()
    }

    pub(super) fn repair(
        &mut self,
        programs: &SocketPrograms,
        pins: &Path,
        fault: SocketFault,
    ) -> Result<(), DatapathError> {
        match fault {
            SocketFault::Detached(name) => {
                // A detached link can no longer attach anything.
                self.links.remove(&name);
                match programs.get(name) {
                    Some(program) => self.attach_program(pins, name, program),
                    None => Ok(()),
                }
            }
            SocketFault::PinLost(name) => match self.links.get(&name) {
                Some(link) => pin(link.as_fd(), pins, name),
                None => Ok(()),
            },
        }
    }
}

/// Swaps the program into the link pinned at `path`, if that link is for the same hook.
fn take_over(path: &Path, hook: bpf_attach_type, program: &SocketProgram) -> Option<OwnedFd> {
    let link = sys::open_pin(path).ok()?;
    let taken = sys::cgroup_link(link.as_fd()).and_then(|found| {
        if !found.is_attached || found.hook != hook as u32 {
            return Err(io::ErrorKind::NotFound.into());
        }
        // The kernel swaps the program, so the link is never without one.
        sys::update_link(link.as_fd(), program.fd.as_fd())
    });
    match taken {
        Ok(()) => Some(link),
        Err(error) => {
            debug!(pin = %path.display(), %error, "cannot reuse a pinned link");
            None
        }
    }
}

/// The pin of a program's link.
fn link_pin_of(pins: &Path, program: DatapathProgram) -> PathBuf {
    pins.join(LINK_PINS).join(program.name())
}

/// Pins a program's link, replacing an existing pin.
fn pin(link: BorrowedFd<'_>, pins: &Path, program: DatapathProgram) -> Result<(), DatapathError> {
    let path = link_pin_of(pins, program);
    let fresh = path.with_file_name(link_pin::fresh(program.name()));
    // The link is open, so its program stays attached even when its pins are replaced.
    replace_pin(&path, &fresh, |fresh| {
        sys::pin(link, fresh).map_err(file_error("pin", fresh))
    })
}
