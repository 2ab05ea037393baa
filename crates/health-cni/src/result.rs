//! The result of ADD, and the part of it that CHECK reads.

use std::net::IpAddr;

use health_model::api::Endpoint;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::config::NetworkConfig;
use super::version::Version;

/// Index of the container's interface in [`AddResult::interfaces`].
const INNER: usize = 1;

/// The result of ADD.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AddResult {
    cni_version: Version,
    /// The host's interface, then the container's.
    interfaces: [Interface; 2],
    ips: Vec<Ip>,
    routes: Vec<Route>,
    dns: Dns,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Interface {
    pub(super) name: String,
    #[serde(default)]
    pub(super) mac: String,
    /// Path of the namespace file; empty for host interfaces.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) sandbox: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ip {
    /// `4` or `6`, before version 1.0.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    pub(super) address: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gateway: Option<IpAddr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) interface: Option<usize>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Route {
    pub(super) dst: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) gw: Option<IpAddr>,
}

/// Resolvers, passed on as configured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Dns {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nameservers: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    search: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    options: Vec<String>,
}

/// The part of ADD's result that CHECK reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PreviousResult {
    pub(super) interfaces: Vec<Interface>,
    pub(super) ips: Vec<Ip>,
    pub(super) routes: Vec<Route>,
}

impl AddResult {
    /// Builds the result. `sandbox` is the runtime's path of the namespace file, by which other plugins in a chain
    /// identify the namespace.
    pub(super) fn of(endpoint: &Endpoint, config: &NetworkConfig, sandbox: String) -> Self {
        let cni_version = config.answer_version();
        let stacks = [
            (
                endpoint.ipv4,
                endpoint.gateway4,
                "4",
                IpNet::V4(Ipv4Net::default()),
            ),
            (
                endpoint.ipv6,
                endpoint.gateway6,
                "6",
                IpNet::V6(Ipv6Net::default()),
            ),
        ];
        let stacks = stacks.map(|(address, gateway, version, everything)| {
            address.map(|address| (address, gateway, version, everything))
        });
        let stacks = || stacks.iter().flatten();
        Self {
            cni_version,
            interfaces: [
                Interface {
                    name: endpoint.interface.clone(),
                    mac: endpoint.host_mac.clone(),
                    sandbox: String::new(),
                },
                Interface {
                    name: endpoint.inner_interface.clone(),
                    mac: endpoint.mac.clone(),
                    sandbox,
                },
            ],
            ips: stacks()
                .map(|&(address, gateway, version, _)| Ip {
                    version: (cni_version < Version::V1_0_0).then(|| version.to_owned()),
                    address: IpNet::from(address),
                    gateway,
                    interface: Some(INNER),
                })
                .collect(),
            routes: stacks()
                .filter(|(_, gateway, ..)| gateway.is_some())
                .map(|&(_, gw, _, dst)| Route { dst, gw })
                .collect(),
            dns: config.dns.clone().unwrap_or_default(),
        }
    }
}
