//! The contents of a guest's root folder: programs of this machine with their libraries, at the same paths, and the
//! files that they read. Guests with a foreign architecture get Debian's packages for that architecture instead.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use super::archive::Archive;
use crate::arch::Arch;
use crate::debian::{self, PackageScope};
use crate::process::{find, output};
use crate::workspace::Workspace;

/// Folders that are links into `/usr`, as in every new installation of Debian 12.
const MERGED: &[(&str, &str)] = &[
    ("/bin", "usr/bin"),
    ("/sbin", "usr/sbin"),
    ("/lib", "usr/lib"),
    ("/lib64", "usr/lib64"),
];

/// Folders that programs expect.
const FOLDERS: &[&str] = &[
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/tmp",
    "/root",
    "/etc/netns",
    "/var/lib",
    "/var/log",
    "/var/tmp",
];

/// Files that programs use to look up names of users, protocols, ports and hosts.
const FILES: &[(&str, &str)] = &[
    (
        "/etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    ),
    ("/etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("/etc/hostname", "guest\n"),
    (
        "/etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files dns\n",
    ),
    ("/etc/os-release", "ID=health-agent-guest\n"),
];

/// Files copied from this machine, if they exist.
const OWN_FILES: &[&str] = &[
    "/etc/protocols",
    "/etc/services",
    "/etc/ethertypes",
    "/etc/ssl/openssl.cnf",
];

/// Programs that shell scripts and Debian's tools call.
const BASE: &[&str] = &[
    "sh",
    "bash",
    "busybox",
    "modprobe",
    "ip",
    "env",
    "cat",
    "chmod",
    "cp",
    "cut",
    "date",
    "dd",
    "dmesg",
    "echo",
    "expr",
    "false",
    "find",
    "grep",
    "head",
    "id",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "mktemp",
    "mount",
    "mv",
    "nproc",
    "ps",
    "readlink",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "sha256sum",
    "sleep",
    "sort",
    "stat",
    "sync",
    "sysctl",
    "tail",
    "tc",
    "tee",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "umount",
    "uname",
    "unshare",
    "wc",
    "xargs",
];

/// Packages with the programs in [`BASE`], and with programs that are useful in interactive work.
const PACKAGES: &[&str] = &[
    "bash",
    "bind9-dnsutils",
    "bpftool",
    "busybox-static",
    "coreutils",
    "dash",
    "dnsmasq-base",
    "findutils",
    "grep",
    "iperf3",
    "iproute2",
    "iputils-ping",
    "kmod",
    "mount",
    "nftables",
    "procps",
    "sed",
    "usr-is-merged",
    "util-linux",
];

/// Parts of packages that no program in a guest reads.
const UNREAD: &[&str] = &["packages", "usr/include", "usr/share", "var"];

/// The source of a guest's programs.
pub(crate) enum Origin {
    /// This machine.
    Machine,
    /// A folder with unpacked packages. All of them go into the guest.
    Packages(PathBuf),
}

impl Origin {
    pub(crate) fn new(workspace: &Workspace, arch: Arch) -> anyhow::Result<Self> {
        if arch.is_own() {
            return Ok(Self::Machine);
        }
        let taken = PackageScope::WithDependencies;
        debian::unpacked(workspace, arch, "guest", PACKAGES, taken).map(Self::Packages)
    }
}

/// Writer of a guest's root folder.
pub(crate) struct Root<W: Write> {
    archive: Archive<W>,
    origin: Origin,
}

impl<W: Write> Root<W> {
    /// Starts a root folder with the first process and the files that every guest has.
    pub(crate) fn new(
        mut archive: Archive<W>,
        init: &Path,
        origin: Origin,
    ) -> anyhow::Result<Self> {
        for (link, target) in MERGED {
            archive.link(Path::new(link), target)?;
        }
        for folder in FOLDERS {
            archive.folder(Path::new(folder))?;
        }
        for (path, content) in FILES {
            archive.file(Path::new(path), content.as_bytes())?;
        }
        archive.program(Path::new("/init"), &read(init)?)?;
        let mut root = Self { archive, origin };
        root.libraries_of(init)?;
        Ok(root)
    }

    /// Adds the programs that shell scripts call.
    pub(crate) fn base(&mut self) -> anyhow::Result<()> {
        if let Origin::Packages(folder) = &self.origin {
            let folder = folder.clone();
            return self.unpacked(&folder, &folder);
        }
        for path in OWN_FILES
            .iter()
            .map(Path::new)
            .filter(|path| path.is_file())
        {
            self.archive.file(path, &read(path)?)?;
        }
        self.tools(BASE.iter().copied())
    }

    /// Adds programs by name, unless the guest already has all of them.
    pub(crate) fn tools<'a>(
        &mut self,
        names: impl IntoIterator<Item = &'a str>,
    ) -> anyhow::Result<()> {
        if matches!(self.origin, Origin::Packages(_)) {
            return Ok(());
        }
        for name in names {
            let found = find(name).with_context(|| format!("{name} is not installed"))?;
            self.program(&found)?;
        }
        Ok(())
    }

    /// Adds a program with its libraries, at the same path.
    pub(crate) fn program(&mut self, path: &Path) -> anyhow::Result<()> {
        let place = self.resolve(path)?;
        if self.archive.has(&place) {
            return Ok(());
        }
        self.archive.program(&place, &read(&place)?)?;
        self.libraries_of(&place)
    }

    /// Adds a program at a different path. The program must be statically linked, or its libraries must be added
    /// separately.
    pub(crate) fn program_at(&mut self, place: &Path, source: &Path) -> anyhow::Result<()> {
        self.archive.program(place, &read(source)?)
    }

    /// Adds a link to a file in the guest.
    pub(crate) fn link(&mut self, place: &Path, target: &Path) -> anyhow::Result<()> {
        self.archive.link(place, &target.to_string_lossy())
    }

    /// Adds the libraries that a program needs.
    pub(crate) fn libraries_of(&mut self, program: &Path) -> anyhow::Result<()> {
        for library in libraries(program)? {
            let place = self.resolve(&library)?;
            self.archive.program(&place, &read(&place)?)?;
        }
        Ok(())
    }

    /// Adds a folder with all its files, at the same path.
    pub(crate) fn tree(&mut self, folder: &Path) -> anyhow::Result<()> {
        let entries =
            fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let path = entry
                .with_context(|| format!("cannot list {}", folder.display()))?
                .path();
            if path.is_dir() {
                self.tree(&path)?;
            } else if path.is_file() {
                let place = self.resolve(&path)?;
                // These files may include scripts and plugins. An executable bit does no harm on other files.
                self.archive.program(&place, &read(&place)?)?;
            }
        }
        Ok(())
    }

    /// Adds the contents of a folder of unpacked packages, at the paths that Debian's links into `/usr` point to.
    fn unpacked(&mut self, packages: &Path, folder: &Path) -> anyhow::Result<()> {
        for path in debian::entries(folder)? {
            let place = path.strip_prefix(packages).unwrap_or(&path);
            let mut place = Path::new("/").join(place);
            if UNREAD.iter().any(|unread| {
                place
                    .strip_prefix("/")
                    .is_ok_and(|place| place.starts_with(unread))
            }) {
                continue;
            }
            if let Some((link, target)) = MERGED.iter().find(|(link, _)| place.starts_with(link)) {
                let rest = place.strip_prefix(link).unwrap_or(&place);
                place = Path::new("/").join(target).join(rest);
            }
            let kind = fs::symlink_metadata(&path)
                .with_context(|| format!("cannot read {}", path.display()))?
                .file_type();
            if kind.is_dir() {
                self.unpacked(packages, &path)?;
            } else if self.archive.has(&place) {
                // Files that every guest has take precedence.
            } else if kind.is_symlink() {
                let target = fs::read_link(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                self.archive.link(&place, &target.to_string_lossy())?;
            } else if kind.is_file() {
                self.archive.program(&place, &read(&path)?)?;
            }
        }
        Ok(())
    }

    /// Adds an empty folder.
    pub(crate) fn folder(&mut self, path: &Path) -> anyhow::Result<()> {
        self.archive.folder(path)
    }

    /// Adds a file.
    pub(crate) fn file(&mut self, path: &Path, content: &[u8]) -> anyhow::Result<()> {
        self.archive.file(path, content)
    }

    /// Adds a kernel's modules.
    pub(crate) fn modules(&mut self, folder: &Path, release: &str) -> anyhow::Result<()> {
        super::modules::add(&mut self.archive, folder, release)
    }

    pub(crate) fn finish(self) -> anyhow::Result<()> {
        self.archive.finish()
    }

    /// Resolves a path of this machine. Adds the symbolic links along the path to the guest, too.
    fn resolve(&mut self, path: &Path) -> anyhow::Result<PathBuf> {
        let resolved =
            fs::canonicalize(path).with_context(|| format!("cannot find {}", path.display()))?;
        // The path after its folder is resolved: if it still differs from the canonical path, its last component is a
        // link.
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            bail!("{} is not a file", path.display());
        };
        let folder = fs::canonicalize(folder)
            .with_context(|| format!("cannot find {}", folder.display()))?;
        let place = folder.join(name);
        if place != resolved {
            self.archive.link(&place, &resolved.to_string_lossy())?;
        }
        Ok(resolved)
    }
}

/// The libraries that a program loads at startup, as found by `ldd`; none for a static program.
fn libraries(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let listed = output(Command::new("ldd").arg(program))?.unwrap_or_default();
    Ok(listed
        .lines()
        .filter_map(|line| {
            let path = line.split(" => ").last()?.trim().split(' ').next()?;
            path.starts_with('/').then(|| PathBuf::from(path))
        })
        .collect())
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
