//! The kernel side seen from user space: loading, pinning and attaching programs, typed maps, dumps.

pub mod dump;
