//! Raises the limit of open files for benchmarks and their child processes.

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The maximum that any benchmark needs: one with 16,000 open connections has both ends of each.
const NEEDED: u64 = 65_536;

/// Raises the limit of open files to the number that benchmarks need, or to the hard limit if that cannot be raised.
/// Returns advice if the number is not reached.
pub fn raise_open_files_limit() -> anyhow::Result<Option<String>> {
    raise_to(NEEDED)
}

fn raise_to(needed: u64) -> anyhow::Result<Option<String>> {
    let files = Resource::RLIMIT_NOFILE;
    let (_, hard) = getrlimit(files).context("cannot read the limit on open files")?;
    let most = hard.max(needed);
    if setrlimit(files, most, most).is_ok() {
        return Ok(None);
    }
    setrlimit(files, hard, hard).context("cannot raise the limit on open files")?;
    Ok(Some(format!(
        "at most {hard} open files: a benchmark may need {needed}; raise the hard limit, for example with `ulimit -Hn {needed}`"
    )))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::process::run;

    /// Set in the test's child process to the number of files that it needs.
    const CHILD: &str = "HEALTH_NEEDED_FILES";
    const OWN_NAME: &str = "bench::files::tests::a_low_limit_is_raised_as_far_as_it_may_be";

    /// Runs the test in a process that has these soft and hard limits and may not raise the hard limit. Returns the
    /// output.
    fn raised(limits: &str, needed: u64) -> String {
        let mut command = Command::new("setpriv");
        command
            .args(["--bounding-set", "-sys_resource", "prlimit"])
            .arg(format!("--nofile={limits}"))
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", OWN_NAME, "--include-ignored", "--nocapture"])
            .env(CHILD, needed.to_string());
        run(&mut command).unwrap().success().unwrap()
    }

    #[test]
    #[ignore = "needs root"]
    fn a_low_limit_is_raised_as_far_as_it_may_be() {
        if let Ok(needed) = std::env::var(CHILD) {
            let advice = raise_to(needed.parse().unwrap()).unwrap();
            let limits = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
            println!("limits {limits:?} {}", advice.unwrap_or_default());
            return;
        }
        let said = raised("512:4096", 2048);
        assert!(said.contains("limits (4096, 4096)"), "{said}");
        let said = raised("512:1024", 2048);
        let advice = "limits (1024, 1024) at most 1024 open files: a benchmark may need 2048";
        assert!(said.contains(advice), "{said}");
    }
}
