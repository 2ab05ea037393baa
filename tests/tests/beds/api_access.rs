//! Who reaches an agent's API: other machines over TLS.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use anyhow::{Context as _, ensure};
use tests::bed::{Authority, SignedCertificate};
use tests::{Bed, PATIENCE, wait_for};

const PORT: u16 = 4245;

fn write(folder: &Path, name: &str, signed: &SignedCertificate) -> anyhow::Result<()> {
    fs::write(folder.join(format!("{name}.pem")), &signed.certificate)?;
    fs::write(folder.join(format!("{name}-key.pem")), &signed.key)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_agent_is_reached_from_another_node_where_readers_only_read() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .without_agents()
        .start()?;
    let (far, near) = (bed.node(1), bed.node(2));
    let addresses: [IpAddr; 2] = [far.ipv4().into(), far.ipv6().context("no IPv6")?.into()];
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    let authority = |name: &str| -> anyhow::Result<Authority> {
        let authority = Authority::new(name)?;
        fs::write(folder.join(format!("{name}-ca.pem")), authority.pem())?;
        Ok(authority)
    };
    let servers = authority("servers")?;
    let admins = authority("admins")?;
    let readers = authority("readers")?;
    let names = addresses.map(|address| address.to_string());
    write(folder, "server", &servers.sign(&[&names[0], &names[1]])?)?;
    write(folder, "admin", &admins.sign(&["admin"])?)?;
    write(folder, "reader", &readers.sign(&["reader"])?)?;
    let files = folder.display();
    far.start_agent_with(&format!(
        "--api-address 0.0.0.0:{PORT},[::]:{PORT} --api-certificate {files}/server.pem \
         --api-key {files}/server-key.pem --api-client-ca {files}/admins-ca.pem \
         --api-client-ca-read-only {files}/readers-ca.pem"
    ))?;
    let ask = |address: IpAddr, who: &str, words: &str| {
        let url = SocketAddr::new(address, PORT);
        near.cli(&format!(
            "{words} --api-url https://{url} --api-ca {files}/servers-ca.pem \
             --api-client-certificate {files}/{who}.pem --api-client-key {files}/{who}-key.pem"
        ))
    };
    for address in addresses {
        wait_for("the agent to be up", PATIENCE, || {
            let listed = ask(address, "reader", "policy mode")?;
            Ok((listed.code == Some(0)).then_some(()))
        })?;
        let settings = ask(address, "reader", "config -o json")?.success()?;
        ensure!(settings.contains(far.name()), "{settings}");
        let refused = ask(address, "reader", "policy mode always")?;
        ensure!(refused.code == Some(1), "{refused:?}");
        ensure!(refused.stderr.contains("may only read"), "{refused:?}");
        ask(address, "admin", "policy mode always")?.success()?;
    }
    let mode = far.cli("policy mode")?.success()?;
    ensure!(mode.contains("always"), "{mode}");
    Ok(())
}
