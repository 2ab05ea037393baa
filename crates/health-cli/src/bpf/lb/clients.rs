//! `bpf lb list --affinity`: clients with session affinity.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use health_common::service::Backend;
use health_datapath::dump::{Pinned, ServiceClient};
use health_net::clock;
use serde::Serialize;

use super::selection::Selection;
use crate::bpf::{address, stream};
use crate::output::Format;

/// A client as shown.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct ClientRow {
    #[serde(serialize_with = "address::serialize")]
    client: IpAddr,
    service: u32,
    backend: u32,
    /// `null` if the backend is gone.
    backend_address: Option<SocketAddr>,
    /// Time since the client last opened a flow.
    age_seconds: u32,
}

impl fmt::Display for ClientRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} service={} -> ", self.client, self.service)?;
        match self.backend_address {
            Some(address) => write!(f, "{address}")?,
            None => write!(f, "gone")?,
        }
        write!(f, " backend={} age={}sec", self.backend, self.age_seconds)
    }
}

pub(in crate::bpf) fn print(
    pinned: &Pinned,
    selection: &Selection,
    format: Format,
) -> anyhow::Result<()> {
    let backends = pinned.services()?.backends()?;
    let rows = [pinned.service_client_rows()?];
    let now = clock::coarse_now_secs();
    stream::print(format, &rows, |client| {
        let is_meant = selection.has(client.service);
        is_meant.then(|| row(&client, &backends, now))
    })
}

fn row(client: &ServiceClient, backends: &BTreeMap<u32, Backend>, now: u32) -> ClientRow {
    let backend = backends.get(&client.backend);
    let backend = backend.filter(|backend| backend.service == client.service);
    ClientRow {
        client: client.client,
        service: client.service,
        backend: client.backend,
        backend_address: backend
            .map(|backend| SocketAddr::new(backend.addr.to_ip(), u16::from_be(backend.port_be))),
        age_seconds: now.saturating_sub(client.last_used),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_shown_with_where_it_stays() {
        let backend = Backend {
            addr: IpAddr::from([10, 1, 0, 1]).into(),
            port_be: 80_u16.to_be(),
            service: 3,
            ..Backend::default()
        };
        let backends = BTreeMap::from([(9, backend)]);
        let client = |service| ServiceClient {
            client: "192.0.2.1".parse().unwrap(),
            service,
            backend: 9,
            last_used: 100,
        };
        assert_eq!(
            row(&client(3), &backends, 130).to_string(),
            "192.0.2.1 service=3 -> 10.1.0.1:80 backend=9 age=30sec"
        );
        assert_eq!(
            row(&client(4), &backends, 130).to_string(),
            "192.0.2.1 service=4 -> gone backend=9 age=30sec"
        );
    }
}
