//! The control plane of a Kubernetes cluster: etcd, the API server, the controllers and the scheduler.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use rcgen::KeyPair;
use serde_json::{Value, json};

use super::programs::program;
use crate::bed::Authority;
use crate::process::{RunOutput, Running, run, run_with_input};
use crate::{PATIENCE, wait_for};

const API_PORT: u16 = 6443;
const ETCD_PORT: u16 = 2379;
const ETCD_PEER_PORT: u16 = 2380;
/// The addresses of services.
pub(super) const SERVICE_CIDRS: &str = "10.96.0.0/16,fd96::/112";
/// The first address of services, which is the API server's.
const API_SERVICE: &str = "10.96.0.1";
/// The addresses of pods.
pub(super) const POD_CIDRS: &str = "10.244.0.0/16,fd44::/56";

/// A user of the API server, with a token of the same name.
#[derive(Clone, Copy)]
struct User {
    name: &'static str,
    /// The account.
    account: &'static str,
    group: &'static str,
}

const ADMIN: &str = "admin";
const CONTROLLERS: &str = "controllers";
const SCHEDULER: &str = "scheduler";
const USERS: [User; 3] = [
    User {
        name: ADMIN,
        account: "admin",
        group: "system:masters",
    },
    User {
        name: CONTROLLERS,
        account: "system:kube-controller-manager",
        group: "system:authenticated",
    },
    User {
        name: SCHEDULER,
        account: "system:kube-scheduler",
        group: "system:authenticated",
    },
];

/// The control plane. Its processes are killed on drop.
#[derive(Debug)]
pub struct ControlPlane {
    // Fields are dropped in this order.
    controllers: Vec<Running>,
    api_server: Option<Running>,
    _etcd: Running,
    folder: PathBuf,
    address: Ipv4Addr,
}

impl ControlPlane {
    /// Starts all programs at this address of the machine, with files in `folder`. `nodes` get the access of kubelets.
    /// Returns when the API server is ready.
    pub fn start(folder: &Path, address: Ipv4Addr, nodes: &[&str]) -> anyhow::Result<Self> {
        let mut plane = Self::without_controllers(folder, address, nodes)?;
        plane.start_controllers()?;
        Ok(plane)
    }

    /// Like [`ControlPlane::start`], with etcd and the API server alone.
    pub fn without_controllers(
        folder: &Path,
        address: Ipv4Addr,
        nodes: &[&str],
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(folder.join("log")).context("cannot create a folder for logs")?;
        let client = format!("http://127.0.0.1:{ETCD_PORT}");
        let peer = format!("http://127.0.0.1:{ETCD_PEER_PORT}");
        let mut etcd = own("etcd".as_ref());
        etcd.arg("--data-dir")
            .arg(folder.join("etcd"))
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            // The cluster lives as long as the machine.
            .args(["--unsafe-no-fsync", "--log-level", "warn"]);
        let mut plane = Self {
            controllers: Vec::new(),
            api_server: None,
            _etcd: start(&mut etcd, folder, "etcd")?,
            folder: folder.to_owned(),
            address,
        };
        plane.write_credentials(nodes)?;
        plane.start_api_server()?;
        Ok(plane)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The address of the API server.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The kubeconfig of the administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig_of(ADMIN)
    }

    /// The kubeconfig of a node's kubelet or another user.
    pub(super) fn kubeconfig_of(&self, user: &str) -> PathBuf {
        self.path(&format!("{user}.conf"))
    }

    /// The certificate of the authority that signs all certificates.
    pub(super) fn authority(&self) -> PathBuf {
        self.path("ca.crt")
    }

    /// Certificates, the key of service accounts, tokens and kubeconfigs.
    fn write_credentials(&self, nodes: &[&str]) -> anyhow::Result<()> {
        let write = |name: &str, content: &str| {
            let path = self.path(name);
            fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
        };
        let authority = Authority::new("kubernetes")?;
        write("ca.crt", authority.pem())?;
        let address = self.address.to_string();
        let server = authority.sign(&[
            &address,
            "127.0.0.1",
            API_SERVICE,
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
        ])?;
        write("server.crt", &server.certificate)?;
        write("server.key", &server.key)?;
        let client = authority.sign_client("kube-apiserver", "system:masters")?;
        write("client.crt", &client.certificate)?;
        write("client.key", &client.key)?;
        let accounts = KeyPair::generate().context("cannot generate a key")?;
        write("accounts.key", &accounts.serialize_pem())?;
        write("accounts.pub", &accounts.public_key_pem())?;

        let mut tokens = String::new();
        for user in USERS {
            writeln!(
                tokens,
                "{0},{1},{1},{2}",
                user.name, user.account, user.group
            )?;
            self.write_kubeconfig(user.name, user.name)?;
        }
        for node in nodes {
            writeln!(tokens, "{node},system:node:{node},{node},system:nodes")?;
            self.write_kubeconfig(node, node)?;
        }
        write("tokens.csv", &tokens)
    }

    /// Writes the kubeconfig of a user with this token.
    pub fn write_kubeconfig(&self, user: &str, token: &str) -> anyhow::Result<PathBuf> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
            "clusters": [{ "name": "cluster", "cluster": {
                "server": format!("https://{}:{API_PORT}", self.address),
                "certificate-authority": self.authority(),
            } }],
            "users": [{ "name": "user", "user": { "token": token } }],
            "contexts": [{ "name": "cluster", "context": { "cluster": "cluster", "user": "user" } }],
        });
        let path = self.kubeconfig_of(user);
        fs::write(&path, config.to_string())
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// Starts the API server, and waits until it is ready.
    pub fn start_api_server(&mut self) -> anyhow::Result<()> {
        ensure!(self.api_server.is_none(), "the API server runs already");
        let address = self.address;
        let mut server = own(&program("kube-apiserver")?);
        server.args([
            &format!("--etcd-servers=http://127.0.0.1:{ETCD_PORT}"),
            &format!("--advertise-address={address}"),
            &format!("--bind-address={address}"),
            &format!("--secure-port={API_PORT}"),
            &format!("--service-cluster-ip-range={SERVICE_CIDRS}"),
            "--allow-privileged",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--feature-gates=IPv6DualStack=true",
        ]);
        for (flag, file) in [
            ("token-auth-file", "tokens.csv"),
            ("client-ca-file", "ca.crt"),
            ("tls-cert-file", "server.crt"),
            ("tls-private-key-file", "server.key"),
            ("kubelet-client-certificate", "client.crt"),
            ("kubelet-client-key", "client.key"),
            ("service-account-key-file", "accounts.pub"),
            ("service-account-signing-key-file", "accounts.key"),
            ("cert-dir", "api-server"),
        ] {
            server.arg(format!("--{flag}={}", self.path(file).display()));
        }
        self.api_server = Some(start(&mut server, &self.folder, "kube-apiserver")?);
        wait_for("the API server", PATIENCE, || {
            Ok(self.kubectl("get --raw /readyz").ok())
        })
        .with_context(|| self.log_tail("kube-apiserver"))
        .map(drop)
    }

    /// Kills the API server with SIGKILL.
    pub fn kill_api_server(&mut self) {
        self.api_server = None;
    }

    fn start_controllers(&mut self) -> anyhow::Result<()> {
        let mut manager = own(&program("kube-controller-manager")?);
        manager.args([
            "--allocate-node-cidrs",
            &format!("--cluster-cidr={POD_CIDRS}"),
            "--node-cidr-mask-size-ipv4=24",
            "--node-cidr-mask-size-ipv6=64",
            &format!("--service-cluster-ip-range={SERVICE_CIDRS}"),
            "--use-service-account-credentials",
            "--feature-gates=IPv6DualStack=true",
        ]);
        for (flag, file) in [
            ("service-account-private-key-file", "accounts.key"),
            ("root-ca-file", "ca.crt"),
        ] {
            manager.arg(format!("--{flag}={}", self.path(file).display()));
        }
        let scheduler = own(&program("kube-scheduler")?);
        for (name, user, mut command) in [
            ("kube-controller-manager", CONTROLLERS, manager),
            ("kube-scheduler", SCHEDULER, scheduler),
        ] {
            let config = self.kubeconfig_of(user);
            for flag in [
                "kubeconfig",
                "authentication-kubeconfig",
                "authorization-kubeconfig",
            ] {
                command.arg(format!("--{flag}={}", config.display()));
            }
            command
                .args(["--leader-elect=false", "--bind-address=127.0.0.1"])
                .arg(format!("--cert-dir={}", self.path(name).display()));
            self.controllers
                .push(start(&mut command, &self.folder, name)?);
        }
        Ok(())
    }

    /// Runs kubectl as the administrator, with arguments separated by spaces, and returns its output.
    pub fn kubectl(&self, words: &str) -> anyhow::Result<String> {
        self.try_kubectl(words)?.success()
    }

    /// Runs kubectl as the administrator, with arguments separated by spaces.
    pub fn try_kubectl(&self, words: &str) -> anyhow::Result<RunOutput> {
        run(self.kubectl_command().args(words.split_whitespace()))
    }

    /// Creates or changes objects.
    pub fn apply(&self, objects: &[Value]) -> anyhow::Result<()> {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        let mut apply = self.kubectl_command();
        run_with_input(apply.args(["apply", "-f", "-"]), &list.to_string())?
            .success()
            .map(drop)
    }

    /// Runs etcdctl on the API server's store, with arguments separated by spaces, and returns its output.
    pub fn etcdctl(&self, words: &str) -> anyhow::Result<String> {
        let mut command = Command::new("etcdctl");
        command
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints=127.0.0.1:{ETCD_PORT}"))
            .args(words.split_whitespace());
        run(&mut command)?.success()
    }

    /// Returns objects as `kubectl get WORDS -o json` prints them.
    pub fn get(&self, words: &str) -> anyhow::Result<Value> {
        let printed = self.kubectl(&format!("get {words} -o json"))?;
        serde_json::from_str(&printed).context("kubectl printed no JSON")
    }

    /// kubectl as the administrator.
    pub fn kubectl_command(&self) -> Command {
        let mut command = Command::new("kubectl");
        command.arg("--kubeconfig").arg(self.kubeconfig());
        // What it learns about one cluster would be wrong for the next one at this address.
        command.arg("--cache-dir").arg(self.path("kubectl"));
        command
    }

    /// The last lines of a program's log, for messages.
    pub(super) fn log_tail(&self, name: &str) -> String {
        log_tail(&self.folder, name)
    }
}

/// A program that ends with this process.
pub(super) fn own(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// Starts a program that logs to `folder/log/NAME`.
pub(super) fn start(command: &mut Command, folder: &Path, name: &str) -> anyhow::Result<Running> {
    let path = folder.join("log").join(name);
    let log = File::options().create(true).append(true).open(&path);
    let log = log.with_context(|| format!("cannot create {}", path.display()))?;
    Running::start_logging(command, log)
}

/// The last lines of the log `folder/log/NAME`.
pub(super) fn log_tail(folder: &Path, name: &str) -> String {
    const LINES: usize = 8;
    let log = fs::read_to_string(folder.join("log").join(name)).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    let tail = lines[lines.len().saturating_sub(LINES)..].join("\n");
    format!("{name} said:\n{tail}")
}
