//! Which containers are probed, and how much.

use std::convert::Infallible;
use std::path::PathBuf;

use clap::Args;
use health_model::settings::InvalidSetting;
use serde::{Deserialize, Serialize};

/// Most probes a second, and at a time, that can be asked for.
const MAX_RATE: u32 = 1_000_000;
const MAX_CONCURRENT: u32 = 100_000;

/// Container probes.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ContainerProbing {
    /// Probe the containers of the pods whose manifests are in this folder, *.yaml, *.yml and *.json; read again when
    /// they change
    #[arg(long, value_name = "DIR")]
    pub pod_manifests: Option<PathBuf>,
    /// Socket of the container runtime (CRI) that runs these pods, such as /run/containerd/containerd.sock; needs
    /// --pod-manifests
    #[arg(long, value_name = "SOCKET", requires = "pod_manifests", value_parser = socket)]
    pub runtime_endpoint: Option<PathBuf>,
    /// End containers whose liveness or startup probe fails, and start containers again that have ended; off where a
    /// kubelet does it
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub container_restarts: bool,
    /// Maximum number of container probes per second
    #[arg(long, value_name = "NUMBER", default_value_t = 20_000)]
    pub container_probe_rate: u32,
    /// Maximum number of container probes at a time
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    pub container_probe_concurrency: u32,
}

/// The path, which tools of the CRI write with `unix://` in front.
fn socket(text: &str) -> Result<PathBuf, Infallible> {
    Ok(PathBuf::from(text.strip_prefix("unix://").unwrap_or(text)))
}

impl Default for ContainerProbing {
    fn default() -> Self {
        Self {
            pod_manifests: None,
            runtime_endpoint: None,
            container_restarts: true,
            container_probe_rate: 20_000,
            container_probe_concurrency: 1000,
        }
    }
}

impl ContainerProbing {
    /// Whether these can be used.
    pub(super) fn check(&self) -> Result<(), InvalidSetting> {
        let paths = [
            ("--pod-manifests", &self.pod_manifests),
            ("--runtime-endpoint", &self.runtime_endpoint),
        ];
        for (flag, path) in paths {
            if let Some(path) = path.as_ref().filter(|path| !path.is_absolute()) {
                let why = "must be an absolute path";
                return Err(InvalidSetting::new(flag, path.display(), why));
            }
        }
        let numbers = [
            (
                "--container-probe-rate",
                self.container_probe_rate,
                MAX_RATE,
            ),
            (
                "--container-probe-concurrency",
                self.container_probe_concurrency,
                MAX_CONCURRENT,
            ),
        ];
        for (flag, number, most) in numbers {
            if !(1..=most).contains(&number) {
                let why = format!("must be 1 to {most}");
                return Err(InvalidSetting::new(flag, number, why));
            }
        }
        Ok(())
    }
}
