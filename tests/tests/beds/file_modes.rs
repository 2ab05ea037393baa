//! An agent's files are its own: another user can neither open, lock, replace nor link any of them.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use health_net::netns::{self, NetNs};
use nix::unistd::Group;
use tempfile::TempDir;
use tests::bed::{BPFFS, NODES_FILE, agent_binary};
use tests::process::{Running, run};
use tests::{Bed, Member, Node, PATIENCE, wait_for};

const NOBODY: u32 = 65534;
const NAMESPACE: &str = "h-modes";
/// Prints each path with the operations that succeed on it. `$1` is a folder owned by the user; the other arguments are
/// the paths.
const ATTACK: &str = r#"
own=$1; shift
for path in "$@"; do
    if [ -d "$path" ]; then ls "$path" >/dev/null 2>&1 && echo "list $path"
    else (exec 3<"$path") 2>/dev/null && echo "read $path"
         (exec 3>>"$path") 2>/dev/null && echo "write $path"
    fi
    flock -n "$path" true 2>/dev/null && echo "lock $path"
    ln "$path" "$own/link" 2>/dev/null && { echo "link $path"; rm -f "$own/link"; }
    : >"$own/other"
    mv -f "$own/other" "$path" 2>/dev/null </dev/null && echo "replace $path"
done
true
"#;

/// An agent's folders, inside one that every user may traverse.
struct Place {
    // Dropped last.
    dir: TempDir,
    /// Folder owned by the user nobody.
    own: PathBuf,
}

impl Place {
    fn new() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        let own = dir.path().join("own");
        fs::create_dir(&own)?;
        chown(&own, Some(NOBODY), Some(NOBODY))?;
        Ok(Self { dir, own })
    }

    fn runtime_dir(&self) -> PathBuf {
        self.dir.path().join("run/agent")
    }

    fn state_dir(&self) -> PathBuf {
        self.dir.path().join("lib/agent")
    }

    fn socket(&self) -> PathBuf {
        self.runtime_dir().join("health.sock")
    }

    fn cli(&self, node: &Node) -> anyhow::Result<Command> {
        let mut command = Command::new(agent_binary()?);
        command
            .arg("--netns")
            .arg(node.netns())
            .args(["--instance", node.name(), "--bpf-root", BPFFS])
            .arg("--runtime-dir")
            .arg(self.runtime_dir())
            .arg("--state-dir")
            .arg(self.state_dir());
        Ok(command)
    }

    fn start(&self, node: &Node, flags: &[&str]) -> anyhow::Result<Running> {
        let mut command = self.cli(node)?;
        command
            .args([
                "run",
                "--node-name",
                node.name(),
                "--nodes-file",
                NODES_FILE,
            ])
            .args(flags);
        let agent = Running::start(&mut command)?;
        wait_for("the agent to be up", PATIENCE, || {
            let listed = run(self.cli(node)?.args(["endpoint", "list"]))?;
            Ok((listed.code == Some(0)).then_some(()))
        })?;
        Ok(agent)
    }

    /// Returns the operations that the user nobody, in this group, can perform on these paths.
    fn attacked(&self, group: u32, paths: &[PathBuf]) -> anyhow::Result<String> {
        let mut attack = as_nobody(group);
        attack.args(["sh", "-c", ATTACK, "attack"]).arg(&self.own);
        run(attack.args(paths))?.success()
    }
}

fn as_nobody(group: u32) -> Command {
    let mut command = Command::new("setpriv");
    command
        .arg(format!("--reuid={NOBODY}"))
        .arg(format!("--regid={group}"))
        .arg("--clear-groups");
    command
}

/// Lists a folder and everything in it.
fn below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = vec![folder.to_owned()];
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => found.extend(below(&entry.path())?),
            false => found.push(entry.path()),
        }
    }
    Ok(found)
}

fn mode(path: &Path) -> anyhow::Result<u32> {
    Ok(fs::symlink_metadata(path)?.mode() & 0o7777)
}

#[test]
#[ignore = "needs root"]
fn nobody_can_do_anything_with_what_an_agent_keeps() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    let place = Place::new()?;
    // The paths as an earlier version left them.
    fs::create_dir_all(place.runtime_dir())?;
    fs::create_dir_all(place.state_dir().join("endpoints"))?;
    let former = ["identities.json.lock", "learned.json"].map(|name| place.state_dir().join(name));
    for path in &former {
        fs::write(path, "")?;
    }
    let former_pid = place.runtime_dir().join("health-agent.pid");
    fs::write(&former_pid, "4194304\n")?;
    let open: Vec<PathBuf> = former.iter().chain([&former_pid]).cloned().collect();
    let found = place.attacked(NOBODY, &open)?;
    for path in &open {
        for what in ["read", "lock"] {
            let line = format!("{what} {}", path.display());
            ensure!(found.contains(&line), "the attack finds nothing: {found}");
        }
    }

    let agent = place.start(node, &[])?;
    // A killed test may have left a namespace behind.
    netns::remove(NAMESPACE)?;
    let workload = NetNs::create(NAMESPACE)?;
    let made = run(place
        .cli(node)?
        .args(["endpoint", "create", "--netns"])
        .arg(workload.path())
        .args(["--label", "app=a", "--container-id", "c1"]))?;
    made.success()?;
    wait_for("the agent to write its files", PATIENCE, || {
        let files = ["identities.json", "learned.json"];
        let are_there = files
            .iter()
            .all(|name| place.state_dir().join(name).exists());
        Ok((are_there
            && place
                .state_dir()
                .join("endpoints")
                .read_dir()?
                .next()
                .is_some())
        .then_some(()))
    })?;
    let mut paths = below(&place.runtime_dir())?;
    paths.extend(below(&place.state_dir())?);
    paths.extend(below(&node.pins())?);
    ensure!(paths.len() > 20, "{paths:?}");
    for path in &paths {
        let is_folder = path.is_dir();
        let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
        let expected = match (is_folder, is_socket) {
            (true, _) => 0o700,
            (_, true) => 0o660,
            _ => 0o600,
        };
        ensure!(
            mode(path)? == expected,
            "{} has mode {:o}",
            path.display(),
            mode(path)?
        );
    }
    let found = place.attacked(NOBODY, &paths)?;
    ensure!(found.is_empty(), "nobody can:\n{found}");
    drop(agent);
    netns::remove(NAMESPACE)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_group_reaches_the_socket_and_nothing_else() -> anyhow::Result<()> {
    const GROUP: &str = "daemon";
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    let place = Place::new()?;
    let group = Group::from_name(GROUP)?
        .context("no such group")?
        .gid
        .as_raw();
    let reaches = |group: u32| {
        let mut test = as_nobody(group);
        test.args(["test", "-w"]).arg(place.socket());
        anyhow::Ok(run(&mut test)?.code == Some(0))
    };
    let agent = place.start(node, &["--socket-group", GROUP])?;
    ensure!(reaches(group)?, "the group does not reach the socket");
    ensure!(!reaches(NOBODY)?, "everybody reaches the socket");
    let runtime_dir = place.runtime_dir();
    ensure!(mode(&runtime_dir)? == 0o750 && fs::metadata(&runtime_dir)?.gid() == group);
    let mut paths = below(&runtime_dir)?;
    paths.extend(below(&place.state_dir())?);
    let found = place.attacked(group, &paths)?;
    let listed = format!("list {}", runtime_dir.display());
    let locked = format!("lock {}", runtime_dir.display());
    // Whether names in a folder visible to the group may be hard-linked depends on a kernel setting
    // (fs.protected_hardlinks).
    let others: Vec<&str> = found
        .lines()
        .filter(|line| *line != listed && *line != locked && !line.starts_with("link "))
        .collect();
    ensure!(others.is_empty(), "the group can: {others:?}");
    drop(agent);

    // Without the flag, the group of the last start loses access.
    let _agent = place.start(node, &[])?;
    ensure!(!reaches(group)?, "the former group reaches the socket");
    ensure!(mode(&runtime_dir)? == 0o700);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn locks_that_another_user_holds_already_are_named() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    let place = Place::new()?;
    fs::create_dir_all(place.runtime_dir())?;
    fs::create_dir_all(place.state_dir())?;
    let pid_file = place.runtime_dir().join("health-agent.pid");
    let lock_file = place.state_dir().join("identities.json.lock");
    for path in [&pid_file, &lock_file] {
        fs::write(path, "4194304\n")?;
    }
    let hold = |path: &Path| {
        let mut hold = as_nobody(NOBODY);
        let held = Running::start(
            hold.args(["flock", "-o"])
                .arg(path)
                .args(["sleep", "infinity"]),
        )?;
        wait_for(
            "nobody to hold the lock",
            PATIENCE,
            || match fs::File::open(path)?.try_lock() {
                Ok(()) => Ok(None),
                Err(fs::TryLockError::WouldBlock) => Ok(Some(())),
                Err(fs::TryLockError::Error(error)) => Err(error.into()),
            },
        )?;
        anyhow::Ok(held)
    };
    let held = hold(&pid_file)?;
    let mut start = place.cli(node)?;
    let ran = run(start.args([
        "run",
        "--node-name",
        node.name(),
        "--nodes-file",
        NODES_FILE,
    ]))?;
    ensure!(ran.code == Some(1), "{}", ran.stderr);
    for words in ["flock, user 65534", pid_file.to_str().context("a path")?] {
        ensure!(
            ran.stderr.contains(words),
            "no {words:?} in: {}",
            ran.stderr
        );
    }
    drop(held);
    match fs::remove_file(&pid_file) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }

    // New endpoints fail closed, and the error names the holder of the lock.
    let _held = hold(&lock_file)?;
    let _agent = place.start(node, &[])?;
    wait_for("the holder to be named", PATIENCE, || {
        let status = run(place.cli(node)?.args(["status", "-o", "json"]))?.success()?;
        ensure!(status.contains("flock, user 65534"), "{status}");
        Ok(Some(()))
    })
}

/// A lock on the folder of named namespaces, which any user may open, does not keep agents from starting.
#[test]
#[ignore = "needs root"]
fn a_lock_on_the_folder_of_namespaces_keeps_no_agent_from_its_start() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    let mut hold = as_nobody(NOBODY);
    let _held = Running::start(hold.args(["flock", "-o", "/run/netns", "sleep", "infinity"]))?;
    node.start_agent()?;
    wait_for(
        "the agent to have taken over its endpoints",
        PATIENCE,
        || Ok(node.listing("endpoint list").ok()),
    )?;
    let member = Member::on(node, "locked", "--label app=a")?;
    ensure!(member.endpoint.state == "ready", "{:?}", member.endpoint);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn each_group_reaches_only_its_socket() -> anyhow::Result<()> {
    const ADMINS: &str = "daemon";
    const READERS: &str = "bin";
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    let place = Place::new()?;
    let reader = place.runtime_dir().join("reader.sock");
    let reached = |group: u32| -> anyhow::Result<[bool; 2]> {
        let reaches = |socket: &Path| {
            let mut test = as_nobody(group);
            test.args(["test", "-w"]).arg(socket);
            anyhow::Ok(run(&mut test)?.code == Some(0))
        };
        Ok([reaches(&place.socket())?, reaches(&reader)?])
    };
    let group = |name: &str| -> anyhow::Result<u32> {
        let group = Group::from_name(name)?.context("no such group")?;
        Ok(group.gid.as_raw())
    };
    let flags = [
        "--socket-group",
        ADMINS,
        "--read-only-socket-group",
        READERS,
    ];
    let agent = place.start(node, &flags)?;
    ensure!(reached(group(ADMINS)?)? == [true, false]);
    ensure!(reached(group(READERS)?)? == [false, true]);
    ensure!(reached(NOBODY)? == [false, false]);
    let url = format!("unix:{}", reader.display());
    let ask = |words: &[&str]| run(place.cli(node)?.args(words).args(["--api-url", &url]));
    ask(&["endpoint", "list"])?.success()?;
    let refused = ask(&["policy", "mode", "always"])?;
    ensure!(refused.stderr.contains("may only read"), "{refused:?}");
    drop(agent);

    // Without the flag, the socket of the last start goes.
    let _agent = place.start(node, &[])?;
    ensure!(!reader.exists());
    ensure!(mode(&place.runtime_dir())? == 0o700);
    Ok(())
}
