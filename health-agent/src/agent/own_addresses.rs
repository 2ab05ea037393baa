//! Passes the host's own addresses to the programs, which drop packets from outside with such a source address.

use std::time::Duration;

use anyhow::Context as _;
use health_datapath::own::{OwnAddress, OwnAddresses};
use health_model::activity::Reporter;
use health_model::task::AbortOnDrop;
use health_net::changes::Changes;
use health_net::netlink::Handle;
use health_net::route;
use tokio::time::sleep;
use tracing::warn;

use super::check_schedule::CHANGES_PERIOD;

/// Time from a failure to the next attempt.
const RETRY: Duration = Duration::from_secs(1);

/// Updates the map with the host's current addresses.
pub(super) async fn note(netlink: &Handle, map: &mut OwnAddresses) -> anyhow::Result<()> {
    let found = route::to_this_host(netlink).await?;
    let found = found.into_iter();
    let own = found.map(|(prefix, device)| OwnAddress { prefix, device });
    Ok(map.set_all(own)?)
}

/// Follows the host's addresses until the result is dropped. Must be called in a tokio runtime, from a thread in the
/// host's namespace.
pub(super) async fn follow(
    netlink: Handle,
    mut map: OwnAddresses,
    reporter: Reporter,
) -> anyhow::Result<AbortOnDrop> {
    let mut changes = Changes::listen()?;
    note(&netlink, &mut map)
        .await
        .context("cannot pass the host's addresses to the programs")?;
    reporter.succeeded();
    Ok(AbortOnDrop::spawn(async move {
        loop {
            if let Err(error) = changes.next().await {
                reporter.failed(&error);
                warn!(%error, "no longer following changes to the host's addresses");
                return;
            }
            while let Err(error) = note(&netlink, &mut map).await {
                reporter.failed(&error);
                warn!(%error, "cannot pass the host's current addresses to the programs; it will be retried");
                sleep(RETRY).await;
            }
            reporter.succeeded();
            sleep(CHANGES_PERIOD).await;
        }
    }))
}
