//! How many files benchmarks, and what they start, may have open.

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// As many as any benchmark needs: one with 16,000 connections under way has both of their ends.
const NEEDED: u64 = 65_536;

/// Allows as many open files as any benchmark needs, and as the hard limit does. Fails where that is fewer than needed and
/// cannot be raised, and says what to do.
pub fn raise_open_files_limit() -> anyhow::Result<()> {
    let files = Resource::RLIMIT_NOFILE;
    let (_, hard) = getrlimit(files).context("cannot read the limit on open files")?;
    let most = hard.max(NEEDED);
    setrlimit(files, most, most).with_context(|| {
        format!("needs {NEEDED} open files, and the hard limit is {hard}: raise it, as by `ulimit -Hn {NEEDED}`")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs root"]
    fn a_low_limit_is_raised() {
        let files = Resource::RLIMIT_NOFILE;
        let (_, before) = getrlimit(files).unwrap();
        // Others in this process need some.
        setrlimit(files, 20_000.min(before), 20_000.min(before)).unwrap();
        let raised = raise_open_files_limit();
        let (soft, hard) = getrlimit(files).unwrap();
        // Not even root may, without `CAP_SYS_RESOURCE`.
        if let Err(error) = raised {
            assert!(hard < NEEDED);
            let error = error.to_string();
            assert!(
                error.contains(&format!("the hard limit is {hard}")),
                "{error}"
            );
            return;
        }
        assert!(soft >= NEEDED && hard >= NEEDED, "{soft} {hard}");
    }
}
