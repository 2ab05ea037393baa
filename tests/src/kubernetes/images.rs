//! The images of a cluster's pods.

use std::path::{Path, PathBuf};

use crate::bed::agent_binary;
use crate::image::Image;

/// Programs of the workload's image.
const APPLETS: [&str; 16] = [
    "sh", "sleep", "cat", "echo", "httpd", "kill", "ls", "mkdir", "nc", "ping", "rm", "test",
    "touch", "true", "false", "hostname",
];

/// The archives of all images.
#[derive(Debug)]
pub(super) struct Images {
    archives: [PathBuf; 2],
}

impl Images {
    /// The image of workloads, and of the pods' sandboxes.
    pub(super) const WORKLOAD: &str = "health.test/busybox:1";
    /// The agent's image, as containerd calls the `health-agent:0.1.0` of `deploy/kubernetes`.
    const AGENT: &str = "docker.io/library/health-agent:0.1.0";

    /// Makes the images, with the agent that this build has, in `folder`.
    pub(super) fn make(folder: &Path) -> anyhow::Result<Self> {
        let workload = Image::new(&folder.join("workload"))?;
        workload.busybox(APPLETS)?;
        std::fs::create_dir(workload.rootfs().join("www"))?;
        let agent = Image::new(&folder.join("agent"))?;
        agent.program(&agent_binary()?, "health-agent")?;
        // Kubelets mount the token at /var/run/secrets.
        std::fs::create_dir(agent.rootfs().join("var"))?;
        std::os::unix::fs::symlink("../run", agent.rootfs().join("var/run"))?;
        Ok(Self {
            archives: [
                workload.archive(Self::WORKLOAD, &["/bin/sleep", "1000000"])?,
                agent.archive(Self::AGENT, &["/bin/health-agent"])?,
            ],
        })
    }

    pub(super) fn archives(&self) -> &[PathBuf] {
        &self.archives
    }
}
