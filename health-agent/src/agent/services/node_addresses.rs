//! The addresses at which NodePorts are served: all of this node, or those in chosen networks, but those of its links, and
//! none of its loopback but those of `localhost`, which are for sockets of the host.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use health_net::changes::Changes;
use health_net::link;
use health_net::netlink::Handle;
use health_service::provider::ebpf::NodeAddresses;
use health_service::provider::ipvs;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::warn;

/// Time between two looks, at least: some hosts' routes change all the time.
const SHORTEST_PERIOD: Duration = Duration::from_millis(100);
/// Time until the next look after one that failed.
const RETRY: Duration = Duration::from_secs(1);

/// Those of the loopback. No packet is served there.
const LOCALHOST: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// Follows the node's addresses. Dropping it ends that.
pub(super) struct NodeAddressWatch {
    addresses: watch::Receiver<NodeAddresses>,
    task: JoinHandle<()>,
}

impl NodeAddressWatch {
    /// Follows those in `networks`, or all if there are none. Must be called in a tokio runtime, by a thread in the host's
    /// namespace.
    pub(super) async fn follow(netlink: Handle, networks: Vec<IpNet>) -> anyhow::Result<Self> {
        let mut changes = Changes::listen()?;
        let (told, addresses) = watch::channel(Arc::new(usable(&netlink, &networks).await?));
        let task = tokio::spawn(async move {
            while changes.next().await.is_ok() {
                let found = loop {
                    match usable(&netlink, &networks).await {
                        Ok(found) => break found,
                        Err(error) => {
                            warn!(%error, "cannot list the addresses of NodePorts; they stay as they were");
                            sleep(RETRY).await;
                        }
                    }
                };
                told.send_if_modified(|known| {
                    let differs = **known != found;
                    if differs {
                        *known = Arc::new(found);
                    }
                    differs
                });
                sleep(SHORTEST_PERIOD).await;
            }
        });
        Ok(Self { addresses, task })
    }

    pub(super) fn addresses(&self) -> watch::Receiver<NodeAddresses> {
        self.addresses.clone()
    }
}

impl Drop for NodeAddressWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn usable(
    netlink: &Handle,
    networks: &[IpNet],
) -> Result<BTreeSet<IpAddr>, health_net::KernelError> {
    // Where IPVS serves, or did, this device has the addresses of services.
    let of_services = link::by_name(netlink, ipvs::DEVICE).await?;
    let of_services = of_services.map(|link| link.index);
    let addresses = link::addresses(netlink).await?.into_iter();
    let addresses = addresses.filter(|carried| Some(carried.index) != of_services);
    let addresses = addresses.map(|carried| carried.address);
    let is_chosen = |address: &IpAddr| {
        networks.is_empty() || networks.iter().any(|network| network.contains(address))
    };
    let addresses = addresses.filter(is_usable).chain(LOCALHOST);
    Ok(addresses.filter(is_chosen).collect())
}

fn is_usable(address: &IpAddr) -> bool {
    let is_of_link = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !address.is_loopback() && !is_of_link
}
