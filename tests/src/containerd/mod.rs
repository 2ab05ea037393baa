//! Real containers: containerd, driven through its CRI like the kubelet does.

mod messages;

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use hyper::http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use nix::sys::signal::{Signal, kill};
use prost::Message;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use self::messages::{
    ContainerConfig, ContainerMetadata, ContainerSecurity, CreateRequest, ExecAnswer, ExecRequest,
    Id, Image, KeyValue, LinuxContainer, LinuxPod, NETWORK_OF_NODE, Namespaces, Nothing,
    PROCESSES_OF_CONTAINER, PodConfig, PodMetadata, PodSecurity, RunPodRequest, StatusAnswer,
    StatusRequest, StopRequest, UserId,
};
use crate::image::Image as ImageFiles;
use crate::process::{Running, print_line, run};
use crate::{Node, PATIENCE, wait_for};

/// The only image, which is also the sandbox image of pods.
const IMAGE: &str = "health.test/busybox:1";
/// Programs available in the containers.
const APPLETS: [&str; 14] = [
    "sh", "sleep", "id", "cat", "echo", "setsid", "yes", "head", "ls", "httpd", "kill", "rm",
    "test", "touch",
];

/// A private containerd. Its images and containers are in a folder that is deleted on drop.
#[derive(Debug)]
pub struct Containerd {
    // Fields are dropped in this order.
    pods: Vec<Container>,
    runtime: Runtime,
    channel: Channel,
    server: Running,
    socket: PathBuf,
    dir: TempDir,
}

/// A container, the only one in its pod.
#[derive(Clone, Debug)]
pub struct Container {
    /// The container's ID in the runtime.
    pub id: String,
    /// Process ID of the container's first process.
    pub pid: u32,
    pod: String,
}

impl Containerd {
    /// Starts containerd, waits until it serves, and imports its image.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_by(Command::new("setpriv"), None)
    }

    /// Like [`start`](Self::start), but on a node: containers use the node's network. containerd listens on `socket`,
    /// if given.
    pub fn start_on(node: &Node, socket: Option<PathBuf>) -> anyhow::Result<Self> {
        Self::start_by(node.command("setpriv"), socket)
    }

    /// Starts containerd with `server`, a `setpriv` command that runs on this machine or in a node.
    fn start_by(mut server: Command, socket: Option<PathBuf>) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("hctrd-")
            .tempdir()
            .context("cannot create a folder for containerd")?;
        let config = dir.path().join("config.toml");
        let socket = socket.unwrap_or_else(|| dir.path().join("socket"));
        let (root, state) = (dir.path().join("root"), dir.path().join("state"));
        let settings = configuration(&root, &state, &socket, IMAGE, "native");
        fs::write(&config, settings)?;
        // containerd must not outlive its test.
        server
            .args(["--pdeathsig", "KILL", "containerd", "--log-level", "error"])
            .arg("--config")
            .arg(config);
        // Only this process gets Ctrl-C from a terminal; it removes the containers first.
        server.process_group(0);
        let log = dir.path().join("log");
        let file =
            File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let server = Running::start_logging(&mut server, file)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let connect = {
            let socket = socket.clone();
            move || UnixStream::connect(socket.clone())
        };
        let channel = runtime.block_on(async {
            let endpoint = Endpoint::from_static("http://localhost");
            endpoint.connect_with_connector_lazy(service_fn(move |_| {
                let connecting = connect();
                async move { connecting.await.map(TokioIo::new) }
            }))
        });
        let containerd = Self {
            pods: Vec::new(),
            runtime,
            channel,
            server,
            socket,
            dir,
        };
        wait_for("containerd to serve", PATIENCE, || {
            containerd.call::<_, Nothing>("Version", Nothing {})?;
            Ok(Some(()))
        })
        .with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
        containerd.import().context("cannot create an image")?;
        Ok(containerd)
    }

    /// The socket that containerd listens on.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Runs a container with this command line, user and environment.
    pub fn run(
        &mut self,
        name: &str,
        command: &[&str],
        user: Option<u32>,
        environment: &[(&str, &str)],
    ) -> anyhow::Result<Container> {
        let namespaces = || {
            Some(Namespaces {
                network: NETWORK_OF_NODE,
                processes: PROCESSES_OF_CONTAINER,
            })
        };
        let pod_config = PodConfig {
            metadata: Some(PodMetadata {
                name: name.to_owned(),
                uid: format!("uid-{name}"),
                namespace: "default".to_owned(),
            }),
            linux: Some(LinuxPod {
                security: Some(PodSecurity {
                    namespaces: namespaces(),
                }),
            }),
        };
        let request = RunPodRequest {
            config: Some(pod_config.clone()),
        };
        let pod: Id = self.call("RunPodSandbox", request)?;
        let mut container = Container {
            id: String::new(),
            pid: 0,
            pod: pod.id.clone(),
        };
        self.pods.push(container.clone());
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: name.to_owned(),
            }),
            image: Some(Image {
                image: IMAGE.to_owned(),
            }),
            command: command.iter().map(|&word| word.to_owned()).collect(),
            environment: environment
                .iter()
                .map(|&(key, value)| KeyValue {
                    key: key.to_owned(),
                    value: value.to_owned(),
                })
                .collect(),
            linux: Some(LinuxContainer {
                security: Some(ContainerSecurity {
                    namespaces: namespaces(),
                    user: user.map(|user| UserId { value: user.into() }),
                }),
            }),
        };
        let request = CreateRequest {
            pod: pod.id,
            config: Some(config),
            pod_config: Some(pod_config),
        };
        let id: Id = self.call("CreateContainer", request)?;
        let _: Nothing = self.call("StartContainer", id.clone())?;
        container.id = id.id;
        let status: StatusAnswer = self.call(
            "ContainerStatus",
            StatusRequest {
                id: container.id.clone(),
                verbose: true,
            },
        )?;
        let info = status.info.get("info").context("no details of it")?;
        let info: Value = serde_json::from_str(info)?;
        let pid = info["pid"].as_u64().context("no pid in its details")?;
        container.pid = pid.try_into()?;
        Ok(container)
    }

    /// Runs a command in a container. Fails if the command fails.
    pub fn exec(&self, container_id: &str, command: &[&str]) -> anyhow::Result<()> {
        let request = ExecRequest {
            id: container_id.to_owned(),
            command: command.iter().map(|&word| word.to_owned()).collect(),
            timeout: 0,
        };
        let answer: ExecAnswer = self.call("ExecSync", request)?;
        let output = String::from_utf8_lossy(&answer.stderr);
        ensure!(answer.exit_code == 0, "{command:?}: {output}");
        Ok(())
    }

    /// Kills and removes a container.
    pub fn remove(&self, container_id: &str) -> anyhow::Result<()> {
        let id = || Id {
            id: container_id.to_owned(),
        };
        let request = StopRequest {
            id: id().id,
            timeout: 0,
        };
        self.call::<_, Nothing>("StopContainer", request)?;
        self.call::<_, Nothing>("RemoveContainer", id()).map(drop)
    }

    /// Suspends containerd until [`Self::go_on`] or drop. Its containers keep running.
    pub fn hang(&self) -> anyhow::Result<()> {
        kill(self.server.pid(), Signal::SIGSTOP).context("cannot stop containerd")
    }

    /// Resumes containerd.
    pub fn go_on(&self) -> anyhow::Result<()> {
        kill(self.server.pid(), Signal::SIGCONT).context("cannot resume containerd")
    }

    /// Kills a container.
    pub fn stop(&self, container: &Container) -> anyhow::Result<()> {
        let request = StopRequest {
            id: container.id.clone(),
            timeout: 0,
        };
        self.call::<_, Nothing>("StopContainer", request).map(drop)
    }

    fn call<Q, A>(&self, method: &str, request: Q) -> anyhow::Result<A>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        let path = PathAndQuery::try_from(format!("/runtime.v1.RuntimeService/{method}"))?;
        let mut client = tonic::client::Grpc::new(self.channel.clone());
        let answer = self.runtime.block_on(async {
            client.ready().await.context("containerd is unreachable")?;
            let codec = tonic_prost::ProstCodec::<Q, A>::default();
            let answer = client.unary(tonic::Request::new(request), path, codec);
            answer
                .await
                .with_context(|| format!("containerd: {method}"))
        })?;
        Ok(answer.into_inner())
    }

    /// Imports a docker-style image archive with busybox.
    fn import(&self) -> anyhow::Result<()> {
        let image = ImageFiles::new(&self.dir.path().join("image"))?;
        image.busybox(APPLETS)?;
        let archive = image.archive(IMAGE, &["/bin/sleep", "1000000"])?;
        let mut import = Command::new("ctr");
        import
            .arg("--address")
            .arg(self.socket())
            .args(["--namespace", "k8s.io", "images", "import"])
            .args(["--snapshotter", "native"])
            .arg(&archive);
        let imported = run(&mut import)?.success()?;
        ensure!(imported.contains(IMAGE), "not imported: {imported}");
        wait_for("the image to be known", PATIENCE, || {
            let listed = run(Command::new("ctr")
                .arg("--address")
                .arg(self.socket())
                .args(["--namespace", "k8s.io", "images", "ls", "--quiet"]))?;
            Ok(listed.success()?.contains(IMAGE).then_some(()))
        })
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if let Err(error) = kill(self.server.pid(), Signal::SIGCONT) {
            print_line(format_args!("cannot resume containerd: {error}"));
        }
        for container in std::mem::take(&mut self.pods) {
            for method in ["StopPodSandbox", "RemovePodSandbox"] {
                let pod = Id {
                    id: container.pod.clone(),
                };
                if let Err(error) = self.call::<_, Nothing>(method, pod) {
                    print_line(format_args!("cannot remove a pod: {error:#}"));
                }
            }
        }
    }
}

/// The settings of a containerd with these folders and socket, and this image for the sandboxes of pods.
pub(crate) fn configuration(
    root: &Path,
    state: &Path,
    socket: &Path,
    sandbox: &str,
    snapshotter: &str,
) -> String {
    let (root, state, socket) = (root.display(), state.display(), socket.display());
    format!(
        r#"version = 2
root = "{root}"
state = "{state}"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox}"
  # What CI's machines allow.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
"#
    )
}
