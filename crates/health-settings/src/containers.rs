//! Settings of container probes: which containers to probe, and the limits on probes.

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use health_model::settings::InvalidSetting;

use super::RegistrySpec;
use super::check::Invalid;
use super::form::Common;
use super::range::{Range, within};

/// Range of a probe rate.
fn rate() -> Range {
    within::<u32>(1, 1_000_000).of("probes per second")
}

/// Container probes.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Containers")]
pub struct ContainerSettings {
    /// Folder of manifests (*.yaml, *.yml, *.json) of the pods whose containers to probe; files are read again when
    /// they change. A pod template, such as a Deployment's, is one pod with the name of its object
    #[arg(long, value_name = "DIR")]
    pub pod_manifests: Option<PathBuf>,
    /// Probe the containers of the pods that Kubernetes has scheduled on the node --node-name, and leave their
    /// restarts to the kubelet; without a value, use the kubeconfig of --registry kubernetes, else the pod's service
    /// account, else $KUBECONFIG or ~/.kube/config
    #[arg(
        long, value_name = "KUBECONFIG", num_args = 0..=1, require_equals = true, default_missing_value = "default",
        add = Common
    )]
    pub pods_from_kubernetes: Option<ApiAccess>,
    /// Socket of the container runtime (CRI) that runs the probed pods, such as /run/containerd/containerd.sock; needs
    /// --pod-manifests or --pods-from-kubernetes
    #[arg(long, value_name = "SOCKET", value_parser = socket, add = Common)]
    pub runtime_endpoint: Option<PathBuf>,
    /// Kill containers whose liveness or startup probe fails, and restart containers that have exited; set it to false
    /// where a kubelet does this
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub container_restarts: bool,
    /// Apply --container-restarts also to pods that a kubelet runs, such as those of --pods-from-kubernetes; otherwise
    /// their restarts are left to the kubelet
    #[arg(long)]
    pub kubelet_pod_restarts: bool,
    /// Maximum number of container probes per second
    #[arg(long, value_name = "NUMBER", default_value_t = 20_000, add = rate())]
    pub container_probe_rate: u32,
    /// Maximum number of concurrent container probes; one namespace can hold at most half of them, and one pod a third
    #[arg(
        long, value_name = "NUMBER", default_value_t = 1000,
        add = within::<u32>(1, 100_000).of("probes")
    )]
    pub container_probe_concurrency: u32,
    /// Maximum number of container probes of one pod per second
    #[arg(long, value_name = "NUMBER", default_value_t = 100, add = rate())]
    pub container_probe_pod_rate: u32,
}

/// Whose credentials to use for an API server: `default`, or the path of a kubeconfig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiAccess {
    /// The registry's credentials if it is in Kubernetes, else those that this process finds.
    Default,
    /// The credentials of the kubeconfig at an absolute path.
    Kubeconfig(PathBuf),
}

impl ApiAccess {
    /// The path of the kubeconfig, if this setting or the registry names one.
    pub fn kubeconfig<'a>(&'a self, registry: &'a RegistrySpec) -> Option<&'a Path> {
        match (self, registry) {
            (Self::Kubeconfig(path), _) => Some(path),
            (Self::Default, RegistrySpec::Kubernetes(path)) => path.as_deref(),
            (Self::Default, _) => None,
        }
    }

    /// The kubeconfig with which to follow a cluster that this setting or the registry names; the inner `None` stands
    /// for the credentials that this process finds. `None` if neither names a cluster.
    pub fn of_cluster<'a>(
        setting: Option<&'a Self>,
        registry: &'a RegistrySpec,
    ) -> Option<Option<&'a Path>> {
        let is_named = setting.is_some() || matches!(registry, RegistrySpec::Kubernetes(_));
        is_named.then(|| setting.unwrap_or(&Self::Default).kubeconfig(registry))
    }
}

impl fmt::Display for ApiAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Kubeconfig(path) => path.display().fmt(f),
        }
    }
}

/// The text is not an [`ApiAccess`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected the absolute path of a kubeconfig, or default")]
pub struct ApiAccessError;

impl FromStr for ApiAccess {
    type Err = ApiAccessError;

    fn from_str(text: &str) -> Result<Self, ApiAccessError> {
        match text {
            "default" => Ok(Self::Default),
            path if Path::new(path).is_absolute() => Ok(Self::Kubeconfig(path.into())),
            _ => Err(ApiAccessError),
        }
    }
}

/// Parses the path of a socket. CRI tools write it with the prefix `unix://`.
fn socket(text: &str) -> Result<PathBuf, Infallible> {
    Ok(PathBuf::from(text.strip_prefix("unix://").unwrap_or(text)))
}

impl Default for ContainerSettings {
    fn default() -> Self {
        super::defaults()
    }
}

impl ContainerSettings {
    /// Whether any pods are probed.
    pub const fn has_pods(&self) -> bool {
        self.pod_manifests.is_some() || self.pods_from_kubernetes.is_some()
    }

    /// Checks these settings.
    pub(super) fn check(&self) -> Result<(), Invalid> {
        if let Some(socket) = &self.runtime_endpoint
            && !self.has_pods()
        {
            let why = "needs --pod-manifests or --pods-from-kubernetes";
            let invalid = InvalidSetting::new("--runtime-endpoint", socket.display(), why);
            return Err(Invalid::with(
                invalid,
                ["--pod-manifests", "--pods-from-kubernetes"],
            ));
        }
        let paths = [
            ("--pod-manifests", &self.pod_manifests),
            ("--runtime-endpoint", &self.runtime_endpoint),
        ];
        for (flag, path) in paths {
            if let Some(path) = path.as_ref().filter(|path| !path.is_absolute()) {
                let why = "must be an absolute path";
                return Err(InvalidSetting::new(flag, path.display(), why).into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_is_the_default_or_an_absolute_path() {
        for text in ["default", "/etc/kubeconfig"] {
            let access: ApiAccess = text.parse().expect(text);
            assert_eq!(access.to_string(), text);
        }
        for bad in ["", "config", "./config", "true"] {
            assert_eq!(bad.parse::<ApiAccess>(), Err(ApiAccessError), "{bad}");
        }
    }
}
