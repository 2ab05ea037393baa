//! Calls the CNI plugin as a container runtime does: through its symlink, with parameters in the environment.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use health_cni::LINK_NAME;
use serde_json::{Value, json};

use crate::Node;
use crate::bed::agent_binary;

/// The code of an error after which a runtime tries again (CNI specification, "Error").
pub const TRY_AGAIN_LATER: u64 = 11;

/// The code of a failed STATUS (the same): no container can be added.
pub const NOT_AVAILABLE: u64 = 50;

/// A plugin and its network configuration.
#[derive(Clone, Debug)]
pub struct Plugin {
    program: PathBuf,
    network: Value,
}

/// The result of a plugin call.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Whether the plugin exited with 0.
    pub is_success: bool,
    /// The plugin's standard output; null if empty.
    pub json: Value,
}

impl Answer {
    /// Code of the printed error, or 0 if none was printed.
    pub fn code(&self) -> u64 {
        self.json["code"].as_u64().unwrap_or_default()
    }

    /// The message of the printed error.
    pub fn message(&self) -> &str {
        self.json["msg"].as_str().unwrap_or_default()
    }
}

impl Plugin {
    /// The agent's own plugin, called through a symlink in `folder`, for a network of `node`'s agent.
    pub fn of(node: &Node, folder: &Path) -> anyhow::Result<Self> {
        let program = folder.join(LINK_NAME);
        std::os::unix::fs::symlink(agent_binary()?, &program)
            .with_context(|| format!("cannot link {}", program.display()))?;
        let network = json!({
            "cniVersion": "1.1.0",
            "name": "health",
            "type": LINK_NAME,
            "instance": node.name(),
            "runtimeDir": node.runtime_dir(),
        });
        Ok(Self { program, network })
    }

    /// Any plugin, by the path of its executable.
    pub fn at(program: &Path, network: Value) -> Self {
        Self {
            program: program.to_owned(),
            network,
        }
    }

    /// Returns a copy of the plugin with a field of the network configuration added or replaced.
    #[must_use]
    pub fn with(&self, key: &str, value: Value) -> Self {
        let mut plugin = self.clone();
        plugin.network[key] = value;
        plugin
    }

    /// Calls the plugin for a container's `eth0`.
    pub fn call(&self, command: &str, container: &str, netns: &str) -> anyhow::Result<Answer> {
        self.call_for(command, container, "eth0", netns)
    }

    /// Calls the plugin for a device of a container.
    pub fn call_for(
        &self,
        command: &str,
        container: &str,
        ifname: &str,
        netns: &str,
    ) -> anyhow::Result<Answer> {
        self.call_with(&[
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", container),
            ("CNI_NETNS", netns),
            ("CNI_IFNAME", ifname),
        ])
    }

    /// Calls the plugin with these environment variables.
    pub fn call_with(&self, environment: &[(&str, &str)]) -> anyhow::Result<Answer> {
        self.call_raw(environment, self.network.to_string().as_bytes())
    }

    /// Calls the plugin with these environment variables and this standard input.
    pub fn call_raw(&self, environment: &[(&str, &str)], config: &[u8]) -> anyhow::Result<Answer> {
        let mut child = Command::new(&self.program)
            .envs(environment.iter().copied())
            .env("CNI_PATH", self.program.parent().unwrap_or(Path::new("/")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        let mut stdin = child.stdin.take().context("the plugin has no stdin")?;
        // The plugin may have exited without reading its input.
        let _ = stdin.write_all(config);
        drop(stdin);
        let output = child
            .wait_with_output()
            .context("cannot wait for the plugin")?;
        let json = match output.stdout.as_slice() {
            [] => Value::Null,
            text => serde_json::from_slice(text).context("the plugin's answer is not JSON")?,
        };
        Ok(Answer {
            is_success: output.status.success(),
            json,
        })
    }
}
