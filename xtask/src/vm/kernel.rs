//! Kernels for virtual machines: those of Debian, unpacked and cached under `target/kernels`, and any other
//! from an image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use nix::sys::statvfs::statvfs;

use crate::packages::{self, DEBIAN_KERNELS};
use crate::privilege::as_root;
use crate::process::{cannot_run, output, run, shown};
use crate::workspace::Workspace;

/// The kernels that all tests run on.
pub(crate) const TESTED: [&str; 2] = ["6.1", "6.12"];

/// What a kernel takes on the disk while it is unpacked, bytes: package, modules, and both once more in
/// apt's own folders.
const ROOM: u64 = 700 << 20;

/// A kernel to boot.
pub(crate) struct Kernel {
    /// What it was asked for by.
    pub(crate) name: String,
    /// As `uname -r` says it.
    pub(crate) release: String,
    pub(crate) image: PathBuf,
    /// The folder with `modules.dep`; none for a kernel that has everything built in.
    pub(crate) modules: Option<PathBuf>,
}

impl Kernel {
    /// A kernel of Debian by its version, such as 6.1.
    pub(crate) fn of_debian(workspace: &Workspace, version: &str) -> anyhow::Result<Self> {
        ensure!(
            is_version(version),
            "{version} is no version of a kernel; give one such as {}, or a file by --kernel-image",
            TESTED.join(" or ")
        );
        let cache = workspace.root().join("target/kernels");
        let place = cache.join(version);
        if !place.is_dir() {
            fetch(version, &cache, &place)?;
        }
        let modules = only_entry(&place.join("lib/modules"))?;
        let release = file_name(&modules);
        Ok(Self {
            name: version.to_owned(),
            image: place.join("boot").join(format!("vmlinuz-{release}")),
            modules: Some(modules),
            release,
        })
    }

    /// A kernel from a file, its modules from a folder or from where they usually are.
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
            eprintln!("no modules of {release} beside its image: it has only what is built in");
        }
        Ok(Self {
            name: release.clone(),
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

/// Downloads and unpacks the newest package of a version. What stands at `place` is always whole.
fn fetch(version: &str, cache: &Path, place: &Path) -> anyhow::Result<()> {
    packages::require(DEBIAN_KERNELS)?;
    let package = newest_package(version)?;
    fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
    require_room(cache)?;
    eprintln!("downloading {package}");
    let folder = tempfile::Builder::new()
        .prefix(".unpacking-")
        .tempdir_in(cache)
        .with_context(|| format!("cannot make a folder in {}", cache.display()))?;
    quietly(
        Command::new("apt-get")
            .args(["-q", "download", &package])
            // Else it warns that its own user can't write here.
            .args(["-o", "APT::Sandbox::User=root"])
            .current_dir(folder.path()),
    )?;
    let archive = only_entry(folder.path())?;
    let unpacked = folder.path().join("kernel");
    quietly(
        Command::new("dpkg-deb")
            .arg("--extract")
            .args([&archive, &unpacked]),
    )?;
    let release = file_name(&only_entry(&unpacked.join("lib/modules"))?);
    // Debian's packages leave this to their installation.
    quietly(
        Command::new("depmod")
            .arg("--basedir")
            .arg(&unpacked)
            .arg(&release),
    )?;
    fs::write(
        unpacked.join("package"),
        format!("{}\n", file_name(&archive)),
    )
    .context("cannot write the package's name")?;
    match fs::rename(&unpacked, place) {
        // Somebody else was faster.
        Err(_) if place.is_dir() => Ok(()),
        renamed => renamed.with_context(|| format!("cannot make {}", place.display())),
    }
}

/// The newest package of this version: without debug symbols, real-time patches and what clouds leave out.
fn newest_package(version: &str) -> anyhow::Result<String> {
    let find = || -> anyhow::Result<Option<String>> {
        let pattern = format!(
            r"^linux-image-{}\.[0-9][^ ]*-amd64$",
            version.replace('.', r"\.")
        );
        let found = output(Command::new("apt-cache").args(["--names-only", "search", &pattern]))?;
        let found = found.unwrap_or_default();
        Ok(found
            .lines()
            .filter_map(|line| line.split(' ').next())
            .filter(|name| !name.contains("-cloud-") && !name.contains("-rt-"))
            .max_by_key(|name| numbers(name))
            .map(str::to_owned))
    };
    if let Some(package) = find()? {
        return Ok(package);
    }
    // The package lists may be absent or old.
    run(as_root("apt-get", "fetching package lists")?.args(["-q", "update"]))?;
    find()?.with_context(|| {
        format!(
            "this machine's package archives have no kernel {version}; Debian 12 has {}",
            TESTED.join(" and ")
        )
    })
}

/// All numbers of a name, to compare versions by.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|character: char| !character.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

fn require_room(folder: &Path) -> anyhow::Result<()> {
    let disk = statvfs(folder)
        .with_context(|| format!("cannot look at the disk of {}", folder.display()))?;
    let free = disk.blocks_available() as u64 * disk.fragment_size() as u64;
    ensure!(
        free >= ROOM,
        "the disk of {} is full: a kernel needs {} MiB, {} MiB are free",
        folder.display(),
        ROOM >> 20,
        free >> 20
    );
    Ok(())
}

/// Runs to the end, and prints its output only as a part of the error.
fn quietly(command: &mut Command) -> anyhow::Result<()> {
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

/// The release that an image for x86-64 tells of itself (`Documentation/arch/x86/boot.rst`, `bzImage`).
fn release_of(image: &Path) -> anyhow::Result<String> {
    const MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
    /// Where the offset of the version's text, less 0x200, stands.
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
            "{} is no kernel image for x86-64 (bzImage)",
            image.display()
        )
    })
}

/// Where modules are: beside the image, in a root folder's `lib/modules` whose `boot` has the image, or as
/// those of this machine.
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

fn only_entry(folder: &Path) -> anyhow::Result<PathBuf> {
    let mut entries = fs::read_dir(folder)
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .with_context(|| format!("cannot list {}", folder.display()))?;
    ensure!(
        entries.len() == 1,
        "{} has {} entries, not one; remove target/kernels to begin anew",
        folder.display(),
        entries.len()
    );
    let only = entries.pop().context("no entry")?;
    Ok(only.path())
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
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
    fn an_image_tells_its_release_and_nothing_else_is_an_image() {
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
