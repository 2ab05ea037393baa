//! Restarts and upgrades of agents under load.

use anyhow::Context as _;
use nix::sys::signal::Signal;
use tests::upgrade::with_other_programs;

use super::load::{Load, users};
use super::{Stand, targets, wait_answered_by};

#[test]
#[ignore = "needs root"]
fn no_request_fails_while_agents_are_killed_restarted_and_upgraded() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let folder = tempfile::tempdir()?;
    let other = folder.path().join("health-agent");
    with_other_programs(&other)?;
    let service = stand.service("busy", 1);
    stand.write(&service)?;
    let targets = targets(&service);
    for client in &stand.clients {
        for target in &targets {
            wait_answered_by(&client.name, *target, &["web-1", "web-2", "web-3"])?;
        }
    }
    let load = Load::default();
    let users = users(&stand.clients, &targets, &[Load::connect, Load::stay]);
    load.during(&users, || {
        for (signal, binary) in [
            (Signal::SIGKILL, None),
            (Signal::SIGTERM, Some(other.as_path())),
            (Signal::SIGKILL, None),
        ] {
            for node in stand.bed.nodes() {
                // Whatever happens, there is load in between.
                node.kill_agent(signal)?;
                load.goes_on()
                    .with_context(|| format!("without {}", node.name()))?;
                node.take_over(binary)?;
                load.goes_on()
                    .with_context(|| format!("{} is back", node.name()))?;
            }
        }
        Ok(())
    })?;

    // What is said to the new agents is done.
    let mut fewer = service;
    fewer.endpoints[0].set_ready(false);
    stand.write(&fewer)?;
    for client in &stand.clients {
        for target in &targets {
            wait_answered_by(&client.name, *target, &["web-2", "web-3"])?;
        }
    }
    Ok(())
}
