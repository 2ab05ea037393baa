//! The containers of `cargo xtask run --probes`. Each shows a different life cycle.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use tempfile::TempDir;

use crate::Node;
use crate::containerd::Containerd;

/// A container and its probes.
struct Life {
    name: &'static str,
    script: &'static str,
    probes: &'static str,
}

const LIVES: [Life; 4] = [
    Life {
        name: "web",
        script: "touch /tmp/index.html; exec httpd -f -p 8081 -h /tmp",
        probes: "    ports: [{name: http, containerPort: 8081}]
    readinessProbe: {httpGet: {port: http}, periodSeconds: 1}
    livenessProbe: {tcpSocket: {port: http}, periodSeconds: 1}
",
    },
    Life {
        name: "slow",
        script: "sleep 8; touch /tmp/started; sleep 1000000",
        probes: "    startupProbe: {exec: {command: [test, -e, /tmp/started]}, periodSeconds: 1, failureThreshold: 30}
    readinessProbe: {exec: {command: [test, -e, /tmp/started]}, periodSeconds: 2}
",
    },
    Life {
        name: "hangs",
        script: "touch /tmp/index.html; httpd -f -p 8082 -h /tmp & sleep 10; kill -STOP $!; sleep 1000000",
        probes: "    livenessProbe: {httpGet: {port: 8082}, periodSeconds: 1, terminationGracePeriodSeconds: 1}
",
    },
    Life {
        name: "flaps",
        script: "while :; do touch /tmp/ready; sleep 5; rm /tmp/ready; sleep 5; done",
        probes: "    readinessProbe: {exec: {command: [test, -e, /tmp/ready]}, periodSeconds: 1, failureThreshold: 2}
",
    },
];

/// The folder for the manifests and containerd's socket.
#[derive(Debug)]
pub struct ProbedContainers {
    dir: TempDir,
}

impl ProbedContainers {
    /// Number of containers.
    pub const COUNT: usize = LIVES.len();

    /// Creates the folder.
    pub fn new() -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("hprobes-").tempdir();
        let dir = dir.context("cannot create a folder for manifests")?;
        fs::create_dir(dir.path().join("pods")).context("cannot create a folder for manifests")?;
        Ok(Self { dir })
    }

    /// The folder of the manifests.
    pub fn manifests(&self) -> PathBuf {
        self.dir.path().join("pods")
    }

    /// Flags for the agent that probes the containers.
    pub fn agent_args(&self) -> String {
        format!(
            "--pod-manifests {} --runtime-endpoint {}",
            self.manifests().display(),
            self.dir.path().join("containerd.sock").display()
        )
    }

    /// Runs the containers on a node, where the agent probes them.
    pub fn start(&self, node: &Node) -> anyhow::Result<Containerd> {
        let socket = self.dir.path().join("containerd.sock");
        let mut containerd = Containerd::start_on(node, Some(socket))?;
        for Life {
            name,
            script,
            probes,
        } in LIVES
        {
            containerd.run(name, &["/bin/sh", "-c", script], None, &[])?;
            let manifest = format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, uid: uid-{name}}}\n\
                 spec:\n  terminationGracePeriodSeconds: 1\n  containers:\n  - name: {name}\n{probes}"
            );
            let path = self.manifests().join(format!("{name}.yaml"));
            fs::write(&path, manifest)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(containerd)
    }
}
