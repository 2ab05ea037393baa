//! Links of programs to devices.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use aya_obj::generated::bpf_cmd::BPF_LINK_CREATE;
use aya_obj::generated::bpf_link_type::BPF_LINK_TYPE_TCX;

use super::{bpf_open, object_info, open_pin};

/// The beginning of `struct bpf_link_info` of a TCX link.
#[repr(C)]
#[derive(Default)]
struct TcxLinkInfo {
    kind: u32,
    id: u32,
    program_id: u32,
    pad: u32,
    ifindex: u32,
    attach_type: u32,
}

/// `union bpf_attr` for making a TCX link, at the end of those that a device has.
#[repr(C)]
#[derive(Default)]
struct LinkAttr {
    program: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    pad: u32,
    expected_revision: u64,
}

/// Puts a program on a device, behind those that are there. The link goes with its last descriptor or pin.
pub(crate) fn create_tcx_link(
    program: BorrowedFd<'_>,
    device: u32,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    let mut attr = LinkAttr {
        program: program.as_raw_fd() as u32,
        ifindex: device,
        attach_type,
        ..LinkAttr::default()
    };
    bpf_open(BPF_LINK_CREATE, &mut attr)
}

/// Number of the device that the TCX link pinned at `path` is on; `None` for other objects, and where
/// the device is gone.
pub(crate) fn device_of_link(path: &Path) -> io::Result<Option<u32>> {
    let link = open_pin(path)?;
    let mut info = TcxLinkInfo::default();
    object_info(link.as_fd(), &mut info)?;
    Ok((info.kind == BPF_LINK_TYPE_TCX as u32 && info.ifindex != 0).then_some(info.ifindex))
}
