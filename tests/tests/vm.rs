//! Virtual machines of `cargo xtask`: they return a command's output and exit code. A failure is reported in one line
//! and leaves no process behind.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::bed::agent_binary;
use tests::process::RunOutput;
use tests::{PATIENCE, wait_for};

/// Environment variable in every process that a test starts. Its value is unique to the test, so that the test finds
/// leftover processes.
const MARK: &str = "HEALTH_AGENT_VM_TEST";

/// The smaller of the tested kernels.
const KERNEL: &str = "--vm=6.1";

#[test]
#[ignore = "needs qemu"]
fn output_and_exit_code_of_a_command_come_back() -> anyhow::Result<()> {
    let xtask = Xtask::new("output")?;
    let script = "echo out; echo err >&2; printf no-newline; exit 7";
    let ran = xtask.run(&[KERNEL, "--", "sh", "-c", script])?;
    assert_eq!(ran.code, Some(7), "{}", ran.stderr);
    assert_eq!(ran.stdout, "out\nno-newline");
    assert!(
        ran.stderr.lines().any(|line| line == "err"),
        "{}",
        ran.stderr
    );

    let killed = xtask.run(&[KERNEL, "--", "sh", "-c", "kill -TERM $$"])?;
    assert_eq!(killed.code, Some(128 + 15), "{}", killed.stderr);
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn any_kernel_image_boots_with_the_modules_beside_it() -> anyhow::Result<()> {
    let xtask = Xtask::new("image")?;
    // Installs the kernel if no earlier test did.
    let release = xtask.run(&[KERNEL, "--", "uname", "-r"])?.success()?;
    let image = xtask
        .root
        .join("target/kernels/6.1/boot")
        .join(format!("vmlinuz-{}", release.trim_end()));
    let image = format!("--kernel-image={}", image.display());
    let script = "uname -r; ip link add d0 type dummy && ip -br link show d0";
    let ran = xtask.run(&[&image, "--", "sh", "-c", script])?;
    let stdout = ran.success()?;
    assert!(
        stdout.starts_with(&release) && stdout.contains("d0"),
        "{stdout}"
    );
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn a_guest_can_have_another_processor() -> anyhow::Result<()> {
    let xtask = Xtask::new("arch")?;
    let script = "uname -m; sysctl -n net.ipv4.ip_forward; ip -br link show lo | cut -c1-2; exit 7";
    let ran = xtask.run(&["--vm=6.12", "--arch=aarch64", "--", "sh", "-c", script])?;
    assert_eq!(ran.code, Some(7), "{}", ran.stderr);
    assert_eq!(ran.stdout, "aarch64\n0\nlo\n");
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn a_panic_of_the_kernel_is_reported() -> anyhow::Result<()> {
    let xtask = Xtask::new("panic")?;
    let crash = "echo c > /proc/sysrq-trigger";
    let ran = xtask.run(&[KERNEL, "--", "sh", "-c", crash])?;
    fails_with(&ran, "panicked, not syncing: sysrq triggered crash");
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn a_guest_that_does_not_end_is_ended() -> anyhow::Result<()> {
    let xtask = Xtask::new("hang")?;
    let ran = xtask.run(&[KERNEL, "--vm-limit=20", "--", "sleep", "1000"])?;
    fails_with(&ran, "its limit of 20 s");
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn an_image_that_does_not_boot_is_reported() -> anyhow::Result<()> {
    let xtask = Xtask::new("dead")?;
    let folder = tempfile::tempdir()?;
    let image = folder.path().join("image");
    // The header fields that a boot loader checks (Documentation/arch/x86/boot.rst in the kernel tree), without any
    // code.
    let mut bytes = vec![0; 64 * 1024];
    bytes[0x1f1] = 4;
    bytes[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    bytes[0x202..0x206].copy_from_slice(b"HdrS");
    bytes[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    bytes[0x20e..0x210].copy_from_slice(&0x200_u16.to_le_bytes());
    bytes[0x211] = 1;
    bytes[0x22c..0x230].copy_from_slice(&u32::MAX.to_le_bytes());
    bytes[0x400..0x406].copy_from_slice(b"9.9.9 ");
    fs::write(&image, bytes)?;
    let image = format!("--kernel-image={}", image.display());
    let ran = xtask.run(&[&image, "--vm-limit=5", "--", "true"])?;
    fails_with(
        &ran,
        "Linux 9.9.9 did not start its first process within 5 s",
    );
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn what_is_no_kernel_is_reported() -> anyhow::Result<()> {
    let xtask = Xtask::new("image")?;
    for (image, expected) in [
        ("Cargo.toml", "is not a kernel image for x86-64 (bzImage)"),
        ("none", "cannot read none: No such file or directory"),
    ] {
        let ran = xtask.run(&["--kernel-image", image, "--", "true"])?;
        fails_with(&ran, expected);
    }
    let ran = xtask.run(&["--vm=six", "--", "true"])?;
    fails_with(&ran, "invalid kernel version six");
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn a_missing_qemu_is_reported() -> anyhow::Result<()> {
    let xtask = Xtask::new("qemu")?;
    let programs = tempfile::tempdir()?;
    for entry in fs::read_dir("/usr/bin")? {
        let entry = entry?;
        let name = entry.file_name();
        let shown = name.to_string_lossy();
        // With apt-get, xtask would install QEMU.
        if !shown.starts_with("qemu-system") && shown != "apt-get" {
            symlink(entry.path(), programs.path().join(&name))?;
        }
    }
    let mut command = xtask.command(&[KERNEL, "--", "true"]);
    command.env("PATH", programs.path());
    let ran = tests::process::run(&mut command)?;
    fails_with(&ran, "install these Debian packages: qemu-system-x86");
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn a_full_disk_for_the_cache_is_reported() -> anyhow::Result<()> {
    let xtask = Xtask::new("disk")?;
    let cache = xtask.root.join("target/kernels");
    fs::create_dir_all(&cache)?;
    // The mount is only visible to this command.
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c"])
        .arg(r#"mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@""#)
        .arg(&cache)
        .arg(&xtask.program)
        .args(["vm", KERNEL, "--tools-only", "--", "true"]);
    xtask.prepare(&mut command);
    fails_with(
        &tests::process::run(&mut command)?,
        "not enough disk space in ",
    );
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn an_interrupt_reaches_the_command_and_ends_the_guest() -> anyhow::Result<()> {
    let xtask = Xtask::new("interrupt")?;
    let script = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done";
    let child = xtask.start(&[KERNEL, "--", "sh", "-c", script])?;
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT)?;
    let output = child.wait_with_output()?;
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "caught\n");
    xtask.nothing_is_left()
}

#[test]
#[ignore = "needs qemu"]
fn nothing_outlives_a_killed_xtask() -> anyhow::Result<()> {
    let mut xtask = Xtask::new("kill")?;
    let files = tempfile::tempdir()?;
    xtask.temporary = Some(files.path().to_owned());
    let mut child = xtask.start(&[KERNEL, "--", "sh", "-c", "echo ready; sleep 1000"])?;
    ensure!(!xtask.processes()?.is_empty(), "the mark is not found");
    child.kill()?;
    child.wait()?;
    wait_for("the end of qemu", PATIENCE, || {
        Ok(xtask.processes()?.is_empty().then_some(()))
    })?;
    assert_eq!(fs::read_dir(files.path())?.count(), 0);
    for entry in fs::read_dir(xtask.root.join("target/vm"))? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        assert!(!name.starts_with('.'), "{name} is left");
    }
    Ok(())
}

/// Checks that the command failed with exactly one error line, which contains `expected`.
fn fails_with(ran: &RunOutput, expected: &str) {
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let errors: Vec<_> = ran
        .stderr
        .lines()
        .filter(|line| line.starts_with("error: "))
        .collect();
    assert_eq!(errors.len(), 1, "{}", ran.stderr);
    assert!(ran.stderr.trim_end().ends_with(errors[0]), "{}", ran.stderr);
    assert!(errors[0].contains(expected), "{}", ran.stderr);
}

/// Runs `cargo xtask vm` for one test.
struct Xtask {
    program: PathBuf,
    root: PathBuf,
    mark: String,
    /// Folder for temporary files, if not the default.
    temporary: Option<PathBuf>,
}

impl Xtask {
    fn new(test: &str) -> anyhow::Result<Self> {
        let program = agent_binary()?.with_file_name("xtask");
        ensure!(
            program.is_file(),
            "{} is missing; run: cargo build --package xtask",
            program.display()
        );
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
        Ok(Self {
            program,
            root: root.context("no folder above the tests")?.to_owned(),
            mark: format!("{test}-{}", std::process::id()),
            temporary: None,
        })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["vm", "--tools-only"]).args(arguments);
        self.prepare(&mut command);
        command
    }

    fn prepare(&self, command: &mut Command) {
        command
            .current_dir(&self.root)
            .env("CARGO_MANIFEST_DIR", self.root.join("xtask"))
            .env(MARK, &self.mark);
        if let Some(temporary) = &self.temporary {
            command.env("TMPDIR", temporary);
        }
    }

    fn run(&self, arguments: &[&str]) -> anyhow::Result<RunOutput> {
        tests::process::run(&mut self.command(arguments))
    }

    /// Starts a command that prints `ready`, and waits for that line.
    fn start(&self, arguments: &[&str]) -> anyhow::Result<Child> {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run xtask")?;
        let stdout = child.stdout.as_mut().context("no standard output")?;
        let mut line = String::new();
        // The command prints nothing between this line and the signal, so no byte is lost in the buffer.
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "ready\n", "it printed {line:?}");
        Ok(child)
    }

    /// Command lines of the test's processes that are still running.
    fn processes(&self) -> anyhow::Result<Vec<String>> {
        let mark = format!("{MARK}={}", self.mark);
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let process = entry?.path();
            // Exiting processes and zombies have no environment.
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            if environment
                .split(|&byte| byte == 0)
                .any(|variable| variable == mark.as_bytes())
            {
                let line = fs::read(process.join("cmdline")).unwrap_or_default();
                found.push(String::from_utf8_lossy(&line).replace('\0', " "));
            }
        }
        Ok(found)
    }

    fn nothing_is_left(&self) -> anyhow::Result<()> {
        let left = self.processes()?;
        ensure!(left.is_empty(), "left behind: {left:?}");
        Ok(())
    }
}
