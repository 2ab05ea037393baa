//! The inputs that all parts of an agent share while it starts.

use health_net::netlink::Handle;
use health_registry::nodes::Node;
use health_settings::Settings;

/// Settings, own node and kernel access, shared by all parts while the agent starts.
pub(super) struct StartContext<'a> {
    pub(super) config: &'a Settings,
    /// This node's entry.
    pub(super) own: Node,
    /// Netlink handle in the host's network namespace.
    pub(super) netlink: Handle,
}
