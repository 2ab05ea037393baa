//! The faults: how to cause and undo each of them, which targets it breaks, and the expected diagnosis.

use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use health_model::api::{PathKind, Protocol};
use nix::sys::signal::Signal;

use crate::bed::FABRIC;
use crate::process::{run, run_with_input};
use crate::{Node, wait_for};

/// How long causing a fault may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// A fault of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The peer's cable is pulled.
    LinkDown,
    /// The peer silently drops all incoming packets.
    BlackHole,
    /// The peer's agent is killed.
    AgentKilled,
    /// The veth pair of the peer's health endpoint is gone. A foreign device has its name: the agent does not touch
    /// this device, so it cannot repair the endpoint.
    EndpointRemoved,
    /// The peer's firewall rejects probes with an ICMP error, or in every other round HTTP probes with a reset.
    Rejected,
}

impl Fault {
    pub(super) const ALL: [Self; 5] = [
        Self::LinkDown,
        Self::BlackHole,
        Self::AgentKilled,
        Self::EndpointRemoved,
        Self::Rejected,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::LinkDown => "link down",
            Self::BlackHole => "black hole",
            Self::AgentKilled => "agent killed",
            Self::EndpointRemoved => "endpoint veth removed",
            Self::Rejected => "firewall reject",
        }
    }

    /// Returns the fault with this name on the command line, such as `link-down`.
    pub(super) fn by_name(name: &str) -> anyhow::Result<Self> {
        let named = |fault: Self| fault.name().replace(' ', "-");
        Self::ALL
            .into_iter()
            .find(|fault| named(*fault) == name)
            .with_context(|| {
                let names = Self::ALL.map(named).join(", ");
                format!("no fault {name}; the faults are: {names}")
            })
    }

    /// The expected diagnosis.
    pub(super) fn cause(self) -> &'static str {
        match self {
            Self::LinkDown | Self::BlackHole => "node-down",
            Self::AgentKilled => "agent-down",
            Self::EndpointRemoved => "endpoint-datapath-down",
            Self::Rejected => "rejected",
        }
    }

    /// Whether the fault makes targets of this kind unreachable.
    pub(super) fn breaks(self, path: PathKind, protocol: Protocol) -> bool {
        match self {
            Self::LinkDown | Self::BlackHole | Self::Rejected => true,
            Self::AgentKilled => protocol == Protocol::Http,
            Self::EndpointRemoved => path == PathKind::Endpoint,
        }
    }

    /// Causes the fault at `node`, for the `round`th time.
    pub(super) fn make(self, node: &Node, round: u32) -> anyhow::Result<()> {
        match self {
            Self::LinkDown => set_link(node, "down"),
            Self::BlackHole => firewall(
                node,
                "chain in { type filter hook prerouting priority raw; iifname eth0 drop; }",
            ),
            Self::AgentKilled => node.kill_agent(Signal::SIGKILL),
            Self::EndpointRemoved => take_endpoint(node),
            Self::Rejected => {
                let http = match round % 2 {
                    0 => "icmp admin-prohibited",
                    _ => "tcp reset",
                };
                let rules = format!(
                    "iifname eth0 icmp type echo-request reject with icmp admin-prohibited; \
                     iifname eth0 tcp dport 4240 reject with {http};"
                );
                firewall(
                    node,
                    &format!(
                        "chain in {{ type filter hook input priority 0; {rules} }}\n\
                         chain forward {{ type filter hook forward priority 0; {rules} }}"
                    ),
                )
            }
        }
        .with_context(|| format!("cannot cause {} at {}", self.name(), node.name()))
    }

    /// Undoes the fault.
    pub(super) fn undo(self, node: &Node) -> anyhow::Result<()> {
        match self {
            Self::LinkDown => set_link(node, "up"),
            Self::BlackHole | Self::Rejected => node.exec("nft delete table ip fault").map(drop),
            Self::AgentKilled => node.start_agent(),
            Self::EndpointRemoved => node.exec("ip link delete lxc_health").map(drop),
        }
        .with_context(|| format!("cannot undo {} at {}", self.name(), node.name()))
    }
}

/// Adds chains in a dedicated table to the node's firewall.
pub(super) fn firewall(node: &Node, chains: &str) -> anyhow::Result<()> {
    run_with_input(
        node.command("nft").args(["-f", "-"]),
        &format!("table ip fault {{\n{chains}\n}}\n"),
    )?
    .success()?;
    Ok(())
}

fn set_link(node: &Node, state: &str) -> anyhow::Result<()> {
    let mut ip = Command::new("ip");
    ip.args(["-netns", FABRIC, "link", "set", node.name(), state]);
    run(&mut ip)?.success()?;
    Ok(())
}

fn take_endpoint(node: &Node) -> anyhow::Result<()> {
    let taken = "link delete lxc_health\nlink add lxc_health type bridge\n";
    // The agent may be faster and recreate its own device.
    wait_for("the name to be in use", PATIENCE, || {
        run_with_input(node.command("ip").args(["-batch", "-"]), taken)?.success()?;
        Ok(Some(()))
    })
}
