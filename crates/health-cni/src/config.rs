//! The network configuration that the runtime passes on stdin.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use health_model::address::parse_network_or_ip;
use health_model::labels::pod::{K8S, POD_NAMESPACE};
use health_model::labels::{Label, LabelSet};
use health_model::settings::Location;
use serde::Deserialize;
use serde_json::Value;

use super::environment::{Arguments, Attachment, CniCommand};
use super::error::{CniError, Code};
use super::result::{Dns, PreviousResult};
use super::version::Version;

/// Maximum length of a network name in bytes.
const MAX_NAME: usize = 253;

/// The configuration. Fields that request unsupported features are rejected, not ignored.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NetworkConfig {
    cni_version: Option<String>,
    pub(super) name: String,
    #[serde(rename = "type")]
    _kind: String,
    /// The agent's instance.
    instance: Option<String>,
    /// The folder of the agent's socket.
    runtime_dir: Option<PathBuf>,
    /// Labels of every endpoint of this network, `source:key` to value.
    labels: BTreeMap<String, String>,
    pub(super) dns: Option<Dns>,
    /// Whether the container's outbound routes should use this network.
    pub(super) default_route: Option<bool>,
    args: Args,
    runtime_config: RuntimeConfig,
    capabilities: BTreeMap<String, bool>,
    disable_check: bool,
    #[serde(rename = "disableGC")]
    disable_gc: bool,
    prev_result: Option<Value>,
    #[serde(rename = "cni.dev/valid-attachments")]
    valid_attachments: Option<Vec<ValidAttachment>>,
    /// The same list, under the name that early runtimes used.
    #[serde(rename = "cni.dev/attachments")]
    attachments: Option<Vec<ValidAttachment>>,
    /// All other fields.
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Args {
    cni: CniArgs,
}

/// The conventional `args.cni` (CONVENTIONS.md of the CNI project).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CniArgs {
    ips: Vec<String>,
    labels: Vec<ArgLabel>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ArgLabel {
    key: String,
    value: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    ips: Vec<String>,
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Deserialize)]
struct ValidAttachment {
    #[serde(rename = "containerID")]
    container_id: String,
    ifname: String,
}

impl NetworkConfig {
    /// Reads a configuration and the version to use for the result.
    pub(super) fn read(bytes: &[u8]) -> (Version, Result<Self, CniError>) {
        let config: Self = match serde_json::from_slice(bytes) {
            Ok(config) => config,
            Err(error) => {
                let code = match error.classify() {
                    serde_json::error::Category::Data => Code::InvalidConfig,
                    _ => Code::Decode,
                };
                let problem = format!("cannot read the network configuration on stdin: {error}");
                return (Version::NEWEST, Err(CniError::new(code, problem)));
            }
        };
        let version = match config.version() {
            Ok(version) => version,
            Err(error) => return (Version::NEWEST, Err(error)),
        };
        (version, config.validated())
    }

    /// Reads only the fields that a deletion needs, because the rest of the configuration may have changed since ADD.
    /// Returns `None` if the input is not a configuration.
    pub(super) fn of_deletion(bytes: &[u8]) -> Option<Self> {
        let fields: serde_json::Map<String, Value> = serde_json::from_slice(bytes).ok()?;
        let text = |key: &str| fields.get(key)?.as_str().map(str::to_owned);
        Some(Self {
            instance: text("instance"),
            runtime_dir: text("runtimeDir").map(PathBuf::from),
            ..Self::default()
        })
    }

    fn version(&self) -> Result<Version, CniError> {
        let text = self.cni_version.as_deref().unwrap_or("0.1.0");
        text.parse().map_err(|_| {
            CniError::new(
                Code::IncompatibleVersion,
                format!("unsupported cniVersion {text}; expected 0.3.0 to 1.1.0"),
            )
        })
    }

    fn validated(self) -> Result<Self, CniError> {
        let is_name = self.name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && self.name.len() <= MAX_NAME
            && self
                .name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
        if !is_name {
            let problem = format!("invalid network name {:?}", self.name);
            return Err(CniError::new(Code::InvalidConfig, problem));
        }
        // Keys with a slash belong to the runtimes.
        let unsupported = self.unknown.iter().find(|(key, _)| !key.contains('/'));
        if let Some((key, value)) = unsupported {
            let why = match key.as_str() {
                "ipam" => ": addresses come from the agent's own pools",
                "ipMasq" => ": use the agent's --masquerade flag instead",
                _ => "",
            };
            return Err(unsupported_field(key, value, why));
        }
        if let Some((key, value)) = self.runtime_config.unknown.iter().next() {
            let field = format!("runtimeConfig.{key}");
            return Err(unsupported_field(&field, value, ""));
        }
        // A disabled capability requests nothing.
        let mut asked_for = self.capabilities.iter().filter(|(_, is_on)| **is_on);
        if let Some((capability, _)) = asked_for.find(|(name, _)| *name != "ips") {
            let field = format!("capabilities.{capability}");
            return Err(unsupported_field(&field, &Value::Bool(true), ""));
        }
        Ok(self)
    }

    /// Rejects commands that do not exist yet in the configuration's version.
    pub(super) fn require_version(&self, command: CniCommand) -> Result<(), CniError> {
        let (needed, name) = match command {
            CniCommand::Check => (Version::V0_4_0, "CHECK"),
            CniCommand::Gc => (Version::V1_1_0, "GC"),
            CniCommand::Status => (Version::V1_1_0, "STATUS"),
            CniCommand::Add | CniCommand::Del | CniCommand::Version => return Ok(()),
        };
        let version = self.version()?;
        if version < needed {
            let problem =
                format!("{name} needs version {needed} or later; the configuration has {version}");
            return Err(CniError::new(Code::IncompatibleVersion, problem));
        }
        Ok(())
    }

    /// The version to use for the result.
    pub(super) fn answer_version(&self) -> Version {
        self.version().unwrap_or(Version::NEWEST)
    }

    /// The agent's location.
    pub(super) fn location(&self, default: &Location) -> Result<Location, CniError> {
        Location {
            instance: self.instance.clone().unwrap_or(default.instance.clone()),
            runtime_dir: self
                .runtime_dir
                .clone()
                .unwrap_or(default.runtime_dir.clone()),
            ..default.clone()
        }
        .validated()
        .map_err(|error| CniError::new(Code::InvalidConfig, error.to_string()))
    }

    /// Labels of an endpoint: the network's, the runtime's, and the pod's namespace.
    pub(super) fn labels(&self, arguments: &Arguments) -> Result<Vec<String>, CniError> {
        let of_network = self
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"));
        let of_runtime = self.args.cni.labels.iter();
        let of_runtime = of_runtime.map(|ArgLabel { key, value }| format!("{key}={value}"));
        let of_pod = arguments.pod_namespace.iter();
        let of_pod = of_pod.map(|name| format!("{K8S}:{POD_NAMESPACE}={name}"));
        let labels: Result<Vec<Label>, _> = of_network
            .chain(of_runtime)
            .chain(of_pod)
            .map(|text| text.parse())
            .collect();
        labels
            .and_then(LabelSet::new)
            .map(|set| set.iter().map(ToString::to_string).collect())
            .map_err(|error| CniError::new(Code::InvalidConfig, error.to_string()))
    }

    /// The requested addresses, IPv4 and IPv6.
    pub(super) fn addresses(&self, arguments: &Arguments) -> Result<[Option<IpAddr>; 2], CniError> {
        let mut found = [None, None];
        let configured = self.runtime_config.ips.iter().chain(&self.args.cni.ips);
        let configured = configured.map(|text| {
            let address = parse_network_or_ip(text).map(|net| net.addr());
            address.map_err(|_| {
                let problem = format!("{text:?} in the requested ips is not an address");
                CniError::new(Code::InvalidConfig, problem)
            })
        });
        for address in configured.chain(arguments.ip.map(Ok)) {
            let address = address?;
            let place = &mut found[usize::from(address.is_ipv6())];
            if place.is_some_and(|other| other != address) {
                let problem = format!(
                    "at most one address per IP version may be requested; {address} is a second one"
                );
                return Err(CniError::new(Code::InvalidConfig, problem));
            }
            *place = Some(address);
        }
        Ok(found)
    }

    /// Rejects ADD after another plugin, because ADD creates its own device.
    pub(super) fn refuse_previous(&self) -> Result<(), CniError> {
        match &self.prev_result {
            Some(_) => Err(CniError::new(
                Code::InvalidConfig,
                "prevResult is set, but this plugin creates the interface; put it first in the list",
            )),
            None => Ok(()),
        }
    }

    /// The result of ADD, for CHECK.
    pub(super) fn previous(&self) -> Result<PreviousResult, CniError> {
        let previous = self.prev_result.clone().ok_or_else(|| {
            CniError::new(
                Code::InvalidConfig,
                "CHECK needs prevResult, which is missing",
            )
        })?;
        serde_json::from_value(previous).map_err(|error| {
            CniError::new(
                Code::InvalidConfig,
                format!("cannot read prevResult: {error}"),
            )
        })
    }

    /// The attachments that the runtime knows, for GC.
    pub(super) fn valid_attachments(&self) -> Result<Vec<Attachment>, CniError> {
        let known = self
            .valid_attachments
            .as_ref()
            .or(self.attachments.as_ref());
        let known = known.ok_or_else(|| {
            CniError::new(
                Code::InvalidConfig,
                "cni.dev/valid-attachments is missing: without it GC would remove every container's interface",
            )
        })?;
        let attachments = known.iter().map(|one| Attachment {
            container_id: one.container_id.clone(),
            ifname: one.ifname.clone(),
        });
        Ok(attachments.collect())
    }

    /// Whether the configuration disables a command that the runtime called anyway.
    pub(super) fn is_disabled(&self, command: CniCommand) -> bool {
        match command {
            CniCommand::Check => self.disable_check,
            CniCommand::Gc => self.disable_gc,
            _ => false,
        }
    }
}

fn unsupported_field(field: &str, value: &Value, why: &str) -> CniError {
    let problem = format!("{field} of the network configuration ({value}) is not supported{why}");
    CniError::new(Code::UnsupportedField, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<NetworkConfig, CniError> {
        NetworkConfig::read(text.as_bytes()).1
    }

    fn code(text: &str) -> Code {
        read(text).unwrap_err().code()
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        for (text, expected) in [
            ("", Code::Decode),
            ("{", Code::Decode),
            ("[]", Code::InvalidConfig),
            (r#"{"cniVersion":"1.0.0","name":5}"#, Code::InvalidConfig),
            (
                r#"{"cniVersion":"1.0.0","name":"a/b"}"#,
                Code::InvalidConfig,
            ),
            (r#"{"cniVersion":"1.0.0"}"#, Code::InvalidConfig),
            (r#"{"name":"a"}"#, Code::IncompatibleVersion),
            (
                r#"{"cniVersion":"2.0.0","name":"a"}"#,
                Code::IncompatibleVersion,
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"a","ipam":{"type":"host-local"}}"#,
                Code::UnsupportedField,
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"a","runtimeConfig":{"portMappings":[]}}"#,
                Code::UnsupportedField,
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"a","capabilities":{"bandwidth":true}}"#,
                Code::UnsupportedField,
            ),
        ] {
            assert_eq!(code(text), expected, "{text}");
        }
        let off =
            r#"{"cniVersion":"1.0.0","name":"a","capabilities":{"portMappings":false,"ips":true}}"#;
        assert!(read(off).is_ok());
        let error = read(r#"{"cniVersion":"1.0.0","name":"a","ipMasq":true}"#).unwrap_err();
        assert!(error.to_string().contains("ipMasq"), "{error}");
    }

    #[test]
    fn a_deletion_needs_no_more_than_where_the_agent_is() {
        for text in [
            r#"{"cniVersion":"9.9.9","name":"../x","instance":"a","runtimeDir":"/run/a","ipam":{}}"#,
            r#"{"labels":5,"instance":"a","runtimeDir":"/run/a","prevResult":"?"}"#,
        ] {
            assert!(read(text).is_err());
            let config = NetworkConfig::of_deletion(text.as_bytes()).unwrap();
            let default = Location {
                instance: "default".to_owned(),
                runtime_dir: "/run/health-agent".into(),
                state_dir: "/var/lib/health-agent".into(),
                bpf_root: "/sys/fs/bpf".into(),
            };
            let location = config.location(&default).unwrap();
            assert_eq!(location.instance, "a");
            assert_eq!(location.runtime_dir, PathBuf::from("/run/a"));
        }
        assert!(NetworkConfig::of_deletion(b"{").is_none());
        assert!(NetworkConfig::of_deletion(b"[]").is_none());
    }

    #[test]
    fn labels_and_addresses_are_gathered_from_all_places() {
        let config = read(
            r#"{"cniVersion":"1.1.0","name":"a","type":"health-agent-cni","labels":{"k8s:app":"web"},
               "args":{"cni":{"labels":[{"key":"zone","value":"x"}]}},
               "runtimeConfig":{"ips":["10.244.1.7/24","fd00::7"]}}"#,
        )
        .unwrap();
        let arguments = Arguments {
            pod_namespace: Some("n".to_owned()),
            ..Arguments::default()
        };
        assert_eq!(
            config.labels(&arguments).unwrap(),
            [
                "k8s:app=web",
                "k8s:io.kubernetes.pod.namespace=n",
                "unspec:zone=x"
            ]
        );
        assert_eq!(
            config.addresses(&arguments).unwrap(),
            ["10.244.1.7".parse().ok(), "fd00::7".parse().ok()]
        );
        let arguments = Arguments {
            ip: "10.244.1.8".parse().ok(),
            ..Arguments::default()
        };
        assert!(config.addresses(&arguments).is_err());
    }

    #[test]
    fn gc_and_status_are_of_version_1_1_0_on_and_gc_needs_to_know_what_stays() {
        let old = read(r#"{"cniVersion":"1.0.0","name":"a"}"#).unwrap();
        assert!(old.require_version(CniCommand::Gc).is_err());
        assert!(old.require_version(CniCommand::Check).is_ok());
        let new = read(r#"{"cniVersion":"1.1.0","name":"a"}"#).unwrap();
        assert!(new.require_version(CniCommand::Status).is_ok());
        assert!(new.valid_attachments().is_err());
    }
}
