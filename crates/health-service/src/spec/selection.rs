//! The selection of the objects that this proxy serves.

use std::collections::BTreeMap;

/// Label that names the only proxy that serves an object.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// Label of objects that no proxy serves.
const HEADLESS: &str = "service.kubernetes.io/headless";

/// Selects the objects that this proxy serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The name of this proxy, which then serves only objects labelled with that name. `None`: serves objects without
    /// the label.
    pub proxy_name: Option<String>,
}

/// Why an object is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Skip {
    /// The object's label names another proxy, or this proxy has a name and the object has no label.
    #[error("label {PROXY_NAME} assigns it to another proxy")]
    OtherProxy,
    /// The object has the label of objects that no proxy serves.
    #[error("label {HEADLESS} excludes it from every proxy")]
    HeadlessLabel,
    /// The service has no ClusterIP, on purpose.
    #[error("the service is headless")]
    Headless,
    /// The service has no ClusterIP, because none is assigned yet or because the field has an error, which is reported.
    #[error("the service has no ClusterIP")]
    NoClusterIp,
    /// The service is an alias in DNS.
    #[error("the service is of type ExternalName")]
    ExternalName,
    /// The slice belongs to no service.
    #[error("the endpoint slice has no label that names its service")]
    NoService,
    /// The slice contains host names, or addresses of an unknown type.
    #[error("the endpoint slice has no IP addresses")]
    NoIpAddresses,
}

impl Selection {
    /// Returns the label selector with which an API server sends only the selected objects.
    pub fn label_selector(&self) -> String {
        match &self.proxy_name {
            Some(name) => format!("{PROXY_NAME}={name},!{HEADLESS}"),
            None => format!("!{PROXY_NAME},!{HEADLESS}"),
        }
    }

    /// Returns why an object with these labels is not selected; `None` if it is.
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
