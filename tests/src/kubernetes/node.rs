//! A node of a Kubernetes cluster: a machine within the test's machine, with containerd and a kubelet.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use nix::unistd::Pid;
use serde_json::json;

use super::control_plane::{ControlPlane, log_tail, own, start};
use super::images::Images;
use super::programs::program;
use crate::bed::agent_binary;
use crate::containerd;
use crate::process::{Running, print_line, run};
use crate::{PATIENCE, wait_for};

const SCRIPT: &str = include_str!("node.sh");
/// The bridge that connects the nodes with the control plane.
pub(super) const BRIDGE: &str = "br0";
/// The address of the control plane on the bridge.
pub(super) const CONTROL_PLANE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
/// Moves a process into the control groups of the node that it has entered, then runs the command.
const ENTER: &str = r#"for group in /sys/fs/cgroup/*/; do
    echo $$ >"$group/cgroup.procs" || :
done 2>/dev/null
exec "$@""#;
/// The plugin for loopback devices, of the package containernetworking-plugins.
const LOOPBACK: &str = "/usr/lib/cni/loopback";

/// A node. Its processes, namespaces and control groups go with it.
#[derive(Debug)]
pub struct ClusterNode {
    name: String,
    /// The last byte of its addresses.
    suffix: u8,
    folder: PathBuf,
    machine: Option<Machine>,
}

/// The node while it is up.
#[derive(Debug)]
struct Machine {
    // Fields are dropped in this order.
    kubelet: Option<Running>,
    containerd: Option<Running>,
    _init: Running,
    /// A process in the node's namespaces.
    pid: Pid,
}

impl ClusterNode {
    /// A node that is down. `folder` is that of the cluster.
    pub(super) fn new(folder: &Path, name: &str, suffix: u8) -> Self {
        Self {
            name: name.to_owned(),
            suffix,
            folder: folder.join(name),
            machine: None,
        }
    }

    /// The node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's address.
    pub fn address(&self) -> Ipv4Addr {
        let [a, b, c, _] = CONTROL_PLANE.octets();
        Ipv4Addr::new(a, b, c, self.suffix)
    }

    /// The node's IPv6 address.
    pub fn ipv6_address(&self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, self.suffix.into())
    }

    /// Starts the machine, containerd and the kubelet. The disks are those of earlier starts.
    pub(super) fn boot(&mut self, plane: &ControlPlane, images: &Images) -> anyhow::Result<()> {
        ensure!(self.machine.is_none(), "{} is up already", self.name);
        fs::create_dir_all(self.folder.join("log")).context("cannot create a node's folder")?;
        let (init, pid) = self.start_init()?;
        self.machine = Some(Machine {
            kubelet: None,
            containerd: None,
            _init: init,
            pid,
        });
        self.connect(pid)?;
        self.start_containerd(images)?;
        self.start_kubelet(plane)
    }

    /// Ends the node at once, like a power cut. Its disks remain.
    pub(super) fn cut_power(&mut self) {
        self.machine = None;
        self.remove_groups();
    }

    fn start_init(&self) -> anyhow::Result<(Running, Pid)> {
        let (up, script) = (self.folder.join("up"), self.folder.join("node.sh"));
        fs::write(&script, SCRIPT).context("cannot write a node's script")?;
        if up.exists() {
            fs::remove_file(&up).context("cannot remove a node's mark")?;
        }
        let mut machine = own(&agent_binary()?.with_file_name("machine"));
        machine.arg("bash").arg(script).arg("groups");
        machine.arg(&self.name).arg(&self.folder);
        let init = start(&mut machine, &self.folder, "machine")?;
        wait_for("the node's namespaces", PATIENCE, || {
            Ok(up.exists().then_some(()))
        })
        .with_context(|| log_tail(&self.folder, "machine"))?;
        // The program `machine` waits for the first process, which waits for the script.
        let pid = only_child(only_child(init.pid())?)?;
        Ok((init, pid))
    }

    /// Connects the node with the bridge.
    fn connect(&self, pid: Pid) -> anyhow::Result<()> {
        let (device, address, ipv6) = (
            format!("v{}", self.name),
            self.address(),
            self.ipv6_address(),
        );
        for words in [
            format!("ip link add {device} type veth peer name eth0 netns {pid}"),
            format!("ip link set {device} master {BRIDGE} up"),
        ] {
            sh(&words)?;
        }
        for words in [
            format!("ip address add {address}/24 dev eth0"),
            format!("ip address add {ipv6}/64 dev eth0 nodad"),
            "ip link set eth0 up".to_owned(),
            format!("ip route add default via {CONTROL_PLANE}"),
        ] {
            self.run(&words)?;
        }
        Ok(())
    }

    fn start_containerd(&mut self, images: &Images) -> anyhow::Result<()> {
        let config = self.folder.join("containerd.toml");
        let settings = containerd::configuration(
            Path::new("/var/lib/containerd"),
            Path::new("/run/containerd"),
            Path::new("/run/containerd/containerd.sock"),
            Images::WORKLOAD,
            "overlayfs",
        );
        fs::write(&config, settings).context("cannot configure containerd")?;
        self.run(&format!("cp {LOOPBACK} /opt/cni/bin/"))
            .context("install containernetworking-plugins")?;
        let mut containerd = self.command("containerd");
        containerd.arg("--config").arg(config);
        let containerd = start(&mut containerd, &self.folder, "containerd")?;
        self.machine_mut()?.containerd = Some(containerd);
        wait_for("containerd", PATIENCE, || Ok(self.run("ctr version").ok()))
            .with_context(|| log_tail(&self.folder, "containerd"))?;
        for image in images.archives() {
            let import = "ctr --namespace k8s.io images import --snapshotter overlayfs";
            self.run(&format!("{import} {}", image.display()))?;
        }
        Ok(())
    }

    fn start_kubelet(&mut self, plane: &ControlPlane) -> anyhow::Result<()> {
        let config = self.folder.join("kubelet.json");
        fs::write(&config, kubelet_config(plane).to_string()).context("cannot write a file")?;
        let mut kubelet = self.command(program("kubelet")?.to_str().context("not UTF-8")?);
        let kubeconfig = plane.kubeconfig_of(&self.name);
        kubelet
            .arg(format!("--config={}", config.display()))
            .arg(format!("--kubeconfig={}", kubeconfig.display()))
            .arg(format!("--hostname-override={}", self.name))
            .arg(format!(
                "--node-ip={},{}",
                self.address(),
                self.ipv6_address()
            ))
            .args([
                "--root-dir=/var/lib/kubelet",
                "--cert-dir=/var/lib/kubelet/pki",
            ])
            .arg("--container-runtime=remote")
            .arg("--container-runtime-endpoint=unix:///run/containerd/containerd.sock")
            // It would wait for the metadata of a cloud.
            .env("AWS_EC2_METADATA_DISABLED", "true");
        self.machine_mut()?.kubelet = Some(start(&mut kubelet, &self.folder, "kubelet")?);
        Ok(())
    }

    fn machine_mut(&mut self) -> anyhow::Result<&mut Machine> {
        self.machine.as_mut().context("the node is down")
    }

    /// A process in the node's namespaces.
    pub fn pid(&self) -> anyhow::Result<Pid> {
        let machine = self.machine.as_ref();
        Ok(machine.context("the node is down")?.pid)
    }

    /// A command on the node, in its namespaces and control groups. It ends with this process.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        // A node that is down has no process: nsenter says that it cannot find it.
        let pid = self.machine.as_ref().map_or(0, |it| it.pid.as_raw());
        command
            .arg(format!("--target={pid}"))
            .args(["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"])
            .args(["--", "setpriv", "--pdeathsig", "KILL"])
            .args(["sh", "-c", ENTER, "sh", program]);
        command
    }

    /// Runs a command on the node, with arguments separated by spaces, and returns its output.
    pub fn run(&self, words: &str) -> anyhow::Result<String> {
        let mut words = words.split_whitespace();
        let program = words.next().context("no program given")?;
        run(self.command(program).args(words))?.success()
    }

    /// Runs the agent's command line on the node.
    pub fn agent(&self, words: &str) -> anyhow::Result<String> {
        self.run(&format!("{} {words}", agent_binary()?.display()))
    }

    /// A file on the node, as this machine sees it.
    pub fn file(&self, path: &str) -> anyhow::Result<PathBuf> {
        Ok(PathBuf::from(format!("/proc/{}/root{path}", self.pid()?)))
    }

    /// Removes the control groups, which do not go with the node's processes.
    fn remove_groups(&self) {
        let groups = fs::read_to_string(self.folder.join("groups")).unwrap_or_default();
        for group in groups.lines().map(Path::new).filter(|group| group.exists()) {
            let removed = wait_for("control groups to be empty", PATIENCE, || {
                Ok(remove_group(group).map(Some)?)
            });
            if let Err(error) = removed {
                print_line(format_args!("cannot remove {}: {error:#}", group.display()));
            }
        }
    }
}

impl Drop for ClusterNode {
    fn drop(&mut self) {
        self.cut_power();
    }
}

/// Removes a control group and those in it.
fn remove_group(group: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_group(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

fn only_child(pid: Pid) -> anyhow::Result<Pid> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let children = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let mut children = children.split_whitespace();
    let child = children
        .next()
        .with_context(|| format!("{path} is empty"))?;
    Ok(Pid::from_raw(child.parse()?))
}

/// Runs a command on this machine, with arguments separated by spaces.
pub(super) fn sh(words: &str) -> anyhow::Result<String> {
    let mut words = words.split_whitespace();
    let program = words.next().context("no program given")?;
    run(Command::new(program).args(words))?.success()
}

fn kubelet_config(plane: &ControlPlane) -> serde_json::Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": plane.authority() },
        },
        "authorization": { "mode": "Webhook" },
        "featureGates": { "IPv6DualStack": true },
        "cgroupDriver": "cgroupfs",
        "failSwapOn": false,
        "clusterDomain": "cluster.local",
        // By default it reports a pod's state seconds late.
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "eventRecordQPS": 0,
        "nodeStatusUpdateFrequency": "5s",
        "serializeImagePulls": false,
        // The disk of this machine is not the node's.
        "evictionHard": {
            "memory.available": "50Mi", "nodefs.available": "1%",
            "imagefs.available": "1%", "nodefs.inodesFree": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": 200,
    })
}
