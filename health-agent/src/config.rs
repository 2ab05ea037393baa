//! The settings of one agent, validated once and then read only.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Where one agent keeps its things. Daemon and command line build it from the same flags, so they
/// find each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Location {
    /// Name that tells several agents on one machine apart.
    pub instance: String,
    /// Folder of the socket and the pid file; gone after a reboot.
    pub runtime_dir: PathBuf,
    /// Folder of what must survive a reboot.
    pub state_dir: PathBuf,
    /// A mounted bpffs. Pins stand under `health/<instance>` in it.
    pub bpf_root: PathBuf,
}

impl Location {
    /// The API's unix socket.
    pub fn socket(&self) -> PathBuf {
        self.runtime_dir.join("health.sock")
    }

    /// The file that holds the running agent's process id, locked while it runs.
    pub fn pid_file(&self) -> PathBuf {
        self.runtime_dir.join("health-agent.pid")
    }

    /// The folder of this agent's pinned maps; links and programs in subfolders.
    pub fn pins(&self) -> PathBuf {
        self.bpf_root.join("health").join(&self.instance)
    }
}

/// All settings of `health-agent run`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Config {
    /// Where the agent keeps its things.
    #[serde(flatten)]
    pub location: Location,
    /// This node's name in the registry.
    pub node_name: String,
    /// Name of this node's cluster.
    pub cluster_name: String,
    /// The node registry's file.
    pub nodes_file: PathBuf,
    /// Uplinks, by interface name. Empty: those that carry the node's addresses.
    pub devices: Vec<String>,
    /// TCP port of the `/hello` responders, on this node and on all peers.
    pub health_port: u16,
    /// Time between two probes of one address and protocol.
    #[serde(with = "duration_ns")]
    pub probe_interval: Duration,
    /// How long a probe waits for its answer.
    #[serde(with = "duration_ns")]
    pub probe_timeout: Duration,
}

mod duration_ns {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(value.as_nanos().try_into().unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_nanos)
    }
}
