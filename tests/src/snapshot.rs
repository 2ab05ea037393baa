//! Snapshots of the machine before and after a test, to check that nothing is left behind.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use crate::bed::{BPFFS, Node};
use crate::process::run;
use crate::{PATIENCE, wait_for};

/// Sysctls that control forwarding, below `/proc/sys/net`.
const SYSCTLS: [(&str, &[&str]); 2] = [
    ("ipv4/conf", &["forwarding", "rp_filter", "accept_local"]),
    ("ipv6/conf", &["forwarding", "disable_ipv6", "proxy_ndp"]),
];

/// The state of a machine or of one network namespace, one line per item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    lines: BTreeSet<String>,
}

impl Snapshot {
    /// Captures the machine: devices, namespaces, routes, mounts, pins, files in `/run` and `/var/lib`, sysctls.
    pub fn machine() -> anyhow::Result<Self> {
        let mut lines = network(|program| Command::new(program))?;
        lines.extend(files("netns", Path::new("/run/netns"))?);
        lines.extend(files("pin", Path::new(BPFFS))?);
        for parent in ["/run", "/var/lib"] {
            lines.extend(files_named_after_the_agent(Path::new(parent))?);
        }
        lines.extend(mounts()?);
        Ok(Self { lines })
    }

    /// Captures a node's network namespace and its agent's files: devices, routes, sysctls, pins, files, and the
    /// namespace of its endpoint.
    pub fn node(node: &Node) -> anyhow::Result<Self> {
        let mut lines = network(|program| node.command(program))?;
        lines.extend(files("pin", &node.pins())?);
        lines.extend(files("file", &node.runtime_dir())?);
        if node.endpoint_netns().exists() {
            lines.insert(format!("netns {}", node.endpoint_netns().display()));
        }
        Ok(Self { lines })
    }

    /// Like [`Self::node`], but waits until duplicate address detection has finished (RFC 4862, 5.4).
    pub fn settled(node: &Node) -> anyhow::Result<Self> {
        wait_for("addresses to be settled", PATIENCE, || {
            let now = Self::node(node)?;
            Ok((!now.mentions(" tentative ")).then_some(now))
        })
    }

    /// Waits until a node is as in this snapshot, except for what agents learn about their peers, the folder of
    /// endpoint files, and the policy file, which may be empty.
    pub fn wait_nothing_left(&self, node: &Node) -> anyhow::Result<()> {
        let may_differ = [
            "/state/learned.json",
            "/state/nodes.json",
            "/state/endpoints",
            "/state/policies.json",
        ];
        wait_for("everything to be removed", PATIENCE, || {
            let difference = Self::node(node)?.since(self);
            let mut left = difference
                .lines()
                .filter(|line| !may_differ.iter().any(|path| line.ends_with(path)));
            anyhow::ensure!(left.next().is_none(), "left:\n{difference}");
            Ok(Some(()))
        })
    }

    /// Whether any line contains `text`.
    pub fn mentions(&self, text: &str) -> bool {
        self.lines.iter().any(|line| line.contains(text))
    }

    /// Lines added and removed since `before`: empty if nothing changed.
    pub fn since(&self, before: &Self) -> String {
        let mut diff = String::new();
        for (sign, lines) in [
            ('-', before.lines.difference(&self.lines)),
            ('+', self.lines.difference(&before.lines)),
        ] {
            for line in lines {
                // Writing to a string cannot fail.
                let _ = writeln!(diff, "{sign} {line}");
            }
        }
        diff
    }

    /// Waits until `now` returns a snapshot equal to `self`: the kernel removes namespaces and devices with some delay.
    /// Fails with the difference.
    pub fn wait_same(&self, mut now: impl FnMut() -> anyhow::Result<Self>) -> anyhow::Result<()> {
        wait_for("the machine to be as before", PATIENCE, || {
            let difference = now()?.since(self);
            if difference.is_empty() {
                return Ok(Some(()));
            }
            anyhow::bail!("difference:\n{difference}")
        })
    }
}

fn network(mut command: impl FnMut(&str) -> Command) -> anyhow::Result<BTreeSet<String>> {
    let mut lines = BTreeSet::new();
    for (what, arguments) in [
        ("link", ["-oneline", "link", "show"].as_slice()),
        ("address", &["-oneline", "address", "show"]),
        ("route", &["-4", "route", "show", "table", "all"]),
        ("route", &["-6", "route", "show", "table", "all"]),
        ("rule", &["-4", "rule", "show"]),
        ("rule", &["-6", "rule", "show"]),
    ] {
        let listing = run(command("ip").args(arguments))?.success()?;
        lines.extend(
            listing
                .lines()
                .map(|line| format!("{what} {}", stable(line))),
        );
    }
    for (folder, names) in SYSCTLS {
        let listing = run(command("grep")
            .args(["--recursive", "--no-messages"])
            .args(names.iter().map(|name| format!("--include={name}")))
            .args(["", &format!("/proc/sys/net/{folder}")]))?;
        lines.extend(listing.stdout.lines().map(|line| format!("sysctl {line}")));
    }
    Ok(lines)
}

/// Removes the countdowns, which change by themselves, from a line of `ip` output.
fn stable(line: &str) -> String {
    let mut words = line.split_whitespace().peekable();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "expires" | "valid_lft" | "preferred_lft" => {
                words.next();
            }
            _ => kept.push(word),
        }
    }
    kept.join(" ")
}

fn mounts() -> anyhow::Result<BTreeSet<String>> {
    let mounts =
        fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    Ok(mounts.lines().map(|line| format!("mount {line}")).collect())
}

/// All files below a folder, including the folder itself.
fn files(what: &str, folder: &Path) -> anyhow::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut to_list = vec![folder.to_owned()];
    while let Some(path) = to_list.pop() {
        match fs::read_dir(&path) {
            Ok(entries) => {
                for entry in entries {
                    to_list.push(entry?.path());
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) if error.kind() == ErrorKind::NotADirectory => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot list {}", path.display()));
            }
        }
        found.insert(format!("{what} {}", path.display()));
    }
    Ok(found)
}

fn files_named_after_the_agent(parent: &Path) -> anyhow::Result<BTreeSet<String>> {
    let entries =
        fs::read_dir(parent).with_context(|| format!("cannot list {}", parent.display()))?;
    let mut found = BTreeSet::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {}", parent.display()))?;
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with("health-agent")
        {
            found.extend(files("file", &entry.path())?);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(lines: &[&str]) -> Snapshot {
        Snapshot {
            lines: lines.iter().map(|&line| line.to_owned()).collect(),
        }
    }

    #[test]
    fn what_came_and_what_went_is_reported() {
        let before = snapshot(&["link lo", "route a"]);
        let after = snapshot(&["link lo", "route b"]);
        assert_eq!(after.since(&before), "- route a\n+ route b\n");
        assert_eq!(before.since(&before), "");
        assert!(after.mentions("route b") && !after.mentions("route a"));
    }

    #[test]
    fn countdowns_do_not_count() {
        assert_eq!(
            stable("inet6 fe80::1/64 scope link valid_lft 12sec preferred_lft 3sec"),
            "inet6 fe80::1/64 scope link"
        );
    }
}
