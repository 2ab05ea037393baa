//! Counts processes on this machine and the resources that this process holds.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;

/// Number of processes with this word on their command line, not counting zombies.
pub fn with_word(word: &str) -> usize {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines
        .filter(|line| {
            line.split(|byte| *byte == 0)
                .any(|own| own == word.as_bytes())
        })
        .count()
}

/// Number of processes that have exited but have not been reaped.
pub fn zombies() -> usize {
    stats()
        .filter(|stat| stat.first().is_some_and(|state| state == "Z"))
        .count()
}

/// Number of children of this process, including zombies.
pub fn children() -> usize {
    let own = std::process::id().to_string();
    stats().filter(|stat| stat.get(1) == Some(&own)).count()
}

/// The fields of each process's `/proc/PID/stat` after the process name: state, parent and so on.
fn stats() -> impl Iterator<Item = Vec<String>> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let (_, rest) = stat.rsplit_once(')')?;
        Some(rest.split_whitespace().map(str::to_owned).collect())
    })
}

/// Number of control groups below `folder` whose names contain `name`.
pub fn control_groups(folder: &Path, name: &str) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.path().is_dir())
        .map(|entry| {
            let is_one = entry.file_name().to_string_lossy().contains(name);
            usize::from(is_one) + control_groups(&entry.path(), name)
        })
        .sum()
}

/// The resources that this process holds, and the sockets in its network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Open files.
    pub files: usize,
    /// Child processes.
    pub children: usize,
    /// Number of TCP sockets by side and state, including sockets without a process, such as those in TIME_WAIT.
    pub sockets: BTreeMap<(Side, u8), usize>,
}

/// The side of a connection that a socket is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// A socket that connects.
    Client,
    /// A socket that listens or was accepted.
    Server,
}

impl Held {
    /// Counts the resources. Sockets on these ports count as servers'.
    pub fn now(servers: &[u16]) -> anyhow::Result<Self> {
        Ok(Self {
            files: files()?,
            children: children(),
            sockets: sockets(servers)?,
        })
    }
}

/// Number of open files, except `schedstat`: a probing thread keeps this file with its CPU time open after its first
/// probe.
fn files() -> anyhow::Result<usize> {
    let open = fs::read_dir("/proc/self/fd")?;
    let is_counted = |entry: &fs::DirEntry| {
        !fs::read_link(entry.path()).is_ok_and(|file| file.ends_with("schedstat"))
    };
    Ok(open
        .filter(|entry| entry.as_ref().map_or(true, is_counted))
        .count())
}

fn sockets(servers: &[u16]) -> anyhow::Result<BTreeMap<(Side, u8), usize>> {
    let mut sockets = BTreeMap::new();
    for path in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        // `tcp6` does not exist on machines without IPv6.
        let table = fs::read_to_string(path).unwrap_or_default();
        for line in table.lines().skip(1) {
            let fields: Vec<_> = line.split_whitespace().collect();
            let (Some(local), Some(state)) = (fields.get(1), fields.get(3)) else {
                continue;
            };
            let (_, port) = local.split_once(':').context("no port")?;
            let side = match servers.contains(&u16::from_str_radix(port, 16)?) {
                true => Side::Server,
                false => Side::Client,
            };
            let state = u8::from_str_radix(state, 16)?;
            *sockets.entry((side, state)).or_default() += 1;
        }
    }
    Ok(sockets)
}

/// Resets this process's peak memory use.
pub fn forget_peak() -> anyhow::Result<()> {
    fs::write("/proc/self/clear_refs", "5").context("cannot forget the peak of memory")
}

/// Memory of this process in KiB: current use, and peak since the last reset.
pub fn memory() -> anyhow::Result<(u64, u64)> {
    let status = fs::read_to_string("/proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        anyhow::Ok(number.context("no size of memory")?.parse()?)
    };
    Ok((field("VmRSS:")?, field("VmHWM:")?))
}
