//! Faults, and how each one is repaired.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;

use anyhow::Context as _;
use fastrand::Rng;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::bed::Etcd;
use tests::{Node, PATIENCE, wait_for};

use super::maps::{FullMap, flood_flows};
use super::process::{ProcessLimit, SlowedProcess};
use super::world::World;

/// Size of a node's state folder in bytes.
const DISK: u64 = 1 << 20;
/// How far a clock jumps, in seconds.
const JUMPS: [i64; 4] = [-86_400, -600, 600, 86_400];

/// A kind of fault.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The agent is killed.
    AgentDies,
    /// The agent hangs.
    AgentStalls,
    /// The identity store dies.
    StoreDies,
    /// The identity store accepts connections but answers nothing.
    StoreStalls,
    /// The identity store is slow to answer.
    StoreSlow,
    /// The agent's state folder is full.
    DiskFull,
    /// The agent cannot open any more files.
    OutOfFiles,
    /// The agent cannot allocate more memory: it continues with what it has, or exits.
    OutOfMemory,
    /// Another process removes an endpoint's device.
    DeviceGone,
    /// The endpoint map is full.
    EndpointsFull,
    /// The address map is full.
    IpcacheFull,
    /// The policy map is full.
    PolicyFull,
    /// The flow maps are full, and the previous flows are lost.
    FlowsFull,
    /// The agent's wall clock jumps.
    ClockJumps,
}

impl Fault {
    pub(super) const ALL: [Self; 14] = [
        Self::AgentDies,
        Self::AgentStalls,
        Self::StoreDies,
        Self::StoreStalls,
        Self::StoreSlow,
        Self::DiskFull,
        Self::OutOfFiles,
        Self::OutOfMemory,
        Self::DeviceGone,
        Self::EndpointsFull,
        Self::IpcacheFull,
        Self::PolicyFull,
        Self::FlowsFull,
        Self::ClockJumps,
    ];

    /// Injects the fault at a node, given by its index from 0.
    pub(super) fn begin<'a: 'f, 'f>(
        self,
        world: &mut World<'a>,
        at: usize,
        store: &'f mut Etcd,
        disk: &'f SmallDisk,
        random: &mut Rng,
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
            Self::StoreSlow => Broken::Slowed(SlowedProcess::slow(store.pid()?)),
            Self::DiskFull => {
                disk.fill()?;
                Broken::Disk(disk)
            }
            Self::OutOfFiles => Broken::Files(ProcessLimit::of_files(node.agent_pid()?)?),
            Self::OutOfMemory => Broken::Memory(ProcessLimit::of_memory(node.agent_pid()?)?, node),
            Self::DeviceGone => {
                world.remove_a_device(at)?;
                Broken::Nothing
            }
            Self::EndpointsFull => Broken::Map(FullMap::endpoints(node)?),
            Self::IpcacheFull => Broken::Map(FullMap::ipcache(node)?),
            Self::PolicyFull => Broken::Map(FullMap::policy(node)?),
            Self::FlowsFull => {
                flood_flows(node)?;
                Broken::Nothing
            }
            Self::ClockJumps => {
                let seconds = JUMPS[random.usize(..JUMPS.len())];
                println!("  by {seconds} s");
                node.shift_clock(seconds)?;
                Broken::Clock(node)
            }
        })
    }
}

/// Something broken, until it is repaired.
pub(super) enum Broken<'a> {
    Agent(&'a Node),
    Stalled(Pid),
    Store(&'a mut Etcd),
    Slowed(SlowedProcess),
    Disk(&'a SmallDisk),
    Files(ProcessLimit),
    Memory(ProcessLimit, &'a Node),
    Map(FullMap),
    Clock(&'a Node),
    Nothing,
}

impl Broken<'_> {
    fn stall(pid: Pid) -> anyhow::Result<Self> {
        kill(pid, Signal::SIGSTOP)?;
        Ok(Self::Stalled(pid))
    }

    /// Repairs the fault.
    pub(super) fn end(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Agent(node) => node.take_over(None),
            Self::Stalled(pid) => Ok(kill(*pid, Signal::SIGCONT)?),
            Self::Store(store) => store.restart(),
            Self::Slowed(process) => process.release(),
            Self::Disk(disk) => disk.clear(),
            Self::Files(limit) => limit.lift(),
            Self::Memory(limit, node) => {
                let lifted = limit.lift();
                if is_up(node)? {
                    lifted
                } else {
                    println!("  the agent has ended");
                    node.take_over(None)
                }
            }
            Self::Map(map) => map.empty(),
            Self::Clock(node) => node.shift_clock(0),
            Self::Nothing => Ok(()),
        }
    }
}

/// Whether an agent that may have exited still answers.
fn is_up(node: &Node) -> anyhow::Result<bool> {
    wait_for("the agent to answer or to have ended", PATIENCE, || {
        if node.check_agent().is_err() {
            return Ok(Some(false));
        }
        node.listing("endpoint list")?;
        Ok(Some(true))
    })
}

/// An agent's state folder on its own file system, which is unmounted on drop.
pub(super) struct SmallDisk {
    folder: PathBuf,
}

impl SmallDisk {
    /// Must be called before the agent starts.
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
