//! How many files benchmarks, and what they start, may have open.

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// As many as any benchmark needs: one with 16,000 connections under way has both of their ends.
const NEEDED: u64 = 65_536;

/// Allows as many open files as any benchmark needs, and as the hard limit does. Fails where that is fewer than needed and
/// cannot be raised, and says what to do.
pub fn raise_open_files_limit() -> anyhow::Result<()> {
    raise_to(NEEDED)
}

fn raise_to(needed: u64) -> anyhow::Result<()> {
    let files = Resource::RLIMIT_NOFILE;
    let (_, hard) = getrlimit(files).context("cannot read the limit on open files")?;
    let most = hard.max(needed);
    setrlimit(files, most, most).with_context(|| {
        format!("needs {needed} open files, and the hard limit is {hard}: raise it, as by `ulimit -Hn {needed}`")
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::process::run;

    /// Set where the test runs as its own child, to what it needs.
    const CHILD: &str = "HEALTH_NEEDED_FILES";
    const OWN_NAME: &str = "bench::files::tests::a_low_limit_is_raised_as_far_as_it_may_be";

    /// What came of it in a process with these limits, soft and hard, that may not raise the hard one.
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
            match raise_to(needed.parse().unwrap()) {
                Ok(()) => println!("limits {:?}", getrlimit(Resource::RLIMIT_NOFILE).unwrap()),
                Err(error) => println!("{error}"),
            }
            return;
        }
        let said = raised("512:4096", 2048);
        assert!(said.contains("limits (4096, 4096)"), "{said}");
        let said = raised("512:1024", 2048);
        let advice =
            "needs 2048 open files, and the hard limit is 1024: raise it, as by `ulimit -Hn 2048`";
        assert!(said.contains(advice), "{said}");
    }
}
