//! One virtual machine: qemu with the kernel's console and the guest's frames on sockets, watched until the plan is
//! done or something goes wrong. It never outlives this process.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use vm_init::{Frame, Order, ProgramExit, Report};

use super::kernel::Kernel;
use crate::arch::Arch;
use crate::process::cannot_run;

/// Maximum time until the first process runs. Under software emulation, the kernel takes 3 s, and a large initramfs on
/// a busy machine adds to that.
const BOOTING: Duration = Duration::from_secs(300);

/// Maximum silence of a guest, which sends a heartbeat every two seconds.
const SILENCE: Duration = Duration::from_secs(90);

/// Maximum time that commands may take to exit after an interrupt, and that the guest may take to power off.
const ENDING: Duration = Duration::from_secs(30);

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accelerator {
    /// The CPU itself, through KVM.
    Kvm,
    /// Software emulation.
    Emulation,
}

impl Accelerator {
    fn flags(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Emulation => ["-accel", "tcg", "-cpu", "max"],
        }
    }

    /// Number of CPUs of a guest. With several CPUs, emulators such as QEMU 7.2 may let one CPU run old code while
    /// another patches it, as Linux does for static keys. The result is a panic, `Oops: int3`.
    fn processors(self) -> usize {
        match self {
            Self::Kvm => thread::available_parallelism().map_or(1, |cpus| cpus.get().min(4)),
            Self::Emulation => 1,
        }
    }
}

/// The machine to start.
pub(crate) struct Machine<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) initramfs: &'a fs::File,
    pub(crate) accelerator: Accelerator,
    /// Maximum time from start to end; `None` for no limit.
    pub(crate) limit: Option<Duration>,
    /// The file for the kernel's console.
    pub(crate) console: PathBuf,
}

/// The guest's output, as it arrives.
pub(crate) enum MachineOutput<'a> {
    Booted,
    Stdout(&'a [u8]),
    Stderr(&'a [u8]),
    /// The plan's command with this index exited.
    Ended(usize, ProgramExit),
}

/// Why watching a machine ended.
enum End {
    Done,
    Interrupted,
}

enum Event {
    Console(String),
    Frame(Frame),
    /// Something other than frames arrived on the line.
    Garbled(std::io::Error),
    LineClosed,
    Interrupted,
}

impl Machine<'_> {
    /// Runs the machine until it powers off or a signal arrives. On a signal, interrupts the command, shuts the guest
    /// down, cleanly if possible, and returns false.
    pub(crate) fn run(
        &self,
        mut said: impl FnMut(MachineOutput) -> anyhow::Result<()>,
    ) -> anyhow::Result<bool> {
        let (events, incoming) = channel();
        let signals = SignalThread::start(events.clone())?;
        let (mut qemu, console, line) = self.start()?;
        let orders = line.try_clone().context("cannot share a socket")?;
        thread::spawn({
            let events = events.clone();
            move || read_console(console, &events)
        });
        thread::spawn(move || read_line(line, &events));

        let watched = Watch {
            machine: self,
            incoming,
            orders,
            console: fs::File::create(&self.console)
                .with_context(|| format!("cannot write {}", self.console.display()))?,
            start: Instant::now(),
            booted: false,
            interrupted: None,
            panic: None,
        }
        .follow(&mut said);
        drop(signals);
        match watched {
            // The kernel now powers off by itself.
            Ok(End::Done) => qemu.wait(ENDING).map(|()| true),
            Ok(End::Interrupted) => Ok(false),
            Err(error) => Err(qemu.why().unwrap_or(error)),
        }
    }

    /// Starts qemu. Returns it with this process's ends of the console and the line. Only one qemu is started at a
    /// time: another one started meanwhile would keep these ends open too.
    fn start(&self) -> anyhow::Result<(Qemu, UnixStream, UnixStream)> {
        static STARTING: Mutex<()> = Mutex::new(());
        let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let (console, console_of_qemu) = socket_pair()?;
        let (line, line_of_qemu) = socket_pair()?;
        let qemu = Qemu::start(self.command([console_of_qemu, line_of_qemu])?)?;
        Ok((qemu, console, line))
    }

    fn command(&self, sockets: [OwnedFd; 2]) -> anyhow::Result<QemuCommand> {
        let initramfs = self.initramfs.metadata();
        let initramfs = initramfs.context("cannot read the initramfs")?;
        // Memory for the archive, its files, and working space.
        let memory_mib = (initramfs.len() >> 20) * 3 + 1536;
        // The kernel kills qemu if this process exits for any reason.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--", self.kernel.arch.qemu()])
            .args(self.accelerator.flags())
            .args([
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-no-reboot",
            ])
            .args(["-m", &memory_mib.to_string()])
            .args(["-smp", &self.accelerator.processors().to_string()]);
        for (name, socket) in ["console", "line"].into_iter().zip(&sockets) {
            command.args([
                "-chardev",
                &format!("socket,id={name},fd={}", socket.as_raw_fd()),
            ]);
        }
        command.args(["-serial", "chardev:console"]);
        let console = match self.kernel.arch {
            Arch::X86_64 => {
                command.args(["-serial", "chardev:line"]);
                "ttyS0"
            }
            // These boards have a serial line of their own.
            Arch::Aarch64 => {
                command.args(["-machine", "virt", "-device", "pci-serial,chardev=line"]);
                "ttyAMA0"
            }
        };
        let (own, initramfs) = (std::process::id(), self.initramfs.as_raw_fd());
        command
            .arg("-kernel")
            .arg(&self.kernel.image)
            .args(["-initrd", &format!("/proc/{own}/fd/{initramfs}")])
            // Panics and similar fatal errors stop qemu.
            .args([
                "-append",
                &format!("console={console} quiet panic=-1 oops=panic"),
            ]);
        Ok(QemuCommand { command, sockets })
    }
}

/// The state of a running machine.
struct Watch<'a> {
    machine: &'a Machine<'a>,
    incoming: Receiver<Event>,
    orders: UnixStream,
    console: fs::File,
    start: Instant,
    booted: bool,
    interrupted: Option<Instant>,
    panic: Option<String>,
}

impl Watch<'_> {
    /// Watches the machine until it is done.
    fn follow(
        mut self,
        said: &mut impl FnMut(MachineOutput) -> anyhow::Result<()>,
    ) -> anyhow::Result<End> {
        let mut heard = Instant::now();
        loop {
            let deadline = self.deadline(heard);
            let event = self
                .incoming
                .recv_timeout(deadline.saturating_duration_since(Instant::now()));
            match event {
                Ok(Event::Console(text)) => self.console(&text)?,
                Ok(Event::Frame(frame)) => {
                    heard = Instant::now();
                    match frame {
                        Frame::Stdout(bytes) => said(MachineOutput::Stdout(&bytes))?,
                        Frame::Stderr(bytes) => said(MachineOutput::Stderr(&bytes))?,
                        Frame::Report(Report::Booted) => {
                            self.booted = true;
                            said(MachineOutput::Booted)?;
                        }
                        Frame::Report(Report::Ended(index, ended)) => {
                            said(MachineOutput::Ended(index, ended))?;
                        }
                        Frame::Report(Report::Done) => {
                            return Ok(self.interrupted.map_or(End::Done, |_| End::Interrupted));
                        }
                        Frame::Report(Report::Failed(error)) => {
                            bail!("the guest's first process failed: {error}")
                        }
                        Frame::Report(Report::Alive) | Frame::Order(_) => {}
                    }
                }
                Ok(Event::Garbled(error)) => {
                    bail!("the guest sent something other than frames: {error}")
                }
                Ok(Event::Interrupted) if self.interrupted.is_none() && self.booted => {
                    self.interrupted = Some(Instant::now());
                    Frame::Order(Order::Interrupt)
                        .write_to(&mut self.orders)
                        .context("cannot reach the guest")?;
                }
                Ok(Event::Interrupted) => return Ok(End::Interrupted),
                Ok(Event::LineClosed) => return Err(self.ended_early()),
                Err(RecvTimeoutError::Timeout) if self.interrupted.is_some() => {
                    return Ok(End::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) => return Err(self.too_late()),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the reader of qemu's output has stopped")
                }
            }
        }
    }

    fn console(&mut self, text: &str) -> anyhow::Result<()> {
        if let Some((_, panic)) = text.split_once("Kernel panic - ") {
            self.panic.get_or_insert(panic.trim_end().to_owned());
        }
        writeln!(self.console, "{text}")
            .with_context(|| format!("cannot write {}", self.machine.console.display()))
    }

    fn deadline(&self, heard: Instant) -> Instant {
        let silent = if self.booted {
            heard + SILENCE
        } else {
            self.start + BOOTING
        };
        let interrupted = self.interrupted.map(|since| since + ENDING);
        let limit = self.machine.limit.map(|limit| self.start + limit);
        [Some(silent), interrupted, limit]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(silent)
    }

    fn too_late(&self) -> anyhow::Error {
        let release = &self.machine.kernel.release;
        let console = self.machine.console.display();
        let seconds = self.start.elapsed().as_secs();
        if !self.booted {
            anyhow!("Linux {release} did not start its first process within {seconds} s: {console}")
        } else if self
            .machine
            .limit
            .is_some_and(|limit| self.start.elapsed() >= limit)
        {
            anyhow!("the guest exceeded its limit of {seconds} s")
        } else {
            anyhow!(
                "the guest hangs: no heartbeat for {} s: {console}",
                SILENCE.as_secs()
            )
        }
    }

    /// qemu closed the line before the plan was done. Earlier console output may still arrive.
    fn ended_early(&mut self) -> anyhow::Error {
        while let Ok(event) = self.incoming.recv_timeout(Duration::from_secs(1)) {
            if let Event::Console(text) = event
                && let Err(error) = self.console(&text)
            {
                return error;
            }
        }
        let release = &self.machine.kernel.release;
        let console = self.machine.console.display();
        match &self.panic {
            Some(panic) => anyhow!("Linux {release} panicked, {panic}: {console}"),
            None => anyhow!("the guest ended before its plan was done: {console}"),
        }
    }
}

fn read_console(console: UnixStream, events: &Sender<Event>) {
    let mut reader = BufReader::new(console);
    let mut text = Vec::new();
    while reader
        .read_until(b'\n', &mut text)
        .is_ok_and(|read| read > 0)
    {
        let shown = String::from_utf8_lossy(&text).trim_end().to_owned();
        text.clear();
        if events.send(Event::Console(shown)).is_err() {
            return;
        }
    }
}

fn read_line(line: UnixStream, events: &Sender<Event>) {
    let mut reader = BufReader::new(line);
    loop {
        let event = match Frame::read_from(&mut reader) {
            Ok(Some(frame)) => Event::Frame(frame),
            Ok(None) => Event::LineClosed,
            // After a process is killed, its peers may see this error instead of an end of file.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Event::LineClosed,
            Err(error) => Event::Garbled(error),
        };
        let last = !matches!(event, Event::Frame(_));
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// Creates two connected sockets, the second one for a process to be started.
fn socket_pair() -> anyhow::Result<(UnixStream, OwnedFd)> {
    let (own, other) = UnixStream::pair().context("cannot create sockets")?;
    let other = OwnedFd::from(other);
    fcntl(&other, FcntlArg::F_SETFD(FdFlag::empty())).context("cannot pass on a socket")?;
    Ok((own, other))
}

/// Forwards signals as events until it is dropped.
struct SignalThread(Handle);

impl SignalThread {
    fn start(events: Sender<Event>) -> anyhow::Result<Self> {
        let mut signals =
            Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
        let handle = signals.handle();
        thread::spawn(move || {
            for _ in signals.forever() {
                if events.send(Event::Interrupted).is_err() {
                    return;
                }
            }
        });
        Ok(Self(handle))
    }
}

impl Drop for SignalThread {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A qemu command, with its ends of the console and the line.
struct QemuCommand {
    command: Command,
    sockets: [OwnedFd; 2],
}

/// A running qemu. Dropping it kills it.
struct Qemu {
    child: Child,
    /// Error output of qemu itself.
    stderr: fs::File,
}

impl Qemu {
    fn start(start: QemuCommand) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        let QemuCommand {
            mut command,
            sockets,
        } = start;
        let stderr = tempfile::tempfile().context("cannot create a temporary file")?;
        let shared = stderr.try_clone().context("cannot share a file")?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(shared)
            // Ctrl-C in a terminal is meant for this process, which passes it on to the guest.
            .process_group(0)
            .spawn()
            .map_err(|error| cannot_run(&command, error))?;
        // From now on, the sockets close when qemu exits.
        drop(sockets);
        Ok(Self { child, stderr })
    }

    /// Waits for qemu to exit, and kills it if it does not.
    fn wait(&mut self, patience: Duration) -> anyhow::Result<()> {
        const PAUSE: Duration = Duration::from_millis(10);
        let start = Instant::now();
        while start.elapsed() < patience {
            if self
                .child
                .try_wait()
                .context("cannot wait for qemu")?
                .is_some()
            {
                return Ok(());
            }
            thread::sleep(PAUSE);
        }
        bail!("the guest's plan is done, but it does not power off")
    }

    /// The error message of qemu itself, if it exited with an error.
    fn why(&mut self) -> Option<anyhow::Error> {
        let status = self.child.try_wait().ok().flatten()?;
        let mut said = String::new();
        self.stderr.rewind().ok()?;
        self.stderr.read_to_string(&mut said).ok()?;
        let last = said.trim_end().lines().next_back()?;
        (!status.success()).then(|| anyhow!("qemu failed ({status}): {last}"))
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Ignores the error if qemu has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
