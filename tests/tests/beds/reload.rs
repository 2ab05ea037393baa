//! Settings that change while the agent runs.

use std::fs;

use anyhow::Context as _;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::{Bed, Node, PATIENCE, wait_for};

/// A setting in force, and where it comes from.
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
    let place = |line: u64| json!({ "file": { "path": file, "line": line } });
    fs::write(
        &file,
        "conntrack:\n  conntrack-timeout-udp: 30s\nlog: {log-level: warn}\n",
    )?;
    node.start_agent_with(&format!("--config {}", file.display()))?;
    assert_eq!(
        setting(node, "conntrack-timeout-udp")?,
        (json!("30s"), place(2))
    );
    assert_eq!(setting(node, "health-port")?.1, json!("default"));
    let in_programs = || node.cli("bpf map dump HEALTH_CONFIG")?.success();
    assert!(node.logged(&["INFO"])?.is_empty(), "only warnings");
    let before = wait_for("the programs to be loaded", PATIENCE, || {
        Ok(in_programs().ok())
    })?;

    fs::write(
        &file,
        "log: {log-level: info}\nmesh: {health-port: 4241, probe-interval: 1s}\nconntrack:\n  conntrack-timeout-udp: 45s\n",
    )?;
    node.signal_agent(Signal::SIGHUP)?;
    is_logged(
        node,
        &["setting changed", "conntrack-timeout-udp", "30s", "45s"],
    )?;
    is_logged(node, &["setting changed", "log-level"])?;
    is_logged(node, &["restart the agent to apply it", "health-port"])?;
    is_logged(node, &["settings reloaded"])?;
    assert_eq!(
        setting(node, "conntrack-timeout-udp")?,
        (json!("45s"), place(4))
    );
    assert_eq!(
        setting(node, "health-port")?,
        (json!(4240), json!("default"))
    );
    assert_ne!(in_programs()?, before);
    let status = || Ok(node.cli("status --succinct")?.stdout);
    wait_for("status to tell that a restart is due", PATIENCE, || {
        let status: anyhow::Result<String> = status();
        let is_told = status?.contains("settings: restart the agent to apply health-port");
        Ok(is_told.then_some(()))
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
        (json!("45s"), place(4))
    );

    fs::write(&file, "conntrack: {conntrack-timeout-udp: 30s}\n")?;
    node.signal_agent(Signal::SIGHUP)?;
    wait_for("the first setting to be in force again", PATIENCE, || {
        Ok((setting(node, "conntrack-timeout-udp")? == (json!("30s"), place(1))).then_some(()))
    })?;
    wait_for("no restart to be due", PATIENCE, || {
        let status: anyhow::Result<String> = status();
        Ok((!status?.contains("restart the agent")).then_some(()))
    })?;
    node.check_agent()
}
