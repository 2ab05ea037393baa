//! Debian's package archives, for this machine's architecture and for others. Packages are unpacked into folders, not
//! installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use nix::sys::statvfs::statvfs;
use tempfile::TempDir;

use crate::arch::Arch;
use crate::packages;
use crate::privilege::as_root;
use crate::process::{cannot_run, output, run, shown};
use crate::workspace::Workspace;

/// Which packages to fetch.
#[derive(Clone, Copy)]
pub(crate) enum PackageScope {
    Alone,
    /// With all dependencies.
    WithDependencies,
}

/// The archives configured on this machine, with their packages for one architecture.
pub(crate) struct Archives {
    arch: Arch,
    /// Package lists for a foreign architecture, separate from the machine's own.
    own_lists: Option<TempDir>,
}

impl Archives {
    /// Fetches the lists for a foreign architecture into a folder that is removed when this value is dropped.
    pub(crate) fn open(workspace: &Workspace, arch: Arch) -> anyhow::Result<Self> {
        packages::require(packages::ARCHIVES)?;
        if arch.is_own() {
            return Ok(Self {
                arch,
                own_lists: None,
            });
        }
        let folder = folder_in(&workspace.debian()?)?;
        for name in ["lists/partial", "cache/archives/partial", "state"] {
            let path = folder.path().join(name);
            fs::create_dir_all(&path)
                .with_context(|| format!("cannot create {}", path.display()))?;
        }
        // An empty status file: no packages are installed there.
        let status = folder.path().join("state/status");
        fs::write(&status, "").with_context(|| format!("cannot write {}", status.display()))?;
        let archives = Self {
            arch,
            own_lists: Some(folder),
        };
        quietly(archives.apt("apt-get").args(["-q", "update"]))?;
        Ok(archives)
    }

    /// Names of packages that match a regular expression.
    pub(crate) fn search(&self, pattern: &str) -> anyhow::Result<Vec<String>> {
        let found = output(
            self.apt("apt-cache")
                .args(["--names-only", "search", pattern]),
        )?;
        let found = found.unwrap_or_default();
        let names = found.lines().filter_map(|line| line.split(' ').next());
        Ok(names.map(str::to_owned).collect())
    }

    /// Updates this machine's package lists, which may be missing or outdated. Lists for foreign architectures are
    /// always new.
    pub(crate) fn refresh(&self) -> anyhow::Result<()> {
        if self.own_lists.is_some() {
            return Ok(());
        }
        run(as_root("apt-get", "fetching package lists")?.args(["-q", "update"]))
    }

    /// Downloads a package and unpacks it into a new folder. Returns the package's file name.
    pub(crate) fn unpack(&self, package: &str, place: &Path) -> anyhow::Result<String> {
        let folder = place.parent().context("the folder has no parent")?;
        let folder = folder_in(folder)?;
        quietly(
            self.apt("apt-get")
                .args(["-q", "download", package])
                .current_dir(folder.path()),
        )?;
        let archive = only_entry(folder.path())?;
        extract(&archive, place)?;
        Ok(file_name(&archive))
    }

    /// Downloads packages for a foreign architecture and unpacks them into a new folder.
    fn unpack_all(
        &self,
        packages: &[&str],
        taken: PackageScope,
        place: &Path,
    ) -> anyhow::Result<()> {
        let lists = self.own_lists.as_ref();
        let lists = lists.context("this machine's own packages are installed, not unpacked")?;
        let downloads = lists.path().join("cache/archives");
        let mut apt = self.apt("apt-get");
        match taken {
            PackageScope::Alone => apt.args(["-q", "download"]).current_dir(&downloads),
            PackageScope::WithDependencies => apt
                .args(["-q", "-y", "--download-only", "--no-install-recommends"])
                .arg("install"),
        };
        quietly(apt.args(packages))?;
        for archive in entries(&downloads)? {
            if archive.extension().is_some_and(|ending| ending == "deb") {
                extract(&archive, place)?;
            }
        }
        Ok(())
    }

    /// An apt program that uses these archives.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // Otherwise apt warns that its sandbox user cannot write here.
        command.args(["-o", "APT::Sandbox::User=root"]);
        if let Some(folder) = &self.own_lists {
            let path = |name: &str| folder.path().join(name).display().to_string();
            for option in [
                format!("APT::Architecture={}", self.arch.debian()),
                format!("APT::Architectures={}", self.arch.debian()),
                format!("Dir::State={}", path("state")),
                format!("Dir::State::status={}", path("state/status")),
                format!("Dir::State::lists={}", path("lists")),
                format!("Dir::Cache={}", path("cache")),
                // Nothing else uses the folder, and only root can take the machine's locks.
                "Debug::NoLocking=1".to_owned(),
            ] {
                command.args(["-o", &option]);
            }
        }
        command
    }
}

/// Unpacks packages for a foreign architecture into a folder of that name. Rebuilds the folder if it contains other
/// packages.
pub(crate) fn unpacked(
    workspace: &Workspace,
    arch: Arch,
    name: &str,
    packages: &[&str],
    taken: PackageScope,
) -> anyhow::Result<PathBuf> {
    let cache = workspace.debian()?;
    let place = cache.join(format!("{name}-{}", arch.debian()));
    let list = place.join("packages");
    let wanted = format!("{}\n", packages.join(" "));
    if fs::read_to_string(&list).is_ok_and(|held| held == wanted) {
        return Ok(place);
    }
    require_room(&cache, "these packages need", 500 << 20)?;
    eprintln!("downloading packages for {}", arch.name());
    let archives = Archives::open(workspace, arch)?;
    let folder = folder_in(&cache)?;
    let made = folder.path().join("root");
    archives.unpack_all(packages, taken, &made)?;
    fs::write(made.join("packages"), wanted).context("cannot write the packages' names")?;
    if place.is_dir() {
        fs::remove_dir_all(&place).with_context(|| format!("cannot remove {}", place.display()))?;
    }
    move_to(&made, &place)?;
    Ok(place)
}

/// Moves a finished folder to its final path, unless another process has already created that.
pub(crate) fn move_to(made: &Path, place: &Path) -> anyhow::Result<()> {
    match fs::rename(made, place) {
        Err(_) if place.is_dir() => Ok(()),
        renamed => renamed.with_context(|| format!("cannot create {}", place.display())),
    }
}

/// A folder with a unique name, removed on drop.
pub(crate) fn folder_in(folder: &Path) -> anyhow::Result<TempDir> {
    tempfile::Builder::new()
        .prefix(".unpacking-")
        .tempdir_in(folder)
        .with_context(|| format!("cannot create a folder in {}", folder.display()))
}

/// Fails unless this many bytes are free in the folder's file system.
pub(crate) fn require_room(folder: &Path, who_needs: &str, bytes: u64) -> anyhow::Result<()> {
    let disk = statvfs(folder)
        .with_context(|| format!("cannot read the free disk space of {}", folder.display()))?;
    let free = disk.blocks_available() as u64 * disk.fragment_size() as u64;
    ensure!(
        free >= bytes,
        "not enough disk space in {}: {who_needs} {} MiB, {} MiB are free",
        folder.display(),
        bytes >> 20,
        free >> 20
    );
    Ok(())
}

/// Returns the only entry of a folder.
pub(crate) fn only_entry(folder: &Path) -> anyhow::Result<PathBuf> {
    let mut entries = entries(folder)?;
    ensure!(
        entries.len() == 1,
        "{} has {} entries instead of one; remove target/kernels to start over",
        folder.display(),
        entries.len()
    );
    entries.pop().context("no entry")
}

/// Runs a command to completion. Its output appears only in an error.
pub(crate) fn quietly(command: &mut Command) -> anyhow::Result<()> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| cannot_run(command, error))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.trim_end().lines().next_back().unwrap_or_default();
        bail!("{} failed: {last}", shown(command));
    }
    Ok(())
}

/// The last component of a path.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// The entries of a folder.
pub(crate) fn entries(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let cannot = || format!("cannot list {}", folder.display());
    let entries = fs::read_dir(folder).with_context(cannot)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    paths.collect::<Result<_, _>>().with_context(cannot)
}

fn extract(archive: &Path, place: &Path) -> anyhow::Result<()> {
    quietly(
        Command::new("dpkg-deb")
            .arg("--extract")
            .args([archive, place]),
    )
}
