//! Type descriptions (BTF, `Documentation/bpf/btf.rst` of the kernel).

use std::io;
use std::os::fd::OwnedFd;

use aya_obj::generated::bpf_cmd::BPF_BTF_LOAD;

use super::bpf_open;

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
