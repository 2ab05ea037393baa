//! The runtime's request in environment variables.

use std::collections::BTreeMap;
use std::env;
use std::net::IpAddr;
use std::path::Path;

use health_model::address::parse_ip;
use health_model::api::{Endpoint, PodName};
use health_net::netns;

use super::error::{CniError, Code};

/// Maximum length of an interface name in bytes (`IFNAMSIZ` minus the terminating zero).
const MAX_IFNAME: usize = 15;

/// The requested command, `CNI_COMMAND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CniCommand {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
}

/// A container's attachment to a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attachment {
    pub(super) container_id: String,
    pub(super) ifname: String,
}

impl Attachment {
    /// Whether an endpoint was created for this attachment.
    pub(super) fn is_of(&self, endpoint: &Endpoint) -> bool {
        endpoint.container_id.as_ref() == Some(&self.container_id)
            && endpoint.inner_interface == self.ifname
    }
}

/// The variables, all of which may be missing.
#[derive(Clone, Debug, Default)]
pub(super) struct Environment {
    command: Option<String>,
    container_id: Option<String>,
    netns: Option<String>,
    ifname: Option<String>,
    args: Option<String>,
}

impl Environment {
    pub(super) fn of_process() -> Self {
        let variable = |name| env::var(name).ok().filter(|value| !value.is_empty());
        Self {
            command: variable("CNI_COMMAND"),
            container_id: variable("CNI_CONTAINERID"),
            netns: variable("CNI_NETNS"),
            ifname: variable("CNI_IFNAME"),
            args: variable("CNI_ARGS"),
        }
    }

    pub(super) fn command(&self) -> Result<CniCommand, CniError> {
        match self.command.as_deref() {
            Some("ADD") => Ok(CniCommand::Add),
            Some("DEL") => Ok(CniCommand::Del),
            Some("CHECK") => Ok(CniCommand::Check),
            Some("GC") => Ok(CniCommand::Gc),
            Some("STATUS") => Ok(CniCommand::Status),
            Some("VERSION") => Ok(CniCommand::Version),
            Some(other) => Err(bad(format!(
                "invalid CNI_COMMAND {other:?}; expected ADD, DEL, CHECK, GC, STATUS or VERSION"
            ))),
            None => Err(missing("CNI_COMMAND")),
        }
    }

    /// `CNI_CONTAINERID` and `CNI_IFNAME`, if the specification allows their values.
    pub(super) fn attachment(&self) -> Result<Attachment, CniError> {
        let container_id = self.container_id.clone();
        let container_id = container_id.ok_or_else(|| missing("CNI_CONTAINERID"))?;
        let ifname = self.ifname.clone().ok_or_else(|| missing("CNI_IFNAME"))?;
        let is_id = container_id.starts_with(|c: char| c.is_ascii_alphanumeric())
            && container_id
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
        if !is_id {
            return Err(bad(format!(
                "invalid CNI_CONTAINERID {container_id:?}; expected letters, digits, '_', '.' and '-', with a \
                 letter or a digit first"
            )));
        }
        let is_ifname = ifname.len() <= MAX_IFNAME
            && !matches!(ifname.as_str(), "." | "..")
            && !ifname.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace());
        if !is_ifname {
            return Err(bad(format!(
                "invalid CNI_IFNAME {ifname:?}; expected at most {MAX_IFNAME} bytes, without '/', ':' and \
                 spaces"
            )));
        }
        Ok(Attachment {
            container_id,
            ifname,
        })
    }

    /// `CNI_NETNS`, which is required.
    pub(super) fn netns(&self) -> Result<String, CniError> {
        let netns = self.netns.clone().ok_or_else(|| missing("CNI_NETNS"))?;
        if !Path::new(&netns).is_absolute() {
            return Err(bad(format!("CNI_NETNS {netns:?} is not an absolute path")));
        }
        if !Path::new(&netns).exists() {
            return Err(bad(format!(
                "CNI_NETNS {netns} does not exist: is the container still there?"
            )));
        }
        Ok(netns)
    }

    /// A path to the same namespace that is also valid for the agent, whose mount namespace may differ. The plugin runs
    /// in the runtime's mount namespace and resolves symbolic links there.
    pub(super) fn resolved_netns(&self) -> Result<String, CniError> {
        let resolved = netns::resolved(Path::new(&self.netns()?));
        Ok(resolved.display().to_string())
    }

    /// `CNI_ARGS`.
    pub(super) fn arguments(&self) -> Result<Arguments, CniError> {
        Arguments::read(self.args.as_deref().unwrap_or_default())
    }
}

/// `CNI_ARGS`: `KEY=VALUE;KEY=VALUE`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Arguments {
    /// The requested address.
    pub(super) ip: Option<IpAddr>,
    pub(super) pod_namespace: Option<String>,
    pub(super) pod_name: Option<String>,
    pub(super) pod_uid: Option<String>,
}

impl Arguments {
    fn read(text: &str) -> Result<Self, CniError> {
        let mut pairs = BTreeMap::new();
        for pair in text.split(';').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| {
                bad(format!(
                    "CNI_ARGS contains an invalid entry, {pair:?}; expected KEY=VALUE"
                ))
            })?;
            pairs.insert(key, value);
        }
        let ignores_unknown = pairs
            .remove("IgnoreUnknown")
            .is_some_and(|value| matches!(value, "1" | "true" | "True" | "TRUE"));
        let ip = pairs.remove("IP").map(|value| {
            parse_ip(value).map_err(|_| bad(format!("CNI_ARGS: IP {value:?} is not an address")))
        });
        let mut name = |key: &str| {
            let value = pairs.remove(key).filter(|value| !value.is_empty());
            value.map(str::to_owned)
        };
        let arguments = Self {
            ip: ip.transpose()?,
            pod_namespace: name("K8S_POD_NAMESPACE"),
            pod_name: name("K8S_POD_NAME"),
            pod_uid: name("K8S_POD_UID"),
        };
        // This key says no more about the pod than the container id does.
        pairs.remove("K8S_POD_INFRA_CONTAINER_ID");
        match pairs.keys().next() {
            Some(key) if !ignores_unknown => Err(bad(format!(
                "CNI_ARGS: unknown key {key}; set IgnoreUnknown=1 to ignore it"
            ))),
            _ => Ok(arguments),
        }
    }

    /// The pod, if it is a Kubernetes pod.
    pub(super) fn pod(&self) -> Option<PodName> {
        Some(PodName {
            namespace: self.pod_namespace.clone()?,
            name: self.pod_name.clone()?,
            uid: self.pod_uid.clone(),
        })
    }

    /// The name of the pod's endpoint.
    pub(super) fn endpoint_name(&self) -> Option<String> {
        match self.pod() {
            Some(pod) => Some(pod.to_string()),
            None => self.pod_name.clone(),
        }
    }
}

fn missing(variable: &str) -> CniError {
    bad(format!("{variable} is not set"))
}

fn bad(problem: String) -> CniError {
    CniError::new(Code::InvalidEnvironment, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(container_id: &str, ifname: &str) -> Result<Attachment, CniError> {
        Environment {
            container_id: Some(container_id.to_owned()),
            ifname: Some(ifname.to_owned()),
            ..Environment::default()
        }
        .attachment()
    }

    #[test]
    fn names_are_those_that_the_specification_allows() {
        assert!(attachment("a1_b.c-d", "eth0").is_ok());
        for (container_id, ifname) in [
            ("-a", "eth0"),
            ("a/b", "eth0"),
            ("a b", "eth0"),
            ("a", ".."),
            ("a", "eth/0"),
            ("a", "eth:0"),
            ("a", "e th0"),
            ("a", "sixteen-bytes-xx"),
        ] {
            let error = attachment(container_id, ifname).unwrap_err();
            assert_eq!(
                error.code(),
                Code::InvalidEnvironment,
                "{container_id} {ifname}"
            );
        }
    }

    #[test]
    fn arguments_name_the_pod_and_unknown_ones_are_refused_unless_allowed() {
        let read = Arguments::read;
        let text = "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=u;X=y";
        let arguments = read(text).unwrap();
        assert_eq!(arguments.endpoint_name().as_deref(), Some("a/b"));
        assert_eq!(arguments.pod().unwrap().uid.as_deref(), Some("u"));
        let name = read("K8S_POD_NAME=b").unwrap();
        assert_eq!(
            (name.endpoint_name().as_deref(), name.pod()),
            (Some("b"), None)
        );
        assert_eq!(read("IP=10.0.0.7").unwrap().ip, "10.0.0.7".parse().ok());
        assert_eq!(read("").unwrap(), Arguments::default());
        for bad in ["X=y", "IP=nobody", "K8S_POD_NAME"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
