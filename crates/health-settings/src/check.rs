//! Validates settings beyond their ranges: their form, and dependencies between settings.

use health_model::duration::duration_text;
use health_model::settings::InvalidSetting;
use ipnet::IpNet;

use super::{
    EndpointSettings, ListenAddress, MeshSettings, NodeSettings, RegistrySpec, RemoteCluster,
    Settings,
};

/// Maximum length of a node or cluster name in bytes: the limit of a DNS name (RFC 1035 section 2.3.4).
const MAX_NAME_LEN: usize = 253;
/// Maximum length of an interface name in bytes (`IFNAMSIZ` minus the terminating zero).
const MAX_INTERFACE_LEN: usize = 15;

/// A setting that is invalid by itself or because of others.
#[derive(Debug)]
pub(super) struct Invalid {
    pub(super) setting: InvalidSetting,
    /// The flags of the other settings involved.
    pub(super) others: Vec<&'static str>,
}

impl Invalid {
    /// Creates the error for a setting that contradicts others, or that others do not allow.
    pub(super) fn with<const N: usize>(setting: InvalidSetting, others: [&'static str; N]) -> Self {
        Self {
            setting,
            others: others.into(),
        }
    }
}

impl From<InvalidSetting> for Invalid {
    fn from(setting: InvalidSetting) -> Self {
        Self::with(setting, [])
    }
}

/// Checks each setting by itself, and all of them together.
pub(super) fn check(settings: &Settings) -> Result<(), Invalid> {
    settings.location.clone().validated()?;
    settings.node.check()?;
    settings.endpoints.check()?;
    settings.mesh.check()?;
    settings.containers.check()?;
    settings.services.check(settings)?;
    settings.masquerade.validate()?;
    settings.api.check()?;
    check_listeners(settings)
}

/// Types of conditions that belong to Kubernetes.
const KUBERNETES_CONDITIONS: [&str; 5] = [
    "Ready",
    "MemoryPressure",
    "DiskPressure",
    "PIDPressure",
    "NetworkUnavailable",
];

impl NodeSettings {
    /// Checks the type of the node's condition, and that there is an object to write it to.
    fn check_condition(&self, condition: &str) -> Result<(), Invalid> {
        const FLAG: &str = "--node-condition";
        let is_word = !condition.is_empty() && condition.bytes().all(|b| b.is_ascii_alphanumeric());
        if !is_word || condition.len() > MAX_NAME_LEN {
            let why = "must be one word of letters and digits, such as HealthAgentReady";
            return Err(InvalidSetting::new(FLAG, condition.escape_default(), why).into());
        }
        if KUBERNETES_CONDITIONS.contains(&condition) {
            let why = "is a condition of Kubernetes itself; choose another type";
            return Err(InvalidSetting::new(FLAG, condition, why).into());
        }
        if !matches!(self.registry, RegistrySpec::Kubernetes(_)) {
            let why = "needs --registry kubernetes";
            let invalid = InvalidSetting::new(FLAG, condition, why);
            return Err(Invalid::with(invalid, ["--registry"]));
        }
        Ok(())
    }

    /// Checks the node, its cluster, the remote clusters and their sources.
    fn check(&self) -> Result<(), Invalid> {
        name("--node-name", &self.node_name)?;
        name("--cluster-name", &self.cluster_name)?;
        for (i, remote) in self.remote_clusters.iter().enumerate() {
            name("--remote-cluster", &remote.name)?;
            let known = |other: &RemoteCluster| other.name == remote.name;
            let is_own = remote.name == self.cluster_name;
            if is_own || self.remote_clusters[..i].iter().any(known) {
                let why = "each cluster needs a unique name that differs from --cluster-name";
                let invalid = InvalidSetting::new("--remote-cluster", remote, why);
                return Err(match is_own {
                    true => Invalid::with(invalid, ["--cluster-name"]),
                    false => invalid.into(),
                });
            }
        }
        for address in &self.node_addresses {
            if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
                let why = "is not an address at which other nodes can reach this one";
                return Err(InvalidSetting::new("--node-address", address, why).into());
            }
        }
        if let Some(condition) = &self.node_condition {
            self.check_condition(condition)?;
        }
        for (i, device) in self.devices.iter().enumerate() {
            interface(device)?;
            if self.devices[..i].contains(device) {
                let why = "is given twice; name each interface once";
                return Err(InvalidSetting::new("--device", device, why).into());
            }
        }
        Ok(())
    }
}

impl EndpointSettings {
    /// Checks the addresses of endpoints.
    fn check(&self) -> Result<(), InvalidSetting> {
        let mut cidrs = self.pod_cidrs.iter();
        cidrs.try_for_each(|cidr| network("--pod-cidr", cidr))
    }
}

impl MeshSettings {
    /// Checks the dependencies between the probe settings.
    fn check(&self) -> Result<(), Invalid> {
        if self.passive_relief > 1 && !self.passive_rtt {
            let why = "needs --passive-rtt on, which detects traffic";
            let invalid = InvalidSetting::new("--passive-relief", self.passive_relief, why);
            return Err(Invalid::with(invalid, ["--passive-rtt"]));
        }
        let shortest = self.probe_intervals().iter().min();
        let Some(shortest) = shortest.filter(|&shortest| self.probe_timeout > shortest) else {
            return Ok(());
        };
        let why = format!(
            "must not exceed the shortest interval of --probe-interval and --probe, which is {}",
            duration_text(shortest)
        );
        let timeout = duration_text(self.probe_timeout);
        let invalid = InvalidSetting::new("--probe-timeout", timeout, why);
        Err(match shortest == self.probe_interval {
            true => Invalid::with(invalid, ["--probe-interval"]),
            false => Invalid::with(invalid, ["--probe"]),
        })
    }
}

/// Checks the addresses of the monitoring pages and of the API.
fn check_listeners(settings: &Settings) -> Result<(), Invalid> {
    let mut listens = vec![
        ("--metrics-address", settings.api.metrics_address),
        ("--healthz-address", settings.api.healthz_address),
    ];
    listens.extend(settings.services.listens());
    let api = settings.api.api_addresses.iter();
    listens.extend(api.map(|address| ("--api-address", ListenAddress::Address(*address))));
    for (i, &(flag, address)) in listens.iter().enumerate() {
        if address.port() == Some(0) {
            let why = "must have a port from 1 to 65535: clients have to know it";
            return Err(InvalidSetting::new(flag, address, why).into());
        }
        let is_same = |(_, other): &&(_, ListenAddress)| *other == address;
        if address != ListenAddress::Off
            && let Some((other, _)) = listens[..i].iter().find(is_same)
        {
            let why = format!("must not be the same as {other}");
            return Err(Invalid::with(
                InvalidSetting::new(flag, address, why),
                [*other],
            ));
        }
    }
    Ok(())
}

/// Checks a name. Names appear in `cluster/node` and in one-line reports.
fn name(flag: &'static str, value: &str) -> Result<(), InvalidSetting> {
    let printable = |c: char| c != '/' && !c.is_whitespace() && !c.is_control();
    if (1..=MAX_NAME_LEN).contains(&value.len()) && value.chars().all(printable) {
        Ok(())
    } else {
        Err(InvalidSetting::new(
            flag,
            value.escape_default(),
            format!("must be 1 to {MAX_NAME_LEN} bytes without slashes or spaces"),
        ))
    }
}

/// Checks that the kernel accepts the text as an interface name (`dev_valid_name`).
fn interface(value: &str) -> Result<(), InvalidSetting> {
    let valid = (1..=MAX_INTERFACE_LEN).contains(&value.len())
        && !matches!(value, "." | "..")
        && !value
            .bytes()
            .any(|b| matches!(b, b'/' | b':') || b.is_ascii_whitespace());
    if valid {
        Ok(())
    } else {
        Err(InvalidSetting::new(
            "--device",
            value.escape_default(),
            "is not a valid interface name; `ip link` lists the existing ones",
        ))
    }
}

pub(super) fn network(flag: &'static str, value: &IpNet) -> Result<(), InvalidSetting> {
    if value.trunc() == *value {
        return Ok(());
    }
    let why = format!("has host bits set; write {}", value.trunc());
    Err(InvalidSetting::new(flag, value, why))
}
