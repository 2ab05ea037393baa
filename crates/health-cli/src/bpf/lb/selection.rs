//! Selects the services to list.

use std::collections::BTreeSet;

use anyhow::bail;
use health_api::client::Client;
use health_common::service::KIND_NODE_PORT;
use health_datapath::dump::Pinned;
use health_datapath::services::ListedFrontend;
use health_model::api::{ServiceEntry, ServicePortEntry};
use health_model::flow::IpProtocol;

use crate::service;

/// All services, one service, or one of its ports.
#[derive(Debug, Default)]
pub(in crate::bpf) struct Selection {
    /// The numbers of the selected service ports in the maps; `None` for all services.
    numbers: Option<BTreeSet<u32>>,
}

impl Selection {
    /// Selects `NAMESPACE/NAME` or `NAMESPACE/NAME:PORT`. Asks the agent for the service's addresses, and finds its
    /// numbers in the maps by address.
    pub(super) async fn of(client: &Client, pinned: &Pinned, wanted: &str) -> anyhow::Result<Self> {
        let (name, port) = match wanted.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (wanted, None),
        };
        let service = service::find(client, name).await?;
        let numbers = numbers(&service, port, &pinned.services()?.list()?);
        if numbers.is_empty() {
            bail!("the maps have no frontend for service {wanted:?}");
        }
        Ok(Self {
            numbers: Some(numbers),
        })
    }

    /// Whether the service port with this number is selected.
    pub(super) fn has(&self, number: u32) -> bool {
        let numbers = self.numbers.as_ref();
        numbers.is_none_or(|numbers| numbers.contains(&number))
    }
}

fn numbers(service: &ServiceEntry, port: Option<&str>, listed: &[ListedFrontend]) -> BTreeSet<u32> {
    let ports = service.ports.iter();
    let ports = ports.filter(|entry| port.is_none_or(|port| entry.is_called(port)));
    let frontends = ports.flat_map(|port| listed.iter().filter(|frontend| is_of(frontend, port)));
    frontends.map(|frontend| frontend.entry.service).collect()
}

fn is_of(frontend: &ListedFrontend, port: &ServicePortEntry) -> bool {
    let listen = match frontend.entry.kind {
        KIND_NODE_PORT => format!("node port {}", frontend.address.port()),
        _ => frontend.address.to_string(),
    };
    IpProtocol(frontend.protocol).to_string() == port.protocol
        && port.frontends.iter().any(|one| one.listen == listen)
}

#[cfg(test)]
mod tests {
    use health_common::service::{Frontend, KIND_CLUSTER_IP};

    use super::*;
    use crate::service::fixture::web;

    #[test]
    fn a_service_has_the_numbers_of_its_frontends() {
        let listed = |address: &str, protocol, kind, service| ListedFrontend {
            address: address.parse().unwrap(),
            protocol,
            entry: Frontend {
                kind,
                service,
                ..Frontend::default()
            },
            inside: Vec::new(),
            outside: Vec::new(),
        };
        let maps = [
            listed("10.96.0.1:80", 6, KIND_CLUSTER_IP, 3),
            listed("172.30.0.1:30080", 6, KIND_NODE_PORT, 4),
            listed("10.96.0.1:80", 17, KIND_CLUSTER_IP, 5),
            listed("10.96.0.2:80", 6, KIND_CLUSTER_IP, 6),
        ];
        for port in [None, Some("http"), Some("80")] {
            assert_eq!(numbers(&web(), port, &maps), [3, 4].into(), "{port:?}");
        }
        for port in ["dns", "81"] {
            assert_eq!(numbers(&web(), Some(port), &maps), [].into(), "{port}");
        }
        let one = Selection {
            numbers: Some([3].into()),
        };
        assert!(one.has(3) && !one.has(4) && Selection::default().has(4));
    }
}
