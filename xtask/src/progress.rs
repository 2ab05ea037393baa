//! Shows the progress of long builds.

use std::collections::BTreeSet;
use std::fs;
use std::io::{IsTerminal as _, stderr};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use nix::unistd::{Pid, getpgid};

use crate::process::{cannot_run, shown};

/// How often a build reports its progress.
const PERIOD: Duration = Duration::from_secs(10);
/// How often to check whether the build has finished.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs cargo to completion. Where cargo shows no progress bar, prints the packages being compiled every few seconds.
pub(crate) fn build(cargo: &mut Command) -> anyhow::Result<()> {
    let mut child = cargo.spawn().map_err(|error| cannot_run(cargo, error))?;
    let begin = Instant::now();
    let mut next = PERIOD;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begin.elapsed() >= next && !stderr().is_terminal() {
            let running = being_compiled().into_iter().collect::<Vec<_>>();
            eprintln!("building for {} s: {}", next.as_secs(), running.join(", "));
            next += PERIOD;
        }
        thread::sleep(PAUSE);
    };
    if !status.success() {
        bail!("{} failed ({status})", shown(cargo));
    }
    Ok(())
}

/// The packages that this process group's compilers and build scripts are working on.
fn being_compiled() -> BTreeSet<String> {
    let own = getpgid(None).ok();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let group = getpgid(Some(Pid::from_raw(pid))).ok();
            let words = fs::read(entry.path().join("cmdline")).ok()?;
            (group == own).then_some(())?;
            package(&String::from_utf8_lossy(&words))
        })
        .collect()
}

/// The package that a process with this command line is working on. The words of `line` end with zero bytes.
fn package(line: &str) -> Option<String> {
    let mut words = line.split('\0');
    let program = words.next()?;
    if let Some(folder) = program.strip_suffix("/build-script-build") {
        // The folder is named after the package and a hash.
        let (name, _) = folder.rsplit('/').next()?.rsplit_once('-')?;
        return Some(format!("{name} (build script)"));
    }
    let name = words.skip_while(|word| *word != "--crate-name").nth(1)?;
    (name != "build_script_build" && name != "___").then(|| name.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilers_and_build_scripts_name_their_package() {
        let rustc = "/bin/rustc\0--crate-name\0health_mesh\0--edition=2024\0";
        assert_eq!(package(rustc).as_deref(), Some("health-mesh"));
        let script = "/t/debug/build/tikv-jemalloc-sys-98d42f44874bde9b/build-script-build\0";
        assert_eq!(
            package(script).as_deref(),
            Some("tikv-jemalloc-sys (build script)")
        );
        assert_eq!(package("cargo\0build\0"), None);
        assert_eq!(package(""), None);
    }
}
