//! How agents access etcd: with certificates and a login, and through the remaining members.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use nix::sys::signal::Signal;
use tempfile::TempDir;
use tests::bed::{Authority, Etcd, RUNTIME_ROOT, SignedCertificate};
use tests::{Bed, Node, PATIENCE, wait_for};

const SERVER: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 254);
const KEYS: &str = "/health-agent/v1/default/";
const USER: &str = "health-agent";
const PASSWORD: &str = "secret";

/// Flags of an agent that registers in the etcd that `etcd.yaml` names. The file is removed with the first node.
fn flags(index: u8) -> String {
    format!(
        "--registry etcd:{RUNTIME_ROOT}/hnode1/etcd.yaml --node-address 172.30.0.{index} \
         --pod-cidr 10.244.{index}.0/24"
    )
}

fn wait_stale(node: &Node, reason: &str) -> anyhow::Result<()> {
    wait_for(&format!("{reason:?} to be reported"), PATIENCE, || {
        let reported = node
            .stale_registry()?
            .is_some_and(|reported| reported.contains(reason));
        Ok(reported.then_some(()))
    })
}

fn wait_fresh(bed: &Bed) -> anyhow::Result<()> {
    for node in bed.nodes() {
        wait_for("etcd to be followed", PATIENCE, || {
            let known = node.listed_nodes()?.len() == bed.nodes().len();
            Ok((known && node.stale_registry()?.is_none()).then_some(()))
        })?;
    }
    Ok(())
}

fn write_signed(folder: &Path, name: &str, signed: &SignedCertificate) -> anyhow::Result<()> {
    fs::write(folder.join(format!("{name}.pem")), &signed.certificate)?;
    fs::write(folder.join(format!("{name}-key.pem")), &signed.key)?;
    Ok(())
}

/// A folder with everything that [`Etcd::start_secured`] needs.
fn certificates(authority: &Authority) -> anyhow::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("ca.pem"), authority.pem())?;
    write_signed(
        folder.path(),
        "server",
        &authority.sign(&[&SERVER.to_string()])?,
    )?;
    write_signed(folder.path(), "client", &authority.sign(&["agents"])?)?;
    Ok(folder)
}

/// Writes the settings of all agents, with the certificates in `folder`.
fn configure(url: &str, folder: &Path, password: &str) -> anyhow::Result<()> {
    let folder = folder.display();
    let settings = format!(
        "endpoints:\n- {url}\n\
         trusted-ca-file: {folder}/ca.pem\n\
         cert-file: {folder}/client.pem\n\
         key-file: {folder}/client-key.pem\n\
         username: {USER}\n\
         password: {password}\n"
    );
    fs::write(format!("{RUNTIME_ROOT}/hnode1/etcd.yaml"), settings)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn agents_log_in_with_certificates_and_report_what_is_wrong_with_them() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .registry(flags)
        .without_agents()
        .start()?;
    let authority = Authority::new("the bed's")?;
    let folder = certificates(&authority)?;
    let mut etcd = Etcd::start_secured(&bed, SERVER, folder.path())?;
    etcd.require_login(USER, PASSWORD, KEYS)?;
    configure(etcd.url(), folder.path(), PASSWORD)?;
    for node in bed.nodes() {
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    wait_fresh(&bed)?;

    let own = bed.node(1);
    own.wait_kept(bed.nodes())?;

    // The agent rereads settings and certificates for each connection.
    configure(etcd.url(), folder.path(), "wrong")?;
    own.kill_agent(Signal::SIGKILL)?;
    own.start_agent()?;
    wait_stale(own, "invalid user ID or password")?;
    configure(etcd.url(), folder.path(), PASSWORD)?;
    wait_fresh(&bed)?;

    // The server rejects clients whose certificate is from another authority.
    let foreign = Authority::new("somebody else's")?.sign(&["agents"])?;
    write_signed(folder.path(), "client", &foreign)?;
    own.kill_agent(Signal::SIGKILL)?;
    own.start_agent()?;
    wait_stale(own, "")?;
    assert_eq!(own.listed_nodes()?.len(), 2, "what was known before");
    write_signed(folder.path(), "client", &authority.sign(&["agents"])?)?;
    wait_fresh(&bed)?;
    bed.wait_all_reachable(PATIENCE)?;
    // Dropped before etcd, while its nodes can still deregister.
    drop(bed);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn news_arrive_by_the_members_that_are_left() -> anyhow::Result<()> {
    let bed = Bed::builder().registry(flags).without_agents().start()?;
    let mut members = Etcd::start_members(&bed, SERVER, 3)?;
    let urls: Vec<_> = members
        .iter()
        .map(|member| format!("- {}\n", member.url()))
        .collect();
    let settings = format!("endpoints:\n{}", urls.concat());
    fs::write(format!("{RUNTIME_ROOT}/hnode1/etcd.yaml"), settings)?;
    for node in bed.nodes() {
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    wait_fresh(&bed)?;

    // Kill each member once, so that every agent's own member and the leader are among them.
    for dead in 0..members.len() {
        members[dead].kill()?;
        let name = format!("news{dead}");
        let record = format!(
            r#"{{"name":"{name}","cluster":"default","addresses":["172.30.0.{}"]}}"#,
            200 + dead
        );
        let left = &members[(dead + 1) % members.len()];
        wait_for("the members that are left to agree", PATIENCE, || {
            let put = left.try_put(&format!("{KEYS}nodes/{name}"), &record)?;
            Ok((put.code == Some(0)).then_some(()))
        })?;
        for node in bed.nodes() {
            wait_for("the news", PATIENCE, || {
                let known = node.listed_nodes()?.contains(&format!("default/{name}"));
                Ok((known && node.stale_registry()?.is_none()).then_some(()))
            })?;
            let own: Vec<_> = bed.nodes().iter().map(Node::full_name).collect();
            let listed = node.listed_nodes()?;
            assert!(own.iter().all(|name| listed.contains(name)), "{listed:?}");
        }
        members[dead].restart()?;
    }
    drop(bed);
    Ok(())
}
