//! An etcd server for a bed's nodes, listening on an address of the bridge.

use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::Bed;
use super::fabric::{FABRIC, add_server_address, netns_path};
use crate::process::{RunOutput, run, run_with_input};
use crate::{PATIENCE, wait_for};

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
/// Distance between the ports of consecutive members.
const PORTS_APART: u16 = 100;

/// A server and its data. Dropping this kills the server and deletes the data.
#[derive(Debug)]
pub struct Etcd {
    name: String,
    /// URL for clients.
    client_url: String,
    /// URL for the other members.
    peer_url: String,
    /// All members, in the format of etcd's flag `--initial-cluster`.
    cluster: String,
    flags: Vec<String>,
    /// Flags for etcdctl.
    client_flags: Vec<String>,
    data: TempDir,
    server: Option<Child>,
}

impl Etcd {
    /// Starts a server on `address`, which must be in the nodes' network, and waits until it serves. `flags` are
    /// separated by spaces.
    pub fn start(_bed: &Bed, address: Ipv4Addr, flags: &str) -> anyhow::Result<Self> {
        let flags = flags.split_whitespace().map(str::to_owned).collect();
        Self::start_alone(address, "http", flags, Vec::new())
    }

    /// Like [`Self::start`], but the server only speaks TLS and requires a client certificate. `folder` holds
    /// `ca.pem`, `server.pem`, `client.pem` and the keys `server-key.pem` and `client-key.pem`.
    pub fn start_secured(_bed: &Bed, address: Ipv4Addr, folder: &Path) -> anyhow::Result<Self> {
        let file = |flag: &str, name: &str| format!("--{flag}={}", folder.join(name).display());
        let flags = vec![
            "--client-cert-auth".to_owned(),
            file("trusted-ca-file", "ca.pem"),
            file("cert-file", "server.pem"),
            file("key-file", "server-key.pem"),
        ];
        let client_flags = vec![
            file("cacert", "ca.pem"),
            file("cert", "client.pem"),
            file("key", "client-key.pem"),
        ];
        Self::start_alone(address, "https", flags, client_flags)
    }

    fn start_alone(
        address: Ipv4Addr,
        scheme: &str,
        flags: Vec<String>,
        client_flags: Vec<String>,
    ) -> anyhow::Result<Self> {
        add_server_address(address)?;
        let mut etcd = Self::member(address, 0, scheme)?;
        etcd.cluster = etcd.as_member();
        etcd.flags = flags;
        etcd.client_flags = client_flags;
        etcd.restart()?;
        Ok(etcd)
    }

    /// Starts a cluster of `count` members and waits until each serves.
    pub fn start_members(_bed: &Bed, address: Ipv4Addr, count: u16) -> anyhow::Result<Vec<Self>> {
        add_server_address(address)?;
        let members = (0..count).map(|index| Self::member(address, index, "http"));
        let mut members = members.collect::<anyhow::Result<Vec<_>>>()?;
        let all: Vec<_> = members.iter().map(Self::as_member).collect();
        for member in &mut members {
            member.cluster = all.join(",");
            // No member serves until a majority runs.
            member.spawn()?;
        }
        members.iter().try_for_each(Self::wait_serving)?;
        Ok(members)
    }

    fn member(address: Ipv4Addr, index: u16, scheme: &str) -> anyhow::Result<Self> {
        let port = |port: u16| port + index * PORTS_APART;
        Ok(Self {
            name: format!("hetcd{index}"),
            client_url: format!("{scheme}://{address}:{}", port(CLIENT_PORT)),
            peer_url: format!("http://{address}:{}", port(PEER_PORT)),
            cluster: String::new(),
            flags: Vec::new(),
            client_flags: Vec::new(),
            data: tempfile::Builder::new().prefix("hetcd-").tempdir()?,
            server: None,
        })
    }

    fn as_member(&self) -> String {
        format!("{}={}", self.name, self.peer_url)
    }

    /// The server's URL for clients.
    pub fn url(&self) -> &str {
        &self.client_url
    }

    /// Restarts the server with its data and waits until it serves.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.spawn()?;
        self.wait_serving()
    }

    fn spawn(&mut self) -> anyhow::Result<()> {
        ensure!(self.server.is_none(), "etcd is already running");
        let server = in_fabric("setpriv")
            // The server must not outlive its test.
            .args(["--pdeathsig", "KILL", "etcd", "--name", &self.name])
            .arg("--data-dir")
            .arg(self.data.path())
            .args(["--listen-client-urls", &self.client_url])
            .args(["--advertise-client-urls", &self.client_url])
            .args(["--listen-peer-urls", &self.peer_url])
            .args(["--initial-advertise-peer-urls", &self.peer_url])
            .args(["--initial-cluster", &self.cluster])
            .args(["--log-level", "error"])
            .args(&self.flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot run etcd")?;
        self.server = Some(server);
        Ok(())
    }

    fn wait_serving(&self) -> anyhow::Result<()> {
        wait_for("etcd to serve", PATIENCE, || {
            Ok((self.ctl("get nothing")?.code == Some(0)).then_some(()))
        })
    }

    /// Enables authentication: `name` with `password` gets access to the keys below `prefix`. etcdctl itself logs in as
    /// root.
    pub fn require_login(
        &mut self,
        name: &str,
        password: &str,
        prefix: &str,
    ) -> anyhow::Result<()> {
        for command in [
            "user add root:root".to_owned(),
            "user grant-role root root".to_owned(),
            format!("user add {name}:{password}"),
            format!("role add {name}"),
            format!("role grant-permission --prefix=true {name} readwrite {prefix}"),
            format!("user grant-role {name} {name}"),
            "auth enable".to_owned(),
        ] {
            self.ctl(&command)?.success()?;
        }
        self.client_flags.push("--user=root:root".to_owned());
        Ok(())
    }

    /// The server's process ID. Fails if it is not running.
    pub fn pid(&self) -> anyhow::Result<Pid> {
        let server = self.server.as_ref().context("etcd is not running")?;
        // A process ID is a positive i32 that the standard library returns as u32.
        Ok(Pid::from_raw(server.id().cast_signed()))
    }

    /// Kills the server immediately, like a power cut.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut server) = self.server.take() {
            server.kill().context("cannot kill etcd")?;
            server.wait().context("cannot wait for etcd")?;
        }
        Ok(())
    }

    /// Deletes the server's data, as if the disk were lost. The server must be stopped.
    pub fn forget(&self) -> anyhow::Result<()> {
        ensure!(self.server.is_none(), "etcd is still running");
        std::fs::remove_dir_all(self.data.path().join("member")).context("cannot delete its data")
    }

    /// Runs etcdctl. Arguments are separated by spaces.
    pub fn ctl(&self, words: &str) -> anyhow::Result<RunOutput> {
        run(self.ctl_command().args(words.split_whitespace()))
    }

    /// Writes a key.
    pub fn put(&self, key: &str, value: &str) -> anyhow::Result<()> {
        self.try_put(key, value)?.success().map(drop)
    }

    /// Tries to write a key.
    pub fn try_put(&self, key: &str, value: &str) -> anyhow::Result<RunOutput> {
        run_with_input(self.ctl_command().args(["put", key]), value)
    }

    /// The keys that start with `prefix`.
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
            .with_context(|| format!("etcdctl printed no revision: {status}"))
    }

    /// Revokes every lease, which deletes all keys bound to them. Returns the number of leases.
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
            .arg(format!("--endpoints={}", self.client_url))
            .args(&self.client_flags)
            .arg("--command-timeout=5s");
        command
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            crate::process::print_line(format_args!("bed: {error:#}"));
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
