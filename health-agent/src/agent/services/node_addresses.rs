//! The addresses at which NodePorts are served: all of this node but those of its loopback and of its links.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_net::changes::Changes;
use health_net::link;
use health_net::netlink::Handle;
use health_service::provider::ebpf::NodeAddresses;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::warn;

/// Time between two looks, at least: some hosts' routes change all the time.
const SHORTEST_PERIOD: Duration = Duration::from_millis(100);
/// Time until the next look after one that failed.
const RETRY: Duration = Duration::from_secs(1);

/// Follows the node's addresses. Dropping it ends that.
pub(super) struct NodeAddressWatch {
    addresses: watch::Receiver<NodeAddresses>,
    task: JoinHandle<()>,
}

impl NodeAddressWatch {
    /// Must be called in a tokio runtime, by a thread in the host's namespace.
    pub(super) async fn follow(netlink: Handle) -> anyhow::Result<Self> {
        let mut changes = Changes::listen()?;
        let (told, addresses) = watch::channel(Arc::new(usable(&netlink).await?));
        let task = tokio::spawn(async move {
            while changes.next().await.is_ok() {
                let found = loop {
                    match usable(&netlink).await {
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

async fn usable(netlink: &Handle) -> Result<BTreeSet<IpAddr>, health_net::KernelError> {
    let addresses = link::addresses(netlink).await?.into_iter();
    let addresses = addresses.map(|carried| carried.address);
    Ok(addresses.filter(is_usable).collect())
}

fn is_usable(address: &IpAddr) -> bool {
    let is_of_link = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !address.is_loopback() && !is_of_link
}
