//! Which objects are ours.

use std::collections::BTreeMap;

/// The label of objects that a proxy of this name serves, and no other.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The label of objects that no proxy serves.
const HEADLESS: &str = "service.kubernetes.io/headless";

/// Which objects are ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The name of this proxy: it serves the objects that are labelled with it. None for those without such a label.
    pub proxy_name: Option<String>,
}

/// Why an object is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Skip {
    /// Its label names another proxy, or none where ours has a name.
    #[error("label {PROXY_NAME} gives it to another proxy")]
    OtherProxy,
    /// Its label says so.
    #[error("label {HEADLESS} says that no proxy serves it")]
    HeadlessLabel,
    /// A service without a ClusterIP, on purpose.
    #[error("the service is headless")]
    Headless,
    /// A service without a ClusterIP, yet or for an error that was told.
    #[error("the service has no ClusterIP")]
    NoClusterIp,
    /// A service that is a name of the DNS.
    #[error("the service is of type ExternalName")]
    ExternalName,
    /// A slice of no service.
    #[error("the endpoint slice has no label that names its service")]
    NoService,
    /// A slice of names, or of addresses of another sort.
    #[error("the endpoint slice has no IP addresses")]
    NoIpAddresses,
}

impl Selection {
    /// The label selector by which an API server leaves out what is not ours.
    pub fn label_selector(&self) -> String {
        match &self.proxy_name {
            Some(name) => format!("{PROXY_NAME}={name},!{HEADLESS}"),
            None => format!("!{PROXY_NAME},!{HEADLESS}"),
        }
    }

    /// Why an object with these labels is not ours.
    pub(super) fn skips(&self, labels: Option<&BTreeMap<String, String>>) -> Option<Skip> {
        let label = |key: &str| labels.and_then(|labels| labels.get(key));
        if label(PROXY_NAME) != self.proxy_name.as_ref() {
            Some(Skip::OtherProxy)
        } else if label(HEADLESS).is_some() {
            Some(Skip::HeadlessLabel)
        } else {
            None
        }
    }
}
