//! Writes an initramfs: a cpio archive in the "newc" format
//! (`Documentation/driver-api/early-userspace/buffer-format.rst` of Linux).

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};

const FOLDER: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// Name of the entry that terminates an archive.
const TRAILER: &str = "TRAILER!!!";

/// Writer of an archive. Adds parent folders automatically.
pub(crate) struct Archive<W: Write> {
    out: W,
    /// Paths of the entries written so far, without the leading slash.
    written: BTreeSet<PathBuf>,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(out: W) -> Self {
        Self {
            out,
            written: BTreeSet::new(),
        }
    }

    /// Whether an absolute path is already in the archive.
    pub(crate) fn has(&self, path: &Path) -> bool {
        self.written
            .contains(path.strip_prefix("/").unwrap_or(path))
    }

    /// Adds an empty folder.
    pub(crate) fn folder(&mut self, path: &Path) -> anyhow::Result<()> {
        let path = relative(path)?;
        self.folders_above(&path.join("entry"))
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &Path, target: &str) -> anyhow::Result<()> {
        self.add(path, LINK | 0o777, target.as_bytes())
    }

    /// Adds a file that all users may read.
    pub(crate) fn file(&mut self, path: &Path, content: &[u8]) -> anyhow::Result<()> {
        self.add(path, REGULAR | 0o644, content)
    }

    /// Adds a file that all users may execute.
    pub(crate) fn program(&mut self, path: &Path, content: &[u8]) -> anyhow::Result<()> {
        self.add(path, REGULAR | 0o755, content)
    }

    /// Completes the archive.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        let ended = self
            .entry(Path::new(TRAILER), 0, &[])
            .and_then(|()| self.out.flush());
        ended.context("cannot write the initramfs")
    }

    /// Adds an entry unless the path already exists.
    fn add(&mut self, path: &Path, mode: u32, content: &[u8]) -> anyhow::Result<()> {
        let path = relative(path)?;
        if self.written.contains(&path) {
            return Ok(());
        }
        self.folders_above(&path)?;
        self.entry(&path, mode, content)
            .with_context(|| format!("cannot write /{} to the initramfs", path.display()))?;
        self.written.insert(path);
        Ok(())
    }

    fn folders_above(&mut self, path: &Path) -> anyhow::Result<()> {
        let mut folders: Vec<_> = path.ancestors().skip(1).map(Path::to_owned).collect();
        folders.pop();
        for folder in folders.into_iter().rev() {
            if !self.written.contains(&folder) {
                self.entry(&folder, FOLDER | 0o755, &[])
                    .with_context(|| format!("cannot add /{}", folder.display()))?;
                self.written.insert(folder);
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path, mode: u32, content: &[u8]) -> io::Result<()> {
        let name = path.as_os_str().as_encoded_bytes();
        let inode = u32::try_from(self.written.len() + 1).map_err(io::Error::other)?;
        let size = u32::try_from(content.len()).map_err(io::Error::other)?;
        let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        let (owner, time, device, checksum, links) = (0, 0, 0, 0, 1);
        let fields = [
            inode, mode, owner, owner, links, time, size, device, device, device, device,
            name_size, checksum,
        ];
        let mut header = b"070701".to_vec();
        for field in fields {
            write!(header, "{field:08X}")?;
        }
        header.extend(name);
        header.push(0);
        pad(&mut header);
        self.out.write_all(&header)?;
        self.out.write_all(content)?;
        // Contents are padded to a multiple of four bytes, so that the next header is aligned.
        let padding = content.len().next_multiple_of(4) - content.len();
        self.out.write_all(&[0; 3][..padding])
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

fn relative(path: &Path) -> anyhow::Result<PathBuf> {
    let relative: PathBuf = match path.strip_prefix("/") {
        Ok(relative) => relative.to_owned(),
        Err(_) => bail!("{} is not an absolute path", path.display()),
    };
    if relative
        .components()
        .any(|part| !matches!(part, Component::Normal(_)))
    {
        bail!("{} is not a plain path", path.display());
    }
    Ok(relative)
}

#[cfg(test)]
mod tests {
    use super::Archive;
    use std::path::Path;

    #[test]
    fn entries_follow_their_folders_and_nothing_comes_twice() {
        let mut bytes = Vec::new();
        let mut archive = Archive::new(&mut bytes);
        archive
            .program(Path::new("/usr/bin/a"), b"12345")
            .expect("room");
        archive.file(Path::new("/usr/b"), b"x").expect("room");
        archive.file(Path::new("/usr/b"), b"other").expect("room");
        archive.link(Path::new("/bin"), "usr/bin").expect("room");
        assert!(archive.has(Path::new("/usr")));
        archive.finish().expect("room");

        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(
            names(&bytes),
            ["usr", "usr/bin", "usr/bin/a", "usr/b", "bin", "TRAILER!!!"]
        );
    }

    #[test]
    fn only_absolute_plain_paths_are_taken() {
        let mut archive = Archive::new(Vec::new());
        assert!(archive.file(Path::new("a"), b"").is_err());
        assert!(archive.file(Path::new("/a/../b"), b"").is_err());
    }

    /// Walks the archive as the kernel does.
    fn names(mut rest: &[u8]) -> Vec<String> {
        let mut names = Vec::new();
        while !rest.is_empty() {
            assert_eq!(&rest[..6], b"070701");
            let field = |index: usize| {
                let digits = str::from_utf8(&rest[6 + 8 * index..][..8]).expect("digits");
                usize::from_str_radix(digits, 16).expect("a number")
            };
            let (size, name_size) = (field(6), field(11));
            let name = &rest[110..110 + name_size - 1];
            names.push(String::from_utf8(name.to_vec()).expect("a name"));
            let content = (110 + name_size).next_multiple_of(4);
            rest = &rest[content + size.next_multiple_of(4)..];
        }
        names
    }
}
