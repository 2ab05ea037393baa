//! What stands in a guest's root folder: programs of this machine with their libraries, at the same places
//! as here, and the files that they read. A guest with another processor has Debian's packages for it instead.

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

/// Folders that are links into `/usr` on all that Debian 12 installs; the guest's are too.
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

/// Names that programs look up: users, protocols, ports, hosts.
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

/// Of this machine, where it has them.
const OWN_FILES: &[&str] = &[
    "/etc/protocols",
    "/etc/services",
    "/etc/ethertypes",
    "/etc/ssl/openssl.cnf",
];

/// What a shell script and Debian's tools call.
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

/// What brings the programs of [`BASE`] and those that are of use by hand.
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

/// Of packages, what no program in a guest reads.
const UNREAD: &[&str] = &["packages", "usr/include", "usr/share", "var"];

/// Where the programs of a guest come from.
pub(crate) enum Origin {
    /// This machine.
    Machine,
    /// A folder with unpacked packages, all of which the guest gets.
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

/// A guest's root folder that is being written.
pub(crate) struct Root<W: Write> {
    archive: Archive<W>,
    origin: Origin,
}

impl<W: Write> Root<W> {
    /// Begins with the first process and what every guest has.
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

    /// Adds what a shell script calls.
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

    /// Adds programs by their names, where not all are there already.
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

    /// Adds a program with its libraries, at its place here.
    pub(crate) fn program(&mut self, path: &Path) -> anyhow::Result<()> {
        let place = self.resolve(path)?;
        if self.archive.has(&place) {
            return Ok(());
        }
        self.archive.program(&place, &read(&place)?)?;
        self.libraries_of(&place)
    }

    /// Adds a program of somewhere here at another place there; it must be linked statically, or its
    /// libraries added otherwise.
    pub(crate) fn program_at(&mut self, place: &Path, source: &Path) -> anyhow::Result<()> {
        self.archive.program(place, &read(source)?)
    }

    /// Adds a link to a file there.
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

    /// Adds a folder with all files in it, at its place here.
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
                // Scripts and plugins stand between other files; nobody minds a text that may be run.
                self.archive.program(&place, &read(&place)?)?;
            }
        }
        Ok(())
    }

    /// Adds what stands in a folder of unpacked packages, where Debian's links into `/usr` lead to.
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
                // What every guest has is not a package's.
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

    /// Adds a folder to work in.
    pub(crate) fn folder(&mut self, path: &Path) -> anyhow::Result<()> {
        self.archive.folder(path)
    }

    /// Adds a file.
    pub(crate) fn file(&mut self, path: &Path, content: &[u8]) -> anyhow::Result<()> {
        self.archive.file(path, content)
    }

    /// Adds the modules of a kernel.
    pub(crate) fn modules(&mut self, folder: &Path, release: &str) -> anyhow::Result<()> {
        super::modules::add(&mut self.archive, folder, release)
    }

    pub(crate) fn finish(self) -> anyhow::Result<()> {
        self.archive.finish()
    }

    /// Where a path of this machine leads to; links on the way are made in the guest too.
    fn resolve(&mut self, path: &Path) -> anyhow::Result<PathBuf> {
        let resolved =
            fs::canonicalize(path).with_context(|| format!("cannot find {}", path.display()))?;
        // The path with its folder resolved: what differs from there on is a link in its last part.
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            bail!("{} is no file", path.display());
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

/// The libraries that a program loads when it starts, as `ldd` finds them; none for a static one.
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
