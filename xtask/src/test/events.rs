//! Events that a test program reports: the JSON lines of Rust's test harness, which the pinned toolchain keeps behind
//! an unstable flag.

use std::time::Duration;

use serde::Deserialize;

/// Makes a program report events.
pub(crate) const FLAGS: &[&str] = &["-Zunstable-options", "--format=json", "--report-time"];

/// Makes the harness accept the flags in [`FLAGS`].
pub(crate) const ENVIRONMENT: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// The end of a test.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TestEnd {
    pub(crate) test: String,
    pub(crate) took: Duration,
    pub(crate) outcome: Outcome,
}

/// The result of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    /// With the test's output.
    Failed(String),
    Ignored,
}

impl Outcome {
    /// The output of a failed test.
    pub(crate) fn failure(&self) -> Option<&str> {
        match self {
            Self::Failed(said) => Some(said),
            Self::Passed | Self::Ignored => None,
        }
    }
}

#[derive(Deserialize)]
struct Line {
    #[serde(rename = "type")]
    kind: String,
    event: String,
    name: Option<String>,
    #[serde(default)]
    exec_time: f64,
    #[serde(default)]
    stdout: String,
}

/// Start of every event, whether about one test or about all tests: started, finished or slow. Tests and their children
/// print JSON without these spaces.
const START: &str = r#"{ "type": ""#;

/// Whether a line was written by the harness. Other lines come from a test's child.
pub(crate) fn is_event(line: &str) -> bool {
    line.starts_with(START)
}

/// Parses the end of a test; `None` for all other lines.
pub(crate) fn read(line: &str) -> Option<TestEnd> {
    let line: Line = serde_json::from_str(line).ok()?;
    if line.kind != "test" {
        return None;
    }
    let outcome = match line.event.as_str() {
        "ok" => Outcome::Passed,
        "failed" => Outcome::Failed(line.stdout),
        "ignored" => Outcome::Ignored,
        _ => return None,
    };
    Some(TestEnd {
        test: line.name?,
        took: Duration::try_from_secs_f64(line.exec_time).unwrap_or_default(),
        outcome,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_read_and_other_lines_are_not() {
        let failed = r#"{ "type": "test", "name": "a::b", "event": "failed", "exec_time": 1.5, "stdout": "no\n" }"#;
        let ended = read(failed).expect("an end");
        assert_eq!(ended.test, "a::b");
        assert_eq!(ended.took, Duration::from_millis(1500));
        assert_eq!(ended.outcome, Outcome::Failed("no\n".to_owned()));
        for event in [
            r#"{ "type": "suite", "event": "started", "test_count": 2 }"#,
            r#"{ "type": "test", "event": "started", "name": "a::b" }"#,
            r#"{ "type": "test", "event": "timeout", "name": "a::b" }"#,
        ] {
            assert_eq!(read(event), None, "{event}");
            assert!(is_event(event), "{event}");
        }
        for other in [
            r#"{"level":"INFO","message":"an agent"}"#,
            r#"{"type":"test"}"#,
            "a line",
        ] {
            assert_eq!(read(other), None, "{other}");
            assert!(!is_event(other), "{other}");
        }
    }
}
