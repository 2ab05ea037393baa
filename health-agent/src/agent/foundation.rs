//! What every part of an agent is built on.

use health_net::netlink::Handle;
use health_registry::nodes::Node;
use health_settings::Settings;

/// What every part of an agent is built on.
pub(super) struct Foundation<'a> {
    pub(super) config: &'a Settings,
    /// This node's entry.
    pub(super) own: Node,
    /// The kernel, in the host's network namespace.
    pub(super) netlink: Handle,
}
