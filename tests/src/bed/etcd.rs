//! An etcd server for a bed's nodes, on an address of the bridge.

use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use super::Bed;
use super::fabric::{FABRIC, add_server_address, netns_path};
use crate::process::{Ran, run, run_with_input};
use crate::{PATIENCE, wait_for};

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// A server with its data. Dropping it kills the server and deletes the data.
#[derive(Debug)]
pub struct Etcd {
    address: Ipv4Addr,
    flags: Vec<String>,
    data: TempDir,
    server: Option<Child>,
}

impl Etcd {
    /// Starts one on `address`, which must be in the nodes' network; `flags` are words separated by
    /// blanks. Waits until it serves.
    pub fn start(_bed: &Bed, address: Ipv4Addr, flags: &str) -> anyhow::Result<Self> {
        add_server_address(address)?;
        let mut etcd = Self {
            address,
            flags: flags.split_whitespace().map(str::to_owned).collect(),
            data: tempfile::Builder::new().prefix("hetcd-").tempdir()?,
            server: None,
        };
        etcd.restart()?;
        Ok(etcd)
    }

    /// Starts it again with its data, and waits until it serves.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        ensure!(self.server.is_none(), "etcd runs already");
        let client = format!("http://{}:{CLIENT_PORT}", self.address);
        let peer = format!("http://{}:{PEER_PORT}", self.address);
        let server = in_fabric("setpriv")
            // It must not outlive the test that it serves.
            .args(["--pdeathsig", "KILL", "etcd", "--name", "hetcd"])
            .arg("--data-dir")
            .arg(self.data.path())
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("hetcd={peer}")])
            .args(["--log-level", "error"])
            .args(&self.flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot run etcd")?;
        self.server = Some(server);
        wait_for("etcd to serve", PATIENCE, || {
            Ok((self.ctl("get nothing")?.code == Some(0)).then_some(()))
        })
    }

    /// Kills it at once, as a power cut would.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut server) = self.server.take() {
            server.kill().context("cannot kill etcd")?;
            server.wait().context("cannot wait for etcd")?;
        }
        Ok(())
    }

    /// Runs etcdctl, words separated by blanks.
    pub fn ctl(&self, words: &str) -> anyhow::Result<Ran> {
        run(self.ctl_command().args(words.split_whitespace()))
    }

    /// Writes a key.
    pub fn put(&self, key: &str, value: &str) -> anyhow::Result<()> {
        self.try_put(key, value)?.success().map(drop)
    }

    /// Tries to write a key.
    pub fn try_put(&self, key: &str, value: &str) -> anyhow::Result<Ran> {
        run_with_input(self.ctl_command().args(["put", key]), value)
    }

    /// The keys that begin with `prefix`.
    pub fn keys(&self, prefix: &str) -> anyhow::Result<Vec<String>> {
        let listed = self.ctl(&format!("get --prefix --keys-only {prefix}"))?;
        let listed = listed.success()?;
        Ok(listed.split_whitespace().map(str::to_owned).collect())
    }

    /// The store's revision.
    pub fn revision(&self) -> anyhow::Result<i64> {
        let status = self.ctl("endpoint status -w json")?.success()?;
        let status: serde_json::Value = serde_json::from_str(&status)?;
        let revision = &status[0]["Status"]["header"]["revision"];
        revision
            .as_i64()
            .with_context(|| format!("etcdctl tells no revision: {status}"))
    }

    /// Ends every lease, and with it what is bound to it. How many there were.
    pub fn revoke_leases(&self) -> anyhow::Result<usize> {
        let listed = self.ctl("lease list")?.success()?;
        let leases: Vec<&str> = listed.lines().skip(1).collect();
        for lease in &leases {
            self.ctl(&format!("lease revoke {lease}"))?.success()?;
        }
        Ok(leases.len())
    }

    fn ctl_command(&self) -> Command {
        let mut command = in_fabric("etcdctl");
        command
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints=http://{}:{CLIENT_PORT}", self.address))
            .arg("--command-timeout=5s");
        command
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            crate::process::tell(format_args!("bed: {error:#}"));
        }
    }
}

fn in_fabric(program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", netns_path(FABRIC).display()))
        .args(["--", program]);
    command
}
