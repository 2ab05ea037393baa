//! Agents are restarted and upgraded under load.

use anyhow::{Context as _, ensure};
use health_common::LAYOUT_VERSION;
use nix::sys::signal::Signal;
use tests::upgrade::{pretend_layout, with_other_programs};

use super::load::{Load, users};
use super::{Stand, targets, wait_answered_by};

/// Sizes of the service maps, first larger than the default and then smaller. Each comes with the expected size of the
/// backend map: an eighth more than one namespace may use.
const SIZES: [(u32, &str); 2] = [
    (
        147_456,
        "--service-frontend-max-entries 131072 --service-backend-max-entries 131072 --service-maglev-tables 48 \
         --service-affinity-max-entries 131072 --service-flow-max-entries 262144 \
         --service-flow-any-max-entries 131072 --service-socket-max-entries 131072",
    ),
    (
        1_152,
        "--service-frontend-max-entries 1024 --service-backend-max-entries 1024 --service-maglev-tables 2 \
         --service-affinity-max-entries 1024 --service-flow-max-entries 65536 \
         --service-flow-any-max-entries 32768 --service-socket-max-entries 16384",
    ),
];

#[test]
#[ignore = "needs root"]
fn no_request_fails_while_agents_are_killed_restarted_upgraded_and_resized() -> anyhow::Result<()> {
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
                // There is load while the agent is down and after it is back.
                node.kill_agent(signal)?;
                load.goes_on(format!("{signal} for {}", node.name()))?;
                node.take_over(binary)?;
                load.goes_on(format!("{} is back", node.name()))?;
            }
        }
        for node in stand.bed.nodes() {
            node.kill_agent(Signal::SIGKILL)?;
            pretend_layout(node, LAYOUT_VERSION - 1)?;
            load.goes_on(format!("maps of {} are of an older layout", node.name()))?;
            node.take_over(None)?;
            load.goes_on(format!("{} is back with new maps", node.name()))?;
        }
        for (backends, sizes) in SIZES {
            for node in stand.bed.nodes() {
                node.kill_agent(Signal::SIGKILL)?;
                load.goes_on(format!("{} is killed to have {sizes}", node.name()))?;
                node.take_over_with(sizes)?;
                load.goes_on(format!("{} is back with {sizes}", node.name()))?;
                let maps = node.listing("bpf map list")?;
                let maps = maps.as_array().context("the maps are no list")?;
                let map = maps.iter().find(|map| map["name"] == "HEALTH_BACKENDS");
                let room = map.context("no HEALTH_BACKENDS")?["max-entries"].as_u64();
                ensure!(room == Some(backends.into()), "{room:?}");
            }
        }
        Ok(())
    })?;

    // Checks that the new agents process changes.
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
