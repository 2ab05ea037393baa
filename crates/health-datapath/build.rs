//! Compiles the eBPF programs of `health-ebpf` into `OUT_DIR`, where the agent embeds them from.
//!
//! The BPF target needs `core` built from source, which the pinned stable compiler does only under
//! `RUSTC_BOOTSTRAP=1`. So that nothing else in the build sees that variable, this script runs
//! itself once more with it set and leaves the work to that process.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail, ensure};
use aya_build::{Package, Toolchain};

const TOOLCHAIN_FILE: &str = include_str!("../../rust-toolchain.toml");
/// Set for the second process.
const INNER: &str = "HEALTH_EBPF_BUILD";

/// Flags for the eBPF programs, separated by spaces.
///
/// The default is the first instruction set, without operations on 32 bits. All kernels from 5.12 on have the
/// third one.
///
/// `bpf-linker` has LLVM copy in order, which leaves no stores for filling and moving memory: they become calls of
/// functions that go byte by byte, and the verifier follows them on each way that leads there. The limits are
/// those that copies have.
const COMPILER_FLAGS: &str = "-Ctarget-cpu=v3 -Clink-arg=--llvm-args=-max-store-memset=128 \
                              -Clink-arg=--llvm-args=-max-store-memmove=128";

fn main() -> ExitCode {
    let result = if env::var_os(INNER).is_some() {
        build()
    } else {
        outer()
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            println!("cargo::error={error:#}");
            ExitCode::FAILURE
        }
    }
}

fn outer() -> anyhow::Result<ExitCode> {
    println!("cargo::rerun-if-changed=../../health-common/src");
    println!("cargo::rerun-if-changed=../../health-common/Cargo.toml");
    println!("cargo::rerun-if-changed=../../Cargo.toml");

    let channel = channel()?;
    require_rust_src(channel)?;
    let path = path_with_bpf_linker()?;

    let script = env::current_exe().context("cannot find the build script's own file")?;
    let status = Command::new(&script)
        .env(INNER, "1")
        .env("RUSTC_BOOTSTRAP", "1")
        .env("PATH", path)
        // aya-build sets the flags of the compiler itself; these come beside them.
        .env("CARGO_UNSTABLE_PROFILE_RUSTFLAGS", "true")
        .env("CARGO_PROFILE_RELEASE_RUSTFLAGS", COMPILER_FLAGS)
        .env(
            "CARGO_PROFILE_RELEASE_BUILD_OVERRIDE_RUSTFLAGS",
            "-Ctarget-cpu=generic",
        )
        // Progress of the inner cargo would show up as warnings of this package.
        .env("CARGO_TERM_QUIET", "true")
        .status()
        .with_context(|| format!("cannot run {}", script.display()))?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn build() -> anyhow::Result<ExitCode> {
    let package = Package {
        name: "health-ebpf",
        root_dir: "../../health-ebpf",
        ..Package::default()
    };
    aya_build::build_ebpf([package], Toolchain::Custom(channel()?))
        .context("cannot compile the eBPF programs")?;
    Ok(ExitCode::SUCCESS)
}

/// The pinned toolchain's name.
fn channel() -> anyhow::Result<&'static str> {
    TOOLCHAIN_FILE
        .lines()
        .find_map(|line| line.strip_prefix("channel = \"")?.strip_suffix('"'))
        .context("rust-toolchain.toml names no channel")
}

fn require_rust_src(channel: &str) -> anyhow::Result<()> {
    let output = Command::new("rustup")
        .args(["run", channel, "rustc", "--print", "sysroot"])
        .output()
        .context("cannot run rustup, which the eBPF programs are compiled with")?;
    ensure!(
        output.status.success(),
        "toolchain {channel} is missing; run: rustup toolchain install {channel}"
    );
    let sysroot = String::from_utf8(output.stdout).context("rustc's sysroot is not UTF-8")?;
    let core = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core/Cargo.toml");
    ensure!(
        core.exists(),
        "component rust-src of toolchain {channel} is missing; run: cargo xtask setup"
    );
    Ok(())
}

/// `PATH` with the workspace's own tools in front.
fn path_with_bpf_linker() -> anyhow::Result<OsString> {
    let manifest_dir =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("CARGO_MANIFEST_DIR is not set")?);
    let workspace = manifest_dir
        .ancestors()
        .nth(2)
        .context("the package has no workspace around it")?;
    let tools = workspace.join("target/tools/bin");
    let linker = tools.join("bpf-linker");
    if !linker.exists() {
        bail!("{} is missing; run: cargo xtask setup", linker.display());
    }
    // A path that does not exist would have cargo run this script each time, so name it only now.
    println!("cargo::rerun-if-changed={}", linker.display());
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(std::iter::once(tools).chain(env::split_paths(&path)))
        .context("PATH cannot be extended")
}
