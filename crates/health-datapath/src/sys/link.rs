//! Links that attach programs to devices and cgroups.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use aya_obj::generated::bpf_attach_type::{self, BPF_XDP};
use aya_obj::generated::bpf_cmd::{BPF_LINK_CREATE, BPF_LINK_DETACH, BPF_LINK_UPDATE};
use aya_obj::generated::bpf_link_type::{
    BPF_LINK_TYPE_CGROUP, BPF_LINK_TYPE_TCX, BPF_LINK_TYPE_XDP,
};

use super::{bpf, bpf_open, object_info, open_pin};

/// The start of `struct bpf_link_info` for a link to a device. For XDP, it ends after the device.
#[repr(C)]
#[derive(Default)]
struct DeviceLinkInfo {
    kind: u32,
    id: u32,
    program_id: u32,
    pad: u32,
    ifindex: u32,
    attach_type: u32,
}

/// The start of `struct bpf_link_info` for a link to a cgroup.
#[repr(C)]
#[derive(Default)]
struct CgroupLinkInfo {
    kind: u32,
    id: u32,
    program_id: u32,
    pad: u32,
    cgroup_id: u64,
    attach_type: u32,
    pad2: u32,
}

/// `union bpf_attr` for creating a link. Its end matches links to devices and cgroups; for XDP, everything after the
/// flags is 0.
#[repr(C)]
#[derive(Default)]
struct LinkAttr {
    program: u32,
    /// Ifindex of the device, or descriptor of the cgroup.
    target: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    pad: u32,
    expected_revision: u64,
}

/// Where a link attaches a program.
pub(crate) enum LinkTarget<'a> {
    /// A device, by ifindex: after the existing programs.
    Tcx { device: u32, hook: bpf_attach_type },
    /// A device without an XDP program, with flags such as `XDP_FLAGS_DRV_MODE`.
    Xdp { device: u32, flags: u32 },
    /// A cgroup: after the existing programs.
    Cgroup {
        group: BorrowedFd<'a>,
        hook: bpf_attach_type,
    },
}

/// Attaches a program. The link disappears with its last descriptor or pin.
pub(crate) fn create_link(program: BorrowedFd<'_>, target: &LinkTarget<'_>) -> io::Result<OwnedFd> {
    let (target, attach_type, flags) = match *target {
        LinkTarget::Tcx { device, hook } => (device, hook, 0),
        LinkTarget::Xdp { device, flags } => (device, BPF_XDP, flags),
        LinkTarget::Cgroup { group, hook } => (group.as_raw_fd() as u32, hook, 0),
    };
    let mut attr = LinkAttr {
        program: program.as_raw_fd() as u32,
        target,
        attach_type: attach_type as u32,
        flags,
        ..LinkAttr::default()
    };
    bpf_open(BPF_LINK_CREATE, &mut attr)
}

/// Detaches a link from its device at once, no matter which process holds it.
pub(crate) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = link.as_raw_fd() as u32;
    bpf(BPF_LINK_DETACH, &mut attr)
}

/// Returns the ifindex of the device that the TCX or XDP link pinned at `path` is attached to; `None` for other
/// objects, and if the device is gone.
pub(crate) fn device_of_link(path: &Path) -> io::Result<Option<u32>> {
    let link = open_pin(path)?;
    let mut info = DeviceLinkInfo::default();
    object_info(link.as_fd(), &mut info)?;
    let kinds = [BPF_LINK_TYPE_TCX, BPF_LINK_TYPE_XDP].map(|kind| kind as u32);
    Ok((kinds.contains(&info.kind) && info.ifindex != 0).then_some(info.ifindex))
}

/// `union bpf_attr` for replacing a link's program.
#[repr(C)]
#[derive(Default)]
struct UpdateAttr {
    link: u32,
    program: u32,
    flags: u32,
    old_program: u32,
}

/// A link to a cgroup.
pub(crate) struct CgroupLink {
    /// Id of its program.
    pub(crate) program: u32,
    /// Its hook, as in `enum bpf_attach_type`.
    pub(crate) hook: u32,
    /// Whether the program runs at the hook: `false` once the link has been detached.
    pub(crate) is_attached: bool,
}

/// Returns details of a link to a cgroup; an error for other objects.
pub(crate) fn cgroup_link(link: BorrowedFd<'_>) -> io::Result<CgroupLink> {
    let mut info = CgroupLinkInfo::default();
    object_info(link, &mut info)?;
    if info.kind != BPF_LINK_TYPE_CGROUP as u32 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(CgroupLink {
        program: info.program_id,
        hook: info.attach_type,
        is_attached: info.cgroup_id != 0,
    })
}

/// Replaces a link's program atomically.
pub(crate) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = UpdateAttr {
        link: link.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        ..UpdateAttr::default()
    };
    bpf(BPF_LINK_UPDATE, &mut attr)
}
