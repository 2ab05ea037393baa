//! Compiles the eBPF programs of `health-ebpf` into `OUT_DIR`, from where the agent embeds them.
//!
//! Their inputs are the same for every profile and target of one architecture. So they are compiled once per change of
//! the inputs and kept in the workspace's `target/ebpf`, from where they are copied.
//!
//! The BPF target needs `core` built from source, which the pinned stable compiler does only under `RUSTC_BOOTSTRAP=1`.
//! To hide that variable from the rest of the build, this script runs itself again with it set and leaves the work to
//! that process.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::SystemTime;

use anyhow::{Context as _, bail, ensure};
use aya_build::{Package, Toolchain};
use object::build::elf::{Builder, SectionData};
use object::elf::{SHF_ALLOC, SHT_REL, SHT_RELA, SHT_STRTAB};

const TOOLCHAIN_FILE: &str = include_str!("../../rust-toolchain.toml");
/// Set for the second process.
const INNER: &str = "HEALTH_EBPF_BUILD";
/// Cargo's variable for the compiler wrapper of the workspace's own crates. Clippy's driver lints the programs too.
const WRAPPER: &str = "RUSTC_WORKSPACE_WRAPPER";
/// The programs of `health-ebpf`.
const OBJECTS: [&str; 2] = ["bench", "datapath"];
/// Their sources, relative to the workspace.
const SOURCES: [&str; 5] = [
    "Cargo.lock",
    "Cargo.toml",
    "health-common/Cargo.toml",
    "health-common/src",
    "health-ebpf",
];
/// Number of source states whose objects are kept.
const KEPT: usize = 16;

/// Flags for the eBPF programs, separated by spaces.
///
/// The default is the first instruction set, without 32-bit operations. All kernels from 5.12 on support the third.
///
/// `bpf-linker` makes LLVM copy in order, which leaves no inline stores for memset and memmove: they become calls to
/// byte-by-byte functions, which the verifier follows on every path that leads there. The limits equal those for
/// copies.
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
    let workspace = workspace()?;
    for source in SOURCES {
        println!(
            "cargo::rerun-if-changed={}",
            workspace.join(source).display()
        );
    }
    let channel = channel()?;
    require_rust_src(channel)?;
    let tools = workspace.join("target/tools/bin");
    let linker = tools.join("bpf-linker");
    if !linker.exists() {
        bail!("{} is missing; run: cargo xtask setup", linker.display());
    }
    // A missing path would make cargo run this script every time, so name it only now.
    println!("cargo::rerun-if-changed={}", linker.display());

    let arch = env::var("CARGO_CFG_TARGET_ARCH").context("CARGO_CFG_TARGET_ARCH is not set")?;
    let store = workspace.join("target/ebpf");
    let folder = store.join(state(&workspace, &linker, &arch)?);
    fs::create_dir_all(&store).with_context(|| format!("cannot create {}", store.display()))?;
    // Concurrent builds for other profiles and targets wait for these objects, then use them.
    let lock = File::create(store.join("lock")).context("cannot create the objects' lock file")?;
    lock.lock().context("cannot lock the objects")?;
    if !folder.exists() {
        let made = store.join("build");
        let code = compile(&made, &tools)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
        keep(&made, &folder)?;
        forget_oldest(&store)?;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    for name in OBJECTS {
        let object = folder.join(name);
        fs::copy(&object, out.join(name))
            .with_context(|| format!("cannot copy {}", object.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Identifies the state of everything that the objects depend on.
fn state(workspace: &Path, linker: &Path, arch: &str) -> anyhow::Result<String> {
    let mut hasher = DefaultHasher::new();
    (include_str!("build.rs"), TOOLCHAIN_FILE, COMPILER_FLAGS).hash(&mut hasher);
    (arch, env::var_os("CARGO_CFG_TARGET_ENDIAN")).hash(&mut hasher);
    [WRAPPER, "CLIPPY_ARGS"].map(env::var_os).hash(&mut hasher);
    let metadata = fs::metadata(linker).context("cannot read the metadata of bpf-linker")?;
    (metadata.len(), metadata.modified().ok()).hash(&mut hasher);
    for source in SOURCES {
        hash_all(&workspace.join(source), &mut hasher)?;
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// Hashes a file, or all files of a folder, with their names.
fn hash_all(path: &Path, hasher: &mut DefaultHasher) -> anyhow::Result<()> {
    let failed = || format!("cannot read {}", path.display());
    path.hash(hasher);
    if !path.is_dir() {
        fs::read(path).with_context(failed)?.hash(hasher);
        return Ok(());
    }
    let mut entries = fs::read_dir(path)
        .and_then(|entries| {
            entries
                .map(|entry| entry.map(|entry| entry.path()))
                .collect::<Result<Vec<_>, _>>()
        })
        .with_context(failed)?;
    entries.sort();
    entries.len().hash(hasher);
    entries.iter().try_for_each(|entry| hash_all(entry, hasher))
}

/// Compiles the objects into a folder.
fn compile(folder: &Path, tools: &Path) -> anyhow::Result<ExitCode> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for name in OBJECTS {
        // Objects from other sources must not be mistaken for new ones.
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove the previous {name}"));
            }
            _ => {}
        }
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let path: OsString =
        env::join_paths(std::iter::once(tools.to_owned()).chain(env::split_paths(&path)))
            .context("cannot extend PATH")?;
    let script = env::current_exe().context("cannot find the build script's executable")?;
    let status = Command::new(&script)
        .env(INNER, "1")
        .env("OUT_DIR", folder)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("PATH", path)
        // aya-build sets the compiler's flags itself; these are added to them.
        .env("CARGO_UNSTABLE_PROFILE_RUSTFLAGS", "true")
        .env("CARGO_PROFILE_RELEASE_RUSTFLAGS", COMPILER_FLAGS)
        // The rest of the profile aims at a small agent.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "4")
        .env("CARGO_PROFILE_RELEASE_LTO", "false")
        .env("CARGO_PROFILE_RELEASE_STRIP", "debuginfo")
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

/// Strips the objects of one folder and stores them in another, all or none.
fn keep(made: &Path, folder: &Path) -> anyhow::Result<()> {
    let unfinished = folder.with_file_name("unfinished");
    fs::create_dir_all(&unfinished)
        .with_context(|| format!("cannot create {}", unfinished.display()))?;
    for name in OBJECTS {
        let object = fs::read(made.join(name)).with_context(|| format!("no {name} was built"))?;
        let object = strip(&object).with_context(|| format!("cannot strip {name}"))?;
        fs::write(unfinished.join(name), object)
            .with_context(|| format!("cannot write to {}", unfinished.display()))?;
    }
    fs::rename(&unfinished, folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// Strips debug information from an object. The linker generates `.BTF` and `.BTF.ext` from it: those stay.
///
/// Relocations stay only for instructions: in those two sections everything is already in place, so their relocations
/// would only help a linker.
fn strip(object: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut builder = Builder::read(object)?;
    let loaded: Vec<_> = builder
        .sections
        .iter()
        .filter(|section| section.sh_flags & u64::from(SHF_ALLOC) != 0)
        .map(|section| section.id())
        .collect();
    for section in builder.sections.iter_mut() {
        let is_of_linker = matches!(section.sh_type, SHT_REL | SHT_RELA)
            && section
                .sh_info_section
                .is_none_or(|target| !loaded.contains(&target));
        section.delete = is_of_linker || section.name.as_slice().starts_with(b".debug_");
    }
    builder.delete_orphans();
    // LLVM keeps the names of sections and of symbols in one table, the builder in two.
    let names = builder.sections.add();
    names.name = ".shstrtab".into();
    names.sh_type = SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    builder.write(&mut stripped)?;
    Ok(stripped)
}

/// Removes the oldest surplus states.
fn forget_oldest(store: &Path) -> anyhow::Result<()> {
    let mut kept: Vec<(SystemTime, PathBuf)> = fs::read_dir(store)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("cannot list {}", store.display()))?
        .into_iter()
        .filter(|entry| entry.path().join(OBJECTS[0]).exists())
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    kept.sort();
    let surplus = kept.len().saturating_sub(KEPT);
    for (_, folder) in kept.into_iter().take(surplus) {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

fn build() -> anyhow::Result<ExitCode> {
    let package = Package {
        name: "health-ebpf",
        root_dir: "../../health-ebpf",
        ..Package::default()
    };
    aya_build::build_ebpf([package], Toolchain::Custom(channel()?))
        .context("cannot compile the eBPF programs")?;
    if env::var_os(WRAPPER).is_some() {
        lint().context("cannot lint the eBPF programs")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks the programs again with the wrapper: Clippy's driver does not optimize, so the code that it compiles uses too
/// much stack. Everything else matches aya-build, whose target folder then has all dependencies.
fn lint() -> anyhow::Result<()> {
    let variable = |name| env::var(name).with_context(|| format!("{name} is not set"));
    let arch = variable("CARGO_CFG_TARGET_ARCH")?;
    let target_dir = Path::new(&variable("OUT_DIR")?).join("aya-build/target/health-ebpf");
    let output = Command::new("rustup")
        .args(["run", channel()?, "cargo", "check", "--release"])
        .args(["--package=health-ebpf", "--bins", "-Zbuild-std=core"])
        .arg("--target=bpfel-unknown-none")
        .arg("--target-dir")
        .arg(target_dir)
        .current_dir("../../health-ebpf")
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            format!("--cfg=bpf_target_arch=\"{arch}\"\x1f-Cdebuginfo=2\x1f-Clink-arg=--btf"),
        )
        .env_remove("RUSTC")
        .output()
        .context("cannot run cargo")?;
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        println!("cargo::warning={line}");
    }
    ensure!(output.status.success(), "cargo check: {}", output.status);
    Ok(())
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
        .context("cannot run rustup, which compiles the eBPF programs")?;
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

fn workspace() -> anyhow::Result<PathBuf> {
    let manifest_dir =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("CARGO_MANIFEST_DIR is not set")?);
    let workspace = manifest_dir
        .ancestors()
        .nth(2)
        .context("the package is not in a workspace")?;
    Ok(workspace.to_owned())
}
