//! Runs real containers: podman with runc, and the agent as the CNI plugin.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use anyhow::Context as _;
use health_cni::LINK_NAME;
use tempfile::TempDir;

use crate::Node;
use crate::bed::agent_binary;
use crate::image::Image;
use crate::process::{RunOutput, run};

/// Name of the network in podman.
const NETWORK: &str = "health";
/// Programs available in the containers.
const APPLETS: [&str; 5] = ["sh", "sleep", "ip", "ping", "nc"];

/// A private podman instance. Its images, containers and networks are in a folder that is deleted on drop.
#[derive(Debug)]
pub struct Podman {
    dir: TempDir,
}

impl Podman {
    /// A podman whose containers become endpoints of this node.
    pub fn of(node: &Node) -> anyhow::Result<Self> {
        let podman = Self {
            dir: tempfile::tempdir().context("cannot create a folder for podman")?,
        };
        podman
            .write(node)
            .context("cannot write podman's configuration")?;
        Ok(podman)
    }

    fn write(&self, node: &Node) -> anyhow::Result<()> {
        let path = |name: &str| self.dir.path().join(name);
        Image::new(&path("rootfs"))?.busybox(APPLETS)?;
        fs::create_dir(path("plugins"))?;
        symlink(agent_binary()?, path("plugins").join(LINK_NAME))?;
        fs::create_dir(path("networks"))?;
        fs::write(path("networks/health.conflist"), network(node))?;
        let configuration = format!(
            "[network]\n\
             network_backend = \"cni\"\n\
             cni_plugin_dirs = [\"{}\"]\n\
             network_config_dir = \"{}\"\n\
             [engine]\n\
             runtime = \"runc\"\n\
             cgroup_manager = \"cgroupfs\"\n\
             events_logger = \"none\"\n",
            path("plugins").display(),
            path("networks").display(),
        );
        fs::write(path("containers.conf"), configuration)?;
        Ok(())
    }

    /// Builds a podman command.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let path = |name: &str| self.dir.path().join(name);
        let mut command = Command::new("podman");
        command
            .env("CONTAINERS_CONF", path("containers.conf"))
            .args([
                "--storage-driver=vfs",
                "--runtime=runc",
                "--cgroup-manager=cgroupfs",
            ])
            .arg("--root")
            .arg(path("root"))
            .arg("--runroot")
            .arg(path("runroot"))
            .arg("--tmpdir")
            .arg(path("tmp"))
            .args(arguments);
        command
    }

    /// Starts a container that sleeps until it is stopped.
    pub fn start(&self, name: &str) -> anyhow::Result<()> {
        let rootfs = self.dir.path().join("rootfs");
        let mut command = self.command(&["run", "--detach", "--quiet", "--network", NETWORK]);
        command
            // Limits that CI machines allow.
            .args(["--ulimit=nofile=1000:1000", "--ulimit=nproc=1000:1000"])
            .args(["--name", name, "--rootfs"])
            .arg(rootfs)
            .args(["/bin/sleep", "3600"]);
        run(&mut command)?.success().map(drop)
    }

    /// Runs a command in a container.
    pub fn exec(&self, name: &str, words: &[&str]) -> anyhow::Result<RunOutput> {
        run(self.command(&["exec", name]).args(words))
    }

    /// Stops and removes containers, several in parallel.
    pub fn remove(&self, names: &[impl AsRef<OsStr>]) -> anyhow::Result<()> {
        run(self.command(&["rm", "--force", "--time=0"]).args(names))?
            .success()
            .map(drop)
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        // A failed test may have left containers; if one cannot be removed, the next snapshot of the machine shows it.
        let _ = run(&mut self.command(&["rm", "--force", "--all", "--time=0"]));
    }
}

/// The network configuration.
fn network(node: &Node) -> String {
    let plugin = serde_json::json!({
        "type": LINK_NAME,
        "instance": node.name(),
        "runtimeDir": node.runtime_dir(),
        "labels": { "container:app": "test" },
    });
    let list = serde_json::json!({
        "cniVersion": "1.0.0",
        "name": NETWORK,
        "plugins": [plugin],
    });
    list.to_string()
}
