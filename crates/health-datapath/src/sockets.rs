//! The programs for the host's own sockets: attached to the root cgroup by pinned links, replaced in place, watched and
//! reattached. Foreign programs at the same hooks stay.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::Ebpf;
use aya::programs::Program;
use aya_obj::generated::bpf_attach_type;
use tracing::{debug, warn};

use super::layout::{LINK_PINS, PROGRAM_PINS, SOCKET_PROGRAMS};
use super::layout_change::set_aside;
use super::loader::{file_error, program_error};
use super::pin_folder::remove_tree;
use super::sys::{self, LinkTarget};
use super::{Datapath, DatapathError, link_pin};

/// The programs, and where they are attached.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    /// Empty if the kernel rejects one of them.
    programs: BTreeMap<&'static str, SocketProgram>,
    /// Where to attach them; `None`: nowhere.
    root: Option<CgroupRoot>,
    /// By program; kept open so that removing a pin does not detach the program.
    links: BTreeMap<&'static str, OwnedFd>,
}

#[derive(Debug)]
struct SocketProgram {
    fd: OwnedFd,
    id: u32,
    hook: bpf_attach_type,
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
    /// The program of this name was not attached.
    Detached(&'static str),
    /// The program was attached, but its link's pin was missing.
    PinLost(&'static str),
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

impl Sockets {
    /// The names of all socket programs.
    pub(super) fn program_names() -> impl Iterator<Item = &'static str> {
        SOCKET_PROGRAMS.into_iter().map(|(name, _)| name)
    }

    /// Takes the loaded programs from an object and pins them; `errors` has those that failed to load. The rest of the
    /// datapath works without them.
    pub(super) fn take(
        ebpf: &mut Ebpf,
        mut errors: HashMap<&'static str, DatapathError>,
        pins: &Path,
    ) -> Result<Self, DatapathError> {
        let mut programs = BTreeMap::new();
        for (name, hook) in SOCKET_PROGRAMS {
            let program = match errors.remove(name) {
                Some(error) => Err(error),
                None => take(ebpf, name, hook),
            };
            match program {
                Ok(program) => programs.insert(name, program),
                Err(error) => {
                    warn!(%error, "cannot serve services to host sockets");
                    return Ok(Self::default());
                }
            };
        }
        let sockets = Self {
            programs,
            ..Self::default()
        };
        for name in sockets.programs.keys() {
            sockets.pin_program(pins, name)?;
        }
        Ok(sockets)
    }

    /// The names of the loaded programs.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.programs.keys().copied()
    }

    /// Whether nothing has changed since loading.
    pub(super) fn are_as_loaded(&self) -> bool {
        self.root.is_none() && self.links.is_empty()
    }

    /// The programs without a pin.
    pub(super) fn without_pin(&self, pins: &Path) -> Vec<&'static str> {
        let folder = pins.join(PROGRAM_PINS);
        self.names()
            .filter(|name| !folder.join(name).exists())
            .collect()
    }

    /// Pins a program, replacing another's pin of the same name.
    pub(super) fn pin_program(&self, pins: &Path, name: &str) -> Result<(), DatapathError> {
        let program = self.programs.get(name);
        let program = program.ok_or_else(|| DatapathError::Missing(name.to_owned()))?;
        pin(program.fd.as_fd(), &pins.join(PROGRAM_PINS), name)
    }

    /// Attaches the programs where they must be, and nowhere else.
    pub(super) fn attach(&mut self, pins: &Path) -> Result<(), DatapathError> {
        if self.root.is_none() {
            return self.detach(pins);
        }
        let names: Vec<_> = self.names().collect();
        for name in names {
            if !self.is_attached(name) {
                self.attach_program(pins, name)?;
            }
        }
        Ok(())
    }

    fn attach_program(&mut self, pins: &Path, name: &'static str) -> Result<(), DatapathError> {
        let (Some(root), Some(program)) = (&self.root, self.programs.get(name)) else {
            return Ok(());
        };
        let former = [pins.to_owned(), set_aside(pins)].map(|pins| pins.join(LINK_PINS).join(name));
        let mut taken = former.iter().filter_map(|pin| program.take_over(pin));
        let link = match taken.next() {
            Some(link) => link,
            None => {
                let target = LinkTarget::Cgroup {
                    group: root.folder.as_fd(),
                    hook: program.hook,
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
        pin(link.as_fd(), &pins.join(LINK_PINS), name)?;
        self.links.insert(name, link);
        Ok(())
    }

    /// Detaches the programs, including a former agent's.
    fn detach(&mut self, pins: &Path) -> Result<(), DatapathError> {
        self.links.clear();
        for (name, _) in SOCKET_PROGRAMS {
            for pins in [pins.to_owned(), set_aside(pins)] {
                remove_tree(&pins.join(LINK_PINS).join(name))?;
            }
        }
        Ok(())
    }

    fn is_attached(&self, name: &str) -> bool {
        let (Some(link), Some(program)) = (self.links.get(name), self.programs.get(name)) else {
            return false;
        };
        sys::cgroup_link(link.as_fd())
            .is_ok_and(|found| found.is_attached && found.program == program.id)
    }

    fn faults(&self, pins: &Path) -> Vec<SocketFault> {
        if self.root.is_none() {
            return Vec::new();
        }
        let folder = pins.join(LINK_PINS);
        let fault = |name: &&'static str| {
            if !self.is_attached(name) {
                Some(SocketFault::Detached(name))
            } else if !folder.join(name).exists() {
                Some(SocketFault::PinLost(name))
            } else {
                None
            }
        };
        self.programs.keys().filter_map(fault).collect()
    }

    fn repair(&mut self, pins: &Path, fault: SocketFault) -> Result<(), DatapathError> {
        match fault {
            SocketFault::Detached(name) => {
                // A detached link can no longer attach anything.
                self.links.remove(name);
                self.attach_program(pins, name)
            }
            SocketFault::PinLost(name) => match self.links.get(name) {
                Some(link) => pin(link.as_fd(), &pins.join(LINK_PINS), name),
                None => Ok(()),
            },
        }
    }
}

impl SocketProgram {
    /// Puts the program into the link that is pinned there, if that is for the same hook.
    fn take_over(&self, path: &Path) -> Option<OwnedFd> {
        let link = sys::open_pin(path).ok()?;
        let taken = sys::cgroup_link(link.as_fd()).and_then(|found| {
            if !found.is_attached || found.hook != self.hook as u32 {
                return Err(io::ErrorKind::NotFound.into());
            }
            sys::update_link(link.as_fd(), self.fd.as_fd())
        });
        match taken {
            Ok(()) => Some(link),
            Err(error) => {
                debug!(pin = %path.display(), %error, "cannot reuse a pinned link");
                None
            }
        }
    }
}

impl Datapath {
    /// From the next [`Datapath::attach`] on, serves services to the host's own sockets, by programs attached to the root
    /// cgroup that is mounted at this path. `None` turns it off.
    pub fn set_socket_root(&mut self, root: Option<&Path>) -> Result<(), DatapathError> {
        self.sockets.root = match root {
            Some(path) => Some(CgroupRoot {
                path: path.to_owned(),
                folder: File::open(path).map_err(file_error("open", path))?,
            }),
            None => None,
        };
        Ok(())
    }

    /// The faults of the programs for the host's own sockets.
    pub fn socket_faults(&self) -> Vec<SocketFault> {
        self.sockets.faults(&self.pins)
    }

    /// Repairs what [`Datapath::socket_faults`] found.
    pub fn repair_sockets(&mut self, fault: SocketFault) -> Result<(), DatapathError> {
        self.make_folders()?;
        self.sockets.repair(&self.pins, fault)
    }
}

fn take(
    ebpf: &mut Ebpf,
    name: &'static str,
    hook: bpf_attach_type,
) -> Result<SocketProgram, DatapathError> {
    let failed = || program_error("load", name);
    let fd = match ebpf.program_mut(name) {
        Some(Program::CgroupSockAddr(program)) => program.fd().map_err(failed())?.try_clone(),
        Some(Program::CgroupSock(program)) => program.fd().map_err(failed())?.try_clone(),
        _ => return Err(DatapathError::Missing(name.to_owned())),
    };
    let fd = fd.map_err(|error| failed()(error.into()))?;
    let fd = fd.as_fd().try_clone_to_owned();
    let fd = fd.map_err(|error| failed()(error.into()))?;
    let id = sys::program_id(fd.as_fd()).map_err(|error| failed()(error.into()))?;
    Ok(SocketProgram { fd, id, hook })
}

/// Pins an object, replacing an existing pin.
fn pin(object: impl AsFd, folder: &Path, name: &str) -> Result<(), DatapathError> {
    let path = folder.join(name);
    let fresh = folder.join(link_pin::fresh(name));
    remove_tree(&fresh)?;
    sys::pin(object.as_fd(), &fresh).map_err(file_error("pin", &fresh))?;
    fs::rename(&fresh, &path).map_err(file_error("rename", &fresh))
}
