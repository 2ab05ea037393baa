//! Node names by address, as the agent knows them.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use health_api::client::{Client, ClientError};
use health_api::rtt::names_by_address;
use health_model::api::NodeList;

use crate::status::{UnknownNode, is_named};

/// Shorter than elsewhere: the listing also works without an agent, so it need not wait long for a stopped one.
const PATIENCE: Duration = Duration::from_secs(1);

/// Nodes by address.
#[derive(Debug, Default)]
pub(super) struct Names(HashMap<IpAddr, String>);

impl Names {
    /// Fetches the names from the agent.
    pub(super) async fn ask(client: &Client) -> Result<Self, ClientError> {
        let nodes: NodeList = client.get_within("/v1/nodes", PATIENCE).await?;
        Ok(nodes.into())
    }

    /// The `cluster/node` name of an address.
    pub(super) fn of(&self, address: IpAddr) -> Option<&str> {
        self.0.get(&address).map(String::as_str)
    }

    /// All `cluster/node` names.
    pub(super) fn all(&self) -> impl Iterator<Item = &str> {
        self.0.values().map(String::as_str)
    }

    /// The addresses of the nodes that `wanted` matches.
    pub(super) fn addresses(&self, wanted: &str) -> Result<BTreeSet<IpAddr>, UnknownNode> {
        let named = self.0.iter().filter(|(_, name)| is_named(name, wanted));
        let addresses: BTreeSet<IpAddr> = named.map(|(address, _)| *address).collect();
        if addresses.is_empty() {
            return Err(UnknownNode(wanted.to_owned()));
        }
        Ok(addresses)
    }
}

impl From<NodeList> for Names {
    fn from(list: NodeList) -> Self {
        Self(names_by_address(list))
    }
}
