//! Backends are drained and replaced under load.

use anyhow::ensure;
use tests::bed::command_in;
use tests::process::run;
use tests::served::{Backend, PORT, ServiceManifest};
use tests::{PATIENCE, wait_for};

use super::load::{Load, users};
use super::{Stand, targets, wait_answered_by};

/// Number of connections that are open at the backend.
fn connections(backend: &Backend) -> anyhow::Result<usize> {
    let mut ss = command_in(&backend.member.name, "ss");
    ss.args([
        "-Htn",
        "state",
        "established",
        "sport",
        "=",
        &format!(":{PORT}"),
    ]);
    Ok(run(&mut ss)?.success()?.lines().count())
}

#[test]
#[ignore = "needs root"]
fn no_request_fails_while_each_backend_is_drained_and_replaced() -> anyhow::Result<()> {
    let Stand {
        mut backends,
        clients,
        manifests,
        bed,
        ..
    } = Stand::start()?;
    let mut service = ServiceManifest::new("rolling", 1).of(&backends);
    manifests.write(&service)?;
    let targets = targets(&service);
    let answered_by = |names: &[&str]| -> anyhow::Result<()> {
        for client in &clients {
            for target in &targets {
                wait_answered_by(&client.name, *target, names)?;
            }
        }
        Ok(())
    };
    answered_by(&["web-1", "web-2", "web-3"])?;
    let load = Load::default();
    let users = users(&clients, &targets, &[Load::connect, Load::keep_alive]);
    load.during(&users, || {
        for index in 0..backends.len() {
            // As for a terminating pod: it gets no new connections, and existing ones continue.
            let ending = &mut service.endpoints[index];
            (ending.ready, ending.terminating) = (false, true);
            manifests.write(&service)?;
            let names: Vec<_> = backends.iter().map(|one| one.name.clone()).collect();
            let mut others: Vec<_> = names.iter().map(String::as_str).collect();
            others.remove(index);
            answered_by(&others)?;
            wait_for("the last connection to be closed", PATIENCE, || {
                let open = connections(&backends[index])?;
                ensure!(open == 0, "{open} connections to {}", names[index]);
                Ok(Some(()))
            })?;
            service.endpoints.remove(index);
            manifests.write(&service)?;
            answered_by(&others)?;
            let node = bed
                .nodes()
                .iter()
                .find(|node| node.name() == backends[index].node);
            let node = node.expect("it was started there");
            // The new backend needs a new name, which is also the name of its network namespace.
            let new = Backend::start(node, &format!("{}-new", names[index]), "")?;
            service.endpoints.insert(index, new.slice_endpoint());
            drop(std::mem::replace(&mut backends[index], new));
            manifests.write(&service)?;
            let names: Vec<_> = backends.iter().map(|one| one.name.as_str()).collect();
            answered_by(&names)?;
            load.goes_on(format!("{} is replaced", names[index]))?;
        }
        Ok(())
    })
}
