//! Kernels for virtual machines: Debian's, unpacked and cached under `target/kernels`, and others from image files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::arch::Arch;
use crate::debian::{Archives, file_name, folder_in, move_to, only_entry, quietly, require_room};
use crate::packages;
use crate::workspace::Workspace;

/// The kernels on which all tests run.
pub(crate) const TESTED: [&str; 2] = ["6.1", "6.12"];

/// Disk space in bytes needed to unpack a kernel: the package and its modules, plus a copy of both in apt's own
/// folders.
const ROOM: u64 = 700 << 20;

/// A kernel to boot.
pub(crate) struct Kernel {
    /// The name that selected it.
    pub(crate) name: String,
    pub(crate) arch: Arch,
    /// The kernel's release, as in `uname -r`.
    pub(crate) release: String,
    pub(crate) image: PathBuf,
    /// The folder with `modules.dep`; `None` for a kernel without modules.
    pub(crate) modules: Option<PathBuf>,
}

impl Kernel {
    /// Finds a Debian kernel by its version, such as 6.1.
    pub(crate) fn of_debian(
        workspace: &Workspace,
        version: &str,
        arch: Arch,
    ) -> anyhow::Result<Self> {
        ensure!(
            is_version(version),
            "invalid kernel version {version}; expected one such as {}, or a file with --kernel-image",
            TESTED.join(" or ")
        );
        let name = if arch.is_own() {
            version.to_owned()
        } else {
            format!("{version}-{}", arch.name())
        };
        let place = workspace.kernels()?.join(&name);
        if !place.is_dir() {
            fetch(workspace, version, arch, &place)?;
        }
        let modules = only_entry(&place.join("lib/modules"))?;
        let release = file_name(&modules);
        Ok(Self {
            name,
            arch,
            image: place.join("boot").join(format!("vmlinuz-{release}")),
            modules: Some(modules),
            release,
        })
    }

    /// Uses a kernel from a file, with modules from a folder or from the usual locations.
    pub(crate) fn of_image(image: &Path, modules: Option<&Path>) -> anyhow::Result<Self> {
        let release = release_of(image)?;
        let modules = match modules {
            Some(folder) => {
                let candidates = [folder.join(&release), folder.to_owned()];
                let found = candidates.into_iter().find(|folder| {
                    folder.join("modules.dep").is_file() && file_name(folder) == release
                });
                Some(found.with_context(|| {
                    format!(
                        "{} has no modules.dep of {release}; make one with: depmod -b ROOT {release}",
                        folder.display()
                    )
                })?)
            }
            None => modules_near(image, &release),
        };
        if modules.is_none() {
            eprintln!(
                "no modules of {release} next to its image; only built-in features are available"
            );
        }
        Ok(Self {
            name: release.clone(),
            arch: Arch::X86_64,
            image: image.to_owned(),
            modules,
            release,
        })
    }
}

fn is_version(text: &str) -> bool {
    let parts: Vec<_> = text.split('.').collect();
    let number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    parts.len() == 2 && parts.iter().all(number)
}

/// Downloads and unpacks the newest package of a version. The folder `place` is never incomplete.
fn fetch(workspace: &Workspace, version: &str, arch: Arch, place: &Path) -> anyhow::Result<()> {
    packages::require(packages::DEBIAN_KERNELS)?;
    let cache = workspace.kernels()?;
    require_room(&cache, "a kernel needs", ROOM)?;
    let archives = Archives::open(workspace, arch)?;
    let folder = folder_in(&cache)?;
    let unpacked = folder.path().join("kernel");
    let download = || -> anyhow::Result<String> {
        let package = newest_package(&archives, version, arch)?;
        eprintln!("downloading {package}");
        archives.unpack(&package, &unpacked)
    };
    // The lists may be missing or outdated; outdated lists name packages that newer ones have replaced.
    let file = download().or_else(|error| {
        eprintln!("{error:#}; trying again with new lists of packages");
        archives.refresh()?;
        download()
    })?;
    let release = file_name(&only_entry(&unpacked.join("lib/modules"))?);
    // Debian's packages do this only when they are installed.
    quietly(
        Command::new("depmod")
            .arg("--basedir")
            .arg(&unpacked)
            .arg(&release),
    )?;
    fs::write(unpacked.join("package"), format!("{file}\n"))
        .context("cannot write the package's name")?;
    move_to(&unpacked, place)
}

/// The newest package of this version, excluding debug symbols, real-time kernels and cloud kernels.
fn newest_package(archives: &Archives, version: &str, arch: Arch) -> anyhow::Result<String> {
    let pattern = format!(
        r"^linux-image-{}\.[0-9][^ ]*-{}$",
        version.replace('.', r"\."),
        arch.debian()
    );
    let found = archives.search(&pattern)?;
    let newest = found
        .into_iter()
        .filter(|name| !name.contains("-cloud-") && !name.contains("-rt-"))
        .max_by_key(|name| numbers(name));
    newest.with_context(|| {
        format!(
            "this machine's package archives have no kernel {version} for {}; Debian 12 has {}",
            arch.name(),
            TESTED.join(" and ")
        )
    })
}

/// All numbers in a name, for comparing versions.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|character: char| !character.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

/// The release in an x86-64 image's header (`Documentation/arch/x86/boot.rst`, `bzImage`).
fn release_of(image: &Path) -> anyhow::Result<String> {
    const MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
    /// Position of the field with the version string's offset, which itself is relative to 0x200.
    const VERSION: usize = 0x20e;

    let bytes = fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let release = || {
        bytes.get(MAGIC.0..)?.strip_prefix(MAGIC.1)?;
        let &[low, high] = bytes.get(VERSION..VERSION + 2)? else {
            return None;
        };
        let text = bytes.get(usize::from(u16::from_le_bytes([low, high])) + 0x200..)?;
        let release = text.split(|byte| matches!(byte, b' ' | 0)).next()?;
        let release = str::from_utf8(release).ok()?;
        (!release.is_empty()).then(|| release.to_owned())
    };
    release().with_context(|| {
        format!(
            "{} is not a kernel image for x86-64 (bzImage)",
            image.display()
        )
    })
}

/// Finds the modules: next to the image, in `lib/modules` of the root folder whose `boot` contains the image, or among
/// this machine's own.
fn modules_near(image: &Path, release: &str) -> Option<PathBuf> {
    let folder = image.parent()?;
    [
        folder.to_owned(),
        folder.join("modules"),
        folder.join("lib/modules"),
        folder.join("../lib/modules"),
        PathBuf::from("/lib/modules"),
    ]
    .into_iter()
    .map(|modules| modules.join(release))
    .find(|modules| modules.join("modules.dep").is_file())
}

#[cfg(test)]
mod tests {
    use super::{is_version, numbers, release_of};
    use std::fs;

    #[test]
    fn versions_have_two_numbers() {
        assert!(is_version("6.1") && is_version("6.12"));
        for wrong in ["", "6", "6.", "6.1.2", "all", "6.x", "../6.1"] {
            assert!(!is_version(wrong), "{wrong}");
        }
    }

    #[test]
    fn the_newest_package_has_the_highest_numbers() {
        let newest = [
            "linux-image-6.12.9+deb12-amd64",
            "linux-image-6.12.117+deb12-amd64",
            "linux-image-6.12.22+deb12-amd64",
        ]
        .into_iter()
        .max_by_key(|name| numbers(name));
        assert_eq!(newest, Some("linux-image-6.12.117+deb12-amd64"));
    }

    #[test]
    fn an_image_reports_its_release_and_nothing_else_is_an_image() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("image");
        let mut image = vec![0; 0x400];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
        image[0x300..0x30f].copy_from_slice(b"6.1.0-56 (who) ");
        fs::write(&path, &image).expect("room");
        assert_eq!(release_of(&path).expect("a release"), "6.1.0-56");

        for broken in [&b""[..], b"no kernel", &image[..0x20f], &image[..0x300]] {
            fs::write(&path, broken).expect("room");
            assert!(release_of(&path).is_err());
        }
    }
}
