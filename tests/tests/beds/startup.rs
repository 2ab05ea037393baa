//! An agent that cannot start reports the reason in one line, exits with code 1, and undoes everything it did.

use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use health_settings::ServiceSettings;
use nix::sys::signal::Signal;
use nix::unistd::Group;
use serde_json::json;
use tests::attached::{self, has_tcx};
use tests::bed::{BPFFS, NODES_FILE, agent_binary};
use tests::process::{Running, run_within};
use tests::served::Manifests;
use tests::{Bed, Node, PATIENCE, Snapshot, wait_for};

/// How to start an agent for a test.
struct Start {
    /// A command and arguments to run the agent under.
    wrapper: Vec<String>,
    binary: PathBuf,
    bpf_root: PathBuf,
    nodes_file: PathBuf,
    extra: Vec<String>,
}

impl Start {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            wrapper: vec!["env".to_owned()],
            binary: agent_binary()?,
            bpf_root: BPFFS.into(),
            nodes_file: NODES_FILE.into(),
            extra: Vec::new(),
        })
    }

    fn wrapped(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|&word| word.to_owned()).collect();
        self
    }

    fn with(mut self, words: &str) -> Self {
        self.extra = words.split(' ').map(str::to_owned).collect();
        self
    }

    fn command(&self, node: &Node) -> Command {
        let mut command = Command::new(&self.wrapper[0]);
        command
            .args(&self.wrapper[1..])
            .arg(&self.binary)
            .arg("--netns")
            .arg(node.netns())
            .args(["--instance", node.name(), "--runtime-dir"])
            .arg(node.runtime_dir())
            .arg("--state-dir")
            .arg(node.runtime_dir().join("state"))
            .arg("--bpf-root")
            .arg(&self.bpf_root)
            .args(["run", "--node-name", node.name(), "--nodes-file"])
            .arg(&self.nodes_file)
            .args(&self.extra);
        command
    }

    /// Checks that the start fails with an error line that contains all of `naming`, and changes nothing.
    fn fails(&self, node: &Node, naming: &[&str]) -> anyhow::Result<()> {
        let machine = Snapshot::machine()?;
        let before = Snapshot::node(node)?;
        let ran = run_within(PATIENCE, &mut self.command(node))?;
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
        assert!(ran.stderr.starts_with("error: "), "{}", ran.stderr);
        for name in naming {
            assert!(ran.stderr.contains(name), "no {name:?} in: {}", ran.stderr);
        }
        before.wait_same(|| Snapshot::node(node))?;
        machine.wait_same(Snapshot::machine)
    }
}

/// A node without an agent.
fn bed() -> anyhow::Result<Bed> {
    Bed::builder().nodes(1).without_agents().start()
}

/// All files in a folder and its subfolders.
fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => found.extend(files(&path)?),
            false => found.push(path),
        }
    }
    found.sort();
    Ok(found)
}

/// A registry of one node with these addresses and pod CIDRs, in YAML's flow style.
fn registry(addresses: &str, pod_cidrs: &str) -> String {
    format!("nodes:\n- name: hnode1\n  addresses: [{addresses}]\n  podCIDRs: [{pod_cidrs}]\n")
}

/// Names of a node's programs with one of these prefixes, from `bpf prog list`.
fn listed(node: &Node, prefixes: &[&str]) -> anyhow::Result<Vec<String>> {
    let programs = node.listing("bpf prog list")?;
    let programs = programs.as_array().context("not a list")?;
    let names = programs.iter().filter_map(|it| it["name"].as_str());
    let wanted = names.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)));
    Ok(wanted.map(str::to_owned).collect())
}

#[test]
#[ignore = "needs root"]
fn programs_of_parts_that_an_agent_does_not_have_are_not_loaded() -> anyhow::Result<()> {
    const OF_SERVICES: [&str; 4] = ["to_service", "from_service", "deliver", "sock_"];
    const OF_MASQUERADING: [&str; 2] = ["masquerade", "unmasquerade"];
    let manifests = Manifests::new()?;
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    bed.node(2).start_agent()?;
    let node = bed.node(1);
    let services = manifests.agent_args();
    for (flags, has_services, masquerades) in [
        ("", false, false),
        (&*services, true, true),
        // The earlier agent's programs are unloaded along with it.
        ("", false, false),
        ("--native-routing-cidr 10.244.0.0/16", false, true),
        ("", false, false),
    ] {
        node.start_agent_with(flags)?;
        bed.wait_all_reachable(PATIENCE)?;
        let of_services = listed(node, &OF_SERVICES)?;
        assert_eq!(
            !of_services.is_empty(),
            has_services,
            "{flags}: {of_services:?}"
        );
        let of_masquerading = listed(node, &OF_MASQUERADING)?;
        assert_eq!(
            !of_masquerading.is_empty(),
            masquerades,
            "{flags}: {of_masquerading:?}"
        );
        let calls = node.listing("bpf map dump HEALTH_CALLS")?;
        assert_eq!(
            calls.as_array().context("not a list")?.len(),
            of_masquerading.len()
                + of_services
                    .iter()
                    .filter(|it| !it.starts_with("sock_"))
                    .count(),
            "{flags}: {calls}"
        );
        node.kill_agent(Signal::SIGTERM)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn not_root() -> anyhow::Result<()> {
    let bed = bed()?;
    // The binary needs a path that every user can reach.
    let folder = tempfile::tempdir()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    let binary = folder.path().join("health-agent");
    fs::copy(agent_binary()?, &binary)?;
    let start = Start {
        binary,
        ..Start::new()?
    };
    let nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    start.wrapped(&nobody).fails(bed.node(1), &["root"])
}

#[test]
#[ignore = "needs root"]
fn no_btf() -> anyhow::Result<()> {
    let hide = "mount -t tmpfs none /sys/kernel/btf && exec \"$0\" \"$@\"";
    Start::new()?
        .wrapped(&["unshare", "--mount", "sh", "-c", hide])
        .fails(bed()?.node(1), &["BTF", "/sys/kernel/btf/vmlinux"])
}

#[test]
#[ignore = "needs root"]
fn no_bpffs() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let start = Start {
        bpf_root: folder.path().to_owned(),
        ..Start::new()?
    };
    let path = folder.path().display().to_string();
    start.fails(bed()?.node(1), &["bpffs", &path, "mount -t bpf"])
}

#[test]
#[ignore = "needs root"]
fn a_device_of_the_name_that_is_not_ours() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    node.exec("ip link add lxc_health type veth peer name foreign0")?;
    Start::new()?.fails(node, &["lxc_health"])
}

#[test]
#[ignore = "needs root"]
fn an_exhausted_pod_cidr() -> anyhow::Result<()> {
    let bed = bed()?;
    bed.write_nodes_file(&registry("172.30.0.1", "10.244.1.0/31"))?;
    Start::new()?.fails(bed.node(1), &["10.244.1.0/31"])
}

#[test]
#[ignore = "needs root"]
fn a_pod_cidr_over_the_nodes_address() -> anyhow::Result<()> {
    let bed = bed()?;
    bed.write_nodes_file(&registry("172.30.0.1", "172.30.0.0/24"))?;
    Start::new()?.fails(bed.node(1), &["172.30.0.0/24", "172.30.0.1"])
}

#[test]
#[ignore = "needs root"]
fn an_address_that_the_host_does_not_have() -> anyhow::Result<()> {
    let bed = bed()?;
    bed.write_nodes_file(&registry("172.30.0.99", "10.244.1.0/24"))?;
    Start::new()?.fails(bed.node(1), &["172.30.0.99"])
}

#[test]
#[ignore = "needs root"]
fn a_port_in_use() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    let _listener = node.run_in(|| TcpListener::bind("172.30.0.1:4240"))??;
    Start::new()?.fails(node, &["172.30.0.1:4240"])
}

#[test]
#[ignore = "needs root"]
fn a_live_agent_is_named_by_its_pid() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let pid = node.agent_pid()?.to_string();
    Start::new()?.fails(node, &["another agent", &format!("pid {pid}")])?;
    bed.wait_all_reachable(PATIENCE)
}

/// The second agent shares only the instance name: it runs in another namespace with its own folders.
#[test]
#[ignore = "needs root"]
fn a_live_agent_of_the_same_instance_is_not_disturbed() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    let (live, other) = (bed.node(1), bed.node(2));
    live.start_agent()?;
    wait_for("the endpoint", PATIENCE, || {
        Ok(live.pings(live.health_ipv4()?)?.then_some(()))
    })?;
    let folder = tempfile::tempdir()?;
    for what in ["run --node-name hnode2 --nodes-file", "cleanup"] {
        let before = Snapshot::machine()?;
        let mut command = Command::new(agent_binary()?);
        command.arg("--netns").arg(other.netns());
        command.args(["--instance", live.name(), "--bpf-root", BPFFS]);
        command.arg("--runtime-dir").arg(folder.path());
        command.arg("--state-dir").arg(folder.path().join("state"));
        command.args(what.split(' '));
        if what != "cleanup" {
            command.arg(NODES_FILE);
        }
        let ran = run_within(PATIENCE, &mut command)?;
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        assert!(ran.stderr.contains("another agent"), "{}", ran.stderr);
        before.wait_same(Snapshot::machine)?;
    }
    assert!(live.pings(live.health_ipv4()?)?);
    assert!(live.logged(&["repaired"])?.is_empty());
    Ok(())
}

/// The capabilities in the shipped systemd unit suffice for the agent to start, open its socket to a group, record a
/// workload of another user, and run probe commands in the workload.
#[test]
#[ignore = "needs root"]
fn the_capabilities_of_the_systemd_unit_are_enough() -> anyhow::Result<()> {
    const UNIT: &str = include_str!("../../../deploy/health-agent.service");
    const GROUP: &str = "daemon";
    let lines = UNIT.lines();
    let capabilities = lines.filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let bounding: String = capabilities
        .flat_map(|line| line.split(' '))
        .map(|name| format!(",+{}", name.trim_start_matches("CAP_").to_lowercase()))
        .collect();
    let bounding = format!("-all{bounding}");
    let bed = bed()?;
    let node = bed.node(1);
    let wrapper = ["setpriv", "--no-new-privs", "--bounding-set", &bounding];
    let start = Start::new()?
        .wrapped(&wrapper)
        .with(&format!("--socket-group {GROUP}"));
    let _agent = Running::start(&mut start.command(node))?;
    wait_for("the health endpoint", PATIENCE, || {
        Ok(node.pings(node.health_ipv4()?)?.then_some(()))
    })?;
    let group = Group::from_name(GROUP)?.context("no such group")?;
    assert_eq!(fs::metadata(node.socket())?.gid(), group.gid.as_raw());

    let mut workload = Command::new("unshare");
    let workload = Running::start(workload.args([
        "--net",
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "sleep",
        "infinity",
    ]))?;
    let process = PathBuf::from(format!("/proc/{}", workload.pid()));
    wait_for("the workload to run", PATIENCE, || {
        let command = fs::read_to_string(process.join("comm"))?;
        Ok((command == "sleep\n").then_some(()))
    })?;
    let netns = process.join("ns/net");
    node.cli(&format!("endpoint create --netns {}", netns.display()))?
        .success()?;

    // The command runs as the workload's user, and its leftover processes are killed.
    let dir = tempfile::tempdir()?;
    let manifest = dir.path().join("pod.yaml");
    fs::write(
        &manifest,
        r#"apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  containers:
  - name: app
    livenessProbe:
      exec: {command: [sh, -c, 'sleep 1000000 & test "$(id -u)" = 65534']}
      timeoutSeconds: 60
"#,
    )?;
    let mut probe = Command::new(wrapper[0]);
    probe
        .args(&wrapper[1..])
        .arg(agent_binary()?)
        .args(["probe", "try", "--pid", &workload.pid().to_string()])
        .arg(&manifest);
    let tried = run_within(PATIENCE, &mut probe)?;
    assert_eq!(tried.code, Some(0), "{}{}", tried.stdout, tried.stderr);
    Ok(())
}

/// Beyond the general requirements, what an agent in a pod needs from its host to probe other pods.
#[test]
fn the_daemonset_gives_what_container_probes_need() -> anyhow::Result<()> {
    const DAEMONSET: &str = include_str!("../../../deploy/kubernetes/daemonset.yaml");
    let set: serde_json::Value = serde_saphyr::from_str(DAEMONSET)?;
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!(pod["hostPID"], true);
    let container = &pod["containers"][0];
    assert_eq!(container["securityContext"]["privileged"], true);
    let args = container["args"].as_array().context("no args")?;
    for arg in [
        "--pods-from-kubernetes",
        "--runtime-endpoint=/run/containerd/containerd.sock",
    ] {
        assert!(args.iter().any(|given| given == arg), "{arg}: {args:?}");
    }
    for (name, path) in [
        ("runtime", "/run/containerd"),
        ("pods", "/etc/health-agent/pods"),
    ] {
        let named = |all: &serde_json::Value| {
            let all = all.as_array().cloned().unwrap_or_default();
            all.into_iter().find(|one| one["name"] == name)
        };
        let mount = named(&container["volumeMounts"]).with_context(|| name.to_owned())?;
        let volume = named(&pod["volumes"]).with_context(|| name.to_owned())?;
        assert_eq!(mount["mountPath"], path);
        assert_eq!(volume["hostPath"]["path"], path);
    }
    Ok(())
}

/// Beyond the general requirements, what an agent in a pod needs to serve services.
#[test]
fn the_component_for_services_adds_what_they_need() -> anyhow::Result<()> {
    const COMPONENT: &str = include_str!("../../../deploy/kubernetes/services/kustomization.yaml");
    const RBAC: &str = include_str!("../../../deploy/kubernetes/rbac.yaml");
    let component: serde_json::Value = serde_saphyr::from_str(COMPONENT)?;
    let patch = component["patches"][0]["patch"].as_str();
    let changes: Vec<serde_json::Value> = serde_saphyr::from_str(patch.context("no patch")?)?;
    let added = |path: &str| -> Vec<_> {
        let path = format!("/spec/template/spec/containers/0/{path}");
        let changes = changes.iter().filter(|change| change["path"] == path);
        changes.map(|change| change["value"].clone()).collect()
    };
    assert_eq!(
        added("args/-"),
        ["--services-from-kubernetes", "--service-proxy-mode=ebpf"]
    );
    let settings = ServiceSettings::default();
    let ports = [
        settings.service_healthz_address,
        settings.service_metrics_address,
    ];
    let ports = ports.map(|listen| {
        let listen = listen.to_string();
        let (_, port) = listen.rsplit_once(':')?;
        port.parse::<u64>().ok()
    });
    let listed = added("ports");
    let listed = listed[0].as_array().context("no ports")?;
    let listed = listed.iter().map(|port| port["hostPort"].as_u64());
    assert_eq!(listed.collect::<Vec<_>>(), ports);

    let documents: Vec<serde_json::Value> = serde_saphyr::from_multiple(RBAC)?;
    let rules = documents
        .iter()
        .flat_map(|one| one["rules"].as_array().into_iter().flatten());
    let rules: Vec<_> = rules.collect();
    for resource in ["services", "endpointslices"] {
        let is_given = rules.iter().any(|rule| {
            let has = |field: &str, value: &str| {
                let values = rule[field].as_array().into_iter().flatten();
                values.into_iter().any(|one| one == value)
            };
            has("resources", resource) && has("verbs", "list") && has("verbs", "watch")
        });
        assert!(is_given, "{resource}");
    }
    Ok(())
}

/// If the kernel lacks IPVS, the error says so and names a remedy.
#[test]
#[ignore = "needs root"]
fn where_the_kernel_has_no_ipvs_the_agent_says_so() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    if node.exec("ipvsadm -Ln").is_ok() {
        println!("skipped: the kernel has IPVS");
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let flags = format!(
        "--service-manifests {} --service-proxy-mode ipvs",
        dir.path().display()
    );
    let ran = run_within(PATIENCE, &mut Start::new()?.with(&flags).command(node))?;
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("load the module ip_vs"),
        "{}",
        ran.stderr
    );
    // No IPVS state exists either, and removing none is not a failure.
    let removed = node.cli("cleanup --services ipvs")?.success()?;
    assert_eq!(removed, "nothing to remove\n");
    Ok(())
}

/// The prober opens its sockets last.
#[test]
#[ignore = "needs root"]
fn no_raw_sockets() -> anyhow::Result<()> {
    let start = Start::new()?
        .wrapped(&["setpriv", "--bounding-set", "-net_raw"])
        .with("--log-level warn");
    let bed = bed()?;
    start.fails(bed.node(1), &["raw", "Operation not permitted"])?;

    let node = bed.node(1);
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    let target = node.health_ipv4()?;
    node.kill_agent(Signal::SIGKILL)?;
    let pins = files(&node.pins())?;
    let ran = run_within(PATIENCE, &mut start.command(node))?;
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert_eq!(files(&node.pins())?, pins);
    assert!(node.pings(target)?);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_a_killed_agent_left_is_taken_over() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    node.kill_agent(Signal::SIGKILL)?;
    assert!(node.socket().exists());
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)
}

#[test]
#[ignore = "needs root"]
fn a_socket_that_somebody_else_serves() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    let _listener = UnixListener::bind(node.socket())?;
    let own_pid = std::process::id().to_string();
    Start::new()?.fails(node, &["health.sock", &own_pid])
}

#[test]
#[ignore = "needs root"]
fn an_unknown_interface() -> anyhow::Result<()> {
    Start::new()?
        .with("--device nosuch0")
        .fails(bed()?.node(1), &["nosuch0", "eth0"])
}

/// bpffs forbids dots in names, and links are pinned under a temporary name before they are renamed to their hook.
#[test]
#[ignore = "needs root"]
fn devices_of_any_name() -> anyhow::Result<()> {
    let devices = ["eth0", "a", "a_new", "a.b_new", "a+b_new", "a+2eb_new"];
    let flags: String = devices.map(|name| format!(" --device {name}")).concat();
    let bed = Bed::builder()
        .nodes(1)
        .without_agents()
        .agent_args(&flags)
        .start()?;
    let node = bed.node(1);
    for (number, name) in devices.iter().enumerate().skip(1) {
        node.exec(&format!(
            "ip link add name {name} type veth peer name peer{number}"
        ))?;
    }
    let programs = || -> anyhow::Result<Vec<u32>> {
        let query = |device: &&str| -> anyhow::Result<u32> {
            let [_, egress] = attached::programs(node, device)?;
            anyhow::ensure!(egress.len() == 1, "{egress:?} at {device}");
            Ok(egress[0].id)
        };
        devices.iter().map(query).collect()
    };
    let mut former = Vec::new();
    for _ in 0..2 {
        node.start_agent()?;
        bed.wait_all_reachable(PATIENCE)?;
        let serving = programs()?;
        assert!(serving.iter().all(|id| *id == serving[0]), "{serving:?}");
        assert_ne!(serving, former);
        former = serving;
        let listed = node.listing("bpf prog list")?.to_string();
        for device in devices {
            assert!(listed.contains(&format!("\"{device}/egress\"")), "{listed}");
        }
        let links = files(&node.pins().join("links"))?.len();
        assert_eq!(links, if has_tcx()? { 14 } else { 0 });
        node.kill_agent(Signal::SIGKILL)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_absent_nodes_file() -> anyhow::Result<()> {
    let start = Start {
        nodes_file: Path::new("/nonexistent/nodes.yaml").to_owned(),
        ..Start::new()?
    };
    start.fails(bed()?.node(1), &["/nonexistent/nodes.yaml"])
}

#[test]
#[ignore = "needs root"]
fn no_credentials_for_the_pods_of_kubernetes() -> anyhow::Result<()> {
    let bed = bed()?;
    let absent = Start::new()?.with("--pods-from-kubernetes=/nonexistent/config");
    absent.fails(bed.node(1), &["kubeconfig /nonexistent/config"])?;
    let none = Start::new()?
        .wrapped(&["env", "--unset=KUBECONFIG", "HOME=/nonexistent"])
        .with("--pods-from-kubernetes");
    none.fails(bed.node(1), &["--pods-from-kubernetes=PATH"])
}

#[test]
#[ignore = "needs root"]
fn an_unusable_nodes_file() -> anyhow::Result<()> {
    let bed = bed()?;
    let twice = |field: &str| {
        let second = registry("172.30.0.2", "10.244.2.0/24").replace("nodes:\n", "");
        let second = match field {
            "name" => second,
            _ => second
                .replace("hnode1", "hnode2")
                .replace("172.30.0.2", "172.30.0.1"),
        };
        registry("172.30.0.1", "10.244.1.0/24") + &second
    };
    let cases: [(String, &[&str]); 6] = [
        (String::new(), &["empty"]),
        ("nodes: []\n".to_owned(), &["nodes"]),
        ("nodes: [\n".to_owned(), &["line ", "column "]),
        (
            registry("not-an-address", "10.244.1.0/24"),
            &["line 3", "not-an-address"],
        ),
        (twice("name"), &["hnode1", "line "]),
        (twice("address"), &["172.30.0.1", "line "]),
    ];
    for (yaml, naming) in cases {
        bed.write_nodes_file(&yaml)?;
        let naming = [&[NODES_FILE], naming].concat();
        Start::new()?.fails(bed.node(1), &naming)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_node_that_the_registry_does_not_know() -> anyhow::Result<()> {
    let bed = bed()?;
    bed.write_nodes_file(&registry("172.30.0.1", "10.244.1.0/24").replace("hnode1", "other"))?;
    Start::new()?.fails(bed.node(1), &[NODES_FILE, "hnode1"])
}

#[test]
#[ignore = "needs root"]
fn a_udp_socket_on_the_port_is_no_hindrance() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    let _socket = node.run_in(|| UdpSocket::bind("172.30.0.1:4240"))??;
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)
}

#[test]
#[ignore = "needs root"]
fn the_endpoints_id_and_addresses_outlive_a_failed_start() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    node.kill_agent(Signal::SIGTERM)?;
    let state = node.runtime_dir().join("state/health-endpoint.json");
    let before = fs::read_to_string(&state)?;
    node.exec("ip link delete lxc_health")?;
    fs::remove_dir_all(node.pins())?;
    let in_the_way = node.pins().join("HEALTH_CT4");
    fs::create_dir_all(&in_the_way)?;

    let ran = run_within(PATIENCE, &mut Start::new()?.command(node))?;
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stderr.contains("HEALTH_CT4"), "{}", ran.stderr);
    assert_eq!(fs::read_to_string(&state)?, before);
    assert!(!node.exec("ip link")?.contains("lxc_health"));
    fs::remove_dir(&in_the_way)?;
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)
}

#[test]
#[ignore = "needs root"]
fn a_start_that_fails_late_leaves_no_identity_store() -> anyhow::Result<()> {
    // They are carried out just before the failure, and take long enough for the store to be used meanwhile.
    const DELETIONS: usize = 200;
    let bed = bed()?;
    let node = bed.node(1);
    let deletions = node.runtime_dir().join("deletions");
    fs::create_dir_all(&deletions)?;
    for number in 0..DELETIONS {
        let deletion = json!({ "container-id": format!("c{number}"), "ifname": "eth0" });
        fs::write(
            deletions.join(format!("{number}.json")),
            deletion.to_string(),
        )?;
    }
    // A folder, where the agent removes a file.
    let state = node.runtime_dir().join("state");
    fs::create_dir_all(state.join("service-health-checks.json"))?;

    let ran = run_within(PATIENCE, &mut Start::new()?.command(node))?;
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let why = "cannot remove the saved health-check answers";
    assert!(ran.stderr.contains(why), "{}", ran.stderr);
    assert_eq!(fs::read_dir(&deletions)?.count(), 1, "only the lock");
    let left = files(&state)?;
    let is_store = |path: &PathBuf| path.display().to_string().contains("identities");
    assert!(!left.iter().any(is_store), "{left:?}");
    Ok(())
}
