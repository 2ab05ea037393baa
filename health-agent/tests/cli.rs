//! The real program, called as users call it.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

mod common;
#[path = "cli/probes.rs"]
mod probes;
#[path = "cli/services.rs"]
mod services;

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::Agent;
use health_cli::command;
use health_model::api::{Endpoint, HealthStatus, NodeEntry, NodeStatus, RegistryState};
use health_settings::SettingList;
use serde_json::Value;

/// The full names of all commands and groups; the program itself is "".
fn commands() -> Vec<String> {
    fn walk(name: &str, command: &clap::Command, all: &mut Vec<String>) {
        all.push(name.to_owned());
        for sub in command.get_subcommands() {
            walk(&format!("{name} {}", sub.get_name()), sub, all);
        }
    }
    let mut all = Vec::new();
    walk("", &command(), &mut all);
    all
}

/// A command that runs the program with `arguments`, isolated from the test's environment.
fn program(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_health-agent"));
    command.args(arguments.split_ascii_whitespace()).env_clear();
    command
}

/// Like [`program`], with an agent in `dir`.
fn program_in(dir: &Path, arguments: &str) -> Command {
    let mut command = program(arguments);
    for flag in ["--runtime-dir", "--state-dir", "--bpf-root"] {
        command.arg(flag).arg(dir);
    }
    command
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// The output of the program, which must succeed.
fn printed(agent: &Agent, arguments: &str) -> String {
    let output = program_in(agent.dir(), arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{arguments}: {output:?}");
    stdout(&output).to_owned()
}

/// The one-line error message of a command, which must fail.
fn failure(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(stdout(&output), "");
    let line = stderr(&output).strip_suffix('\n').unwrap();
    assert!(line.starts_with("error: "), "{line}");
    assert!(!line.contains('\n'), "{line}");
    line.to_owned()
}

#[test]
fn the_help_of_every_command_ends_with_examples() {
    for command in commands() {
        let output = program(&command).arg("--help").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{command}: {output:?}");
        let help = stdout(&output);
        let (_, examples) = help
            .rsplit_once("\nExamples:\n")
            .unwrap_or_else(|| panic!("{command}: {help}"));
        for example in examples.lines() {
            assert!(example.starts_with("  "), "{command}: {help}");
        }
    }
    assert!(commands().contains(&" bpf map dump".to_owned()));
}

/// Longer lines would break in odd places: the assumed terminal width is 100 columns.
#[test]
fn what_follows_the_flags_in_a_help_fits_100_columns() {
    fn check(command: &clap::Command) {
        let text = command.get_after_help().map(ToString::to_string);
        for line in text.unwrap_or_default().lines() {
            assert!(
                line.chars().count() <= 100,
                "{}: {line}",
                command.get_name()
            );
        }
        command.get_subcommands().for_each(check);
    }
    check(&command());
}

#[test]
fn bad_usage_exits_2_and_names_flag_and_value() {
    for (arguments, flag, value) in [
        ("run --probe-interval 10", "--probe-interval", "10"),
        ("run --probe-interval 50ms", "--probe-interval", "50ms"),
        ("run --probe-timeout 11s", "--probe-timeout", "11s"),
        (
            "run --conntrack-gc-interval off",
            "--conntrack-gc-interval",
            "adaptive",
        ),
        (
            "run --conntrack-gc-max-interval 9s",
            "--conntrack-gc-max-interval",
            "9s",
        ),
        ("run --masquerade-ports 80", "--masquerade-ports", "80"),
        (
            "run --runtime-endpoint /run/containerd/containerd.sock",
            "--pod-manifests",
            "--pods-from-kubernetes",
        ),
        (
            "run --pods-from-kubernetes=config",
            "--pods-from-kubernetes",
            "absolute path",
        ),
        (
            "run --masquerade-ports 90-80",
            "--masquerade-ports",
            "90-80",
        ),
        (
            "run --native-routing-cidr 10.0.0.1/8",
            "--native-routing-cidr",
            "10.0.0.0/8",
        ),
        (
            "run --gateway-cidr 10.0.0.0/33",
            "--gateway-cidr",
            "10.0.0.0/33",
        ),
        (
            "run --conntrack-timeout-udp 0s",
            "--conntrack-timeout-udp",
            "1s to 240h",
        ),
        (
            "run --conntrack-timeout-tcp-syn 1500ms",
            "--conntrack-timeout-tcp-syn",
            "whole seconds",
        ),
        (
            "run --conntrack-timeout-any 241h",
            "--conntrack-timeout-any",
            "1s to 240h",
        ),
        (
            "run --conntrack-timeout-fragment 30",
            "--conntrack-timeout-fragment",
            "like 90s or 2h",
        ),
        (
            "run --ipvs-tcp-timeout 1.5s",
            "--ipvs-tcp-timeout",
            "whole seconds, like 90s or 2h; must be 0s to 480h",
        ),
        (
            "run --ipvs-tcp-timeout 481h",
            "--ipvs-tcp-timeout",
            "must be 0s to 480h",
        ),
        (
            "run --conntrack-max-entries 1023",
            "--conntrack-max-entries",
            "1024 to 16777216",
        ),
        (
            "run --nat-max-entries 16777217",
            "--nat-max-entries",
            "16777217",
        ),
        (
            "run --conntrack-any-max-entries 0",
            "--conntrack-any-max-entries",
            "1024 to 16777216",
        ),
        (
            "run --nat-any-max-entries 1023",
            "--nat-any-max-entries",
            "1023",
        ),
        ("monitor --type all", "--type", "all"),
        ("monitor --proto tpc", "--proto", "tpc"),
        ("monitor --endpoint 0", "--endpoint", "1..=4095"),
        ("monitor --count 0", "--count", "0"),
        ("monitor --for 10", "--for", "10"),
        ("run --health-port 0", "--health-port", "0"),
        ("run --health-port 65536", "--health-port", "65536"),
        ("run --metrics-address on", "--metrics-address", "on"),
        (
            "run --healthz-address localhost:0",
            "--healthz-address",
            "localhost:0",
        ),
        ("run --device a/b", "--device", "a/b"),
        ("run --node-name a/b", "--node-name", "a/b"),
        ("run --log-level loud", "--log-level", "loud"),
        ("run --log-format xml", "--log-format", "xml"),
        ("run --nonsense", "--nonsense", ""),
        ("status --instance A", "--instance", "A"),
        ("--runtime-dir run status", "--runtime-dir", "run"),
        ("status --state-dir lib", "--state-dir", "lib"),
        ("bpf map list --bpf-root bpf", "--bpf-root", "bpf"),
        ("status -o xml", "--output", "xml"),
        ("status --watch=0", "--watch", "0"),
        ("status --watch=5s", "--watch", "5s"),
        ("status --watch --probe", "--watch", "--probe"),
        ("node get", "<NAME>", ""),
        ("probe get", "<POD>", ""),
        ("service get", "<SERVICE>", ""),
        ("run --service-node-zone a/b", "--service-node-zone", "a/b"),
        (
            "run --service-sync-max 500ms",
            "--service-sync-max",
            "1s to 1h",
        ),
        (
            "run --service-healthz-address on",
            "--service-healthz-address",
            "on",
        ),
        ("probe list --type ready", "--type", "ready"),
        ("probe list --watch --failing", "--watch", "--failing"),
        ("endpoint get 0", "<ID>", "0"),
        ("bpf ct list all", "[SCOPE]", "all"),
        ("bpf ct list --proto tpc", "--proto", "tpc"),
        ("bpf ct list --src 10.0.0.0/33", "--src", "10.0.0.0/33"),
        ("bpf ct list --dst host2", "--dst", "host2"),
        ("bpf ct list --port 65536", "--port", "65536"),
        ("bpf ct list --dir up", "--dir", "up"),
        ("bpf ct list --state open", "--state", "open"),
        ("bpf ct flush", "<SCOPE|", "--proto"),
        ("bpf nat list --state close", "--state", ""),
        ("bpf nat flush", "--all", "--proto"),
        ("bpf nat flush --all --proto tcp", "--all", "--proto"),
        ("bpf map dump", "<NAME>", ""),
        ("completion tcsh", "<SHELL>", "tcsh"),
        ("nonsense", "nonsense", ""),
        ("", "Usage:", ""),
    ] {
        let output = program(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments}: {output:?}");
        let text = stderr(&output);
        assert!(text.contains(flag), "{arguments}: {text}");
        assert!(text.contains(value), "{arguments}: {text}");
    }
}

#[test]
fn flags_come_from_the_environment_too() {
    let agent = Agent::start(|_| {});
    let output = program("status")
        .env("HEALTH_AGENT_RUNTIME_DIR", agent.dir())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output = program("status")
        .env("HEALTH_AGENT_INSTANCE", "no/such")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(stderr(&output).contains("'no/such'"), "{output:?}");
}

#[test]
fn without_an_agent_one_line_says_where_it_was_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("health.sock");
    for command in [
        "status",
        "status --probe",
        "status --probe -o jsonl",
        "node list",
        "node get hnode1",
        "node registries",
        "endpoint list",
        "probe list",
        "probe list --watch",
        "probe get web",
        "probe events",
        "service list",
        "service get web",
        "config",
    ] {
        let line = failure(program_in(dir.path(), command));
        assert!(line.contains(socket.to_str().unwrap()), "{line}");
        assert!(line.contains("--runtime-dir"), "{line}");
    }
    drop(UnixListener::bind(&socket).unwrap());
    let line = failure(program_in(dir.path(), "status"));
    assert!(line.contains("left over from a killed agent"), "{line}");
}

#[test]
fn without_pinned_maps_one_line_says_where_they_were_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    let pins = dir.path().join("health/default");
    for command in [
        "bpf map list",
        "bpf prog list",
        "bpf ct list",
        "bpf map dump X",
    ] {
        let line = failure(program_in(dir.path(), command));
        assert!(line.contains(pins.to_str().unwrap()), "{line}");
        assert!(line.contains("--bpf-root"), "{line}");
    }
}

#[test]
fn a_missing_namespace_is_named_by_its_full_path() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = program_in(dir.path(), "status --netns missing");
    command.current_dir(dir.path());
    let line = failure(command);
    let path = dir.path().join("missing");
    assert!(line.contains(path.to_str().unwrap()), "{line}");
}

#[test]
fn status_reads_as_people_know_it() {
    let agent = Agent::start(|_| {});
    let text = printed(&agent, "status");
    let (nodes, own) = text.split_once("Agent:").unwrap();
    assert_eq!(
        nodes,
        "\
Probe time:   2026-11-21T03:00:00Z
Cluster health:   2/2 reachable   (Probe interval: 10s)
Nodes:
  default/hnode1 (localhost):
    Host connectivity to 172.30.0.1:
      ICMP to stack:   OK, RTT=21.3µs
      HTTP to agent:   OK, RTT=21.3µs
    Endpoint connectivity to 10.244.1.7:
      ICMP to stack:   OK, RTT=21.3µs
      HTTP to agent:   OK, RTT=21.3µs
  default/hnode2:
    Host connectivity to 172.30.0.2:
      ICMP to stack:   OK, RTT=21.3µs
      HTTP to agent:   OK, RTT=21.3µs
    Endpoint connectivity to 10.244.2.7:
      ICMP to stack:   OK, RTT=21.3µs
      HTTP to agent:   OK, RTT=21.3µs
"
    );
    assert!(own.starts_with("   Ok, version 0.1.0, up 1m1s\nKernel:   6.12.0\nRegistries:\n"));
    assert!(own.ends_with("Programs:   1 loaded, attached to eth0\nControllers:   1, 0 failing\n"));
    let all = printed(&agent, "status --all-controllers");
    let row = all.lines().last().unwrap();
    assert!(row.starts_with("  routes   2s "), "{all}");
    assert!(row.ends_with(" no such device"), "{all}");
    assert!(printed(&agent, "status --succinct").contains("default/hnode2 "));
    let verbose = printed(&agent, "status --verbose");
    assert!(
        verbose.contains("RTT=21.3µs (kernel)   (Last probed: "),
        "{verbose}"
    );
    assert!(
        verbose.contains("RTT statistics:   unreadable"),
        "{verbose}"
    );
}

#[test]
fn a_brief_status_is_a_line_whose_exit_status_tells_wrong_from_unknown() {
    for (peer, code, line) in [
        (Some(""), 0, "Ok: 2/2 reachable\n"),
        (None, 3, "Unknown: 1 of 2 nodes not probed yet\n"),
        (Some("Connection timed out"), 1, "Failing: 1/2 reachable\n"),
    ] {
        let agent = Agent::start(|fixture| fixture.peer = peer);
        let output = program_in(agent.dir(), "status --brief").output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{peer:?}");
        assert_eq!(stdout(&output), line);
    }
    let agent = Agent::start(|fixture| fixture.state = "Failure");
    let output = program_in(agent.dir(), "status --brief").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_wait_names_what_is_missing_and_fails_after_its_limit() {
    let dir = tempfile::tempdir().unwrap();
    let output = program_in(dir.path(), "status --wait=1ms")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let told = stderr(&output);
    assert!(told.contains("error: not ready after 1ms: "), "{told}");
    let agent = Agent::start(|fixture| fixture.state = "Failure");
    let output = program_in(agent.dir(), "status --wait=0s")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_whole_report_has_the_agents_own_part() {
    let agent = Agent::start(|_| {});
    let text = printed(&agent, "status --all-addresses -o json");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["agent"]["controllers"][0]["name"], "routes");
    assert_eq!(report["agent"]["kernel"], "6.12.0");
    let listed = report["addresses"].as_array().unwrap();
    let shown = printed(&agent, "status --all-addresses");
    let line = format!("Addresses:   {}\n", listed.len());
    assert!(shown.contains(&line), "{shown}");
}

#[test]
fn status_exits_3_only_when_something_is_known_to_be_unreachable() {
    let timed_out = "Connection timed out";
    for (peer, code) in [(Some(""), 0), (None, 0), (Some(timed_out), 3)] {
        let agent = Agent::start(|fixture| {
            fixture.peer = peer;
            fixture.peer_when_probed = Some(timed_out);
        });
        for flags in [
            "",
            "--succinct",
            "--verbose",
            "--failing",
            "--node hnode2",
            "-o json",
            "-o jsonl",
            "-o yaml",
        ] {
            let output = program_in(agent.dir(), &format!("status {flags}")).output();
            assert_eq!(output.unwrap().status.code(), Some(code), "{flags}");
        }
        let output = program_in(agent.dir(), "status --probe").output().unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert!(stdout(&output).contains(&format!("ICMP to stack:   {timed_out}\n")));
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn json_is_what_the_types_say() {
    let agent = Agent::start(|_| {});
    let status: HealthStatus = serde_json::from_str(&printed(&agent, "status -o json")).unwrap();
    assert_eq!(status.nodes.len(), 2);
    let nodes: Vec<NodeEntry> =
        serde_json::from_str(&printed(&agent, "node list -o json")).unwrap();
    assert!(nodes[0].local);
    let endpoints: Vec<Endpoint> =
        serde_json::from_str(&printed(&agent, "endpoint list -o json")).unwrap();
    let endpoint: Endpoint = serde_json::from_str(&printed(&agent, "endpoint get 1017")).unwrap();
    assert_eq!(endpoints, [endpoint]);
    let config: SettingList = serde_json::from_str(&printed(&agent, "config -o json")).unwrap();
    assert_eq!(config.settings[0].text(), "eth0, eth1");

    let nodes: Vec<NodeStatus> = printed(&agent, "status -o jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(nodes, status.nodes);
    for command in [
        "node list",
        "node get hnode1",
        "node registries",
        "endpoint list",
        "endpoint get 1017",
        "config",
    ] {
        let lines = printed(&agent, &format!("{command} -o jsonl"));
        assert_eq!(lines.lines().count(), 1, "{command}: {lines}");
        let object: Value = serde_json::from_str(&lines).unwrap();
        assert!(object.is_object(), "{command}: {lines}");
    }
}

#[test]
fn yaml_says_what_json_says() {
    let agent = Agent::start(|_| {});
    for command in [
        "status",
        "node list",
        "node get hnode1",
        "node registries",
        "endpoint list",
        "endpoint get 1017",
        "config",
    ] {
        let json = printed(&agent, &format!("{command} -o json"));
        let yaml = printed(&agent, &format!("{command} -o yaml"));
        let json: Value = serde_json::from_str(&json).unwrap();
        let yaml: Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(yaml, json, "{command}");
    }
}

#[test]
fn status_shows_the_nodes_that_are_asked_for() {
    let agent = Agent::start(|fixture| fixture.peer = Some("Connection timed out"));
    let shown = |arguments: &str| {
        let output = program_in(agent.dir(), arguments).output().unwrap();
        (output.status.code(), stdout(&output).to_owned())
    };
    let (code, text) = shown("status --failing --succinct");
    assert_eq!(code, Some(3));
    assert_eq!(
        text,
        "\
Cluster health:   1/2 reachable   (2026-11-21T03:00:00Z)
  Name             IP           Node          Endpoints
  default/hnode2   172.30.0.2   unreachable   reachable
"
    );
    let (code, text) = shown("status --node hnode1 -o json");
    assert_eq!(code, Some(0), "hnode2 was not asked for");
    let report: HealthStatus = serde_json::from_str(&text).unwrap();
    assert_eq!(report.nodes[0].name, "default/hnode1");
    assert_eq!(report.nodes.len(), 1);
    let line = failure(program_in(agent.dir(), "status --node hnode3"));
    assert!(line.contains("\"hnode3\""), "{line}");
}

#[test]
fn everything_about_a_node_is_in_one_place() {
    let agent = Agent::start(|_| {});
    let text = printed(&agent, "node get hnode1");
    assert!(
        text.starts_with("Node:   default/hnode1\nRegistry:   file:/etc/health-agent/nodes.yaml\n"),
        "{text}"
    );
    assert!(text.contains("\n  default/hnode1 (localhost):\n"), "{text}");
    let details: Value =
        serde_json::from_str(&printed(&agent, "node get default/hnode1 -o json")).unwrap();
    assert_eq!(details["entry"]["addresses"][0], "172.30.0.1");
    assert_eq!(details["status"]["name"], "default/hnode1");
    let line = failure(program_in(agent.dir(), "node get west/hnode1"));
    assert!(line.contains("\"west/hnode1\""), "{line}");
}

#[test]
fn registries_show_since_when_they_are_stale() {
    let agent = Agent::start(|_| {});
    let text = printed(&agent, "node registries");
    let row = text.lines().nth(1).unwrap();
    assert!(
        row.starts_with("file:/etc/health-agent/nodes.yaml   default   stale   "),
        "{text}"
    );
    let registries: Vec<RegistryState> =
        serde_json::from_str(&printed(&agent, "node registries -o json")).unwrap();
    assert!(registries[0].stale_since.is_some());
}

#[test]
fn listings_have_headers_and_warnings_go_to_stderr() {
    let agent = Agent::start(|_| {});
    let output = program_in(agent.dir(), "node list").output().unwrap();
    assert!(stdout(&output).starts_with("NAME   "), "{output:?}");
    assert!(stderr(&output).contains("nodes.yaml:3:5: unknown field"));
    assert!(printed(&agent, "endpoint list").starts_with("ENDPOINT   "));
    let config = printed(&agent, "config");
    let rows: Vec<Vec<_>> = config
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let row = |name| rows.iter().find(|row| row.get(1) == Some(&name)).cloned();
    assert_eq!(
        row("probe-interval"),
        Some(vec![
            "mesh",
            "probe-interval",
            "10s",
            "/etc/health-agent/config.yaml:3:5"
        ])
    );
    assert_eq!(
        row("one-way"),
        Some(vec!["mesh", "one-way", "true", "HEALTH_AGENT_ONE_WAY"])
    );
}

#[test]
fn an_unknown_endpoint_is_a_failure() {
    let agent = Agent::start(|_| {});
    let line = failure(program_in(agent.dir(), "endpoint get 7"));
    assert!(line.contains("no endpoint 7"), "{line}");
}

#[test]
fn every_shell_gets_its_completion() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = program(&format!("completion {shell}")).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(stdout(&output).contains("--succinct"), "{shell}");
    }
}

#[test]
fn a_reader_may_stop_reading() {
    let agent = probes::probing();
    for mut command in [
        program_in(agent.dir(), "probe list --watch"),
        program("completion bash"),
        program("run --help"),
        program_in(agent.dir(), "status"),
        program_in(agent.dir(), "status -o json"),
        program_in(agent.dir(), "status --watch"),
        program_in(agent.dir(), "status --probe -o jsonl"),
    ] {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // stdout is closed before the program can write to it.
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(stderr(&output), "", "{command:?}");
        assert_eq!(output.status.code(), Some(0), "{command:?}");
    }
}

#[test]
fn a_full_disk_is_a_failure() {
    let mut command = program("completion bash");
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let child = command.stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: cannot write to standard output: "));
    assert_eq!(stderr(&output).lines().count(), 1);
}

#[test]
fn the_reference_and_the_example_are_those_of_this_program() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (command, file) in [
        ("config reference", "docs/settings.md"),
        ("config example", "deploy/config.yaml"),
    ] {
        let output = program(command).output().unwrap();
        let written = fs::read_to_string(root.join(file)).unwrap();
        let hint = "run `cargo xtask docs`";
        assert_eq!(stdout(&output), written, "{file} is old; {hint}");
    }
}

#[test]
fn settings_files_are_checked_without_an_agent() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    let check = || {
        let mut command = program("config check");
        command.arg(&file).output().unwrap()
    };
    fs::write(&file, "mesh:\n  probe-interval: 5s\n  one-way: true\n").unwrap();
    let output = check();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(stdout(&output).starts_with("2 of "), "{output:?}");
    fs::write(&file, "mesh:\n  probe-intervall: 5s\n").unwrap();
    let output = check();
    assert_eq!(output.status.code(), Some(2));
    let line = stderr(&output);
    assert_eq!(
        line,
        format!(
            "error: {}:2:3: unknown setting 'probe-intervall'; did you mean probe-interval?\n",
            file.display()
        )
    );
    let mut run = program("run --config");
    let output = run.arg(&file).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output)), (Some(2), line));
}

#[test]
fn a_bad_value_is_reported_in_the_same_line_wherever_it_comes_from() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    fs::write(&file, "mesh:\n  probe-interval: 50ms\n").unwrap();
    let refused = |mut command: Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        stderr(&output).to_owned()
    };
    let reason = "'50ms': must be 100ms to 1h\n";
    let flag = refused(program("run --probe-interval 50ms"));
    assert_eq!(flag, format!("error: --probe-interval {reason}"));
    let mut command = program("run");
    command.env("HEALTH_AGENT_PROBE_INTERVAL", "50ms");
    let variable = refused(command);
    assert_eq!(
        variable,
        format!("error: HEALTH_AGENT_PROBE_INTERVAL {reason}")
    );
    let mut command = program("run --config");
    command.arg(&file);
    let place = format!("{}:2:19: probe-interval", file.display());
    assert_eq!(refused(command), format!("error: {place} {reason}"));

    // Other commands have flags with the same names as settings, which clap reports.
    let other = refused(program("status --probe=x"));
    assert!(
        other.starts_with("error: unexpected value 'x' for '--probe'"),
        "{other}"
    );

    fs::write(&file, "mesh:\n  passive-relief: 2\n").unwrap();
    let mut command = program("run --passive-rtt off --config");
    command.arg(&file);
    assert_eq!(
        refused(command),
        format!(
            "error: {}:2:3: passive-relief '2': needs --passive-rtt on, which detects traffic; passive-rtt is 'false' \
             (command line)\n",
            file.display()
        )
    );
}

#[test]
fn other_files_are_checked_without_an_agent() {
    let dir = tempfile::tempdir().unwrap();
    let services = dir.path().join("services");
    fs::create_dir(&services).unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let check = || {
        program("config check --nodes nodes.yaml --policy policy.yaml --services services --pods pods.yaml")
            .current_dir(dir.path())
            .output()
            .unwrap()
    };
    write(
        "nodes.yaml",
        "nodes:\n- {name: one, addresses: [192.0.2.1]}\n",
    );
    write(
        "policy.yaml",
        "- {endpointSelector: {}, labels: [name=all], ingress: [{}]}\n",
    );
    write(
        "services/web.yaml",
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n\
         spec: {clusterIP: 10.96.0.80, ports: [{port: 80}]}\n",
    );
    write("services/.hidden.yaml", "rubbish\n");
    write(
        "pods.yaml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: app}]}\n",
    );
    let output = check();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(
        stdout(&output),
        "nodes.yaml: valid\npolicy.yaml: valid\nservices/web.yaml: valid\npods.yaml: valid\n"
    );

    write(
        "nodes.yaml",
        "nodes:\n- {name: one, addresses: [nowhere]}\n",
    );
    write(
        "policy.yaml",
        "- {endpointSelector: {}, labels: [name=all], ingres: [{}]}\n",
    );
    write(
        "services/web.yaml",
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n\
         spec: {clusterIP: 10.96.0.80, ports: [{port: 80000}]}\n",
    );
    write(
        "pods.yaml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\n\
         spec: {containers: [{name: app, livenessProbe: {periodSecond: 1}}]}\n",
    );
    let output = check();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(stdout(&output), "");
    let lines: Vec<_> = stderr(&output).lines().collect();
    for (file, word) in [
        ("nodes.yaml: ", "nowhere"),
        ("policy.yaml: ", "ingres"),
        ("services/web.yaml: ", "80000"),
        ("pods.yaml: ", "periodSecond"),
    ] {
        let named = lines.iter().filter(|line| line.starts_with(file));
        assert!(named.clone().any(|line| line.contains(word)), "{lines:?}");
    }
    let last = lines.last().unwrap();
    assert!(last.ends_with("problems found"), "{last}");

    fs::remove_file(dir.path().join("pods.yaml")).unwrap();
    assert!(stderr(&check()).contains("pods.yaml: No such file"));
}

#[test]
fn the_short_help_of_run_fits_two_screens_and_has_the_common_settings() {
    let output = program("run -h").output().unwrap();
    let lines = stdout(&output).lines().count();
    assert!(lines <= 100, "{lines} lines");
    for flag in [
        "--node-name",
        "--probe-interval",
        "--services-from-kubernetes",
        "--log-level",
    ] {
        assert!(stdout(&output).contains(flag), "{flag}");
    }
    assert!(!stdout(&output).contains("--nat-max-entries"));
    let output = program("run --help").output().unwrap();
    assert!(stdout(&output).contains("--nat-max-entries"));
}
