//! `health-agent probe try` runs the probes of a manifest once.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use anyhow::Context as _;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::bed::agent_binary;
use tests::process::Running;

/// A container with one probe of each type. All pass on any machine, except for the port.
fn manifest(port: u16) -> String {
    format!(
        r#"apiVersion: v1
kind: Pod
metadata: {{name: web, namespace: shop}}
spec:
  terminationGracePeriodSeconds: 7
  containers:
  - name: app
    ports: [{{name: web, containerPort: {port}}}]
    startupProbe: {{exec: {{command: [sh, -c, "exit 3"]}}, timeoutSeconds: 60, failureThreshold: 30}}
    readinessProbe: {{tcpSocket: {{port: web}}, timeoutSeconds: 60}}
    livenessProbe: {{httpGet: {{port: other}}}}
"#
    )
}

/// Runs the command with these arguments and the manifest on stdin.
fn try_probes(text: &str, words: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new(agent_binary()?);
    command.args(["probe", "try", "-"]).args(words);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("stdin")?;
    stdin.write_all(text.as_bytes())?;
    drop(stdin);
    Ok(child.wait_with_output()?)
}

#[test]
#[ignore = "needs root"]
fn each_probe_of_a_manifest_is_tried_and_its_consequence_reported() -> anyhow::Result<()> {
    let server = TcpListener::bind("127.0.0.1:0")?;
    let port = server.local_addr()?.port();
    let container = Running::start(Command::new("sleep").arg("1000000"))?;
    let pid = container.pid().to_string();
    let words = ["--address", "127.0.0.1", "--pid", &pid, "-o", "json"];
    let output = try_probes(&manifest(port), &words)?;
    let tried: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let reported = |row: &Value| {
        json!([
            row["type"],
            row["target"],
            row["result"],
            row["attempts"],
            row["counts_as"],
            row["threshold"],
            row["consequence"]
        ])
    };
    let rows: Vec<_> = tried
        .as_array()
        .context("rows")?
        .iter()
        .map(reported)
        .collect();
    assert_eq!(
        json!(rows),
        json!([
            [
                "startup",
                "exec sh -c exit 3",
                "failure",
                1,
                "failure",
                30,
                "killed with a grace period of 7s, and restarted"
            ],
            [
                "readiness",
                format!("tcp://127.0.0.1:{port}"),
                "success",
                1,
                "success",
                1,
                "ready"
            ],
            ["liveness", "http", "error", 3, null, null, "no conclusion"],
        ])
    );
    assert_eq!(tried[0]["event"]["reason"], "Unhealthy");
    assert_eq!(tried[2]["message"], "the container has no port \"other\"");
    assert_eq!(output.status.code(), Some(3));

    let output = try_probes(
        &manifest(port),
        &["--address", "127.0.0.1", "--type", "readiness"],
    )?;
    let shown = String::from_utf8(output.stdout)?;
    assert!(
        shown.contains("shop/web   app         readiness   tcp://127.0.0.1:"),
        "{shown}"
    );
    assert_eq!(output.status.code(), Some(0), "{shown}");

    drop(server);
    let words = [
        "--address",
        "127.0.0.1",
        "--type",
        "readiness",
        "-o",
        "json",
    ];
    let output = try_probes(&manifest(port), &words)?;
    let tried: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(
        json!([
            tried[0]["result"],
            tried[0]["consequence"],
            tried[0]["threshold"]
        ]),
        json!(["failure", "not ready", 3])
    );
    assert_eq!(output.status.code(), Some(3));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_tried_is_reported_by_pod_container_and_field() -> anyhow::Result<()> {
    let folder = TempDir::new()?;
    let wrong = manifest(80).replace("{port: web}", "{port: 0}");
    for (text, words, error) in [
        (
            &*wrong,
            &[][..],
            "pod shop/web, container app: spec.containers[0].readinessProbe.tcpSocket.port: Invalid value: 0",
        ),
        ("kind: Pod", &[], "apiVersion: Required value"),
        (": :", &[], "- cannot be used"),
        (&manifest(80), &["--pod", "other"], "has no pod other"),
        (
            &manifest(80),
            &["--container", "other"],
            "has no container other with probes",
        ),
        (&manifest(80), &["--pid", "4194305"], "--pid 4194305"),
    ] {
        let output = try_probes(text, words)?;
        let reported = String::from_utf8(output.stderr)?;
        assert!(reported.contains(error), "{reported}");
        assert_eq!(
            (output.status.code(), reported.lines().count()),
            (Some(1), 1),
            "{reported}"
        );
    }

    let missing = folder.path().join("none.yaml");
    let output = Command::new(agent_binary()?)
        .args(["probe", "try"])
        .arg(&missing)
        .output()?;
    let reported = String::from_utf8(output.stderr)?;
    assert!(reported.contains("none.yaml"), "{reported}");
    assert_eq!(output.status.code(), Some(1));

    // Without an address or a process, the result is unknown, which says nothing about the container's health.
    fs::write(&missing, manifest(80))?;
    let output = Command::new(agent_binary()?)
        .args(["probe", "try", "-o", "json"])
        .arg(&missing)
        .output()?;
    let tried: Value = serde_json::from_slice(&output.stdout)?;
    for row in tried.as_array().context("rows")? {
        assert_eq!(
            (&row["result"], &row["counts_as"]),
            (&json!("error"), &Value::Null)
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn templates_of_pods_are_tried_and_objects_of_other_kinds_are_named() -> anyhow::Result<()> {
    let server = TcpListener::bind("127.0.0.1:0")?;
    let port = server.local_addr()?.port();
    let text = format!(
        r#"apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web, namespace: shop}}
spec:
  template:
    metadata: {{labels: {{app: web}}}}
    spec: {{containers: [{{name: app, readinessProbe: {{tcpSocket: {{port: {port}}}, timeoutSeconds: 60}}}}]}}
---
apiVersion: v1
kind: List
items:
- apiVersion: batch/v1
  kind: CronJob
  metadata: {{name: report, namespace: shop}}
  spec:
    jobTemplate:
      spec:
        template:
          spec: {{containers: [{{name: app, livenessProbe: {{tcpSocket: {{port: {port}}}, timeoutSeconds: 60}}}}]}}
"#
    );
    let output = try_probes(&text, &["-o", "json"])?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(said, "warning: skipped Service shop/web: it has no pods\n");
    let tried: Value = serde_json::from_slice(&output.stdout)?;
    let rows = tried.as_array().context("rows")?;
    let reported: Vec<_> = rows
        .iter()
        .map(|row| json!([row["pod"], row["type"]]))
        .collect();
    assert_eq!(
        json!(reported),
        json!([["shop/web", "readiness"], ["shop/report", "liveness"]])
    );
    let words = ["--pod", "web", "--address", "127.0.0.1"];
    let output = try_probes(&text, &words)?;
    let shown = String::from_utf8(output.stdout)?;
    assert_eq!(output.status.code(), Some(0), "{shown}");
    Ok(())
}
