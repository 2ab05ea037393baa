//! Type descriptions (BTF).

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use aya_obj::generated::bpf_cmd::{BPF_BTF_GET_FD_BY_ID, BPF_BTF_LOAD};

use super::{IdAttr, bpf_open, object_info};

/// `struct bpf_btf_info`.
#[repr(C)]
#[derive(Default)]
struct BtfInfo {
    data: u64,
    len: u32,
    id: u32,
    name: u64,
    name_len: u32,
    of_kernel: u32,
}

/// `union bpf_attr` for loading BTF.
#[repr(C)]
#[derive(Default)]
struct BtfAttr {
    data: u64,
    log: u64,
    len: u32,
    log_len: u32,
    log_level: u32,
    pad: u32,
}

/// Loads types (BTF) into the kernel.
pub(crate) fn load_btf(data: &[u8]) -> io::Result<OwnedFd> {
    let mut attr = BtfAttr {
        data: data.as_ptr() as u64,
        len: data.len() as u32,
        ..BtfAttr::default()
    };
    bpf_open(BPF_BTF_LOAD, &mut attr)
}

/// The BTF object with this id, as it was loaded.
pub(crate) fn btf(id: u32) -> io::Result<Vec<u8>> {
    let mut attr = IdAttr {
        id,
        ..IdAttr::default()
    };
    let btf = bpf_open(BPF_BTF_GET_FD_BY_ID, &mut attr)?;
    let mut info = BtfInfo::default();
    object_info(btf.as_fd(), &mut info)?;
    let mut data = vec![0_u8; info.len as usize];
    let mut info = BtfInfo {
        data: data.as_mut_ptr() as u64,
        len: info.len,
        ..BtfInfo::default()
    };
    object_info(btf.as_fd(), &mut info)?;
    Ok(data)
}
