//! Compiles the eBPF objects of `health-ebpf` for build scripts.
//!
//! An object's inputs are the same for all profiles and targets of one architecture. So each object is compiled once
//! per change of the inputs, kept in the workspace's `target/ebpf`, and copied from there.

#![forbid(unsafe_code)]

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::SystemTime;

use anyhow::{Context as _, ensure};

const TOOLCHAIN_FILE: &str = include_str!("../../../rust-toolchain.toml");
/// Cargo's variable for the compiler wrapper of workspace crates. If it is Clippy's driver, the programs are linted
/// too.
const WRAPPER: &str = "RUSTC_WORKSPACE_WRAPPER";
/// The objects' sources, relative to the workspace.
const SOURCES: [&str; 5] = [
    "Cargo.lock",
    "Cargo.toml",
    "health-common/Cargo.toml",
    "health-common/src",
    "health-ebpf",
];
/// Number of source states whose objects are kept.
const KEPT: usize = 16;

/// Compiler flags.
///
/// The default instruction set is v1, which lacks 32-bit operations. All kernels since 5.12 support v3.
///
/// The linker generates BTF from the debug information. It makes LLVM copy in order, which disables inline stores for
/// memset and memmove: they become calls to byte-by-byte functions, which the verifier follows on every path to them.
/// The limits equal those for copies.
const FLAGS: [&str; 5] = [
    "-Ctarget-cpu=v3",
    "-Cdebuginfo=2",
    "-Clink-arg=--btf",
    "-Clink-arg=--llvm-args=-max-store-memset=128",
    "-Clink-arg=--llvm-args=-max-store-memmove=128",
];

/// The release profile optimises for a small agent, this one for fast programs.
const PROFILE: [(&str, &str); 4] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "4"),
    ("CARGO_PROFILE_RELEASE_LTO", "false"),
    ("CARGO_PROFILE_RELEASE_STRIP", "debuginfo"),
];

/// Sections that only debuggers and linkers need. `.BTF` and `.BTF.ext` need no further relocation.
const STRIPPED: [&str; 4] = [".debug_*", ".rel.debug_*", ".rel.BTF", ".rel.BTF.ext"];

/// Compiles the binary target `object` of `health-ebpf` into the file `OUT_DIR/object` of the calling build script.
///
/// # Errors
///
/// If cargo's variables, the toolchain or `bpf-linker` are missing, or the sources do not compile.
pub fn compile(object: &str) -> anyhow::Result<()> {
    let build = Build::for_script()?;
    build.print_inputs();
    let store = build.workspace.join("target/ebpf");
    let folder = store.join(build.state()?);
    let kept = folder.join(object);
    fs::create_dir_all(&store).with_context(|| format!("cannot create {}", store.display()))?;
    // Concurrent builds for other profiles and targets wait for this object, then use it.
    let lock = File::create(store.join("lock")).context("cannot create the objects' lock file")?;
    lock.lock().context("cannot lock the objects")?;
    if !kept.exists() {
        let unfinished = store.join("unfinished");
        let linked = build.link(object, &store.join("build"))?;
        if env::var_os(WRAPPER).is_some() {
            build.lint(object, &store.join("build"))?;
        }
        build.strip(&linked, &unfinished)?;
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        fs::rename(&unfinished, &kept)
            .with_context(|| format!("cannot create {}", kept.display()))?;
        forget_oldest(&store)?;
    }
    let out = Path::new(&variable("OUT_DIR")?).join(object);
    fs::copy(&kept, out).with_context(|| format!("cannot copy {}", kept.display()))?;
    Ok(())
}

/// How a build script's objects are compiled.
struct Build {
    workspace: PathBuf,
    /// The pinned toolchain's name.
    channel: &'static str,
    /// The toolchain's folder.
    sysroot: PathBuf,
    /// Folder of `bpf-linker`.
    tools: PathBuf,
    /// The architecture of the hosts that run the programs.
    arch: String,
}

impl Build {
    fn for_script() -> anyhow::Result<Self> {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .context("the package is not in a workspace")?
            .to_owned();
        let channel = TOOLCHAIN_FILE
            .lines()
            .find_map(|line| line.strip_prefix("channel = \"")?.strip_suffix('"'))
            .context("rust-toolchain.toml names no channel")?;
        let tools = workspace.join("target/tools/bin");
        let linker = tools.join("bpf-linker");
        ensure!(
            linker.exists(),
            "{} is missing; run: cargo xtask setup",
            linker.display()
        );
        Ok(Self {
            sysroot: sysroot(channel)?,
            workspace,
            channel,
            tools,
            arch: variable("CARGO_CFG_TARGET_ARCH")?,
        })
    }

    /// Makes cargo run the build script again when an input changes.
    fn print_inputs(&self) {
        for source in SOURCES {
            println!(
                "cargo::rerun-if-changed={}",
                self.workspace.join(source).display()
            );
        }
        println!(
            "cargo::rerun-if-changed={}",
            self.tools.join("bpf-linker").display()
        );
    }

    /// Returns a hash of everything that the objects depend on.
    fn state(&self) -> anyhow::Result<String> {
        let mut hasher = DefaultHasher::new();
        (include_str!("lib.rs"), TOOLCHAIN_FILE, &self.arch).hash(&mut hasher);
        [WRAPPER, "CLIPPY_ARGS"].map(env::var_os).hash(&mut hasher);
        let linker = fs::metadata(self.tools.join("bpf-linker"))
            .context("cannot read the metadata of bpf-linker")?;
        (linker.len(), linker.modified().ok()).hash(&mut hasher);
        for source in SOURCES {
            hash_all(&self.workspace.join(source), &mut hasher)?;
        }
        Ok(format!("{:016x}", hasher.finish()))
    }

    /// Compiles and links an object, and returns its file.
    fn link(&self, object: &str, folder: &Path) -> anyhow::Result<PathBuf> {
        let mut cargo = self.cargo("build", object, folder)?;
        print_warnings(cargo.env_remove(WRAPPER))
            .with_context(|| format!("cannot compile the eBPF object {object}"))?;
        Ok(folder.join("bpfel-unknown-none/release").join(object))
    }

    /// Lints an object with the wrapper, and links nothing: Clippy's driver does not optimize, so the code that it
    /// compiles uses too much stack.
    fn lint(&self, object: &str, folder: &Path) -> anyhow::Result<()> {
        print_warnings(&mut self.cargo("check", object, folder)?)
            .with_context(|| format!("cannot lint the eBPF object {object}"))
    }

    /// `cargo COMMAND` for one object.
    fn cargo(&self, command: &str, object: &str, folder: &Path) -> anyhow::Result<Command> {
        let path = env::var_os("PATH").unwrap_or_default();
        let path: OsString =
            env::join_paths(std::iter::once(self.tools.clone()).chain(env::split_paths(&path)))
                .context("cannot extend PATH")?;
        let cfg = format!("--cfg=bpf_target_arch=\"{}\"", self.arch);
        let mut cargo = Command::new("rustup");
        cargo
            .args([
                "run",
                self.channel,
                "cargo",
                command,
                "--release",
                "--quiet",
            ])
            .args(["--package=health-ebpf", "--bin", object])
            // The target has no compiled `core`. The stable compiler builds one only with RUSTC_BOOTSTRAP.
            .args(["-Zbuild-std=core", "--target=bpfel-unknown-none"])
            .arg("--target-dir")
            .arg(folder)
            .current_dir(self.workspace.join("health-ebpf"))
            .env("PATH", path)
            .env("RUSTC_BOOTSTRAP", "1")
            .env(
                "CARGO_ENCODED_RUSTFLAGS",
                [&[cfg.as_str()][..], &FLAGS].concat().join("\x1f"),
            )
            .envs(PROFILE)
            .env_remove("RUSTC");
        Ok(cargo)
    }

    /// Copies an object without its debug information.
    fn strip(&self, object: &Path, stripped: &Path) -> anyhow::Result<()> {
        let tool = self
            .sysroot
            .join("lib/rustlib")
            .join(variable("HOST")?)
            .join("bin/rust-objcopy");
        let mut command = Command::new("rustup");
        command
            .args(["run", self.channel])
            .arg(tool)
            .arg("--wildcard")
            .args(STRIPPED.map(|section| format!("--remove-section={section}")))
            .args([object, stripped]);
        print_warnings(&mut command).with_context(|| format!("cannot strip {}", object.display()))
    }
}

fn variable(name: &str) -> anyhow::Result<String> {
    env::var(name).with_context(|| format!("{name} is not set"))
}

/// The folder of the pinned toolchain, which has the sources of `core`.
fn sysroot(channel: &str) -> anyhow::Result<PathBuf> {
    let output =
        output(Command::new("rustup").args(["run", channel, "rustc", "--print", "sysroot"]))?;
    ensure!(
        output.status.success(),
        "toolchain {channel} is missing; run: rustup toolchain install {channel}"
    );
    let sysroot = String::from_utf8(output.stdout).context("rustc's sysroot is not UTF-8")?;
    let sysroot = PathBuf::from(sysroot.trim());
    ensure!(
        sysroot
            .join("lib/rustlib/src/rust/library/core/Cargo.toml")
            .exists(),
        "component rust-src of toolchain {channel} is missing; run: cargo xtask setup"
    );
    Ok(sysroot)
}

/// Runs a command, and reports its stderr as cargo warnings.
fn print_warnings(command: &mut Command) -> anyhow::Result<()> {
    let output = output(command)?;
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        println!("cargo::warning={line}");
    }
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    Ok(())
}

fn output(command: &mut Command) -> anyhow::Result<Output> {
    command
        .output()
        .context("cannot run rustup, which compiles the eBPF programs")
}

/// Hashes a file, or all files of a folder, with their names.
fn hash_all(path: &Path, hasher: &mut DefaultHasher) -> anyhow::Result<()> {
    let failed = || format!("cannot read {}", path.display());
    path.hash(hasher);
    if !path.is_dir() {
        fs::read(path).with_context(failed)?.hash(hasher);
        return Ok(());
    }
    let mut entries = paths_in(path).with_context(failed)?;
    entries.sort();
    entries.len().hash(hasher);
    entries.iter().try_for_each(|entry| hash_all(entry, hasher))
}

/// Removes the objects of the oldest states beyond [`KEPT`].
fn forget_oldest(store: &Path) -> anyhow::Result<()> {
    let mut kept: Vec<(SystemTime, PathBuf)> = paths_in(store)
        .with_context(|| format!("cannot list {}", store.display()))?
        .into_iter()
        .filter(|path| path.is_dir() && !path.ends_with("build"))
        .filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)))
        .collect();
    kept.sort();
    let surplus = kept.len().saturating_sub(KEPT);
    for (_, folder) in kept.into_iter().take(surplus) {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

fn paths_in(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect()
}
