//! Container images: archives that runtimes import, made without a registry.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use serde_json::json;

use crate::process::run;

/// Folders that each image has, most of them for a runtime's mounts.
const FOLDERS: [&str; 7] = ["bin", "proc", "sys", "dev", "etc", "tmp", "run"];

/// The files of an image, in a folder.
#[derive(Debug)]
pub struct Image {
    rootfs: PathBuf,
}

impl Image {
    /// Starts an image in `folder`, which must be empty or missing.
    pub fn new(folder: &Path) -> anyhow::Result<Self> {
        for name in FOLDERS {
            let path = folder.join(name);
            fs::create_dir_all(&path)
                .with_context(|| format!("cannot create {}", path.display()))?;
        }
        Ok(Self {
            rootfs: folder.to_owned(),
        })
    }

    /// The folder of the files.
    pub fn rootfs(&self) -> &Path {
        &self.rootfs
    }

    /// Adds busybox, as these programs.
    pub fn busybox<'a>(&self, applets: impl IntoIterator<Item = &'a str>) -> anyhow::Result<()> {
        let bin = self.rootfs.join("bin");
        // A static binary, which needs no libraries in the container.
        fs::copy("/bin/busybox", bin.join("busybox")).context("cannot copy busybox")?;
        for applet in applets {
            symlink("busybox", bin.join(applet))?;
        }
        Ok(())
    }

    /// Adds a program without its symbols, with the libraries that it needs.
    pub fn program(&self, program: &Path, name: &str) -> anyhow::Result<()> {
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(self.rootfs.join("bin").join(name));
        run(strip.arg(program))?.success()?;
        let needed = run(Command::new("ldd").arg(program))?.success()?;
        let libraries = needed
            .split_whitespace()
            .filter(|word| word.starts_with('/'));
        for library in libraries.map(Path::new) {
            let place = self.rootfs.join(library.strip_prefix("/")?);
            fs::create_dir_all(place.parent().context("a library is a file")?)?;
            fs::copy(library, &place)
                .with_context(|| format!("cannot copy {}", library.display()))?;
        }
        Ok(())
    }

    /// Writes the image as the archive of `docker save`, with this name and entry point, and returns its path.
    pub fn archive(&self, name: &str, entrypoint: &[&str]) -> anyhow::Result<PathBuf> {
        let beside = |extension: &str| self.rootfs.with_extension(extension);
        let parts = beside("parts");
        fs::create_dir_all(&parts).context("cannot create a folder for an image")?;
        let layer = parts.join("layer.tar");
        tar(&layer, &self.rootfs)?;
        let sum = run(Command::new("sha256sum").arg(&layer))?.success()?;
        let sum = sum.split(' ').next().context("sha256sum printed nothing")?;
        let config = json!({
            "architecture": if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" },
            "os": "linux",
            "config": { "Entrypoint": entrypoint, "Env": ["PATH=/bin"] },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{sum}")] },
        });
        let manifest = json!([{
            "Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"],
        }]);
        fs::write(parts.join("config.json"), config.to_string())?;
        fs::write(parts.join("manifest.json"), manifest.to_string())?;
        let archive = beside("tar");
        tar(&archive, &parts)?;
        fs::remove_dir_all(parts).context("cannot remove the parts of an image")?;
        Ok(archive)
    }
}

fn tar(archive: &Path, folder: &Path) -> anyhow::Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(archive).arg("-C").arg(folder).arg(".");
    run(&mut tar)?.success().map(drop)
}
