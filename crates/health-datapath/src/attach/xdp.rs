//! Attachment by XDP links. As with TCX, a link is pinned, and the next agent takes it over. It never replaces a
//! foreign program: the kernel refuses that for links (net/core/dev.c, `dev_xdp_attach`).

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::programs::links::PinnedLink;
use aya::programs::loaded_programs;
use aya_obj::generated::{XDP_FLAGS_DRV_MODE, XDP_FLAGS_SKB_MODE};
use health_net::ethtool;
use health_net::xdp::{self, Mode};

use super::{Hook, tcx};
use crate::error::DatapathError;
use crate::sys::{self, LinkTarget};

/// A link that is not yet pinned under its hook's name.
pub(super) struct XdpLink(OwnedFd);

impl XdpLink {
    pub(super) fn pin(self, path: &Path) -> Result<PinnedLink, DatapathError> {
        sys::pin(self.0.as_fd(), path).map_err(|source| DatapathError::File {
            what: "pin a link at",
            path: path.to_owned(),
            source,
        })?;
        PinnedLink::from_pin(path).map_err(|error| DatapathError::File {
            what: "open the link at",
            path: path.to_owned(),
            source: io::Error::other(error),
        })
    }
}

/// Attaches a program to its device. Reuses a former link on that device if `pins` includes one with this mode.
pub(super) fn attach(
    program: BorrowedFd<'_>,
    hook: &Hook,
    mode: Mode,
    pins: Vec<PathBuf>,
) -> Result<XdpLink, DatapathError> {
    let number = hook.device_number().map_err(hook.failed("attach"))?;
    if let Some(pin) = tcx::pin_on_device(hook, pins) {
        let former = sys::open_pin(&pin).map_err(hook.failed("open the previous link of"))?;
        let device = xdp::device(number).map_err(hook.failed("look up"))?;
        let is_of_mode = device.programs.iter().any(|(found, _)| *found == mode);
        // The kernel swaps the program, so the link is never without one.
        if is_of_mode && sys::update_link(former.as_fd(), program).is_ok() {
            return Ok(XdpLink(former));
        }
        // All programs of a device must have the same mode. Until the new one is attached, the tc programs serve all
        // packets.
        sys::detach_link(former.as_fd()).map_err(hook.failed("detach the previous program of"))?;
    }
    let flags = match mode {
        Mode::Native => XDP_FLAGS_DRV_MODE,
        _ => XDP_FLAGS_SKB_MODE,
    };
    let target = LinkTarget::Xdp {
        device: number,
        flags,
    };
    match sys::create_link(program, &target) {
        Ok(link) => Ok(XdpLink(link)),
        Err(error) => Err(refusal(hook, number, error)),
    }
}

/// Why a device rejects a program.
fn refusal(hook: &Hook, number: u32, error: io::Error) -> DatapathError {
    let device = hook.device.clone();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => DatapathError::NoNativeXdp {
            driver: ethtool::driver(&device).unwrap_or_else(|_| "unknown".to_owned()),
            device,
        },
        // How veth reports it (drivers/net/veth.c, `veth_xdp_set`).
        Some(libc::ERANGE) => DatapathError::MtuTooLargeForXdp { device },
        Some(libc::EBUSY | libc::EEXIST) => {
            let there = xdp::device(number).unwrap_or_default();
            let program = there.programs.first().map(|(_, id)| program_label(*id));
            DatapathError::ForeignXdp {
                device,
                program: program.unwrap_or_else(|| "already detached".to_owned()),
            }
        }
        _ => hook.failed("attach")(error),
    }
}

/// Returns a program's label for messages.
fn program_label(id: u32) -> String {
    let mut programs = loaded_programs().filter_map(Result::ok);
    let info = programs.find(|info| info.id() == id);
    match info.as_ref().and_then(|info| info.name_as_str()) {
        Some(name) if !name.is_empty() => format!("{name} (number {id})"),
        _ => format!("number {id}"),
    }
}

/// Whether the program with this id is attached in this mode. `false` if the device is gone: its owner reports that.
pub(super) fn has_program(hook: &Hook, mode: Mode, id: u32) -> bool {
    let device = hook.device_number().and_then(xdp::device);
    device.is_ok_and(|device| device.programs.contains(&(mode, id)))
}
