//! Services and policy: egress rules of the client see the backend, and ingress rules of the backend see the client.

use std::fs;

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use tempfile::TempDir;
use tests::served::{Datagrams, ServiceManifest, curl};
use tests::{Member, Node, PATIENCE, wait_for};

use super::{
    Mode, SOON, Stand, counted, targets, trace, wait_answered_by, wait_datagrams_answered_by,
};

/// The names of the backends.
pub(crate) const NAMES: [&str; 3] = ["web-1", "web-2", "web-3"];
/// Only friends and caged endpoints reach the backends, at the backends' port. Caged endpoints may reach only other
/// endpoints, and the backends at the service's port, on which no backend listens.
const RULES: &str = r#"[
{"labels": ["name=web"], "endpointSelector": {"matchLabels": {"app": "web"}},
 "ingress": [{"fromEndpoints": [{"matchLabels": {"role": "friend"}}, {"matchLabels": {"role": "caged"}}],
              "toPorts": [{"ports": [{"port": "8080", "protocol": "ANY"}]}]}]},
{"labels": ["name=caged"], "endpointSelector": {"matchLabels": {"role": "caged"}},
 "egress": [{"toEndpoints": [{"matchLabels": {"app": "other"}}]},
            {"toEndpoints": [{"matchLabels": {"app": "web"}}], "toPorts": [{"ports": [{"port": "80", "protocol": "ANY"}]}]}]},
{"labels": ["name=friend"], "endpointSelector": {"matchLabels": {"role": "friend"}},
 "egress": [{"toEndpoints": [{"matchLabels": {"app": "web"}}], "toPorts": [{"ports": [{"port": "8080", "protocol": "ANY"}]}]}]}
]"#;

/// Checks that nothing from a client gets through and that this node's policy drops its packets.
pub(crate) fn is_kept_out(
    client: &Member,
    service: &ServiceManifest,
    node: &Node,
) -> anyhow::Result<()> {
    for target in targets(service) {
        let before = counted(node, Reason::PolicyDenied)?;
        wait_for("packets to be dropped", PATIENCE, || {
            let answer = Datagrams::open(&client.name, target)?.ask(SOON)?;
            ensure!(answer.is_none(), "{answer:?}");
            Ok((counted(node, Reason::PolicyDenied)? > before).then_some(()))
        })
        .with_context(|| format!("{} to {target}", client.name))?;
        let connect = || std::net::TcpStream::connect_timeout(&target, SOON);
        let connected = client.netns.run_in(connect)?;
        ensure!(connected.is_err(), "{} to {target}", client.name);
    }
    Ok(())
}

/// Backends that only friends may reach, and a foe and a caged endpoint on the second node. All clients reach the
/// backends until the rules are in force.
pub(crate) struct Guarded {
    pub(crate) stand: Stand,
    /// A service with all backends.
    pub(crate) service: ServiceManifest,
    /// A service with only the first backend.
    pub(crate) own: ServiceManifest,
    pub(crate) foe: Member,
    pub(crate) caged: Member,
    /// Holds the identities that all agents share.
    _folder: TempDir,
}

impl Guarded {
    pub(crate) fn start(mode: Mode, rules: &str, agent: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let store = folder.path().join("identities.json");
        let stand = Stand::start_with(
            mode,
            ["--label app=web", "--label role=friend"],
            &format!("--identity-store file:{} {agent}", store.display()),
        )?;
        let (here, there) = (stand.bed.node(1), stand.bed.node(2));
        let service = stand.service("guarded", 1);
        let own = ServiceManifest::new("guarded-1", 2).of(&stand.backends[..1]);
        for service in [&service, &own] {
            stand.write(service)?;
        }
        let foe = Member::on(there, "foe", "--label role=foe --name foe")?;
        let caged = Member::on(there, "caged", "--label role=caged --name caged")?;
        for client in stand.clients.iter().chain([&foe, &caged]) {
            for target in targets(&service) {
                wait_answered_by(&client.name, target, &NAMES)?;
            }
        }
        let document = folder.path().join("policy.json");
        fs::write(&document, rules)?;
        for node in [here, there] {
            let said = node.cli(&format!("policy import {}", document.display()))?;
            let said = said.success()?;
            ensure!(said.contains("is in force after"), "{said}");
        }
        Ok(Self {
            stand,
            service,
            own,
            foe,
            caged,
            _folder: folder,
        })
    }
}

#[test]
#[ignore = "needs root"]
fn nothing_is_reached_through_a_service_that_policy_refuses() -> anyhow::Result<()> {
    refused("")
}

/// Checks, with these agent flags, that friends reach the backends and others do not.
pub(super) fn refused(agent: &str) -> anyhow::Result<()> {
    let Guarded {
        stand,
        service,
        own,
        foe,
        caged,
        _folder,
    } = Guarded::start(Mode::Ebpf, RULES, agent)?;
    let (here, there) = (stand.bed.node(1), stand.bed.node(2));
    for client in &stand.clients {
        for target in targets(&service) {
            let answers = curl(&client.name, target, 30)?;
            ensure!(answers.all_from().is_some(), "{}: {answers}", client.name);
            trace::is_admitted(stand.node_of(client), client, target, "name=friend")?;
            wait_datagrams_answered_by(&client.name, target, &NAMES)?;
        }
    }
    // The backend's node drops the foe's packets, and the caged endpoint's own node drops those of the caged endpoint.
    is_kept_out(&foe, &own, here)?;
    let near = ServiceManifest::new("guarded-2", 3).of(&stand.backends[1..2]);
    stand.write(&near)?;
    for target in targets(&near) {
        wait_answered_by(&stand.clients[1].name, target, &["web-2"])?;
    }
    is_kept_out(&foe, &near, there)?;
    is_kept_out(&caged, &own, there)?;
    for target in targets(&service) {
        // One of the three backends is on the other node, which applies its own policy.
        trace::is_refused(there, &foe, target, ["partly", "ingress"])?;
        trace::is_refused(there, &caged, target, ["refused", "egress"])?;
    }
    Ok(())
}
