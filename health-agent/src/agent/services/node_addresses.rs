//! The addresses at which NodePorts are served: all addresses of this node or those in chosen networks, except
//! link-local addresses. Of the loopback addresses, only those of `localhost` are included, for the host's own sockets.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use health_model::task::AbortOnDrop;
use health_net::address::is_for_others;
use health_net::changes::Changes;
use health_net::link;
use health_net::netlink::Handle;
use health_service::provider::ebpf::NodeAddresses;
use health_service::provider::ipvs;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::warn;

use super::publish::publish;
use crate::agent::check_schedule::CHANGES_PERIOD;

/// Time from a failed listing to the next attempt.
const LISTING_RETRY: Duration = Duration::from_secs(1);

/// Loopback addresses. They serve only the host's own sockets, not packets.
const LOCALHOST: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// Follows the node's addresses until it is dropped.
pub(super) struct NodeAddressWatch {
    addresses: watch::Receiver<NodeAddresses>,
    _task: AbortOnDrop,
}

impl NodeAddressWatch {
    /// Follows the addresses in `networks`, or all if it is empty. Must be called in a tokio runtime, from a thread in
    /// the host's namespace.
    pub(super) async fn follow(netlink: Handle, networks: Vec<IpNet>) -> anyhow::Result<Self> {
        let mut changes = Changes::listen()?;
        let (sender, addresses) = watch::channel(Arc::new(usable(&netlink, &networks).await?));
        let task = AbortOnDrop::spawn(async move {
            while changes.next().await.is_ok() {
                let found = loop {
                    match usable(&netlink, &networks).await {
                        Ok(found) => break found,
                        Err(error) => {
                            warn!(%error, "cannot list the NodePort addresses; keeping the previous ones");
                            sleep(LISTING_RETRY).await;
                        }
                    }
                };
                publish(&sender, found);
                sleep(CHANGES_PERIOD).await;
            }
        });
        Ok(Self {
            addresses,
            _task: task,
        })
    }

    pub(super) fn addresses(&self) -> watch::Receiver<NodeAddresses> {
        self.addresses.clone()
    }
}

async fn usable(
    netlink: &Handle,
    networks: &[IpNet],
) -> Result<BTreeSet<IpAddr>, health_net::KernelError> {
    // If IPVS is or was in use, this device carries the service addresses.
    let of_services = link::by_name(netlink, ipvs::DEVICE).await?;
    let of_services = of_services.map(|link| link.index);
    let addresses = link::addresses(netlink).await?.into_iter();
    let addresses = addresses.filter(|carried| Some(carried.index) != of_services);
    let addresses = addresses.map(|carried| carried.address);
    let usable = addresses.filter(is_for_others).chain(LOCALHOST);
    let usable = usable.filter(|address| is_chosen(address, networks));
    Ok(usable.collect())
}

/// Without networks, every address is chosen.
fn is_chosen(address: &IpAddr, networks: &[IpNet]) -> bool {
    networks.is_empty() || networks.iter().any(|network| network.contains(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_ports_are_served_at_addresses_that_others_reach_in_the_chosen_networks() {
        let chosen: Vec<IpNet> = ["172.30.0.0/24", "fd00:30::/64"]
            .iter()
            .map(|network| network.parse().unwrap())
            .collect();
        for (address, of_all, of_chosen) in [
            ("172.30.0.1", true, true),
            ("192.168.77.1", true, false),
            ("fd00:30::1", true, true),
            ("fd00:77::1", true, false),
            ("127.0.0.1", false, false),
            ("169.254.1.1", false, false),
            ("fe80::1", false, false),
        ] {
            let address: IpAddr = address.parse().unwrap();
            let is_served =
                |networks: &[IpNet]| is_for_others(&address) && is_chosen(&address, networks);
            let served = (is_served(&[]), is_served(&chosen));
            assert_eq!(served, (of_all, of_chosen), "{address}");
        }
    }
}
