//! The sources of nodes.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A node registry: `file:PATH`, `etcd:URL[,URL...]`, `etcd:PATH` of a configuration file, `kubernetes`, or
/// `kubernetes:PATH` of a kubeconfig. Paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum RegistrySpec {
    /// A YAML file.
    File(PathBuf),
    /// An etcd cluster, by the URLs of its members.
    Etcd(Vec<String>),
    /// An etcd cluster, by a file with URLs, certificates and credentials.
    EtcdConfig(PathBuf),
    /// A Kubernetes cluster. Without a kubeconfig: the cluster of the pod that this process runs in, or the one that
    /// the environment names.
    Kubernetes(Option<PathBuf>),
}

impl RegistrySpec {
    /// Whether nodes register themselves in it, as in etcd.
    pub const fn is_written_by_nodes(&self) -> bool {
        matches!(self, Self::Etcd(_) | Self::EtcdConfig(_))
    }
}

impl fmt::Display for RegistrySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Etcd(urls) => write!(f, "etcd:{}", urls.join(",")),
            Self::EtcdConfig(path) => write!(f, "etcd:{}", path.display()),
            Self::Kubernetes(None) => f.write_str("kubernetes"),
            Self::Kubernetes(Some(path)) => write!(f, "kubernetes:{}", path.display()),
        }
    }
}

/// The text is not a [`RegistrySpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a registry; write it like file:/etc/nodes.yaml, etcd:http://192.0.2.1:2379, etcd:/etc/etcd.yaml, \
     kubernetes or kubernetes:/etc/kubeconfig; credentials for etcd belong in /etc/etcd.yaml"
)]
pub struct RegistrySpecError;

impl FromStr for RegistrySpec {
    type Err = RegistrySpecError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, place) = match text.split_once(':') {
            Some((kind, place)) => (kind, Some(place)),
            None => (text, None),
        };
        let absolute = |place: &str| Path::new(place).is_absolute().then(|| PathBuf::from(place));
        match (kind, place) {
            ("file", Some(path)) => absolute(path).map(Self::File),
            ("etcd", Some(place)) => absolute(place).map_or_else(
                || urls(place).map(Self::Etcd),
                |path| Some(Self::EtcdConfig(path)),
            ),
            ("kubernetes", None) => Some(Self::Kubernetes(None)),
            ("kubernetes", Some(path)) => absolute(path).map(|path| Self::Kubernetes(Some(path))),
            _ => None,
        }
        .ok_or(RegistrySpecError)
    }
}

fn urls(list: &str) -> Option<Vec<String>> {
    let url = |url: &str| {
        let host = url
            .strip_prefix("http://")
            .or_else(|| url.strip_prefix("https://"))?;
        // Credentials belong in a configuration file, because these URLs are logged and shown.
        let is_host =
            !host.is_empty() && !host.contains('@') && !host.contains(char::is_whitespace);
        is_host.then(|| url.to_owned())
    };
    list.split(',').map(url).collect()
}

impl From<RegistrySpec> for String {
    fn from(registry: RegistrySpec) -> Self {
        registry.to_string()
    }
}

impl TryFrom<String> for RegistrySpec {
    type Error = RegistrySpecError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// Another cluster whose nodes are probed too: `NAME=REGISTRY`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteCluster {
    /// Its name.
    pub name: String,
    /// Where its nodes are registered.
    pub registry: RegistrySpec,
}

impl fmt::Display for RemoteCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.registry)
    }
}

/// The text is not a [`RemoteCluster`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteClusterError {
    /// The name is missing.
    #[error("write it like NAME=etcd:http://192.0.2.1:2379")]
    NoName,
    /// The part after the name is invalid.
    #[error(transparent)]
    Registry(#[from] RegistrySpecError),
}

impl FromStr for RemoteCluster {
    type Err = RemoteClusterError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, registry) = text.split_once('=').ok_or(RemoteClusterError::NoName)?;
        Ok(Self {
            name: name.to_owned(),
            registry: registry.parse()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_are_read_as_they_are_shown() {
        for text in [
            "file:/etc/nodes.yaml",
            "etcd:http://192.0.2.1:2379",
            "etcd:https://a:2379,https://b:2379",
            "etcd:/etc/etcd.yaml",
            "kubernetes",
            "kubernetes:/etc/kubeconfig",
        ] {
            let spec: RegistrySpec = text.parse().expect(text);
            assert_eq!(spec.to_string(), text);
            let remote: RemoteCluster = format!("west={text}").parse().expect(text);
            assert_eq!(remote.to_string(), format!("west={text}"));
        }
        for bad in [
            "",
            "file",
            "file:",
            "file:nodes.yaml",
            "etcd",
            "etcd:",
            "etcd:192.0.2.1:2379",
            "etcd:http://a:2379,",
            "etcd:http://",
            "etcd:http://root:secret@a:2379",
            "kubernetes:",
            "kubernetes:config",
            "consul:http://a",
        ] {
            assert_eq!(bad.parse::<RegistrySpec>(), Err(RegistrySpecError), "{bad}");
        }
        assert_eq!(
            "etcd:http://a".parse::<RemoteCluster>(),
            Err(RemoteClusterError::NoName)
        );
    }
}
