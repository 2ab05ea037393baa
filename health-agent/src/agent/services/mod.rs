//! The agent's service proxy: connects sources, probes, a provider, and the servers for load balancers, supervisors and
//! metrics.

mod announcing;
mod instrumented;
pub(super) mod kept_checks;
mod node_addresses;
mod proxy;
mod proxy_parts;
mod publish;
mod readiness;
pub(super) mod reserved;
mod served;
mod sockets;
pub mod sources;
mod standing;
mod takeover;
#[cfg(test)]
mod tests;

pub(super) use self::proxy_parts::ProxyParts;
pub(super) use self::served::{Links, ServedServices, forwarding, start};
