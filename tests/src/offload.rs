//! Offloads of devices in other namespaces, as `ethtool -K` sets them.

use anyhow::Context as _;
pub use health_net::ethtool::Offload;
use health_net::ethtool::set_offload;
use health_net::netns::NetNs;

/// Sets an offload of a device in a named namespace.
pub fn set(namespace: &str, device: &str, offload: Offload, is_on: bool) -> anyhow::Result<()> {
    NetNs::open(namespace)?
        .run_in(|| set_offload(device, offload, is_on))?
        .with_context(|| format!("{offload:?} of {device} in {namespace}"))
}
