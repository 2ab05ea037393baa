//! Commands that show container probes.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

use health_model::api::ContainerProbe;
use serde_json::Value;

use super::common::Agent;
use super::{failure, printed, program_in, stderr, stdout};

/// An agent whose container probes fail.
pub(super) fn probing() -> Agent {
    Agent::start(|fixture| fixture.probes_containers = true)
}

#[test]
fn container_probes_are_listed_with_what_keeps_others_from_it() {
    let agent = probing();
    let output = program_in(agent.dir(), "probe list").output().unwrap();
    assert_eq!(
        stderr(&output),
        "warning: pods/db.yaml: pod shop/db: \\u{1b}[1m\n"
    );
    let text = stdout(&output);
    assert!(text.starts_with("POD        CONTAINER   TYPE "), "{text}");
    assert_eq!(text.lines().count(), 3, "{text}");
    let shown = |arguments: &str| {
        let text = printed(&agent, arguments);
        let words = text.split_whitespace().collect::<Vec<_>>();
        words.join(" ")
    };
    let liveness = "shop/web app liveness tcp://127.0.0.1:1 failure failure 1/1 on hold ";
    let one = shown("probe list --no-headers --failing --pod web --type liveness");
    assert!(one.starts_with(liveness), "{one}");
    assert!(one.to_lowercase().contains("refused"), "{one}");
    assert!(shown("probe list -o wide").contains(" test://3f2a "));
    assert_eq!(shown("probe list --no-headers --pod db"), "");
    let probes: Vec<ContainerProbe> =
        serde_json::from_str(&printed(&agent, "probe list -o json")).unwrap();
    assert_eq!(probes.len(), 2);

    let none = Agent::start(|_| {});
    let output = program_in(none.dir(), "probe list").output().unwrap();
    assert_eq!(stdout(&output).lines().count(), 1, "{output:?}");
    assert_eq!(
        stderr(&output),
        "warning: this agent probes no containers; see run --pod-manifests and --pods-from-kubernetes\n"
    );
}

#[test]
fn everything_about_a_pods_probes_is_in_one_place() {
    let agent = probing();
    let text = printed(&agent, "probe get web --type liveness");
    assert!(text.starts_with("Pod:   shop/web\nUID:   u-1\n"), "{text}");
    assert!(
        text.contains("\n    liveness:   tcp://127.0.0.1:1\n"),
        "{text}"
    );
    assert!(!text.contains("readiness:   "), "{text}");
    assert!(text.contains("NotKilled"), "{text}");
    let details: Value = serde_json::from_str(&printed(&agent, "probe get u-1 -o json")).unwrap();
    assert_eq!(details["pod"]["uid"], "u-1");
    assert_eq!(details["probes"].as_array().map(Vec::len), Some(2));
    for (command, named) in [
        ("probe get db", "no probed pod \"db\""),
        ("probe get web --container db", "no container \"db\""),
    ] {
        let line = failure(program_in(agent.dir(), command));
        assert!(line.contains(named), "{line}");
    }
    let none = Agent::start(|_| {});
    let line = failure(program_in(none.dir(), "probe get web"));
    assert!(
        line.contains("no pod \"web\": this agent probes no containers"),
        "{line}"
    );
}

#[test]
fn events_of_containers_and_a_summary_are_reported() {
    let agent = probing();
    let events = printed(&agent, "probe events --pod shop/web");
    assert!(events.contains("   Liveness probe failed: "), "{events}");
    assert_eq!(printed(&agent, "probe events --pod db").lines().count(), 1);
    let status = printed(&agent, "status --verbose");
    let line = "\nContainer probes:   1 pod, 0 ready; 2 probes, 2 failing\n  - pods/db.yaml: ";
    assert!(status.contains(line), "{status}");
    let without = printed(&Agent::start(|_| {}), "status --verbose");
    assert!(!without.contains("Container probes"), "{without}");
}

#[test]
fn a_watch_of_container_probes_prints_lines_until_the_agent_ends() {
    for (arguments, first, gone) in [
        ("probe list --watch", "result failure, on hold", "   gone"),
        (
            "probe list --watch -o jsonl",
            "{\"event\":\"updated\",",
            "{\"event\":\"deleted\",",
        ),
    ] {
        let agent = probing();
        let mut child = program_in(agent.dir(), arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut is_there = |part: &str| lines.by_ref().any(|line| line.unwrap().contains(part));
        assert!(is_there(first), "{arguments}");
        agent.remove_pods();
        assert!(is_there(gone), "{arguments}");
        drop(agent);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(
            stderr(&output).starts_with("error: GET /v1/probes"),
            "{output:?}"
        );
    }
    let agent = probing();
    let line = failure(program_in(agent.dir(), "probe list --watch -o yaml"));
    assert!(line.contains("-o jsonl"), "{line}");
}

/// Runs `probe list` and other commands with stdout redirected by a shell, and returns their outputs.
fn redirected(agent: &Agent, redirection: &str) -> Vec<(&'static str, Output)> {
    let commands = [
        "probe list",
        "probe list -o jsonl",
        "probe list --watch",
        "node list -o yaml",
        "status",
        "completion bash",
        "--help",
    ];
    commands
        .into_iter()
        .map(|arguments| {
            let listing = program_in(agent.dir(), arguments);
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(format!("\"$0\" \"$@\" {redirection}"));
            shell.arg(listing.get_program()).args(listing.get_args());
            (arguments, shell.output().unwrap())
        })
        .collect()
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let agent = probing();
    for (redirection, why) in [
        (">&-", "Bad file descriptor (os error 9)"),
        ("1</dev/null", "Bad file descriptor (os error 9)"),
        (">/dev/full", "No space left on device (os error 28)"),
    ] {
        for (arguments, output) in redirected(&agent, redirection) {
            let reported = stderr(&output).lines().last().unwrap_or_default();
            let error = format!("error: cannot write to standard output: {why}");
            assert_eq!(reported, error, "{arguments} {redirection}: {output:?}");
            assert_eq!(output.status.code(), Some(1), "{arguments}: {output:?}");
        }
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let agent = probing();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut listing = program_in(agent.dir(), "probe list");
    let output = listing.stdout(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(!stderr(&output).contains("error"), "{output:?}");
}
