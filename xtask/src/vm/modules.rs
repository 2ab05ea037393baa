//! Selects the kernel modules for the initramfs: networking modules and their dependencies. The kernel loads them by
//! itself on demand.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::archive::Archive;

/// Folders below `kernel/` whose modules are all included.
const FOLDERS: &[&str] = &[
    "net/802",
    "net/8021q",
    "net/bridge",
    "net/core",
    "net/ipv4",
    "net/ipv6",
    "net/llc",
    "net/netfilter",
    "net/netlink",
    "net/packet",
    "net/sched",
    "net/unix",
];

/// Modules outside these folders.
const MODULES: &[&str] = &[
    "bonding",
    "dummy",
    "ifb",
    "ip_vti",
    "ipvlan",
    "loop",
    "macvlan",
    "macvtap",
    "netkit",
    "overlay",
    "tap",
    "tun",
    "veth",
    "vrf",
    "vxlan",
    "wireguard",
    // Checksums and ciphers that other modules request only by name.
    "crc32c_generic",
    "crc32c-intel",
    "libcrc32c",
];

/// Adds the modules at `/lib/modules/RELEASE`.
pub(crate) fn add(
    archive: &mut Archive<impl std::io::Write>,
    folder: &Path,
    release: &str,
) -> anyhow::Result<()> {
    let list = folder.join("modules.dep");
    let list = fs::read_to_string(&list)
        .with_context(|| format!("cannot read {}; make it with depmod", list.display()))?;
    let place = PathBuf::from("/usr/lib/modules").join(release);
    for module in wanted(&list) {
        let path = folder.join(module);
        let content = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        archive.file(&place.join(module), &content)?;
    }
    // The files that modprobe uses for look-ups by name.
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
        if entry.file_name().to_string_lossy().starts_with("modules.") {
            let content = fs::read(entry.path())
                .with_context(|| format!("cannot read {}", entry.path().display()))?;
            archive.file(&place.join(entry.file_name()), &content)?;
        }
    }
    Ok(())
}

/// Paths of the modules and their dependencies, from lines `PATH: NEEDED NEEDED ...`.
fn wanted(list: &str) -> BTreeSet<&str> {
    let needs: HashMap<&str, &str> = list
        .lines()
        .filter_map(|line| line.split_once(':'))
        .collect();
    let mut wanted = BTreeSet::new();
    for (path, needed) in &needs {
        if is_chosen(path) {
            // The list is complete: it includes indirect dependencies.
            wanted.insert(*path);
            wanted.extend(needed.split_whitespace());
        }
    }
    wanted
}

fn is_chosen(path: &str) -> bool {
    let Some(path) = path.strip_prefix("kernel/") else {
        return false;
    };
    let name = path.rsplit('/').next().unwrap_or(path);
    let name = name.split(".ko").next().unwrap_or(name);
    MODULES.contains(&name)
        || FOLDERS.iter().any(|folder| {
            path.strip_prefix(folder)
                .is_some_and(|rest| rest.starts_with('/'))
        })
}

#[cfg(test)]
mod tests {
    use super::wanted;

    #[test]
    fn chosen_modules_come_with_those_they_need() {
        let list = "\
kernel/drivers/net/veth.ko.xz:
kernel/drivers/gpu/drm/drm.ko.xz: kernel/lib/x.ko.xz
kernel/net/sched/act_ct.ko.xz: kernel/net/netfilter/nf_conntrack.ko.xz kernel/lib/libcrc32c.ko.xz
kernel/net/scheduler/other.ko.xz:
";
        assert_eq!(
            wanted(list).into_iter().collect::<Vec<_>>(),
            [
                "kernel/drivers/net/veth.ko.xz",
                "kernel/lib/libcrc32c.ko.xz",
                "kernel/net/netfilter/nf_conntrack.ko.xz",
                "kernel/net/sched/act_ct.ko.xz",
            ]
        );
    }
}
