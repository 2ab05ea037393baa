//! What the kernel and this process must offer before anything is touched.

use std::path::{Path, PathBuf};

use nix::unistd::Uid;

use crate::net::hostns::is_bpffs;

/// First kernel with TCX links, which hold the programs on their devices.
const TCX_SINCE: (u32, u32) = (6, 6);
const BTF: &str = "/sys/kernel/btf/vmlinux";

/// A requirement that is not met.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmet {
    /// Not root.
    #[error(
        "health-agent needs root: it loads eBPF programs and makes network namespaces; run it as root or with sudo"
    )]
    NotRoot,
    /// Too old a kernel.
    #[error("kernel {release} has no TCX links (BPF_LINK_TYPE_TCX), which Linux {}.{} brought; boot a newer kernel", TCX_SINCE.0, TCX_SINCE.1)]
    KernelTooOld {
        /// What the kernel calls itself.
        release: String,
    },
    /// A kernel without type information.
    #[error("the kernel has no BTF at {BTF}; boot one built with CONFIG_DEBUG_INFO_BTF=y")]
    NoBtf,
    /// No bpffs.
    #[error("no bpffs is mounted at {0}; mount one: mount -t bpf bpf {0}")]
    NoBpffs(PathBuf),
}

/// Checks everything that can be checked without changing anything, the most basic first.
pub fn require(bpf_root: &Path) -> Result<(), Unmet> {
    if !Uid::effective().is_root() {
        return Err(Unmet::NotRoot);
    }
    let release = nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    if version(&release).is_some_and(|version| version < TCX_SINCE) {
        return Err(Unmet::KernelTooOld { release });
    }
    if !Path::new(BTF).exists() {
        return Err(Unmet::NoBtf);
    }
    if !is_bpffs(bpf_root) {
        return Err(Unmet::NoBpffs(bpf_root.to_owned()));
    }
    Ok(())
}

/// Major and minor number of a release such as `6.12.9-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_by_their_first_two_numbers() {
        for (release, expected) in [
            ("6.12.9-amd64", Some((6, 12))),
            ("6.1.0-31-amd64", Some((6, 1))),
            ("2.6.78.44-fc", Some((2, 6))),
            ("7.0", Some((7, 0))),
            ("rolling", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
    }
}
