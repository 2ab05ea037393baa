//! The services' XDP program on the uplinks of real nodes: how it is attached, kept and removed, and which packets it
//! forwards.

mod flows;
mod life;

use health_net::xdp::{self, Mode};
use nix::net::if_::if_nametoindex;
use tests::served::Manifests;
use tests::{Bed, Node, PATIENCE, wait_for};

/// The device to which the program is attached.
const UPLINK: &str = "eth0";

/// The XDP programs on a device of a node.
fn programs(node: &Node, device: &str) -> anyhow::Result<Vec<(Mode, u32)>> {
    let look = || std::io::Result::Ok(xdp::device(if_nametoindex(device)?)?.programs);
    Ok(node.run_in(look)??)
}

/// Waits until the uplink has exactly one program, in this mode and different from `former`.
fn wait_program(node: &Node, mode: Mode, former: Option<u32>) -> anyhow::Result<u32> {
    wait_for("an XDP program", PATIENCE, || {
        match programs(node, UPLINK)?.as_slice() {
            &[(found, id)] if found == mode && Some(id) != former => Ok(Some(id)),
            found => anyhow::bail!("{found:?}"),
        }
    })
}

/// Flags for an agent that serves the services in a folder with XDP.
fn flags(manifests: &Manifests, mode: &str) -> String {
    format!("{} --service-xdp {mode}", manifests.agent_args())
}

/// A bed with one node, whose agent is not running yet.
fn bed(manifests: &Manifests, mode: &str) -> anyhow::Result<Bed> {
    Bed::builder()
        .nodes(1)
        .without_agents()
        .agent_args(&flags(manifests, mode))
        .start()
}
