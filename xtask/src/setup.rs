//! `cargo xtask setup`: installs the tools that a build needs besides the toolchain. Silent if nothing is missing.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::arch::Arch;
use crate::packages;
use crate::process::{output, run};
use crate::workspace::Workspace;

const BPF_LINKER_VERSION: &str = "0.13.0";
const BTF: &str = "/sys/kernel/btf/vmlinux";

pub(crate) fn setup(workspace: &Workspace) -> anyhow::Result<()> {
    ensure!(
        Path::new(BTF).exists(),
        "{BTF} is missing: boot a kernel that is built with CONFIG_DEBUG_INFO_BTF=y"
    );
    packages::require(packages::BUILD)?;
    let channel = workspace.channel()?;
    let sysroot = sysroot(channel)?;
    rust_src(channel, &sysroot)?;
    bpf_linker(workspace, &sysroot)
}

/// The toolchain's folder.
fn sysroot(channel: &str) -> anyhow::Result<PathBuf> {
    let sysroot = output(Command::new("rustup").args(["run", channel, "rustc", "--print=sysroot"]))
        .context("get rustup from https://rustup.rs")?;
    match sysroot {
        Some(sysroot) => Ok(PathBuf::from(sysroot.trim_end())),
        None => {
            bail!("toolchain {channel} is missing; run: rustup toolchain install {channel}")
        }
    }
}

/// Installs the requirements of static programs: a compiler with musl's headers for C parts, and Rust's standard
/// library.
pub(crate) fn static_target(workspace: &Workspace, arch: Arch) -> anyhow::Result<()> {
    if arch.is_own() {
        packages::require(packages::STATIC)?;
    } else {
        packages::require(&packages::cross_compiler(arch))?;
    }
    target(workspace, arch.static_target())
}

/// Installs Rust's standard library for a target.
pub(crate) fn target(workspace: &Workspace, target: &str) -> anyhow::Result<()> {
    let channel = workspace.channel()?;
    let library = sysroot(channel)?.join("lib/rustlib").join(target);
    if library.is_dir() {
        return Ok(());
    }
    println!("adding target {target} to toolchain {channel}");
    run(Command::new("rustup").args(["target", "add", target, "--toolchain", channel]))
        .with_context(|| format!("target {target} is missing and could not be added"))
}

fn rust_src(channel: &str, sysroot: &Path) -> anyhow::Result<()> {
    let core = sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml");
    if core.exists() {
        return Ok(());
    }
    println!("adding component rust-src to toolchain {channel}");
    run(Command::new("rustup").args(["component", "add", "rust-src", "--toolchain", channel]))
        .context("component rust-src is missing and could not be added")
}

/// Installs bpf-linker, built against rustc's own LLVM, so that both always use the same bitcode.
fn bpf_linker(workspace: &Workspace, sysroot: &Path) -> anyhow::Result<()> {
    let tools = workspace.tools();
    let installed = fs::read_to_string(tools.join(".crates.toml")).unwrap_or_default();
    let binary_is_there = tools.join("bin/bpf-linker").exists();
    if binary_is_there && installed.contains(&format!("\"bpf-linker {BPF_LINKER_VERSION} ")) {
        return Ok(());
    }
    println!("building bpf-linker {BPF_LINKER_VERSION} (about half a minute)");
    let llvm = link_llvm(&tools, sysroot)?;
    run(workspace
        .cargo()?
        .env("LLVM_PREFIX", llvm)
        // The wrapper for the workspace's own crates does not apply to bpf-linker.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        // LLVM does the work and is already built, so optimising the rest gains nothing.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        // Otherwise cargo would tell the user to extend `PATH`, which is not necessary.
        .env("PATH", path_with(&tools.join("bin"))?)
        .args(["install", "bpf-linker", "--version", BPF_LINKER_VERSION])
        .args(["--locked", "--force", "--no-default-features"])
        .args(["--features", "llvm-22", "--root"])
        .arg(&tools))
    .context("bpf-linker is missing and could not be built")
}

fn path_with(folder: &Path) -> anyhow::Result<OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(env::split_paths(&path).chain([folder.to_owned()]))
        .context("PATH cannot be extended")
}

/// Creates a folder that bpf-linker's build accepts as an LLVM installation.
fn link_llvm(tools: &Path, sysroot: &Path) -> anyhow::Result<PathBuf> {
    let lib = sysroot.join("lib");
    let library = fs::read_dir(&lib)
        .with_context(|| format!("cannot list {}", lib.display()))?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("libLLVM.so."))
        })
        .with_context(|| format!("no libLLVM.so.* in {}", lib.display()))?;

    let llvm = tools.join("llvm");
    let link = llvm.join("lib/libLLVM.so");
    fs::create_dir_all(llvm.join("lib"))
        .with_context(|| format!("cannot create {}", llvm.display()))?;
    match fs::remove_file(&link) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot replace {}", link.display()));
        }
        _ => {}
    }
    symlink(&library, &link).with_context(|| format!("cannot create {}", link.display()))?;
    Ok(llvm)
}
