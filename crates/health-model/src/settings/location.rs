//! Where an agent keeps its files.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::InvalidSetting;

/// Maximum length of an instance name in bytes: it becomes part of folder and namespace names.
const MAX_INSTANCE_LEN: usize = 32;
/// Maximum path length of a unix socket in bytes (`sun_path` less the final zero).
const MAX_SOCKET_PATH_LEN: usize = 107;

/// Where one agent keeps its files. The daemon and the command line derive it from the same flags, so they find each
/// other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Location {
    /// Name that distinguishes several agents on one machine.
    pub instance: String,
    /// Folder of the socket and the pid file; does not survive a reboot.
    pub runtime_dir: PathBuf,
    /// Folder for data that must survive a reboot.
    pub state_dir: PathBuf,
    /// A mounted bpffs. Pins are under `health/<instance>` in it.
    pub bpf_root: PathBuf,
}

impl Default for Location {
    fn default() -> Self {
        Self {
            instance: Self::INSTANCE.to_owned(),
            runtime_dir: Self::RUNTIME_DIR.into(),
            state_dir: Self::STATE_DIR.into(),
            bpf_root: Self::BPF_ROOT.into(),
        }
    }
}

impl Location {
    /// The instance of the only agent on a machine.
    pub const INSTANCE: &str = "default";
    /// Its runtime folder.
    pub const RUNTIME_DIR: &str = "/run/health-agent";
    /// Its state folder.
    pub const STATE_DIR: &str = "/var/lib/health-agent";
    /// Where systemd mounts bpffs.
    pub const BPF_ROOT: &str = "/sys/fs/bpf";

    /// Checks the form of all parts, but not whether the folders exist.
    pub fn validated(self) -> Result<Self, InvalidSetting> {
        let instance_is_valid = (1..=MAX_INSTANCE_LEN).contains(&self.instance.len())
            && self
                .instance
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'));
        if !instance_is_valid {
            return Err(InvalidSetting::new(
                "--instance",
                &self.instance,
                format!(
                    "must be 1 to {MAX_INSTANCE_LEN} lower-case letters, digits and hyphens, since \
                     it becomes part of folder and namespace names"
                ),
            ));
        }
        absolute("--runtime-dir", &self.runtime_dir)?;
        absolute("--state-dir", &self.state_dir)?;
        absolute("--bpf-root", &self.bpf_root)?;
        let too_long = self
            .socket()
            .as_os_str()
            .len()
            .saturating_sub(MAX_SOCKET_PATH_LEN);
        if too_long > 0 {
            return Err(InvalidSetting::new(
                "--runtime-dir",
                self.runtime_dir.display(),
                format!("is {too_long} bytes too long for a unix socket path"),
            ));
        }
        Ok(self)
    }

    /// The API's unix socket.
    pub fn socket(&self) -> PathBuf {
        self.runtime_dir.join("health.sock")
    }

    /// The API's unix socket for requests that only read. Its path is as long as that of the other.
    pub fn read_only_socket(&self) -> PathBuf {
        self.runtime_dir.join("reader.sock")
    }

    /// The file that holds the running agent's process id, locked while it runs.
    pub fn pid_file(&self) -> PathBuf {
        self.runtime_dir.join("health-agent.pid")
    }

    /// The folder of pending deletions, which are carried out as soon as an agent runs.
    pub fn deletions(&self) -> PathBuf {
        self.runtime_dir.join("deletions")
    }

    /// The folder of the certificates and keys that annotations of container probes name.
    pub fn certificates(&self) -> PathBuf {
        self.state_dir.join("certificates")
    }

    /// The folder of this agent's pinned maps; subfolders hold links and programs.
    pub fn pins(&self) -> PathBuf {
        self.bpf_root.join("health").join(&self.instance)
    }
}

fn absolute(flag: &'static str, dir: &Path) -> Result<(), InvalidSetting> {
    if dir.is_absolute() {
        Ok(())
    } else {
        Err(InvalidSetting::new(
            flag,
            dir.display(),
            "must be an absolute path",
        ))
    }
}
