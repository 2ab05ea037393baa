//! Exec probes in real containers, run by containerd and by this host itself.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use health_probe::mechanism::exec::cri::{self, CriExec};
use health_probe::mechanism::exec::direct::{self, DirectExec};
use health_probe::mechanism::{Deadline, OUTPUT_LIMIT};
use health_probe::runtime::Runtime;
use health_probe::{Outcome, RawResult};
use tests::bed::agent_binary;
use tests::containerd::{Container, Containerd};
use tests::process::Running;
use tests::{PATIENCE, processes, wait_for};

/// Timeout for commands that do not end.
const SHORT: Duration = Duration::from_secs(2);
const SLEEP: &[&str] = &["/bin/sleep", "1000000"];

/// Containers, and the means to run probes in them.
struct Stand {
    containerd: Containerd,
    runtime: tokio::runtime::Runtime,
}

impl Stand {
    fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        Ok(Self {
            containerd: Containerd::start()?,
            runtime,
        })
    }

    fn container(&mut self, name: &str) -> anyhow::Result<Container> {
        self.containerd
            .run(name, SLEEP, None, &[("COLOUR", "green")])
    }

    fn direct(&self, container: &Container, script: &str, timeout: Duration) -> Outcome {
        let probe = sh(container.pid, script);
        self.runtime
            .block_on(direct::probe(&probe, Deadline::after(timeout)))
    }

    fn cri(&self, container: &Container, script: &str, timeout: Duration) -> Outcome {
        let _entered = self.runtime.enter();
        let runtime = Runtime::at(self.containerd.socket());
        let probe = CriExec::new(
            runtime,
            container.id.as_str(),
            Some(container.pid),
            words(script),
        );
        self.runtime
            .block_on(cri::probe(&probe, Deadline::after(timeout)))
    }
}

/// A way to run a command once.
type Probe = fn(&Stand, &Container, &str, Duration) -> Outcome;

/// The outcome of a command that does not end. On a busy machine, it gets more time to start.
fn stuck(stand: &Stand, probe: Probe, container: &Container, script: &str) -> Outcome {
    let mut timeout = SHORT;
    loop {
        let late = probe(stand, container, script, timeout);
        if !late.errored || timeout > PATIENCE {
            return late;
        }
        assert!(late.message.contains("start"), "{late:?}");
        timeout *= 2;
    }
}

fn words(script: &str) -> Vec<String> {
    ["sh", "-c", script].map(str::to_owned).to_vec()
}

fn sh(pid: u32, script: &str) -> DirectExec {
    DirectExec {
        pid,
        started: None,
        name: format!("{}{pid}", run_names()),
        command: words(script),
        program: Some(agent_binary().expect("an agent")),
    }
}

/// Prefix for the names of this test's runs, because machines share the control groups of their host.
fn run_names() -> &'static str {
    static NAMES: LazyLock<String> = LazyLock::new(|| format!("test-{:x}-", fastrand::u64(..)));
    &NAMES
}

fn outcome(result: RawResult, message: &str) -> Outcome {
    Outcome {
        result,
        message: message.to_owned(),
        errored: false,
    }
}

/// Number of control groups that this test's runs have.
fn groups() -> usize {
    processes::control_groups(Path::new("/sys/fs/cgroup"), run_names())
}

fn wait_gone(word: &str) -> anyhow::Result<()> {
    wait_for("the command's processes to be gone", PATIENCE, || {
        let left = processes::with_word(word);
        anyhow::ensure!(left == 0, "{left} of {word:?} are left");
        Ok(Some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn e1_e3_p7_commands_of_both_kinds_are_judged() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let container = stand.container("judged")?;
    for probe in [Stand::direct, Stand::cri] {
        let run = |script: &str| probe(&stand, &container, script, PATIENCE);
        assert_eq!(run("echo well"), outcome(RawResult::Success, "exit code 0"));
        assert_eq!(
            run("echo out; echo error >&2; exit 7"),
            outcome(RawResult::Failure, "exit code 7: out\nerror")
        );
        // The shell fails with its own exit code if the program does not exist.
        assert_eq!(run("no-such-program").result, RawResult::Failure);
        let killed = run("kill -9 $$");
        assert_eq!(killed, outcome(RawResult::Failure, "exit code 137"));
        let long = run("yes | head -c 100000; exit 1");
        assert!(
            long.message.len() <= OUTPUT_LIMIT + 100,
            "{}",
            long.message.len()
        );
        assert!(long.message.len() >= OUTPUT_LIMIT, "{}", long.message.len());
        // The command sees the container's environment and files.
        assert_eq!(
            run("echo $COLOUR; cat /bin/busybox > /dev/null && exit 3"),
            outcome(RawResult::Failure, "exit code 3: green")
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn e2_commands_that_cannot_be_run_are_errors() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let container = stand.container("none")?;
    let mut probe = sh(container.pid, "");
    probe.command = vec!["/no/such/program".to_owned()];
    let direct = stand
        .runtime
        .block_on(direct::probe(&probe, Deadline::after(PATIENCE)));
    let by_runtime = {
        let _entered = stand.runtime.enter();
        let runtime = Runtime::at(stand.containerd.socket());
        let probe = CriExec::new(runtime, container.id.as_str(), None, probe.command.clone());
        stand
            .runtime
            .block_on(cri::probe(&probe, Deadline::after(PATIENCE)))
    };
    for error in [&direct, &by_runtime] {
        assert_eq!(
            (error.result, error.errored),
            (RawResult::Unknown, true),
            "{error:?}"
        );
        assert!(error.message.contains("/no/such/program"), "{error:?}");
    }
    assert_eq!(
        direct.message,
        "cannot start /no/such/program: No such file or directory (os error 2)"
    );

    // The PID now belongs to another process.
    probe.started = Some(1);
    let later = stand
        .runtime
        .block_on(direct::probe(&probe, Deadline::after(PATIENCE)));
    assert!(
        later.errored && later.message.contains("another process has its PID"),
        "{later:?}"
    );

    stand.containerd.stop(&container)?;
    for probe in [Stand::direct, Stand::cri] {
        let gone = probe(&stand, &container, "exit 0", PATIENCE);
        assert_eq!(
            (gone.result, gone.errored),
            (RawResult::Unknown, true),
            "{gone:?}"
        );
    }
    assert_eq!(groups(), 0);
    Ok(())
}

/// The command ignores SIGTERM, and has a child, and a grandchild in another session.
#[test]
#[ignore = "needs root"]
fn e4_a_timeout_ends_all_processes_of_a_command() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let container = stand.container("stuck")?;
    let zombies_before = processes::zombies();
    for (probe, word) in [(Stand::direct as Probe, "777771"), (Stand::cri, "777772")] {
        let script = format!(
            "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep {word}; sleep {word}' & \
             sleep {word} & sleep {word}"
        );
        for _ in 0..3 {
            let late = stuck(&stand, probe, &container, &script);
            assert_eq!(
                (late.result, late.errored),
                (RawResult::Failure, false),
                "{late:?}"
            );
            assert!(late.message.starts_with("timeout: command"), "{late:?}");
            wait_gone(word)?;
        }
        // The next run is not delayed.
        assert_eq!(
            probe(&stand, &container, "exit 0", PATIENCE).result,
            RawResult::Success
        );
    }
    wait_for("nothing to be left of the runs", PATIENCE, || {
        Ok((groups() == 0).then_some(()))
    })?;
    // The container itself is not affected. Zombies are only printed: orphans of the runtime's runs are left to the
    // container's first process, which does not reap them.
    assert!(processes::with_word("1000000") > 0);
    println!(
        "zombies: {zombies_before} before, {} after",
        processes::zombies()
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_direct_run_leaves_no_zombies_and_no_background() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let container = stand.container("background")?;
    let before = processes::zombies();
    for _ in 0..5 {
        let script = "setsid sh -c 'sleep 777773; sleep 777773' & sleep 777773 & exit 0";
        let outcome = stand.direct(&container, script, PATIENCE);
        assert_eq!(outcome.result, RawResult::Success, "{outcome:?}");
        wait_gone("777773")?;
    }
    wait_for("no zombies", PATIENCE, || {
        Ok((processes::zombies() <= before).then_some(()))
    })?;
    assert_eq!(groups(), 0);
    Ok(())
}

/// The earlier run is like one that a killed agent has left over.
#[test]
#[ignore = "needs root"]
fn a_run_ends_an_earlier_one_first() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let container = stand.container("orphan")?;
    let probe = sh(container.pid, "trap '' TERM; sleep 777774");
    let earlier = stand
        .runtime
        .spawn(async move { direct::probe(&probe, Deadline::after(PATIENCE)).await });
    wait_for("the command to run", PATIENCE, || {
        Ok((processes::with_word("777774") > 0).then_some(()))
    })?;
    let script = "cat /proc/[0-9]*/cmdline; exit 5";
    let shown = stand.direct(&container, script, PATIENCE);
    assert!(shown.message.starts_with("exit code 5"), "{shown:?}");
    assert!(!shown.message.contains("777774"), "{shown:?}");
    let earlier = stand.runtime.block_on(earlier)?;
    assert_eq!(earlier, outcome(RawResult::Failure, "exit code 137"));
    Ok(())
}

/// A run shares the namespaces, root, control groups, user and capabilities of the container's first process.
#[test]
#[ignore = "needs root"]
fn a_direct_run_is_where_the_container_is() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    let own = stand.container("root")?;
    let user = stand.containerd.run("user", SLEEP, Some(1234), &[])?;
    for container in [&own, &user] {
        let shown = stand.direct(container, "cat /proc/self/status; exit 9", PATIENCE);
        let shown = shown.message;
        let expected = fs::read_to_string(format!("/proc/{}/status", container.pid))?;
        for field in ["Uid", "Gid", "CapBnd", "CapEff", "CapPrm", "NoNewPrivs"] {
            let value = |status: &str| {
                let mut lines = status.lines();
                let line = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
                line.map(str::to_owned).context(field)
            };
            assert_eq!(value(&shown)?, value(&expected)?, "{field}");
        }
        let namespaces = stand.direct(
            container,
            "cd /proc/self/ns; for n in mnt net ipc uts pid cgroup; do ls -l $n; done; exit 9",
            PATIENCE,
        );
        for name in ["mnt", "net", "ipc", "uts", "pid", "cgroup"] {
            let link = fs::read_link(format!("/proc/{}/ns/{name}", container.pid))?;
            let link = link.display().to_string();
            assert!(
                namespaces.message.contains(&link),
                "{name}: {link}: {namespaces:?}"
            );
        }
        // The run is subject to the container's limits.
        let running = fs::read_to_string(format!("/proc/{}/cgroup", container.pid))?;
        let seen = while_running(&stand, container)?;
        for line in running.lines().filter(|line| !line.starts_with("0::")) {
            assert!(seen.contains(line), "{line} is not in {seen}");
        }
    }
    Ok(())
}

/// The control groups of a command, read while it runs.
fn while_running(stand: &Stand, container: &Container) -> anyhow::Result<String> {
    let probe = sh(container.pid, "sleep 777776");
    let run = stand
        .runtime
        .spawn(async move { direct::probe(&probe, Deadline::after(PATIENCE)).await });
    let found = wait_for("the command to run", PATIENCE, || {
        for entry in fs::read_dir("/proc")?.flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if line == b"sleep\x00777776\x00" {
                return Ok(Some(fs::read_to_string(entry.path().join("cgroup"))?));
            }
        }
        Ok(None)
    })?;
    run.abort();
    wait_gone("777776")?;
    Ok(found)
}

/// A process without its own namespaces can be probed like a container.
#[test]
#[ignore = "needs root"]
fn a_process_of_the_host_can_be_joined() -> anyhow::Result<()> {
    let process = Running::start(Command::new("sleep").arg("1000001"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let pid = process.pid().as_raw().cast_unsigned();
    let run = |script: &str, timeout: Duration| {
        runtime.block_on(direct::probe(&sh(pid, script), Deadline::after(timeout)))
    };
    let ended = run("exit 0", PATIENCE);
    assert_eq!(ended, outcome(RawResult::Success, "exit code 0"));
    run("sleep 777778", SHORT);
    wait_gone("777778")
}

#[test]
#[ignore = "needs root"]
fn the_time_of_a_command_counts_from_its_start() -> anyhow::Result<()> {
    const TIMEOUT: Duration = Duration::from_secs(6);
    /// Minimum duration of the command's start. Together with its run time, it exceeds the timeout.
    const STALL: Duration = Duration::from_secs(4);
    const SCRIPT: &str = "sleep 3";
    let mut stand = Stand::start()?;
    let container = stand.container("late-start")?;
    stand.containerd.hang()?;
    let outcome = thread::scope(|scope| {
        let containerd = &stand.containerd;
        let going_on = scope.spawn(|| {
            thread::sleep(STALL);
            containerd.go_on()
        });
        let begun = Instant::now();
        let outcome = stand.cri(&container, SCRIPT, TIMEOUT);
        assert!(begun.elapsed() > TIMEOUT, "{outcome:?}");
        going_on.join().expect("no panic")?;
        anyhow::Ok(outcome)
    })?;
    assert_eq!(outcome, self::outcome(RawResult::Success, "exit code 0"));
    Ok(())
}
