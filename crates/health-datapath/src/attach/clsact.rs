//! Attachment by filters of clsact qdiscs, for devices that come and go and for kernels without TCX. A filter keeps its
//! program attached whether or not an agent runs; the next agent finds the filter by its name, which contains the
//! agent's instance, and swaps in its own program.
//!
//! An existing clsact qdisc is used and left in place. A qdisc that an agent created is removed with its last filter,
//! or disappears with its device if agents created that too. On other devices, agents note their qdiscs in a folder of
//! the bpffs; a reboot clears both the notes and the qdiscs.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use aya::programs::SchedClassifier;
use health_net::tc::{Filter, Place, Side, Socket};
use nix::net::if_::if_indextoname;

use super::Hook;
use crate::error::DatapathError;
use crate::pin_folder::{QDISC_NOTES, former_layout_pins, make_folder};
use crate::program::Direction;

/// Ahead of foreign filters: a foreign filter may return a final verdict, so that later filters never see the packet.
/// Ours does not.
const FIRST_PRIORITY: u16 = 1;
/// Outside the handles that the kernel assigns or that others usually choose.
const FIRST_HANDLE: u32 = 0x6861;

/// The filters of one instance.
#[derive(Debug)]
pub(crate) struct Clsact {
    instance: String,
    pins: PathBuf,
}

impl Clsact {
    /// Returns the filters of the instance with this pin folder.
    pub(crate) fn of(pins: &Path) -> Self {
        let instance = pins.file_name().unwrap_or_default();
        Self {
            instance: instance.to_string_lossy().into_owned(),
            pins: pins.to_owned(),
        }
    }

    /// Attaches a program to its device, replacing a former one of the same name.
    pub(super) fn attach(
        &self,
        hook: &Hook,
        program: &SchedClassifier,
    ) -> Result<(), DatapathError> {
        let program = program.fd().map_err(hook.program_error("attach"))?;
        self.put(hook, program.as_fd())
            .map_err(hook.failed("attach"))
    }

    fn put(&self, hook: &Hook, program: BorrowedFd<'_>) -> io::Result<()> {
        let (device, side) = (hook.device_number()?, side(hook.direction()));
        let name = self.name(hook.program.name());
        let mut socket = Socket::open()?;
        let filters = socket.filters(device, side)?;
        match filters.iter().find(|filter| filter.is_named(&name)) {
            Some(former) => socket.replace_filter(device, side, former.place, &name, program)?,
            None => {
                if socket.add_clsact(device)? && !hook.is_on_own_device() {
                    self.note(device)?;
                }
                socket.add_filter(device, side, free_place(&filters), &name, program)?;
            }
        }
        self.keep_note(device)
    }

    /// Whether the program with this id is attached. `false` if the device is gone: its owner reports that.
    pub(super) fn has_program(&self, hook: &Hook, id: u32) -> bool {
        let filter = self.filter(hook).ok().flatten();
        filter.is_some_and(|filter| filter.program == Some(id))
    }

    /// Returns this instance's filter at a hook.
    pub(crate) fn filter(&self, hook: &Hook) -> io::Result<Option<Filter>> {
        let device = hook.device_number()?;
        let name = self.name(hook.program.name());
        let filters = Socket::open()?.filters(device, side(hook.direction()))?;
        Ok(filters.into_iter().find(|filter| filter.is_named(&name)))
    }

    /// Detaches a program from its device, if both exist.
    pub(super) fn detach(&self, hook: &Hook) -> Result<(), DatapathError> {
        let Ok(device) = hook.device_number() else {
            return Ok(());
        };
        let (name, side) = (self.name(hook.program.name()), side(hook.direction()));
        let remove = || {
            let mut socket = Socket::open()?;
            self.remove_filters(&mut socket, device, side, &|found| found == name)?;
            self.remove_qdisc(&mut socket, device)
        };
        remove().map(drop).map_err(hook.failed("detach"))
    }

    /// Detaches all programs of this instance, except at the wanted hooks. Returns descriptions of what was removed.
    pub(crate) fn remove_others(&self, wanted: &[Hook]) -> Result<Vec<String>, DatapathError> {
        let wanted: Vec<(u32, Side, String)> = wanted
            .iter()
            .filter_map(|hook| {
                let device = hook.device_number().ok()?;
                Some((
                    device,
                    side(hook.direction()),
                    self.name(hook.program.name()),
                ))
            })
            .collect();
        let own = self.name("");
        let mut removed = Vec::new();
        let mut remove = || {
            let mut socket = Socket::open()?;
            for device in socket.devices_with_clsact()? {
                for side in Side::ALL {
                    let is_other = |name: &str| {
                        name.starts_with(&own)
                            && !wanted.iter().any(|(wanted_device, wanted_side, wanted)| {
                                (*wanted_device, *wanted_side) == (device, side) && wanted == name
                            })
                    };
                    removed.extend(self.remove_filters(&mut socket, device, side, &is_other)?);
                }
                self.remove_qdisc(&mut socket, device)?;
            }
            self.forget_gone()
        };
        remove().map_err(|source| DatapathError::Filter {
            what: "remove",
            hook: "this agent's clsact filters".to_owned(),
            source,
        })?;
        Ok(removed)
    }

    /// Returns the ids of the attached programs, with their hooks: `eth0/egress`.
    pub(crate) fn attached(&self) -> io::Result<Vec<(u32, String)>> {
        let own = self.name("");
        let mut attached = Vec::new();
        let mut socket = Socket::open()?;
        for device in socket.devices_with_clsact()? {
            for (side, direction) in [
                (Side::Ingress, Direction::Ingress),
                (Side::Egress, Direction::Egress),
            ] {
                let filters = socket.filters(device, side)?;
                let own = filters.iter().filter(|filter| {
                    let name = filter.name.as_deref();
                    name.is_some_and(|name| name.starts_with(&own))
                });
                let programs = own.filter_map(|filter| filter.program);
                attached.extend(
                    programs
                        .map(|program| (program, format!("{}/{direction}", device_name(device)))),
                );
            }
        }
        Ok(attached)
    }

    fn remove_filters(
        &self,
        socket: &mut Socket,
        device: u32,
        side: Side,
        is_meant: &dyn Fn(&str) -> bool,
    ) -> io::Result<Vec<String>> {
        let mut removed = Vec::new();
        for filter in socket.filters(device, side)? {
            let Some(name) = filter.name.as_deref().filter(|name| is_meant(name)) else {
                continue;
            };
            match socket.remove_filter(device, side, filter.place) {
                Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
                _ => removed.push(format!("filter {name} of {}", device_name(device))),
            }
        }
        Ok(removed)
    }

    /// Removes a clsact qdisc that was created here and has no filters left.
    fn remove_qdisc(&self, socket: &mut Socket, device: u32) -> io::Result<()> {
        let note = self.note_of(&self.pins, device);
        if !note.exists() {
            return Ok(());
        }
        for side in Side::ALL {
            if !socket.filters(device, side)?.is_empty() {
                return Ok(());
            }
        }
        match socket.remove_clsact(device) {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => {
                Err(error)
            }
            _ => fs::remove_dir(&note),
        }
    }

    /// Removes the notes of devices that no longer exist.
    fn forget_gone(&self) -> io::Result<()> {
        let notes = match fs::read_dir(self.pins.join(QDISC_NOTES)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            notes => notes?,
        };
        for note in notes {
            let note = note?;
            let device = note.file_name().to_str().and_then(|name| name.parse().ok());
            if device.is_some_and(|device: u32| if_indextoname(device).is_err()) {
                fs::remove_dir(note.path())?;
            }
        }
        Ok(())
    }

    /// Notes that a device's qdisc was created here.
    fn note(&self, device: u32) -> io::Result<()> {
        make_folder(&self.note_of(&self.pins, device)).map_err(io::Error::other)
    }

    /// Carries over the note of an agent with another map layout, whose folder is about to be removed.
    fn keep_note(&self, device: u32) -> io::Result<()> {
        if self
            .note_of(&former_layout_pins(&self.pins), device)
            .exists()
        {
            self.note(device)?;
        }
        Ok(())
    }

    fn note_of(&self, pins: &Path, device: u32) -> PathBuf {
        pins.join(QDISC_NOTES).join(device.to_string())
    }

    /// The name of a filter: `health-agent/default/to_netdev`.
    fn name(&self, program: &str) -> String {
        format!("health-agent/{}/{program}", self.instance)
    }
}

/// Returns the first priority that has no filters of other kinds, and a free handle at that priority.
fn free_place(filters: &[Filter]) -> Place {
    let mut priority = FIRST_PRIORITY;
    while filters
        .iter()
        .any(|filter| filter.place.priority == priority && !filter.is_of_our_kind())
    {
        priority += 1;
    }
    let mut handle = FIRST_HANDLE;
    while filters
        .iter()
        .any(|filter| filter.place == Place { priority, handle })
    {
        handle += 1;
    }
    Place { priority, handle }
}

fn side(direction: Direction) -> Side {
    match direction {
        Direction::Ingress => Side::Ingress,
        Direction::Egress => Side::Egress,
    }
}

fn device_name(device: u32) -> String {
    if_indextoname(device).map_or_else(
        |_| format!("device {device}"),
        |name| name.to_string_lossy().into_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(priority: u16, handle: u32, kind: &str) -> Filter {
        Filter {
            place: Place { priority, handle },
            kind: kind.to_owned(),
            is_for_all: true,
            name: None,
            program: None,
        }
    }

    #[test]
    fn a_filter_is_put_in_front_where_nothing_of_another_kind_is() {
        let at = |filters: &[Filter]| {
            let place = free_place(filters);
            (place.priority, place.handle)
        };
        let first = FIRST_HANDLE;
        assert_eq!(at(&[]), (1, first));
        assert_eq!(at(&[filter(1, 1, "bpf")]), (1, first));
        assert_eq!(at(&[filter(1, first, "bpf")]), (1, first + 1));
        assert_eq!(
            at(&[filter(1, 1, "flower"), filter(7, 1, "bpf")]),
            (2, first)
        );
        let of_one_protocol = Filter {
            is_for_all: false,
            ..filter(1, 1, "bpf")
        };
        assert_eq!(at(&[of_one_protocol]), (2, first));
    }
}
