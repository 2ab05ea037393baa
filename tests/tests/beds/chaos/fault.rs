//! What goes wrong, and how it ends.

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

/// Bytes of a node's state folder.
const DISK: u64 = 1 << 20;
/// How far a clock jumps, seconds.
const JUMPS: [i64; 4] = [-86_400, -600, 600, 86_400];

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
    /// The store of identities takes its time for each answer.
    StoreSlow,
    /// There is no room in the agent's state folder.
    DiskFull,
    /// The agent can open nothing more.
    OutOfFiles,
    /// The agent gets no more memory: it goes on with what it has, or ends.
    OutOfMemory,
    /// Somebody removes an endpoint's device.
    DeviceGone,
    /// There is no room for endpoints in their map.
    EndpointsFull,
    /// There is no room for addresses in their map.
    IpcacheFull,
    /// There is no room for policy in its map.
    PolicyFull,
    /// There is no room for flows in their maps: those that there were are forgotten.
    FlowsFull,
    /// The agent's clock of the day jumps.
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

    /// Has it happen to a node, the first of which is 0.
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

/// What is broken, until it is mended.
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

    /// Mends it.
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

/// Whether an agent that may have ended answers.
fn is_up(node: &Node) -> anyhow::Result<bool> {
    wait_for("the agent to answer or to have ended", PATIENCE, || {
        if node.check_agent().is_err() {
            return Ok(Some(false));
        }
        node.listing("endpoint list")?;
        Ok(Some(true))
    })
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
