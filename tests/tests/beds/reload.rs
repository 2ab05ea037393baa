//! Settings that change while an agent runs.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use anyhow::Context as _;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::{Bed, Node, PATIENCE, wait_for};

use super::metrics::scrape;

/// The value and the origin of a setting in force.
fn setting(node: &Node, name: &str) -> anyhow::Result<(Value, Value)> {
    let list = node.listing("config")?;
    let mut settings = list["settings"].as_array().context("no settings")?.iter();
    let found = settings.find(|setting| setting["name"] == name);
    let found = found.with_context(|| format!("no setting {name}"))?;
    Ok((found["value"].clone(), found["origin"].clone()))
}

fn is_logged(node: &Node, words: &[&str]) -> anyhow::Result<()> {
    wait_for(&format!("{words:?} in the log"), PATIENCE, || {
        Ok((!node.logged(words)?.is_empty()).then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn a_running_agent_takes_new_settings_at_sighup_and_names_those_that_need_a_restart()
-> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("config.yaml");
    let place = |line: u64, column: u64| json!({ "file": { "path": file, "line": line, "column": column } });
    fs::write(
        &file,
        "conntrack:\n  conntrack-timeout-udp: 30s\nlog: {log-level: warn}\n",
    )?;
    node.start_agent_with(&format!("--config {} --probe-rate 50", file.display()))?;
    assert_eq!(
        setting(node, "conntrack-timeout-udp")?,
        (json!("30s"), place(2, 3))
    );
    assert_eq!(setting(node, "health-port")?.1, json!("default"));
    let in_programs = || node.cli("bpf map dump HEALTH_CONFIG")?.success();
    assert!(node.logged(&["INFO"])?.is_empty(), "only warnings");
    let before = wait_for("the programs to be loaded", PATIENCE, || {
        Ok(in_programs().ok())
    })?;

    fs::write(
        &file,
        "log: {log-level: info}\nmesh: {health-port: 4241, probe-interval: 1s, probe-rate: 60}\nconntrack:\n  conntrack-timeout-udp: 45s\n",
    )?;
    node.signal_agent(Signal::SIGHUP)?;
    is_logged(
        node,
        &["setting changed", "conntrack-timeout-udp", "30s", "45s"],
    )?;
    is_logged(node, &["setting changed", "log-level"])?;
    is_logged(node, &["restart the agent to apply it", "health-port"])?;
    is_logged(node, &["settings reloaded"])?;
    let overridden = "probe-rate\" value=\"60\"";
    is_logged(node, &["overridden by --probe-rate", overridden])?;
    assert_eq!(setting(node, "probe-rate")?.0, json!(50));
    assert_eq!(
        setting(node, "conntrack-timeout-udp")?,
        (json!("45s"), place(4, 3))
    );
    assert_eq!(
        setting(node, "health-port")?,
        (json!(4240), json!("default"))
    );
    assert_ne!(in_programs()?, before);
    let status = || Ok(node.cli("status --succinct")?.stdout);
    wait_for("status to report that a restart is due", PATIENCE, || {
        let status: anyhow::Result<String> = status();
        let is_reported = status?.contains("settings: restart the agent to apply health-port");
        Ok(is_reported.then_some(()))
    })?;

    fs::write(
        &file,
        "conntrack:\n  conntrack-timeout-udp: 5s\n  no-such-setting: 1\n",
    )?;
    node.signal_agent(Signal::SIGHUP)?;
    is_logged(
        node,
        &[
            "cannot reload settings",
            "config.yaml:3:3",
            "no-such-setting",
        ],
    )?;
    assert_eq!(
        setting(node, "conntrack-timeout-udp")?,
        (json!("45s"), place(4, 3))
    );

    fs::write(&file, "conntrack: {conntrack-timeout-udp: 30s}\n")?;
    node.signal_agent(Signal::SIGHUP)?;
    wait_for("the first setting to be in force again", PATIENCE, || {
        Ok((setting(node, "conntrack-timeout-udp")? == (json!("30s"), place(1, 13))).then_some(()))
    })?;
    wait_for("no restart to be due", PATIENCE, || {
        let status: anyhow::Result<String> = status();
        Ok((!status?.contains("restart the agent")).then_some(()))
    })?;
    let samples = scrape(node)?;
    for (result, count) in [("success", 2.0), ("failure", 1.0)] {
        let series = format!("health_agent_settings_reloads_total{{result=\"{result}\"}}");
        assert_eq!(samples.get(&series), Some(&count), "{series}");
    }
    node.check_agent()
}

/// Times at which probe results last changed between success and failure.
fn last_changes(node: &Node) -> anyhow::Result<Vec<String>> {
    let status = node.cli("status -o json")?.success()?;
    let mut found = Vec::new();
    collect_changes(&serde_json::from_str(&status)?, &mut found);
    anyhow::ensure!(!found.is_empty(), "no results in {status}");
    Ok(found)
}

fn collect_changes(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Array(values) => values
            .iter()
            .for_each(|value| collect_changes(value, found)),
        Value::Object(values) => {
            let change = values.get("lastChange").and_then(Value::as_str);
            found.extend(change.map(str::to_owned));
            values
                .values()
                .for_each(|value| collect_changes(value, found));
        }
        _ => {}
    }
}

/// Whether policy allows a packet to which no rule applies.
fn passes_without_rules(node: &Node) -> anyhow::Result<bool> {
    let trace = node.cli("policy trace --src app=a --dst app=b --dport 80/TCP")?;
    Ok(!trace.stdout.contains("Final verdict: dropped"))
}

#[test]
#[ignore = "needs root"]
fn a_changed_file_is_read_without_a_signal_and_no_probe_or_connection_is_lost() -> anyhow::Result<()>
{
    let bed = Bed::builder().nodes(2).probing(2000, 2000).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("config.yaml");
    let drop_ins = folder.path().join("config.d");
    fs::create_dir(&drop_ins)?;
    fs::write(&file, "policy: {policy-mode: default}\n")?;
    node.kill_agent(Signal::SIGTERM)?;
    node.start_agent_with(&format!("--config {}", file.display()))?;
    bed.wait_all_reachable(PATIENCE)?;
    assert!(passes_without_rules(node)?);
    let address = node.addresses()[0];
    let listener = node.run_in(|| TcpListener::bind((address, 0)))??;
    let server = listener.local_addr()?;
    let mut client = bed.node(2).run_in(|| TcpStream::connect(server))??;
    let (mut accepted, _) = listener.accept()?;
    let last_changes = last_changes(node)?;

    let takes = |name: &str, value: &Value| {
        wait_for(&format!("{name} to be {value}"), PATIENCE, || {
            Ok((setting(node, name)?.0 == *value).then_some(()))
        })
    };
    fs::write(&file, "policy: {policy-mode: always}\n")?;
    takes("policy-mode", &json!("always"))?;
    assert!(!passes_without_rules(node)?);
    // A file in the folder takes precedence over the main file, which applies again once that file is removed.
    let drop_in = drop_ins.join("10-policy.yaml");
    fs::write(&drop_in, "policy: {policy-mode: never}\n")?;
    takes("policy-mode", &json!("never"))?;
    fs::remove_file(&drop_in)?;
    takes("policy-mode", &json!("always"))?;
    // The file is replaced with a rename, as editors and configuration management do.
    let next = folder.path().join("next");
    fs::write(
        &next,
        "mesh: {path-mtu-interval: 2s, probe-rate: 500}\napi: {metrics-per-target: true}\n",
    )?;
    fs::rename(&next, &file)?;
    takes("metrics-per-target", &json!(true))?;
    takes("path-mtu-interval", &json!("2s"))?;
    takes("policy-mode", &json!("default"))?;
    assert!(passes_without_rules(node)?);

    fs::write(&file, "mesh: {probe-rate: 0}\n")?;
    let status = |words: &str| {
        wait_for(&format!("status to say {words:?}"), PATIENCE, || {
            let status = node.cli("status --succinct")?.stdout;
            Ok(status.contains(words).then_some(()))
        })
    };
    status("settings: cannot reload: ")?;
    assert_eq!(setting(node, "probe-rate")?.0, json!(500));
    // A full disk can leave an empty file behind.
    fs::write(&file, "")?;
    status("config.yaml is empty")?;
    assert_eq!(setting(node, "probe-rate")?.0, json!(500));
    fs::write(&file, "mesh: {one-way: true, probe-rate: 400}\n")?;
    takes("probe-rate", &json!(400))?;
    status("restart the agent to apply one-way")?;
    // The agent reads even a file that keeps changing.
    let mut rate = 400;
    wait_for("a file that keeps changing to be read", PATIENCE, || {
        rate += 1;
        fs::write(&file, format!("mesh: {{probe-rate: {rate}}}\n"))?;
        let in_force = setting(node, "probe-rate")?.0;
        Ok((in_force != 400 && in_force != rate).then_some(()))
    })?;
    fs::write(&file, "mesh: {probe-rate: 700}\n")?;
    takes("probe-rate", &json!(700))?;
    wait_for("no problem with the settings", PATIENCE, || {
        let status = node.cli("status --succinct")?.stdout;
        Ok((!status.contains("settings:")).then_some(()))
    })?;
    client.write_all(b"still open")?;
    let mut read = [0; 10];
    accepted.read_exact(&mut read)?;
    assert_eq!(&read, b"still open");
    // A lost probe would have changed these times.
    assert_eq!(self::last_changes(node)?, last_changes);
    node.check_agent()
}
