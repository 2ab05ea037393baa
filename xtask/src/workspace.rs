//! The workspace, and the paths of its outputs.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::arch::Arch;

const TOOLCHAIN_FILE: &str = include_str!("../../rust-toolchain.toml");

/// The workspace that this program belongs to.
pub(crate) struct Workspace {
    root: PathBuf,
    profiles: PathBuf,
}

impl Workspace {
    pub(crate) fn locate() -> anyhow::Result<Self> {
        let manifest_dir = env::var_os("CARGO_MANIFEST_DIR")
            .context("CARGO_MANIFEST_DIR is not set; start this program as: cargo xtask")?;
        let root = Path::new(&manifest_dir)
            .parent()
            .context("the package xtask is not in a workspace")?
            .to_owned();
        // Cargo put this program into `<target>/<profile>/`, wherever `<target>` is configured to be.
        let own = env::current_exe().context("cannot find this program's own file")?;
        let profiles = own
            .ancestors()
            .nth(2)
            .with_context(|| format!("{} is not in a target folder", own.display()))?
            .to_owned();
        Ok(Self { root, profiles })
    }

    /// The folder of the workspace's `Cargo.toml`.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of installed tools. It is independent of `CARGO_TARGET_DIR`, so that the agent's build script finds
    /// the tools.
    pub(crate) fn tools(&self) -> PathBuf {
        self.root.join("target/tools")
    }

    /// The folder of the programs of Kubernetes, below `bin`.
    pub(crate) fn kubernetes(&self) -> PathBuf {
        self.profiles.join("kubernetes")
    }

    /// A program that cargo built in the release profile.
    pub(crate) fn release_binary(&self, name: &str) -> PathBuf {
        self.profiles.join("release").join(name)
    }

    /// A program that cargo built in the development profile.
    pub(crate) fn dev_binary(&self, name: &str) -> PathBuf {
        self.profiles.join("debug").join(name)
    }

    /// A static program that cargo built in the release profile.
    pub(crate) fn static_binary(&self, arch: Arch, name: &str) -> PathBuf {
        self.profiles
            .join(arch.static_target())
            .join("release")
            .join(name)
    }

    /// The folder for files of virtual machines, created if missing.
    pub(crate) fn vm(&self) -> anyhow::Result<PathBuf> {
        self.folder("target/vm")
    }

    /// The folder for Debian kernels, created if missing.
    pub(crate) fn kernels(&self) -> anyhow::Result<PathBuf> {
        self.folder("target/kernels")
    }

    /// The folder for Debian packages for foreign architectures, created if missing.
    pub(crate) fn debian(&self) -> anyhow::Result<PathBuf> {
        self.folder("target/debian")
    }

    fn folder(&self, path: &str) -> anyhow::Result<PathBuf> {
        let folder = self.root.join(path);
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(folder)
    }

    /// The pinned toolchain's name.
    pub(crate) fn channel(&self) -> anyhow::Result<&'static str> {
        TOOLCHAIN_FILE
            .lines()
            .find_map(|line| line.strip_prefix("channel = \"")?.strip_suffix('"'))
            .context("rust-toolchain.toml names no channel")
    }

    /// A command that runs the pinned toolchain's cargo in the workspace's folder.
    pub(crate) fn cargo(&self) -> anyhow::Result<Command> {
        let mut cargo = Command::new("rustup");
        cargo
            .args(["run", self.channel()?, "cargo"])
            .current_dir(&self.root);
        // Drops the variables that describe this program's package: build scripts that depend on them would rerun each
        // time.
        for (name, _) in env::vars_os() {
            let of_package = ["CARGO_MANIFEST_", "CARGO_PKG_"];
            if name
                .to_str()
                .is_some_and(|name| of_package.iter().any(|start| name.starts_with(start)))
            {
                cargo.env_remove(name);
            }
        }
        Ok(cargo)
    }
}
