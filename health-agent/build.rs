//! Makes the release binary small with LLD's features. On x86-64, LLD is rustc's own linker.

use std::env;
use std::ffi::CStr;

/// The first glibc whose loader reads packed relocations (`DT_RELR`).
const GLIBC_WITH_RELR: (u32, u32) = (2, 36);

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    if !is("PROFILE", "release") {
        return;
    }
    println!("cargo:rustc-link-arg-bins=-Wl,--strip-all");
    if !is("TARGET", "x86_64-unknown-linux-gnu") {
        return;
    }
    // Merges functions with identical code. Nothing in Rust depends on their addresses.
    println!("cargo:rustc-link-arg-bins=-Wl,--icf=all");
    // A panic aborts the process, and without symbols an unwinder's result would be unreadable.
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/no-unwind.ld");
    println!("cargo:rerun-if-changed={script}");
    println!("cargo:rustc-link-arg-bins=-Wl,--no-eh-frame-hdr,-T,{script}");
    if env::var("HOST") == env::var("TARGET") && glibc() >= Some(GLIBC_WITH_RELR) {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// The version of this machine's C library, as `(major, minor)`.
fn glibc() -> Option<(u32, u32)> {
    // SAFETY: the library's own string, which is never changed.
    let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    let (major, minor) = version.to_str().ok()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
