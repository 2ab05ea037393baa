//! Settings of the sources of services outside this node: Kubernetes and etcd.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use health_model::settings::InvalidSetting;

use super::check::Invalid;
use super::form::Common;
use super::{ApiAccess, RegistrySpec, Settings};

/// Maximum length of a label value in bytes.
const MAX_LABEL_LEN: usize = 63;

/// Sources of services outside this node.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Services")]
pub struct ServiceSources {
    /// Serve Kubernetes services of all namespaces; without a value, use the kubeconfig of --registry kubernetes,
    /// else the pod's service account, else $KUBECONFIG or ~/.kube/config
    #[arg(
        long, value_name = "KUBECONFIG", num_args = 0..=1, require_equals = true, default_missing_value = "default",
        add = Common
    )]
    pub services_from_kubernetes: Option<ApiAccess>,
    /// Serve the services whose manifests are in etcd, in the keys of --cluster-name: URL[,URL...] of its members, or
    /// the path of a file with certificates and credentials; without a value, use the etcd of --registry
    #[arg(long, value_name = "CLUSTER", num_args = 0..=1, require_equals = true, default_missing_value = "default")]
    pub services_from_etcd: Option<EtcdAccess>,
    /// Serve only services and endpoint slices whose label service.kubernetes.io/service-proxy-name is NAME [default:
    /// those without that label]
    #[arg(long, value_name = "NAME")]
    pub service_proxy_name: Option<String>,
}

/// Which etcd to use: `default`, the URLs of its members, or the path of a file with certificates and credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdAccess {
    /// The registry's etcd.
    Default,
    /// This cluster: [`RegistrySpec::Etcd`] or [`RegistrySpec::EtcdConfig`].
    Cluster(RegistrySpec),
}

impl EtcdAccess {
    /// The cluster; `None` if it is the registry's and the registry is not in etcd.
    pub fn cluster<'a>(&'a self, registry: &'a RegistrySpec) -> Option<&'a RegistrySpec> {
        let cluster = match self {
            Self::Default => registry,
            Self::Cluster(cluster) => cluster,
        };
        Some(cluster).filter(|cluster| cluster.is_written_by_nodes())
    }
}

impl fmt::Display for EtcdAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Cluster(cluster) => {
                let text = cluster.to_string();
                f.write_str(text.strip_prefix("etcd:").unwrap_or(&text))
            }
        }
    }
}

/// The text is not an [`EtcdAccess`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not an etcd cluster; give URLs such as http://192.0.2.1:2379, the absolute path of a configuration, or \
     default"
)]
pub struct EtcdAccessError;

impl FromStr for EtcdAccess {
    type Err = EtcdAccessError;

    fn from_str(text: &str) -> Result<Self, EtcdAccessError> {
        match text {
            "default" => Ok(Self::Default),
            place => match format!("etcd:{place}").parse() {
                Ok(cluster) => Ok(Self::Cluster(cluster)),
                Err(_) => Err(EtcdAccessError),
            },
        }
    }
}

impl ServiceSources {
    /// Whether any source is set.
    pub const fn has_any(&self) -> bool {
        self.services_from_kubernetes.is_some() || self.services_from_etcd.is_some()
    }

    /// Checks these settings.
    pub(super) fn check(&self, settings: &Settings) -> Result<(), Invalid> {
        if let Some(access) = &self.services_from_etcd
            && access.cluster(&settings.node.registry).is_none()
        {
            let why = "--registry names no etcd; give URLs such as http://192.0.2.1:2379, or the absolute path of a \
                       configuration";
            let invalid = InvalidSetting::new("--services-from-etcd", access, why);
            return Err(Invalid::with(invalid, ["--registry"]));
        }
        if let Some(name) = &self.service_proxy_name {
            let is_inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
            let ends = name.bytes().next().zip(name.bytes().last());
            let is_bounded =
                ends.is_some_and(|(a, b)| a.is_ascii_alphanumeric() && b.is_ascii_alphanumeric());
            if name.len() > MAX_LABEL_LEN || !is_bounded || !name.bytes().all(is_inner) {
                return Err(InvalidSetting::new(
                    "--service-proxy-name",
                    name.escape_default(),
                    format!(
                        "must be 1 to {MAX_LABEL_LEN} letters, digits, '-', '_' and '.', with a letter or digit at \
                         both ends"
                    ),
                )
                .into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_etcd_is_the_default_urls_or_an_absolute_path() {
        for text in [
            "default",
            "http://192.0.2.1:2379,https://192.0.2.2:2379",
            "/etc/health-agent/etcd.yaml",
        ] {
            let access: EtcdAccess = text.parse().expect(text);
            assert_eq!(access.to_string(), text);
        }
        for bad in ["", "etcd.yaml", "192.0.2.1:2379", "etcd:http://a", "true"] {
            assert_eq!(bad.parse::<EtcdAccess>(), Err(EtcdAccessError), "{bad}");
        }
    }

    #[test]
    fn the_default_is_the_etcd_of_the_registry_alone() {
        let etcd: RegistrySpec = "etcd:http://a:2379".parse().expect("a registry");
        let other: RegistrySpec = "kubernetes".parse().expect("a registry");
        assert_eq!(EtcdAccess::Default.cluster(&etcd), Some(&etcd));
        assert_eq!(EtcdAccess::Default.cluster(&other), None);
        let own = EtcdAccess::Cluster(etcd.clone());
        assert_eq!(own.cluster(&other), Some(&etcd));
    }
}
