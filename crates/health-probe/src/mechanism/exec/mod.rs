//! Probes that run a command in the container, either directly by the agent ([`direct`]) or through the container
//! runtime ([`cri`]).
//!
//! In both cases the command's processes end with the probe: any that it leaves behind are killed, and the command does
//! not run again until all of them have exited.

pub mod cri;
pub mod direct;
mod group;
mod tree;
mod wait;

use super::{OUTPUT_LIMIT, failure, success};
use crate::Outcome;

/// The outcome of a command that exited with a code.
fn judge(code: i32, output: &[u8]) -> Outcome {
    if code == 0 {
        return success("exit code 0");
    }
    let output = &output[..output.len().min(OUTPUT_LIMIT)];
    let output = String::from_utf8_lossy(output);
    match output.trim_end() {
        "" => failure(format!("exit code {code}")),
        output => failure(format!("exit code {code}: {output}")),
    }
}

/// The outcome of a command that did not finish in time.
fn timed_out(command: &[String], timeout: std::time::Duration) -> Outcome {
    failure(format!(
        "timeout: command {command:?} did not end within {timeout:?}"
    ))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::RawResult;

    #[test]
    fn e1_the_exit_code_decides() {
        assert_eq!(judge(0, b"well").result, RawResult::Success);
        let failed = judge(1, b"no luck\n");
        assert_eq!(failed, failure("exit code 1: no luck"));
        assert_eq!(judge(137, b""), failure("exit code 137"));
    }

    #[test]
    fn e3_p7_output_is_cut() {
        let output = vec![b'x'; OUTPUT_LIMIT + 1];
        let failed = judge(1, &output);
        assert_eq!(
            failed.message.matches('x').count(),
            OUTPUT_LIMIT + "exit".matches('x').count()
        );
    }

    #[test]
    fn e4_a_timeout_is_a_failure() {
        let outcome = timed_out(
            &["sleep".to_owned(), "9".to_owned()],
            Duration::from_secs(1),
        );
        assert!(outcome.message.starts_with("timeout: "), "{outcome:?}");
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
    }
}
