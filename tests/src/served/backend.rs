//! A backend of a service: an endpoint with a web server and a UDP server that reply with its name.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tempfile::TempDir;

use super::datagrams::DatagramServer;
use crate::bed::command_in;
use crate::process::Running;
use crate::{Member, Node, PATIENCE, wait_for};

/// The port that backends listen on, TCP and UDP.
pub const PORT: u16 = 8080;
/// The file in a backend's folder that makes the backend ready.
const READY: &str = "ready";

/// An endpoint with servers that reply with its name and the client's address.
#[derive(Debug)]
pub struct Backend {
    _nginx: Running,
    _datagrams: DatagramServer,
    dir: TempDir,
    /// The backend's name, which its replies contain.
    pub name: String,
    /// Name of the backend's node.
    pub node: String,
    /// The endpoint.
    pub member: Member,
}

impl Backend {
    /// Creates the endpoint, with these flags of `endpoint create`, and starts its servers.
    pub fn start(node: &Node, name: &str, flags: &str) -> anyhow::Result<Self> {
        let member = Member::on(node, name, flags)?;
        let dir = tempfile::Builder::new().prefix("hweb-").tempdir();
        let dir = dir.context("cannot create a folder for a web server")?;
        let file = dir.path().join("nginx.conf");
        let write = || {
            fs::write(&file, configuration(name, dir.path()))?;
            fs::write(dir.path().join(READY), "ready\n")
        };
        write().with_context(|| format!("cannot write {}", file.display()))?;
        // The server must not outlive the test.
        let mut nginx = command_in(&member.name, "setpriv");
        nginx.args(["--pdeathsig", "KILL", "nginx", "-c"]).arg(file);
        let backend = Self {
            _nginx: Running::start(&mut nginx)?,
            _datagrams: DatagramServer::start(&member.netns, name)?,
            dir,
            name: name.to_owned(),
            node: node.name().to_owned(),
            member,
        };
        for target in backend.addresses() {
            let connect = || std::net::TcpStream::connect(target);
            wait_for("a web server to listen", PATIENCE, || {
                Ok(Some(node.run_in(connect)??))
            })
            .with_context(|| format!("{name} at {target}"))?;
        }
        Ok(backend)
    }

    /// The addresses of the backend's servers, with their port.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let addresses = self.member.addresses().into_iter();
        addresses.map(|ip| (ip, PORT).into()).collect()
    }

    /// The file that decides about the response to `GET /ready`: 200 if the file exists, 503 otherwise.
    pub fn ready_file(&self) -> PathBuf {
        self.dir.path().join(READY)
    }

    /// Creates or removes the [readiness file](Self::ready_file).
    pub fn set_ready(&self, is_ready: bool) -> anyhow::Result<()> {
        let file = self.ready_file();
        let done = match is_ready {
            true => fs::write(&file, "ready\n"),
            false => fs::remove_file(&file),
        };
        done.with_context(|| format!("cannot change {}", file.display()))
    }

    /// The manifest of a pod whose only container is ready if `GET /ready` succeeds.
    pub fn pod(&self) -> serde_json::Value {
        let Self { name, .. } = self;
        let addresses = self.member.addresses();
        let ips: Vec<_> = addresses
            .iter()
            .map(|ip| serde_json::json!({ "ip": ip }))
            .collect();
        serde_json::json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "uid": format!("uid-{name}"),
                "annotations": { "probe.health-agent.io/web.readiness.period": "50ms" },
            },
            "spec": {
                "containers": [{
                    "name": "web",
                    "readinessProbe": {
                        "httpGet": { "path": "/ready", "port": PORT },
                        "failureThreshold": 1,
                    },
                }],
            },
            "status": {
                "phase": "Running",
                "podIP": addresses.first(),
                "podIPs": ips,
                "containerStatuses": [{
                    "name": "web",
                    "containerID": format!("test://{name}"),
                    "state": { "running": {} },
                }],
            },
        })
    }
}

fn configuration(name: &str, dir: &Path) -> String {
    let dir = dir.display();
    format!(
        r#"
daemon off; master_process off; user root;
pid {dir}/pid; error_log {dir}/error.log info;
worker_rlimit_nofile 4096;
events {{ worker_connections 4096; }}
http {{
  access_log off; default_type text/plain;
  keepalive_timeout 1h; keepalive_requests 1000000; client_max_body_size 0;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi;
  uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
  server {{
    listen {PORT}; listen [::]:{PORT};
    location = /ready {{ root {dir}; try_files /{READY} =503; }}
    location / {{ return 200 "{name} $remote_addr\n"; }}
  }}
}}
"#
    )
}
