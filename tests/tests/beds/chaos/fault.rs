//! What goes wrong, and how it ends.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::Node;
use tests::bed::Etcd;
use tests::process::run;

use super::world::World;

/// Bytes of a node's state folder.
const DISK: u64 = 1 << 20;

/// A kind of fault.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The agent is killed.
    AgentDies,
    /// The agent stands still.
    AgentStalls,
    /// The store of identities dies.
    StoreDies,
    /// The store of identities takes connections and answers nothing.
    StoreStalls,
    /// There is no room in the agent's state folder.
    DiskFull,
    /// The agent can open nothing more.
    OutOfFiles,
    /// Somebody removes an endpoint's device.
    DeviceGone,
}

impl Fault {
    pub(super) const ALL: [Self; 7] = [
        Self::AgentDies,
        Self::AgentStalls,
        Self::StoreDies,
        Self::StoreStalls,
        Self::DiskFull,
        Self::OutOfFiles,
        Self::DeviceGone,
    ];

    /// Has it happen to a node, the first of which is 0.
    pub(super) fn begin<'a: 'f, 'f>(
        self,
        world: &mut World<'a>,
        at: usize,
        store: &'f mut Etcd,
        disk: &'f SmallDisk,
    ) -> anyhow::Result<Broken<'f>> {
        let node = world.node(at);
        Ok(match self {
            Self::AgentDies => {
                node.kill_agent(Signal::SIGKILL)?;
                Broken::Agent(node)
            }
            Self::AgentStalls => Broken::stall(node.agent_pid()?)?,
            Self::StoreDies => {
                store.kill()?;
                Broken::Store(store)
            }
            Self::StoreStalls => Broken::stall(store.pid()?)?,
            Self::DiskFull => {
                disk.fill()?;
                Broken::Disk(disk)
            }
            Self::OutOfFiles => Broken::Files(FileLimit::reach(node.agent_pid()?)?),
            Self::DeviceGone => {
                world.remove_a_device(at)?;
                Broken::Nothing
            }
        })
    }
}

/// What is broken, until it is mended.
pub(super) enum Broken<'a> {
    Agent(&'a Node),
    Stalled(Pid),
    Store(&'a mut Etcd),
    Disk(&'a SmallDisk),
    Files(FileLimit),
    Nothing,
}

impl Broken<'_> {
    fn stall(pid: Pid) -> anyhow::Result<Self> {
        kill(pid, Signal::SIGSTOP)?;
        Ok(Self::Stalled(pid))
    }

    /// Mends it.
    pub(super) fn end(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Agent(node) => node.take_over(None),
            Self::Stalled(pid) => Ok(kill(*pid, Signal::SIGCONT)?),
            Self::Store(store) => store.restart(),
            Self::Disk(disk) => disk.clear(),
            Self::Files(limit) => limit.lift(),
            Self::Nothing => Ok(()),
        }
    }
}

/// An agent's state folder in a file system of its own, which goes with this value.
pub(super) struct SmallDisk {
    folder: PathBuf,
}

impl SmallDisk {
    /// Of an agent that has not been started.
    pub(super) fn of(node: &Node) -> anyhow::Result<Self> {
        let folder = node.runtime_dir().join("state");
        fs::create_dir_all(&folder)?;
        let options = format!("size={DISK},mode=0700");
        mount(
            Some("none"),
            &folder,
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .with_context(|| format!("cannot mount {}", folder.display()))?;
        Ok(Self { folder })
    }

    fn filler(&self) -> PathBuf {
        self.folder.join("filler")
    }

    fn fill(&self) -> anyhow::Result<()> {
        let mut file = File::create(self.filler())?;
        loop {
            match file.write_all(&[0; 512]) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn clear(&self) -> anyhow::Result<()> {
        Ok(fs::remove_file(self.filler())?)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount2(&self.folder, MntFlags::MNT_DETACH);
    }
}

/// How many files a process may have open.
pub(super) struct FileLimit {
    pid: Pid,
    before: String,
}

impl FileLimit {
    /// Lets it open nothing more.
    fn reach(pid: Pid) -> anyhow::Result<Self> {
        let words = format!("--pid {pid} --nofile --output SOFT --noheadings");
        let before = prlimit(&words)?.trim().to_owned();
        let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
        prlimit(&format!("--pid {pid} --nofile={open}:"))?;
        Ok(Self { pid, before })
    }

    fn lift(&self) -> anyhow::Result<()> {
        prlimit(&format!("--pid {} --nofile={}:", self.pid, self.before)).map(drop)
    }
}

fn prlimit(words: &str) -> anyhow::Result<String> {
    run(Command::new("prlimit").args(words.split(' ')))?.success()
}
